"""Per group, the transposed rows times the gradient's rows, on Hopper.

    out_e = sum over the rows g of group e of lhs_g^T dout_g

The summed axis is the ragged one. Stages hold rows from the group's first on,
rounded down to 8; rows of them that belong to another group are set to zero in
shared memory, on both sides, so that what they hold, NaN included, stays out.
An empty group is a tile without products: exact zeros are stored.

Suffixes: g rows sorted by group, e groups, k input width, n output width.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm

from pallas_kernels.grouped_matmul import mosaic_gpu_ring as ring
from pallas_kernels.grouped_matmul import mosaic_gpu_store as store
from pallas_kernels.grouped_matmul import mosaic_gpu_tiles as tiles
from pallas_kernels.grouped_matmul.mosaic_gpu_tiles import ALIGNMENT
from pallas_kernels.kda import mosaic_gpu_warp as warp


def _clear(plan: ring.Plan, tile, first, last):
  """Sets rows outside [first, last) of a [depth, columns] tile to zero.

  All columns of it, by each warpgroup that calls: two of them write the same.
  """
  scalar = plgpu.Layout.WG_SPLAT(())
  tiled = plgpu.RefType(plan.transforms)

  @plgpu.inline_mgpu(arg_types=(tiled, (scalar, scalar)))
  def emit(ctx, tile, bounds):
    del ctx
    _emit_clear(plan, tile, [x.registers.item() for x in bounds])
    nvvm.fence_proxy(
      nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta
    )
    utils.warpgroup_barrier()

  emit(tile, (first, last))


def _emit_clear(plan: ring.Plan, tile, bounds):
  """Eight lanes write 128 bytes of a row, in blocks of 8 rows by `swizzle`."""
  swizzle, blocks = plan.swizzle, ir.MemRefType(tile.type).shape[1]
  block, pieces = 8 * swizzle, swizzle // 16
  thread = warp.bit_and(utils.thread_idx(), 127)
  lane, low = warp.bit_and(thread, 7), warp.shift_right(thread, 3)
  piece = warp.shift_left(warp.bit_and(lane, pieces - 1), 4)
  across = warp.times(warp.shift_right(lane, pieces.bit_length() - 1), block)
  base = warp.add(warp.shared_address(tile), warp.add(across, piece))
  nothing = [warp.word(0)] * 4
  for i in range(plan.depth // 16):
    row = warp.add(low, 16 * i)
    outside = arith.ori(
      warp.compare(row, 'slt', bounds[0]), warp.compare(row, 'sge', bounds[1])
    )
    down = warp.times(warp.shift_right(row, 3), block * blocks)
    within = warp.times(warp.bit_and(row, 7), swizzle)
    address = warp.add(base, warp.add(down, within))
    for j in range(blocks * pieces // 8):
      warp.store(address, j * block * 8 // pieces, nothing, outside)


class _Place(NamedTuple):
  """A tile: its group, corner, first row to read, rows in use, and stages."""

  group: jax.Array
  row: jax.Array
  column: jax.Array
  first: jax.Array
  start: jax.Array
  end: jax.Array
  steps: jax.Array


def _work(plan: ring.Plan, book: tiles.Book, outer, inner) -> ring.Work:
  left, right, out = outer
  (left_in, left_tile), (right_in, right_tile) = map(ring.views, inner)
  chunk = plan.rows // plan.chunks
  own = lax.axis_index('role') if plan.chunks > 1 else 0

  def copies(at, k, slot):
    rows = pl.ds(
      pl.multiple_of(at.first + k * plan.depth, ALIGNMENT), plan.depth
    )
    shared = ring.PAIR if plan.pairs else None
    for i in range(plan.chunks):
      columns = pl.ds(pl.multiple_of(at.row + i * chunk, chunk), chunk)
      yield left.at[rows, columns], left_in.at[slot, i], shared
    columns = pl.ds(pl.multiple_of(at.column, plan.columns), plan.columns)
    yield right.at[rows, columns], right_in.at[slot], None

  def multiply(at, k, slot, acc):
    first = at.first + k * plan.depth
    sides = left_tile.at[slot, own], right_tile.at[slot]

    @pl.when((first < at.start) | (first + plan.depth > at.end))
    def _():
      for tile in sides:
        _clear(plan, tile, at.start - first, at.end - first)

    row, column = plan.corner(0, 0)
    rows = pl.ds(0 if plan.chunks > 1 else row, plan.share[0])
    columns = pl.ds(column, plan.share[1])
    plgpu.wgmma(acc, sides[0].at[:, rows].T, sides[1].at[:, columns])

  def write(at, acc):
    corner = plan.corner(at.row, at.column)
    every = jnp.int32(0), jnp.int32(out.shape[1])
    if plan.transposed:
      window = store.Window(*corner[::-1], *every)
      store.store_transposed(acc, out.at[at.group], window)
    else:
      store.store(acc, out.at[at.group], store.Window(*corner, *every))

  down, across = _tiles_of(plan, left, right)
  count = jnp.int32(out.shape[0] * down * across)
  place = functools.partial(_place, plan, book, (down, across))
  return ring.Work(count, place, copies, multiply, write)


def _tiles_of(plan: ring.Plan, left, right) -> tuple[int, int]:
  """Tiles along both sides; a pair counts as one."""
  across = pl.cdiv(right.shape[1], plan.columns * plan.blocks)
  return pl.cdiv(left.shape[1], plan.rows), across


def _place(plan: ring.Plan, book: tiles.Book, grid, i, index) -> _Place:
  del i
  down, across = grid
  group, rest = lax.div(index, down * across), lax.rem(index, down * across)
  m, n = lax.div(rest, across), lax.rem(rest, across)
  n = n * plan.blocks + lax.axis_index(ring.PAIR)
  low, high = book.bounds(group)
  first = lax.div(low, ALIGNMENT) * ALIGNMENT
  steps = lax.div(high - first + plan.depth - 1, plan.depth)
  steps = jnp.where(high > low, steps, 0)
  return _Place(group, m * plan.rows, n * plan.columns, first, low, high, steps)


def _body(plan: ring.Plan, cut: tiles.Cut, *refs):
  sizes, outer, words, inner = refs[0], refs[1:4], refs[4], refs[5:7]
  book = tiles.write_book(cut, sizes, words, lax.axis_index('block'))
  ring.run(plan, _work(plan, book, outer, inner), refs[7:])


def multiply(lhs_gk, dout_gn, group_sizes_e, plan: ring.Plan, *, dtype):
  """[E, K, N] in `dtype`; see the module.

  With plan.transposed tiles are those of [E, N, K], and only their writing
  turns them: then the width of `dout_gn` is free, else that of `lhs_gk`.
  """
  (rows, width), out_width = lhs_gk.shape, dout_gn.shape[1]
  groups = group_sizes_e.shape[0]
  cut = tiles.Cut(groups, rows)
  kernel = ring.kernel(
    plan,
    functools.partial(_body, plan, cut),
    name='grouped_matmul_weights',
    out=jax.ShapeDtypeStruct((groups, width, out_width), dtype),
    book=cut.scratch(),
    tiles=(
      (plan.chunks, plan.depth, plan.rows // plan.chunks),
      (plan.depth, plan.columns),
    ),
    copies=plan.chunks + 1,
  )
  sides = (dout_gn, lhs_gk) if plan.transposed else (lhs_gk, dout_gn)
  return kernel(group_sizes_e.astype(jnp.int32), *sides)
