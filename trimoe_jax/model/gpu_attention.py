"""Causal attention by libraries for NVIDIA GPUs: tokamax, and cuDNN's in JAX.

Both are flash attention for Hopper and take keys wider than values. tokamax
returns float32 and takes the first key of every row, which isolates documents.
cuDNN rounds its output to the queries' dtype, so it runs only where it is asked
for, and JAX's public interface gives it neither documents nor narrower values.

Suffixes: b batch, t time, h heads, k key width, v value width.
"""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch


def _device_refusal(q_bthk, v_bthv) -> str | None:
  if dispatch.device_kind() != 'gpu':
    return 'it is for GPUs'
  if q_bthk.dtype != jnp.bfloat16 or v_bthv.dtype != jnp.bfloat16:
    return f'it is for bfloat16, not {q_bthk.dtype}'
  return None


def tokamax_refusal(
  q_bthk: jax.Array, v_bthv: jax.Array, by_name: bool
) -> str | None:
  """Why tokamax cannot run here, or None; `by_name` if it was asked for."""
  reason = _device_refusal(q_bthk, v_bthv)
  if reason is None and not by_name:
    return 'it is not measured yet; ask for it by its name'
  if reason is None and importlib.util.find_spec('tokamax') is None:
    return 'tokamax is not installed; pip install tokamax'
  return reason


def cudnn_refusal(
  q_bthk: jax.Array, v_bthv: jax.Array, segment_ids, by_name: bool
) -> str | None:
  """Why cuDNN cannot run here, or None; `by_name` if it was asked for."""
  reason = _device_refusal(q_bthk, v_bthv)
  if reason is not None:
    return reason
  if segment_ids is not None:
    return 'JAX gives it no packed documents'
  if not by_name:
    return (
      'it rounds its output to bfloat16; ask for it by its name where that '
      'is good enough'
    )
  if max(q_bthk.shape[-1], v_bthv.shape[-1]) > 256:
    return 'it takes heads of at most 256'
  return None


def tokamax(
  q_bthk: jax.Array,
  k_bthk: jax.Array,
  v_bthv: jax.Array,
  start_bt: jax.Array | None,
  *,
  scale: float,
) -> jax.Array:
  """softmax(scale q k^T) v over keys from `start_bt` up to each row's own.

  Args:
    q_bthk, k_bthk, v_bthv: [B, T, H, K], the same, and [B, T, H, V], bfloat16.
    start_bt: int32 [B, T], at most the row itself; None for zeros.
    scale: multiplies the scores.

  Returns:
    [B, T, H, V] float32.
  """
  from tokamax._src.ops.attention.base import Mask  # no public name
  from tokamax.ops.gpu import PallasMosaicFlashAttention

  # The output has the queries' dtype; the matmuls are told theirs.
  precision = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
  start_bht = None if start_bt is None else start_bt[:, None]
  return PallasMosaicFlashAttention()(
    q_bthk.astype(jnp.float32),
    k_bthk,
    v_bthv,
    precision=(precision, precision),
    logits_scale=scale,
    mask=Mask(is_causal=True, k_start=start_bht),
  )


def cudnn(
  q_bthk: jax.Array, k_bthk: jax.Array, v_bthv: jax.Array, *, scale: float
) -> jax.Array:
  """softmax(scale q k^T) v over the row's own key and those before it.

  Returns:
    [B, T, H, V] float32 with the precision of bfloat16.
  """
  value_dim = v_bthv.shape[-1]
  missing = q_bthk.shape[-1] - value_dim
  # JAX's check wants values as wide as keys.
  v_bthv = jnp.pad(v_bthv, ((0, 0), (0, 0), (0, 0), (0, missing)))
  out_bthv = jax.nn.dot_product_attention(
    q_bthk,
    k_bthk,
    v_bthv,
    scale=scale,
    is_causal=True,
    implementation='cudnn',
  )
  return out_bthv[..., :value_dim].astype(jnp.float32)
