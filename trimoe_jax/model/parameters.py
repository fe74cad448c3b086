"""Parameters declared once: shape, logical axes and initializer.

A table is a nested dictionary of `Parameter`. Initial values, abstract shapes,
shardings and parameter counts are all derived from it, so that the 2.8T
configuration can be counted and sharded without an array.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from trimoe_jax import sharding

# From independent uniform numbers in (-1, 1) of the parameter's shape.
Init = Callable[[jax.Array], jax.Array]
Table = Mapping[str, Any]  # nested; leaves are Parameter
SHARED_STREAM = 2**20  # elements of the largest parameter in the stream


@dataclasses.dataclass(frozen=True)
class Parameter:
  """One float32 parameter. `axes` are logical names of `sharding.RULES`."""

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  init: Init

  def __post_init__(self):
    if len(self.shape) != len(self.axes):
      raise ValueError(f'shape {self.shape} does not fit axes {self.axes}.')

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  def stacked(self, count: int) -> Parameter:
    """The parameters of `count` equal layers, on a leading axis."""
    return dataclasses.replace(
      self, shape=(count, *self.shape), axes=('layers', *self.axes)
    )


def normal(std: float) -> Init:
  return lambda u: std * math.sqrt(2.0) * jax.scipy.special.erfinv(u)


def uniform(bound: float) -> Init:
  """Uniform in (-bound, bound)."""
  return lambda u: bound * u


def zeros(u: jax.Array) -> jax.Array:
  return jnp.zeros_like(u)


def ones(u: jax.Array) -> jax.Array:
  return jnp.ones_like(u)


def map_table(function: Callable[[Parameter], Any], table: Table) -> Any:
  """`function` of every leaf, in the same nesting."""
  return jax.tree.map(
    function, table, is_leaf=lambda x: isinstance(x, Parameter)
  )


def stack(table: Table, count: int) -> Table:
  """The table of `count` stacked copies."""
  return map_table(lambda p: p.stacked(count), table)


def initialize(table: Table, key: jax.Array) -> Any:
  """Fresh values, the same on every mesh.

  Small parameters share one stream of random numbers: a generator for each of
  a hundred leaves takes XLA longer to compile than the training step.
  """
  leaves, structure = jax.tree.flatten(
    table, is_leaf=lambda x: isinstance(x, Parameter)
  )
  stream_key, large_key = jax.random.split(key)
  small = [p.size if p.size <= SHARED_STREAM else 0 for p in leaves]
  stream = _symmetric_uniform(stream_key, (sum(small),))
  values, start = [], 0
  for i, (p, count) in enumerate(zip(leaves, small)):
    if count:
      u = stream[start : start + count].reshape(p.shape)
    else:
      u = _symmetric_uniform(jax.random.fold_in(large_key, i), p.shape)
    values.append(p.init(u))
    start += count
  return structure.unflatten(values)


def _symmetric_uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Uniform in the open interval (-1, 1), so that erfinv is finite."""
  low = jnp.nextafter(jnp.float32(-1), jnp.float32(0))
  return jax.random.uniform(key, shape, jnp.float32, low, 1.0)


def abstract(table: Table, mesh=None) -> Any:
  """ShapeDtypeStructs, with shardings when a mesh is given."""
  return map_table(
    lambda p: jax.ShapeDtypeStruct(
      p.shape,
      jnp.float32,
      sharding=None if mesh is None else sharding.named(p.axes, p.shape, mesh),
    ),
    table,
  )


def size(table: Table) -> int:
  """The number of parameters."""
  return sum(
    p.size
    for p in jax.tree.leaves(table, is_leaf=lambda x: isinstance(x, Parameter))
  )


def declare(module: nn.Module, table: Table) -> dict[str, Any]:
  """Declares every entry of `table` as a parameter of a Flax module.

  A nested entry is one parameter whose value is the nested dictionary, so the
  tree in `params` has exactly the table's shape.
  """
  return {
    name: module.param(name, lambda key, t=entry: initialize(t, key))
    for name, entry in table.items()
  }
