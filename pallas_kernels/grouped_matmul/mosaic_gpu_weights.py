"""Per group, the transposed rows times the gradient's rows, on Hopper.

    out_e = sum over the rows g of group e of lhs_g^T dout_g

The summed axis is the ragged one. A stage holds 64 rows from the group's first,
rounded down to 8; rows of it that belong to another group are set to zero in
shared memory, on both sides, so that what they hold, NaN included, stays out.
An empty group is a tile without products: exact zeros are stored.

Suffixes: g rows sorted by group, e groups, k input width, n output width.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm

from pallas_kernels.grouped_matmul import mosaic_gpu_store as store
from pallas_kernels.grouped_matmul.mosaic_gpu_rows import (
  ALIGNMENT,
  DEPTH,
  PROCESSORS,
  WORKERS,
  drain,
  released,
  transforms_of,
)
from pallas_kernels.kda import mosaic_gpu_warp as warp


@dataclasses.dataclass(frozen=True)
class Plan:
  """Sizes of a tile: input and output columns, and stages of the ring."""

  rows: int
  columns: int
  stages: int
  by_rows: bool = True
  swizzle: int = 128
  pairs: bool = False

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


def _clear(plan: Plan, tile, first, last):
  """Sets rows outside [first, last) of a [64, columns] tile to zero.

  All columns of it, by each warpgroup that calls: two of them write the same.
  """
  scalar = plgpu.Layout.WG_SPLAT(())
  tiled = plgpu.RefType(transforms_of(plan.swizzle))

  @plgpu.inline_mgpu(arg_types=(tiled, (scalar, scalar)))
  def emit(ctx, tile, bounds):
    del ctx
    _emit_clear(plan.swizzle, tile, [x.registers.item() for x in bounds])
    nvvm.fence_proxy(
      nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta
    )
    utils.warpgroup_barrier()

  emit(tile, (first, last))


def _emit_clear(swizzle: int, tile, bounds):
  """Eight lanes write 128 bytes of a row, in blocks of 8 rows by `swizzle`."""
  blocks = ir.MemRefType(tile.type).shape[1]
  block, pieces = 8 * swizzle, swizzle // 16
  thread = warp.bit_and(utils.thread_idx(), 127)
  lane, low = warp.bit_and(thread, 7), warp.shift_right(thread, 3)
  piece = warp.shift_left(warp.bit_and(lane, pieces - 1), 4)
  across = warp.times(warp.shift_right(lane, pieces.bit_length() - 1), block)
  base = warp.add(warp.shared_address(tile), warp.add(across, piece))
  nothing = [warp.word(0)] * 4
  for i in range(DEPTH // 16):
    row = warp.add(low, 16 * i)
    outside = arith.ori(
      warp.compare(row, 'slt', bounds[0]), warp.compare(row, 'sge', bounds[1])
    )
    down = warp.times(warp.shift_right(row, 3), block * blocks)
    within = warp.times(warp.bit_and(row, 7), swizzle)
    address = warp.add(base, warp.add(down, within))
    for j in range(blocks * pieces // 8):
      warp.store(address, j * block * 8 // pieces, nothing, outside)


def _place(plan: Plan, bounds, shape, index):
  """(group, m, n, first row, start, end, steps) of the output tile `index`."""
  start_ref, end_ref = bounds
  down = pl.cdiv(shape[1], plan.rows)
  across = pl.cdiv(shape[2], plan.columns * plan.blocks)
  group, rest = lax.div(index, down * across), lax.rem(index, down * across)
  m, n = lax.div(rest, across), lax.rem(rest, across)
  n = n * plan.blocks + lax.axis_index('pair')
  start, end = start_ref[group], end_ref[group]
  first = lax.div(start, ALIGNMENT) * ALIGNMENT
  steps = lax.div(end - first + DEPTH - 1, DEPTH)
  steps = jnp.where(end > start, steps, 0)
  return group, m, n, first, start, end, steps


def _multiply(plan: Plan, acc, tiles, worker):
  lhs, rhs = tiles
  rows, columns = plan.share
  if plan.by_rows:
    lhs = lhs.at[:, pl.ds(worker * rows, rows)]
  else:
    rhs = rhs.at[:, pl.ds(worker * columns, columns)]
  plgpu.wgmma(acc, lhs.T, rhs)


def _body(plan: Plan, start, end, lhs, rhs, out, *scratch):
  lhs_smem, rhs_smem, full, empty = scratch
  block, role = lax.axis_index('block'), lax.axis_index('role')
  shape = out.shape
  count = shape[0] * pl.cdiv(shape[1], plan.rows)
  count *= pl.cdiv(shape[2], plan.columns * plan.blocks)
  stride = PROCESSORS // plan.blocks
  mine = lax.div(count - block + stride - 1, stride)
  place = lambda i: _place(plan, (start, end), shape, block + i * stride)

  def produce(i, position):
    _, m, n, first, _, _, steps = place(i)

    def fetch(k, _):
      slot = lax.rem(position + k, plan.stages)

      @pl.when(position + k >= plan.stages)
      def _():
        plgpu.barrier_wait(empty.at[slot])

      row = pl.multiple_of(first + k * DEPTH, ALIGNMENT)
      rows = pl.ds(row, DEPTH)
      source = lhs.at[rows, pl.ds(m * plan.rows, plan.rows)]
      shared = 'pair' if plan.pairs else None
      plgpu.copy_gmem_to_smem(
        source, lhs_smem.at[slot], full.at[slot], collective_axes=shared
      )
      source = rhs.at[rows, pl.ds(n * plan.columns, plan.columns)]
      plgpu.copy_gmem_to_smem(source, rhs_smem.at[slot], full.at[slot])
      return ()

    lax.fori_loop(0, steps, fetch, ())
    return position + steps

  def compute(i, position):
    group, m, n, first, low, high, steps = place(i)

    def run(acc):
      def step(k, _):
        slot = lax.rem(position + k, plan.stages)
        plgpu.barrier_wait(full.at[slot])
        row = first + k * DEPTH

        @pl.when((row < low) | (row + DEPTH > high))
        def _():
          for ring in (lhs_smem, rhs_smem):
            _clear(plan, ring.at[slot], low - row, high - row)

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
    row, column = m * plan.rows, n * plan.columns
    if plan.by_rows:
      row = row + role * rows
    else:
      column = column + role * columns
    window = store.Window(row, column, jnp.int32(0), jnp.int32(shape[1]))
    store.store(acc, out.at[group], window)
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


def multiply(lhs_gk, dout_gn, group_sizes_e, plan: Plan, dtype):
  """[E, K, N] in `dtype`; see the module."""
  (rows, width), out_width = lhs_gk.shape, dout_gn.shape[1]
  groups = group_sizes_e.shape[0]
  sizes_e = group_sizes_e.astype(jnp.int32)
  end_e = jnp.minimum(jnp.cumsum(sizes_e), rows)
  start_e = jnp.concatenate([jnp.zeros(1, jnp.int32), end_e[:-1]])
  ring = functools.partial(
    plgpu.SMEM, dtype=lhs_gk.dtype, transforms=transforms_of(plan.swizzle)
  )
  kernel = plgpu.kernel(
    functools.partial(_body, plan),
    out_type=jax.ShapeDtypeStruct((groups, width, out_width), dtype),
    grid=(PROCESSORS // plan.blocks,),
    grid_names=('block',),
    cluster=(plan.blocks,),
    cluster_names=('pair',),
    num_threads=WORKERS + 1,
    thread_name='role',
    kernel_name='grouped_matmul_weights',
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane,
      reduction_scratch_bytes=0,
      unsafe_no_auto_barriers=True,
    ),
    scratch_types=[
      ring((plan.stages, DEPTH, plan.rows)),
      ring((plan.stages, DEPTH, plan.columns)),
      plgpu.Barrier(num_arrivals=2, num_barriers=plan.stages),
      released(plan),
    ],
  )
  return kernel(start_e, end_e, lhs_gk, dout_gn)
