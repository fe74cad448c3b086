"""Kimi Delta Attention forward on Hopper GPUs, in Pallas Mosaic GPU.

Two kernels: `mosaic_gpu_prep` turns raw inputs into chunk operands, all chunks
at once; `mosaic_gpu_scan` carries the state through them. Where few chains of
many chunks would leave the chip idle, each chain is cut into pieces: a first
pass finds the affine map of every piece, those maps give every piece its
entering state, and the scan runs over all pieces at once.

Legend: b batch, t time, h heads, k key width, v value width, n chunks, p
pieces.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels.kda import inputs as kda_inputs
from pallas_kernels.kda import mosaic_gpu_decode as decode_kernel
from pallas_kernels.kda import mosaic_gpu_flags as packing
from pallas_kernels.kda import mosaic_gpu_gradient as gradient_kernel
from pallas_kernels.kda import mosaic_gpu_pieces as chain_pieces
from pallas_kernels.kda import mosaic_gpu_prep as prep
from pallas_kernels.kda import mosaic_gpu_reverse as reverse_scan
from pallas_kernels.kda import mosaic_gpu_scan as scan_kernel
from pallas_kernels.kda.mosaic_gpu_place import (
  CHUNK,
  WIDTH,
)

_SHORTEST_PIECE = 16  # chunks; below it the maps cost more than they save
_WIDTHS = (64, 128)
_LEAST_BETA = 1e-12  # in gradients
_KEPT_OPERANDS = (
  'minus_key',
  'query',
  'update',
  'scores',
  'gamma',
  'saved_inverse',
)


def _device_kind() -> str:
  device = jax.devices()[0]
  return device.device_kind if device.platform == 'gpu' else device.platform


def _is_hopper(device_kind: str) -> bool:
  return any(name in device_kind for name in ('H100', 'H200', 'H800', 'H20'))


def device_refusal(device_kind: str | None = None) -> str | None:
  """Why no Hopper kernel runs on a device, the default one if None, or None."""
  device_kind = device_kind or _device_kind()
  if _is_hopper(device_kind):
    return None
  return f'the Hopper kernels need an H100 or H200, this is {device_kind}'


def refusal(q, k, v, gate, beta, *, lower_bound, device_kind=None):
  """Why these kernels cannot run the arguments, or None.

  Args:
    q, k, v, gate, beta: arrays or their shapes and dtypes.
    lower_bound: of the log decay, or None.
    device_kind: as in `jax.Device.device_kind`; the default device if None.
  """
  reason = device_refusal(device_kind)
  if reason is not None:
    return reason
  if lower_bound is None:
    return 'the Hopper kernels need a bounded gate (lower_bound=-5.0)'
  for name, array in (('q', q), ('k', k), ('v', v), ('gate', gate)):
    if array.dtype != jnp.bfloat16:
      return f'the Hopper kernels take bfloat16, {name} is {array.dtype}'
  if q.shape[3] not in _WIDTHS or v.shape[3] not in _WIDTHS:
    return (
      f'the Hopper kernels take widths {_WIDTHS}, not K={q.shape[3]}, '
      f'V={v.shape[3]}'
    )
  if q.shape[1] == 0:
    return 'the Hopper kernels need at least one token'
  return None


def kda_mosaic_gpu(
  q,
  k,
  v,
  gate,
  beta,
  *,
  a_log=None,
  dt_bias=None,
  lower_bound=-5.0,
  scale=None,
  initial_state=None,
  segment_ids=None,
  normalize_qk=True,
  activate_gate=True,
  activate_beta=True,
  save=False,
  pieces=None,
):
  """Output and final state of Kimi Delta Attention; see `kda.api.kda`.

  Source: Kimi Linear (arXiv 2510.26692), equation 1, chunkwise with T first;
  the bounded gate is that of the Kimi K3 technical report.

  Args:
    q, k: [B, T, H, K] bfloat16, K 64 or 128.
    v: [B, T, HV, V] bfloat16, V 64 or 128, HV a multiple of H.
    gate: [B, T, HV, K] bfloat16 logits, or log decays in [lower_bound, 0]
      without activate_gate.
    beta: [B, T, HV] logits, or numbers without activate_beta.
    a_log: [HV] or None for 0. dt_bias: [HV, K] or None for 0.
    lower_bound: in [-5, 0).
    scale: factor of the output, K^-0.5 by default.
    initial_state: [B, HV, K, V] float32 or None for zeros.
    segment_ids: [B, T] int32, 0 is padding; a new number starts a document with
      a zero state. Padding yields zeros and passes the state on.
    save: also return what a gradient needs.
    pieces: ranges that each chain is cut into; chosen by shape if None.

  Returns:
    out [B, T, HV, V] bfloat16; final_state [B, HV, K, V] float32; with `save`
    also a dictionary of 'state' [B, HV, N, V, K], the bfloat16 state that
    enters each chunk, transposed, and 'inverse' [B, HV, N, 64, 64], its T.

  Raises:
    NotImplementedError: `refusal` has a reason.
  """
  reason = refusal(q, k, v, gate, beta, lower_bound=lower_bound)
  if reason is not None:
    raise NotImplementedError(f'{reason}; use implementation="xla".')
  settings = kda_inputs.Settings(
    lower_bound,
    q.shape[3] ** -0.5 if scale is None else float(scale),
    normalize_qk,
    activate_gate,
    activate_beta,
  )
  raw = kda_inputs.Raw(q, k, v, gate, beta, a_log, dt_bias)
  arrays, options = _inputs(raw, segment_ids, settings, save)
  chains = initial_state, pieces
  results = _run(arrays, options, chains, save_state=save)
  out, final_state = _results(raw, results)
  if not save:
    return out, final_state
  saved = {'state': results['saved'][..., : q.shape[3]]}
  shape = (*saved['state'].shape[:3], CHUNK, CHUNK)
  saved['inverse'] = results['operands']['saved_inverse'].reshape(shape)
  return out, final_state, saved


def _inputs(raw: kda_inputs.Raw, segment_ids, settings, save_inverse: bool):
  """What `mosaic_gpu_prep.prepare` takes, values beside it, and options."""
  q, k, v, gate, beta = raw[:5]
  length = q.shape[1]
  options = prep.Options(
    lower_bound=settings.lower_bound,
    scale=settings.scale,
    normalize_qk=settings.normalize_qk,
    activate_gate=settings.activate_gate,
    masked=segment_ids is not None or length % CHUNK != 0,
    save_inverse=save_inverse,
  )
  if settings.activate_beta:
    beta = jax.nn.sigmoid(beta.astype(jnp.float32))
  if length % 8:  # bulk copies need whole groups of 8 tokens
    q, k, v, gate = (_extend(x, 1, CHUNK) for x in (q, k, v, gate))
  rows = q, k, gate, beta
  arrays = _raw_arrays(rows, raw[5:], segment_ids, options)
  return {**arrays, 'values': v}, options


def chunked(
  raw: kda_inputs.Raw, initial_state, segment_ids, settings
) -> tuple[jax.Array, jax.Array]:
  """Output and final state, differentiable; see `kda.api.kda`.

  The gradient needs the operands of the scans, T, and the states that enter
  the chunks. By settings.save it makes all of them again; or the states, 512
  bytes a token and value head, are kept; or everything, 1.5 KB.
  """
  return _chunked(settings, raw, initial_state, segment_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(settings, raw, initial_state, segment_ids):
  arrays, options = _inputs(raw, segment_ids, settings, False)
  results = _run(arrays, options, (initial_state, None))
  return _results(raw, results)


def _results(raw: kda_inputs.Raw, results: dict):
  """Output and final state in the layout of the arguments."""
  length, key_width = raw.q.shape[1], raw.q.shape[3]
  final_bhkv = jnp.swapaxes(results['final'][:, :, -1], 2, 3)
  return results['out'][:, :length], final_bhkv[:, :, :key_width]


def _chunked_forward(settings, raw, initial_state, segment_ids):
  keep_state = settings.save != 'inputs'
  keep_all = settings.save == 'state_and_t'
  raw = _with_beta(raw, settings)
  arrays, options = _inputs(raw, segment_ids, settings, keep_all)
  chains = initial_state, None
  results = _run(arrays, options, chains, save_state=keep_state)
  kept = {'saved': results['saved']} if keep_state else {}
  if keep_all:
    kept |= {n: results['operands'][n] for n in _KEPT_OPERANDS}
  return _results(raw, results), (raw, initial_state, segment_ids, kept)


def _chunked_backward(settings, residuals, cotangents):
  raw, initial_state, segment_ids, kept = residuals
  d_out, d_final = cotangents
  arrays, options = _inputs(raw, segment_ids, settings, True)
  work = _work(arrays)
  pieces = _pieces(work.batch * work.heads, work.chunks)
  operands = arrays | kept
  if 'update' not in kept:
    operands |= _operands(arrays, work, options)
  if 'saved' not in kept:
    initial = _transposed(initial_state)
    last = dict(masked=options.masked, output=False, save_state=True)
    operands['saved'] = _scan(operands, initial, pieces, **last)['saved']
  operands['leaving'] = _transposed(d_final)
  # Bulk copies need whole groups of 8 tokens.
  operands['d_out'] = _extend(d_out, 1, CHUNK) if d_out.shape[1] % 8 else d_out
  scanned = reverse_scan.in_pieces(operands, pieces, options.masked)
  chunk_arrays = _chunk_arrays(operands | scanned)
  chunks = gradient_kernel.gradient(chunk_arrays, work, options)
  d_raw = _raw_gradients(raw, scanned['d_values'], chunks, settings)
  if initial_state is None:
    return d_raw, None, None
  d_state_bhkv = jnp.swapaxes(scanned['entering'], 2, 3)
  d_state_bhkv = d_state_bhkv[:, :, : initial_state.shape[2]]
  return d_raw, d_state_bhkv.astype(initial_state.dtype), None


def _chunk_arrays(arrays: dict) -> dict:
  """What `mosaic_gpu_gradient.gradient` takes, values widened to 128."""
  names = ('values', 'd_out', 'd_values', 'saved', 'd_state')
  wide = {name: _widen(arrays[name], 3) for name in names}
  states = dict(state=wide['saved'], dstate=wide['d_state'])
  return arrays | wide | states | {'inverse': arrays['saved_inverse']}


def _raw_gradients(raw, d_values, chunks: dict, settings) -> kda_inputs.Raw:
  """Gradients of the raw inputs from the kernel's of widened ones."""
  length, heads, width = raw.q.shape[1:]
  rows = lambda x, like: x[:, :length, :, :width].astype(like.dtype)
  d_q, d_k = (_sum_groups(chunks[name], heads) for name in ('dq', 'dk'))
  d_beta = jnp.swapaxes(chunks['dbeta'], 1, 2)[:, :length]
  if settings.activate_beta:
    logit = raw.beta.astype(jnp.float32)
    # s (1 - s) would round 1 - s to a few digits once s is nearly 1.
    slope = jax.nn.sigmoid(logit) * jax.nn.sigmoid(-logit)
    # What stands on padding, where d_beta is 0, may not even be a number.
    d_beta *= jnp.where(d_beta == 0, 0.0, slope)
  d_a_log = d_dt_bias = None
  if raw.a_log is not None:
    d_a_log = chunks['a_log'].astype(raw.a_log.dtype)
  if raw.dt_bias is not None:
    d_dt_bias = chunks['dt_bias'][:, :width].astype(raw.dt_bias.dtype)
  return kda_inputs.Raw(
    rows(d_q, raw.q),
    rows(d_k, raw.k),
    d_values[:, :length],
    rows(chunks['dgate'], raw.gate),
    d_beta.astype(raw.beta.dtype),
    d_a_log,
    d_dt_bias,
  )


