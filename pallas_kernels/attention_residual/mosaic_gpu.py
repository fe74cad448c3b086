"""The depth mix and its derivative on Hopper GPUs, in Pallas Mosaic GPU.

Each pass reads the sources once; between them only three float32 numbers a
token and source are kept: the reciprocal RMS, the logit and the weight. The
kernels are in `mosaic_gpu_kernel`; masked sources are neither read nor used.

Suffixes: m residual sources, t tokens, d width.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.attention_residual import mosaic_gpu_kernel as body
from pallas_kernels.attention_residual import xla
from pallas_kernels.attention_residual.mosaic_gpu_kernel import Arrays, Plan
from pallas_kernels.attention_residual.mosaic_gpu_ring import BARRIER_BYTES
from pallas_kernels.kda import mosaic_gpu_warp as warp

_HOPPER = ('H100', 'H200', 'H800', 'H20')
_PROCESSORS = 132
_SHARED_BYTES = 225 * 1024  # of a multiprocessor, for all its blocks
# What every block costs besides: its own KB, and three arrays in whole KB.
_BLOCK_BYTES = 4096
# Consuming warps of a block, and columns of a thread. Few warps with many
# columns keep more of a row in registers and share less.
_BEST_WARPS, _MOST_WARPS = 7, 15
_MOST_COLUMNS = 32
_GROUP = 4  # warps of a warpgroup
_ALL_REGISTERS = 65536  # of a multiprocessor
_MOST_TOGETHER, _MOST_SLOTS = 6, 64  # blocks of one, rows of a block


def refusal(sources, query) -> str | None:
  """Why the kernels cannot run the arguments on this device, or None."""
  kind = dispatch.device_kind()
  if kind == 'gpu':
    kind = jax.devices()[0].device_kind
  if not any(name in kind for name in _HOPPER):
    return f'the Hopper kernels need an H100 or H200, this is {kind}'
  return unsupported(sources, query)


def unsupported(sources, query) -> str | None:
  """Why no Hopper GPU can run these arguments, or None."""
  if sources.dtype not in (jnp.float32, jnp.bfloat16):
    return f'the Hopper kernels take float32 and bfloat16, not {sources.dtype}'
  if query.dtype == jnp.float64:
    return 'the Hopper kernels take a float32 query, not float64'
  if sources.shape[0] >= body.MOST_SOURCES:
    return (
      f'the Hopper kernels take up to {body.MOST_SOURCES - 1} sources, not '
      f'{sources.shape[0]}'
    )
  width = sources.shape[-1]
  if _warps(width, str(sources.dtype)) is None:
    unit = body.LANES * body.UNIT_BYTES // sources.dtype.itemsize
    return (
      f'the Hopper kernels take multiples of {unit} as width of '
      f'{sources.dtype}, with a factor up to {_MOST_WARPS}, not {width}'
    )
  tokens = math.prod(sources.shape[1:-1])
  if not 0 < tokens * sources.shape[0] < 2**31 - 2**16:
    return f'the Hopper kernels cannot index {tokens} tokens'
  return None


def _warps(width: int, dtype: str) -> int | None:
  """Consuming warps of a block, among which a row is divided."""
  per_unit = body.UNIT_BYTES // jnp.dtype(dtype).itemsize
  if width == 0 or width % (body.LANES * per_unit):
    return None
  units = width // (body.LANES * per_unit)
  fits = [
    n
    for n in range(1, _MOST_WARPS + 1)
    if units % n == 0 and units // n * per_unit <= _MOST_COLUMNS
  ]
  best = [n for n in fits if n <= _BEST_WARPS]
  return max(best) if best else min(fits, default=None)


def _groups(warps: int) -> int:
  """Warpgroups for the consuming warps and the producing one."""
  return -(-(warps + 1) // _GROUP)


def plan_of(
  shape: tuple[int, int, int],
  dtype: str,
  partial: bool,
  *,
  eps: float,
  extra: int,
  passes: int,
) -> Plan:
  """The static choices.

  Args:
    shape: [M, T, D] of the finished sources.
    extra: rows a token has besides its sources.
    passes: over the rows of a token.
  """
  finished, tokens, width = shape
  warps = _warps(width, dtype)
  plan = Plan(
    tokens=tokens,
    width=width,
    dtype=dtype,
    finished=finished,
    count=finished + partial,
    eps=eps,
    blocks=0,
    warps=warps,
    slots=0,
    extra=extra,
    passes=passes,
  )
  plans = [_shared(plan, n) for n in range(_most_together(plan), 0, -1)]
  return next((plan for plan in plans if plan.resident), plans[-1])


def _most_together(plan: Plan) -> int:
  """Blocks of a multiprocessor that its registers suffice for."""
  columns = plan.units * plan.per_unit
  # What compiled kernels use; a third pass is that of a normalized mixture.
  registers = 36 + columns * (3 + 2 * plan.extra)
  registers += (columns + 16) * (plan.passes - 2)
  threads = body.LANES * _GROUP * _groups(plan.warps)
  together = _ALL_REGISTERS // (threads * min(-(-registers // 8) * 8, 255))
  return max(1, min(together, _MOST_TOGETHER))


def _shared(plan: Plan, together: int) -> Plan:
  """`plan` with the ring that each of some blocks of a processor can have."""
  room = _SHARED_BYTES // together - _BLOCK_BYTES - 4 * plan.scratch_words
  slots = min(room // (plan.row_bytes + 2 * BARRIER_BYTES), _MOST_SLOTS)
  blocks = min(plan.tokens, _PROCESSORS * together)
  return plan._replace(slots=slots, blocks=blocks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def mix(arrays, mask_m, eps):
  """The mix and its weights.

  Args:
    arrays: (sources, partial or None, query, gain, norm_gain or None).
    mask_m, eps: as of `xla.mix`.
  """
  return _forward(arrays, mask_m, eps)[0]


def _flat(x, axes: int):
  """`x` with its token axes, those after the first `axes`, as one."""
  return x.reshape(*x.shape[:axes], -1, x.shape[-1])


def _order(mask_m, count: int):
  """(indices of the sources, live ones first, and how many live) int32."""
  if mask_m is None:
    return jnp.arange(count, dtype=jnp.int32), jnp.full(1, count, jnp.int32)
  # Dense compares, one small fusion: a sort is a kernel of its own.
  places = jnp.arange(count, dtype=jnp.int32)
  earlier = places[None, :] < places[:, None]
  mine, others = mask_m[:, None], mask_m[None, :]
  is_before = (others & ~mine) | ((others == mine) & earlier)
  rank_m = jnp.sum(is_before, axis=1)
  order_m = jnp.sum((rank_m == places[:, None]) * places, axis=1)
  return order_m.astype(jnp.int32), jnp.sum(mask_m, dtype=jnp.int32)[None]


def _inputs(arrays, mask_m) -> dict[str, jax.Array]:
  """What both kernels read, by name."""
  sources, partial, query_d, gain_d, norm_gain_d = arrays
  count = sources.shape[0] + (partial is not None)
  order_m, live = _order(mask_m, count)
  read = dict(sources=_flat(sources, 1))
  if partial is not None:
    read['partial'] = _flat(partial, 0).astype(sources.dtype)
  w_d = (xla.widened(query_d) * xla.widened(gain_d)).astype(jnp.float32)
  if norm_gain_d is not None:  # rounded as XLA does
    read['norm_gain'] = norm_gain_d.astype(sources.dtype).astype(jnp.float32)
  return read | dict(w=w_d, order=order_m, live=live)


def _forward(arrays, mask_m, eps):
  sources = arrays[0]
  read = _inputs(arrays, mask_m)
  plan = plan_of(
    read['sources'].shape,
    str(sources.dtype),
    'partial' in read,
    eps=eps,
    extra=0,
    passes=2,
  )
  scalar = jax.ShapeDtypeStruct((plan.count, plan.tokens), jnp.float32)
  out = jax.ShapeDtypeStruct((plan.tokens, plan.width), sources.dtype)
  written = dict(out=out, rstd=scalar, logits=scalar, weights=scalar)
  if 'norm_gain' in read:
    written['scale'] = jax.ShapeDtypeStruct((plan.tokens,), jnp.float32)

  def consume(block, at):
    body.forward(block, at, at)

  results = _launch('depth_mix', plan, read, written, consume)
  results = {n: _vary_like(sources, x) for n, x in results.items()}
  tokens = sources.shape[1:-1]
  out = results['out'].reshape(sources.shape[1:])
  weights = results['weights'].reshape(plan.count, *tokens)
  saved = {n: x for n, x in results.items() if n != 'out'}
  return (out, weights), (arrays, mask_m, saved)


def _backward(eps, saved, cotangents):
  arrays, mask_m, scalars = saved
  sources, partial, query_d, gain_d, norm_gain_d = arrays
  do, d_weights = cotangents
  read = _inputs(arrays, mask_m) | scalars
  plan = plan_of(
    read['sources'].shape,
    str(sources.dtype),
    'partial' in read,
    eps=eps,
    extra=1,
    passes=2 + (norm_gain_d is not None),
  )
  read['do'] = _flat(do, 0).astype(sources.dtype)
  read['d_weights'] = d_weights.reshape(plan.count, -1).astype(jnp.float32)
  shape = jax.ShapeDtypeStruct
  written = dict(d_sources=shape(read['sources'].shape, sources.dtype))
  if partial is not None:
    written['d_partial'] = shape(read['partial'].shape, sources.dtype)
  written['d_w'] = shape((plan.blocks, plan.width), jnp.float32)
  if norm_gain_d is not None:
    written['d_norm_gain'] = written['d_w']

  def consume(block, at):
    d_rows = Arrays(at['d_sources'], at.get('d_partial'))
    body.backward(block, at, d_rows, at)

  results = _launch('depth_mix_gradient', plan, read, written, consume)
  results = {n: _vary_like(sources, x) for n, x in results.items()}
  d_partial = None
  if partial is not None:
    d_partial = results['d_partial'].reshape(partial.shape)
    d_partial = d_partial.astype(partial.dtype)
  dw_d = jnp.sum(results['d_w'], axis=0)
  d_query = (dw_d * gain_d).astype(query_d.dtype)
  d_gain = (dw_d * query_d).astype(gain_d.dtype)
  d_norm_gain = None
  if norm_gain_d is not None:
    d_norm_gain = jnp.sum(results['d_norm_gain'], axis=0)
    d_norm_gain = d_norm_gain.astype(norm_gain_d.dtype)
  d_sources = results['d_sources'].reshape(sources.shape)
  return (d_sources, d_partial, d_query, d_gain, d_norm_gain), None


mix.defvjp(_forward, _backward)


def _launch(name: str, plan: Plan, read: dict, written: dict, consume):
  """The arrays that `consume(block, addresses by name)` writes, by name."""
  names = (*read, *written)
  plain = plgpu.RefType()

  def kernel_body(*refs):
    @plgpu.inline_mgpu(arg_types=(plain,) * len(refs))
    def emit(ctx, *refs):
      del ctx
      *outer, rows, barriers, scratch = refs
      at = {n: warp.global_address(r) for n, r in zip(names, outer)}
      shared = [warp.shared_address(r) for r in (rows, barriers, scratch)]
      sources = Arrays(at['sources'], at.get('partial'))
      extra = [at['do']] if 'do' in at else []
      body.run(
        plan,
        at,
        shared,
        lambda block: consume(block, at),
        (sources, extra),
      )

    emit(*refs)

  kernel = plgpu.kernel(
    kernel_body,
    out_type=tuple(written.values()),
    grid=(plan.blocks,),
    grid_names=('block',),
    num_threads=_groups(plan.warps),
    thread_name='group',
    kernel_name=name,
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane,
      reduction_scratch_bytes=0,
      unsafe_no_auto_barriers=True,
    ),
    scratch_types=[
      plgpu.SMEM((plan.slots, plan.row_bytes // 4), jnp.int32),
      plgpu.SMEM((4 * plan.slots,), jnp.int32),
      plgpu.SMEM((plan.scratch_words,), jnp.float32),
    ],
  )
  return dict(zip(written, kernel(*read.values())))


def _vary_like(given, x):
  """x marked as different on every device where `given` is.

  Kernels lose that mark, which `shard_map` checks.
  """
  varying = lambda y: jax.typeof(y).manual_axis_type.varying
  missing = tuple(sorted(varying(given) - varying(x)))
  return jax.lax.pcast(x, missing, to='varying') if missing else x
