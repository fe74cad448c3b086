"""The gradient of Kimi Delta Attention's recurrence over chunks, on Hopper.

The mirror of `mosaic_gpu_scan`, with the same operands. Where the forward did

    E = V - k~ S      O = scale q~ S + Q E      S' = diag(gamma) S + W^T E

this goes through the chunks from the last to the first, dS' the cotangent of
the state that leaves a chunk, dO of its output, differentiated by hand from
Kimi Linear (arXiv 2510.26692):

    dE = Q^T dO + W dS'
    dS = diag(gamma) dS' + (scale q~)^T dO - k~^T dE

V enters E as it is, so dE is the gradient of V. As in the forward everything is
held transposed, values along rows, so that left operands stay in registers and
only two products of a chunk wait for each other. Masks of documents are in the
operands. Pieces of a chain are counted from its end, where this scan begins.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kda import mosaic_gpu_pieces as chain_pieces
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

_OPERANDS = ('minus_key', 'update', 'query', 'scores')
_STAGED = ('d_values', 'd_state')  # buffers of results


@dataclasses.dataclass(frozen=True)
class Plan:
  """What one reverse scan reads and writes.

  Attributes:
    pieces: independent ranges of equal length that the chunks are cut into.
    some: the first piece to run and the one to stop before; all if None.
    output: the gradient of V and the cotangents between chunks are written.
    leaving: the cotangents that leave the pieces are read, otherwise zero.
    masked: rows of dO that belong to no token are ignored.
    skipping: each piece begins `first` chunks later.
  """

  pieces: int = 1
  some: tuple[int, int] | None = None
  output: bool = True
  leaving: bool = True
  masked: bool = False
  skipping: bool = False

  @property
  def running(self) -> range:
    """Pieces that run."""
    return range(*(self.some or (0, self.pieces)))


def _d_out(plan: Plan, stage, slot, rows) -> jax.Array:
  """dO^T of a chunk, zero where there is no token."""
  d_out_vc = load(stage['d_out'].at[slot, rows].T)
  if not plan.masked:
    return d_out_vc
  flags_c = load(stage['flags'].at[slot], PER_COLUMN)
  shape = d_out_vc.shape
  valid_vc = lax.broadcast_in_dim(flags_c & (1 << VALID), shape, [1]) != 0
  wide_vc = jnp.where(valid_vc, d_out_vc.astype(jnp.float32), 0.0)
  return wide_vc.astype(jnp.bfloat16)


def _chunk_step(plan: Plan, stage, at, x_vk):
  """One chunk: (dE^T, the cotangent before it). `at`: slot, and row block."""
  slot, rows = at
  operand = {name: stage[name].at[slot] for name in _OPERANDS}
  decay = load(stage['gamma'].at[slot], PER_COLUMN)
  kept_vk = x_vk * lax.broadcast_in_dim(decay, x_vk.shape, [1])
  left, d_out_vc = x_vk.astype(jnp.bfloat16), _d_out(plan, stage, slot, rows)
  e_vc, x_vk = accumulate(
    (
      zeros((ROWS, CHUNK)),
      [(d_out_vc, operand['scores']), (left, operand['update'].T)],
    ),
    (kept_vk, [(d_out_vc, operand['query'])]),
  )
  left = e_vc.astype(jnp.bfloat16)
  (x_vk,) = accumulate((x_vk, [(left, operand['minus_key'])]))
  return e_vc, x_vk


def _compute(plan: Plan, place, refs):
  """The work of one computing warpgroup: its rows through all its chunks."""
  outer, stage, barriers = refs
  b, head, piece, first, chunks = place
  full, empty = barriers
  rows = lax.axis_index('role')
  own = pl.ds(rows * ROWS, ROWS)
  if plan.leaving:
    state = load(outer['leaving'].at[b, head, piece, own])
  else:
    state = zeros((ROWS, WIDTH))

  def step(n, x_vk):
    slot, chunk = lax.rem(n, STAGES), first + chunks - 1 - n
    if plan.output:
      staged = stage['d_state'].at[rows]
      plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # of one chunk ago
      staged[...] = x_vk.astype(jnp.bfloat16)
      plgpu.commit_smem()
      dest = outer['d_state'].at[b, head, chunk, own]
      plgpu.copy_smem_to_gmem(staged, dest)
    plgpu.barrier_wait(full.at[slot])
    e_vc, x_vk = _chunk_step(plan, stage, (slot, rows), x_vk)
    plgpu.barrier_arrive(empty.at[slot])
    if plan.output:
      staged = stage['d_values'].at[rows]
      plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # of one chunk ago
      staged.T[...] = e_vc.astype(jnp.bfloat16)
      plgpu.commit_smem()
      tokens = pl.ds(chunk * CHUNK, CHUNK)
      dest = outer['d_values'].at[b, tokens, head, own]
      plgpu.copy_smem_to_gmem(staged, dest)
    return x_vk

  state = lax.fori_loop(0, chunks, step, state)
  outer['entering'].at[b, head, piece, own][...] = state
  plgpu.wait_smem_to_gmem(0)


def _fetch(plan: Plan, place, n, refs):
  """Starts the copies of this block's n-th chunk, counted from its last."""
  outer, stage, barriers = refs
  b, head, _, first, chunks = place
  slot, chunk = lax.rem(n, STAGES), first + chunks - 1 - n
  arrived = barriers[0].at[slot]
  tokens = pl.ds(chunk * CHUNK, CHUNK)

  def copy(source, dest):
    plgpu.copy_gmem_to_smem(source, dest, arrived)

  copy(outer['gamma'].at[b, head, chunk], stage['gamma'].at[slot])
  for name in _OPERANDS:
    copy(outer[name].at[b, head, tokens], stage[name].at[slot])
  if plan.masked:
    copy(outer['flags'].at[b, tokens], stage['flags'].at[slot])
  for rows in range(stage['d_out'].shape[1]):
    own = pl.ds(ROWS * rows, ROWS)
    source = outer['d_out'].at[b, tokens, head, own]
    copy(source, stage['d_out'].at[slot, rows])


