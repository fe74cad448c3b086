"""The grouped matmul on Hopper GPUs, forward and both gradients.

Libraries do not get near the floor at many experts (README, "Grouped
products"), so these kernels are our own, in Pallas Mosaic GPU: one for rows
times matrices, which with matrices read transposed is also the gradient of the
rows, and one for the gradient of the matrices.

Suffixes: g rows sorted by group, e groups, k input width, n output width.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import mosaic_gpu_ring as ring
from pallas_kernels.grouped_matmul import mosaic_gpu_rows as rows_kernel
from pallas_kernels.grouped_matmul import mosaic_gpu_tiles as tiles
from pallas_kernels.grouped_matmul import mosaic_gpu_weights as weights_kernel

_HOPPER = ('H100', 'H200', 'H800', 'H20')
_RING_BYTES = 200 * 1024
_SHARED_BYTES = 225 * 1024  # of 227 KiB, for a ring and a book
_FEW_ROWS = 64  # mean of a group up to which reading matrices is all the work


def refusal(lhs_gk, rhs_ekn, *, device_kind: str | None = None) -> str | None:
  """Why these kernels cannot run the arguments, or None.

  Args:
    lhs_gk, rhs_ekn: arrays or their shapes and dtypes.
    device_kind: as in `jax.Device.device_kind`; the default device if None.
  """
  if device_kind is None:
    device_kind = dispatch.device_kind()
    if device_kind == 'gpu':
      device_kind = jax.devices()[0].device_kind
  if not any(name in device_kind for name in _HOPPER):
    return f'the Hopper kernels need an H100 or H200, this is {device_kind}'
  if lhs_gk.dtype != jnp.bfloat16:
    return f'the Hopper kernels take rows in bfloat16, not {lhs_gk.dtype}'
  if lhs_gk.shape[0] % 8 or not lhs_gk.shape[0]:
    return (
      f'the Hopper kernels take rows in multiples of 8, not {lhs_gk.shape[0]}'
    )
  if any(width % 16 or not width for width in rhs_ekn.shape[1:]):
    return (
      f'the Hopper kernels take widths in multiples of 16 (best 64), not '
      f'{rhs_ekn.shape[1]} and {rhs_ekn.shape[2]}'
    )
  if min(plan.stages for plan in _plans(lhs_gk.shape[0], rhs_ekn.shape)) < 2:
    return (
      f'the Hopper kernels cannot keep the tiles of {lhs_gk.shape[0]} rows in '
      f'{rhs_ekn.shape[0]} groups in shared memory'
    )
  return None


@jax.custom_vjp
def grouped_matmul(lhs_gk, rhs_ekn, group_sizes_e):
  """See `api.grouped_matmul`."""
  plan = _plans(lhs_gk.shape[0], rhs_ekn.shape)[0]
  rhs_ekn = rhs_ekn.astype(lhs_gk.dtype)
  return rows_kernel.multiply(lhs_gk, rhs_ekn, group_sizes_e, plan)


def _forward(lhs_gk, rhs_ekn, group_sizes_e):
  out_gn = grouped_matmul(lhs_gk, rhs_ekn, group_sizes_e)
  return out_gn, (lhs_gk, rhs_ekn, group_sizes_e)


def _backward(saved, dout_gn):
  lhs_gk, rhs_ekn, group_sizes_e = saved
  _, rows, weights = _plans(lhs_gk.shape[0], rhs_ekn.shape)
  rhs = rhs_ekn.astype(lhs_gk.dtype)
  dlhs_gk = rows_kernel.multiply(dout_gn, rhs, group_sizes_e, rows)
  drhs_ekn = weights_kernel.multiply(
    lhs_gk, dout_gn, group_sizes_e, weights, dtype=rhs_ekn.dtype
  )
  return dlhs_gk, drhs_ekn, None


grouped_matmul.defvjp(_forward, _backward)


def _plans(rows: int, shape) -> tuple[ring.Plan, ...]:
  """Those of the product, the rows' gradient and the matrices' gradient."""
  product = rows_plan(rows, shape, transposed=False)
  turned = rows_plan(rows, shape, transposed=True)
  return product, turned, weights_plan(rows, shape)


def rows_plan(rows: int, shape, *, transposed: bool) -> ring.Plan:
  """Tiles for G rows and matrices of `shape` [E, K, N]."""
  groups, k, n = shape
  few = rows <= _FEW_ROWS * groups
  width = k if transposed else n
  columns = _columns(width, (256, 128) if few else (256, 192, 128))
  plan = ring.Plan(
    rows=64 if few else 128,
    columns=columns,
    by_rows=not few,
    pairs=not few and _in_pairs(width, columns),
    transposed=transposed,
    free_width=not transposed and n % 64 != 0,
  )
  return _filled(plan, rows_kernel.cut_rows(rows, groups, width, plan))


def weights_plan(rows: int, shape) -> ring.Plan:
  """Tiles for G rows and matrices of `shape` [E, K, N]."""
  groups, k, n = shape
  # One width is free as long as the other is a whole number of 64.
  transposed = n % 64 != 0 and k % 64 == 0
  right = k if transposed else n
  columns = _columns(right, (256, 192, 128))
  plan = ring.Plan(
    rows=128,
    columns=columns,
    swizzle=128 if right % 64 == 0 else _swizzle(k, n),
    pairs=_in_pairs(right, columns),
    transposed=transposed,
  )
  return _filled(plan, tiles.Cut(groups, rows))


def _filled(plan: ring.Plan, cut: tiles.Cut) -> ring.Plan:
  """The plan with as many stages as fit beside the book."""
  left = min(_RING_BYTES, _SHARED_BYTES - 4 * cut.words)
  bytes_of_stage = 2 * plan.depth * (plan.rows + plan.columns)
  return dataclasses.replace(plan, stages=left // bytes_of_stage)


def _columns(width: int, choices: tuple[int, ...]) -> int:
  """The tile that covers the width with the fewest, then widest, columns."""
  return min(choices, key=lambda tile: (-(-width // tile) * tile, -tile))


def _in_pairs(width: int, columns: int) -> bool:
  """Whether tiles as wide come in twos; narrow ones are not read often."""
  return columns == 256 and width % (2 * columns) == 0


def _swizzle(*widths: int) -> int:
  """Bytes of the widest swizzle of which every width is a multiple."""
  fits = [s for s in (64, 32) if all(2 * w % s == 0 for w in widths)]
  return fits[0]
