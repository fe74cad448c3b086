"""Sequences cut into blocks, and the dtype in which blocks add up.

Suffixes: n blocks, b batch, h heads, t tokens, d a width.
"""

from __future__ import annotations

import jax.numpy as jnp


def wide(x):
  """The dtype of sums over `x`: float32, or wider."""
  return jnp.promote_types(x.dtype, jnp.float32)


def split(x_bthd, count, block):
  """[B, T, H, D] -> [N, B, H, T / N, D], padded to whole blocks."""
  batch, time, heads, width = x_bthd.shape
  missing = count * block - time
  x_bthd = jnp.pad(x_bthd, ((0, 0), (0, missing), (0, 0), (0, 0)))
  x = x_bthd.reshape(batch, count, block, heads, width)
  return x.transpose(1, 0, 3, 2, 4)


def join(x_nbhtd, time):
  """The inverse of `split`."""
  count, batch, heads, block, width = x_nbhtd.shape
  x = x_nbhtd.transpose(1, 0, 3, 2, 4)
  return x.reshape(batch, count * block, heads, width)[:, :time]
