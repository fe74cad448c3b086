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
    arrays: (sources, partial or None, query, gain, norm_gain or None).
    mask_m, eps: as of `xla.mix`.
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
  vectors: list[jax.Array]  # w, and norm_gain as XLA rounds it; [1, D]


def _inputs(arrays, mask_m) -> _Inputs:
  sources, partial, query_d, gain_d, norm_gain_d = arrays
  count = sources.shape[0] + (partial is not None)
  live_m = jnp.ones(count, jnp.int32)
  if mask_m is not None:
    live_m = mask_m.astype(jnp.int32)
  if partial is not None:
    partial = _flat(partial, 0).astype(sources.dtype)
  w_d = xla.widened(query_d) * xla.widened(gain_d)
  vectors = [w_d.astype(jnp.float32)[None]]
  if norm_gain_d is not None:
    vectors.append(norm_gain_d.astype(sources.dtype).astype(jnp.float32)[None])
  return _Inputs(live_m, _flat(sources, 1), partial, vectors)


def plan_of(shape, dtype, partial: bool, *, extra: int) -> Plan:
  """The static choices.

  Args:
    shape: [M, T, D] of the finished sources.
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
    eps=0.0,
    block=block,
    masked=False,
    normalized=False,
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


def _launch(name: str, kernel, plan: Plan, given, specs, interpret, scratch=()):
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
      scratch_shapes=scratch,
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


def _plan(arrays, mask_m, call, extra: int) -> Plan:
  """The static choices; `extra` as for `plan_of`."""
  sources, partial, *_, norm_gain = arrays
  flat = sources.shape[0], math.prod(sources.shape[1:-1]), sources.shape[-1]
  plan = plan_of(flat, sources.dtype, partial is not None, extra=extra)
  return plan._replace(
    eps=call.eps,
    masked=mask_m is not None,
    normalized=norm_gain is not None,
  )


def _forward(arrays, mask_m, call):
  sources = arrays[0]
  given = _inputs(arrays, mask_m)
  plan = _plan(arrays, mask_m, call, extra=1)
  of_sources, own, whole = _specs(plan, _grid(plan)[1])
  shape = jax.ShapeDtypeStruct
  out, stats = _launch(
    'depth_mix',
    body.forward,
    plan,
    (given.mask, *_rows_of(given), *given.vectors),
    (
      [*of_sources, *[whole] * len(given.vectors)],
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


def _gradient_results(plan: Plan, sources):
  """(specs, shapes) of shares of the vectors' gradients and of the rows'."""
  cores, steps = _grid(plan)
  own = _specs(plan, steps)[1]
  shape = jax.ShapeDtypeStruct
  share = pl.BlockSpec(
    (None, body.SUBLANES, plan.width), lambda c, n, live: (c, 0, 0)
  )
  specs = [share] * (1 + plan.normalized)
  shares = shape((cores, body.SUBLANES, plan.width), jnp.float32)
  shapes = [shares] * len(specs)
  specs.append(
    pl.BlockSpec(
      (plan.finished, plan.block, plan.width),
      lambda c, n, live: (0, c * steps + n, 0),
    )
  )
  shapes.append(shape(sources.shape, sources.dtype))
  if plan.count > plan.finished:
    specs.append(own(plan.width))
    shapes.append(shape(sources.shape[1:], sources.dtype))
  return specs, shapes


def _backward(call, saved, cotangents):
  arrays, mask_m, stats = saved
  sources, partial, query_d, gain_d, norm_gain_d = arrays
  do, d_weights = cotangents
  given = _inputs(arrays, mask_m)
  count = sources.shape[0] + (partial is not None)
  plan = _plan(arrays, mask_m, call, extra=1 + count)
  d_rows_tm = d_weights.reshape(plan.count, -1).T.astype(jnp.float32)
  d_rows = jnp.pad(d_rows_tm, ((0, 0), (0, LANES - plan.count)))
  of_sources, own, whole = _specs(plan, _grid(plan)[1])
  do = _flat(do, 0).astype(sources.dtype)
  rows = [own(plan.width), own(LANES), own(LANES)]
  kept = pltpu.VMEM((ROWS, plan.width), jnp.float32)
  results = _launch(
    'depth_mix_gradient',
    body.backward,
    plan,
    (given.mask, *_rows_of(given), *given.vectors, do, stats, d_rows),
    (
      [*of_sources, *[whole] * len(given.vectors), *rows],
      *_gradient_results(plan, given.sources),
    ),
    call.interpret,
    [kept] * (2 * plan.normalized),
  )
  shares, rows = results[: 1 + plan.normalized], results[1 + plan.normalized :]
  dw_d, *d_norm_gain = (jnp.sum(x, axis=(0, 1)) for x in shares)
  d_sources, *d_partial = rows
  of_partial = of_norm = None
  if partial is not None:
    of_partial = d_partial[0].reshape(partial.shape).astype(partial.dtype)
  if norm_gain_d is not None:
    of_norm = d_norm_gain[0].astype(norm_gain_d.dtype)
  d_query = (dw_d * gain_d).astype(query_d.dtype)
  d_gain = (dw_d * query_d).astype(gain_d.dtype)
  d_sources = d_sources.reshape(sources.shape)
  return (d_sources, of_partial, d_query, d_gain, of_norm), None


_mix.defvjp(_forward, _backward)
