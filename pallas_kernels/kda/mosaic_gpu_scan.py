"""The recurrence of Kimi Delta Attention over chunks, on Hopper.

One thread block carries the state of one value head through a range of chunks
(Kimi Linear, arXiv 2510.26692, with the inverse T already inside W and Q):

    E = V - k~ S      O = scale q~ S + Q E      S <- diag(gamma) S + W^T E

Everything is held transposed, with values along rows: the state [V, K], E and
O [V, 64]. Then every product has its left operand in registers, where the
product before left it, and its right operand in shared memory, where another
warpgroup puts it by bulk copies, two chunks ahead. Each computing warpgroup
owns 64 rows and never talks to the other. The operands arrive with signs, beta
and scale folded in, so no elementwise work but gamma remains.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kda.mosaic_gpu_chain import (
  PER_COLUMN,
  ROWS,
  STAGES,
  Block,
  Size,
  accumulate,
  launch,
  load,
  produce,
  run_roles,
  tile,
  zeros,
)
from pallas_kernels.kda.mosaic_gpu_place import CHUNK, VALID, WIDTH

_STAGED = ('out', 'saved')  # buffers of results


@dataclasses.dataclass(frozen=True)
class Plan:
  """What one scan reads and writes.

  Attributes:
    pieces: independent ranges of equal length that the chunks are cut into.
    some: the first piece to run and the one to stop before; all if None.
    output: O is written.
    initial: an initial state is read, otherwise it is zero.
    masked: rows of V that belong to no token are ignored.
    save_state: the bfloat16 state that enters each chunk is written.
    skipping: each piece begins at a chunk of its own, `first`.
  """

  pieces: int = 1
  some: tuple[int, int] | None = None
  output: bool = True
  initial: bool = True
  masked: bool = False
  save_state: bool = False
  skipping: bool = False

  @property
  def running(self) -> range:
    """Pieces that run."""
    return range(*(self.some or (0, self.pieces)))


def _entering_values(plan: Plan, stage, slot, rows) -> jax.Array:
  """V^T of a chunk, zero where there is no token."""
  v_vc = load(stage['values'].at[slot, rows].T).astype(jnp.float32)
  if not plan.masked:
    return v_vc
  flags_c = load(stage['flags'].at[slot], PER_COLUMN)
  valid_vc = lax.broadcast_in_dim(flags_c & (1 << VALID), v_vc.shape, [1]) != 0
  return jnp.where(valid_vc, v_vc, 0.0)


def _chunk_step(plan: Plan, stage, at, s_vk):
  """One chunk: (O^T or None, the next state). `at`: slot, and row block."""
  slot, rows = at
  left = s_vk.astype(jnp.bfloat16)
  decay = load(stage['gamma'].at[slot], PER_COLUMN)
  kept_vk = s_vk * lax.broadcast_in_dim(decay, s_vk.shape, [1])
  v_vc = _entering_values(plan, stage, slot, rows)
  sums = [(v_vc, [(left, stage['minus_key'].at[slot].T)])]
  if plan.output:
    zero = zeros((ROWS, CHUNK))
    sums.append((zero, [(left, stage['query'].at[slot].T)]))
  e_vc, *o_vc = accumulate(*sums)
  left = e_vc.astype(jnp.bfloat16)
  sums = [(kept_vk, [(left, stage['update'].at[slot])])]
  if plan.output:
    sums.append((o_vc[0], [(left, stage['scores'].at[slot].T)]))
  s_vk, *o_vc = accumulate(*sums)
  return (o_vc[0] if plan.output else None), s_vk


def _compute(plan: Plan, place, refs):
  """The work of one computing warpgroup: its rows through all its chunks."""
  outer, stage, barriers = refs
  b, head, piece, first, chunks = place
  full, empty = barriers
  rows = lax.axis_index('role')
  own = pl.ds(rows * ROWS, ROWS)
  if plan.initial:
    state = load(outer['initial'].at[b, head, piece, own])
  else:
    state = zeros((ROWS, WIDTH))

  def step(n, s_vk):
    slot = lax.rem(n, STAGES)
    tokens = pl.ds((first + n) * CHUNK, CHUNK)
    if plan.save_state:
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      stage['saved'].at[rows][...] = s_vk.astype(jnp.bfloat16)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(
        stage['saved'].at[rows], outer['saved'].at[b, head, first + n, own]
      )
    plgpu.barrier_wait(full.at[slot])
    o_vc, s_vk = _chunk_step(plan, stage, (slot, rows), s_vk)
    plgpu.barrier_arrive(empty.at[slot])
    if plan.output:
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      stage['out'].at[rows].T[...] = o_vc.astype(jnp.bfloat16)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(
        stage['out'].at[rows], outer['out'].at[b, tokens, head, own]
      )
    return s_vk

  state = lax.fori_loop(0, chunks, step, state)
  outer['final'].at[b, head, piece, own][...] = state
  plgpu.wait_smem_to_gmem(0)


def _copies(plan: Plan, at, refs):
  """(source, destination of a slot) of all but the values of chunk `at`."""
  (b, head, n), (outer, stage, _) = at, refs
  tokens = pl.ds(n * CHUNK, CHUNK)
  names = ['minus_key', 'query', 'update', 'scores']
  if not plan.output:
    names = ['minus_key', 'update']
  copies = [(outer[name].at[b, head, tokens], stage[name]) for name in names]
  copies.append((outer['gamma'].at[b, head, n], stage['gamma']))
  if plan.masked:
    copies.append((outer['flags'].at[b, tokens], stage['flags']))
  return copies


def _fetch(plan: Plan, place, n, refs):
  """Starts the copies of chunk n of this block's range."""
  outer, stage, barriers = refs
  b, head, _, first, _ = place
  slot = lax.rem(n, STAGES)
  arrived = barriers[0].at[slot]
  for source, dest in _copies(plan, (b, head, first + n), refs):
    plgpu.copy_gmem_to_smem(source, dest.at[slot], arrived)
  tokens = pl.ds((first + n) * CHUNK, CHUNK)
  for rows in range(stage['values'].shape[1]):
    source = outer['values'].at[b, tokens, head, pl.ds(ROWS * rows, ROWS)]
    plgpu.copy_gmem_to_smem(source, stage['values'].at[slot, rows], arrived)


