"""Rows of every group times the group's matrix, on Hopper.

A persistent thread block takes every 132nd tile of the output. One warpgroup
copies operands into a ring of shared memory, past the end of a tile into the
next, and two others multiply, so that no tile waits for its first operands. A
tile belongs to one group: it starts where the group starts, rounded down to 8
rows as bulk copies need it, and rows of it outside the group are computed but
not stored. Rows past all groups are tiles without products, stored as zeros.

Suffixes: g rows sorted by group, e groups, k input width, n output width, c row
of a tile.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul import mosaic_gpu_store as store

PROCESSORS = 132
DEPTH = 64  # of one stage along the summed axis: 128 bytes
ALIGNMENT = 8  # rows
WORKERS = 2  # computing warpgroups


def transforms_of(swizzle: int) -> tuple:
  """How a bfloat16 tile lies in shared memory; `swizzle` in bytes."""
  tiling = plgpu.TilingTransform((8, swizzle // 2))
  return tiling, plgpu.SwizzleTransform(swizzle)


@dataclasses.dataclass(frozen=True)
class Plan:
  """Sizes of a tile.

  Attributes:
    rows, columns: of the output tile of a thread block.
    stages: of the ring.
    by_rows: the computing warpgroups share the tile by rows, else by columns.
    swizzle: bytes of 32, 64 or 128; both widths must be multiples of it.
    pairs: two thread blocks next to each other share their rows' copies.
    transposed: matrices are [E, N, K].
  """

  rows: int
  columns: int
  stages: int
  by_rows: bool = True
  swizzle: int = 128
  pairs: bool = False
  transposed: bool = False

  @property
  def blocks(self) -> int:
    """Thread blocks that work together."""
    return 2 if self.pairs else 1

  @property
  def share(self) -> tuple[int, int]:
    """Rows and columns of one warpgroup."""
    if self.by_rows:
      return self.rows // WORKERS, self.columns
    return self.rows, self.columns // WORKERS


class Tiles(NamedTuple):
  """Which rows each tile has; the arrays are as long as the worst case.

  Attributes:
    group: of the tile; the number of groups for rows past all groups.
    first: first row in units of 8.
    start, end: the rows of the group.
    count: [1], tiles in use.
  """

  group: jax.Array
  first: jax.Array
  start: jax.Array
  end: jax.Array
  count: jax.Array


def tiles_of(group_sizes_e, rows: int, tile: int) -> Tiles:
  """Cuts the groups, and the rows behind them, into tiles."""
  sizes_e = group_sizes_e.astype(jnp.int32)
  groups = sizes_e.shape[0]
  end_e = jnp.minimum(jnp.cumsum(sizes_e), rows)
  start_e = jnp.concatenate([jnp.zeros(1, jnp.int32), end_e])
  end_e = jnp.concatenate([end_e, jnp.full(1, rows, jnp.int32)])
  first_e = start_e // ALIGNMENT
  count_e = -(-(end_e - first_e * ALIGNMENT) // tile)
  count_e = jnp.where(end_e > start_e, count_e, 0)
  last_e = jnp.cumsum(count_e)
  slack = (groups + 1) * (tile + ALIGNMENT - 2) // tile
  index = jnp.arange(rows // tile + slack + 1, dtype=jnp.int32)
  group = jnp.sum(last_e <= index[:, None], axis=1, dtype=jnp.int32)
  group = jnp.minimum(group, groups)
  within = index - (last_e - count_e)[group]
  first = first_e[group] + within * (tile // ALIGNMENT)
  return Tiles(group, first, start_e[group], end_e[group], last_e[-1:])


def _copies(plan: Plan, refs, at):
  """(source, destination) of one stage. `at`: group, row, n, k, slot."""
  lhs, rhs, lhs_smem, rhs_smem = refs
  group, row, n, k, slot = at
  depth = pl.ds(k * DEPTH, DEPTH)
  columns = pl.ds(n * plan.columns, plan.columns)
  side = (columns, depth) if plan.transposed else (depth, columns)
  shared = 'pair' if plan.pairs else None
  yield lhs.at[pl.ds(row, plan.rows), depth], lhs_smem.at[slot], shared
  yield rhs.at[(group, *side)], rhs_smem.at[slot], None


def _multiply(plan: Plan, acc, tiles, worker):
  """One stage's products of one warpgroup, left running."""
  lhs, rhs = tiles
  rows, columns = plan.share
  if plan.by_rows:
    lhs = lhs.at[pl.ds(worker * rows, rows)]
  elif plan.transposed:
    rhs = rhs.at[pl.ds(worker * columns, columns)]
  else:
    rhs = rhs.at[:, pl.ds(worker * columns, columns)]
  plgpu.wgmma(acc, lhs, rhs.T if plan.transposed else rhs)


def released(plan):
  """The barrier of free stages, in both thread blocks of a pair."""
  sizes = dict(num_arrivals=WORKERS, num_barriers=plan.stages)
  if plan.pairs:
    return plgpu.ClusterBarrier(collective_axes=('pair',), **sizes)
  return plgpu.Barrier(**sizes)


