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
operands.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kda.mosaic_gpu_place import CHUNK, VALID, WIDTH

_ROWS = 64  # rows of values of one computing warpgroup
_STAGES = 2
_TILE = plgpu.Layout.WGMMA
_PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)
_TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_STAGED = ('d_values', 'd_state')  # buffers of results


@dataclasses.dataclass(frozen=True)
class Plan:
  """What one reverse scan reads and writes.

  Attributes:
    pieces: independent ranges of equal length that the chunks are cut into.
    some: the first piece to run and the one to stop before; all if None.
    cotangent: dO is read; otherwise it is zero, and the result is the linear
      map of each range applied to `leaving`, to twice the precision of a
      bfloat16 operand: it will be a factor of many states.
    output: the gradient of V and the cotangents between chunks are written.
    leaving: the cotangents that leave the pieces are read, otherwise zero.
    masked: rows of dO that belong to no token are ignored.
  """

  pieces: int = 1
  some: tuple[int, int] | None = None
  cotangent: bool = True
  output: bool = True
  leaving: bool = True
  masked: bool = False

  @property
  def running(self) -> range:
    """Pieces that run."""
    return range(*(self.some or (0, self.pieces)))

  @property
  def flagged(self) -> bool:
    """Whether flags of tokens are read."""
    return self.cotangent and self.masked


@dataclasses.dataclass(frozen=True)
class Size:
  """Rows, value heads, chunks of the operands, and value width."""

  batch: int
  heads: int
  chunks: int
  width: int

  @property
  def groups(self) -> int:
    """Computing warpgroups of a thread block."""
    return self.width // _ROWS


def _accumulate(*sums):
  """For each (start, [(left, right), ...]): start + all products, at once."""

  def body(accumulators):
    for acc, (_, products) in zip(accumulators, sums):
      for left, right in products:
        plgpu.wgmma(acc, left, right)

  starts = tuple(plgpu.ACC.init(start) for start, _ in sums)
  # Without the barrier reads of the results may be scheduled above the wait.
  return lax.optimization_barrier(pl.run_state(body)(starts))


def _zeros(shape: tuple[int, int]) -> jax.Array:
  return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _TILE)


def _load(ref, layout=_TILE) -> jax.Array:
  return plgpu.load(ref, layout=layout, optimized=False)


def _parts(x: jax.Array, exact: bool) -> list[jax.Array]:
  """x as one bfloat16 operand, or as two that add up to it."""
  high = x.astype(jnp.bfloat16)
  if not exact:
    return [high]
  high = lax.optimization_barrier(high)
  return [high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)]


def _d_out(plan: Plan, stage, slot, rows) -> jax.Array:
  """dO^T of a chunk, zero where there is no token."""
  d_out_vc = _load(stage['d_out'].at[slot, rows].T)
  if not plan.masked:
    return d_out_vc
  flags_c = _load(stage['flags'].at[slot], _PER_COLUMN)
  shape = d_out_vc.shape
  valid_vc = lax.broadcast_in_dim(flags_c & (1 << VALID), shape, [1]) != 0
  wide_vc = jnp.where(valid_vc, d_out_vc.astype(jnp.float32), 0.0)
  return wide_vc.astype(jnp.bfloat16)


def _chunk_step(plan: Plan, stage, at, x_vk):
  """One chunk: (dE^T, the cotangent before it). `at`: slot, and row block."""
  slot, rows = at
  exact = not plan.cotangent
  decay = _load(stage['gamma'].at[slot], _PER_COLUMN)
  kept_vk = x_vk * lax.broadcast_in_dim(decay, x_vk.shape, [1])
  update = stage['update'].at[slot].T
  products = [(part, update) for part in _parts(x_vk, exact)]
  sums = [(_zeros((_ROWS, CHUNK)), products)]
  if plan.cotangent:
    d_out_vc = _d_out(plan, stage, slot, rows)
    products.insert(0, (d_out_vc, stage['scores'].at[slot]))
    sums.append((kept_vk, [(d_out_vc, stage['query'].at[slot])]))
  e_vc, *state_vk = _accumulate(*sums)
  start = state_vk[0] if plan.cotangent else kept_vk
  minus_key = stage['minus_key'].at[slot]
  products = [(part, minus_key) for part in _parts(e_vc, exact)]
  (x_vk,) = _accumulate((start, products))
  return e_vc, x_vk


