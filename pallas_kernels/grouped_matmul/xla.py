"""Grouped matmul as a loop over blocks of rows, with its derivative.

A block is up to `block` consecutive rows of one group, so each step is one
small matmul with one weight. The number of steps follows the group sizes, and
results are written in place: neither a weight for each row or block nor a
[groups, rows, width] array exists. A block reads a whole window of the rows;
rows of it that belong to another group are excluded by a select, so that what
they hold, NaN included, stays out of the result.

Suffixes: g rows sorted by group, e groups, k input width, n output width, c row
within a block.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp


class _Blocks(NamedTuple):
  """Where each block lies; the arrays are as long as the worst case."""

  group: jax.Array
  start: jax.Array
  end: jax.Array  # of the group
  count: jax.Array  # blocks in use


def default_block(rows: int, groups: int) -> int:
  """Rows in a block: the mean group rounded up to a power of two, 32 to 256.

  Larger blocks waste work on partly filled windows, smaller ones pay for the
  steps of the loop.
  """
  mean = -(-rows // groups)
  return min(256, max(32, 1 << (mean - 1).bit_length()))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(lhs_gk, rhs_ekn, group_sizes_e, block):
  """See `api.grouped_matmul`."""
  rows, width = lhs_gk.shape[0], rhs_ekn.shape[2]
  if 0 in (*lhs_gk.shape, width):
    return jnp.zeros((rows, width), lhs_gk.dtype)
  block = min(block, rows)
  blocks = _partition(group_sizes_e, rows, block)

  def step(i, out_gn):
    first, inside_c = _window(blocks, i, rows, block)
    lhs_ck = jax.lax.dynamic_slice_in_dim(lhs_gk, first, block)
    rhs_kn = _weight(rhs_ekn, blocks.group[i], lhs_gk.dtype)
    out_cn = _einsum('ck,kn->cn', lhs_ck, rhs_kn)
    return _write(out_gn, out_cn, first, inside_c)

  out_gn = jnp.zeros((rows, width), lhs_gk.dtype)
  return jax.lax.fori_loop(0, blocks.count, step, out_gn)


def _forward(lhs_gk, rhs_ekn, group_sizes_e, block):
  out_gn = grouped_matmul(lhs_gk, rhs_ekn, group_sizes_e, block)
  return out_gn, (lhs_gk, rhs_ekn, group_sizes_e)


def _backward(block, saved, dout_gn):
  lhs_gk, rhs_ekn, group_sizes_e = saved
  rows = lhs_gk.shape[0]
  wide = jnp.promote_types(lhs_gk.dtype, jnp.float32)
  dlhs_gk = jnp.zeros_like(lhs_gk)
  drhs_ekn = jnp.zeros(rhs_ekn.shape, wide)
  if 0 in (*lhs_gk.shape, rhs_ekn.shape[2]):
    return dlhs_gk, drhs_ekn.astype(rhs_ekn.dtype), None
  block = min(block, rows)
  blocks = _partition(group_sizes_e, rows, block)

  def step(i, gradients):
    dlhs_gk, drhs_ekn = gradients
    first, inside_c = _window(blocks, i, rows, block)
    lhs_ck = jax.lax.dynamic_slice_in_dim(lhs_gk, first, block)
    dout_cn = jax.lax.dynamic_slice_in_dim(dout_gn, first, block)
    lhs_ck = jnp.where(inside_c[:, None], lhs_ck, 0)
    dout_cn = jnp.where(inside_c[:, None], dout_cn, 0)
    group = blocks.group[i]
    rhs_kn = _weight(rhs_ekn, group, lhs_gk.dtype)
    dlhs_ck = _einsum('cn,kn->ck', dout_cn, rhs_kn)
    dlhs_gk = _write(dlhs_gk, dlhs_ck, first, inside_c)
    drhs_kn = _einsum('ck,cn->kn', lhs_ck, dout_cn)
    drhs_kn += jax.lax.dynamic_index_in_dim(drhs_ekn, group, keepdims=False)
    return dlhs_gk, jax.lax.dynamic_update_index_in_dim(
      drhs_ekn, drhs_kn, group, 0
    )

  gradients = dlhs_gk, drhs_ekn
  gradients = jax.lax.fori_loop(0, blocks.count, step, gradients)
  return gradients[0], gradients[1].astype(rhs_ekn.dtype), None


grouped_matmul.defvjp(_forward, _backward)


def _partition(group_sizes_e, rows, block):
  """Cuts every group into blocks; an empty group has none."""
  group_sizes_e = group_sizes_e.astype(jnp.int32)
  end_e = jnp.minimum(jnp.cumsum(group_sizes_e), rows)
  blocks_e = -(-group_sizes_e // block)
  last_e = jnp.cumsum(blocks_e)
  groups = group_sizes_e.shape[0]
  index = jnp.arange(rows // block + groups, dtype=jnp.int32)
  group = jnp.searchsorted(last_e, index, side='right').astype(jnp.int32)
  group = jnp.minimum(group, groups - 1)  # entries that are not in use
  within = index - (last_e - blocks_e)[group]
  start = (end_e - group_sizes_e)[group] + within * block
  return _Blocks(group, start, end_e[group], last_e[-1])


def _window(blocks, i, rows, block):
  """(first row to read, which rows of the window are this block's)."""
  start = blocks.start[i]
  first = jnp.minimum(start, rows - block)
  row_c = first + jnp.arange(block, dtype=jnp.int32)
  return first, (row_c >= start) & (row_c < blocks.end[i])


def _weight(rhs_ekn, group, dtype):
  rhs_kn = jax.lax.dynamic_index_in_dim(rhs_ekn, group, keepdims=False)
  return rhs_kn.astype(dtype)


def _einsum(equation, x, y):
  wide = jnp.promote_types(x.dtype, jnp.float32)
  return jnp.einsum(equation, x, y, preferred_element_type=wide)


def _write(rows_gd, rows_cd, first, inside_c):
  """Writes the block's rows and leaves the others of its window alone."""
  old_cd = jax.lax.dynamic_slice_in_dim(rows_gd, first, rows_cd.shape[0])
  rows_cd = jnp.where(inside_c[:, None], rows_cd.astype(rows_gd.dtype), old_cd)
  return jax.lax.dynamic_update_slice_in_dim(rows_gd, rows_cd, first, 0)
