"""Named shapes and gates of Kimi Delta Attention, for tests and benchmarks."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda.api import kda

Gates = Literal['mixed', 'slow', 'saturated', 'correlated']
GATES: tuple[Gates, ...] = ('mixed', 'slow', 'saturated', 'correlated')


@dataclasses.dataclass(frozen=True)
class ArgSpec:
  """One call of `kda`; `tags` say where it comes from and who runs it.

  gates: 'mixed' from no decay to the lower bound, 'slow' mostly near 1,
    'saturated' all near the lower bound; 'correlated' has hardly any decay,
    keys that point the same way and beta near 1, where the chunk's triangular
    system is worst conditioned.
  """

  name: str
  batch: int
  length: int
  heads: int
  value_heads: int
  key_dim: int
  value_dim: int
  documents: int = 0  # 0: no segment_ids
  dtype: str = 'bfloat16'
  tags: tuple[str, ...] = ()

  def arguments(self, gates: Gates = 'mixed', seed: int = 0) -> dict:
    """Keyword arguments of `kda` with a state entering the first document."""
    rng = np.random.default_rng(seed)
    rows, heads = (self.batch, self.length), self.value_heads
    shift, spread = {
      'mixed': (0, 2),
      'slow': (-4, 2),
      'saturated': (8, 1),
      'correlated': (-9, 2),
    }[gates]
    alike, eager = (3, 5) if gates == 'correlated' else (0, 0)
    normal = lambda *shape: rng.standard_normal(shape)
    arrays = {
      'q': normal(*rows, self.heads, self.key_dim),
      'k': normal(*rows, self.heads, self.key_dim) + alike,
      'v': normal(*rows, heads, self.value_dim),
      'gate': spread * normal(*rows, heads, self.key_dim) + shift,
      'beta': normal(*rows, heads) + eager,
    }
    wide = {
      'a_log': 0.1 * normal(heads),
      'dt_bias': 0.3 * normal(heads, self.key_dim),
      'initial_state': normal(self.batch, heads, self.key_dim, self.value_dim),
    }
    wide_dtype = jnp.promote_types(self.dtype, jnp.float32)
    cast = lambda tree, dtype: {
      n: jnp.asarray(x, dtype) for n, x in tree.items()
    }
    given = cast(arrays, self.dtype) | cast(wide, wide_dtype)
    if self.documents:
      given['segment_ids'] = self.segment_ids(rng)
    return given

  def segment_ids(self, rng: np.random.Generator) -> jnp.ndarray:
    """Documents of uneven length with padding between two and at the end."""
    cuts = np.sort(
      rng.integers(0, self.length, (self.batch, self.documents - 1)), 1
    )
    time = np.arange(self.length)
    ids = 1 + (time[None, None] >= cuts[..., None]).sum(1)
    padding = (time % 23 == 7) | (time >= self.length - self.length // 16)
    return jnp.asarray(np.where(padding, 0, ids), jnp.int32)

  def cotangents(self, seed: int = 1) -> tuple[jnp.ndarray, jnp.ndarray]:
    """Gradients of the output and of the final state."""
    rng = np.random.default_rng(seed)
    shape = (self.batch, self.length, self.value_heads, self.value_dim)
    state = (self.batch, self.value_heads, self.key_dim, self.value_dim)
    wide_dtype = jnp.promote_types(self.dtype, jnp.float32)
    return (
      jnp.asarray(rng.standard_normal(shape), self.dtype),
      jnp.asarray(0.1 * rng.standard_normal(state), wide_dtype),
    )


SPECS = (
  ArgSpec('packed', 3, 100, 2, 4, 16, 24, 5, 'float64', ('test',)),
  ArgSpec('wide_heads', 1, 256, 2, 2, 128, 128, 0, tags=('test',)),
  ArgSpec('small', 1, 16384, 2, 2, 32, 32, 0, 'float32', ('bench',)),
  ArgSpec('small_packed', 1, 16384, 2, 2, 32, 32, 16, 'float32', ('bench',)),
  ArgSpec('k3_head', 1, 4096, 1, 1, 128, 128, 0, tags=('bench',)),
  ArgSpec('k3_8k', 1, 8192, 96, 96, 128, 128, 0, tags=('device',)),
  ArgSpec('k3_64k', 1, 65536, 16, 16, 128, 128, 0, tags=('device',)),
)


def tagged(tag: str) -> tuple[ArgSpec, ...]:
  """The specs that carry `tag`."""
  return tuple(spec for spec in SPECS if tag in spec.tags)


def named(name: str) -> ArgSpec:
  """The spec of that name."""
  return {spec.name: spec for spec in SPECS}[name]


def outputs_and_gradients(arguments: dict, cotangents, **options) -> dict:
  """'out', 'final_state', and the gradient of each argument by its name."""
  fixed = {'segment_ids': arguments.get('segment_ids')} | options
  variable = {n: x for n, x in arguments.items() if n not in fixed}
  (out, state), pull = jax.vjp(lambda x: kda(**x, **fixed), variable)
  gradients = pull(
    (cotangents[0].astype(out.dtype), cotangents[1].astype(state.dtype))
  )[0]
  return {'out': out, 'final_state': state} | gradients