def _compute(plan: Plan, place, refs):
  """The work of one computing warpgroup: its rows through all its chunks."""
  outer, stage, barriers = refs
  b, head, piece, first, chunks = place
  full, empty = barriers
  rows = lax.axis_index('role')
  own = pl.ds(rows * _ROWS, _ROWS)
  if plan.leaving:
    state = _load(outer['leaving'].at[b, head, piece, own])
  else:
    state = _zeros((_ROWS, WIDTH))

  def step(n, x_vk):
    slot, chunk = lax.rem(n, _STAGES), first + chunks - 1 - n
    if plan.output:
      staged = stage['d_state'].at[rows]
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      staged[...] = x_vk.astype(jnp.bfloat16)
      plgpu.commit_smem()
      dest = outer['d_state'].at[b, head, chunk, own]
      plgpu.copy_smem_to_gmem(staged, dest)
    plgpu.barrier_wait(full.at[slot])
    e_vc, x_vk = _chunk_step(plan, stage, (slot, rows), x_vk)
    plgpu.barrier_arrive(empty.at[slot])
    if plan.output:
      staged = stage['d_values'].at[rows]
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      staged.T[...] = e_vc.astype(jnp.bfloat16)
      plgpu.commit_smem()
      tokens = pl.ds(chunk * CHUNK, CHUNK)
      dest = outer['d_values'].at[b, tokens, head, own]
      plgpu.copy_smem_to_gmem(staged, dest)
    return x_vk

  state = lax.fori_loop(0, chunks, step, state)
  outer['entering'].at[b, head, piece, own][...] = state
  plgpu.wait_smem_to_gmem(0)


def _operands(plan: Plan) -> list[str]:
  """The names of the operands that are read."""
  needed = ['minus_key', 'update']
  return needed + ['query', 'scores'] * plan.cotangent


def _fetch(plan: Plan, place, n, refs):
  """Starts the copies of this block's n-th chunk, counted from its last."""
  outer, stage, barriers = refs
  b, head, _, first, chunks = place
  slot, chunk = lax.rem(n, _STAGES), first + chunks - 1 - n
  arrived = barriers[0].at[slot]
  tokens = pl.ds(chunk * CHUNK, CHUNK)

  def copy(source, dest):
    plgpu.copy_gmem_to_smem(source, dest, arrived)

  copy(outer['gamma'].at[b, head, chunk], stage['gamma'].at[slot])
  for name in _operands(plan):
    copy(outer[name].at[b, head, tokens], stage[name].at[slot])
  if plan.flagged:
    copy(outer['flags'].at[b, tokens], stage['flags'].at[slot])
  if plan.cotangent:
    for rows in range(stage['d_out'].shape[1]):
      own = pl.ds(_ROWS * rows, _ROWS)
      source = outer['d_out'].at[b, tokens, head, own]
      copy(source, stage['d_out'].at[slot, rows])


def _produce(plan: Plan, place, refs):
  """Keeps the ring of stages full."""
  chunks, barriers = place[4], refs[2]

  @pl.loop(0, jnp.minimum(chunks, _STAGES))
  def _(n):
    _fetch(plan, place, n, refs)

  @pl.loop(_STAGES, chunks)
  def _(n):
    plgpu.barrier_wait(barriers[1].at[lax.rem(n, _STAGES)])
    _fetch(plan, place, n, refs)


def _body(plan: Plan, size: Size, names, *refs):
  """One thread block: value head, batch row and range of chunks."""
  outer = dict(zip(names, refs))
  *tiles, full, empty, done = refs[len(names) :]
  index = lax.axis_index('block')
  stage = dict(zip(_stages(plan, size.groups), tiles))
  head, rest = lax.rem(index, size.heads), lax.div(index, size.heads)
  count = len(plan.running)
  piece, b = lax.rem(rest, count), lax.div(rest, count)
  longest = pl.cdiv(size.chunks, plan.pieces)
  first = (piece + plan.running.start) * longest
  place = (b, head, piece, first, jnp.minimum(longest, size.chunks - first))
  role = lax.axis_index('role')
  refs = outer, stage, (full, empty)

  @pl.when(role < size.groups)
  def _():
    plgpu.set_max_registers(224, action='increase')
    _compute(plan, place, refs)

  @pl.when(role == size.groups)
  def _():
    plgpu.set_max_registers(40, action='decrease')
    _produce(plan, place, refs)

  plgpu.barrier_arrive(done)
  plgpu.barrier_wait(done)


def _tile(*shape: int):
  return plgpu.SMEM(shape, jnp.bfloat16, transforms=_TRANSFORMS)


def _stages(plan: Plan, groups: int) -> dict:
  """Shared memory by name."""
  ring = _STAGES
  width = {'scores': CHUNK}
  stage = {n: _tile(ring, CHUNK, width.get(n, WIDTH)) for n in _operands(plan)}
  stage['gamma'] = plgpu.SMEM((ring, WIDTH), jnp.float32)
  if plan.cotangent:
    stage['d_out'] = _tile(ring, groups, CHUNK, _ROWS)
  if plan.flagged:
    stage['flags'] = plgpu.SMEM((ring, CHUNK), jnp.int32)
  if plan.output:
    stage['d_values'] = _tile(groups, CHUNK, _ROWS)
    stage['d_state'] = _tile(groups, _ROWS, WIDTH)
  return stage


def _inputs(arrays: dict[str, jax.Array], plan: Plan, groups: int) -> dict:
  """What the kernel reads, by name."""
  names = [n for n in _stages(plan, groups) if n not in _STAGED]
  return {name: arrays[name] for name in names + ['leaving'] * plan.leaving}


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


