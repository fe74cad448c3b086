"""Causal softmax attention over blocks, with a hand-written derivative.

One query block meets the key blocks up to its own, one after another, with a
running maximum and sum, so that nothing of size T x T exists. The backward pass
keeps the output and the log-sum-exp of each row and recomputes the
probabilities. Key blocks after the diagonal, and those that end before the
first document of the query block begins, are never visited.

Queries may be a part of the sequence, and keys and values may be made from
something narrower, a block at a time: with a sequence split over devices each
holds some fragments of the queries and only the latents of all tokens.

Suffixes: b batch, t query time within a block, s key time within a block, h
heads, k key width, v value width, n blocks, f fragments, r latent width.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from trimoe_jax.model import blocking, gpu_attention, splash

_FRAGMENT_CANDIDATES = (
  (
    'library',
    'libraries want all keys and values at once, and here a block exists at a '
    'time',
  ),
  ('xla', None),
)


class Queries(NamedTuple):
  """Blocks of queries and their places in the sequence."""

  q_nbhtk: jax.Array
  at_n: jax.Array  # block of the sequence, int32


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
      Only 'xla' reads it.
    implementation: 'tokamax' or 'cudnn' (NVIDIA), 'splash' (TPU), 'xla', or
      None for the best on this device that rounds no output.

  Returns:
    [B, T, H, V] float32, as the softmax is (Kimi K3 technical report: the
    output stays float32 to avoid biased rounding).

  Raises:
    ValueError: shapes do not fit together, or `block_size` is not positive.
    TypeError: `segment_ids` are not integers.
  """
  _check(q_bthk, k_bshk, v_bshv, segment_ids, block_size)
  heads = q_bthk, v_bshv
  asked = lambda name: implementation == name
  candidates = (
    ('tokamax', gpu_attention.tokamax_refusal(*heads, asked('tokamax'))),
    (
      'cudnn',
      gpu_attention.cudnn_refusal(*heads, segment_ids, asked('cudnn')),
    ),
    ('splash', splash.refusal(*heads)),
    ('xla', None),
  )
  name = dispatch.choose('causal_attention', implementation, candidates)
  if 0 in (*q_bthk.shape, *v_bshv.shape):
    return jnp.zeros(
      (*q_bthk.shape[:3], v_bshv.shape[3]), blocking.wide(q_bthk)
    )
  libraries = {'splash': _splash, 'tokamax': _tokamax, 'cudnn': _cudnn}
  in_blocks = functools.partial(_blockwise, block_size=block_size)
  run = libraries.get(name, in_blocks)
  arrays = q_bthk, k_bshk, v_bshv
  if segment_ids is None:
    return run(arrays, None, scale)
  live = (segment_ids != 0)[..., None, None]
  arrays = [jnp.where(live, x, 0) for x in arrays]
  out_bthv = run(arrays, segment_ids, scale)
  return jnp.where(live, out_bthv, 0)  # also keeps cotangents of padding out


def _splash(arrays, segment_ids, scale, interpret=False):
  document_bt = None
  if segment_ids is not None:
    document_bt = jnp.cumsum(_opens(segment_ids)[0], axis=1, dtype=jnp.int32)
    document_bt = jnp.where(segment_ids != 0, document_bt, 0)
  return splash.attend(*arrays, document_bt, scale=scale, interpret=interpret)


def _tokamax(arrays, segment_ids, scale):
  if segment_ids is None:
    return gpu_attention.tokamax(*arrays, None, scale=scale)
  # Keys are left out before a row's document only: padding goes to the end.
  order_bt = jnp.argsort(segment_ids == 0, axis=1, stable=True)
  back_bt = jnp.argsort(order_bt, axis=1)
  move = lambda x, at_bt: jnp.take_along_axis(x, at_bt[..., None, None], axis=1)
  id_bt = jnp.take_along_axis(segment_ids, order_bt, axis=1)
  opens_bt, time_bt = _opens(id_bt)
  start_bt = jax.lax.cummax(jnp.where(opens_bt, time_bt, 0), axis=1)
  start_bt = jnp.where(id_bt != 0, start_bt, time_bt)
  arrays = [move(x, order_bt) for x in arrays]
  return move(gpu_attention.tokamax(*arrays, start_bt, scale=scale), back_bt)


