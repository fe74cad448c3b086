"""Grouped matmul: a thin switch over implementations.

Suffixes: g rows sorted by group, e groups, k input width, n output width.
"""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import (
  libraries,
  mosaic_gpu,
  reference,
  xla,
)


def grouped_matmul(
  lhs_gk,
  rhs_ekn,
  group_sizes_e,
  *,
  block: int | None = None,
  implementation: str | None = None,
):
  """Every row times the weight of its group.

      out_g = lhs_g rhs_e  for  start_e <= g < start_e + group_sizes_e,
      start_e = sum of the sizes before e

  Rows past the sum of the sizes give zero, have zero gradients, and may hold
  anything, NaN included. An empty group's weight has a gradient of zero.

  Args:
    lhs_gk: [G, K] rows, those of group 0 first, bfloat16 or wider.
    rhs_ekn: [E, K, N]; cast to the dtype of the rows where it is used, one
      weight at a time, while its gradient stays float32 until the end.
    group_sizes_e: [E] integers, not negative, with a sum of at most G.
    block: rows in one step of 'xla'; None chooses by the mean group.
    implementation: None for the best on this device: 'mosaic_gpu' on Hopper,
      'megablox' (jax's Pallas kernels) on TPUs, 'xla' elsewhere. Or one of
      these; 'ragged_dot' (`jax.lax.ragged_dot`), for TPUs too; 'pallas_ops' or
      'tokamax', kernels of those libraries for GPUs, which round the gradient
      of the weights to the dtype of the rows; or 'reference', the tests'
      oracle.

  Returns:
    [G, N] in the dtype of `lhs_gk`, accumulated in float32.

  Raises:
    ValueError: shapes do not fit together, or a block is not positive.
    TypeError: the sizes are not integers.
    NotImplementedError: a named implementation cannot run these arguments here.
  """
  _check(lhs_gk, rhs_ekn, group_sizes_e, block)
  name = dispatch.choose(
    'grouped_matmul', implementation, _candidates(lhs_gk, rhs_ekn, block)
  )
  if name == 'mosaic_gpu':
    return mosaic_gpu.grouped_matmul(lhs_gk, rhs_ekn, group_sizes_e)
  if name in libraries.NAMES:
    return libraries.grouped_matmul(name, lhs_gk, rhs_ekn, group_sizes_e)
  if name == 'reference':
    return reference.grouped_matmul(lhs_gk, rhs_ekn, group_sizes_e)
  block = block or xla.default_block(lhs_gk.shape[0], rhs_ekn.shape[0])
  return xla.grouped_matmul(lhs_gk, rhs_ekn, group_sizes_e, block)


def _candidates(lhs_gk, rhs_ekn, block) -> list[dispatch.Candidate]:
  reasons = {
    name: libraries.refusal(name, lhs_gk, rhs_ekn) for name in libraries.NAMES
  }
  reasons['mosaic_gpu'] = mosaic_gpu.refusal(lhs_gk, rhs_ekn)
  if block is not None:
    reason = f"block={block} is a setting of 'xla'"
    reasons = dict.fromkeys(reasons, reason)
  best = [(name, reasons.pop(name)) for name in ('mosaic_gpu', 'megablox')]
  # The rest on request only: slower, or an oracle that wastes memory.
  return [*best, ('xla', None), *reasons.items(), ('reference', None)]


def _check(lhs_gk, rhs_ekn, group_sizes_e, block):
  if lhs_gk.ndim != 2 or rhs_ekn.ndim != 3:
    raise ValueError(
      f'grouped_matmul: lhs {lhs_gk.shape} must be [rows, width] and rhs '
      f'{rhs_ekn.shape} [groups, width, width].'
    )
  if lhs_gk.shape[1] != rhs_ekn.shape[1]:
    raise ValueError(
      f'grouped_matmul: rows of width {lhs_gk.shape[1]} do not match weights '
      f'{rhs_ekn.shape}; the second axis must be {lhs_gk.shape[1]}.'
    )
  if group_sizes_e.shape != rhs_ekn.shape[:1] or not rhs_ekn.shape[0]:
    raise ValueError(
      f'grouped_matmul: group_sizes {group_sizes_e.shape} must be '
      f'[{rhs_ekn.shape[0]}], one size for each of at least one weight.'
    )
  if not jnp.issubdtype(group_sizes_e.dtype, jnp.integer):
    raise TypeError(
      f'grouped_matmul: group_sizes has dtype {group_sizes_e.dtype}; give '
      'integers, such as the group_sizes of sort_rows.'
    )
  if block is not None and block < 1:
    raise ValueError(
      f'grouped_matmul: block={block} must be positive, or None to choose.'
    )
