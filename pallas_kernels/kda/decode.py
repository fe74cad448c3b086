"""One token of Kimi Delta Attention, for sampling.

Legend: b batch, h value heads, k key width, v value width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import dispatch
from pallas_kernels.kda import api, mosaic_gpu, mosaic_tpu_decode
from pallas_kernels.kda import inputs as kda_inputs


def decode_step(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  gate: jax.Array,
  beta: jax.Array,
  state: jax.Array,
  *,
  a_log: jax.Array | None = None,
  dt_bias: jax.Array | None = None,
  lower_bound: float | None = api.LOWEST_BOUND,
  scale: float | None = None,
  active: jax.Array | None = None,
  slots: jax.Array | None = None,
  normalize_qk: bool = True,
  activate_gate: bool = True,
  activate_beta: bool = True,
  implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Output and new state of one token per row of the batch.

  With S~ = Diag(exp(g)) S, both products of the state come from one sweep:
    p = k^T S~;  r = q^T S~;  e = beta (v - p)
    o = scale (r + (q . k) e);  S' = S~ + k e^T
  Same source and conventions as `kda`. All arithmetic is float32, beta and the
  gate included: a beta rounded to bfloat16 drifts over thousands of tokens.
  Donate `state` to have it updated in place.

  Args:
    q, k: [B, H, K]; v: [B, HV, V]; gate: [B, HV, K]; beta: [B, HV].
    state: [B, HV, K, V] float32; with `slots` a pool [N, HV, K, V] of them.
    a_log, dt_bias, lower_bound, scale, normalize_qk, activate_gate,
      activate_beta: as in `kda`; lower_bound=None is allowed.
    active: [B] bool; rows that are False keep their state bit for bit, yield
      zeros, and may hold anything. None: all rows are active.
    slots: [B] int32, where in the pool each row's state is; different numbers
      below N. A negative number is padding: the row yields zeros and no state
      is touched for it. Takes the place of `active`.
    implementation: 'mosaic_gpu', 'mosaic_tpu', 'xla' or None for the best on
      this device.

  Returns:
    Output [B, HV, V] in the dtype of v, and the new state or pool.

  Raises:
    ValueError, TypeError, NotImplementedError: as `kda`.
  """
  one = lambda x: x[:, None]
  raw = kda_inputs.Raw(*map(one, (q, k, v, gate, beta)), a_log, dt_bias)
  api.check_arrays(raw, state if slots is None else None, activate_gate)
  api.check_bound(lower_bound)
  _check_rows(active, slots, (q.shape[0], state.shape, v.shape, k.shape))
  token = raw._replace(q=q, k=k, v=v, gate=gate, beta=beta)
  name = dispatch.choose(
    'kda.decode_step', implementation, _candidates(token, state, lower_bound)
  )
  settings = kda_inputs.Settings(
    lower_bound,
    q.shape[-1] ** -0.5 if scale is None else float(scale),
    normalize_qk,
    activate_gate,
    activate_beta,
  )
  if name == 'mosaic_gpu':
    return _hopper_step(token, state, (active, slots), settings)
  if name == 'xla':
    if slots is None:
      return _step(raw, state, active, settings)
    return _pool_step(raw, state, slots, settings)
  if slots is None:
    slots = jnp.arange(q.shape[0], dtype=jnp.int32)
    slots = slots if active is None else jnp.where(active, slots, -1)
  return mosaic_tpu_decode.step(token, state, slots, settings)


def _candidates(token: kda_inputs.Raw, state, lower_bound):
  """Implementations in order, each with why it cannot run, or None."""
  hopper = mosaic_gpu.decode_refusal(
    token.q, token.k, token.v, token.gate, state, lower_bound=lower_bound
  )
  tpu = mosaic_tpu_decode.refusal(state)
  return [('mosaic_gpu', hopper), ('mosaic_tpu', tpu), ('xla', None)]


def _hopper_step(token: kda_inputs.Raw, state, rows, settings):
  active, slots = rows
  return mosaic_gpu.decode_mosaic_gpu(
    *(token.q, token.k, token.v, token.gate, token.beta, state),
    a_log=token.a_log,
    dt_bias=token.dt_bias,
    lower_bound=settings.lower_bound,
    scale=settings.scale,
    active=active,
    slots=slots,
    normalize_qk=settings.normalize_qk,
    activate_gate=settings.activate_gate,
    activate_beta=settings.activate_beta,
  )


def _check_rows(active, slots, shapes):
  """Raises ValueError for `active`, `slots` or a pool that do not fit."""
  batch, pool, values, keys = shapes
  if active is not None and slots is not None:
    raise ValueError(
      'active and slots are both given; mark padding by a negative slot.'
    )
  if active is not None and (
    active.shape != (batch,) or active.dtype != jnp.bool_
  ):
    raise ValueError(
      f'active is {active.dtype}{list(active.shape)}; it must be '
      f'bool[{batch}], one per row of the batch.'
    )
  if slots is None:
    return
  if slots.shape != (batch,) or not jnp.issubdtype(slots.dtype, jnp.integer):
    raise ValueError(
      f'slots is {slots.dtype}{list(slots.shape)}; it must be int32[{batch}], '
      'one per row of the batch.'
    )
  want = (values[1], keys[2], values[2])
  if len(pool) != 4 or pool[1:] != want:
    raise ValueError(
      f'state has shape {pool}; with slots it must be [N, *{want}], [N, HV, '
      'K, V].'
    )


def _pool_step(raw, pool, slots, settings):
  """`_step` on the states at `slots`, put back where they came from."""
  used = slots >= 0
  out, new = _step(raw, pool[jnp.maximum(slots, 0)], used, settings)
  # An index past the end is dropped; a negative one would count from the end.
  to = jnp.where(used, slots, pool.shape[0])
  return out, pool.at[to].set(new, mode='drop')


def _step(raw: kda_inputs.Raw, state, active, settings):
  """Output and state of one token a row, in plain JAX."""
  valid = None if active is None else active[:, None]
  x = kda_inputs.activate(raw, valid, settings)
  out, new_state = _update(
    jax.tree.map(lambda a: a[:, 0], x), state.astype(x.q.dtype), settings.scale
  )
  if active is not None:
    out = jnp.where(active[:, None, None], out, 0)
    new_state = jnp.where(active[:, None, None, None], new_state, state)
  return out.astype(raw.v.dtype), new_state


def _update(x: kda_inputs.Activated, state_bhkv: jax.Array, scale: float):
  state_bhkv = jnp.exp(x.decay)[..., None] * state_bhkv
  sweep = lambda x_bhk: jnp.einsum(
    'bhk,bhkv->bhv', x_bhk, state_bhkv, precision=lax.Precision.HIGHEST
  )
  update_bhv = x.beta[..., None] * (x.v - sweep(x.k))
  alike_bh = jnp.sum(x.q * x.k, -1)
  out_bhv = scale * (sweep(x.q) + alike_bh[..., None] * update_bhv)
  return out_bhv, state_bhkv + x.k[..., None] * update_bhv[..., None, :]
