"""The depth mix as its equation reads, in the widest dtype of its inputs.

Gradients come from automatic differentiation. This is the oracle: give it
float64 inputs for float64 results.

Suffixes leave out the free token axes `...`: m residual sources, d width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def mix(sources_md, query_d, gain_d, *, partial_d, mask_m, eps):
  """The mix and its weights; see `api.mix`."""
  dtype = sources_md.dtype
  if partial_d is not None:
    sources_md = jnp.concatenate([sources_md, partial_d[None].astype(dtype)])
  wide = jnp.promote_types(jnp.promote_types(dtype, query_d.dtype), jnp.float32)
  x_md = sources_md.astype(wide)
  if mask_m is not None:
    mask_m = mask_m.reshape(mask_m.shape + (1,) * (x_md.ndim - 2))
    x_md = jnp.where(mask_m[..., None], x_md, 0)
  mean_square_m = jnp.mean(jnp.square(x_md), axis=-1, keepdims=True)
  key_md = x_md * jax.lax.rsqrt(mean_square_m + eps)
  logits_m = jnp.sum(query_d * gain_d * key_md, axis=-1)
  weights_m = softmax(logits_m, mask_m)
  out_d = jnp.sum(weights_m[..., None] * x_md, axis=0)
  return out_d.astype(dtype), weights_m


def softmax(logits_m, mask_m=None):
  """Softmax over the first axis; masked entries, even all of them, give 0."""
  if mask_m is None:
    return jax.nn.softmax(logits_m, axis=0)
  lowest = jnp.finfo(logits_m.dtype).min
  weights_m = jax.nn.softmax(jnp.where(mask_m, logits_m, lowest), axis=0)
  return jnp.where(mask_m, weights_m, 0)
