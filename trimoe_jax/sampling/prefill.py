"""Reading a prompt into an empty cache.

Legend: b batch, t time, n pieces of the prompt, a vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from trimoe_jax import sharding
from trimoe_jax.model.cache import Cache
from trimoe_jax.model.model import Model, init_cache
from trimoe_jax.model.router import RouterState


def prefill(
  model: Model,
  params: Any,
  router: RouterState,
  tokens_bt: jax.Array,
  *,
  length: int,
  valid_bt: jax.Array | None = None,
  piece: int | None = None,
) -> tuple[jax.Array, Cache]:
  """Logits [B, a] after the last token, and the cache that holds the prompt.

  The logits are whole on every device.

  Args:
    model, params, router: as for `Model.extend`.
    tokens_bt: prompts [B, T] int32, padded on the left.
    length: slots of the cache, at least T.
    valid_bt: [B, T] bool, False for padding; None: all real.
    piece: tokens read at once; it divides T. Activations are those of one
      piece, whose queries then meet the whole cache. None reads everything at
      once, blockwise.

  Raises:
    ValueError: no room in the cache, or T is not a multiple of `piece`.
  """
  batch, time = tokens_bt.shape
  piece = piece or time
  if time > length:
    raise ValueError(f'a prompt of {time} tokens does not fit length={length}.')
  if time % piece:
    raise ValueError(
      f'{time} prompt tokens are not a multiple of piece={piece}; pad the '
      'prompt on the left, or use piece=None.'
    )
  if valid_bt is None:
    valid_bt = jnp.ones((batch, time), bool)

  def extend(tokens_bt, cache, valid_bt, *, fresh):
    logits_bta, cache = model.apply(
      {'params': params},
      tokens_bt,
      cache,
      router,
      valid_bt,
      fresh=fresh,
      last=True,
      method='extend',
    )
    return sharding.constrain(logits_bta[:, 0], None, None), cache

  cache = init_cache(model.config, batch, length)
  logits_ba, cache = extend(
    tokens_bt[:, :piece], cache, valid_bt[:, :piece], fresh=True
  )
  if time > piece:

    def step(carry, inputs):
      tokens_bt, valid_bt = inputs
      return extend(tokens_bt, carry[1], valid_bt, fresh=False), None

    rest = jax.tree.map(
      lambda x: x[:, piece:].reshape(batch, -1, piece).swapaxes(0, 1),
      (tokens_bt, valid_bt),
    )
    (logits_ba, cache), _ = jax.lax.scan(step, (logits_ba, cache), rest)
  return logits_ba, cache
