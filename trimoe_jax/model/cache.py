"""The decoding cache: one entry a layer, and where new tokens lie in it.

A cache is a pytree: `layers` mirrors the parameter tree (KDA state and
convolution tails, or MLA latents), `valid` [B, S] marks real tokens (padding is
not), `length` [] int32 counts the slots written.

Layers read what is there and return what is new; `Cache.extended` writes it
once, at the end of a pass. So a scan over layers copies no entry, and a donated
cache is updated in place.

Legend: b batch, t new tokens, s slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from trimoe_jax import sharding

# Axes of an entry, the batch first; stacked layers add axes before them.
RANKS = {
  'state': 4,
  'query_tail': 4,
  'key_tail': 4,
  'value_tail': 4,
  'latent': 3,
  'keys': 4,
  'values': 4,
}
# Entries with a slot a token, and how far behind the batch that axis is.
SLOTTED = {'latent': 1, 'keys': 2, 'values': 2}


class Cache(struct.PyTreeNode):
  """All a continuation needs. `layers` is stacked like the parameters."""

  layers: Any
  valid: jax.Array
  length: jax.Array

  @property
  def room(self) -> int:
    """Slots, written or not."""
    return self.valid.shape[1]

  def map_layers(self, function: Callable[..., Any], *others: Any) -> Any:
    """`layers` with function(name, axis, entry, ...) of every entry.

    `axis` is that of the batch; `others` are trees like `layers`.
    """

    def call(path, x, *rest):
      name = path[-1].key
      return function(name, x.ndim - RANKS[name], x, *rest)

    return jax.tree_util.tree_map_with_path(call, self.layers, *others)

  def extended(self, new: Any, span: Span, time: int) -> Cache:
    """The cache after `time` tokens of which the layers returned `new`."""

    def write(name, axis, old, x):
      if name not in SLOTTED:
        return x
      names = [None] * axis + ['batch'] + [None] * (x.ndim - axis - 1)
      x = sharding.constrain(x.astype(old.dtype), *names)
      axis += SLOTTED[name]
      return jax.lax.dynamic_update_slice_in_dim(old, x, span.start, axis)

    layers = self.map_layers(write, new)
    return Cache(layers, span.valid, self.length + time)

  def grown(self, room: int) -> Cache:
    """The cache with slots for `room` tokens, at least those it has."""
    more = room - self.room
    if more <= 0:
      return self

    def grow(name, axis, x):
      if name not in SLOTTED:
        return x
      return _padded(x, axis + SLOTTED[name], more)

    return self.replace(
      layers=self.map_layers(grow), valid=_padded(self.valid, 1, more)
    )

  def rows(self, row_b: jax.Array) -> Cache:
    """A cache of the given rows, which may repeat; it shares no buffer."""
    take = lambda x, axis: jnp.take(x, row_b, axis=axis)
    return Cache(
      layers=self.map_layers(lambda _, axis, x: take(x, axis)),
      valid=take(self.valid, 0),
      length=self.length + 0,
    )


def _padded(x, axis, more):
  pads = [(0, 0)] * x.ndim
  pads[axis] = (0, more)
  return jnp.pad(x, pads)


class Span(struct.PyTreeNode):
  """Where the tokens of one call lie in the cache.

  `start` is the slot of the first one, `valid` [B, S] covers them already.
  `fresh` (static) says that the cache was empty, so that a prompt may attend
  to itself blockwise instead of to the cache.
  """

  start: jax.Array
  valid: jax.Array
  fresh: bool = struct.field(pytree_node=False, default=False)
