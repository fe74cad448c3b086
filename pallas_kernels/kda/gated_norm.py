"""The gated RMSNorm behind Kimi Delta Attention.

Legend: b batch, t time, h heads, v value width, n rows.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.kda import mosaic_gpu, mosaic_gpu_norm

_FEWEST = 4096  # rows; a launch costs more than XLA needs for fewer


def gated_norm(
  x_bthv: jax.Array,
  gate_bthv: jax.Array,
  gain_v: jax.Array,
  *,
  eps: float,
  implementation: str | None = None,
) -> jax.Array:
  """sigmoid(gate) * gain * x * (mean(x^2) + eps)^-1/2, the mean over V.

  Source: Kimi Linear (arXiv 2510.26692), section 3. Differentiable in x, gate
  and gain.

  Args:
    x_bthv: [B, T, H, V].
    gate_bthv: [B, T, H, V], logits.
    gain_v: [V].
    eps: added to the mean square.
    implementation: 'mosaic_gpu', 'xla', or None for the best on this device.

  Returns:
    [B, T, H, V] in the gate's dtype, computed in float32.

  Raises:
    NotImplementedError: `implementation` cannot run these arguments here.
  """
  candidates = [('mosaic_gpu', refusal(x_bthv, gate_bthv)), ('xla', None)]
  name = dispatch.choose('gated_norm', implementation, candidates)
  if name == 'xla':
    return _plain(x_bthv, gate_bthv, gain_v, eps)
  rows = lambda x: x.reshape(-1, x.shape[-1])
  y_nv = _normed(eps, rows(x_bthv), rows(gate_bthv), gain_v)
  return y_nv.reshape(x_bthv.shape)


def refusal(x_bthv, gate_bthv, *, device_kind=None) -> str | None:
  """Why the Hopper kernel cannot run the arguments, or None."""
  reason = mosaic_gpu.device_refusal(device_kind)
  if reason is not None:
    return reason
  for name, array in (('x', x_bthv), ('gate', gate_bthv)):
    if array.dtype != jnp.bfloat16:
      return f'the Hopper gated norm takes bfloat16, {name} is {array.dtype}'
  width = x_bthv.shape[-1]
  if width not in mosaic_gpu_norm.WIDTHS:
    return (
      f'the Hopper gated norm takes V {mosaic_gpu_norm.WIDTHS}, not {width}'
    )
  rows = x_bthv.size // width
  if rows < _FEWEST:
    return f'{rows} rows are too few for the Hopper gated norm'
  return None


def _plain(x_bthv, gate_bthv, gain_v, eps: float) -> jax.Array:
  wide = jnp.promote_types(gate_bthv.dtype, jnp.float32)
  x_bthv = x_bthv.astype(wide)
  scale = jax.lax.rsqrt(jnp.mean(x_bthv * x_bthv, -1, keepdims=True) + eps)
  normed = x_bthv * scale * gain_v.astype(wide)
  gated = normed * jax.nn.sigmoid(gate_bthv.astype(wide))
  return gated.astype(gate_bthv.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normed(eps, x_nv, gate_nv, gain_v):
  return mosaic_gpu_norm.forward(x_nv, gate_nv, gain_v, eps)


def _normed_forward(eps, x_nv, gate_nv, gain_v):
  y_nv = mosaic_gpu_norm.forward(x_nv, gate_nv, gain_v, eps)
  return y_nv, (x_nv, gate_nv, gain_v)


def _normed_backward(eps, residuals, d_y_nv):
  x_nv, gate_nv, gain_v = residuals
  *d_rows, d_gain = mosaic_gpu_norm.backward(x_nv, gate_nv, gain_v, d_y_nv, eps)
  return *d_rows, d_gain.astype(gain_v.dtype)


_normed.defvjp(_normed_forward, _normed_backward)
