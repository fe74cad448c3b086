"""The short causal convolution before Kimi Delta Attention.

Legend: b batch, t time, h heads, k width per head, w taps, c channels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.kda import mosaic_gpu, mosaic_gpu_conv

_SHORTEST = 64  # tokens; a launch costs more than XLA needs for fewer


def short_convolution(
  x_bthk: jax.Array,
  taps_hkw: jax.Array,
  segment_ids: jax.Array | None = None,
  *,
  implementation: str | None = None,
) -> jax.Array:
  """SiLU(sum_j taps[., j] x[t - W + 1 + j]), a causal depthwise convolution.

  Source: Kimi Linear (arXiv 2510.26692), section 3. Differentiable in x and
  the taps.

  Args:
    x_bthk: [B, T, H, K]; rows before the first count as zeros.
    taps_hkw: [H, K, W], the last one for the token itself.
    segment_ids: [B, T] int32, 0 for padding, or None. A tap never reaches
      into another document; padding reads nothing and yields zeros.
    implementation: 'mosaic_gpu', 'xla', or None for the best on this device.

  Returns:
    [B, T, H, K] in x's dtype, accumulated in float32.

  Raises:
    NotImplementedError: `implementation` cannot run these arguments here.
  """
  candidates = [('mosaic_gpu', refusal(x_bthk)), ('xla', None)]
  name = dispatch.choose('short_conv', implementation, candidates)
  if name == 'xla':
    return _plain(x_bthk, taps_hkw, segment_ids)
  flat_btc = x_bthk.reshape(*x_bthk.shape[:2], -1)
  taps_cw = taps_hkw.reshape(-1, taps_hkw.shape[2])
  return _convolved(flat_btc, taps_cw, segment_ids).reshape(x_bthk.shape)


def refusal(x_bthk, *, device_kind=None) -> str | None:
  """Why the Hopper kernel cannot run the arguments, or None."""
  reason = mosaic_gpu.device_refusal(device_kind)
  if reason is not None:
    return reason
  if x_bthk.dtype != jnp.bfloat16:
    return f'the Hopper convolution takes bfloat16, x is {x_bthk.dtype}'
  channels = x_bthk.shape[2] * x_bthk.shape[3]
  if channels % 8:
    return f'the Hopper convolution takes channels by 8, not {channels}'
  if x_bthk.shape[1] < _SHORTEST:
    return f'{x_bthk.shape[1]} tokens are too few for the Hopper convolution'
  return None


def _plain(x_bthk, taps_hkw, segment_ids) -> jax.Array:
  """The convolution tap by tap."""
  time, width = x_bthk.shape[1], taps_hkw.shape[2]
  wide = jnp.promote_types(x_bthk.dtype, jnp.float32)
  if segment_ids is not None:
    # By selection, so that a NaN in padding reaches nothing.
    valid_bt = segment_ids != 0
    x_bthk = jnp.where(valid_bt[..., None, None], x_bthk, 0)
  before = lambda x: ((0, 0), (width - 1, 0)) + ((0, 0),) * (x.ndim - 2)
  padded = jnp.pad(x_bthk, before(x_bthk))
  if segment_ids is not None:
    padded_ids = jnp.pad(segment_ids, before(segment_ids))
  total = jnp.zeros(x_bthk.shape, wide)
  for j in range(width):
    tap = padded[:, j : j + time].astype(wide)
    if segment_ids is not None:
      same_bt = padded_ids[:, j : j + time] == segment_ids
      tap = jnp.where(same_bt[..., None, None], tap, 0)
    total += tap * taps_hkw[..., j].astype(wide)
  if segment_ids is not None:
    total = jnp.where(valid_bt[..., None, None], total, 0)
  return jax.nn.silu(total).astype(x_bthk.dtype)


@jax.custom_vjp
def _convolved(x_btc, taps_cw, segment_ids):
  return mosaic_gpu_conv.forward(x_btc, taps_cw, segment_ids)


def _convolved_forward(x_btc, taps_cw, segment_ids):
  y_btc = mosaic_gpu_conv.forward(x_btc, taps_cw, segment_ids)
  return y_btc, (x_btc, taps_cw, segment_ids)


def _convolved_backward(residuals, d_y_btc):
  x_btc, taps_cw, segment_ids = residuals
  d_x, d_taps = mosaic_gpu_conv.backward(x_btc, taps_cw, segment_ids, d_y_btc)
  return d_x, d_taps.astype(taps_cw.dtype), None


_convolved.defvjp(_convolved_forward, _convolved_backward)
