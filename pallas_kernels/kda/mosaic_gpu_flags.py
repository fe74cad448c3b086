"""What the Hopper kernels need to know of packed documents, in one launch.

A token that is no padding (id 0) begins a document if its id differs from that
of the latest such token before it. One warpgroup works through a sequence, 128
chunks at a time and a chunk a thread: each thread finds the last id of its own
chunk, a scan in shared memory tells it the last id before the chunk, and then
it walks its tokens.
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils

from pallas_kernels.kda import mosaic_gpu_warp as warp
from pallas_kernels.kda.mosaic_gpu_place import (
  CHUNK,
  ENTERS,
  LEAVES,
  SEGMENT,
  VALID,
)

_THREADS = 128


def _or(words) -> warp.Word:
  result = words[0]
  for w in words[1:]:
    result = warp.union(result, w)
  return result


def _if_zero(a: warp.Word, b: warp.Word) -> warp.Word:
  return warp.where(warp.compare(a, 'ne', 0), a, b)


def _bit(condition, bit: int) -> warp.Word:
  return warp.where(condition, warp.word(1 << bit), warp.word(0))


def _latest_before(last: warp.Word, thread: warp.Word, scratch: warp.Word):
  """The latest nonzero `last` of earlier threads, or the carried one.

  `scratch` holds the carried word and then one a thread; the carried word
  becomes the latest nonzero one of all.
  """
  own = warp.add(scratch, warp.shift_left(warp.add(thread, 1), 2))
  for step in (1, 2, 4, 8, 16, 32, 64, 128):
    warp.store(own, 0, [last])
    utils.warpgroup_barrier()
    # Below the first thread every step ends at the carried word.
    reach = warp.add(thread, 1 - step)
    reach = warp.where(warp.compare(reach, 'sgt', 0), reach, warp.word(0))
    (other,) = warp.load(warp.add(scratch, warp.shift_left(reach, 2)), 0, 1)
    last = _if_zero(last, other)
    utils.warpgroup_barrier()
  warp.store(own, 0, [last])
  utils.warpgroup_barrier()
  (before,) = warp.load(own, -4, 1)
  utils.warpgroup_barrier()
  final = warp.compare(thread, 'eq', _THREADS - 1)
  warp.store(scratch, 0, [last], predicate=final)
  utils.warpgroup_barrier()
  return before


def _chunk_flags(ids, before: warp.Word):
  """Flags of a chunk's tokens, and 1 if it is plain, else 0."""
  zero, counts, current = warp.word(0), [], before
  count = zero
  for token in ids:
    known = warp.compare(current, 'ne', 0)
    valid = warp.compare(token, 'ne', 0)
    changed = warp.compare(token, 'ne', current)
    begins = warp.both(warp.both(known, valid), changed)
    count = warp.add(count, warp.where(begins, warp.word(1), zero))
    counts.append(count)
    current = warp.where(valid, token, current)
  flags = [
    _or(
      [
        _bit(warp.compare(token, 'ne', 0), VALID),
        _bit(warp.compare(c, 'eq', 0), ENTERS),
        _bit(warp.compare(c, 'eq', count), LEAVES),
        warp.shift_left(c, SEGMENT),
      ]
    )
    for token, c in zip(ids, counts)
  ]
  ordinary = 1 << VALID | 1 << ENTERS | 1 << LEAVES
  odd = _or([warp.xor(f, ordinary) for f in flags])
  return flags, _bit(warp.compare(odd, 'eq', 0), 0)


def _round(chunks: int, refs, first):
  """128 chunks from `first` on."""
  ids, flags, plain, scratch = refs
  thread = warp.bit_and(utils.thread_idx(), _THREADS - 1)
  chunk = warp.add(thread, first)
  inside = warp.compare(chunk, 'slt', chunks)
  row = warp.where(inside, chunk, warp.word(chunks - 1))
  source = warp.advance(ids, warp.times(row, 4 * CHUNK))
  tokens = [
    warp.where(inside, w, warp.word(0))
    for i in range(CHUNK // 4)
    for w in warp.load_global_words(source, 16 * i, 4)
  ]
  last = tokens[0]
  for token in tokens[1:]:
    last = _if_zero(token, last)
  before = _latest_before(last, thread, scratch)
  words, ordinary = _chunk_flags(tokens, before)
  dest = warp.advance(flags, warp.times(row, 4 * CHUNK))
  for i in range(0, CHUNK, 4):
    warp.store_global(dest, 4 * i, words[i : i + 4], predicate=inside)
  dest = warp.advance(plain, warp.shift_left(row, 2))
  warp.store_global(dest, 0, [ordinary], predicate=inside)


def _body(chunks: int, *refs):
  """One sequence."""
  b = lax.axis_index('batch')
  reference = plgpu.RefType()
  arrays = (*[ref.at[b] for ref in refs[:3]], refs[3])

  @plgpu.inline_mgpu(arg_types=((reference,) * 4,))
  def work(ctx, arrays):
    del ctx
    outer = [warp.global_address(ref) for ref in arrays[:3]]
    scratch = warp.shared_address(arrays[3])
    thread = warp.bit_and(utils.thread_idx(), _THREADS - 1)
    first = warp.compare(thread, 'eq', 0)
    warp.store(scratch, 0, [warp.word(0)], predicate=first)
    warp.repeat(
      pl.cdiv(chunks, _THREADS),
      lambda i: _round(chunks, (*outer, scratch), warp.times(i, _THREADS)),
    )

  work(arrays)


def flags(segment_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Flags of tokens and of chunks.

  Args:
    segment_ids: [B, N * 64] int32, 0 for padding.

  Returns:
    [B, N * 64] int32, the flags of tokens that `mosaic_gpu_place` numbers, and
    [B, N] int32, 1 for chunks of nothing but tokens of one document that
    entered the chunk and leaves it, else 0.
  """
  batch, length = segment_ids.shape
  chunks = length // CHUNK
  kernel = plgpu.kernel(
    lambda *refs: _body(chunks, *refs),
    out_type=(
      jax.ShapeDtypeStruct((batch, length), jnp.int32),
      jax.ShapeDtypeStruct((batch, chunks), jnp.int32),
    ),
    grid=(batch,),
    grid_names=('batch',),
    kernel_name='kda_flags',
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
    ),
    scratch_types=[plgpu.SMEM((_THREADS + 1,), jnp.int32)],
  )
  return kernel(segment_ids)