def _sum_groups(x_bthk: jax.Array, heads: int) -> jax.Array:
  """The sum over the value heads of each key head."""
  if x_bthk.shape[2] == heads:
    return x_bthk
  x = x_bthk.reshape(*x_bthk.shape[:2], heads, -1, x_bthk.shape[3])
  return x.astype(jnp.float32).sum(3)


def _with_beta(raw: kda_inputs.Raw, settings) -> kda_inputs.Raw:
  """Inputs whose betas can be divided by, as the gradient of beta does."""
  if settings.activate_beta:
    return raw
  small = jnp.abs(raw.beta) < _LEAST_BETA
  return raw._replace(beta=jnp.where(small, _LEAST_BETA, raw.beta))


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _widen(x, axis: int):
  """Zeros appended up to the key width of the kernels; exact for KDA."""
  return _extend(x, axis, WIDTH)


def _extend(x, axis: int, multiple: int):
  """Zeros appended to an axis up to the next multiple."""
  missing = -x.shape[axis] % multiple
  if missing == 0:
    return x
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, missing)
  return jnp.pad(x, widths)


def _raw_arrays(raw, parameters, segment_ids, options: prep.Options) -> dict:
  """The arrays of `mosaic_gpu_prep.prepare`."""
  q, k, gate, beta = raw
  batch, length, heads = beta.shape
  beta = beta.astype(jnp.float32)
  arrays = {}
  if options.masked:
    if segment_ids is None:
      segment_ids = jnp.ones((batch, length), jnp.int32)
    valid = (segment_ids != 0)[:, :, None]
    beta = _extend(jnp.where(valid, beta, 0.0), 1, CHUNK)
    ids = _extend(segment_ids, 1, CHUNK)
    arrays['flags'], arrays['plain'] = packing.flags(ids)
  for name, array in (('q', q), ('k', k), ('gate', gate)):
    arrays[name] = _widen(array, 3)
  arrays['beta'] = jnp.swapaxes(beta, 1, 2)
  arrays['affine'] = _gate_affine(parameters, heads)
  return arrays


