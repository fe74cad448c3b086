"""MXFP4: 4-bit floats (E2M1) in blocks of 32 that share a power of two.

A code's low three bits select 0, 0.5, 1, 1.5, 2, 3, 4 or 6, bit 3 is the sign;
two codes share a byte, the even input in its low half. A block's scale byte s
stands for 2^(s - 127).
"""

from __future__ import annotations

import numpy as np

BLOCK = 32
_BIAS = 127
_NOT_A_NUMBER = 255
_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_CODES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
# Both values of every byte, so that unpacking is one look-up.
_BYTES = np.stack(
  [_CODES[np.arange(256) & 15], _CODES[np.arange(256) >> 4]], axis=-1
)
# A magnitude above edge i has at least code i + 1. A midpoint goes to the even
# code, so the edges below even codes lie one float below their midpoint.
_MIDPOINTS = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2
_EDGES = np.where(
  np.arange(7) % 2, np.nextafter(_MIDPOINTS, np.float32(0)), _MIDPOINTS
)


def unpack(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
  """The values float32 [..., n] of packed uint8 [..., n / 2].

      value = magnitude(code) * sign * 2^(scale - 127)

  Args:
    packed: two codes a byte.
    scale: uint8 [..., n / 32].

  Raises:
    ValueError: shapes that do not fit, or a scale byte of 255, which is NaN.
  """
  if packed.shape[-1] * 2 != scale.shape[-1] * BLOCK:
    raise ValueError(
      f'{packed.shape} packed bytes need one scale for each 16 of them in the '
      f'last axis; the scales are {scale.shape}.'
    )
  if np.any(scale == _NOT_A_NUMBER):
    raise ValueError('a block scale is 255, which stands for NaN.')
  blocks = _BYTES[packed].reshape(*scale.shape, BLOCK)
  exponent = scale.astype(np.int32)[..., None] - _BIAS
  return np.ldexp(blocks, exponent).reshape(*packed.shape[:-1], -1)


def pack(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Packed codes uint8 [..., n / 2] and scales uint8 [..., n / 32].

  A block's scale is the smallest power of two that puts its largest magnitude
  at 6 or below, so nothing saturates. Each value goes to the nearest code, a
  midpoint to the even one; the sign of zero is kept. Values that are MXFP4
  already come back exactly, though a block without a 4 or a 6 may come back
  under a smaller scale. A block of zeros has scale 2^0.

  Args:
    values: [..., n], n a multiple of 32; any float dtype.

  Raises:
    ValueError: n is not a multiple of 32, or a value is not finite.
  """
  if values.shape[-1] % BLOCK:
    raise ValueError(
      f'{values.shape[-1]} inputs are not a multiple of {BLOCK}, the block of '
      'one scale; store these weights unpacked.'
    )
  values = np.asarray(values, np.float32)
  if not np.all(np.isfinite(values)):
    raise ValueError('a weight is not finite and has no 4-bit code.')
  blocks = values.reshape(*values.shape[:-1], -1, BLOCK)
  scale = _scales(np.abs(blocks).max(axis=-1))
  exponent = scale.astype(np.int32)[..., None] - _BIAS
  magnitude = np.ldexp(np.abs(blocks), -exponent)
  codes = np.searchsorted(_EDGES, magnitude).astype(np.uint8)
  codes |= np.signbit(blocks).astype(np.uint8) << 3
  codes = codes.reshape(values.shape)
  return codes[..., ::2] | codes[..., 1::2] << 4, scale


def _scales(peak: np.ndarray) -> np.ndarray:
  """The scale byte of blocks whose largest magnitude is `peak`."""
  mantissa, exponent = np.frexp(peak)
  # peak = mantissa * 2^exponent with mantissa in [0.5, 1), and 6 = 0.75 * 2^3.
  exponent = exponent - 3 + (mantissa > 0.75)
  byte = np.clip(exponent + _BIAS, 0, _NOT_A_NUMBER - 1)
  return np.where(peak > 0, byte, _BIAS).astype(np.uint8)
