"""Named shapes of routing, for tests and benchmarks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.quantile_router.statistics import Estimator, Statistics


@dataclasses.dataclass(frozen=True)
class ArgSpec:
  """One call of `route`; `tags` say where it comes from and who runs it."""

  name: str
  tokens: int
  experts: int
  top_k: int
  num_bins: int = 1000
  estimator: Estimator = 'uniform'
  tags: tuple[str, ...] = ()

  def arguments(self, seed: int = 0):
    """(logits [tokens, E], bias [E], statistics), experts unequally liked."""
    tokens_key, expert_key = jax.random.split(jax.random.key(seed))
    logits = jax.random.normal(tokens_key, (self.tokens, self.experts))
    logits += jax.random.normal(expert_key, (self.experts,))
    bias = jnp.zeros(self.experts, jnp.float32)
    lo, hi = jnp.float32(-1.0), jnp.float32(1.0)
    return logits, bias, Statistics(lo, hi, self.num_bins, self.estimator)


SPECS = (
  ArgSpec('odd', 37, 11, 3, num_bins=50, tags=('test',)),
  ArgSpec('odd_log', 37, 11, 3, 9, 'log_edges', tags=('test',)),
  ArgSpec('single', 64, 8, 1, num_bins=20, tags=('test',)),
  ArgSpec('all_but_one', 20, 5, 4, num_bins=20, tags=('test',)),
  ArgSpec('one_token', 1, 16, 2, num_bins=20, tags=('test',)),
  ArgSpec('tiny', 16384, 64, 8, tags=('bench',)),
  ArgSpec('tiny_log', 16384, 64, 8, 33, 'log_edges', tags=('bench',)),
  ArgSpec('k3_4k', 4096, 896, 16, tags=('bench', 'k3')),
  ArgSpec('k3_4k_log', 4096, 896, 16, 33, 'log_edges', tags=('bench', 'k3')),
  ArgSpec('k3_64k', 65536, 896, 16, tags=('device', 'k3')),
  ArgSpec('k3_64k_log', 65536, 896, 16, 33, 'log_edges', tags=('device', 'k3')),
)


def tagged(tag: str) -> tuple[ArgSpec, ...]:
  """The specs that carry `tag`."""
  return tuple(spec for spec in SPECS if tag in spec.tags)


def named(name: str) -> ArgSpec:
  """The spec of that name.

  Raises:
    ValueError: there is none.
  """
  for spec in SPECS:
    if spec.name == name:
      return spec
  raise ValueError(
    f'{name!r} is no spec; choose from {[s.name for s in SPECS]}.'
  )
