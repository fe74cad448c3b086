"""Named shapes and loads of the grouped matmul, for tests and benchmarks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

Load = Literal['even', 'routed', 'random', 'one', 'sparse', 'none']


@dataclasses.dataclass(frozen=True)
class ArgSpec:
  """One call of `grouped_matmul`; `tags` say who runs it.

  load: 'even' groups, 'routed' ones as by a balanced router, 'random' ones
    from nothing to twice the mean, all rows to 'one' group in the middle,
    'sparse' with three of four groups empty, or 'none' for no rows at all.
  tail: rows past all groups.
  """

  name: str
  rows: int
  groups: int
  width: int
  out_width: int
  load: Load = 'random'
  tail: int = 0
  dtype: str = 'bfloat16'
  tags: tuple[str, ...] = ()

  def group_sizes(self, seed: int = 0) -> np.ndarray:
    """int32 [groups] with a sum of rows - tail, or 0 for 'none'."""
    rng = np.random.default_rng(seed)
    index = np.arange(self.groups)
    if self.load == 'routed':
      share = np.full(self.groups, 1 / self.groups)
      return rng.multinomial(self.rows - self.tail, share).astype(np.int32)
    share = {
      'even': np.ones(self.groups),
      'random': rng.random(self.groups) + 1e-3,
      'one': index == self.groups // 2,
      'sparse': index % 4 == 1,
      'none': None,
    }[self.load]
    if share is None:
      return np.zeros(self.groups, np.int32)
    cuts = np.cumsum(share) / np.sum(share) * (self.rows - self.tail)
    return np.diff(np.round(cuts), prepend=0).astype(np.int32)

  def arguments(self, seed: int = 0):
    """(lhs [rows, width], rhs [groups, width, out_width], group_sizes)."""
    if self.groups * self.width * self.out_width > _LARGE:
      lhs, rhs = _draw_on_device(self, jax.random.key(seed))
      return lhs, rhs, jnp.asarray(self.group_sizes(seed))
    rng = np.random.default_rng(seed)
    lhs = rng.standard_normal((self.rows, self.width))
    rhs = rng.standard_normal((self.groups, self.width, self.out_width))
    return (
      jnp.asarray(lhs, self.dtype),
      jnp.asarray(rhs / self.width**0.5, self.dtype),
      jnp.asarray(self.group_sizes(seed)),
    )


@functools.partial(jax.jit, static_argnums=0)
def _draw_on_device(spec: ArgSpec, key):
  """(lhs, rhs), one weight after the other."""
  key, lhs_key = jax.random.split(key)
  shape, dtype = (spec.width, spec.out_width), jnp.dtype(spec.dtype)
  one = lambda key: jax.random.normal(key, shape) / spec.width**0.5
  rhs = jax.lax.map(
    lambda key: one(key).astype(dtype), jax.random.split(key, spec.groups)
  )
  return jax.random.normal(lhs_key, (spec.rows, spec.width), dtype), rhs


_LARGE = 2**22  # elements that take a host too long to draw

SPECS = (
  ArgSpec('even', 24, 4, 8, 6, 'even', tags=('test',)),
  ArgSpec('odd', 37, 5, 7, 9, tail=3, tags=('test',)),
  ArgSpec('one_group', 33, 4, 8, 6, 'one', tags=('test',)),
  ArgSpec('empty_groups', 29, 9, 8, 6, 'sparse', tail=2, tags=('test',)),
  ArgSpec('no_rows_used', 6, 3, 4, 5, 'none', tags=('test',)),
  ArgSpec('few_rows', 3, 8, 4, 5, tags=('test',)),
  ArgSpec('tiny', 32768, 16, 64, 64, tags=('bench',)),
  ArgSpec('tiny_f32', 32768, 16, 64, 64, dtype='float32', tags=('bench',)),
  ArgSpec('many_groups', 2048, 64, 64, 64, tags=('bench',)),
  ArgSpec('skewed', 32768, 16, 64, 64, 'sparse', tags=('bench',)),
  ArgSpec('k3', 65536, 896, 3584, 3072, tags=('k3',)),
  # One of eight ranks of a K3 layer, and a layer of few tokens; then `mini`.
  ArgSpec('k3_rank', 65536, 112, 3584, 3072, 'routed', tags=('device',)),
  ArgSpec('k3_few', 16384, 896, 3584, 3072, 'routed', tags=('device',)),
  ArgSpec('square', 65536, 128, 384, 384, 'routed', tags=('device',)),
  ArgSpec('mini', 65536, 128, 384, 336, 'routed', tags=('device',)),
)


def tagged(tag: str) -> tuple[ArgSpec, ...]:
  """The specs that carry `tag`."""
  return tuple(spec for spec in SPECS if tag in spec.tags)


def named(name: str) -> ArgSpec:
  """The spec of that name.

  Raises:
    ValueError: there is none.
  """
  found = {spec.name: spec for spec in SPECS}
  if name not in found:
    raise ValueError(f'spec {name!r} is unknown; choose from {sorted(found)}.')
  return found[name]
