"""Bounds on gradients and on attention logits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def clip_by_global_norm(
  grads: Any, max_norm: float | None
) -> tuple[Any, jax.Array]:
  """`grads` scaled down to a joint norm of at most `max_norm`, and the norm.

  Args:
    grads: a tree of gradients.
    max_norm: the bound; None leaves the gradients alone.

  Returns:
    The gradients and their float32 norm before clipping, for the metrics. It is
    not finite when any gradient is not.
  """
  norm = optax.tree.norm(grads)
  if max_norm is None:
    return grads, norm
  # Division by the norm only where it exceeds the bound: zero gradients stay.
  scale = jnp.where(norm > max_norm, max_norm / norm, 1.0)
  return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads), norm


def clip_query_key(
  mla: dict[str, Any],
  max_logits_h: jax.Array,
  *,
  nope_dim: int,
  threshold: float = 100.0,
) -> dict[str, Any]:
  """MLA parameters whose largest attention logits are at most `threshold`.

    gamma_h = min(1, threshold / S_h)
    query_up: sqrt(gamma_h) on the key-specific part, gamma_h on the shared part
    kv_up: sqrt(gamma_h) on the key part; values are left alone

  The key that all heads share is not scaled, hence the full gamma on the query
  that meets it (QK-Clip, Kimi K2, arXiv 2507.20534, section 2.1).

  Args:
    mla: with `query_up` [..., r, h, n + e] and `kv_up` [..., r, h, n + v].
    max_logits_h: [..., h], the largest scaled logit of the step.
    nope_dim: n, the width of the part of query and key that is not shared.
    threshold: tau of the paper; K3's is not published.
  """
  gamma_h = threshold / jnp.maximum(max_logits_h, threshold)
  root_h = jnp.sqrt(gamma_h)

  def scale(w, first_h, rest_h):
    is_first = jnp.arange(w.shape[-1]) < nope_dim
    factor = jnp.where(is_first, first_h[..., None], rest_h[..., None])
    return w * factor[..., None, :, :].astype(w.dtype)

  return {
    **mla,
    'query_up': scale(mla['query_up'], root_h, gamma_h),
    'kv_up': scale(mla['kv_up'], root_h, jnp.ones_like(gamma_h)),
  }
