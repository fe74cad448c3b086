"""Attention residuals: a softmax over depth instead of a residual sum."""

from pallas_kernels.attention_residual.api import merge, mix, phase_one

__all__ = ['merge', 'mix', 'phase_one']
