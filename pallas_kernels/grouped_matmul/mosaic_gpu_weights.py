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
from pallas_kernels.grouped_matmul.mosaic_gpu_ring import ALIGNMENT
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


def _work(plan: ring.Plan, bounds, outer, inner) -> ring.Work:
  (start, end), (lhs, rhs, out) = bounds, outer
  groups, width, out_width = out.shape
  down = pl.cdiv(width, plan.rows)
  across = pl.cdiv(out_width, plan.columns * plan.blocks)

  def place(index):
    group, rest = lax.div(index, down * across), lax.rem(index, down * across)
    m, n = lax.div(rest, across), lax.rem(rest, across)
    n = n * plan.blocks + lax.axis_index(ring.PAIR)
    low, high = start[group], end[group]
    first = lax.div(low, ALIGNMENT) * ALIGNMENT
    steps = lax.div(high - first + plan.depth - 1, plan.depth)
    steps = jnp.where(high > low, steps, 0)
    corner = m * plan.rows, n * plan.columns
    return _Place(group, *corner, first, low, high, steps)

  def copies(at, k, slot):
    rows = pl.ds(
      pl.multiple_of(at.first + k * plan.depth, ALIGNMENT), plan.depth
    )
    shared = ring.PAIR if plan.pairs else None
    columns = pl.ds(pl.multiple_of(at.row, plan.rows), plan.rows)
    yield lhs.at[rows, columns], inner[0].at[slot], shared
    columns = pl.ds(pl.multiple_of(at.column, plan.columns), plan.columns)
    yield rhs.at[rows, columns], inner[1].at[slot], None

  def multiply(at, k, slot, acc):
    first = at.first + k * plan.depth
    tiles = [tile.at[slot] for tile in inner]

    @pl.when((first < at.start) | (first + plan.depth > at.end))
    def _():
      for tile in tiles:
        _clear(plan, tile, at.start - first, at.end - first)

    corner = zip(plan.corner(0, 0), plan.share)
    left, right = (t.at[:, pl.ds(*x)] for t, x in zip(tiles, corner))
    plgpu.wgmma(acc, left.T, right)

  def write(at, acc):
    window = store.Window(
      *plan.corner(at.row, at.column), jnp.int32(0), jnp.int32(width)
    )
    store.store(acc, out.at[at.group], window)

  tiles = jnp.int32(groups * down * across)
  return ring.Work(tiles, place, copies, multiply, write)


def _body(plan: ring.Plan, *refs):
  bounds, outer, inner, barriers = refs[:2], refs[2:5], refs[5:7], refs[7:]
  ring.run(plan, _work(plan, bounds, outer, inner), barriers)


def multiply(lhs_gk, dout_gn, group_sizes_e, plan: ring.Plan, dtype):
  """[E, K, N] in `dtype`; see the module."""
  (rows, width), out_width = lhs_gk.shape, dout_gn.shape[1]
  groups = group_sizes_e.shape[0]
  sizes_e = group_sizes_e.astype(jnp.int32)
  end_e = jnp.minimum(jnp.cumsum(sizes_e), rows)
  start_e = jnp.concatenate([jnp.zeros(1, jnp.int32), end_e[:-1]])
  kernel = ring.kernel(
    plan,
    functools.partial(_body, plan),
    name='grouped_matmul_weights',
    out=jax.ShapeDtypeStruct((groups, width, out_width), dtype),
    tiles=((plan.depth, plan.rows), (plan.depth, plan.columns)),
  )
  return kernel(start_e, end_e, lhs_gk, dout_gn)
