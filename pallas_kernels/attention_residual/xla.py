"""The depth mix in plain XLA with a hand-written derivative.

The backward pass keeps three float32 numbers for each token and source (the
reciprocal RMS, the logit) or token (the log-sum-exp) beside the inputs, and
recomputes the normalised keys. With w = query * gain and do the cotangent:

    p_j  = exp(s_j - lse)
    ds_j = p_j (<do, v_j> - sum_i p_i <do, v_i>)
    dv_j = p_j do + ds_j rstd_j (w - kappa_j s_j / D)
    dw   = sum over tokens and j of ds_j kappa_j

(Kimi K3 technical report, section 5.2.2; Attention Residuals, arXiv
2603.15031, equations 2 to 4). Every reduction is an elementwise product and a
float32 sum, so that no matrix unit rounds the operands, and XLA fuses each into
one read of the sources.

Suffixes leave out the free token axes `...`: m residual sources, d width.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Saved(NamedTuple):
  """What the backward pass keeps; `rstd` and `logits` are [M(+1), ...]."""

  inputs: tuple
  rstd: jax.Array
  logits: jax.Array
  lse: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def mix(arrays, mask_m, eps):
  """The mix and its weights.

  Args:
    arrays: (sources, partial or None, query, gain); see `api.mix`.
    mask_m: bool [M] or [M+1], one entry a source, or None.
    eps: added to the mean square of a key.
  """
  return _forward(arrays, mask_m, eps)[0]


def widened(x):
  """`x` in float32, or as it is when it is float64."""
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def statistics(x_d, w_d, eps):
  """(reciprocal RMS, logit) of every row of `x_d`, float32."""
  x_d = widened(x_d)
  rstd = jax.lax.rsqrt(jnp.mean(jnp.square(x_d), axis=-1) + eps)
  return rstd, rstd * jnp.sum(x_d * w_d, axis=-1)


def normalized(x_d, gain_d, eps):
  """RMSNorm of the mixture, its value rounded before the gain as released."""
  wide_d = widened(x_d)
  scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide_d), -1, keepdims=True) + eps)
  return (wide_d * scale).astype(x_d.dtype) * gain_d.astype(x_d.dtype)


def _select(parts, mask_m):
  """Sources and partial with masked rows replaced by zeros."""
  sources_md, partial_d = parts
  if mask_m is None:
    return parts
  count = sources_md.shape[0]
  wide_m = _over_tokens(mask_m, sources_md.ndim)
  sources_md = jnp.where(wide_m[:count], sources_md, 0)
  if partial_d is not None:
    partial_d = jnp.where(wide_m[count], partial_d, 0)
  return sources_md, partial_d


def _over_tokens(mask_m, ndim):
  return mask_m.reshape(mask_m.shape + (1,) * (ndim - 1))


def _stack(of_sources_m, of_partial):
  """Appends the partial's per-token scalars to those of the sources."""
  if of_partial is None:
    return of_sources_m
  return jnp.concatenate([of_sources_m, of_partial[None]])


def _weights(logits_m, mask_m):
  """Softmax over sources and its log-sum-exp; nothing allowed gives zeros."""
  if mask_m is not None:
    mask_m = _over_tokens(mask_m, logits_m.ndim)
    logits_m = jnp.where(mask_m, logits_m, -jnp.inf)
  top = jnp.max(logits_m, axis=0)
  top = jnp.where(top == -jnp.inf, 0, top)
  total = jnp.sum(jnp.exp(logits_m - top), axis=0)
  lse = top + jnp.log(jnp.where(total > 0, total, 1))
  return jnp.exp(logits_m - lse), lse


def _forward(arrays, mask_m, eps):
  sources_md, partial_d, query_d, gain_d = arrays
  x_md, y_d = _select((sources_md, partial_d), mask_m)
  w_d = widened(query_d) * widened(gain_d)
  rstd_m, logits_m = statistics(x_md, w_d, eps)
  if y_d is not None:
    rstd, logit = statistics(y_d, w_d, eps)
    rstd_m, logits_m = _stack(rstd_m, rstd), _stack(logits_m, logit)
  weights_m, lse = _weights(logits_m, mask_m)
  out_d = weighted_sum((x_md, y_d), weights_m).astype(sources_md.dtype)
  return (out_d, weights_m), Saved((arrays, mask_m), rstd_m, logits_m, lse)


def weighted_sum(parts, weights_m):
  """Sum of weight times raw value, float32, in source order."""
  x_md, y_d = parts
  rows = list(x_md) if y_d is None else [*x_md, y_d]
  # One fused loop over the few sources; a reduction over the leading axis
  # takes twice as long on a CPU.
  out_d = weights_m[0][..., None] * rows[0]
  for weight, row_d in zip(weights_m[1:], rows[1:]):
    out_d += weight[..., None] * row_d
  return out_d


def _backward(eps, saved, cotangents):
  (arrays, mask_m), rstd_m, logits_m, lse = saved
  sources_md, partial_d, query_d, gain_d = arrays
  do_d, dweights_m = cotangents
  do_d = widened(do_d)
  x_md, y_d = _select((sources_md, partial_d), mask_m)
  w_d = widened(query_d) * widened(gain_d)
  weights_m = jnp.exp(logits_m - lse)
  if mask_m is not None:
    allowed_m = _over_tokens(mask_m, logits_m.ndim)
    weights_m = jnp.where(allowed_m, weights_m, 0)
  dp_m = dweights_m + _stack(
    jax.lax.map(lambda x_d: jnp.sum(do_d * x_d, axis=-1), x_md),
    None if y_d is None else jnp.sum(do_d * y_d, axis=-1),
  )
  ds_m = weights_m * (dp_m - jnp.sum(weights_m * dp_m, axis=0))
  slope_m = ds_m * rstd_m  # the derivative by the product of w and v_j
  pull_m = slope_m * rstd_m * logits_m / sources_md.shape[-1]

  def through(at):
    """(cotangent of one source, its part of the cotangent of w)."""
    x_d, weight, slope, pull = at
    dx_d = weight[..., None] * do_d + slope[..., None] * w_d
    dx_d = (dx_d - pull[..., None] * x_d).astype(x_d.dtype)
    return dx_d, _sum_tokens(slope[..., None] * x_d)

  # One source at a time: the sources are the largest arrays here, and no
  # second one of their size is alive beside the result.
  count = sources_md.shape[0]
  of_sources = [scalar_m[:count] for scalar_m in (weights_m, slope_m, pull_m)]
  dsources_md, dw_md = jax.lax.map(through, (x_md, *of_sources))
  dw_d, dpartial_d = jnp.sum(dw_md, axis=0), None
  if y_d is not None:
    of_partial = [scalar_m[count] for scalar_m in (weights_m, slope_m, pull_m)]
    dpartial_d, dw = through((y_d, *of_partial))
    dw_d += dw
  dquery_d = (dw_d * gain_d).astype(query_d.dtype)
  dgain_d = (dw_d * query_d).astype(gain_d.dtype)
  return (dsources_md, dpartial_d, dquery_d, dgain_d), None


def _sum_tokens(x_d):
  return jnp.sum(x_d, axis=tuple(range(x_d.ndim - 1)))


mix.defvjp(_forward, _backward)