def _run(arrays: dict, options, chains, *, save_state=False) -> dict:
  """Preparation and scan; `chains`: initial state or None, pieces or None."""
  initial, pieces = chains
  work = _work(arrays)
  if pieces is None:
    pieces = _pieces(work.batch * work.heads, work.chunks)
  operands = _operands(arrays, work, options)
  last = dict(masked=options.masked, save_state=save_state)
  results = _scan(operands, _transposed(initial), pieces, **last)
  return results | {'operands': operands}


def _work(arrays: dict) -> prep.Work:
  batch, heads, padded = arrays['beta'].shape
  group = heads // arrays['q'].shape[2]
  return prep.Work(batch, heads, group, padded // CHUNK)


def _operands(arrays: dict, work: prep.Work, options: prep.Options) -> dict:
  """What the scans read, but for states."""
  operands = prep.prepare(arrays, work, options)
  operands['values'] = arrays['values']
  if options.masked:
    operands['flags'] = arrays['flags']
  return operands


def _transposed(state_bhkv):
  """A state, or None, as the scans take it for one piece: [B, HV, 1, V, K]."""
  if state_bhkv is None:
    return None
  state_bhvk = jnp.swapaxes(_widen(state_bhkv, 2), 2, 3)
  return state_bhvk[:, :, None].astype(jnp.float32)


def _gate_affine(parameters, heads: int) -> jax.Array:
  """[HV, 2, K]: slope and shift of the power of two inside the sigmoid."""
  a_log, dt_bias = parameters
  slope = jnp.full((heads, 1), -math.log2(math.e), jnp.float32)
  if a_log is not None:
    slope = slope * jnp.exp(a_log.astype(jnp.float32))[:, None]
  slope_hk = jnp.broadcast_to(slope, (heads, WIDTH))
  shift_hk = jnp.zeros_like(slope_hk)
  if dt_bias is not None:
    shift_hk = slope * _widen(dt_bias.astype(jnp.float32), 1)
  return jnp.stack([slope_hk, shift_hk], axis=1)


def _pieces(chains: int, chunks: int) -> int:
  """Ranges per chain that fill the chip without becoming short."""
  pieces = max(1, min(prep.PROCESSORS // chains, chunks // _SHORTEST_PIECE))
  longest = math.ceil(chunks / pieces)
  return math.ceil(chunks / longest)  # none of them empty


def _scan(arrays: dict, initial, pieces: int, *, masked: bool, **last) -> dict:
  """The scan, in pieces whose entering states come from their affine maps.

  `last` has further fields of the plan of the scan that follows the maps.
  """
  if pieces > 1:
    initial = chain_pieces.entering(arrays, initial, pieces, masked)
  if initial is not None:
    arrays = {**arrays, 'initial': initial}
  plan = scan_kernel.Plan(
    pieces=pieces, masked=masked, initial=initial is not None, **last
  )
  return scan_kernel.scan(arrays, plan)


def decode_mosaic_gpu(
  q,
  k,
  v,
  gate,
  beta,
  state,
  *,
  a_log=None,
  dt_bias=None,
  lower_bound=-5.0,
  scale=None,
  active=None,
  slots=None,
  normalize_qk=True,
  activate_gate=True,
  activate_beta=True,
):
  """Output and new state of one token per batch row; see `kda.decode_step`.

  Args:
    q, k: [B, H, K], K 64 or 128; v: [B, HV, V], V 64 or 128; gate: [B, HV, K];
      beta: [B, HV]; float32 or bfloat16.
    state: [B, HV, K, V] float32; with slots a pool [N, HV, K, V].
    active: [B] bool or None for all; other rows keep their state and yield 0.
    slots: [B] int32 or None, the row's place in the pool, negative for rows
      that are not active and touch no state.
    a_log, dt_bias, lower_bound, scale, normalize_qk, activate_gate,
      activate_beta: as in `kda_mosaic_gpu`.

  Raises:
    NotImplementedError: `decode_refusal` has a reason.
  """
  reason = decode_refusal(q, k, v, gate, state, lower_bound=lower_bound)
  if reason is not None:
    raise NotImplementedError(f'{reason}; use implementation="xla".')
  batch, heads = beta.shape
  beta = beta.astype(jnp.float32)
  if activate_beta:
    beta = jax.nn.sigmoid(beta)
  if slots is not None:
    active = slots >= 0
  if active is None:
    active = jnp.ones((batch,), bool)
  affine_hck = _gate_affine((a_log, dt_bias), heads)
  slope_bh = jnp.broadcast_to(affine_hck[:, 0, 0], beta.shape)
  active_bh = jnp.broadcast_to(active[:, None], beta.shape)
  beta = jnp.where(active_bh, beta, 0.0)
  zero = jnp.zeros_like(beta)
  scalars = [slope_bh, beta, active_bh.astype(jnp.float32), zero]
  arrays = {'query': q, 'key': k, 'gate': gate, 'value': v, 'state': state}
  arrays['shift'] = affine_hck[:, 1, : q.shape[2]]
  arrays['scalars'] = jnp.stack(scalars, axis=-1)
  if slots is not None:
    arrays['slots'] = slots.astype(jnp.int32)
  options = decode_kernel.Options(
    lower_bound=lower_bound,
    scale=q.shape[2] ** -0.5 if scale is None else float(scale),
    normalize_qk=normalize_qk,
    activate_gate=activate_gate,
  )
  return decode_kernel.step(arrays, options)


def decode_refusal(q, k, v, gate, state, *, lower_bound, device_kind=None):
  """Why `decode_mosaic_gpu` cannot run the arguments, or None."""
  reason = device_refusal(device_kind)
  if reason is not None:
    return reason
  if lower_bound is None:
    return 'the Hopper kernels need a bounded gate (lower_bound=-5.0)'
  for name, array in (('q', q), ('k', k), ('v', v), ('gate', gate)):
    if array.dtype not in (jnp.bfloat16, jnp.float32):
      return (
        'the Hopper kernel of one token takes float32 or bfloat16, '
        f'{name} is {array.dtype}'
      )
  if q.shape[2] not in _WIDTHS or v.shape[2] not in _WIDTHS:
    return (
      f'the Hopper kernels take widths {_WIDTHS}, not K={q.shape[2]}, '
      f'V={v.shape[2]}'
    )
  if state.dtype != jnp.float32:
    return f'the Hopper kernels keep a float32 state, this is {state.dtype}'
  return None
