"""A ring of shared memory through which tiles of a product are computed.

A persistent thread block takes every 132nd tile. One of its warpgroups copies
operands into the ring, past the end of a tile into the next, so that no tile
waits for its first operands; the others multiply and write. Two thread blocks
may work on neighbouring tiles and receive what both read by one copy.

What a tile is, a kernel says by four functions, see `Work`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

PROCESSORS = 132
CHUNK = 64  # columns of a tile that needs no tiling by the copy
DEPTH = 64  # of one stage along a summed axis of columns
WORKERS = 2  # computing warpgroups
PAIR = 'pair'  # the axis of thread blocks that work together


@dataclasses.dataclass(frozen=True)
class Plan:
  """Sizes of a tile.

  Attributes:
    rows, columns: of the output tile of a thread block.
    stages: of the ring, at least 2.
    by_rows: the computing warpgroups share the tile by rows, else by columns.
    swizzle: bytes of 32, 64 or 128; widths of arrays whose tiles are wider must
      be multiples of it.
    pairs: two thread blocks, one tile right of the other, share copies.
    transposed: matrices are [E, N, K]; of their gradient, its tiles are.
    free_width: matrices are copied and multiplied by 64 columns at a time, and
      may have any width.
    depth: of one stage where rows are summed, a multiple of swizzle / 2.
  """

  rows: int
  columns: int
  stages: int = 0
  by_rows: bool = True
  swizzle: int = 128
  pairs: bool = False
  transposed: bool = False
  free_width: bool = False
  depth: int = 64

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

  @property
  def pieces(self) -> int:
    """Products of a warpgroup in one stage, side by side."""
    return self.share[1] // CHUNK if self.free_width else 1

  @property
  def chunks(self) -> int:
    """Tiles of 64 columns, one a warpgroup, that replace one of 128, or 1."""
    return 2 if self.swizzle == 128 and self.share[0] == 64 else 1

  @property
  def transforms(self) -> tuple:
    """How a bfloat16 tile lies in shared memory."""
    tiling = plgpu.TilingTransform((8, self.swizzle // 2))
    return tiling, plgpu.SwizzleTransform(self.swizzle)

  def tile(self, *shape: int):
    """A bfloat16 tile for each stage: (to copy to, to multiply).

    Both are views of the same bytes. Copies to tiled memory insist on arrays
    whose last axis is a whole number of 64 columns. A tile of 64 columns looks
    the same without tiling, and copies then fill what the array lacks by zeros.
    """
    ring = functools.partial(plgpu.SMEM, (self.stages, *shape), jnp.bfloat16)
    tiled = ring(transforms=self.transforms)
    if 2 * shape[-1] != self.swizzle:
      return tiled
    return plgpu.RefUnion(ring(transforms=self.transforms[1:]), tiled)

  def corner(self, row, column):
    """This warpgroup's first row and column of a tile that starts there."""
    worker = lax.axis_index('role')
    if self.by_rows:
      return row + worker * self.share[0], column
    return row, column + worker * self.share[1]


class Work(NamedTuple):
  """A kernel: what its tiles read, multiply and write.

  Attributes:
    tiles: number of tiles; a pair counts as one.
    place: (number among the tiles of this block, among all tiles) -> anything
      with `steps`, the stages of that tile.
    copies: (place, k, slot) -> (source, target, axes that share it) each.
    multiply: (place, k, slot, acc), which starts the products of one stage.
    write: (place, acc), for one warpgroup.
  """

  tiles: jax.Array
  place: Callable[[jax.Array, jax.Array], Any]
  copies: Callable[..., Any]
  multiply: Callable[..., None]
  write: Callable[..., None]


def _produce(parts, place, position):
  """Starts the copies of a tile."""
  plan, work, (full, empty) = parts

  def fetch(k, _):
    slot = lax.rem(position + k, plan.stages)

    @pl.when(position + k >= plan.stages)
    def _():
      plgpu.barrier_wait(empty.at[slot])

    for source, target, axes in work.copies(place, k, slot):
      plgpu.copy_gmem_to_smem(
        source, target, full.at[slot], collective_axes=axes
      )
    return ()

  lax.fori_loop(0, place.steps, fetch, ())


