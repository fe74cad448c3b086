"""Top-k routing with a selection bias, and the statistics that balance it."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.quantile_router import (
  mosaic_gpu,
  mosaic_tpu,
  reference,
  xla,
)
from pallas_kernels.quantile_router.statistics import Statistics

Cutoff = Literal['kplus1', 'midpoint']
Space = Literal['sigmoid', 'logit']

_IMPLEMENTATIONS = {
  'xla': xla.select_and_count,
  'reference': reference.select_and_count,
}


class Routing(NamedTuple):
  """What `route` returns; the leading axes are those of the logits.

  Attributes:
    indices: int32 [..., top_k], best expert first.
    weights: float32 [..., top_k], the only differentiable field.
    cutoff: float32 [...], the biased score an expert has to exceed.
    counts: int32 [E, num_bins] over all leading axes, or None.
    valid: bool [...], rows that were counted: not masked, all logits finite.
  """

  indices: jax.Array
  weights: jax.Array
  cutoff: jax.Array
  counts: jax.Array | None
  valid: jax.Array


def route(
  logits,
  bias,
  *,
  top_k: int,
  mask=None,
  statistics: Statistics | None = None,
  cutoff: Cutoff = 'kplus1',
  space: Space = 'sigmoid',
  weight_scale: float = 1.0,
  implementation: str | None = None,
) -> Routing:
  """The top_k experts of every token, their weights and the load statistics.

      s = sigmoid(logits)                  ('logit' space: s = logits)
      v_1 >= v_2 >= ...  sorted s + bias;  indices belong to v_1 .. v_top_k
      cutoff = v_{top_k + 1}               ('midpoint': mean with v_top_k)
      r_ij = cutoff_i - s_ij               the bias expert j would have needed
      counts[j] = histogram of r_.j over the counted tokens
      weights = p / (sum p + 1e-20) * weight_scale, p = sigmoid(logits)[indices]

  Equal biased scores go to the lower index. Weights never see the bias, and the
  gradient flows through the weights to the logits only. With top_k = 1 the
  weights are p * weight_scale: renormalised they would be constant and the
  router would get no gradient.

  A row with a non-finite logit is routed as if its logits were all zero: its
  indices stay in range, its weights are finite, its gradient is zero, and it
  is not counted. `valid` tells which rows those are. Masked rows are routed
  but not counted.

  Source: Kimi K3 technical report, section 2.3.3; the midpoint and the logit
  space are deviations from it.

  Args:
    logits: [..., E]; computed in float32, or in float64 when that is given.
    bias: float32 [E], added for the selection only.
    top_k: experts a token selects, at least 1 and below E.
    mask: bool [...], False for padding; None counts every row.
    statistics: what to count; None counts nothing.
    cutoff: 'kplus1' as published, or 'midpoint', which is equally optimal and
      has no point mass at the present bias.
    space: scores the bias is added to.
    weight_scale: factor on the weights.
    implementation: 'mosaic_tpu', 'mosaic_gpu', 'xla', 'reference', or None for
      the best on this device.

  Raises:
    ValueError: sizes do not fit, or an option is unknown.
    TypeError: `bias` is not float32.
    NotImplementedError: `implementation` does not run on this device.
  """
  _check(logits, bias, top_k, mask)
  _check_option('cutoff', cutoff, ('kplus1', 'midpoint'))
  _check_option('space', space, ('sigmoid', 'logit'))
  kernels = {'mosaic_tpu': mosaic_tpu, 'mosaic_gpu': mosaic_gpu}
  candidates = [
    (name, kernel.refusal(logits, top_k, statistics))
    for name, kernel in kernels.items()
  ]
  candidates += [('xla', None), ('reference', None)]
  name = dispatch.choose('quantile_router', implementation, candidates)
  batch, experts = logits.shape[:-1], logits.shape[-1]
  mask_t = jnp.ones(batch, bool) if mask is None else mask.astype(bool)
  mask_t = mask_t.reshape(-1)
  if name in kernels:
    run = kernels[name].route
  else:
    run = functools.partial(_plain, _IMPLEMENTATIONS[name])
  indices, chosen, level, counts, finite = run(
    logits.reshape(-1, experts),
    jax.lax.stop_gradient(bias),
    mask_t,
    top_k=top_k,
    cutoff=cutoff,
    space=space,
    statistics=jax.lax.stop_gradient(statistics),
  )
  slots = lambda x: x.reshape(*batch, top_k)
  weights = _weights(slots(chosen), weight_scale)
  valid = (finite & mask_t).reshape(batch)
  return Routing(slots(indices), weights, level.reshape(batch), counts, valid)


def _plain(select_and_count, logits, bias, mask_t, *, space, **options):
  """As `mosaic_tpu.route`, around a function of finite scores."""
  logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
  finite_t = jnp.all(jnp.isfinite(logits), axis=-1)
  logits = jnp.where(finite_t[:, None], logits, 0.0)
  scores = jax.lax.stop_gradient(logits)
  if space == 'sigmoid':
    scores = jax.nn.sigmoid(scores)
  indices, level, counts = select_and_count(
    scores, bias, finite_t & mask_t, **options
  )
  chosen = jnp.take_along_axis(logits, indices, axis=-1)
  return indices, chosen, level, counts, finite_t


def _weights(chosen, weight_scale):
  share = jax.nn.sigmoid(chosen)
  if chosen.shape[-1] > 1:
    share = _normalize(share)
  return share * weight_scale


@jax.custom_jvp
def _normalize(share):
  return share / (jnp.sum(share, axis=-1, keepdims=True) + 1e-20)


@_normalize.defjvp
def _normalize_jvp(primals, tangents):
  # The derived rule squares the denominator, which overflows to NaN when every
  # selected sigmoid underflows.
  (share,), (d_share,) = primals, tangents
  total = jnp.sum(share, axis=-1, keepdims=True) + 1e-20
  weights = share / total
  d_total = jnp.sum(d_share, axis=-1, keepdims=True)
  return weights, (d_share - weights * d_total) / total


def _check(logits, bias, top_k, mask):
  experts = logits.shape[-1]
  if bias.dtype != jnp.float32:
    raise TypeError(
      f'the router bias is {bias.dtype}; it must stay float32 (bfloat16 merges '
      'distinct biases and reroutes most tokens). Cast the parameters without '
      'the router state.'
    )
  if bias.shape != (experts,):
    raise ValueError(
      f'bias has shape {bias.shape}, logits have {experts} experts; give one '
      f'bias an expert, shape ({experts},).'
    )
  if not 0 < top_k < experts:
    raise ValueError(
      f'top_k={top_k} must be at least 1 and smaller than the number of '
      f'experts ({experts}): the cutoff is the (top_k+1)-th score.'
    )
  if mask is not None and mask.shape != logits.shape[:-1]:
    raise ValueError(
      f'mask has shape {mask.shape}; the tokens have {logits.shape[:-1]}.'
    )


def _check_option(name, given, allowed):
  if given not in allowed:
    raise ValueError(f'{name}={given!r}; use one of {allowed}.')
