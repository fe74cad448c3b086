"""Matmuls of rows sorted by expert, and the sorting around them."""

from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.grouped_matmul.permutation import (
  Permutation,
  combine,
  dispatch,
  sort_rows,
)

__all__ = ['Permutation', 'combine', 'dispatch', 'grouped_matmul', 'sort_rows']