def _body(plan: Plan, size: Size, outer, stage, barriers, done):
  """One thread block: value head, batch row and range of chunks."""
  index = lax.axis_index('block')
  head, rest = lax.rem(index, size.heads), lax.div(index, size.heads)
  count = len(plan.running)
  piece, b = lax.rem(rest, count), lax.div(rest, count)
  longest = pl.cdiv(size.chunks, plan.pieces)
  first = (plan.pieces - 1 - plan.running.start - piece) * longest
  chunks = jnp.minimum(longest, size.chunks - first)
  if plan.skipping:
    chunks -= outer['first'][b, head, piece, 0]
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
  width = {'scores': CHUNK}
  stage = {n: tile(ring, CHUNK, width.get(n, WIDTH)) for n in _OPERANDS}
  stage['gamma'] = plgpu.SMEM((ring, WIDTH), jnp.float32)
  stage['d_out'] = tile(ring, groups, CHUNK, ROWS)
  if plan.masked:
    stage['flags'] = plgpu.SMEM((ring, CHUNK), jnp.int32)
  if plan.output:
    stage['d_values'] = tile(groups, CHUNK, ROWS)
    stage['d_state'] = tile(groups, ROWS, WIDTH)
  return stage


def _inputs(arrays: dict[str, jax.Array], plan: Plan, groups: int) -> dict:
  """What the kernel reads, by name."""
  names = [n for n in _stages(plan, groups) if n not in _STAGED]
  names += ['leaving'] * plan.leaving + ['first'] * plan.skipping
  return {name: arrays[name] for name in names}


def _outputs(arrays, plan: Plan, size: Size) -> dict[str, jax.ShapeDtypeStruct]:
  """What the kernel writes, by name."""
  lead, written = (size.batch, size.heads), {}
  if plan.output:
    shape = arrays['d_out'].shape
    written['d_values'] = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    shape = (*lead, size.chunks, size.width, WIDTH)
    written['d_state'] = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  shape = (*lead, len(plan.running), size.width, WIDTH)
  written['entering'] = jax.ShapeDtypeStruct(shape, jnp.float32)
  return written


def scan(arrays: dict[str, jax.Array], plan: Plan) -> dict[str, jax.Array]:
  """Runs the recurrence of cotangents.

  Args:
    arrays: minus_key, query, update [B, HV, N * 64, 128] bfloat16; scores
      [B, HV, N * 64, 64] bfloat16; gamma [B, HV, N, 128] float32, as
      `mosaic_gpu_prep` makes them; d_out [B, T, HV, V] bfloat16, V 64 or 128,
      the cotangent of the output; flags [B, N * 64] int32 if plan.masked;
      leaving [B, HV, P, V, 128] float32, the cotangents of the states that
      leave the P pieces that run, if plan.leaving; first [B, HV, P, .] int32,
      how many chunks each leaves out, if plan.skipping.
    plan: see `Plan`. With several pieces each starts from its own cotangent.

  Returns:
    entering [B, HV, P, V, 128] float32, the cotangents of the states that
    enter the pieces; if plan.output also d_values [B, T, HV, V] bfloat16, the
    gradient of V, and d_state [B, HV, N, V, 128] bfloat16, the cotangent of
    the state that leaves each chunk.
  """
  batch, heads, padded, _ = arrays['minus_key'].shape
  size = Size(batch, heads, padded // CHUNK, arrays['d_out'].shape[3])
  read = _inputs(arrays, plan, size.groups)
  written = _outputs(arrays, plan, size)
  shared = _stages(plan, size.groups)
  loaded = [n for n in shared if n not in _STAGED]
  return launch(
    'kda_reverse_scan',
    functools.partial(_body, plan, size),
    (read, written),
    batch * heads * len(plan.running),
    Block(size.groups, shared, len(loaded) + size.groups - 1),
  )


def in_pieces(
  arrays: dict[str, jax.Array], pieces: int, masked: bool
) -> dict[str, jax.Array]:
  """`scan` of whole chains that are cut into pieces.

  As in `mosaic_gpu_pieces.entering`, a scan from zero gives what the chunks of
  a piece add to the cotangent that leaves the piece before it.

  Args:
    arrays: as for `scan`; 'leaving' [B, HV, 1, V, 128] float32, of the whole
      chains, may be missing and is then zero.
    pieces: ranges that each chain is cut into.
    masked: as in `Plan`.

  Returns:
    d_values, d_state as `scan`; entering [B, HV, V, 128], the cotangent of the
    state that enters each chain.
  """
  plan = lambda **more: Plan(pieces=pieces, masked=masked, **more)
  if pieces > 1:
    found = chain_pieces.maps(arrays, pieces, reverse=True)
    zero = plan(
      leaving=False, output=False, some=(0, pieces - 1), skipping=True
    )
    scanned = scan(arrays | {'first': found['first']}, zero)
    found['constant'] = scanned['entering']
    if 'leaving' in arrays:
      found['initial'] = arrays['leaving']
    arrays = arrays | {'leaving': chain_pieces.fold(found)}
  results = scan(arrays, plan(leaving='leaving' in arrays))
  return results | {'entering': results['entering'][:, :, -1]}
