"""Drawing tokens from logits.

Legend: b batch, a vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct


class Drawing(struct.PyTreeNode):
  """How tokens are drawn; see `choose`. None switches a restriction off."""

  temperature: jax.Array | float = 1.0
  top_p: jax.Array | float | None = None
  top_k: jax.Array | int | None = None

  def check(self):
    """Raises ValueError for a value out of range."""
    if self.temperature < 0:
      raise ValueError(
        f'temperature={self.temperature}; it must be 0 (greedy) or larger.'
      )
    if self.top_p is not None and not 0 < self.top_p <= 1:
      raise ValueError(
        f'top_p={self.top_p} is outside (0, 1]; None keeps all tokens.'
      )
    if self.top_k is not None and self.top_k < 1:
      raise ValueError(
        f'top_k={self.top_k} must be at least 1; None keeps all tokens.'
      )


def choose(logits_ba: jax.Array, key: jax.Array, drawing: Drawing) -> jax.Array:
  """Tokens [B] drawn from softmax(logits / temperature).

  Args:
    logits_ba: [B, a] float32.
    key: a PRNG key, or one for each row, [B]: what a row draws then depends on
      nothing but its key and its logits.
    drawing: `temperature` 0 takes the largest logit. `top_k` draws only from so
      many most probable tokens, `top_p` only from the fewest of them that have
      at least this probability together; tokens as probable as the last one
      stay too. Both together keep what both keep.
  """
  positive = drawing.temperature > 0
  scaled_ba = logits_ba / jnp.where(positive, drawing.temperature, 1.0)
  if drawing.top_p is not None or drawing.top_k is not None:
    scaled_ba = _restricted(scaled_ba, drawing)
  draw = jax.random.categorical
  if key.ndim:
    drawn_b = jax.vmap(draw)(key, scaled_ba)
  else:
    drawn_b = draw(key, scaled_ba, axis=-1)
  chosen_b = jnp.where(positive, drawn_b, jnp.argmax(logits_ba, axis=-1))
  return chosen_b.astype(jnp.int32)


def _restricted(scaled_ba, drawing: Drawing):
  """-inf where a token is less probable than the last one that is kept."""
  p_ba = jax.nn.softmax(scaled_ba, axis=-1)
  sorted_ba = jnp.sort(p_ba, axis=-1, descending=True)
  kept_ba = jnp.ones_like(sorted_ba, bool)
  if drawing.top_p is not None:
    before_ba = jnp.cumsum(sorted_ba, axis=-1) - sorted_ba
    kept_ba &= before_ba < drawing.top_p
  if drawing.top_k is not None:
    kept_ba &= jnp.arange(sorted_ba.shape[-1]) < drawing.top_k
  least_b1 = jnp.min(
    jnp.where(kept_ba, sorted_ba, jnp.inf), axis=-1, keepdims=True
  )
  return jnp.where(p_ba >= least_b1, scaled_ba, -jnp.inf)