def _scratch(plan: Plan, groups: int) -> list:
  """Shared memory and barriers of a thread block."""
  stage = _stages(plan, groups)
  loaded = [n for n in stage if n not in _STAGED]
  copies = len(loaded) + (groups - 1) * plan.cotangent
  return [
    *stage.values(),
    plgpu.Barrier(num_arrivals=copies, num_barriers=_STAGES),
    plgpu.Barrier(num_arrivals=groups, num_barriers=_STAGES),
    plgpu.Barrier(num_arrivals=groups + 1),
  ]


def scan(arrays: dict[str, jax.Array], plan: Plan) -> dict[str, jax.Array]:
  """Runs the recurrence of cotangents.

  Args:
    arrays: minus_key, query, update [B, HV, N * 64, 128] bfloat16; scores
      [B, HV, N * 64, 64] bfloat16; gamma [B, HV, N, 128] float32, as
      `mosaic_gpu_prep` makes them; d_out [B, T, HV, V] bfloat16, V 64 or 128,
      the cotangent of the output; flags [B, N * 64] int32 if plan.masked;
      leaving [B, HV, P, V, 128] float32, the cotangents of the states that
      leave the P pieces that run, if plan.leaving. Only what the plan uses is
      read.
    plan: see `Plan`. With several pieces each starts from its own cotangent.

  Returns:
    entering [B, HV, P, V, 128] float32, the cotangents of the states that
    enter the pieces; if plan.output also d_values [B, T, HV, V] bfloat16, the
    gradient of V, and d_state [B, HV, N, V, 128] bfloat16, the cotangent of
    the state that leaves each chunk.
  """
  batch, heads, padded, _ = arrays['minus_key'].shape
  width = arrays['d_out'].shape[3] if plan.cotangent else WIDTH
  size = Size(batch, heads, padded // CHUNK, width)
  read = _inputs(arrays, plan, size.groups)
  written = _outputs(arrays, plan, size)
  names = (*read, *written)
  kernel = plgpu.kernel(
    lambda *refs: _body(plan, size, names, *refs),
    out_type=tuple(written.values()),
    grid=(batch * heads * len(plan.running),),
    grid_names=('block',),
    num_threads=size.groups + 1,
    thread_name='role',
    kernel_name='kda_reverse_scan',
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
    ),
    scratch_types=_scratch(plan, size.groups),
  )
  return dict(zip(written, kernel(*read.values())))


def in_pieces(
  arrays: dict[str, jax.Array], pieces: int, masked: bool
) -> dict[str, jax.Array]:
  """`scan` of whole chains that are cut into pieces.

  A piece maps the cotangent dS that leaves it to dS M + c, transposed states.
  A scan from zero gives c, a scan of the identity without dO gives M.

  Args:
    arrays: as for `scan`; 'leaving' [B, HV, 1, V, 128] float32, of the whole
      chains, may be missing and is then zero.
    pieces: ranges that each chain is cut into.
    masked: as in `Plan`.

  Returns:
    d_values, d_state as `scan`; entering [B, HV, P, V, 128], of which the
    first piece's is that of the whole chains.
  """
  plan = lambda **more: Plan(pieces=pieces, masked=masked, **more)
  last = arrays.get('leaving')
  if pieces > 1:
    leaving = _piece_cotangents(arrays, last, plan)
    arrays, last = arrays | {'leaving': leaving}, leaving
  return scan(arrays, plan(leaving=last is not None))


def _piece_cotangents(arrays: dict, last, plan) -> jax.Array:
  """Cotangent [B, HV, P, V, K] of the state that leaves each piece."""
  pieces = plan().pieces
  zero = plan(leaving=False, output=False, some=(1, pieces))
  constant_bhpvk = scan(arrays, zero)['entering']
  shape = constant_bhpvk.shape
  # From zero the last piece needs no map.
  stop = pieces if last is not None else pieces - 1
  if last is None:
    state_bhvk = jnp.zeros_like(constant_bhpvk[:, :, 0])
  else:
    state_bhvk = last[:, :, 0]
  if stop > 1:
    identity = jnp.eye(WIDTH, dtype=jnp.float32)
    identity = jnp.broadcast_to(
      identity, (*shape[:2], stop - 1, *identity.shape)
    )
    linear = plan(cotangent=False, output=False, some=(1, stop))
    maps_bhpkl = scan(arrays | {'leaving': identity}, linear)['entering']
  states = [state_bhvk]
  for p in reversed(range(1, pieces)):
    moved_bhvl = constant_bhpvk[:, :, p - 1]
    if p < stop:
      moved_bhvl += jnp.einsum(
        'bhvk,bhkl->bhvl',
        states[-1],
        maps_bhpkl[:, :, p - 1],
        precision='highest',
      )
    states.append(moved_bhvl)
  return jnp.stack(states[::-1], axis=2)