def _sum(parts, place, position, acc):
  """One warpgroup's part of a tile, with a stage's products always running."""
  plan, work, (full, empty) = parts
  slot_of = lambda k: lax.rem(position + k, plan.stages)

  def step(k, _):
    plgpu.barrier_wait(full.at[slot_of(k)])
    work.multiply(place, k, slot_of(k), acc)
    plgpu.wgmma_wait(plan.pieces)

    @pl.when(k > 0)
    def _():
      plgpu.barrier_arrive(empty.at[slot_of(k - 1)])

    return ()

  lax.fori_loop(0, place.steps, step, ())
  plgpu.wgmma_wait(0)

  @pl.when(place.steps > 0)
  def _():
    plgpu.barrier_arrive(empty.at[slot_of(place.steps - 1)])

  return acc[...]


def run(plan: Plan, work: Work, barriers):
  """The work of a thread block, by all its warpgroups."""
  block, stride = lax.axis_index('block'), PROCESSORS // plan.blocks
  mine = lax.div(work.tiles - block + stride - 1, stride)

  def place(i):
    i = jnp.minimum(i, mine - 1)
    return work.place(i, block + i * stride)

  role, parts = lax.axis_index('role'), (plan, work, barriers)

  def compute(i, carry):
    at, position = carry
    following = place(i + 1)  # early, to hide the latency of its loads
    total = functools.partial(_sum, parts, at, position)
    work.write(at, pl.run_scoped(total, plgpu.ACC(plan.share)))
    return following, position + at.steps

  def produce(i, position):
    at = place(i)
    _produce(parts, at, position)
    return position + at.steps

  @pl.when((role < WORKERS) & (mine > 0))
  def _():
    plgpu.set_max_registers(232, action='increase')
    lax.fori_loop(0, mine, compute, (place(0), jnp.int32(0)))

  @pl.when((role == WORKERS) & (mine > 0))
  def _():
    plgpu.set_max_registers(40, action='decrease')
    total = lax.fori_loop(0, mine, produce, jnp.int32(0))
    if plan.pairs:
      _drain(plan, barriers[1], total)


def _drain(plan: Plan, empty, total):
  """Waits for the last stages: no partner may write to a block that is gone."""

  @pl.loop(jnp.maximum(total - plan.stages, 0), total)
  def _(position):
    plgpu.barrier_wait(empty.at[lax.rem(position, plan.stages)])


def views(tile) -> tuple:
  """(To copy to, to multiply) of a `Plan.tile` inside a kernel."""
  union = tile.ndim == 1  # of bytes
  return tuple(tile) if union else (tile, tile)


def kernel(plan: Plan, body, *, name: str, out, book, tiles, copies: int = 2):
  """The Pallas kernel of `body`, whose last five references are scratch.

  Args:
    plan: see `Plan`.
    body: (inputs, output, book, two rings, barriers of full and of empty
      stages).
    name: for profiles.
    out: shape and dtype of the output.
    book: scratch memory for what the block knows of its tiles.
    tiles: shapes of the two operands' tiles.
    copies: into one stage.
  """
  released = dict(num_arrivals=WORKERS, num_barriers=plan.stages)
  empty = plgpu.Barrier(**released)
  if plan.pairs:
    empty = plgpu.ClusterBarrier(collective_axes=(PAIR,), **released)
  full = plgpu.Barrier(num_arrivals=copies, num_barriers=plan.stages)
  return plgpu.kernel(
    body,
    out_type=out,
    grid=(PROCESSORS // plan.blocks,),
    grid_names=('block',),
    cluster=(plan.blocks,),
    cluster_names=(PAIR,),
    num_threads=WORKERS + 1,
    thread_name='role',
    kernel_name=name,
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane,
      reduction_scratch_bytes=0,
      unsafe_no_auto_barriers=True,
    ),
    scratch_types=[book, *(plan.tile(*shape) for shape in tiles), full, empty],
  )
