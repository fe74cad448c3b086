"""The decoding cache: one entry a layer, and where new tokens lie in it.

A cache is a pytree: `layers` mirrors the parameter tree (KDA state and
convolution tails, or MLA latents), `valid` [B, S] marks real tokens (left
padding is not), `length` [] int32 counts the slots written.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from trimoe_jax import sharding


class Cache(struct.PyTreeNode):
  """All a continuation needs. `layers` is stacked like the parameters."""

  layers: Any
  valid: jax.Array
  length: jax.Array


class Span(struct.PyTreeNode):
  """Where the tokens of one call lie in the cache.

  `start` is the slot of the first one, `valid` [B, S] covers them already.
  `fresh` (static) says that the cache was empty, so that a prompt may attend
  to itself blockwise instead of to the cache.
  """

  start: jax.Array
  valid: jax.Array
  fresh: bool = struct.field(pytree_node=False, default=False)

  def write(self, cache_bsr: jax.Array, new_btr: jax.Array) -> jax.Array:
    """The cache with the new tokens at `start`."""
    new_btr = sharding.constrain(new_btr, 'batch', None, None)
    return jax.lax.dynamic_update_slice_in_dim(
      cache_bsr, new_btr.astype(cache_bsr.dtype), self.start, 1
    )

  def visible(self, time: int) -> jax.Array:
    """[B, T, S] bool: which slots each of `time` new tokens may look at.

    A padding token looks at itself alone, so that its softmax is finite.
    """
    slot_s = jnp.arange(self.valid.shape[1])
    query_t = self.start + jnp.arange(time)
    causal_ts = slot_s[None] <= query_t[:, None]
    itself_ts = slot_s[None] == query_t[:, None]
    return (causal_ts & self.valid[:, None]) | itself_ts
