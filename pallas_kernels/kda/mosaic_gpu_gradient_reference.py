"""Gradients of the inputs of Kimi Delta Attention by chunks, in plain JAX.

Legend: n chunks, b batch, h value heads, k key width, v value width, c and s
row and column position in the chunk.

What is left of the backward pass once two scans have found, for every chunk,
the state S that enters it, the gradient dS of the state that leaves it and the
gradient dV of its values. In the notation of `xla`, with E = V - (k exp(G)) S
and U = T Diag(beta) E:

  dP = tril(scale dO U^T);  dM = -stril(dV U^T)
  d(q exp(G)) = scale dO S^T;  d(k exp(G)) = -dV S^T
  d(k exp(G_C - G)) = U dS^T;  beta dbeta = rowsum(dV o E) + rowsum(dM o M)

This is the reference of `mosaic_gpu_gradient`, with its interface.

Source: Kimi Linear (arXiv 2510.26692), section 3, differentiated by hand.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda import inputs as kda_inputs
from pallas_kernels.kda import xla

_CHUNK = 64


class States(NamedTuple):
  """What the scans over the chunks leave for the gradients, bfloat16.

  entering: [B, HV, N, V, K], the state before each chunk, transposed.
  inverse: [B, HV, N, 64, 64], T of each chunk.
  d_leaving: [B, HV, N, V, K], gradient of the state after each chunk,
    transposed.
  d_values: [B, T, HV, V], gradient of the values, zero on padding.
  """

  entering: jax.Array
  inverse: jax.Array
  d_leaving: jax.Array
  d_values: jax.Array


def _whole(raw: kda_inputs.Raw, segment_ids) -> xla.Group:
  """All chunks of all rows as one group."""
  batch, length = raw.beta.shape[:2]
  plan = xla.Plan(_CHUNK, -(-length // _CHUNK), 1, 1)
  groups = xla._groups(raw, segment_ids, plan)
  return jax.tree.map(lambda x: x[0, 0], groups)


def _chunked(x, dtype) -> jax.Array:
  """[B, T, HV, V] to [n, b, h, c, v], with zeros in the last chunk."""
  missing = -x.shape[1] % _CHUNK
  x = jnp.pad(x, [(0, 0), (0, missing), (0, 0), (0, 0)])
  return xla._chunks(x.astype(dtype), _CHUNK)


def gradients(
  raw: kda_inputs.Raw,
  segment_ids,
  states: States,
  d_out,
  settings: kda_inputs.Settings,
) -> kda_inputs.Raw:
  """Gradients of the raw inputs and of the gate's parameters.

  Args:
    raw: as for `kda.api.kda`.
    segment_ids: [B, T] int32 or None.
    states: see `States`.
    d_out: [B, T, HV, V], gradient of the output.
    settings: of the call; the chunk is 64 tokens.

  Returns:
    A gradient for every array of `raw`, in its dtype.
  """
  group = _whole(raw, segment_ids)
  x, pull = jax.vjp(
    lambda arrays, weights: xla._activate(
      arrays, weights, group.valid, settings
    ),
    group.arrays,
    raw[5:],
  )
  wide, dtype = x.q.dtype, raw.q.dtype
  first = lambda a: jnp.moveaxis(a, 2, 0).astype(dtype)
  entering_nbhvk, inverse_nbhcs, d_leaving_nbhvk = map(first, states[:3])
  p = xla._prepare(x, group, inverse_nbhcs, settings)
  if group.valid is not None:
    valid = group.valid[:, : d_out.shape[1], None, None]
    d_out = jnp.where(valid, d_out, 0)
  d_out_nbhcv = settings.scale * _chunked(d_out, wide)
  low_out_nbhcv = d_out_nbhcv.astype(dtype)
  d_v_nbhcv = _chunked(states.d_values, dtype)
  dot = lambda terms, a, b: xla._dot(terms, a, b, wide)
  erased = dot('nbhck,nbhvk->nbhcv', p.scan.erase, entering_nbhvk)
  error_nbhcv = x.v - erased
  right = (x.beta[..., None] * error_nbhcv).astype(dtype)
  update_nbhcv = dot('nbhcs,nbhsv->nbhcv', inverse_nbhcs, right).astype(dtype)
  d_alike, d_weights = xla._pair_gradients(
    p, jnp.ones_like(x.beta), (low_out_nbhcv, d_v_nbhcv, update_nbhcv)
  )
  d_read = dot('nbhcv,nbhvk->nbhck', low_out_nbhcv, entering_nbhvk)
  d_erase = -dot('nbhcv,nbhvk->nbhck', d_v_nbhcv, entering_nbhvk)
  d_write = dot('nbhcv,nbhvk->nbhck', update_nbhcv, d_leaving_nbhvk)
  both_nbhvk = entering_nbhvk.astype(wide) * d_leaving_nbhvk.astype(wide)
  through_nbhk = p.tiles.gamma_nbhk * both_nbhvk.sum(-2)
  own_nbhc = (d_out_nbhcv * update_nbhcv.astype(wide)).sum(-1)
  d_q, d_k, d_decay = xla._operand_gradients(
    p, x, d_weights, (d_read, d_erase, d_write, own_nbhc, through_nbhk)
  )
  d_beta = (d_v_nbhcv.astype(wide) * error_nbhcv).sum(-1)
  d_beta += (d_alike * p.alike_nbhcs).sum(-1)
  d_beta = jnp.where(x.beta == 0, 0, d_beta / x.beta)
  d_x = kda_inputs.Activated(d_q, d_k, d_v_nbhcv.astype(wide), d_decay, d_beta)
  d_arrays, d_parameters = pull(d_x)
  cut = lambda array: array[:, : raw.q.shape[1]]
  return kda_inputs.Raw(*map(cut, d_arrays), *d_parameters)
