"""Kimi Delta Attention as its recurrence, one token after the other.

Legend: b batch, t time, h value heads, k key width, v value width.

Slow and exact: it holds for every gate, bounded or not, and its gradients are
those of automatic differentiation. Every other implementation is tested
against it in float64.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kda import inputs as kda_inputs

_HIGHEST = lax.Precision.HIGHEST
# Tokens between two states that automatic differentiation keeps.
_CHECKPOINT = 64


def _step(scale: float, state_bhkv, token):
  q_bhk, k_bhk, v_bhv, decay_bhk, beta_bh, valid_b, reset_b = token
  if reset_b is not None:
    state_bhkv = jnp.where(reset_b[:, None, None, None], 0, state_bhkv)
  state_bhkv = jnp.exp(decay_bhk)[..., None] * state_bhkv
  predicted_bhv = jnp.einsum(
    'bhk,bhkv->bhv', k_bhk, state_bhkv, precision=_HIGHEST
  )
  update_bhv = beta_bh[..., None] * (v_bhv - predicted_bhv)
  state_bhkv += k_bhk[..., None] * update_bhv[..., None, :]
  out_bhv = scale * jnp.einsum(
    'bhk,bhkv->bhv', q_bhk, state_bhkv, precision=_HIGHEST
  )
  if valid_b is not None:
    out_bhv = jnp.where(valid_b[:, None, None], out_bhv, 0)
  return state_bhkv, out_bhv


def recurrence(
  raw: kda_inputs.Raw, initial_state, segment_ids, settings
) -> tuple[jax.Array, jax.Array]:
  """Output [B, T, HV, V] and final state [B, HV, K, V] of the recurrence.

    S~_t = Diag(exp(g_t)) S_{t-1}
    S_t = S~_t + beta_t k_t (v_t - k_t^T S~_t)^T
    o_t = scale * S_t^T q_t

  Kimi Linear (arXiv 2510.26692), equation 1 with per-channel decay. Arithmetic
  is float32, or float64 for float64 inputs. See `kda` for shapes and packing.
  """
  valid = reset = None
  if segment_ids is not None:
    valid, _, reset = kda_inputs.documents(segment_ids)
  x = kda_inputs.activate(raw, valid, settings)
  tokens = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (*x, valid, reset))
  length = raw.q.shape[1]
  blocks, rest = divmod(length, _CHECKPOINT)
  scan = lambda state, xs: lax.scan(
    lambda s, token: _step(settings.scale, s, token), state, xs
  )
  head = jax.tree.map(
    lambda a: a[: length - rest].reshape(blocks, _CHECKPOINT, *a.shape[1:]),
    tokens,
  )
  state, out = lax.scan(jax.checkpoint(scan), initial_state, head)
  out = out.reshape(blocks * _CHECKPOINT, *out.shape[2:])
  if rest:
    state, tail = scan(
      state, jax.tree.map(lambda a: a[length - rest :], tokens)
    )
    out = jnp.concatenate([out, tail])
  return jnp.moveaxis(out, 0, 1).astype(raw.v.dtype), state