def _size_of(arrays: dict[str, jax.Array]) -> Size:
  batch, heads, padded, _ = arrays['minus_key'].shape
  return Size(batch, heads, padded // CHUNK, arrays['values'].shape[3])


def _body(plan: Plan, size: Size, outer, stage, barriers, done):
  """One thread block: value head, batch row and range of chunks."""
  index = lax.axis_index('block')
  head, rest = lax.rem(index, size.heads), lax.div(index, size.heads)
  count = len(plan.running)
  piece, b = lax.rem(rest, count), lax.div(rest, count)
  longest = pl.cdiv(size.chunks, plan.pieces)
  first = (piece + plan.running.start) * longest
  chunks = jnp.minimum(longest, size.chunks - first)
  if plan.skipping:
    skipped = outer['first'][b, head, piece, 0]
    first, chunks = first + skipped, chunks - skipped
  place, refs = (b, head, piece, first, chunks), (outer, stage, barriers)
  fetch = lambda n: _fetch(plan, place, n, refs)
  run_roles(
    size.groups,
    lambda: _compute(plan, place, refs),
    lambda: produce(fetch, chunks, barriers[1]),
    done,
  )


def _stages(plan: Plan, groups: int) -> dict:
  """Shared memory by name."""
  ring = STAGES
  stage = {name: tile(ring, CHUNK, WIDTH) for name in ('minus_key', 'update')}
  stage['gamma'] = plgpu.SMEM((ring, WIDTH), jnp.float32)
  if plan.output:
    stage['query'] = tile(ring, CHUNK, WIDTH)
    stage['scores'] = tile(ring, CHUNK, CHUNK)
    stage['out'] = tile(groups, CHUNK, ROWS)
  stage['values'] = tile(ring, groups, CHUNK, ROWS)
  if plan.masked:
    stage['flags'] = plgpu.SMEM((ring, CHUNK), jnp.int32)
  if plan.save_state:
    stage['saved'] = tile(groups, ROWS, WIDTH)
  return stage


def _inputs(arrays: dict[str, jax.Array], plan: Plan, groups: int) -> dict:
  """What the kernel reads, by name."""
  names = [n for n in _stages(plan, groups) if n not in _STAGED]
  names += ['initial'] * plan.initial + ['first'] * plan.skipping
  return {name: arrays[name] for name in names}


def _outputs(arrays, plan: Plan, size: Size) -> dict[str, jax.ShapeDtypeStruct]:
  """What the kernel writes, by name."""
  lead, written = (size.batch, size.heads), {}
  if plan.output:
    shape = arrays['values'].shape
    written['out'] = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  shape = (*lead, len(plan.running), size.width, WIDTH)
  written['final'] = jax.ShapeDtypeStruct(shape, jnp.float32)
  if plan.save_state:
    shape = (*lead, size.chunks, size.width, WIDTH)
    written['saved'] = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  return written


def scan(arrays: dict[str, jax.Array], plan: Plan) -> dict[str, jax.Array]:
  """Runs the recurrence.

  Args:
    arrays: minus_key, query, update [B, HV, N * 64, 128] bfloat16; scores
      [B, HV, N * 64, 64] bfloat16; gamma [B, HV, N, 128] float32;
      values [B, T, HV, V] bfloat16, V 64 or 128; flags [B, N * 64] int32 if
      plan.masked; initial [B, HV, P, V, 128] float32 for the P pieces that run,
      if plan.initial; first [B, HV, P, 128] int32, the chunk of its piece to
      begin with, if plan.skipping. See `mosaic_gpu_prep` for what they hold.
      Only what the plan uses is read.
    plan: see `Plan`. With several pieces each starts from its own state.

  Returns:
    out [B, T, HV, V] bfloat16 if plan.output; final [B, HV, P, V, 128]
    float32; saved [B, HV, N, V, 128] bfloat16 if plan.save_state.
  """
  size = _size_of(arrays)
  read = _inputs(arrays, plan, size.groups)
  written = _outputs(arrays, plan, size)
  shared = _stages(plan, size.groups)
  loaded = [n for n in shared if n not in _STAGED]
  return launch(
    'kda_scan',
    functools.partial(_body, plan, size),
    (read, written),
    size.batch * size.heads * len(plan.running),
    Block(size.groups, shared, len(loaded) + size.groups - 1),
  )
