"""Softmax attention of packed media, each patch over its own medium.

A row holds media one after the other; every query sees the keys from where its
medium starts to where it ends, in both directions. One query block meets the
key blocks between the first and the last that its media touch, one after
another, with a running maximum and sum: nothing of size P x P exists, and no
work is done between media further apart than a block. The backward pass keeps
the output and the log-sum-exp of each row and makes the probabilities again.

Suffixes: b batch, p patches, t query patch within a block, s key patch within
a block, h heads, k channels of a head, n blocks.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trimoe_jax.model import blocking


class Bounds(NamedTuple):
  """The keys [start, end) that each query sees; start = end: none."""

  start: jax.Array  # int32 [B, P]
  end: jax.Array


def attend_within(
  q_bphk: jax.Array,
  k_bphk: jax.Array,
  v_bphk: jax.Array,
  bounds: Bounds,
  *,
  scale: float,
  block_size: int = 512,
) -> jax.Array:
  """out_p = sum_s softmax_s(scale q_p . k_s) v_s,  start_p <= s < end_p.

  Args:
    q_bphk, k_bphk, v_bphk: [B, P, H, K], any float dtype; matmuls use it for
      their operands and add in float32.
    bounds: of every patch's medium; it must be symmetric, as media are (who
      sees is seen). Patches that see nothing give zero and get no gradient.
    scale: multiplies the scores.
    block_size: patches in a block at most.

  Returns:
    [B, P, H, K] float32, as the softmax is.
  """
  patches = q_bphk.shape[1]
  if 0 in q_bphk.shape:
    return jnp.zeros(q_bphk.shape, blocking.wide(q_bphk))
  count = -(-patches // block_size)
  block = -(-patches // count)
  missing = count * block - patches
  seen = (bounds.end > bounds.start)[..., None, None]
  arrays = [jnp.where(seen, x, 0) for x in (q_bphk, k_bphk, v_bphk)]
  blocks = [blocking.split(x, count, block) for x in arrays]
  pad = lambda x_bp: jnp.pad(x_bp, ((0, 0), (0, missing)))
  by_block = lambda x_bp: pad(x_bp).reshape(-1, count, block).swapaxes(0, 1)
  bounds = Bounds(*map(by_block, bounds))
  out_nbhtk = _attention(*blocks, bounds, scale)
  return jnp.where(seen, blocking.join(out_nbhtk, patches), 0)


def _visible(bounds: Bounds, j, block):
  """[B, 1, T, S]: which queries of one block see which keys of block `j`."""
  key_s = j * block + jnp.arange(block, dtype=jnp.int32)
  start, end = (x[:, None, :, None] for x in bounds)
  return (key_s >= start) & (key_s < end)


def _over_keys(bounds: Bounds, count, block, step, carry):
  """Folds `step` over the key blocks that a query block's media touch."""
  if count == 1:
    return step(0, carry)
  some = bounds.end > bounds.start
  first = jnp.min(jnp.where(some, bounds.start, count * block)) // block
  last = jnp.max(jnp.where(some, bounds.end, 0))
  return jax.lax.fori_loop(first, -(-last // block), step, carry)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q_nbhtk, k_nbhsk, v_nbhsk, bounds, scale):
  return _forward(q_nbhtk, k_nbhsk, v_nbhsk, bounds, scale)[0]


def _forward(q_nbhtk, k_nbhsk, v_nbhsk, bounds, scale):
  count, block, wide = len(q_nbhtk), q_nbhtk.shape[3], blocking.wide(q_nbhtk)
  einsum = functools.partial(jnp.einsum, preferred_element_type=wide)

  def row(inputs):
    q_bhtk, near = inputs

    def step(j, running):
      out_bhtk, top_bht, total_bht = running
      k_bhsk, v_bhsk = k_nbhsk[j], v_nbhsk[j]
      logits_bhts = scale * einsum('bhtk,bhsk->bhts', q_bhtk, k_bhsk)
      logits_bhts = jnp.where(_visible(near, j, block), logits_bhts, -jnp.inf)
      new_top_bht = jnp.maximum(top_bht, jnp.max(logits_bhts, axis=-1))
      # A row that has seen nothing yet has a maximum of -inf.
      safe_bht = jnp.where(new_top_bht == -jnp.inf, 0, new_top_bht)
      p_bhts = jnp.exp(logits_bhts - safe_bht[..., None])
      shrink_bht = jnp.exp(top_bht - safe_bht)
      out_bhtk *= shrink_bht[..., None]
      out_bhtk += einsum('bhts,bhsk->bhtk', p_bhts.astype(v_bhsk.dtype), v_bhsk)
      total_bht = total_bht * shrink_bht + jnp.sum(p_bhts, axis=-1)
      return out_bhtk, new_top_bht, total_bht

    none_bht = jnp.zeros_like(q_bhtk[..., 0], wide)
    running = jnp.zeros_like(q_bhtk, wide), none_bht - jnp.inf, none_bht
    out_bhtk, top_bht, total_bht = _over_keys(near, count, block, step, running)
    seen_bht = total_bht > 0
    total_bht = jnp.where(seen_bht, total_bht, 1)
    # exp(logit - inf) is zero in the backward pass of rows that see nothing.
    lse_bht = jnp.where(seen_bht, top_bht + jnp.log(total_bht), jnp.inf)
    return out_bhtk / total_bht[..., None], lse_bht

  out_nbhtk, lse_nbht = jax.lax.map(row, (q_nbhtk, bounds))
  saved = q_nbhtk, k_nbhsk, v_nbhsk, bounds, out_nbhtk, lse_nbht
  return out_nbhtk, saved


def _backward(scale, saved, dout_nbhtk):
  """dS = P (dP - sum(dO O)), block by block, from probabilities made again."""
  q_nbhtk, k_nbhsk, v_nbhsk, bounds, out_nbhtk, lse_nbht = saved
  count, block, wide = len(q_nbhtk), q_nbhtk.shape[3], blocking.wide(q_nbhtk)
  einsum = functools.partial(jnp.einsum, preferred_element_type=wide)
  inner_nbht = jnp.sum(dout_nbhtk * out_nbhtk, axis=-1)

  def row(gradients, inputs):
    q_bhtk, near, dout_bhtk, lse_bht, inner_bht = inputs

    def step(j, carry):
      dq_bhtk, dk_nbhsk, dv_nbhsk = carry
      k_bhsk, v_bhsk = k_nbhsk[j], v_nbhsk[j]
      logits_bhts = scale * einsum('bhtk,bhsk->bhts', q_bhtk, k_bhsk)
      logits_bhts = jnp.where(_visible(near, j, block), logits_bhts, -jnp.inf)
      p_bhts = jnp.exp(logits_bhts - lse_bht[..., None])
      dout = dout_bhtk.astype(v_bhsk.dtype)
      dp_bhts = einsum('bhtk,bhsk->bhts', dout, v_bhsk)
      ds_bhts = scale * p_bhts * (dp_bhts - inner_bht[..., None])
      p_bhts, ds_bhts = (x.astype(q_bhtk.dtype) for x in (p_bhts, ds_bhts))
      dq_bhtk += einsum('bhts,bhsk->bhtk', ds_bhts, k_bhsk)
      dk_bhsk = einsum('bhts,bhtk->bhsk', ds_bhts, q_bhtk)
      dv_bhsk = einsum('bhts,bhtk->bhsk', p_bhts, dout)
      return dq_bhtk, dk_nbhsk.at[j].add(dk_bhsk), dv_nbhsk.at[j].add(dv_bhsk)

    carry = jnp.zeros_like(q_bhtk, wide), *gradients
    dq_bhtk, *gradients = _over_keys(near, count, block, step, carry)
    return tuple(gradients), dq_bhtk.astype(q_bhtk.dtype)

  zeros = tuple(jnp.zeros_like(x, wide) for x in (k_nbhsk, v_nbhsk))
  inputs = q_nbhtk, bounds, dout_nbhtk, lse_nbht, inner_nbht
  gradients, dq_nbhtk = jax.lax.scan(row, zeros, inputs)
  dk_nbhsk, dv_nbhsk = (x.astype(q_nbhtk.dtype) for x in gradients)
  return dq_nbhtk, dk_nbhsk, dv_nbhsk, None


_attention.defvjp(_forward, _backward)
