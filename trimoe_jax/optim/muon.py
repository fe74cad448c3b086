"""Muon: momentum whose matrices are made orthogonal before they are applied.

  M = momentum * M + G
  U = newton_schulz(G + momentum * M)         (nesterov; else of M)
  update = 0.2 * sqrt(max(rows, columns)) * U

The factor gives updates the root mean square of AdamW's, whatever the shape,
so that both optimizers share a learning rate (Moonlight, arXiv 2502.16982,
section 2.2). A matrix is one head of a projection per head, one expert, or a
whole projection (`groups.matrix_axes`), and rows and columns are its own.

Newton-Schulz multiplies whole matrices. Where a mesh with explicit axis types
shards their rows or columns, these mesh axes are moved onto a batch axis
(layers, heads, experts) that they divide, so that each device owns some
matrices entirely, and moved back afterwards. Without such an axis the
matrices are gathered.

Suffixes here: r rows (reduction), o columns (output); batch axes lead.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

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
  specs = _specs_to_owned(momentum, axes)
  x = momentum
  for spec in specs[1:]:
    x = jax.sharding.reshard(x, spec)
  order = axes.batch + axes.reduction + axes.output
  x = jnp.transpose(x, order)
  batch = x.shape[: len(axes.batch)]
  split = len(axes.batch) + len(axes.reduction)
  rows = math.prod(x.shape[len(axes.batch) : split])
  columns = math.prod(x.shape[split:])
  u_ro = newton_schulz(x.reshape(*batch, rows, columns), dtype=dtype)
  u_ro = UPDATE_RMS * max(rows, columns) ** 0.5 * u_ro
  back = sorted(range(len(order)), key=order.__getitem__)
  out = jnp.transpose(u_ro.reshape(x.shape), back)
  for spec in reversed(specs[:-1]):
    out = jax.sharding.reshard(out, spec)
  return out


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


def _specs_to_owned(
  x: jax.Array, axes: groups.MatrixAxes
) -> list[PartitionSpec]:
  """From the sharding of `x` to whole matrices, one mesh axis at a time.

  One at a time, because a partitioner turns such a step into an all-to-all or
  an all-gather of one axis, but gathers everything when two move at once.
  """
  sharding = jax.typeof(x).sharding
  held = [_mesh_axes(entry) for entry in sharding.spec]
  specs = [sharding.spec]
  for i in axes.reduction + axes.output:
    for name in reversed(held[i]):
      held[i] = held[i][:-1]
      for j in axes.batch:
        names = (*held[j], name)
        if x.shape[j] % math.prod(sharding.mesh.shape[n] for n in names) == 0:
          held[j] = names
          break
      specs.append(PartitionSpec(*(names or None for names in held)))
  return specs


def _mesh_axes(entry: Any) -> tuple[str, ...]:
  if entry is None:
    return ()
  return (entry,) if isinstance(entry, str) else tuple(entry)
