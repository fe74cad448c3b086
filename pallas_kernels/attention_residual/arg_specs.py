"""Named shapes of the depth mix, for tests and benchmarks."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class ArgSpec:
  """One call of `mix`; `tags` say where it comes from and who runs it.

  partial: whether there is a running partial sum beside the sources.
  masked: sources that are masked out; `sources` itself names the partial.
  normalized: whether an RMSNorm follows.
  """

  name: str
  sources: int
  tokens: tuple[int, ...]
  width: int
  partial: bool = True
  masked: tuple[int, ...] = ()
  normalized: bool = False
  dtype: str = 'bfloat16'
  tags: tuple[str, ...] = ()

  @property
  def count(self) -> int:
    """Sources with the partial."""
    return self.sources + self.partial

  def arguments(self, seed: int = 0) -> tuple[tuple, dict]:
    """Positional and keyword arguments of `mix`; vectors are float32."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape)
    # Sources of different sizes, as later blocks are larger than the embedding.
    size = 2.0 ** np.arange(self.sources).reshape(-1, *[1] * len(self.tokens))
    sources = normal(self.sources, *self.tokens, self.width) * size[..., None]
    wide = jnp.promote_types(self.dtype, jnp.float32)
    query = jnp.asarray(normal(self.width) / self.width**0.5, wide)
    gain = jnp.asarray(1 + 0.3 * normal(self.width), wide)
    keywords = {}
    if self.partial:
      partial = 3 * normal(*self.tokens, self.width)
      keywords['partial'] = jnp.asarray(partial, self.dtype)
    if self.masked:
      allowed = ~np.isin(np.arange(self.count), self.masked)
      keywords['mask'] = jnp.asarray(allowed)
    if self.normalized:
      norm_gain = jnp.asarray(1 + 0.3 * normal(self.width), wide)
      keywords['norm_gain'] = norm_gain
    return (jnp.asarray(sources, self.dtype), query, gain), keywords


SPECS = (
  ArgSpec('plain', 3, (2, 7), 24, partial=False, tags=('test',)),
  ArgSpec('one_source', 1, (5,), 16, partial=False, tags=('test',)),
  ArgSpec('partial', 2, (11,), 40, tags=('test',)),
  ArgSpec('masked', 4, (3, 5), 32, masked=(1, 3), tags=('test',)),
  ArgSpec('closed_block', 3, (9,), 32, masked=(3,), tags=('test',)),
  ArgSpec('normalized', 2, (7,), 48, normalized=True, tags=('test',)),
  ArgSpec('tiny', 2, (1, 16384), 128, tags=('bench',)),
  ArgSpec('nine_sources', 8, (1, 16384), 128, tags=('bench',)),
  ArgSpec('nine_f32', 8, (1, 16384), 128, dtype='float32', tags=('bench',)),
  ArgSpec('k3_256', 8, (1, 256), 7168, tags=('bench', 'k3')),
  ArgSpec('k3_16k', 8, (1, 16384), 7168, tags=('device', 'k3')),
  ArgSpec(
    'k3_norm', 8, (1, 16384), 7168, normalized=True, tags=('device', 'k3')
  ),
)


def tagged(tag: str) -> tuple[ArgSpec, ...]:
  """The specs that carry `tag`."""
  return tuple(spec for spec in SPECS if tag in spec.tags)
