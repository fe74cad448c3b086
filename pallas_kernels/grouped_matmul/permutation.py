"""Sorting token rows by expert and back, with gradients that only gather.

The derivative of a gather is by default a scatter-add: slow, and summed in an
order that may change from run to run. Here every token has exactly J rows and
every row one token, so each derivative is a gather by the other permutation,
and sums over a token's rows run in slot order.

Suffixes: t tokens, j top-k slot, g = t * j rows sorted by expert, d width.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Permutation(NamedTuple):
  """Rows sorted by expert.

  Attributes:
    order: int32 [G], the flat (token, slot) index that row g comes from.
    inverse: int32 [T, J], the row of each token and slot.
    group_sizes: int32 [E]; rows past their sum belong to no expert.
  """

  order: jax.Array
  inverse: jax.Array
  group_sizes: jax.Array


def sort_rows(indices_tj, num_experts: int, mask_t=None) -> Permutation:
  """The stable sort of every (token, slot) by its expert.

  Args:
    indices_tj: [T, J] integer expert ids. Ids outside [0, num_experts) are sent
      to no expert, as expert-parallel shards need it.
    num_experts: E.
    mask_t: bool [T] or None; tokens with False are sent to no expert.

  Returns:
    A Permutation. Rows without an expert lie behind all groups.

  Raises:
    ValueError: wrong ranks, or a mask that does not fit.
    TypeError: indices that are not integers.
  """
  if indices_tj.ndim != 2:
    raise ValueError(f'sort_rows: indices {indices_tj.shape} must be [T, J].')
  if not jnp.issubdtype(indices_tj.dtype, jnp.integer):
    raise TypeError(
      f'sort_rows: indices have dtype {indices_tj.dtype}; give integers.'
    )
  if mask_t is not None and mask_t.shape != indices_tj.shape[:1]:
    raise ValueError(
      f'sort_rows: mask {mask_t.shape} must be [{indices_tj.shape[0]}], one '
      f'entry for each token of indices {indices_tj.shape}.'
    )
  known_tj = (indices_tj >= 0) & (indices_tj < num_experts)
  if mask_t is not None:
    known_tj &= mask_t[:, None]
  expert_g = jnp.where(known_tj, indices_tj, num_experts).reshape(-1)
  row_g = jnp.arange(expert_g.size, dtype=jnp.int32)
  key_g = expert_g.astype(_key_dtype(num_experts))
  key_g, order = jax.lax.sort((key_g, row_g), num_keys=1, is_stable=True)
  expert_g = key_g.astype(jnp.int32)
  inverse = jnp.zeros_like(order).at[order].set(row_g, unique_indices=True)
  return Permutation(
    order, inverse.reshape(indices_tj.shape), _sizes(expert_g, num_experts)
  )


def _key_dtype(largest: int):
  """The narrowest integers: a radix sort makes a pass for each of their bytes.

  GPUs sort 65,536 rows in 9 us by bytes, in 28 by words.
  """
  kinds = jnp.uint8, jnp.uint16, jnp.int32
  return next(kind for kind in kinds if largest <= jnp.iinfo(kind).max)


def _sizes(expert_g, num_experts: int):
  """How often each of [0, num_experts) occurs among sorted integers.

  Every expert writes at most once, where its rows start; counting would add
  all rows to few cells, many at the same time.
  """
  rows = expert_g.size
  row_g = jnp.arange(rows, dtype=jnp.int32)
  before_g = jnp.roll(expert_g, 1)
  starts_g = (row_g == 0) | (expert_g != before_g)
  cell_g = jnp.where(starts_g, expert_g, num_experts + 1)
  start_e = jnp.full(num_experts + 1, rows, jnp.int32)
  start_e = start_e.at[cell_g].set(row_g, mode='drop')
  # An expert without rows starts where the next one with rows does.
  start_e = jax.lax.cummin(start_e, reverse=True)
  return jnp.diff(start_e)


@jax.custom_vjp
def dispatch(x_td, permutation: Permutation):
  """The rows [G, D] that the experts read; rows without an expert are zero.

  The gradient of a token is the sum of its rows' in slot order, in float32.
  """
  token_g = permutation.order // permutation.inverse.shape[1]
  live_g = jnp.arange(token_g.size) < jnp.sum(permutation.group_sizes)
  return jnp.where(live_g[:, None], _take(x_td, token_g), 0)


def _dispatch_forward(x_td, permutation):
  return dispatch(x_td, permutation), permutation


def _dispatch_backward(permutation, drows_gd):
  dx_td = _sum_slots(drows_gd, permutation, None)
  return dx_td.astype(drows_gd.dtype), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def combine(y_gd, weights_tj, permutation: Permutation):
  """The weighted sum of each token's expert outputs.

      out_t = sum_j weights_tj y_inverse(t, j)

  Products and the sum, in slot order, are float32; the result is cast to the
  dtype of `y_gd`. Slots without an expert add nothing.

  Args:
    y_gd: [G, D] expert outputs in the model's dtype.
    weights_tj: [T, J] float32.
    permutation: from `sort_rows`.

  Returns:
    [T, D] in the dtype of `y_gd`.
  """
  out_td = _sum_slots(y_gd, permutation, weights_tj).astype(y_gd.dtype)
  # Else XLA tears the gathers from their sum to fuse that with a norm behind.
  return jax.lax.optimization_barrier(out_td)


def _combine_forward(y_gd, weights_tj, permutation):
  saved = y_gd, weights_tj, permutation
  return combine(y_gd, weights_tj, permutation), saved


def _combine_backward(saved, dout_td):
  y_gd, weights_tj, permutation = saved
  slots = weights_tj.shape[1]
  live_tj = _live(permutation)
  weights_g = jnp.where(live_tj, weights_tj, 0).reshape(-1)[permutation.order]
  dy_gd = weights_g[:, None] * _take(dout_td, permutation.order // slots)
  live_g = jnp.arange(y_gd.shape[0]) < jnp.sum(permutation.group_sizes)
  dy_gd = jnp.where(live_g[:, None], dy_gd, 0).astype(y_gd.dtype)
  wide_td = dout_td.astype(jnp.promote_types(dout_td.dtype, jnp.float32))
  dweights = [
    jnp.sum(wide_td * _take(y_gd, permutation.inverse[:, j]), axis=1)
    for j in range(slots)
  ]
  dweights_tj = jnp.where(live_tj, jnp.stack(dweights, axis=1), 0)
  return dy_gd, dweights_tj.astype(weights_tj.dtype), None


combine.defvjp(_combine_forward, _combine_backward)


def _sum_slots(rows_gd, permutation, weights_tj):
  """Sum over slots of each token's rows, float32, in slot order."""
  wide = jnp.promote_types(rows_gd.dtype, jnp.float32)
  live_tj = _live(permutation)
  total = jnp.zeros((live_tj.shape[0], rows_gd.shape[1]), wide)
  for j in range(live_tj.shape[1]):
    row_td = _take(rows_gd, permutation.inverse[:, j]).astype(wide)
    if weights_tj is not None:
      row_td = row_td * weights_tj[:, j, None]
    total += jnp.where(live_tj[:, j, None], row_td, 0)
  return total


def _live(permutation):
  """Which tokens and slots have an expert."""
  return permutation.inverse < jnp.sum(permutation.group_sizes)


def _take(rows, index):
  """Rows by an index that is known to be in range."""
  return rows.at[index].get(mode='promise_in_bounds')
