"""One-token kernel of Kimi Delta Attention for TPUs, in Pallas Mosaic TPU.

Legend: b batch, h heads, k key width, v value width; a suffix 1 is a broadcast
axis.

Grid (groups of heads, rows of the batch): one read and one write of each state,
everything else stays on the chip. The pool of states is updated in place. A row
without a slot asks for the block of the row before it, which is in VMEM
already, and leaves it alone: nothing is read or written for it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda import inputs as kda_inputs
from pallas_kernels.kda.mosaic_tpu_forward import VMEM_LIMIT

# State bytes of a grid step: a longer step hides its start, two of them in
# flight both ways stay far below the VMEM of every generation.
_STEP_BYTES = 2**20


def refusal(state) -> str | None:
  """Why the kernel cannot run where a trace is for, or None."""
  if not pltpu.is_tpu_device():
    return 'the TPU kernels need a TPU'
  if state.dtype != jnp.float32:
    return f'the TPU kernels take a float32 state, not {state.dtype}'
  return None


def step(
  raw: kda_inputs.Raw,
  state: jax.Array,
  slots: jax.Array,
  settings: kda_inputs.Settings,
  interpret=False,
) -> tuple[jax.Array, jax.Array]:
  """Output [B, HV, V] and the pool with the states of the rows advanced.

  Args:
    raw: arrays of one token, [B, H, K] and so on; parameters may be None.
    state: [N, HV, K, V] float32, the pool; donate it.
    slots: [B] int32, different numbers below N; negative is padding.
    settings: as for `kda`; lower_bound may be None.
    interpret: run on any device: True, or `pltpu.InterpretParams`.
  """
  batch, value_heads, value_dim = raw.v.shape
  key_heads, key_dim = raw.q.shape[1:]
  group = value_heads // key_heads
  heads = heads_of(value_heads, group, 4 * key_dim * value_dim)
  groups = value_heads // heads
  split = lambda x, *shape: x.reshape(batch, groups, *shape)
  affine_2ghk = jnp.stack(_affine(raw)).reshape(2, groups, heads, key_dim)
  given = (
    split(raw.q, heads // group, key_dim),
    split(raw.k, heads // group, key_dim),
    split(raw.v, heads, value_dim),
    split(raw.gate, heads, key_dim),
    split(raw.beta, heads, 1),
    affine_2ghk,
  )
  own = lambda rows, width: pl.BlockSpec(
    (1, 1, rows, width), lambda h, b, *_: (b, h, 0, 0)
  )
  shared = pl.BlockSpec((2, 1, heads, key_dim), lambda h, b, *_: (0, h, 0, 0))
  pool = pl.BlockSpec(
    (1, heads, key_dim, value_dim), lambda h, b, _, at: (at[b], h, 0, 0)
  )
  vary = jax.typeof(state).manual_axis_type
  shape = functools.partial(jax.ShapeDtypeStruct, manual_axis_type=vary)
  specs = [
    own(heads // group, key_dim),
    own(heads // group, key_dim),
    own(heads, value_dim),
    own(heads, key_dim),
    own(heads, 1),
    shared,
  ]
  slots = slots.astype(jnp.int32)
  out, state = pl.pallas_call(
    functools.partial(_kernel, settings=settings, group=group),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(groups, batch),
      in_specs=[*specs, pool],
      out_specs=[own(heads, value_dim), pool],
    ),
    out_shape=[
      shape((batch, groups, heads, value_dim), raw.v.dtype),
      shape(state.shape, state.dtype),
    ],
    input_output_aliases={8: 1},
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary'),
      vmem_limit_bytes=VMEM_LIMIT,
    ),
    interpret=interpret,
    name='kda_decode',
  )(slots, _resident(slots), *given, state)
  return out.reshape(raw.v.shape), state


def heads_of(value_heads: int, group: int, state_bytes: int) -> int:
  """Value heads of a grid step: whole key heads, about a megabyte."""
  most = max(1, _STEP_BYTES // state_bytes)
  fits = lambda n: value_heads % n == 0 and n % group == 0
  return max((n for n in range(1, most + 1) if fits(n)), default=group)


def _affine(raw: kda_inputs.Raw) -> tuple[jax.Array, jax.Array]:
  """exp(a_log) and dt_bias per head and channel, [HV, K] float32."""
  shape = raw.gate.shape[1:]
  slope, bias = jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32)
  if raw.a_log is not None:
    slope *= jnp.exp(raw.a_log.astype(jnp.float32))[:, None]
  if raw.dt_bias is not None:
    bias += raw.dt_bias.astype(jnp.float32)
  return slope, bias


def _resident(slots) -> jax.Array:
  """The slot whose block each row finds in VMEM.

  Its own; without one, that of the latest row with one, else of the first.
  """
  used = slots >= 0
  rows = jnp.arange(slots.shape[0])
  latest = lax.cummax(jnp.where(used, rows, -1))
  first = jnp.argmax(used)
  return jnp.maximum(slots[jnp.where(latest < 0, first, latest)], 0)


def _kernel(slots_ref, resident_ref, *refs, settings, group: int):
  q_ref, k_ref, v_ref, gate_ref, beta_ref, affine_ref, *refs = refs
  state_ref, out_ref, new_ref = refs
  row = pl.program_id(1)
  used = slots_ref[row] >= 0

  @pl.when(jnp.logical_not(used))
  def _():
    out_ref[...] = jnp.zeros_like(out_ref)

  # Only where no row at all has a slot is a block written that no row owns.
  @pl.when(jnp.logical_not(used) & (row == 0))
  def _():
    new_ref[...] = state_ref[...]

  @pl.when(used)
  def _():
    wide = lambda ref: ref[0, 0].astype(jnp.float32)
    q_hk, k_hk, v_hv = wide(q_ref), wide(k_ref), wide(v_ref)
    if settings.normalize_qk:
      q_hk, k_hk = kda_inputs.l2_normalize(q_hk), kda_inputs.l2_normalize(k_hk)
    decay_hk = _decay(wide(gate_ref), affine_ref[:, 0], settings)
    beta_h1 = wide(beta_ref)
    if settings.activate_beta:
      beta_h1 = jax.nn.sigmoid(beta_h1)
    alike_h1 = jnp.sum(q_hk * k_hk, 1, keepdims=True)
    turned = [x.T for x in (q_hk, k_hk, decay_hk)]
    outs = []
    for h in range(v_hv.shape[0]):
      column = lambda i, at, turned=turned: turned[i][:, at : at + 1]
      q_k1, k_k1 = column(0, h // group), column(1, h // group)
      state_kv = column(2, h) * state_ref[0, h]
      sweep = lambda x_k1, state_kv=state_kv: jnp.sum(
        x_k1 * state_kv, 0, keepdims=True
      )
      at = slice(h, h + 1)
      update_1v = beta_h1[at] * (v_hv[at] - sweep(k_k1))
      shared = slice(h // group, h // group + 1)
      outs.append(sweep(q_k1) + alike_h1[shared] * update_1v)
      new_ref[0, h] = state_kv + k_k1 * update_1v
    out_hv = settings.scale * jnp.concatenate(outs, 0)
    out_ref[0, 0] = out_hv.astype(out_ref.dtype)


def _decay(gate_hk, affine_2hk, settings) -> jax.Array:
  """exp of the log decay of `kda_inputs.log_decay`, [heads, K]."""
  if not settings.activate_gate:
    return jnp.exp(gate_hk)
  slope_hk, z_hk = affine_2hk[0], gate_hk + affine_2hk[1]
  if settings.lower_bound is not None:
    return jnp.exp(settings.lower_bound * jax.nn.sigmoid(slope_hk * z_hk))
  soft = jnp.maximum(z_hk, 0) + jnp.log1p(jnp.exp(-jnp.abs(z_hk)))
  return jnp.exp(-slope_hk * soft)
