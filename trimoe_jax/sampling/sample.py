"""The whole way from prompts to continuations, at once or as they are made.

Legend: b batch, t time, a vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trimoe_jax import sharding
from trimoe_jax.model.embedding import insert_features
from trimoe_jax.model.media import Media
from trimoe_jax.model.model import Model
from trimoe_jax.model.router import RouterState
from trimoe_jax.sampling.choose import Drawing
from trimoe_jax.sampling.decode import State, advance, row_keys
from trimoe_jax.sampling.prefill import prefill
from trimoe_jax.sampling.serving import served

# Prompts are padded to a power of two of at least this, and above PIECE to a
# multiple of it: few shapes, thus few compilations.
SHORTEST = 16
PIECE = 1024
SEGMENT = 64  # tokens made by one call of the compiled loop at most
_STOPS = 4  # stop tokens are padded to a multiple of this, also none at all
# A continuation gets its room at once up to this many slots or twice the
# prompt; what is longer doubles its cache when it is full.
AT_ONCE = 4096


def generate(
  model: Model,
  params: Any,
  router: RouterState,
  prompt_tokens: jax.Array | np.ndarray,
  *,
  max_tokens: int,
  temperature: float,
  key: jax.Array,
  **settings: Any,
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
    **settings: valid, images, top_p, top_k and stop, as for `stream`.

  Raises:
    ValueError: a shape or a value out of range.
  """
  pieces = list(
    stream(
      model,
      params,
      router,
      prompt_tokens,
      max_tokens=max_tokens,
      temperature=temperature,
      key=key,
      **settings,
    )
  )
  out_bt = jnp.concatenate(pieces, axis=1)
  missing = max_tokens - out_bt.shape[1]  # every sequence has stopped
  return jnp.pad(out_bt, ((0, 0), (0, missing)), mode='edge')


def stream(
  model: Model,
  params: Any,
  router: RouterState,
  prompt_tokens: jax.Array | np.ndarray,
  *,
  max_tokens: int,
  temperature: float,
  key: jax.Array,
  valid: jax.Array | np.ndarray | None = None,
  images: Media | None = None,
  top_p: float | None = None,
  top_k: int | None = None,
  stop: int | Sequence[int] | None = None,
  every: int = SEGMENT,
) -> Iterator[jax.Array]:
  """Yields continuations as they are made: int32 [B, n], n <= every.

  It ends when max_tokens are made or every sequence has stopped.

  Args:
    model, params, router, prompt_tokens, max_tokens, temperature, key: as for
      `generate`.
    valid: bool [B, T], False for padding, which may lie anywhere in a row; each
      row has at least one real token. None: all real.
    images: the media of every row, for a model with a vision tower; their
      placeholders are repeated as `prompt.pack` does.
    top_p, top_k: see `choose`; None leaves all tokens.
    stop: token ids that end a sequence; it then repeats the one that ended it.
    every: tokens between two results.

  Raises:
    ValueError: a shape or a value out of range.
  """
  drawing = Drawing(temperature, top_p, top_k)
  _check(prompt_tokens, max_tokens, every)
  drawing.check()
  batch = len(prompt_tokens)
  model, params = served(model, params)
  weights = params, router
  state = start(
    model,
    weights,
    prompt_tokens,
    key=key,
    valid=valid,
    images=images,
    max_tokens=max_tokens,
  )
  pieces = proceed(
    model,
    weights,
    state,
    drawing,
    max_tokens=max_tokens,
    stop=stop,
    every=every,
  )
  for tokens_bt, _ in pieces:
    yield tokens_bt if len(tokens_bt) == batch else tokens_bt[:batch]


def start(
  model: Model,
  weights: tuple[Any, RouterState],
  prompt_tokens: jax.Array | np.ndarray,
  *,
  key: jax.Array,
  valid: jax.Array | np.ndarray | None = None,
  images: Media | None = None,
  max_tokens: int = AT_ONCE,
) -> State:
  """The state after reading prompts [B, T], with room for a continuation.

  On a mesh whose batch axes do not divide B, the first row is repeated.

  Args:
    model, weights: the model, its parameters (both from `served` for speed)
      and the router's state.
    prompt_tokens, valid, images: as for `stream`.
    key: decides the draws; row b has a key of its own.
    max_tokens: how many tokens will probably follow.
  """
  tokens_bt, valid_bt = _padded(prompt_tokens, valid)
  time = tokens_bt.shape[1]
  room = _rounded(min(time + max_tokens, max(2 * time, AT_ONCE)))
  prompt = tokens_bt, valid_bt, jax.tree.map(_whole_shards, images)
  return _start(model, weights, prompt, key, room=max(room, time))


def proceed(
  model: Model,
  weights: tuple[Any, RouterState],
  state: State,
  drawing: Drawing,
  *,
  max_tokens: int,
  stop: int | Sequence[int] | None = None,
  every: int = SEGMENT,
) -> Iterator[tuple[jax.Array, State]]:
  """Yields (tokens [B, n], the state after them) until done or all stopped.

  A state that was given in, or yielded, is used up by the next step; keep a
  `snapshot.fork` of what is needed again.
  """
  stop_s, length, made = _stops(stop), int(state.cache.length), 0
  while made < max_tokens:
    count = min(every, max_tokens - made)
    end = length + max_tokens - made
    state = with_room(state, length + count, end)
    tokens_bt, state = advance(
      model, weights, state, drawing, stop_s, count=count, most=every
    )
    made += count
    length += count
    yield tokens_bt[:, :count], state
    if bool(jnp.all(state.stopped)):
      return


