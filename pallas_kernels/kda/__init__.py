"""Kimi Delta Attention (arXiv 2510.26692) with the bounded gate of Kimi K3."""

from pallas_kernels.kda.api import kda as kda
from pallas_kernels.kda.decode import decode_step as decode_step

__all__ = ['decode_step', 'kda']
