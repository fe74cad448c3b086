"""Muon: momentum whose matrices are made orthogonal before they are applied.

  M = momentum * M + G
  U = newton_schulz(G + momentum * M)         (nesterov; else of M)
  update = 0.2 * sqrt(max(rows, columns)) * U

The factor gives updates the root mean square of AdamW's, whatever the shape,
so that both optimizers share a learning rate (Moonlight, arXiv 2502.16982,
section 2.2). A matrix is one head of a projection per head, one expert, or a
whole projection (`groups.matrix_axes`), and rows and columns are its own.

Newton-Schulz multiplies whole matrices. Where a mesh with explicit axis types
shards their rows or columns, these mesh axes are moved onto the stack of a
device's matrices (layers, heads, experts), so that each device owns some
matrices entirely, and moved back afterwards. A stack that the devices do not
divide is filled up with zeros: the busiest device has one matrix more than the
mean, and nothing is gathered.

Suffixes here: r rows (reduction), o columns (output); batch axes lead.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from trimoe_jax.optim import groups

# The quintic of Keller Jordan's Muon, also used by Moonlight and Kimi K2. It
# does not converge to 1: it brings every singular value into about (0.7, 1.2).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
UPDATE_RMS = 0.2


def newton_schulz(x_ro: jax.Array, *, dtype: Any = jnp.float32) -> jax.Array:
  """The nearly orthogonal factor of every matrix in `x_ro`.

    X <- a X + b (X X^T) X + c (X X^T)^2 X, five times, from X / ||X||_F

  Args:
    x_ro: [..., rows, columns]; leading axes are independent matrices. A zero
      matrix stays zero.
    dtype: in which matrices are multiplied, float32 or bfloat16; sums and
      everything else are float32.

  Returns:
    [..., rows, columns] in the dtype of `x_ro`.
  """
  tall = x_ro.shape[-2] > x_ro.shape[-1]
  y_ro = (x_ro.mT if tall else x_ro).astype(jnp.float32)
  norm = jnp.linalg.norm(y_ro, axis=(-2, -1), keepdims=True)
  a, b, c = COEFFICIENTS

  def product(left, right):
    left, right = left.astype(dtype), right.astype(dtype)
    return jnp.matmul(left, right, preferred_element_type=jnp.float32)

  def iterate(_, y_ro):
    gram = product(y_ro, y_ro.mT)
    return a * y_ro + product(b * gram + c * product(gram, gram), y_ro)

  # A loop, not unrolled: a model has dozens of parameters to compile this for.
  y_ro = jax.lax.fori_loop(0, STEPS, iterate, y_ro / (norm + 1e-7))
  return (y_ro.mT if tall else y_ro).astype(x_ro.dtype)


def orthogonal_update(
  momentum: jax.Array, axes: groups.MatrixAxes, *, dtype: Any = jnp.float32
) -> jax.Array:
  """`momentum` with each of its matrices orthogonal and scaled, same sharding.

  Args:
    momentum: any shape.
    axes: which of its axes are batch, rows and columns.
    dtype: of the Newton-Schulz products.
  """
  function = functools.partial(_orthogonal_shard, axes=axes, dtype=dtype)
  where = jax.typeof(momentum).sharding
  if where.mesh.empty:
    return function(momentum, {})
  names = (*where.spec, *(None,) * (momentum.ndim - len(where.spec)))
  split = {}
  for dim in axes.reduction + axes.output:
    held = tuple(n for n in _mesh_axes(names[dim]) if where.mesh.shape[n] > 1)
    if held:
      split[dim] = held
  # Every output varies as the input does; a loop does not pass the check.
  return jax.shard_map(
    functools.partial(function, split=split),
    in_specs=where.spec,
    out_specs=where.spec,
    check_vma=False,
  )(momentum)


def _orthogonal_shard(x, split, *, axes, dtype):
  """`orthogonal_update` of a device's block of the parameter.

  `split` has the mesh axes over which matrices are cut, by the axis of x.
  """
  with jax.named_scope('newton_schulz'):
    order = axes.batch + axes.reduction + axes.output
    batch, reduction = len(axes.batch), len(axes.reduction)
    x = jnp.transpose(x, order)
    held = [(i - batch, split[n]) for i, n in enumerate(order) if n in split]
    stack = x.reshape(-1, *x.shape[batch:])
    counts = []
    for dim, names in held:
      counts.append(stack.shape[0])
      stack = _own(stack, dim + 1, names)
    rows = math.prod(stack.shape[1 : 1 + reduction])
    columns = math.prod(stack.shape[1 + reduction :])
    u_ro = newton_schulz(stack.reshape(-1, rows, columns), dtype=dtype)
    u_ro = UPDATE_RMS * max(rows, columns) ** 0.5 * u_ro
    stack = u_ro.reshape(stack.shape)
    for (dim, names), count in zip(reversed(held), reversed(counts)):
      stack = _give_back(stack, dim + 1, names)[:count]
    back = sorted(range(len(order)), key=order.__getitem__)
    return jnp.transpose(stack.reshape(x.shape), back)


def _own(stack, dim, names):
  """Some whole matrices instead of a part of each; zeros fill the last."""
  missing = -stack.shape[0] % jax.lax.axis_size(names)
  stack = jnp.pad(stack, [(0, missing), *[(0, 0)] * (stack.ndim - 1)])
  return jax.lax.all_to_all(
    stack, names, split_axis=0, concat_axis=dim, tiled=True
  )


def _give_back(stack, dim, names):
  """The inverse of `_own`, with what filled up."""
  return jax.lax.all_to_all(
    stack, names, split_axis=dim, concat_axis=0, tiled=True
  )


def orthogonalize(dtype: Any = jnp.float32) -> optax.GradientTransformation:
  """Replaces every update by `orthogonal_update`, with axes from its path."""

  def update(updates, state, params=None):
    del params

    def one(path, x):
      axes = groups.matrix_axes(path, x.ndim)
      return orthogonal_update(x, axes, dtype=dtype)

    return jax.tree_util.tree_map_with_path(one, updates), state

  return optax.GradientTransformation(optax.init_empty_state, update)


def scale_by_muon(
  momentum: float, *, nesterov: bool = True, dtype: Any = jnp.float32
) -> optax.GradientTransformation:
  """Momentum, then `orthogonalize`.

  Args:
    momentum: kept share of the running sum, in [0, 1). The sum is stored in
      the parameters' dtype and sharding.
    nesterov: look one step of momentum ahead.
    dtype: of the Newton-Schulz products.
  """
  return optax.chain(
    optax.trace(decay=momentum, nesterov=nesterov), orthogonalize(dtype)
  )


def _mesh_axes(entry: Any) -> tuple[str, ...]:
  if entry is None:
    return ()
  return (entry,) if isinstance(entry, str) else tuple(entry)
