"""Reading given tokens into a cache.

Legend: b batch, t time, n pieces of the prompt, a vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from trimoe_jax import sharding
from trimoe_jax.model.cache import Cache
from trimoe_jax.model.embedding import Inserts
from trimoe_jax.model.model import Model, init_cache
from trimoe_jax.model.router import RouterState


def prefill(
  model: Model,
  params: Any,
  router: RouterState,
  tokens_bt: jax.Array,
  *,
  length: int | None = None,
  cache: Cache | None = None,
  valid_bt: jax.Array | None = None,
  piece: int | None = None,
  inserts: Inserts | None = None,
) -> tuple[jax.Array, Cache]:
  """Logits [B, a] after the last token, and the cache that holds the prompt.

  The logits are whole on every device.

  Args:
    model, params, router: as for `Model.extend`.
    tokens_bt: prompts [B, T] int32, padded on the left.
    length: slots of a new cache, at least T.
    cache: one that these tokens continue, with room for them, in place of a new
      one.
    valid_bt: [B, T] bool, False for padding; None: all real.
    piece: tokens read at once; it divides T. Activations are those of one
      piece, whose queries then meet the filled part of the cache. None reads
      everything at once, blockwise.
    inserts: images, as for `Model.extend`.

  Raises:
    ValueError: no room in the cache, or T is not a multiple of `piece`.
  """
  batch, time = tokens_bt.shape
  piece = piece or time
  room = length if cache is None else cache.room
  if room is None or time > room:
    raise ValueError(f'a prompt of {time} tokens does not fit length={room}.')
  if time % piece:
    raise ValueError(
      f'{time} prompt tokens are not a multiple of piece={piece}; pad the '
      'prompt on the left, or use piece=None.'
    )
  if valid_bt is None:
    valid_bt = jnp.ones((batch, time), bool)

  features = None if inserts is None else inserts.features
  given = tokens_bt, valid_bt, None if inserts is None else inserts.row

  def extend(given, cache, *, fresh=False):
    tokens_bt, valid_bt, row_bt = given
    logits_bta, cache = model.apply(
      {'params': params},
      tokens_bt,
      cache,
      router,
      valid_bt,
      fresh=fresh,
      last=True,
      inserts=None if row_bt is None else Inserts(features, row_bt),
      method='extend',
    )
    return sharding.constrain(logits_bta[:, 0], None, None), cache

  fresh = cache is None
  cache = init_cache(model.config, batch, length) if fresh else cache
  first = jax.tree.map(lambda x_bt: x_bt[:, :piece], given)
  logits_ba, cache = extend(first, cache, fresh=fresh)
  if time > piece:

    def step(carry, given):
      return extend(given, carry[1]), None

    rest = jax.tree.map(
      lambda x: x[:, piece:].reshape(batch, -1, piece).swapaxes(0, 1), given
    )
    (logits_ba, cache), _ = jax.lax.scan(step, (logits_ba, cache), rest)
  return logits_ba, cache
