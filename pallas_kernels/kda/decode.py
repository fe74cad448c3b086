"""One token of Kimi Delta Attention, for sampling.

Legend: b batch, h value heads, k key width, v value width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import dispatch
from pallas_kernels.kda import api
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
    state: [B, HV, K, V] float32.
    a_log, dt_bias, lower_bound, scale, normalize_qk, activate_gate,
      activate_beta: as in `kda`; lower_bound=None is allowed.
    active: [B] bool; rows that are False keep their state bit for bit, yield
      zeros, and may hold anything. None: all rows are active.
    implementation: 'xla' or None.

  Returns:
    Output [B, HV, V] in the dtype of v, new state [B, HV, K, V].

  Raises:
    ValueError, TypeError, NotImplementedError: as `kda`.
  """
  one = lambda x: x[:, None]
  raw = kda_inputs.Raw(*map(one, (q, k, v, gate, beta)), a_log, dt_bias)
  api.check_arrays(raw, state, activate_gate)
  api.check_bound(lower_bound)
  if active is not None and (
    active.shape != q.shape[:1] or active.dtype != jnp.bool_
  ):
    raise ValueError(
      f'active is {active.dtype}{list(active.shape)}; it must be '
      f'bool[{q.shape[0]}], one per row of the batch.'
    )
  dispatch.choose('kda.decode_step', implementation, [('xla', None)])
  settings = kda_inputs.Settings(
    lower_bound,
    q.shape[-1] ** -0.5 if scale is None else float(scale),
    normalize_qk,
    activate_gate,
    activate_beta,
  )
  valid = None if active is None else active[:, None]
  x = kda_inputs.activate(raw, valid, settings)
  out, new_state = _update(
    jax.tree.map(lambda a: a[:, 0], x), state.astype(x.q.dtype), settings.scale
  )
  if active is not None:
    out = jnp.where(active[:, None, None], out, 0)
    new_state = jnp.where(active[:, None, None, None], new_state, state)
  return out.astype(v.dtype), new_state


def _update(x: kda_inputs.Activated, state_bhkv: jax.Array, scale: float):
  state_bhkv = jnp.exp(x.decay)[..., None] * state_bhkv
  sweep = lambda x_bhk: jnp.einsum(
    'bhk,bhkv->bhv', x_bhk, state_bhkv, precision=lax.Precision.HIGHEST
  )
  update_bhv = x.beta[..., None] * (x.v - sweep(x.k))
  alike_bh = jnp.sum(x.q * x.k, -1)
  out_bhv = scale * (sweep(x.q) + alike_bh[..., None] * update_bhv)
  return out_bhv, state_bhkv + x.k[..., None] * update_bhv[..., None, :]
