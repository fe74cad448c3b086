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

Init = Callable[[jax.Array, tuple[int, ...]], jax.Array]
Table = Mapping[str, Any]  # nested; leaves are Parameter


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
  return lambda key, shape: std * jax.random.normal(key, shape, jnp.float32)


def uniform(bound: float) -> Init:
  """Uniform in (-bound, bound)."""
  return lambda key, shape: jax.random.uniform(
    key, shape, jnp.float32, -bound, bound
  )


def zeros(key, shape) -> jax.Array:
  del key
  return jnp.zeros(shape, jnp.float32)


def ones(key, shape) -> jax.Array:
  del key
  return jnp.ones(shape, jnp.float32)


def map_table(function: Callable[[Parameter], Any], table: Table) -> Any:
  """`function` of every leaf, in the same nesting."""
  return jax.tree.map(
    function, table, is_leaf=lambda x: isinstance(x, Parameter)
  )


def stack(table: Table, count: int) -> Table:
  """The table of `count` stacked copies."""
  return map_table(lambda p: p.stacked(count), table)


def initialize(table: Table, key: jax.Array) -> Any:
  """Fresh values; each leaf gets its own key, in the table's sorted order."""
  leaves, structure = jax.tree.flatten(
    table, is_leaf=lambda x: isinstance(x, Parameter)
  )
  keys = jax.random.split(key, len(leaves))
  return structure.unflatten([p.init(k, p.shape) for p, k in zip(leaves, keys)])


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
