"""Kimi Delta Attention (arXiv 2510.26692) with the bounded gate of Kimi K3."""

from pallas_kernels.kda.api import affine_summary as affine_summary
from pallas_kernels.kda.api import kda as kda
from pallas_kernels.kda.decode import decode_step as decode_step
from pallas_kernels.kda.gated_norm import gated_norm as gated_norm
from pallas_kernels.kda.short_conv import (
  short_convolution as short_convolution,
)
from pallas_kernels.kda.short_conv import (
  short_convolutions as short_convolutions,
)

__all__ = [
  'affine_summary',
  'decode_step',
  'gated_norm',
  'kda',
  'short_convolution',
  'short_convolutions',
]
