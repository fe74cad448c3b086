"""Routing and its statistics in one pass over the logits, for TPUs.

Suffixes: t tokens, e experts, j slots, i edges, n bins.

The kernel reads the logits once and writes indices, the chosen logits, cutoffs
and counts, all with tokens on the lanes, so that no array of top_k columns is
padded to a register in HBM. Weights are a function of the chosen logits.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantile_router import mosaic_tpu_kernel as body
from pallas_kernels.quantile_router import statistics as stat
from pallas_kernels.quantile_router.mosaic_tpu_kernel import LANES, Plan

_VMEM_LIMIT = 48 * 2**20
# Tokens of a grid step; a byte of a count holds block / 8 of them.
_BLOCK = 512
_MOST_EXPERTS = 2048
_MOST_BINS = {'log_edges': 129, 'uniform': body.DIGIT**2}


def refusal(logits, top_k: int, statistics) -> str | None:
  """Why the kernel cannot run the arguments where a trace is for, or None."""
  if not pltpu.is_tpu_device():
    return 'the TPU kernel needs a TPU'
  return unsupported(logits, top_k, statistics)


def unsupported(logits, top_k: int, statistics) -> str | None:
  """Why no TPU can run these arguments, or None."""
  experts = logits.shape[-1]
  planes = -(-experts // LANES)
  if logits.dtype not in (jnp.float32, jnp.bfloat16):
    return f'the TPU kernel takes float32 and bfloat16, not {logits.dtype}'
  if experts > _MOST_EXPERTS or planes * (top_k + 1) > LANES:
    return (
      f'the TPU kernel takes up to {_MOST_EXPERTS} experts with (top_k + 1) * '
      f'ceil(experts / {LANES}) at most {LANES}, not top_k={top_k} of {experts}'
    )
  if statistics is not None:
    most = _MOST_BINS[statistics.estimator]
    if statistics.num_bins > most:
      return (
        f'the TPU kernel counts up to {most} bins of {statistics.estimator}, '
        f'not {statistics.num_bins}'
      )
  return None


def route(logits, bias_e, mask_t, *, statistics, interpret=False, **options):
  """Selection and counts of [T, E] logits; see `api.route`.

  Args:
    logits: [T, E] float32 or bfloat16, possibly not finite.
    bias_e: float32 [E].
    mask_t: bool [T].
    statistics: `Statistics` or None.
    interpret: run on any device: True, or `pltpu.InterpretParams`.
    **options: top_k, cutoff, space.

  Returns:
    (indices int32 [T, top_k], chosen float32 [T, top_k], cutoff [T], counts
    int32 [E, bins] or None, finite bool [T]). Chosen logits are zero in rows
    that are not finite; they alone carry a gradient.
  """
  plan = plan_of(logits, statistics, **options)._replace(unroll=not interpret)
  return _route((plan, interpret), logits, bias_e, mask_t, statistics)


def plan_of(logits, statistics, *, top_k, cutoff, space) -> Plan:
  """The static choices for these shapes."""
  tokens, experts = logits.shape
  block = min(_BLOCK, -(-tokens // body.TILE) * body.TILE)
  plan = Plan(experts, top_k, cutoff, space, block, None)
  if statistics is None:
    return plan
  bins = statistics.num_bins
  edges = bins - 1 if statistics.estimator == 'log_edges' else 0
  return plan._replace(count=statistics.estimator, edges=edges, num_bins=bins)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _route(call, logits, bias_e, mask_t, statistics):
  plan, interpret = call
  tokens = logits.shape[0]
  operands = _operands(logits, bias_e, mask_t, statistics, plan)
  indices_jt, chosen_jt, rows, counts = _launch(
    operands, plan, tokens, interpret
  )
  counts_en = None
  if plan.count == 'log_edges':
    counts_en = _between(counts, jnp.sum(mask_t & (rows[1, :tokens] > 0)), plan)
  elif plan.count == 'uniform':
    counts_en = _by_expert(counts, plan)
  slots = lambda x_jt: x_jt[: plan.top_k, :tokens].T
  return (
    slots(indices_jt),
    slots(chosen_jt),
    rows[0, :tokens],
    counts_en,
    rows[1, :tokens] > 0,
  )


def _route_forward(call, logits, bias_e, mask_t, statistics):
  results = _route(call, logits, bias_e, mask_t, statistics)
  return results, (results[0], results[4], jnp.zeros((), logits.dtype))


def _route_backward(call, residuals, cotangents):
  indices_tj, finite_t, like = residuals
  d_chosen_tj = jnp.where(finite_t[:, None], cotangents[1], 0.0)
  experts = jnp.arange(call[0].experts)
  # Dense compares, one fusion: a scatter into the lanes would be serial here.
  own_tje = indices_tj[:, :, None] == experts
  d_logits = jnp.sum(jnp.where(own_tje, d_chosen_tj[:, :, None], 0.0), 1)
  return d_logits.astype(like.dtype), None, None, None


_route.defvjp(_route_forward, _route_backward)


def _operands(logits, bias_e, mask_t, statistics, plan: Plan) -> body.Inputs:
  """The kernel's layout: whole registers of experts in the small arrays."""
  wide = lambda x: jnp.pad(x, ((0, 0), (0, plan.width - plan.experts)))
  edges, scale = jnp.zeros((1, plan.width), jnp.float32), jnp.zeros(2)
  if plan.count == 'log_edges':
    edges_ei = stat.log_edges(
      bias_e, statistics.lo, statistics.hi, statistics.num_bins
    )
    more = (1 << plan.levels) - plan.edges
    inner_ei = jnp.pad(
      edges_ei[:, :-1], ((0, 0), (0, more)), constant_values=jnp.inf
    )
    edges_ei = jnp.concatenate([inner_ei, edges_ei[:, -1:]], 1)
    edges = wide(edges_ei.T[jnp.asarray(body.table_rows(plan))])
  elif plan.count == 'uniform':
    lo, hi = statistics.lo, statistics.hi
    scale = jnp.stack([lo, statistics.num_bins / (hi - lo)])
  if logits.shape[0] < plan.block:
    pad = plan.block - logits.shape[0]
    logits = jnp.pad(logits, ((0, pad), (0, 0)))
    mask_t = jnp.pad(mask_t, (0, pad))
  mask = mask_t.astype(jnp.float32)[None]
  return body.Inputs(logits, wide(bias_e[None]), mask, edges, scale)


