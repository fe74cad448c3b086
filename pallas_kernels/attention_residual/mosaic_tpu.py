"""The depth mix and its derivative on TPUs, in Pallas Mosaic TPU.

Suffixes: m residual sources, t tokens, d width.

A grid step has the rows of a block of tokens of every source in VMEM and goes
over them twice, so that each is read from HBM once. A masked source asks for
the same block in every step, which is fetched once. Between the passes one
array of 128 float32 numbers a token is kept: reciprocal RMS, logits and weights
of the sources, each in its third of the lanes.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention_residual import mosaic_tpu_kernel as body
from pallas_kernels.attention_residual import xla
from pallas_kernels.attention_residual.mosaic_tpu_kernel import (
  LANES,
  ROWS,
  Plan,
)

_VMEM_LIMIT = 48 * 2**20
_WINDOW_BYTES = 20 * 2**20  # of all windows of a grid step, twice each
_MOST_TOKENS = 256  # of a grid step


def refusal(sources, query) -> str | None:
  """Why the kernels cannot run the arguments where a trace is for, or None."""
  if not pltpu.is_tpu_device():
    return 'the TPU kernels need a TPU'
  return unsupported(sources, query)


def unsupported(sources, query) -> str | None:
  """Why no TPU can run these arguments, or None."""
  width = sources.shape[-1]
  if sources.dtype not in (jnp.float32, jnp.bfloat16):
    return f'the TPU kernels take float32 and bfloat16, not {sources.dtype}'
  if query.dtype == jnp.float64:
    return 'the TPU kernels take a float32 query, not float64'
  if width == 0 or width % LANES:
    return f'the TPU kernels take multiples of {LANES} as width, not {width}'
  if sources.shape[0] >= body.MOST_SOURCES:
    return (
      f'the TPU kernels take up to {body.MOST_SOURCES - 1} sources, not '
      f'{sources.shape[0]}'
    )
  if math.prod(sources.shape[1:-1]) == 0:
    return 'the TPU kernels need a token'
  row = width * sources.dtype.itemsize
  if _block_tokens(ROWS, 2 * sources.shape[0] + 3, row) < ROWS:
    return (
      f'the TPU kernels cannot hold {ROWS} tokens of {sources.shape[0]} '
      f'sources of width {width} in VMEM'
    )
  return None


def _block_tokens(tokens: int, rows: int, row_bytes: int) -> int:
  """Tokens of a grid step: a power of two that VMEM holds `rows` rows for."""
  most = min(_WINDOW_BYTES // (2 * rows * row_bytes), _MOST_TOKENS)
  if most < ROWS:
    return 0
  block = 1 << (most.bit_length() - 1)
  while block > ROWS and block >= 2 * tokens:
    block //= 2
  return block


class _Call(NamedTuple):
  """Static settings of both passes."""

  eps: float
  interpret: object


def mix(arrays, mask_m, eps, interpret=False):
  """The mix and its weights.

  Args:
    arrays, mask_m, eps: as of `xla.mix`.
    interpret: run on any device: True, or `pltpu.InterpretParams`.
  """
  return _mix(arrays, mask_m, _Call(eps, interpret))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _mix(arrays, mask_m, call):
  return _forward(arrays, mask_m, call)[0]


def _flat(x, axes: int):
  """`x` with its token axes, those after the first `axes`, as one."""
  return x.reshape(*x.shape[:axes], -1, x.shape[-1])


class _Inputs(NamedTuple):
  """What both kernels read."""

  mask: jax.Array
  sources: jax.Array
  partial: jax.Array | None
  w: jax.Array


def _inputs(arrays, mask_m) -> _Inputs:
  sources, partial, query_d, gain_d = arrays
  count = sources.shape[0] + (partial is not None)
  live_m = jnp.ones(count, jnp.int32)
  if mask_m is not None:
    live_m = mask_m.astype(jnp.int32)
  if partial is not None:
    partial = _flat(partial, 0).astype(sources.dtype)
  w_d = xla.widened(query_d) * xla.widened(gain_d)
  return _Inputs(
    live_m, _flat(sources, 1), partial, w_d.astype(jnp.float32)[None]
  )


def plan_of(shape, dtype, partial: bool, *, masked, eps, extra) -> Plan:
  """The static choices.

  Args:
    shape: [M, T, D] of the finished sources.
    masked: whether there is a mask.
    extra: rows of a token that are read or written besides its sources.
  """
  finished, tokens, width = shape
  count = finished + partial
  row = width * jnp.dtype(dtype).itemsize
  block = _block_tokens(tokens, count + extra, row)
  return Plan(
    finished=finished,
    count=count,
    tokens=tokens,
    width=width,
    eps=eps,
    block=block,
    masked=masked,
  )


def _grid(plan: Plan) -> tuple[int, int]:
  """(cores that share a memory, steps of each)."""
  blocks = -(-plan.tokens // plan.block)
  cores = 2 if blocks % 2 == 0 else 1
  return cores, blocks // cores


def _specs(plan: Plan, steps: int):
  """(of each source, of a row of any other array, of a whole vector)."""

  def source(m):
    def index(c, n, live):
      return m, jnp.where(live[m] > 0, c * steps + n, 0), 0

    return pl.BlockSpec((None, plan.block, plan.width), index)

  def last(c, n, live):
    return jnp.where(live[plan.finished] > 0, c * steps + n, 0), 0

  sources = [source(m) for m in range(plan.finished)]
  if plan.count > plan.finished:
    sources.append(pl.BlockSpec((plan.block, plan.width), last))
  own = lambda width: pl.BlockSpec(
    (plan.block, width), lambda c, n, live: (c * steps + n, 0)
  )
  whole = pl.BlockSpec((1, plan.width), lambda c, n, live: (0, 0))
  return sources, own, whole


def _launch(name: str, kernel, plan: Plan, given, specs, interpret):
  """Results of a kernel over the grid of `plan`.

  Args:
    given: operands; the first is the mask.
    specs: (of the operands but the mask, of the results, their shapes).
  """
  in_specs, out_specs, out_shape = specs
  vary = jax.typeof(given[1]).manual_axis_type
  out_shape = [
    jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=vary)
    for x in out_shape
  ]
  return pl.pallas_call(
    functools.partial(kernel, plan),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=_grid(plan),
      in_specs=in_specs,
      out_specs=out_specs,
    ),
    out_shape=out_shape,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary'),
      vmem_limit_bytes=_VMEM_LIMIT,
    ),
    interpret=interpret,
    name=name,
  )(*given)


def _rows_of(given: _Inputs) -> list[jax.Array]:
  """The sources' operand once for each source, then the partial."""
  rows = [given.sources] * given.sources.shape[0]
  return rows if given.partial is None else [*rows, given.partial]