def _cudnn(arrays, segment_ids, scale):
  del segment_ids  # there are none
  return gpu_attention.cudnn(*arrays, scale=scale)


def _blockwise(arrays, segment_ids, scale, block_size):
  """`causal_attention` of arrays that hold zeros where there is padding."""
  time = arrays[0].shape[1]
  count = -(-time // block_size)
  block = -(-time // count)
  documents = _documents(segment_ids, count, block)
  q_nbhtk, *keys_values = [blocking.split(x, count, block) for x in arrays]
  queries = Queries(q_nbhtk, jnp.arange(count, dtype=jnp.int32))
  out_nbhtv = _attention(
    queries, tuple(keys_values), (), documents, (scale, _given)
  )
  return blocking.join(out_nbhtv, time)


def _given(sources, weights):
  """Keys and values that exist already."""
  del weights
  return sources


def fragment_attention(
  q_bfthk,
  fragment_f,
  latents_bsr,
  weights,
  expand,
  *,
  scale: float,
  segment_ids=None,
  block_size: int = 512,
):
  """`causal_attention` of some fragments of a sequence over its latents.

      k, v = expand(latents, weights);  out = causal_attention(q, k, v)

  Keys and values exist for one block at a time, in both passes.

  Args:
    q_bfthk: [B, F, L, H, K], fragments of L tokens each.
    fragment_f: [F] int32, the place of each fragment among the S / L.
    latents_bsr: [B, S, R], of the whole sequence in its natural order.
    weights: any tree of arrays for `expand`.
    expand: pure function of [B, T, R] and `weights` to keys [B, T, H, K] and
      values [B, T, H, V].
    scale, segment_ids ([B, S]), block_size: as for `causal_attention`; the
      largest divisor of L up to block_size is taken.

  Returns:
    [B, F, L, H, V] float32.
  """
  dispatch.choose('fragment_attention', None, _FRAGMENT_CANDIDATES)
  batch, fragments, length = q_bfthk.shape[:3]
  time = latents_bsr.shape[1]
  block = max(n for n in range(1, block_size + 1) if length % n == 0)
  per, count = length // block, time // block
  documents = _documents(segment_ids, count, block)
  live_bft = None
  if segment_ids is not None:
    latents_bsr = jnp.where((segment_ids != 0)[..., None], latents_bsr, 0)
    live_bft = (segment_ids != 0).reshape(batch, -1, length)[:, fragment_f]
    q_bfthk = jnp.where(live_bft[..., None, None], q_bfthk, 0)
  q_bthk = q_bfthk.reshape(batch, fragments * length, *q_bfthk.shape[3:])
  at_fn = fragment_f[:, None] * per + jnp.arange(per, dtype=jnp.int32)
  queries = Queries(
    blocking.split(q_bthk, fragments * per, block), at_fn.reshape(-1)
  )
  latents_nbsr = latents_bsr.reshape(batch, count, block, -1).swapaxes(0, 1)

  def by_head(latents_bsr, weights):
    return tuple(x.swapaxes(1, 2) for x in expand(latents_bsr, weights))

  out_nbhtv = _attention(
    queries, latents_nbsr, weights, documents, (scale, by_head)
  )
  out_bthv = blocking.join(out_nbhtv, fragments * length)
  out_bfthv = out_bthv.reshape(*q_bfthk.shape[:4], -1)
  if live_bft is None:
    return out_bfthv
  return jnp.where(live_bft[..., None, None], out_bfthv, 0)


def _documents(segment_ids, count, block):
  """Document starts from segment ids, by block; None without ids."""
  if segment_ids is None:
    return None
  missing = count * block - segment_ids.shape[1]
  id_bt = jnp.pad(segment_ids, ((0, 0), (0, missing)))
  live_bt = id_bt != 0
  opens_bt, time_bt = _opens(id_bt)
  start_bt = jax.lax.cummax(jnp.where(opens_bt, time_bt, 0), axis=1)
  start_bt = jnp.where(live_bt, start_bt, count * block)
  by_block = lambda x_bt: x_bt.reshape(-1, count, block).swapaxes(0, 1)
  start_nbt = by_block(start_bt)
  block_n = jnp.min(start_nbt, axis=(1, 2)) // block
  return _Documents(start_nbt, by_block(live_bt), block_n)


def _opens(id_bt):
  """Which rows begin a document, and the time of each row."""
  live_bt = id_bt != 0
  time_bt = jax.lax.broadcasted_iota(jnp.int32, id_bt.shape, 1)
  last_bt = jax.lax.cummax(jnp.where(live_bt, time_bt, -1), axis=1)
  before_bt = jnp.pad(last_bt, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
  id_before_bt = jnp.take_along_axis(id_bt, jnp.maximum(before_bt, 0), axis=1)
  return live_bt & ((before_bt < 0) | (id_before_bt != id_bt)), time_bt


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


def _over_queries(row, queries: Queries, more, carry):
  """Folds `row` over query blocks; returns (carry, stacked results).

  `more` are further arrays with one entry for each query block.
  """
  if len(queries.at_n) == 1:
    carry, result = row(carry, _at(0, (queries, *more)))
    return carry, jax.tree.map(lambda x: x[None], result)
  return jax.lax.scan(row, carry, (queries, *more))


def _at(i, tree):
  return jax.tree.map(lambda x: x[i], tree)


def _blocks(sources) -> int:
  return jax.tree.leaves(sources)[0].shape[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(queries, sources, weights, documents, form):
  """Attention of `queries` over keys and values made from `sources`.

  Args:
    queries: `Queries`.
    sources: tree of [N, ...]; expand(sources[n], weights) are the keys
      [B, H, S, K] and values [B, H, S, V] of block n.
    weights: tree of arrays, or ().
    documents: `_Documents` or None.
    form: the scale and `expand`.
  """
  return _forward(queries, sources, weights, documents, form)[0]


def _forward(queries, sources, weights, documents, form):
  (scale, expand), count = form, _blocks(sources)
  wide = blocking.wide(queries.q_nbhtk)
  einsum = functools.partial(jnp.einsum, preferred_element_type=wide)
  block = queries.q_nbhtk.shape[3]

  def row(carry, inputs):
    ((q_bhtk, i),) = inputs

    def step(j, running):
      out_bhtv, top_bht, total_bht = running
      k_bhsk, v_bhsv = expand(_at(j, sources), weights)
      logits_bhts = scale * einsum('bhtk,bhsk->bhts', q_bhtk, k_bhsk)
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

    value_dim = jax.eval_shape(expand, _at(0, sources), weights)[1].shape[-1]
    none_bht = jnp.zeros_like(q_bhtk[..., 0], wide)
    empty_bhtv = none_bht[..., None] * jnp.zeros(value_dim, wide)
    running = empty_bhtv, none_bht - jnp.inf, none_bht
    out_bhtv, top_bht, total_bht = _over_keys(
      i, count, documents, step, running
    )
    seen_bht = total_bht > 0
    total_bht = jnp.where(seen_bht, total_bht, 1)
    # exp(logit - inf) is zero in the backward pass of rows that see nothing.
    lse_bht = jnp.where(seen_bht, top_bht + jnp.log(total_bht), jnp.inf)
    return carry, (out_bhtv / total_bht[..., None], lse_bht)

  _, (out_nbhtv, lse_nbht) = _over_queries(row, queries, (), None)
  saved = queries, sources, weights, documents, out_nbhtv, lse_nbht
  return out_nbhtv, saved


def _backward(form, saved, dout_nbhtv):
  # Tiles are [key, query] here and the query's gradient is transposed, so that
  # no matmul contracts over the first axis of a tile: on a CPU that takes two
  # to four times as long.
  queries, sources, weights, documents, out_nbhtv, lse_nbht = saved
  (scale, expand), count = form, _blocks(sources)
  q_nbhtk = queries.q_nbhtk
  wide, block = blocking.wide(q_nbhtk), q_nbhtk.shape[3]
  einsum = functools.partial(jnp.einsum, preferred_element_type=wide)
  inner_nbht = jnp.sum(dout_nbhtv * out_nbhtv, axis=-1)
  # Transposed once: inside the loop it would be folded into the matmul.
  k_nbhks = sources[0].swapaxes(-1, -2) if expand is _given else None

  def row(gradients, inputs):
    (q_bhtk, i), dout_bhtv, lse_bht, inner_bht = inputs

    def step(j, carry):
      dq_bhkt, d_sources, d_weights = carry
      (k_bhsk, v_bhsv), pull = jax.vjp(expand, _at(j, sources), weights)
      dout = dout_bhtv.astype(v_bhsv.dtype)
      logits_bhst = scale * einsum('bhsk,bhtk->bhst', k_bhsk, q_bhtk)
      visible = _visible((i, j), block, documents, 1)
      logits_bhst = jnp.where(visible, logits_bhst, -jnp.inf)
      p_bhst = jnp.exp(logits_bhst - lse_bht[:, :, None])
      dp_bhst = einsum('bhsv,bhtv->bhst', v_bhsv, dout)
      ds_bhst = scale * p_bhst * (dp_bhst - inner_bht[:, :, None])
      p_bhst = p_bhst.astype(dout.dtype)
      ds_bhst = ds_bhst.astype(q_bhtk.dtype)
      k_bhks = k_bhsk.swapaxes(-1, -2) if k_nbhks is None else k_nbhks[j]
      dq_bhkt += einsum('bhks,bhst->bhkt', k_bhks, ds_bhst)
      dk_bhsk = einsum('bhst,bhtk->bhsk', ds_bhst, q_bhtk)
      dv_bhsv = einsum('bhst,bhtv->bhsv', p_bhst, dout)
      d_source, d_weight = pulled(pull, dk_bhsk, dv_bhsv)
      add = lambda x_n, x: _add(x_n, j, x)
      d_sources = jax.tree.map(add, d_sources, d_source)
      d_weights = jax.tree.map(jnp.add, d_weights, d_weight)
      return dq_bhkt, d_sources, d_weights

    def pulled(pull, dk_bhsk, dv_bhsv):
      if expand is _given:  # nothing to pull: the sums stay wide
        return (dk_bhsk, dv_bhsv), ()
      gradients = pull((dk_bhsk.astype(dtype), dv_bhsv.astype(dtype)))
      return jax.tree.map(lambda x: x.astype(wide), gradients)

    dtype = q_bhtk.dtype
    carry = jnp.zeros_like(q_bhtk.swapaxes(-1, -2), wide), *gradients
    dq_bhkt, *gradients = _over_keys(i, count, documents, step, carry)
    return tuple(gradients), dq_bhkt.swapaxes(-1, -2).astype(dtype)

  zeros = lambda x: jnp.zeros_like(x, wide)
  gradients = jax.tree.map(zeros, sources), jax.tree.map(zeros, weights)
  more = dout_nbhtv, lse_nbht, inner_nbht
  gradients, dq_nbhtk = _over_queries(row, queries, more, gradients)
  cast = lambda like, x: x.astype(like.dtype)
  d_sources, d_weights = jax.tree.map(cast, (sources, weights), gradients)
  no_place = np.zeros(queries.at_n.shape, jax.dtypes.float0)
  return Queries(dq_nbhtk, no_place), d_sources, d_weights, None


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
