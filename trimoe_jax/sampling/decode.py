"""Continuing a cache, one token for each sequence at a time.

Legend: b batch, t time, a vocabulary, s stop tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from trimoe_jax import sharding
from trimoe_jax.model.cache import Cache
from trimoe_jax.model.model import Model
from trimoe_jax.model.router import RouterState


def decode(
  model: Model,
  params: Any,
  router: RouterState,
  start: tuple[jax.Array, Cache],
  *,
  choose: Callable[[jax.Array, jax.Array], jax.Array],
  max_tokens: int,
  stop_s: jax.Array,
) -> jax.Array:
  """Tokens int32 [B, max_tokens] that continue the sequences of a cache.

  Args:
    model, params, router: as for `Model.extend`.
    start: logits [B, a] and the cache, from `prefill`, with room for
      max_tokens - 1 more.
    choose: (logits [B, a], number of the step) -> tokens [B].
    max_tokens: tokens to make; fewer are computed when every sequence stops.
    stop_s: int32 [S]; a sequence that chose one of them repeats it to the end.
  """
  logits_ba, cache = start
  token_b = choose(logits_ba, jnp.int32(0)).astype(jnp.int32)
  out_bt = jnp.broadcast_to(token_b[:, None], (*token_b.shape, max_tokens))

  def running(carry):
    step, token_b, _, _ = carry
    return (step < max_tokens) & ~jnp.all(_stopped(token_b, stop_s))

  def advance(carry):
    step, token_b, cache, out_bt = carry
    logits_bta, cache = model.apply(
      {'params': params}, token_b[:, None], cache, router, method='extend'
    )
    logits_ba = sharding.constrain(logits_bta[:, 0], None, None)
    new_b = choose(logits_ba, step).astype(jnp.int32)
    new_b = jnp.where(_stopped(token_b, stop_s), token_b, new_b)
    # The columns from `step` on, so that an early end leaves stop tokens.
    later_t = jnp.arange(max_tokens) >= step
    out_bt = jnp.where(later_t, new_b[:, None], out_bt)
    return step + 1, new_b, cache, out_bt

  carry = (jnp.int32(1), token_b, cache, out_bt)
  return jax.lax.while_loop(running, advance, carry)[-1]


def _stopped(token_b: jax.Array, stop_s: jax.Array) -> jax.Array:
  return jnp.any(token_b[:, None] == stop_s, axis=-1)
