"""Rows of every group times the group's matrix, on Hopper.

A tile belongs to one group: it starts where the group starts, rounded down to 8
rows as bulk copies need it, and rows of it outside the group are computed but
not stored. Rows past all groups are tiles without products, stored as zeros.

Copies to tiled memory insist on matrices whose width is a whole number of 64.
For other widths they fetch 64 columns at a time, which need no tiling, and fill
what is missing by zeros; each piece is then a product of its own.

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
from pallas_kernels.grouped_matmul import mosaic_gpu_tiles as tiles
from pallas_kernels.grouped_matmul.mosaic_gpu_ring import CHUNK, DEPTH
from pallas_kernels.grouped_matmul.mosaic_gpu_tiles import ALIGNMENT


class _Place(NamedTuple):
  """A tile: its group, first row and column, window of rows, and stages."""

  group: jax.Array
  row: jax.Array
  column: jax.Array
  start: jax.Array
  end: jax.Array
  steps: jax.Array


def _place(book: tiles.Book, sizes, i, index) -> _Place:
  """A tile, across before down.

  Args:
    book: of the tiles.
    sizes: blocks in a pair, and stages and columns of a tile.
    i: number of the tile among those of this block.
    index: number among all; a pair has one.
  """
  blocks, stages, columns = sizes
  across = book.cut.across
  group, n = book.group(i), lax.rem(index, across)
  start, end = book.bounds(group)
  within = lax.div(index, across) - book.first_tile(group)
  row = lax.div(start, ALIGNMENT) * ALIGNMENT + within * book.cut.tile
  if blocks > 1:
    n = n * blocks + lax.axis_index(ring.PAIR)
  steps = jnp.where(group < book.cut.groups, stages, 0)
  return _Place(group, row, n * columns, start, end, steps)


def _work(plan: ring.Plan, book: tiles.Book, outer, inner) -> ring.Work:
  lhs, rhs, out = outer
  (lhs_in, lhs_smem), (rhs_in, rhs_smem) = map(ring.views, inner)

  def copies(at, k, slot):
    depth = pl.ds(k * DEPTH, DEPTH)
    rows = pl.ds(pl.multiple_of(at.row, ALIGNMENT), plan.rows)
    columns = pl.ds(pl.multiple_of(at.column, plan.columns), plan.columns)
    side = (columns, depth) if plan.transposed else (depth, columns)
    shared = ring.PAIR if plan.pairs else None
    yield lhs.at[rows, depth], lhs_in.at[slot], shared
    if not plan.free_width:
      yield rhs.at[(at.group, *side)], rhs_in.at[slot], None
      return
    for i in range(plan.columns // CHUNK):
      columns = pl.ds(pl.multiple_of(at.column + i * CHUNK, CHUNK), CHUNK)
      yield rhs.at[at.group, depth, columns], rhs_in.at[slot, i], None

  def multiply(at, k, slot, acc):
    del at, k
    row, column = plan.corner(0, 0)
    rows, columns = (pl.ds(*x) for x in zip((row, column), plan.share))
    left = lhs_smem.at[slot, rows]
    if plan.free_width:
      for i in range(plan.pieces):
        right = rhs_smem.at[slot, lax.div(column, CHUNK) + i]
        plgpu.wgmma(acc.at[:, pl.ds(i * CHUNK, CHUNK)], left, right)
    elif plan.transposed:
      plgpu.wgmma(acc, left, rhs_smem.at[slot, columns].T)
    else:
      plgpu.wgmma(acc, left, rhs_smem.at[slot, :, columns])

  def write(at, acc):
    corner = plan.corner(at.row, at.column)
    store.store(acc, out, store.Window(*corner, at.start, at.end))

  stages = pl.cdiv(lhs.shape[1], DEPTH)
  place = functools.partial(_place, book, (plan.blocks, stages, plan.columns))
  return ring.Work(book.tiles(), place, copies, multiply, write)


def _body(plan: ring.Plan, cut: tiles.Cut, *refs):
  sizes, outer, words, inner = refs[0], refs[1:4], refs[4], refs[5:7]
  book = tiles.write_book(cut, sizes, words, lax.axis_index('block'))
  ring.run(plan, _work(plan, book, outer, inner), refs[7:])


def cut_rows(rows: int, groups: int, width: int, plan: ring.Plan) -> tiles.Cut:
  """Tiles of `multiply` with [G, N] for its output."""
  across = pl.cdiv(width, plan.columns * plan.blocks)
  return tiles.Cut(
    groups, rows, plan.rows, across, ring.PROCESSORS // plan.blocks
  )


def multiply(lhs_gk, rhs_ekn, group_sizes_e, plan: ring.Plan):
  """[G, N]; see `api.grouped_matmul`.

  rhs is [E, N, K] if plan.transposed; otherwise N is a whole number of 64, or
  plan.free_width says that it need not be.
  """
  rows = lhs_gk.shape[0]
  width = rhs_ekn.shape[1 if plan.transposed else 2]
  side, copies = (DEPTH, plan.columns), 2
  if plan.free_width:
    count = plan.columns // CHUNK
    side, copies = (count, DEPTH, CHUNK), count + 1
  elif plan.transposed:
    side = side[::-1]
  cut = cut_rows(rows, rhs_ekn.shape[0], width, plan)
  kernel = ring.kernel(
    plan,
    functools.partial(_body, plan, cut),
    name='grouped_matmul_rows',
    out=jax.ShapeDtypeStruct((rows, width), lhs_gk.dtype),
    book=cut.scratch(),
    tiles=((plan.rows, DEPTH), side),
    copies=copies,
  )
  return kernel(group_sizes_e.astype(jnp.int32), lhs_gk, rhs_ekn)
