"""The short causal convolutions before Kimi Delta Attention.

Legend: b batch, t time, s inputs side by side, h heads, k width per head, w
taps, c channels.
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
  (y_bthk,) = short_convolutions(
    x_bthk[:, :, None],
    taps_hkw[None],
    segment_ids,
    implementation=implementation,
  )
  return y_bthk


def short_convolutions(
  x_btshk: jax.Array,
  taps_shkw: jax.Array,
  segment_ids: jax.Array | None = None,
  *,
  implementation: str | None = None,
) -> tuple[jax.Array, ...]:
  """`short_convolution` of S inputs that lie side by side, in one launch.

  A product that makes queries, keys and values at once leaves them so, and
  takes their gradient so.

  Args:
    x_btshk: [B, T, S, H, K].
    taps_shkw: [S, H, K, W].
    segment_ids, implementation: as for `short_convolution`.

  Returns:
    S arrays [B, T, H, K].

  Raises:
    As `short_convolution`.
  """
  candidates = [('mosaic_gpu', refusal(x_btshk)), ('xla', None)]
  name = dispatch.choose('short_conv', implementation, candidates)
  parts = x_btshk.shape[2]
  if name == 'xla':
    return tuple(
      _plain(x_btshk[:, :, i], taps_shkw[i], segment_ids) for i in range(parts)
    )
  x_btsc = x_btshk.reshape(*x_btshk.shape[:3], -1)
  taps_scw = taps_shkw.reshape(parts, -1, taps_shkw.shape[3])
  shape = (*x_btshk.shape[:2], *x_btshk.shape[3:])
  ys = _convolved(x_btsc, taps_scw, segment_ids)
  return tuple(y.reshape(shape) for y in ys)


def refusal(x_btshk, *, device_kind=None) -> str | None:
  """Why the Hopper kernel cannot run the arguments, or None."""
  reason = mosaic_gpu.device_refusal(device_kind)
  if reason is not None:
    return reason
  if x_btshk.dtype != jnp.bfloat16:
    return f'the Hopper convolution takes bfloat16, x is {x_btshk.dtype}'
  channels = x_btshk.shape[3] * x_btshk.shape[4]
  if channels % mosaic_gpu_conv.CHANNELS:
    return (
      'the Hopper convolution takes channels by '
      f'{mosaic_gpu_conv.CHANNELS}, not {channels}'
    )
  if x_btshk.shape[1] < _SHORTEST:
    return f'{x_btshk.shape[1]} tokens are too few for the Hopper convolution'
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
def _convolved(x_btsc, taps_scw, segment_ids):
  return mosaic_gpu_conv.forward(x_btsc, taps_scw, segment_ids)


def _convolved_forward(x_btsc, taps_scw, segment_ids):
  ys = mosaic_gpu_conv.forward(x_btsc, taps_scw, segment_ids)
  return ys, (x_btsc, taps_scw, segment_ids)


def _convolved_backward(residuals, d_ys):
  x_btsc, taps_scw, segment_ids = residuals
  d_x, d_taps = mosaic_gpu_conv.backward(x_btsc, taps_scw, segment_ids, d_ys)
  return d_x, d_taps.astype(taps_scw.dtype), None


_convolved.defvjp(_convolved_forward, _convolved_backward)