def read(
  model: Model,
  weights: tuple[Any, RouterState],
  state: State,
  tokens: jax.Array | np.ndarray,
  *,
  valid: jax.Array | np.ndarray | None = None,
  max_tokens: int = AT_ONCE,
) -> State:
  """The state after further given tokens [B, T], such as a user's next turn.

  Sequences that had stopped go on; a row without a real token stays as it was.
  The state is used up.
  """
  tokens_bt, valid_bt = _padded(tokens, valid)
  length = int(state.cache.length) + tokens_bt.shape[1]
  state = with_room(state, length, length + max_tokens)
  return _read(model, weights, state, (tokens_bt, valid_bt))


def with_room(state: State, needed: int, end: int) -> State:
  """The state with a cache of at least `needed` slots.

  A new one has twice the slots, or as many as `end` takes: what attention over
  the cache costs follows what is filled, within a factor of two.
  """
  room = state.cache.room
  if needed <= room:
    return state
  room = _rounded(max(needed, min(end, 2 * room)))
  return state.replace(cache=_grown(state.cache, room))


def _rounded(room: int) -> int:
  """Few different sizes: sixteenths of a power of two, 64 at least."""
  step = max(64, (1 << (room - 1).bit_length()) // 16)
  return -(-room // step) * step


_grown = jax.jit(lambda cache, room: cache.grown(room), static_argnums=1)


@functools.partial(jax.jit, static_argnames=('model', 'room'))
def _start(model, weights, prompt, key, *, room):
  tokens_bt, valid_bt, images = prompt
  batch, time = tokens_bt.shape
  inserts = None
  if images is not None:
    features = model.apply(
      {'params': weights[0]}, images, method='image_features'
    )
    inserts = insert_features(tokens_bt, features, model.config)
  logits_ba, cache = prefill(
    model,
    *weights,
    tokens_bt,
    length=room,
    valid_bt=valid_bt,
    piece=min(time, PIECE),
    inserts=inserts,
  )
  return State(
    cache=cache,
    logits=logits_ba,
    last=tokens_bt[:, -1],
    stopped=jnp.zeros(batch, bool),
    keys=row_keys(key, batch),
    step=jnp.int32(0),
  )


@functools.partial(jax.jit, static_argnames='model', donate_argnames='state')
def _read(model, weights, state, given):
  tokens_bt, valid_bt = given
  logits_ba, cache = prefill(
    model,
    *weights,
    tokens_bt,
    cache=state.cache,
    valid_bt=valid_bt,
    piece=min(tokens_bt.shape[1], PIECE),
  )
  goes_on_b = valid_bt[:, -1]
  return state.replace(
    cache=cache,
    logits=jnp.where(goes_on_b[:, None], logits_ba, state.logits),
    last=jnp.where(goes_on_b, tokens_bt[:, -1], state.last),
    stopped=state.stopped & ~goes_on_b,
  )


def _stops(stop) -> np.ndarray:
  stop = [] if stop is None else np.atleast_1d(stop)
  stop_s = np.full(max(1, -(-len(stop) // _STOPS)) * _STOPS, -1, np.int32)
  stop_s[: len(stop)] = stop
  return stop_s


def _padded(tokens, valid):
  """Rows with their padding on the left, padded to a common length."""
  tokens_bt = jnp.asarray(tokens, jnp.int32)
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
  if valid is None:
    valid = jnp.ones(tokens_bt.shape, bool)
  rows = _left_padded(tokens_bt, jnp.asarray(valid, bool))
  return tuple(_whole_shards(x) for x in rows)


def _left_padded(tokens_bt, valid_bt):
  time = tokens_bt.shape[1]
  padded = max(SHORTEST, 1 << (time - 1).bit_length())
  if time > PIECE:
    padded = -(-time // PIECE) * PIECE
  left = ((0, 0), (padded - time, 0))
  tokens_bt = jnp.where(valid_bt, tokens_bt, 0)
  tokens_bt, valid_bt = (jnp.pad(x, left) for x in (tokens_bt, valid_bt))
  order_bt = jnp.argsort(valid_bt, axis=1, stable=True)
  return (
    jnp.take_along_axis(tokens_bt, order_bt, axis=1),
    jnp.take_along_axis(valid_bt, order_bt, axis=1),
  )


def _whole_shards(x_bt):
  """The first row again until the mesh's batch axes divide the batch."""
  missing = -len(x_bt) % sharding.axis_ways('batch')
  if not missing:
    return x_bt
  return jnp.concatenate([x_bt, jnp.repeat(x_bt[:1], missing, axis=0)])


def _check(tokens, max_tokens, every):
  if max_tokens < 1:
    raise ValueError(f'max_tokens={max_tokens}; it must be at least 1.')
  if every < 1:
    raise ValueError(f'every={every}; it must be at least 1.')
