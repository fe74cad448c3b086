"""Causal softmax attention over blocks, with a hand-written derivative.

One query block meets the key blocks up to its own, one after another, with a
running maximum and sum, so that nothing of size T x T exists. The backward pass
keeps the output and the log-sum-exp of each row and recomputes the
probabilities. Key blocks after the diagonal, and those that end before the
first document of the query block begins, are never visited.

Suffixes: b batch, t query time within a block, s key time within a block, h
heads, k key width, v value width, n blocks.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch

_CANDIDATES = (('xla', None),)


class _Documents(NamedTuple):
  """Where rows may look; times count from the start of the sequence."""

  start_nbt: jax.Array  # first row of this row's document; past T for padding
  live_nbs: jax.Array  # False for padding
  block_n: jax.Array  # first key block that a query block meets


def causal_attention(
  q_bthk,
  k_bshk,
  v_bshv,
  *,
  scale: float,
  segment_ids=None,
  block_size: int = 512,
  implementation: str | None = None,
):
  """Softmax attention of every row over the rows of its document up to itself.

      out_t = sum_s softmax_s(scale q_t . k_s) v_s,
      s <= t, same document

  Args:
    q_bthk, k_bshk, v_bshv: [B, T, H, K], [B, T, H, K] and [B, T, H, V], any
      float dtype; matmuls use it for their operands and add in float32.
    scale: multiplies the scores; K3 uses 1 / sqrt(K).
    segment_ids: int [B, T] or None for one document. 0 is padding: such rows
      give zero, have zero gradients and may hold anything. A document begins
      where an id differs from the last one that was not padding.
    block_size: rows in a block at most; shorter sequences are one dense tile.
    implementation: 'xla', or None for the best on this device.

  Returns:
    [B, T, H, V] float32, as the softmax is (Kimi K3 technical report: the
    output stays float32 to avoid biased rounding).

  Raises:
    ValueError: shapes do not fit together, or `block_size` is not positive.
    TypeError: `segment_ids` are not integers.
  """
  _check(q_bthk, k_bshk, v_bshv, segment_ids, block_size)
  dispatch.choose('causal_attention', implementation, _CANDIDATES)
  if 0 in (*q_bthk.shape, *v_bshv.shape):
    return jnp.zeros((*q_bthk.shape[:3], v_bshv.shape[3]), _wide(q_bthk))
  if segment_ids is None:
    return _blockwise((q_bthk, k_bshk, v_bshv), None, scale, block_size)
  live = (segment_ids != 0)[..., None, None]
  arrays = [jnp.where(live, x, 0) for x in (q_bthk, k_bshk, v_bshv)]
  out_bthv = _blockwise(arrays, segment_ids, scale, block_size)
  return jnp.where(live, out_bthv, 0)  # also keeps cotangents of padding out


def _blockwise(arrays, segment_ids, scale, block_size):
  """`causal_attention` of arrays that hold zeros where there is padding."""
  time = arrays[0].shape[1]
  count = -(-time // block_size)
  block = -(-time // count)
  documents = _documents(segment_ids, count, block)
  split = [_split(x, count, block) for x in arrays]
  out_nbhtv = _attention(*split, documents, scale)
  return _join(out_nbhtv, time)


def _wide(x):
  return jnp.promote_types(x.dtype, jnp.float32)


def _split(x_bthd, count, block):
  """[B, T, H, D] -> [N, B, H, T / N, D], padded to whole blocks."""
  batch, time, heads, width = x_bthd.shape
  missing = count * block - time
  x_bthd = jnp.pad(x_bthd, ((0, 0), (0, missing), (0, 0), (0, 0)))
  x = x_bthd.reshape(batch, count, block, heads, width)
  return x.transpose(1, 0, 3, 2, 4)


def _join(x_nbhtd, time):
  """The inverse of `_split`."""
  count, batch, heads, block, width = x_nbhtd.shape
  x = x_nbhtd.transpose(1, 0, 3, 2, 4)
  return x.reshape(batch, count * block, heads, width)[:, :time]


def _documents(segment_ids, count, block):
  """Document starts from segment ids, by block; None without ids."""
  if segment_ids is None:
    return None
  missing = count * block - segment_ids.shape[1]
  id_bt = jnp.pad(segment_ids, ((0, 0), (0, missing)))
  live_bt = id_bt != 0
  time_bt = jax.lax.broadcasted_iota(jnp.int32, id_bt.shape, 1)
  last_bt = jax.lax.cummax(jnp.where(live_bt, time_bt, -1), axis=1)
  before_bt = jnp.pad(last_bt, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
  id_before_bt = jnp.take_along_axis(id_bt, jnp.maximum(before_bt, 0), axis=1)
  opens_bt = live_bt & ((before_bt < 0) | (id_before_bt != id_bt))
  start_bt = jax.lax.cummax(jnp.where(opens_bt, time_bt, 0), axis=1)
  start_bt = jnp.where(live_bt, start_bt, count * block)
  by_block = lambda x_bt: x_bt.reshape(-1, count, block).swapaxes(0, 1)
  start_nbt = by_block(start_bt)
  block_n = jnp.min(start_nbt, axis=(1, 2)) // block
  return _Documents(start_nbt, by_block(live_bt), block_n)


def _visible(at, block, documents, query_axis):
  """Which pairs of the tile `at` = (query block, key block) attend.

  `query_axis` is the place of the query time among the tile's two axes.
  """
  (i, j), shape = at, (block, block)
  query = i * block + jax.lax.broadcasted_iota(jnp.int32, shape, query_axis)
  key = j * block + jax.lax.broadcasted_iota(jnp.int32, shape, 1 - query_axis)
  visible = key <= query
  if documents is None:
    return visible
  start_bt, live_bs = documents.start_nbt[i], documents.live_nbs[j]
  visible = visible & (key >= jnp.expand_dims(start_bt, (1, 3 - query_axis)))
  return visible & jnp.expand_dims(live_bs, (1, 2 + query_axis))


def _add(x_n, at, block):
  """Adds to one block in place; `x.at[n].add` would be a scatter."""
  block += jax.lax.dynamic_index_in_dim(x_n, at, keepdims=False)
  return jax.lax.dynamic_update_index_in_dim(x_n, block, at, 0)


def _over_keys(i, count, documents, step, carry):
  """Folds `step` over the key blocks that query block `i` sees."""
  if count == 1:
    return step(0, carry)
  first = 0 if documents is None else documents.block_n[i]
  return jax.lax.fori_loop(first, i + 1, step, carry)


def _over_queries(row, count, carry):
  """Folds `row` over query blocks; returns (carry, stacked results)."""
  if count == 1:
    carry, result = row(carry, 0)
    return carry, jax.tree.map(lambda x: x[None], result)
  return jax.lax.scan(row, carry, jnp.arange(count))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q_nbhtk, k_nbhsk, v_nbhsv, documents, scale):
  return _forward(q_nbhtk, k_nbhsk, v_nbhsv, documents, scale)[0]


def _forward(q_nbhtk, k_nbhsk, v_nbhsv, documents, scale):
  count, _, _, block, _ = q_nbhtk.shape
  wide = _wide(q_nbhtk)
  einsum = functools.partial(jnp.einsum, preferred_element_type=wide)

  def row(carry, i):
    q_bhtk = q_nbhtk[i]

    def step(j, running):
      out_bhtv, top_bht, total_bht = running
      v_bhsv = v_nbhsv[j]
      logits_bhts = scale * einsum('bhtk,bhsk->bhts', q_bhtk, k_nbhsk[j])
      visible = _visible((i, j), block, documents, 0)
      logits_bhts = jnp.where(visible, logits_bhts, -jnp.inf)
      new_top_bht = jnp.maximum(top_bht, jnp.max(logits_bhts, axis=-1))
      # A row that has seen nothing yet has a maximum of -inf.
      safe_bht = jnp.where(new_top_bht == -jnp.inf, 0, new_top_bht)
      p_bhts = jnp.exp(logits_bhts - safe_bht[..., None])
      shrink_bht = jnp.exp(top_bht - safe_bht)
      out_bhtv *= shrink_bht[..., None]
      out_bhtv += einsum('bhts,bhsv->bhtv', p_bhts.astype(v_bhsv.dtype), v_bhsv)
      total_bht = total_bht * shrink_bht + jnp.sum(p_bhts, axis=-1)
      return out_bhtv, new_top_bht, total_bht

    empty_bhtv = jnp.zeros_like(v_nbhsv[i], wide)
    none_bht = jnp.zeros_like(q_bhtk[..., 0], wide)
    running = empty_bhtv, none_bht - jnp.inf, none_bht
    out_bhtv, top_bht, total_bht = _over_keys(
      i, count, documents, step, running
    )
    seen_bht = total_bht > 0
    total_bht = jnp.where(seen_bht, total_bht, 1)
    # exp(logit - inf) is zero in the backward pass of rows that see nothing.
    lse_bht = jnp.where(seen_bht, top_bht + jnp.log(total_bht), jnp.inf)
    return carry, (out_bhtv / total_bht[..., None], lse_bht)

  _, (out_nbhtv, lse_nbht) = _over_queries(row, count, None)
  saved = q_nbhtk, k_nbhsk, v_nbhsv, documents, out_nbhtv, lse_nbht
  return out_nbhtv, saved


def _backward(scale, saved, dout_nbhtv):
  # Tiles are [key, query] here and the query's gradient is transposed, so that
  # no matmul contracts over the first axis of a tile: on a CPU that takes two
  # to four times as long.
  q_nbhtk, k_nbhsk, v_nbhsv, documents, out_nbhtv, lse_nbht = saved
  count, _, _, block, _ = q_nbhtk.shape
  wide = _wide(q_nbhtk)
  einsum = functools.partial(jnp.einsum, preferred_element_type=wide)
  inner_nbht = jnp.sum(dout_nbhtv * out_nbhtv, axis=-1)
  k_nbhks = k_nbhsk.swapaxes(-1, -2)

  def row(gradients, i):
    q_bhtk, dout_bhtv = q_nbhtk[i], dout_nbhtv[i].astype(v_nbhsv.dtype)
    lse_bht, inner_bht = lse_nbht[i], inner_nbht[i]

    def step(j, carry):
      dq_bhkt, dk_nbhsk, dv_nbhsv = carry
      logits_bhst = scale * einsum('bhsk,bhtk->bhst', k_nbhsk[j], q_bhtk)
      visible = _visible((i, j), block, documents, 1)
      logits_bhst = jnp.where(visible, logits_bhst, -jnp.inf)
      p_bhst = jnp.exp(logits_bhst - lse_bht[:, :, None])
      dp_bhst = einsum('bhsv,bhtv->bhst', v_nbhsv[j], dout_bhtv)
      ds_bhst = scale * p_bhst * (dp_bhst - inner_bht[:, :, None])
      p_bhst = p_bhst.astype(dout_bhtv.dtype)
      ds_bhst = ds_bhst.astype(q_bhtk.dtype)
      dv_bhsv = einsum('bhst,bhtv->bhsv', p_bhst, dout_bhtv)
      dk_bhsk = einsum('bhst,bhtk->bhsk', ds_bhst, q_bhtk)
      dq_bhkt += einsum('bhks,bhst->bhkt', k_nbhks[j], ds_bhst)
      return dq_bhkt, _add(dk_nbhsk, j, dk_bhsk), _add(dv_nbhsv, j, dv_bhsv)

    carry = jnp.zeros_like(k_nbhks[i], wide), *gradients
    dq_bhkt, *gradients = _over_keys(i, count, documents, step, carry)
    dq_bhtk = dq_bhkt.swapaxes(-1, -2).astype(q_bhtk.dtype)
    return tuple(gradients), dq_bhtk

  gradients = jnp.zeros_like(k_nbhsk, wide), jnp.zeros_like(v_nbhsv, wide)
  gradients, dq_nbhtk = _over_queries(row, count, gradients)
  dk_nbhsk = gradients[0].astype(k_nbhsk.dtype)
  return dq_nbhtk, dk_nbhsk, gradients[1].astype(v_nbhsv.dtype), None


_attention.defvjp(_forward, _backward)


def _check(q_bthk, k_bshk, v_bshv, segment_ids, block_size):
  if q_bthk.ndim != 4 or k_bshk.shape != q_bthk.shape:
    raise ValueError(
      f'causal_attention: q {q_bthk.shape} and k {k_bshk.shape} must both be '
      '[batch, time, heads, width]; repeat keys that heads share.'
    )
  if v_bshv.ndim != 4 or v_bshv.shape[:3] != k_bshk.shape[:3]:
    raise ValueError(
      f'causal_attention: v {v_bshv.shape} must begin with the batch, time and '
      f'heads of k {k_bshk.shape}.'
    )
  if segment_ids is not None and segment_ids.shape != q_bthk.shape[:2]:
    raise ValueError(
      f'causal_attention: segment_ids {segment_ids.shape} must be '
      f'{q_bthk.shape[:2]}, one id for each row.'
    )
  if segment_ids is not None and not jnp.issubdtype(
    segment_ids.dtype, jnp.integer
  ):
    raise TypeError(
      f'causal_attention: segment_ids have dtype {segment_ids.dtype}; give '
      'integers, 0 for padding.'
    )
  if block_size < 1:
    raise ValueError(
      f'causal_attention: block_size={block_size} must be positive; use 512.'
    )
