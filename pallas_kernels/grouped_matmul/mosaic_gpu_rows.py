"""Rows of every group times the group's matrix, on Hopper.

A tile belongs to one group: it starts where the group starts, rounded down to 8
rows as bulk copies need it, and rows of it outside the group are computed but
not stored. Rows past all groups are tiles without products, stored as zeros.

Suffixes: g rows sorted by group, e groups, k input width, n output width, c row
of a tile.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul import mosaic_gpu_ring as ring
from pallas_kernels.grouped_matmul import mosaic_gpu_store as store
from pallas_kernels.grouped_matmul.mosaic_gpu_ring import ALIGNMENT, DEPTH


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


class _Place(NamedTuple):
  """A tile: its group, first row and column, window of rows, and stages."""

  group: jax.Array
  row: jax.Array
  column: jax.Array
  start: jax.Array
  end: jax.Array
  steps: jax.Array


def _place(grid, tiles: Tiles, widths, index) -> _Place:
  """The tile of a number, across before down.

  Args:
    grid: tiles across the output, a pair as one, and blocks in a pair.
    tiles: see `Tiles`.
    widths: groups, and stages and columns of a tile.
    index: the number; a pair has one.
  """
  (across, blocks), (groups, stages, columns) = grid, widths
  m, n = lax.div(index, across), lax.rem(index, across)
  if blocks > 1:
    n = n * blocks + lax.axis_index(ring.PAIR)
  group, row = tiles.group[m], tiles.first[m] * ALIGNMENT
  steps = jnp.where(group < groups, stages, 0)
  return _Place(group, row, n * columns, tiles.start[m], tiles.end[m], steps)


def _work(plan: ring.Plan, tiles: Tiles, outer, inner) -> ring.Work:
  lhs, rhs, out = outer
  (lhs_in, lhs_smem), (rhs_in, rhs_smem) = map(ring.views, inner)
  across = pl.cdiv(out.shape[1], plan.columns * plan.blocks)
  grid = across, plan.blocks
  widths = rhs.shape[0], pl.cdiv(lhs.shape[1], DEPTH), plan.columns

  def copies(at, k, slot):
    depth = pl.ds(k * DEPTH, DEPTH)
    rows = pl.ds(pl.multiple_of(at.row, ALIGNMENT), plan.rows)
    columns = pl.ds(pl.multiple_of(at.column, plan.columns), plan.columns)
    side = (columns, depth) if plan.transposed else (depth, columns)
    shared = ring.PAIR if plan.pairs else None
    yield lhs.at[rows, depth], lhs_in.at[slot], shared
    yield rhs.at[(at.group, *side)], rhs_in.at[slot], None

  def multiply(at, k, slot, acc):
    del at, k
    row, column = plan.corner(0, 0)
    rows, columns = (pl.ds(*x) for x in zip((row, column), plan.share))
    left = lhs_smem.at[slot, rows]
    if plan.transposed:
      right = rhs_smem.at[slot, columns].T
    else:
      right = rhs_smem.at[slot, :, columns]
    plgpu.wgmma(acc, left, right)

  def write(at, acc):
    corner = plan.corner(at.row, at.column)
    store.store(acc, out, store.Window(*corner, at.start, at.end))

  place = functools.partial(_place, grid, tiles, widths)
  return ring.Work(tiles.count[0] * across, place, copies, multiply, write)


def _turned_work(plan: ring.Plan, tiles: Tiles, outer, inner) -> ring.Work:
  """Tiles are those of [N, G]: each warpgroup has 64 columns of the output."""
  lhs, rhs, out = outer
  (rhs_in, rhs_smem), (lhs_in, lhs_smem) = map(ring.views, inner)
  across = pl.cdiv(out.shape[1], plan.rows)
  widths = rhs.shape[0], pl.cdiv(lhs.shape[1], DEPTH), plan.rows
  width = plan.share[0]

  def copies(at, k, slot):
    depth = pl.ds(k * DEPTH, DEPTH)
    for i in range(plan.chunks):
      columns = pl.ds(pl.multiple_of(at.column + i * width, width), width)
      yield rhs.at[at.group, depth, columns], rhs_in.at[slot, i], None
    rows = pl.ds(pl.multiple_of(at.row, ALIGNMENT), plan.columns)
    yield lhs.at[rows, depth], lhs_in.at[slot], None

  def multiply(at, k, slot, acc):
    del at, k
    left = rhs_smem.at[slot, lax.axis_index('role')]
    plgpu.wgmma(acc, left.T, lhs_smem.at[slot].T)

  def write(at, acc):
    column, row = plan.corner(at.column, at.row)
    window = store.Window(row, column, at.start, at.end)
    store.store_transposed(acc, out, window)

  place = functools.partial(_place, (across, 1), tiles, widths)
  return ring.Work(tiles.count[0] * across, place, copies, multiply, write)


def _body(plan: ring.Plan, work, *refs):
  tiles, outer, inner, barriers = refs[:5], refs[5:8], refs[8:10], refs[10:]
  ring.run(plan, work(plan, Tiles(*tiles), outer, inner), barriers)


def multiply(lhs_gk, rhs_ekn, group_sizes_e, plan: ring.Plan):
  """[G, N]; see `api.grouped_matmul`.

  rhs is [E, N, K] if plan.transposed; otherwise N is a whole number of 64, or
  see `multiply_turned`.
  """
  rows = lhs_gk.shape[0]
  width = rhs_ekn.shape[1 if plan.transposed else 2]
  side = DEPTH, plan.columns
  kernel = ring.kernel(
    plan,
    functools.partial(_body, plan, _work),
    name='grouped_matmul_rows',
    out=jax.ShapeDtypeStruct((rows, width), lhs_gk.dtype),
    tiles=((plan.rows, DEPTH), side[::-1] if plan.transposed else side),
  )
  tiles = tiles_of(group_sizes_e, rows, plan.rows)
  return kernel(*tiles, lhs_gk, rhs_ekn)


def multiply_turned(lhs_gk, rhs_ekn, group_sizes_e, plan: ring.Plan):
  """[G, N] for any N in multiples of 8, by tiles of the transposed output.

  plan.rows counts columns of the output and is 128, plan.columns its rows.
  """
  out = jax.ShapeDtypeStruct((lhs_gk.shape[0], rhs_ekn.shape[2]), lhs_gk.dtype)
  kernel = ring.kernel(
    plan,
    functools.partial(_body, plan, _turned_work),
    name='grouped_matmul_rows_turned',
    out=out,
    tiles=((plan.chunks, DEPTH, plan.share[0]), (plan.columns, DEPTH)),
    copies=plan.chunks + 1,
  )
  tiles = tiles_of(group_sizes_e, lhs_gk.shape[0], plan.columns)
  return kernel(*tiles, lhs_gk, rhs_ekn)
