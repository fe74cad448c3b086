"""Kimi Delta Attention on TPUs: one fused kernel forward, one backward.

Legend: b batch, t time, h heads, k key width, v value width, n chunks.

Gate, norm, beta, running decays, pair scores, triangular inverse and the scan
over chunks are in one kernel, and so are all their gradients in the other, see
`mosaic_tpu_forward` and `mosaic_tpu_backward`. This file lays the arrays out,
chooses how many heads a grid step takes, and ties both together.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda import inputs as kda_inputs
from pallas_kernels.kda import mosaic_tpu_backward as backward_kernel
from pallas_kernels.kda import mosaic_tpu_forward as forward_kernel
from pallas_kernels.kda.mosaic_tpu_forward import Operands, Outputs
from pallas_kernels.kda.mosaic_tpu_tiles import LANES, Plan

_CHUNKS = (64, 128)
_WIDEST = 256
# Heads of a grid step at most: while one waits for a product another computes.
_MOST_HEADS = 16
# A raw gate that decays by less than float32 resolves, for rows after the end.
_NO_DECAY = -1e4


def refusal(raw: kda_inputs.Raw, settings: kda_inputs.Settings) -> str | None:
  """Why these kernels cannot run the arguments where a trace is for, or None.

  A trace is for the device of the abstract mesh in scope, if there is one, and
  for the default device otherwise.
  """
  if not pltpu.is_tpu_device():
    return 'the TPU kernels need a TPU'
  if settings.lower_bound is None:
    return 'the TPU kernels need a bounded gate (lower_bound=-5.0)'
  if raw.q.dtype != jnp.bfloat16:
    return f'the TPU kernels take bfloat16, q is {raw.q.dtype}'
  if max(raw.q.shape[3], raw.v.shape[3]) > _WIDEST:
    return (
      f'the TPU kernels take widths up to {_WIDEST}, not '
      f'K={raw.q.shape[3]}, V={raw.v.shape[3]}'
    )
  if settings.chunk_size not in _CHUNKS:
    return (
      f'the TPU kernels take chunk_size {_CHUNKS}, not {settings.chunk_size}'
    )
  return None


def chunked(
  raw: kda_inputs.Raw,
  initial_state: jax.Array,
  segment_ids: jax.Array | None,
  settings: kda_inputs.Settings,
  interpret=False,
) -> tuple[jax.Array, jax.Array]:
  """Output [B, T, HV, V] and final state [B, HV, K, V]; see `kda`.

  Args:
    raw, initial_state, segment_ids, settings: checked by `kda`; `refusal` has
      no reason but the device.
    interpret: run on any device: True, or `pltpu.InterpretParams`.
  """
  parameters = jax.tree.map(lambda p: p.astype(jnp.float32), raw[5:])
  raw = kda_inputs.Raw(*raw[:5], *parameters)
  run = _interpreted if interpret else _compiled
  results = run((settings, interpret), raw, initial_state, segment_ids)
  # JAX would drop an unused final state alone; its rule for `optimize_remat`,
  # which counts the results again, then fails in checkpoints of checkpoints.
  return jax.lax.optimization_barrier(results)


def plan_of(
  raw: kda_inputs.Raw, settings: kda_inputs.Settings, segmented: bool
) -> Plan:
  """The static choices for these shapes."""
  value_heads = raw.v.shape[2]
  group = value_heads // raw.q.shape[2]
  width = lambda n: -(-n // LANES) * LANES
  key_dim, value_dim = width(raw.q.shape[3]), width(raw.v.shape[3])
  most = _MOST_HEADS * LANES // max(key_dim, value_dim)
  fits = lambda n: value_heads % n == 0 and n % group == 0
  heads = max((n for n in range(1, most + 1) if fits(n)), default=group)
  return Plan(
    settings.chunk_size,
    heads,
    group,
    key_dim,
    value_dim,
    settings.lower_bound,
    settings.scale,
    settings.normalize_qk,
    settings.activate_gate,
    settings.activate_beta,
    segmented,
  )


def _rows(x, plan: Plan, width: int, fill=0) -> jax.Array:
  """[B, T, H, D] to [B, T', H D'] with whole chunks and registers."""
  pad = [(0, 0), (0, -x.shape[1] % plan.chunk), (0, 0), (0, width - x.shape[3])]
  if any(after for _, after in pad):
    x = jnp.pad(x, pad, constant_values=fill)
  return x.reshape(*x.shape[:2], -1)


def _head_groups(x_bth, plan: Plan) -> jax.Array:
  """[B, T, HV] to [B, groups, T', heads]."""
  pad = [(0, 0), (0, -x_bth.shape[1] % plan.chunk), (0, 0)]
  x = jnp.pad(x_bth, pad)
  x = x.reshape(*x.shape[:2], -1, plan.heads)
  return jnp.moveaxis(x, 2, 1)


def _affine(raw: kda_inputs.Raw, plan: Plan) -> jax.Array:
  """Slope and shift of the gate's sigmoid, [2, HV K'] float32."""
  heads, key_dim = raw.v.shape[2], raw.q.shape[3]
  slope_h1 = jnp.ones((heads, 1), jnp.float32)
  if raw.a_log is not None:
    slope_h1 = jnp.exp(raw.a_log)[:, None]
  slope_hk = jnp.broadcast_to(slope_h1, (heads, key_dim))
  bias_hk = jnp.zeros_like(slope_hk) if raw.dt_bias is None else raw.dt_bias
  pair = jnp.stack([slope_hk, slope_hk * bias_hk])
  pair = jnp.pad(pair, ((0, 0), (0, 0), (0, plan.key_dim - key_dim)))
  return pair.reshape(2, -1)


def _documents(segment_ids, plan: Plan) -> jax.Array | None:
  """[B, N, 2, 128]: document since the chunk began, and 1 for no padding."""
  if segment_ids is None:
    return None
  ids = jnp.pad(segment_ids, ((0, 0), (0, -segment_ids.shape[1] % plan.chunk)))
  documents = kda_inputs.documents(ids)
  index_bnc = documents.index.reshape(ids.shape[0], -1, plan.chunk)
  last_bn = index_bnc[:, :, -1]
  entering_bn = jnp.pad(last_bn[:, :-1], ((0, 0), (1, 0)))
  since_bnc = index_bnc - entering_bn[:, :, None]
  valid_bnc = documents.valid.reshape(index_bnc.shape)
  both = jnp.stack([since_bnc, valid_bnc], 2).astype(jnp.float32)
  return jnp.tile(both, (1, 1, 1, plan.pack))


def operands_of(raw: kda_inputs.Raw, segment_ids, plan: Plan) -> Operands:
  """The kernels' layout of the arguments."""
  fill = _NO_DECAY if plan.activate_gate else 0
  return Operands(
    _rows(raw.q, plan, plan.key_dim),
    _rows(raw.k, plan, plan.key_dim),
    _rows(raw.v, plan, plan.value_dim),
    _rows(raw.gate, plan, plan.key_dim, fill),
    _head_groups(raw.beta, plan),
    _affine(raw, plan),
    _documents(segment_ids, plan),
  )


def _state_in(state_bhkv, plan: Plan) -> jax.Array:
  """[B, HV, K, V] to the kernels' [B, HV, V', K']."""
  k, v = state_bhkv.shape[2:]
  state = jnp.swapaxes(state_bhkv.astype(jnp.float32), 2, 3)
  pad = ((0, 0), (0, 0), (0, plan.value_dim - v), (0, plan.key_dim - k))
  return jnp.pad(state, pad)


def _state_out(state_bhvk, key_dim: int, value_dim: int) -> jax.Array:
  return jnp.swapaxes(state_bhvk, 2, 3)[:, :, :key_dim, :value_dim]


def _unrows(x, like) -> jax.Array:
  """The inverse of `_rows`."""
  batch, length, heads, width = like.shape
  x = x.reshape(batch, x.shape[1], heads, -1)
  return x[:, :length, :, :width].astype(like.dtype)


def _chunked(call, raw, initial_state, segment_ids):
  out, state, _ = run_forward(call, raw, initial_state, segment_ids, Outputs())
  return out, state


def run_forward(call, raw, initial_state, segment_ids, outputs: Outputs):
  """Output (None if not asked for), final state and what was saved."""
  settings, interpret = call
  plan = plan_of(raw, settings, segment_ids is not None)
  final, *rest = forward_kernel.forward(
    operands_of(raw, segment_ids, plan),
    _state_in(initial_state, plan),
    plan,
    outputs,
    interpret,
  )
  out = _unrows(rest.pop(0), raw.v) if outputs.out else None
  states = rest.pop(0) if outputs.states else None
  inverse = rest.pop(0) if outputs.inverse else None
  return (
    out,
    _state_out(final, raw.q.shape[3], raw.v.shape[3]),
    (states, inverse),
  )


def _chunked_forward(call, raw, initial_state, segment_ids):
  save = call[0].save
  outputs = Outputs(states=save != 'inputs', inverse=save == 'state_and_t')
  out, state, saved = run_forward(
    call, raw, initial_state, segment_ids, outputs
  )
  return (out, state), (raw, initial_state, segment_ids, saved)


def run_backward(call, residuals, cotangents):
  settings, interpret = call
  raw, initial_state, segment_ids, saved = residuals
  d_out, d_state = cotangents
  plan = plan_of(raw, settings, segment_ids is not None)
  if saved[0] is None:
    # The pass that rebuilds the states also has the inverses at hand.
    outputs = Outputs(out=False, states=True, inverse=True)
    _, _, saved = run_forward(call, raw, initial_state, segment_ids, outputs)
  gradients = backward_kernel.backward(
    operands_of(raw, segment_ids, plan),
    backward_kernel.Cotangents(
      _rows(d_out, plan, plan.value_dim), _state_in(d_state, plan)
    ),
    saved,
    plan,
    interpret,
  )
  d_raw, d_initial = _gradients(gradients, raw, plan)
  return d_raw, d_initial.astype(initial_state.dtype), None


def _gradients(gradients, raw: kda_inputs.Raw, plan: Plan):
  """Gradients in the caller's layout; the last sums are over the batch."""
  g = gradients
  heads, key_dim = raw.v.shape[2], raw.q.shape[3]
  d_beta = jnp.moveaxis(g.beta, 1, 2)
  d_beta = d_beta.reshape(*d_beta.shape[:2], heads)[:, : raw.beta.shape[1]]
  # Sums over time of the sigmoid argument's gradient, alone and times it.
  sums_2hk = g.gate_sums.sum(0).reshape(2, heads, -1)[:, :, :key_dim]
  slope_h1 = 1.0 if raw.a_log is None else jnp.exp(raw.a_log)[:, None]
  return kda_inputs.Raw(
    _unrows(g.q, raw.q),
    _unrows(g.k, raw.k),
    _unrows(g.v, raw.v),
    _unrows(g.gate, raw.gate),
    d_beta.astype(raw.beta.dtype),
    None if raw.a_log is None else sums_2hk[1].sum(-1),
    None if raw.dt_bias is None else slope_h1 * sums_2hk[0],
  ), _state_out(g.initial_state, key_dim, raw.v.shape[3])


# A forward pass that will run again then saves nothing. Interpreted with its
# memory watched a kernel has side effects, which that does not allow.
_compiled = jax.custom_vjp(_chunked, nondiff_argnums=(0,))
_compiled.defvjp(_chunked_forward, run_backward, optimize_remat=True)
_interpreted = jax.custom_vjp(_chunked, nondiff_argnums=(0,))
_interpreted.defvjp(_chunked_forward, run_backward)


def affine_summary(
  raw: kda_inputs.Raw,
  segment_ids: jax.Array | None,
  settings: kda_inputs.Settings,
  interpret=False,
) -> tuple[jax.Array, jax.Array]:
  """Transition [B, HV, K, K] and offset [B, HV, K, V]; see `kda`'s summary.

  raw.q takes no part; give k. Differentiable.
  """
  parameters = jax.tree.map(lambda p: p.astype(jnp.float32), raw[5:])
  raw = kda_inputs.Raw(*raw[:5], *parameters)
  return _affine_summary((settings, interpret), raw, segment_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _affine_summary(call, raw, segment_ids):
  settings, interpret = call
  plan = plan_of(raw, settings, segment_ids is not None)
  (state,) = forward_kernel.forward(
    operands_of(raw, segment_ids, plan),
    None,
    plan,
    Outputs(out=False, affine=True),
    interpret,
  )
  key_dim, value_dim = raw.k.shape[3], raw.v.shape[3]
  transition = _state_out(state[:, :, plan.value_dim :], key_dim, key_dim)
  offset = _state_out(state[:, :, : plan.value_dim], key_dim, value_dim)
  return transition, offset


def _affine_forward(call, raw, segment_ids):
  return _affine_summary(call, raw, segment_ids), (raw, segment_ids)


def _affine_backward(call, residuals, cotangents):
  """By way of a sequence with values [v | 0] and the first state [0 | I]."""
  raw, segment_ids = residuals
  d_transition, d_offset = cotangents
  key_dim, value_dim = raw.k.shape[3], raw.v.shape[3]
  wide = raw._replace(v=jnp.pad(raw.v, [(0, 0)] * 3 + [(0, key_dim)]))
  d_state = jnp.concatenate([d_offset, d_transition], 3)
  identity = jnp.zeros_like(d_state).at[..., value_dim:].set(jnp.eye(key_dim))
  d_raw, _, _ = run_backward(
    call,
    (wide, identity, segment_ids, (None, None)),
    (jnp.zeros_like(wide.v), d_state),
  )
  return d_raw._replace(v=d_raw.v[..., :value_dim]), None


_affine_summary.defvjp(_affine_forward, _affine_backward)