def _forward(arrays, mask_m, call):
  sources, partial = arrays[:2]
  given = _inputs(arrays, mask_m)
  plan = plan_of(
    given.sources.shape,
    sources.dtype,
    partial is not None,
    masked=mask_m is not None,
    eps=call.eps,
    extra=1,
  )
  of_sources, own, whole = _specs(plan, _grid(plan)[1])
  shape = jax.ShapeDtypeStruct
  out, stats = _launch(
    'depth_mix',
    body.forward,
    plan,
    (given.mask, *_rows_of(given), given.w),
    (
      [*of_sources, whole],
      [own(plan.width), own(LANES)],
      [
        shape((plan.tokens, plan.width), sources.dtype),
        shape((plan.tokens, LANES), jnp.float32),
      ],
    ),
    call.interpret,
  )
  first = body.WEIGHTS * body.MOST_SOURCES
  weights_mt = stats[:, first : first + plan.count].T
  weights = weights_mt.reshape(plan.count, *sources.shape[1:-1])
  return (out.reshape(sources.shape[1:]), weights), (arrays, mask_m, stats)


def _backward(call, saved, cotangents):
  arrays, mask_m, stats = saved
  sources, partial, query_d, gain_d = arrays
  do, d_weights = cotangents
  given = _inputs(arrays, mask_m)
  plan = plan_of(
    given.sources.shape,
    sources.dtype,
    partial is not None,
    masked=mask_m is not None,
    eps=call.eps,
    extra=1 + given.sources.shape[0] + (partial is not None),
  )
  d_rows_tm = d_weights.reshape(plan.count, -1).T.astype(jnp.float32)
  d_rows = jnp.pad(d_rows_tm, ((0, 0), (0, LANES - plan.count)))
  cores, steps = _grid(plan)
  of_sources, own, whole = _specs(plan, steps)
  d_sources_spec = pl.BlockSpec(
    (plan.finished, plan.block, plan.width),
    lambda c, n, live: (0, c * steps + n, 0),
  )
  shape = jax.ShapeDtypeStruct
  out_specs = [
    pl.BlockSpec(
      (None, body.SUBLANES, plan.width), lambda c, n, live: (c, 0, 0)
    ),
    d_sources_spec,
  ]
  out_shape = [
    shape((cores, body.SUBLANES, plan.width), jnp.float32),
    shape(given.sources.shape, sources.dtype),
  ]
  if partial is not None:
    out_specs.append(own(plan.width))
    out_shape.append(shape(given.partial.shape, sources.dtype))
  d_w, d_sources, *d_partial = _launch(
    'depth_mix_gradient',
    body.backward,
    plan,
    (
      given.mask,
      *_rows_of(given),
      given.w,
      _flat(do, 0).astype(sources.dtype),
      stats,
      d_rows,
    ),
    (
      [*of_sources, whole, own(plan.width), own(LANES), own(LANES)],
      out_specs,
      out_shape,
    ),
    call.interpret,
  )
  if partial is not None:
    d_partial = d_partial[0].reshape(partial.shape).astype(partial.dtype)
  dw_d = jnp.sum(d_w, axis=(0, 1))
  d_query = (dw_d * gain_d).astype(query_d.dtype)
  d_gain = (dw_d * query_d).astype(gain_d.dtype)
  d_sources = d_sources.reshape(sources.shape)
  return (
    d_sources,
    d_partial if partial is not None else None,
    d_query,
    d_gain,
  ), None


_mix.defvjp(_forward, _backward)
