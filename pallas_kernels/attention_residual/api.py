"""Attention residuals over depth: the mix, and its form in two phases.

Suffixes leave out the free token axes `...`: m residual sources, l sublayers
that read the same sources, d model width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.attention_residual import (
  mosaic_gpu,
  mosaic_tpu,
  reference,
  xla,
)

_KERNELS = {'mosaic_tpu': mosaic_tpu, 'mosaic_gpu': mosaic_gpu}


def mix(
  sources,
  query,
  gain,
  *,
  partial=None,
  mask=None,
  norm_gain=None,
  eps: float = 1e-5,
  return_weights: bool = False,
  implementation: str | None = None,
):
  """The softmax mixture over depth of each token's residual sources.

      kappa_j = v_j / sqrt(mean(v_j^2) + eps)
      s_j     = sum_c query_c gain_c kappa_jc       (no 1/sqrt(D), no bias)
      out     = sum_j softmax(s)_j v_j              (raw values, not kappa)

  Attention Residuals (arXiv 2603.15031), equations 2 to 4 and, for the block
  form that K3 uses, 5 and 6. A zero query gives the plain mean.

  Args:
    sources: [M, ..., D] finished blocks, any float dtype.
    query, gain: [D], the pseudo-query and the gain of the keys, float32.
    partial: [..., D] or None, the running sum of the open block. It is one more
      source, the last one, kept apart so that no [M+1, ..., D] copy is made.
    mask: bool [M], or [M+1] with `partial`, or None; may be traced. A False
      source has weight and gradient exactly zero whatever it holds, NaN too.
      When every source is False the output is zero.
    norm_gain: [D] or None. The gain of an RMSNorm of the mixture, which is
      then returned normalized. As in the released code the mixture and its
      normalized value are rounded to the dtype of `sources` on the way.
    eps: added to the mean squares under the roots.
    return_weights: also return the weights.
    implementation: 'mosaic_tpu', 'mosaic_gpu', 'xla', 'reference', or None for
      the best on this device.

  Returns:
    out [..., D] in the dtype of `sources`; scores, softmax and sums are
    float32. With `return_weights`, (out, weights [M or M+1, ...] float32).

  Raises:
    ValueError: shapes do not fit together.
    TypeError: `mask` is not boolean.
    NotImplementedError: `implementation` does not run on this device.
  """
  _check(sources, query, gain, partial, mask)
  if norm_gain is not None and norm_gain.shape != query.shape:
    raise ValueError(
      f'attention_residual: norm_gain {norm_gain.shape} must have the shape of '
      f'query, {query.shape}.'
    )
  candidates = [
    (name, kernel.refusal(sources, query)) for name, kernel in _KERNELS.items()
  ]
  candidates += [('xla', None), ('reference', None)]
  name = dispatch.choose('attention_residual', implementation, candidates)
  if name in _KERNELS:
    arrays = sources, partial, query, gain, norm_gain
    out, weights = _KERNELS[name].mix(arrays, mask, eps)
  elif name == 'xla':
    out, weights = xla.mix((sources, partial, query, gain), mask, eps)
  else:
    out, weights = reference.mix(
      sources, query, gain, partial_d=partial, mask_m=mask, eps=eps
    )
  if name not in _KERNELS and norm_gain is not None:
    out = xla.normalized(out, norm_gain, eps)
  return (out, weights) if return_weights else out


def phase_one(sources, queries, gains, *, mask=None, eps: float = 1e-5):
  """Unfinished mixtures of L queries over the same finished blocks.

      m = max_j s_j;  l = sum_j exp(s_j - m);  o = sum_j exp(s_j - m) v_j

  Done once a block for all its sublayers, then completed by `merge` with the
  running partial sum (Attention Residuals, arXiv 2603.15031, algorithm 1).

  Args:
    sources: [M, ..., D].
    queries, gains: [L, D] float32, those of the L sublayers.
    mask: bool [M] or None, as in `mix`.
    eps: as in `mix`.

  Returns:
    (o [L, ..., D], m [L, ...], l [L, ...]), float32. Without any allowed
    source o and l are zero and m is -inf, which `merge` accepts.
  """
  if queries.ndim != 2 or queries.shape != gains.shape:
    raise ValueError(
      f'attention_residual: queries {queries.shape} and gains {gains.shape} '
      'must both be [L, D].'
    )
  _check(sources, queries[0], gains[0], None, mask)
  allowed_m = None
  if mask is not None:
    allowed_m = mask.reshape(mask.shape + (1,) * (sources.ndim - 2))
    sources = jnp.where(allowed_m[..., None], sources, 0)

  x_md = xla.widened(sources)
  w_ld = xla.widened(queries) * xla.widened(gains)
  w_ld = w_ld.reshape(len(w_ld), *(1,) * (sources.ndim - 2), -1)
  rstd_m = jax.lax.rsqrt(jnp.mean(jnp.square(x_md), axis=-1) + eps)
  # All queries at once: the sources are read once and nothing loops.
  logits_ml = rstd_m[:, None] * jnp.sum(x_md[:, None] * w_ld, axis=-1)
  if allowed_m is not None:
    logits_ml = jnp.where(allowed_m[:, None], logits_ml, -jnp.inf)
  top_l = jnp.max(logits_ml, axis=0)
  terms_ml = jnp.exp(logits_ml - jnp.where(top_l == -jnp.inf, 0, top_l))
  out_ld = xla.weighted_sum((x_md[:, None], None), terms_ml)
  return out_ld, top_l, jnp.sum(terms_ml, axis=0)


def merge(phase, partial, query, gain, *, eps: float = 1e-5):
  """One sublayer's mixture from its part of `phase_one` and the partial sum.

      s = the partial's score;  t = max(m, s)
      out = (e^(m-t) o + e^(s-t) partial) / (e^(m-t) l + e^(s-t))

  Equal to `mix(sources, query, gain, partial=partial)` up to rounding.

  Args:
    phase: (o [..., D], m [...], l [...]), one sublayer's row of each.
    partial: [..., D] running sum of the open block, or None at its first
      sublayer, when the block has no sum yet.
    query, gain: [D] float32 of this sublayer.
    eps: as in `mix`.

  Returns:
    [..., D] in the dtype of `partial`, float32 when that is None.
  """
  o_d, top, total = phase
  if partial is None:
    return o_d / total[..., None]
  w_d = xla.widened(query) * xla.widened(gain)
  _, logit = xla.statistics(partial, w_d, eps)
  new_top = jnp.maximum(top, logit)
  old, new = jnp.exp(top - new_top), jnp.exp(logit - new_top)
  out_d = old[..., None] * o_d + new[..., None] * xla.widened(partial)
  return (out_d / (old * total + new)[..., None]).astype(partial.dtype)


def _check(sources, query, gain, partial, mask):
  if sources.ndim < 2 or sources.shape[0] < 1:
    raise ValueError(
      f'attention_residual: sources {sources.shape} must be [M, ..., D] with '
      'at least one source.'
    )
  width = sources.shape[-1]
  if query.shape != (width,) or gain.shape != (width,):
    raise ValueError(
      f'attention_residual: query {query.shape} and gain {gain.shape} must '
      f'both be [{width}], the last axis of sources {sources.shape}.'
    )
  if partial is not None and partial.shape != sources.shape[1:]:
    raise ValueError(
      f'attention_residual: partial {partial.shape} must have the shape of '
      f'one source, {sources.shape[1:]}.'
    )
  count = sources.shape[0] + (partial is not None)
  if mask is not None and mask.shape != (count,):
    raise ValueError(
      f'attention_residual: mask {mask.shape} must be [{count}], one entry '
      'for each source and for partial when there is one.'
    )
  if mask is not None and mask.dtype != jnp.bool_:
    raise TypeError(
      f'attention_residual: mask has dtype {mask.dtype}; give booleans.'
    )
