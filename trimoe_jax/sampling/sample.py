"""Choosing tokens, and the whole way from prompts to continuations.

Legend: b batch, t time, a vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trimoe_jax import sharding
from trimoe_jax.model.model import Model
from trimoe_jax.model.router import RouterState
from trimoe_jax.sampling.decode import decode
from trimoe_jax.sampling.prefill import prefill

# Prompts are padded to a power of two of at least this, and above PIECE to a
# multiple of it: few shapes, thus few compilations.
SHORTEST = 16
PIECE = 1024
_STOPS = 4  # stop tokens are padded to a multiple of this, also none at all


def choose(
  logits_ba: jax.Array,
  key: jax.Array,
  temperature: jax.Array | float,
  top_p: jax.Array | float | None = None,
) -> jax.Array:
  """Tokens [B] drawn from softmax(logits / temperature).

  Args:
    logits_ba: [B, a] float32.
    key: a PRNG key.
    temperature: 0 takes the largest logit.
    top_p: draw only from the fewest most probable tokens that together have at
      least this probability; tokens as probable as the last of them stay too.
  """
  scale = jnp.where(temperature > 0, temperature, 1.0)
  scaled_ba = logits_ba / scale
  if top_p is not None:
    p_ba = jax.nn.softmax(scaled_ba, axis=-1)
    sorted_ba = jnp.sort(p_ba, axis=-1, descending=True)
    before_ba = jnp.cumsum(sorted_ba, axis=-1) - sorted_ba
    kept_ba = jnp.where(before_ba < top_p, sorted_ba, jnp.inf)
    least_b = jnp.min(kept_ba, axis=-1, keepdims=True)
    scaled_ba = jnp.where(p_ba >= least_b, scaled_ba, -jnp.inf)
  drawn_b = jax.random.categorical(key, scaled_ba, axis=-1)
  return jnp.where(temperature > 0, drawn_b, jnp.argmax(logits_ba, axis=-1))


def generate(
  model: Model,
  params: Any,
  router: RouterState,
  prompt_tokens: jax.Array | np.ndarray,
  *,
  max_tokens: int,
  temperature: float,
  key: jax.Array,
  valid: jax.Array | np.ndarray | None = None,
  top_p: float | None = None,
  stop: int | Sequence[int] | None = None,
) -> jax.Array:
  """Continuations int32 [B, max_tokens] of prompts [B, T].

  The prompt is read at once (in pieces of 1024 tokens when it is longer), then
  one token at a time. One compilation serves all prompt lengths of the same
  power of two, temperatures and values of top_p.

  Args:
    model: its configuration decides everything but the values.
    params: `model_parameters(model.config)`.
    router: the router's state; sampling never observes.
    prompt_tokens: int32 [B, T], T >= 1.
    max_tokens: tokens to make for each prompt.
    temperature: 0 is greedy.
    key: a PRNG key; not used when greedy.
    valid: bool [B, T], False for padding, which may lie anywhere in a row; each
      row has at least one real token. None: all real.
    top_p: see `choose`; None leaves all tokens.
    stop: token ids that end a sequence; it then repeats the one that ended it.

  Raises:
    ValueError: a shape or a value out of range.
  """
  tokens_bt = jnp.asarray(prompt_tokens, jnp.int32)
  _check(tokens_bt, valid, max_tokens, temperature, top_p)
  if valid is None:
    valid = jnp.ones(tokens_bt.shape, bool)
  tokens_bt, valid_bt = _left_padded(tokens_bt, jnp.asarray(valid, bool))
  batch = tokens_bt.shape[0]
  tokens_bt, valid_bt = (_whole_shards(x) for x in (tokens_bt, valid_bt))
  stop = [] if stop is None else np.atleast_1d(stop)
  stop_s = np.full(max(1, -(-len(stop) // _STOPS)) * _STOPS, -1, np.int32)
  stop_s[: len(stop)] = stop
  tokens_bt = _generate(
    model,
    (params, router),
    (tokens_bt, valid_bt),
    (key, jnp.float32(temperature), top_p),
    max_tokens=max_tokens,
    stop_s=stop_s,
  )
  return tokens_bt if len(tokens_bt) == batch else tokens_bt[:batch]


def _whole_shards(x_bt):
  """The first row again until the mesh's batch axes divide the batch."""
  missing = -len(x_bt) % sharding.axis_ways('batch')
  if not missing:
    return x_bt
  return jnp.concatenate([x_bt, jnp.repeat(x_bt[:1], missing, axis=0)])


def _check(tokens_bt, valid, max_tokens, temperature, top_p):
  if tokens_bt.ndim != 2 or not tokens_bt.size:
    raise ValueError(
      f'prompt_tokens has shape {tokens_bt.shape}; give [batch, time] with at '
      'least one prompt of at least one token, such as a BOS token.'
    )
  if valid is not None and np.shape(valid) != tokens_bt.shape:
    raise ValueError(
      f'valid has shape {np.shape(valid)}; it must be that of prompt_tokens, '
      f'{tokens_bt.shape}.'
    )
  if max_tokens < 1:
    raise ValueError(f'max_tokens={max_tokens}; it must be at least 1.')
  if temperature < 0:
    raise ValueError(
      f'temperature={temperature}; it must be 0 (greedy) or larger.'
    )
  if top_p is not None and not 0 < top_p <= 1:
    raise ValueError(f'top_p={top_p} is outside (0, 1]; None keeps all tokens.')


def _left_padded(tokens_bt, valid_bt):
  """Rows with their padding on the left, padded to a common length."""
  time = tokens_bt.shape[1]
  padded = max(SHORTEST, 1 << (time - 1).bit_length())
  if time > PIECE:
    padded = -(-time // PIECE) * PIECE
  left = ((0, 0), (padded - time, 0))
  tokens_bt, valid_bt = (jnp.pad(x, left) for x in (tokens_bt, valid_bt))
  order_bt = jnp.argsort(valid_bt, axis=1, stable=True)
  return (
    jnp.take_along_axis(tokens_bt, order_bt, axis=1),
    jnp.take_along_axis(valid_bt, order_bt, axis=1),
  )


@functools.partial(jax.jit, static_argnames=('model', 'max_tokens'))
def _generate(model, weights, prompt, drawing, *, max_tokens, stop_s):
  params, router = weights
  tokens_bt, valid_bt = prompt
  key, temperature, top_p = drawing
  time = tokens_bt.shape[1]
  start = prefill(
    model,
    params,
    router,
    tokens_bt,
    length=time + max_tokens - 1,
    valid_bt=valid_bt,
    piece=min(time, PIECE),
  )
  return decode(
    model,
    params,
    router,
    start,
    choose=lambda logits_ba, step: choose(
      logits_ba, jax.random.fold_in(key, step), temperature, top_p
    ),
    max_tokens=max_tokens,
    stop_s=stop_s,
  )
