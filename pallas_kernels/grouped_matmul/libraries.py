"""Grouped matmuls of libraries behind one contract.

Libraries agree on the product of rows in groups and on nothing else: rows past
all groups may come back as anything, and their products with zeros may be NaN.
So those rows are set to zero before and after, and gradients are spelled out as
the two products they are.

Suffixes: g rows sorted by group, e groups, k input width, n output width.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch

# Of 'megablox': their copies and sums stay below 16 MB.
_TILE_ROWS, _TILE = 512, 1024


class Library(NamedTuple):
  """Three products of one library.

  Attributes:
    forward: (lhs_gk, rhs_ekn, sizes_e) -> [G, N].
    rows: (dout_gn, rhs_ekn, sizes_e) -> [G, K].
    weights: (lhs_gk, dout_gn, sizes_e) -> [E, K, N], wider where the library
      can keep its sums.
  """

  forward: Callable
  rows: Callable
  weights: Callable


_RAGGED_SUM = jax.lax.RaggedDotDimensionNumbers(
  dot_dimension_numbers=(((0,), (0,)), ((), ())),
  lhs_ragged_dimensions=[0],
  rhs_group_dimensions=[],
)
_TRANSPOSED = jax.lax.RaggedDotDimensionNumbers(
  dot_dimension_numbers=(((1,), (2,)), ((), ())),
  lhs_ragged_dimensions=[0],
  rhs_group_dimensions=[0],
)


def _general(dimensions, x, y, sizes_e, dtype=None):
  return jax.lax.ragged_dot_general(
    x, y, sizes_e, dimensions, preferred_element_type=dtype
  )


def _megablox(interpret: bool = False) -> Library:
  """The Pallas kernels for TPUs that come with jax."""
  from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

  def tiles(x, width):
    """Rows filled up to whole tiles, and the tiles of rows and two widths."""
    rows = min(_TILE_ROWS, -(-x.shape[0] // 128) * 128)
    x = jnp.pad(x, ((0, -x.shape[0] % rows), (0, 0)))
    return x, (rows, min(x.shape[1], _TILE), min(width, _TILE))

  def product(x, rhs, sizes_e, transposed):
    rows, width = x.shape[0], rhs.shape[1 if transposed else 2]
    x, tiling = tiles(x, width)
    run = functools.partial(gmm, interpret=interpret)
    dtype, sizes_e = x.dtype, sizes_e.astype(jnp.int32)
    y = run(x, rhs, sizes_e, dtype, tiling, transpose_rhs=transposed)
    return y[:rows]

  def summed(lhs, dout, sizes_e):
    lhs, tiling = tiles(lhs, dout.shape[1])
    dout, _ = tiles(dout, 0)
    # Sums in float32, held three times, leave room for half the tile.
    tiling = (tiling[0], min(tiling[1], _TILE // 2), tiling[2])
    run = functools.partial(tgmm, interpret=interpret)
    return run(lhs.T, dout, sizes_e.astype(jnp.int32), jnp.float32, tiling)

  return Library(
    functools.partial(product, transposed=False),
    functools.partial(product, transposed=True),
    summed,
  )


def _ragged_dot() -> Library:
  """`jax.lax.ragged_dot`; libtpu has a kernel for it on v5p."""
  return Library(
    jax.lax.ragged_dot,
    functools.partial(_general, _TRANSPOSED),
    functools.partial(_general, _RAGGED_SUM, dtype=jnp.float32),
  )


def _pallas_ops() -> Library:
  """The Mosaic GPU kernels that come with jax."""
  from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot
  from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import (
    transposed_ragged_dot,
  )

  tile = dict(block_m=128, block_n=128, block_k=64, grid_block_n=1)
  run = functools.partial(ragged_dot, **tile, max_concurrent_steps=4)
  summed = functools.partial(
    transposed_ragged_dot, **tile, max_concurrent_steps=2
  )
  return Library(
    lambda lhs, rhs, sizes: run(lhs, rhs, group_sizes=sizes),
    lambda dout, rhs, sizes: run(
      dout, rhs, group_sizes=sizes, transpose_rhs=True
    ),
    lambda lhs, dout, sizes: summed(lhs, dout, group_sizes=sizes),
  )


def _tokamax() -> Library:
  from tokamax import ragged_dot_general

  def run(dimensions, x, y, sizes_e):
    return ragged_dot_general(x, y, sizes_e, dimensions)

  plain = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (1,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
  )
  return Library(
    *(functools.partial(run, d) for d in (plain, _TRANSPOSED, _RAGGED_SUM))
  )


_LIBRARIES = {
  'megablox': _megablox,
  'ragged_dot': _ragged_dot,
  'pallas_ops': _pallas_ops,
  'tokamax': _tokamax,
}


NAMES = tuple(_LIBRARIES)


def refusal(name: str, lhs_gk, rhs_ekn) -> str | None:
  """Why a library cannot run the arguments here, or None."""
  kind = dispatch.device_kind()
  if name == 'ragged_dot':
    # Elsewhere XLA makes the products of every row with every matrix, and so
    # does libtpu 0.0.52 for v6e and tpu7x.
    return None if kind == 'tpu' else 'jax.lax.ragged_dot is dense but on TPUs'
  if name == 'megablox':
    if kind != 'tpu':
      return f'megablox is for TPUs, this is {kind}'
    if lhs_gk.dtype not in (jnp.bfloat16, jnp.float32):
      return f'megablox takes bfloat16 or float32, not {lhs_gk.dtype}'
    return None
  if kind != 'gpu':
    return f'{name} is for GPUs here, this is {kind}'
  if lhs_gk.dtype not in (jnp.bfloat16, jnp.float16):
    return f'{name} takes bfloat16 or float16, not {lhs_gk.dtype}'
  if name == 'tokamax' and importlib.util.find_spec('tokamax') is None:
    return 'tokamax is not installed; pip install tokamax'
  if any(width % 128 for width in rhs_ekn.shape[1:]):
    return (
      f'{name} takes widths in multiples of 128, not {rhs_ekn.shape[1]} and '
      f'{rhs_ekn.shape[2]}'
    )
  return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_matmul(name, lhs_gk, rhs_ekn, group_sizes_e):
  """See `api.grouped_matmul`; `name` is a key of `refusal`."""
  lhs_gk = _used(lhs_gk, group_sizes_e)
  rhs_ekn = rhs_ekn.astype(lhs_gk.dtype)
  out_gn = _LIBRARIES[name]().forward(lhs_gk, rhs_ekn, group_sizes_e)
  return _used(out_gn.astype(lhs_gk.dtype), group_sizes_e)


def _forward(name, lhs_gk, rhs_ekn, group_sizes_e):
  out_gn = grouped_matmul(name, lhs_gk, rhs_ekn, group_sizes_e)
  return out_gn, (lhs_gk, rhs_ekn, group_sizes_e)


def _backward(name, saved, dout_gn):
  lhs_gk, rhs_ekn, sizes_e = saved
  library = _LIBRARIES[name]()
  dout_gn = _used(dout_gn, sizes_e)
  rhs = rhs_ekn.astype(lhs_gk.dtype)
  dlhs_gk = library.rows(dout_gn, rhs, sizes_e).astype(lhs_gk.dtype)
  drhs_ekn = library.weights(_used(lhs_gk, sizes_e), dout_gn, sizes_e)
  return _used(dlhs_gk, sizes_e), drhs_ekn.astype(rhs_ekn.dtype), None


grouped_matmul.defvjp(_forward, _backward)


def _used(rows_gd, group_sizes_e):
  """The rows of groups, the others zero."""
  used_g = jnp.arange(rows_gd.shape[0]) < jnp.sum(group_sizes_e)
  return jnp.where(used_g[:, None], rows_gd, 0)
