"""What a KDA implementation starts from: activated inputs and documents.

Legend: b batch, t time, h query/key heads, k key width, v value width. Arrays
with as many heads as the state use the letter h too once q and k are repeated.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_NORM_EPS = 1e-6


class Settings(NamedTuple):
  """The static choices of one call; hashable, shared by implementations."""

  lower_bound: float | None
  scale: float
  normalize_qk: bool
  activate_gate: bool
  activate_beta: bool
  chunk_size: int = 64
  save: str = 'inputs'


class Raw(NamedTuple):
  """Arrays as the caller gave them; the last two may be None."""

  q: jax.Array  # [B, T, H, K]
  k: jax.Array  # [B, T, H, K]
  v: jax.Array  # [B, T, HV, V]
  gate: jax.Array  # [B, T, HV, K]
  beta: jax.Array  # [B, T, HV]
  a_log: jax.Array | None  # [HV]
  dt_bias: jax.Array | None  # [HV, K]


class Activated(NamedTuple):
  """q, k normalised and repeated to HV heads; log decay; beta; all wide."""

  q: jax.Array
  k: jax.Array
  v: jax.Array
  decay: jax.Array
  beta: jax.Array


class Documents(NamedTuple):
  """Packing of [B, T] rows.

  valid: False on padding rows.
  index: how many resets happened up to and including the row, so that it is 0
    in the document that the initial state enters; padding inherits it.
  reset: the state is zero before this row.
  """

  valid: jax.Array
  index: jax.Array
  reset: jax.Array


def wide(dtype) -> jnp.dtype:
  """The dtype of states and sums: float32, or float64 for float64 inputs."""
  return jnp.promote_types(dtype, jnp.float32)


def zero_state(raw: Raw) -> jax.Array:
  """Zeros [B, HV, K, V], sharded as the arguments are."""
  gate_bhk, v_bhv = raw.gate[:, 0], raw.v[:, 0]
  like = jnp.einsum('bhk,bhv->bhkv', gate_bhk, v_bhv)
  return jnp.zeros_like(like, dtype=wide(raw.q.dtype))


def equally_varying(tree):
  """`tree` with every array varying over the manual axes that any varies over.

  Inside `shard_map` a parameter is the same on every device while q is not.
  Casting the parameter here, outside the scans, also puts the sum of its
  gradient over devices outside them.
  """
  varying = lambda x: jax.typeof(x).manual_axis_type.varying
  axes = frozenset().union(*map(varying, jax.tree.leaves(tree)))

  def cast(x):
    missing = tuple(sorted(axes - varying(x)))
    return lax.pcast(x, missing, to='varying') if missing else x

  return jax.tree.map(cast, tree)


def documents(segment_ids: jax.Array) -> Documents:
  """Where documents begin, from ids [B, T] in which 0 is padding.

  A row resets the state when its id differs from the most recent id that is
  not padding; padding between two rows of one document changes nothing.
  """
  valid = segment_ids != 0
  time = lax.broadcasted_iota(jnp.int32, segment_ids.shape, 1)
  latest = lax.cummax(jnp.where(valid, time, -1), axis=1)
  before = jnp.pad(latest[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
  previous = jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=1)
  reset = valid & (before >= 0) & (segment_ids != previous)
  return Documents(valid, jnp.cumsum(reset.astype(jnp.int32), 1), reset)


def l2_normalize(x: jax.Array) -> jax.Array:
  """x * rsqrt(sum x^2 + 1e-6) over the last axis; eps inside the root."""
  return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + _NORM_EPS)


@jax.custom_jvp
def _sigmoid(x: jax.Array) -> jax.Array:
  """Sigmoid whose slope keeps its relative accuracy where it saturates."""
  return jax.nn.sigmoid(x)


@_sigmoid.defjvp
def _sigmoid_jvp(primals, tangents):
  (x,), (x_dot,) = primals, tangents
  # s (1 - s) would round 1 - s to a few digits once s is nearly 1.
  y = jax.nn.sigmoid(x)
  return y, x_dot * (y * jax.nn.sigmoid(-x))


def log_decay(gate, a_log, dt_bias, lower_bound: float | None) -> jax.Array:
  """Log decay of a raw gate [..., HV, K], in the dtype of the gate.

  With z = gate + dt_bias and a = exp(a_log) per head (1 if absent):
    lower_bound * sigmoid(a z)      bounded, Kimi K3 technical report
    -a * softplus(z)                lower_bound=None, Kimi Linear (2510.26692)
  """
  z = gate if dt_bias is None else gate + dt_bias.astype(gate.dtype)
  a = 1.0 if a_log is None else jnp.exp(a_log.astype(gate.dtype))[:, None]
  if lower_bound is None:
    return -a * jax.nn.softplus(z)
  return lower_bound * _sigmoid(a * z)


def _repeat_heads(x: jax.Array, group: int) -> jax.Array:
  # jnp.repeat would ask for a sharding when heads are sharded.
  shape = (*x.shape[:3], group, x.shape[-1])
  x = jnp.broadcast_to(x[:, :, :, None], shape)
  return x.reshape(*x.shape[:2], -1, x.shape[-1])


def activate(raw: Raw, valid, settings: Settings) -> Activated:
  """Inputs of the recurrence, with padding rows made neutral by selection.

  A padding row gets k = v = q = 0, decay 0 and beta 0, hence leaves the state
  as it is. Selection happens before any arithmetic, so that a NaN in padding
  reaches neither an output nor a gradient.
  """
  dtype = wide(raw.q.dtype)

  def masked(x):
    x = x.astype(dtype)
    if valid is None:
      return x
    return jnp.where(valid.reshape(valid.shape + (1,) * (x.ndim - 2)), x, 0)

  q, k, v, gate, beta = map(masked, raw[:5])
  if settings.normalize_qk:
    q, k = l2_normalize(q), l2_normalize(k)
  group = v.shape[2] // q.shape[2]
  if group > 1:
    q, k = (_repeat_heads(x, group) for x in (q, k))
  if settings.activate_gate:
    bound = settings.lower_bound
    gate = masked(log_decay(gate, raw.a_log, raw.dt_bias, bound))
  if settings.activate_beta:
    beta = masked(_sigmoid(beta))
  return Activated(q, k, v, gate, beta)
