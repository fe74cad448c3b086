"""Routing and its statistics on Hopper GPUs, in Pallas Mosaic GPU.

Suffixes: t tokens, e experts, j slots, i edges, n bins.

One kernel selects (`mosaic_gpu_select`), one fills the histograms
(`mosaic_gpu_count`). Scores are computed in the kernels, bit for bit as XLA
computes them on this device, so that every index, cutoff and count equals that
of the plain path. Weights are a function of the chosen logits.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.quantile_router import mosaic_gpu_count as counting
from pallas_kernels.quantile_router import mosaic_gpu_select as selection

_HOPPER = ('H100', 'H200', 'H800', 'H20')
_MOST_EXPERTS = 2048
_MOST_SELECTED = selection.LANES - 1
_MOST_EDGES = 256


def refusal(logits, top_k: int, statistics) -> str | None:
  """Why the kernels cannot run the arguments on this device, or None."""
  kind = dispatch.device_kind()
  if kind == 'gpu':
    kind = jax.devices()[0].device_kind
  if not any(name in kind for name in _HOPPER):
    return f'the Hopper kernels need an H100 or H200, this is {kind}'
  return unsupported(logits, top_k, statistics)


def unsupported(logits, top_k: int, statistics) -> str | None:
  """Why no Hopper GPU can run these arguments, or None."""
  experts, tokens = logits.shape[-1], logits.size // logits.shape[-1]
  if logits.dtype not in (jnp.float32, jnp.bfloat16):
    return f'the Hopper kernels take float32 and bfloat16, not {logits.dtype}'
  if experts > _MOST_EXPERTS or top_k > _MOST_SELECTED:
    return (
      f'the Hopper kernels take up to {_MOST_EXPERTS} experts and '
      f'top_k={_MOST_SELECTED}, not top_k={top_k} of {experts}'
    )
  if not 0 < tokens * top_k < 2**31:
    return f'the Hopper kernels take 1 to {2**31 // top_k} tokens, not {tokens}'
  if statistics is None:
    return None
  bins, estimator = statistics.num_bins, statistics.estimator
  plan = counting.Plan(tokens, experts, bins, estimator, '', 'float32')
  edges = bins - 1 if estimator == 'log_edges' else 0
  if edges > _MOST_EDGES or not plan.groups:
    return f'the Hopper kernels cannot hold {bins} bins of {estimator}'
  return None


def route(logits, bias_e, mask_t, *, statistics, **options):
  """Selection and counts of [T, E] logits; see `api.route`.

  Args:
    logits: [T, E] float32 or bfloat16, possibly not finite.
    bias_e: float32 [E].
    mask_t: bool [T].
    statistics: `Statistics` or None.
    **options: top_k, cutoff, space.

  Returns:
    (indices int32 [T, top_k], chosen float32 [T, top_k], cutoff [T], counts
    int32 [E, bins] or None, finite bool [T]). Chosen logits are zero in rows
    that are not finite; they alone carry a gradient.
  """
  return _route(tuple(options.items()), logits, bias_e, mask_t, statistics)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _route(options, logits, bias_e, mask_t, statistics):
  tokens, experts = logits.shape
  dtype = str(logits.dtype)
  plan = selection.Plan(tokens, experts, dtype=dtype, **dict(options))
  found = selection.select(logits, bias_e, mask_t.astype(jnp.int32), plan)
  counts_en = None
  if statistics is not None:
    counted = counting.Plan(
      tokens,
      experts,
      statistics.num_bins,
      statistics.estimator,
      plan.space,
      dtype,
    )
    counts_en = counting.count(
      logits, found['bound'], statistics, bias_e, counted
    )
  results = (
    found['indices'],
    found['chosen'],
    found['cutoff'],
    counts_en,
    found['finite'] > 0,
  )
  return jax.tree.map(functools.partial(_vary_like, logits), results)


def _vary_like(given, x):
  """x marked as different on every device where `given` is.

  Kernels lose that mark, which `shard_map` checks.
  """
  varying = lambda y: jax.typeof(y).manual_axis_type.varying
  missing = tuple(sorted(varying(given) - varying(x)))
  return jax.lax.pcast(x, missing, to='varying') if missing else x


def _route_forward(options, logits, bias_e, mask_t, statistics):
  results = _route(options, logits, bias_e, mask_t, statistics)
  # An empty array carries the shape and dtype of the logits.
  like = jnp.zeros((0, logits.shape[1]), logits.dtype)
  return results, (results[0], results[4], like)


def _route_backward(options, residuals, cotangents):
  del options
  indices_tj, finite_t, like = residuals
  d_chosen_tj = jnp.where(finite_t[:, None], cotangents[1], 0.0)
  rows = jnp.arange(indices_tj.shape[0])[:, None]
  zeros = jnp.zeros((indices_tj.shape[0], like.shape[1]), like.dtype)
  zeros = _vary_like(d_chosen_tj, zeros)
  d_logits = zeros.at[rows, indices_tj].set(
    d_chosen_tj.astype(like.dtype),
    unique_indices=True,
    mode='promise_in_bounds',
  )
  return d_logits, None, None, None


_route.defvjp(_route_forward, _route_backward)