def _launch(operands: body.Inputs, plan: Plan, tokens: int, interpret):
  padded = operands.logits.shape[0]
  blocks = -(-padded // plan.block)
  # Chips with two cores that share a memory give each one half.
  cores = 2 if blocks % 2 == 0 else 1
  steps = blocks // cores
  across = lambda rows: pl.BlockSpec(
    (rows, plan.block), lambda c, n: (0, c * steps + n)
  )
  whole = lambda x: pl.BlockSpec(x.shape, lambda c, n: (0, 0))
  counts = body.counts_shape(plan)
  vary = jax.typeof(operands.logits).manual_axis_type
  shape = functools.partial(jax.ShapeDtypeStruct, manual_axis_type=vary)
  tile = pltpu.VMEM((body.TILE, plan.width), jnp.float32)
  return pl.pallas_call(
    functools.partial(body.kernel, plan=plan, tokens=tokens),
    grid=(cores, steps),
    in_specs=[
      pl.BlockSpec((plan.block, plan.width), lambda c, n: (c * steps + n, 0)),
      whole(operands.bias),
      across(1),
      whole(operands.edges),
      pl.BlockSpec(memory_space=pltpu.SMEM),
    ],
    out_specs=[
      across(plan.slots),
      across(plan.slots),
      across(body.SUBLANES),
      pl.BlockSpec((1, *counts), lambda c, n: (c, 0, 0, 0)),
    ],
    out_shape=[
      shape((plan.slots, padded), jnp.int32),
      shape((plan.slots, padded), jnp.float32),
      shape((body.SUBLANES, padded), jnp.float32),
      shape((cores, *counts), jnp.int32),
    ],
    scratch_shapes=[
      tile,
      tile,
      tile,
      pltpu.VMEM((body.TILE, LANES), jnp.float32),
      pltpu.VMEM(*body.scratch_shape(plan)),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary'),
      vmem_limit_bytes=_VMEM_LIMIT,
    ),
    interpret=interpret,
    name='quantile_router',
  )(*operands)


def _between(counts, total, plan: Plan) -> jax.Array:
  """Counts [E, bins]: the bin before the last edge also has what is beyond.

  Tokens that do not count are there as well; the last bin is what is left of
  those that do.
  """
  counts_ie = jnp.sum(counts, (0, 2))[:, : plan.experts]
  counts_ie = counts_ie.at[-2].add(-counts_ie[-1])
  inside_e = jnp.sum(counts_ie[:-1], 0)
  return counts_ie.at[-1].set(total.astype(jnp.int32) - inside_e).T


def _by_expert(counts, plan: Plan) -> jax.Array:
  """Counts [E, bins] from the digits of `SIDE` experts side by side."""
  shape = (-1, body.DIGIT, body.SIDE, body.DIGIT)
  digits = jnp.swapaxes(jnp.sum(counts, 0).reshape(shape), 1, 2)
  return digits.reshape(plan.width, -1)[: plan.experts, : plan.num_bins]
