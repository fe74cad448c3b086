"""Softmax attention of new tokens over a cache and over themselves.

The cache is read a block of slots at a time with a running maximum and sum, as
many blocks as are filled; a cache of one block is read at once. What a slot
holds (latents, or keys and values of every head) is the caller's.

Legend: b batch, h heads, t new tokens, s slots, v value width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trimoe_jax.model.cache import Span

# Scores that exist at once, in float32: a block has this many over B H T.
SCORES = 2**24
SMALLEST = 256  # slots in a block at least


class Form(NamedTuple):
  """How rows of a cache are scored and mixed; both results are float32."""

  score: Callable[[Any], jax.Array]  # rows -> [B, H, T, S], scaled
  mix: Callable[[jax.Array, Any], jax.Array]  # (p_bhts, rows) -> [B, H, T, V]


class _Running(NamedTuple):
  out_bhtv: jax.Array
  top_bht: jax.Array
  total_bht: jax.Array


def attend(form: Form, cache: Any, new: Any, span: Span) -> jax.Array:
  """softmax(scores) values over earlier slots and the new tokens [B, H, T, V].

  Args:
    form: scores and mixtures of any rows.
    cache: tree of [B, S, ...]; slots from `span.start` on may hold anything
      finite.
    new: tree of [B, T, ...], the rows of the new tokens.
    span: where they lie. Padding attends to itself alone, so that its softmax
      is finite, and nothing else attends to it.
  """
  running = _own(form, new, span)
  room = span.valid.shape[1]
  block = block_size(running.top_bht.size, room)
  if block >= room:
    slot_s = jnp.arange(room)
    visible_bs = span.valid & (slot_s < span.start)
    running = _fold(form, running, cache, visible_bs[:, None, None])
  else:
    running = _over_blocks(form, running, cache, span, block)
  return running.out_bhtv / running.total_bht[..., None]


def block_size(queries: int, room: int) -> int:
  """Slots in one block: a power of two, or all of `room`."""
  fitting = max(SMALLEST, SCORES // queries)
  return room if fitting >= room else 1 << (fitting.bit_length() - 1)


def _own(form, new, span):
  """The new tokens over each other."""
  time = jax.tree.leaves(new)[0].shape[1]
  valid_bt = jax.lax.dynamic_slice_in_dim(span.valid, span.start, time, 1)
  at_t = jnp.arange(time)
  causal_tt = at_t[None] <= at_t[:, None]
  visible_btt = causal_tt & valid_bt[:, None] | jnp.eye(time, dtype=bool)
  score_bhtt = jnp.where(visible_btt[:, None], form.score(new), -jnp.inf)
  top_bht = jnp.max(score_bhtt, axis=-1)
  p_bhtt = jnp.exp(score_bhtt - top_bht[..., None])
  return _Running(form.mix(p_bhtt, new), top_bht, jnp.sum(p_bhtt, axis=-1))


def _fold(form, running, rows, visible_b11s):
  """`running` with more rows, which some see and nobody has to."""
  score_bhts = jnp.where(visible_b11s, form.score(rows), -jnp.inf)
  # Own tokens came first, so that no maximum is -inf.
  top_bht = jnp.maximum(running.top_bht, jnp.max(score_bhts, axis=-1))
  p_bhts = jnp.exp(score_bhts - top_bht[..., None])
  shrink_bht = jnp.exp(running.top_bht - top_bht)
  return _Running(
    running.out_bhtv * shrink_bht[..., None] + form.mix(p_bhts, rows),
    top_bht,
    running.total_bht * shrink_bht + jnp.sum(p_bhts, axis=-1),
  )


def _over_blocks(form, running, cache, span, block):
  """Folds the filled blocks of the cache, as many as there are."""
  room = span.valid.shape[1]

  def step(n, running):
    # The last block begins earlier where the room is no multiple of it.
    first = jnp.minimum(n * block, room - block)
    cut = lambda x: jax.lax.dynamic_slice_in_dim(x, first, block, 1)
    slot_s = first + jnp.arange(block)
    once_s = (slot_s >= n * block) & (slot_s < span.start)
    visible_bs = cut(span.valid) & once_s
    rows = jax.tree.map(cut, cache)
    return _fold(form, running, rows, visible_bs[:, None, None])

  return jax.lax.fori_loop(0, -(-span.start // block), step, running)
