"""Kernels whose threads walk along rows of global memory on their own.

They need no shared memory and no products: each thread has some channels of
some rows, loaded a few steps before they are used.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, scf

from pallas_kernels.kda import mosaic_gpu_warp as warp

BLOCK = 128  # threads


def block_index() -> warp.Word:
  i32 = ir.IntegerType.get_signless(32)
  return arith.index_cast(i32, gpu.block_id(gpu.Dimension.x))


def divide(a: warp.Word, b: int) -> tuple[warp.Word, warp.Word]:
  """Quotient and remainder of a number that is not negative."""
  divisor = warp.word(b)
  return arith.divui(a, divisor), arith.remui(a, divisor)


def advance(address: ir.Value, count: warp.Word, size: int) -> ir.Value:
  """A 64-bit address moved by `count` times `size` bytes."""
  i64 = ir.IntegerType.get_signless(64)
  offset = arith.muli(arith.extui(i64, count), arith.constant(i64, size))
  return arith.addi(address, offset)


def wide(words) -> list[warp.Real]:
  """The bfloat16 numbers of some words."""
  return [x for w in words for x in warp.unpack(w)]


def narrow(values) -> list[warp.Word]:
  """The inverse of `wide`, rounded."""
  return [warp.pack(a, b) for a, b in zip(values[::2], values[1::2])]


def sigmoid(x: warp.Real) -> warp.Real:
  return warp.reciprocal(warp.exp2(x * -math.log2(math.e)) + 1.0)


def loop(count: int, state: Any, body) -> Any:
  """`state = body(i, state)` for i from 0 to count - 1."""
  leaves, structure = jax.tree.flatten(state)
  is_real = [isinstance(x, warp.Real) for x in leaves]

  def values(state):
    return [
      x.value if isinstance(x, warp.Real) else x for x in jax.tree.leaves(state)
    ]

  def rebuilt(values):
    wrapped = [warp.Real(x) if r else x for r, x in zip(is_real, values)]
    return jax.tree.unflatten(structure, wrapped)

  run = scf.ForOp(warp.word(0), warp.word(count), warp.word(1), values(state))
  with ir.InsertionPoint(run.body):
    result = body(run.induction_variable, rebuilt(list(run.inner_iter_args)))
    scf.yield_(values(result))
  return rebuilt(list(run.results_))


def launch(name: str, blocks: int, body, trees, row=None):
  """Runs `body(addresses of arrays, of results)` in every thread of a grid.

  Args:
    name: of the kernel.
    blocks: of BLOCK threads.
    body: emits a thread's work; gets both trees with addresses as leaves.
    trees: of arrays, and of the shapes of results.
    row: `row(path, block)` is the index along an array's first axis of what
      the block sees, None for all of it; without it every block sees all.

  Returns:
    The tree of results.
  """
  leaves, structures = zip(*map(jax.tree.flatten, trees))
  paths = [
    path for tree in trees for path, _ in jax.tree.leaves_with_path(tree)
  ]
  count, reference = len(leaves[0]), plgpu.RefType()

  def kernel_body(*refs):
    if row is not None:
      rows = [row(path, lax.axis_index('block')) for path in paths]
      refs = [ref if r is None else ref.at[r] for r, ref in zip(rows, refs)]

    @plgpu.inline_mgpu(arg_types=(reference,) * len(refs))
    def work(ctx, *refs):
      del ctx
      addresses = [warp.global_address(ref) for ref in refs]
      parts = addresses[:count], addresses[count:]
      body(*map(jax.tree.unflatten, structures, parts))

    work(*refs)

  kernel = plgpu.kernel(
    kernel_body,
    out_type=tuple(leaves[1]),
    grid=(blocks,),
    grid_names=('block',),
    kernel_name=name,
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
    ),
  )
  return jax.tree.unflatten(structures[1], kernel(*leaves[0]))
