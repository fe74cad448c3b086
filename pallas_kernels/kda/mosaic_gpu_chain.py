"""What the scans along chains of chunks share, on Hopper.

A thread block goes through a range of chunks of one value head. Its computing
warpgroups own 64 rows of values each and never talk to each other; one more
warpgroup keeps a ring of chunks in shared memory filled by bulk copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

ROWS = 64  # rows of values of one computing warpgroup
STAGES = 2
TILE = plgpu.Layout.WGMMA
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)
TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


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
    return self.width // ROWS


def accumulate(*sums):
  """For each (start, [(left, right), ...]): start + all products, at once."""

  def body(accumulators):
    for acc, (_, products) in zip(accumulators, sums):
      for left, right in products:
        plgpu.wgmma(acc, left, right)

  starts = tuple(plgpu.ACC.init(start) for start, _ in sums)
  # Without the barrier reads of the results may be scheduled above the wait.
  return lax.optimization_barrier(pl.run_state(body)(starts))


def zeros(shape: tuple[int, int]) -> jax.Array:
  return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), TILE)


def load(ref, layout=TILE) -> jax.Array:
  return plgpu.load(ref, layout=layout, optimized=False)


def tile(*shape: int):
  """Shared memory for a bfloat16 tile that products read."""
  return plgpu.SMEM(shape, jnp.bfloat16, transforms=TRANSFORMS)


def produce(fetch: Callable, chunks, empty):
  """Keeps the ring full: `fetch(n)` starts the copies of the n-th chunk."""

  @pl.loop(0, jnp.minimum(chunks, STAGES))
  def _(n):
    fetch(n)

  @pl.loop(STAGES, chunks)
  def _(n):
    plgpu.barrier_wait(empty.at[lax.rem(n, STAGES)])
    fetch(n)


def run_roles(groups: int, compute: Callable, copy: Callable, done):
  """`compute()` in the first `groups` warpgroups, `copy()` in the last."""
  role = lax.axis_index('role')

  @pl.when(role < groups)
  def _():
    plgpu.set_max_registers(224, action='increase')
    compute()

  @pl.when(role == groups)
  def _():
    plgpu.set_max_registers(40, action='decrease')
    copy()

  plgpu.barrier_arrive(done)
  plgpu.barrier_wait(done)


@dataclasses.dataclass(frozen=True)
class Block:
  """What a thread block of such a scan has.

  Attributes:
    groups: computing warpgroups.
    shared: shared memory by name.
    copies: bulk copies that fill one stage of the ring.
  """

  groups: int
  shared: dict
  copies: int


def launch(
  name: str,
  body: Callable,
  arrays: tuple[dict, dict],
  blocks: int,
  block: Block,
) -> dict[str, jax.Array]:
  """The arrays that a kernel writes, by name.

  Args:
    name: of the kernel.
    body: called with the arrays and the shared memory, both by name, and the
      barriers (full, empty) of the ring's stages and `done`.
    arrays: what is read, and the shapes of what is written, by name.
    blocks: thread blocks.
    block: of what each has.
  """
  read, written = arrays
  names, threads = (*read, *written), block.groups + 1

  def run(*refs):
    outer = dict(zip(names, refs))
    *tiles, full, empty, done = refs[len(names) :]
    body(outer, dict(zip(block.shared, tiles)), (full, empty), done)

  kernel = plgpu.kernel(
    run,
    out_type=tuple(written.values()),
    grid=(blocks,),
    grid_names=('block',),
    num_threads=threads,
    thread_name='role',
    kernel_name=name,
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
    ),
    scratch_types=[
      *block.shared.values(),
      plgpu.Barrier(num_arrivals=block.copies, num_barriers=STAGES),
      plgpu.Barrier(num_arrivals=block.groups, num_barriers=STAGES),
      plgpu.Barrier(num_arrivals=threads),
    ],
  )
  return dict(zip(written, kernel(*read.values())))