def drain(plan, empty, total):
  """Waits for the last stages: no partner may write to a block that is gone."""

  @pl.loop(jnp.maximum(total - plan.stages, 0), total)
  def _(position):
    plgpu.barrier_wait(empty.at[lax.rem(position, plan.stages)])


def _body(plan: Plan, *refs):
  tiles, (lhs, rhs, out), scratch = Tiles(*refs[:5]), refs[5:8], refs[8:]
  lhs_smem, rhs_smem, full, empty = scratch
  block, role = lax.axis_index('block'), lax.axis_index('role')
  groups = rhs.shape[0]
  across = pl.cdiv(out.shape[1], plan.columns * plan.blocks)
  depth = pl.cdiv(lhs.shape[1], DEPTH)
  count, stride = tiles.count[0] * across, PROCESSORS // plan.blocks
  mine = lax.div(count - block + stride - 1, stride)

  def place(i):
    index = block + i * stride
    m, n = lax.div(index, across), lax.rem(index, across)
    return m, n * plan.blocks + lax.axis_index('pair')

  def steps_of(group):
    return jnp.where(group < groups, depth, 0)

  def produce(i, position):
    m, n = place(i)
    group = tiles.group[m]
    row = pl.multiple_of(tiles.first[m] * ALIGNMENT, ALIGNMENT)
    steps = steps_of(group)

    def fetch(k, _):
      slot = lax.rem(position + k, plan.stages)

      @pl.when(position + k >= plan.stages)
      def _():
        plgpu.barrier_wait(empty.at[slot])

      at = group, row, n, k, slot
      for source, target, axes in _copies(
        plan, (lhs, rhs, lhs_smem, rhs_smem), at
      ):
        plgpu.copy_gmem_to_smem(
          source, target, full.at[slot], collective_axes=axes
        )
      return ()

    lax.fori_loop(0, steps, fetch, ())
    return position + steps

  def compute(i, position):
    m, n = place(i)
    group, row = tiles.group[m], tiles.first[m] * ALIGNMENT
    window = row, n * plan.columns, tiles.start[m], tiles.end[m]
    steps = steps_of(group)

    def run(acc):
      def step(k, _):
        slot = lax.rem(position + k, plan.stages)
        plgpu.barrier_wait(full.at[slot])
        _multiply(plan, acc, (lhs_smem.at[slot], rhs_smem.at[slot]), role)
        plgpu.wgmma_wait(1)

        @pl.when(k > 0)
        def _():
          before = lax.rem(position + k - 1, plan.stages)
          plgpu.barrier_arrive(empty.at[before])

        return ()

      lax.fori_loop(0, steps, step, ())
      plgpu.wgmma_wait(0)

      @pl.when(steps > 0)
      def _():
        last = lax.rem(position + steps - 1, plan.stages)
        plgpu.barrier_arrive(empty.at[last])

      return acc[...]

    acc = pl.run_scoped(run, plgpu.ACC(plan.share))
    rows, columns = plan.share
    row, column, start, end = window
    if plan.by_rows:
      row = row + role * rows
    else:
      column = column + role * columns
    store.store(acc, out, store.Window(row, column, start, end))
    return position + steps

  @pl.when(role < WORKERS)
  def _():
    plgpu.set_max_registers(232, action='increase')
    lax.fori_loop(0, mine, compute, jnp.int32(0))

  @pl.when(role == WORKERS)
  def _():
    plgpu.set_max_registers(40, action='decrease')
    total = lax.fori_loop(0, mine, produce, jnp.int32(0))
    if plan.pairs:
      drain(plan, empty, total)


def multiply(lhs_gk, rhs_ekn, group_sizes_e, plan: Plan):
  """[G, N]; see `api.grouped_matmul`. rhs is [E, N, K] if plan.transposed."""
  rows = lhs_gk.shape[0]
  width = rhs_ekn.shape[1 if plan.transposed else 2]
  tiles = tiles_of(group_sizes_e, rows, plan.rows)
  side = plan.columns, DEPTH
  if not plan.transposed:
    side = side[::-1]
  ring = functools.partial(
    plgpu.SMEM, dtype=lhs_gk.dtype, transforms=transforms_of(plan.swizzle)
  )
  kernel = plgpu.kernel(
    functools.partial(_body, plan),
    out_type=jax.ShapeDtypeStruct((rows, width), lhs_gk.dtype),
    grid=(PROCESSORS // plan.blocks,),
    grid_names=('block',),
    cluster=(plan.blocks,),
    cluster_names=('pair',),
    num_threads=WORKERS + 1,
    thread_name='role',
    kernel_name='grouped_matmul_rows',
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane,
      reduction_scratch_bytes=0,
      unsafe_no_auto_barriers=True,
    ),
    scratch_types=[
      ring((plan.stages, plan.rows, DEPTH)),
      ring((plan.stages, *side)),
      plgpu.Barrier(num_arrivals=2, num_barriers=plan.stages),
      released(plan),
    ],
  )
  return kernel(*tiles, lhs_gk, rhs_ekn)
