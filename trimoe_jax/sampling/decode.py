"""Sequences in the middle of generation, and one token more at a time.

Legend: b batch, t time, a vocabulary, s stop tokens.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from trimoe_jax import sharding
from trimoe_jax.model.cache import Cache
from trimoe_jax.model.model import Model
from trimoe_jax.sampling.choose import Drawing, choose


class State(struct.PyTreeNode):
  """All that the future of B sequences depends on, beside the model.

  Every token so far has been read: `logits` [B, a] are those of the next one.
  `last` [B] is the latest token made, `stopped` [B] says whether it ended its
  sequence. Draw number `step` [] of a row uses its key of `keys` [B].
  """

  cache: Cache
  logits: jax.Array
  last: jax.Array
  stopped: jax.Array
  keys: jax.Array
  step: jax.Array


def row_keys(key: jax.Array, batch: int) -> jax.Array:
  """A key [B] for each row, the same whatever the batch."""
  return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(batch))


@functools.partial(
  jax.jit, static_argnames=('model', 'most'), donate_argnames='state'
)
def advance(
  model: Model,
  weights: tuple[Any, Any],
  state: State,
  drawing: Drawing,
  stop_s: jax.Array,
  *,
  count: jax.Array | int,
  most: int,
) -> tuple[jax.Array, State]:
  """Tokens int32 [B, most] of which `count` are made, and the new state.

  One compiled loop; it ends early when every sequence has stopped. Any `count`
  of the same `most` runs the same program, so that a state goes the same way
  bit by bit in one call or in several.

  Args:
    model: its configuration decides everything but the values.
    weights: parameters and the router's state, as for `Model.extend`.
    state: with room for `count` more tokens. It is donated: not usable after.
    drawing: how tokens are drawn.
    stop_s: int32 [S]; a sequence that made one of them reads it, then stays as
      it is while that token is repeated.
    count: tokens to make, at most `most`.
    most: columns of the result; the rest repeat each row's latest token.
  """
  params, router = weights
  batch = state.last.shape[0]

  def running(carry):
    n, state, _ = carry
    return (n < count) & ~jnp.all(state.stopped)

  def step(carry):
    n, state, out_bt = carry
    token_b, state = _one_token(model, weights, state, drawing, stop_s)
    out_bt = jax.lax.dynamic_update_slice(out_bt, token_b[:, None], (0, n))
    return n + 1, state, out_bt

  out_bt = jnp.zeros((batch, most), jnp.int32)
  carry = jnp.int32(0), state, out_bt
  n, state, out_bt = jax.lax.while_loop(running, step, carry)
  is_made_t = jnp.arange(most) < n
  return jnp.where(is_made_t, out_bt, state.last[:, None]), state


def _one_token(model, weights, state, drawing, stop_s):
  """The next token of every row, drawn and read."""
  params, router = weights
  key_b = jax.vmap(jax.random.fold_in, (0, None))(state.keys, state.step)
  token_b = choose(state.logits, key_b, drawing)
  token_b = jnp.where(state.stopped, state.last, token_b)
  active_b = ~state.stopped
  logits_bta, cache = model.apply(
    {'params': params},
    token_b[:, None],
    state.cache,
    router,
    active_b[:, None],
    method='extend',
  )
  logits_ba = sharding.constrain(logits_bta[:, 0], None, None)
  stops_b = jnp.any(token_b[:, None] == stop_s, axis=-1)
  return token_b, state.replace(
    cache=cache,
    logits=jnp.where(active_b[:, None], logits_ba, state.logits),
    last=token_b,
    stopped=state.stopped | stops_b,
    step=state.step + 1,
  )
