"""Kimi Delta Attention layer: projections, short convolutions, gate, output.

Legend: b batch, t time, d model width, h heads, k key width, v value width,
r gate rank, s projections that one product makes, w convolution taps.
Equations: Kimi K3 report, section 2.1, and Kimi Linear, arXiv 2510.26692.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels.kda import (
  affine_summary,
  decode_step,
  gated_norm,
  kda,
  short_convolutions,
)
from trimoe_jax import sharding
from trimoe_jax.config import ModelConfig
from trimoe_jax.model.parameters import (
  Parameter,
  Table,
  declare,
  normal,
  ones,
  uniform,
  zeros,
)
from trimoe_jax.parallel import context

# What the recurrence keeps for its gradient. States spare a second pass over
# them; everything is kept where it lives no longer than the layer's gradient.
_SAVE = {'none': 'state', 'block': 'state', 'full': 'state_and_t'}

CACHE_AXES = {
  'state': ('batch', 'heads', None, None),
  'query_tail': ('batch', None, 'heads', None),
  'key_tail': ('batch', None, 'heads', None),
  'value_tail': ('batch', None, 'heads', None),
}


def dt_bias_init(u: jax.Array) -> jax.Array:
  """softplus^-1(dt) with dt = exp(U(ln 1e-3, ln 0.1)), at least 1e-4.

  With A_log = 0 the first log-decays lie between -0.48 and -0.005.
  """
  low, high = jnp.log(1e-3), jnp.log(0.1)
  dt = jnp.exp(low + (high - low) * (u + 1) / 2)
  dt = jnp.maximum(dt, 1e-4)
  return dt + jnp.log(-jnp.expm1(-dt))


def kda_parameters(config: ModelConfig) -> Table:
  c, d = config.kda, config.width
  h, hv, k, v = c.heads, c.state_heads, c.key_dim, c.value_dim
  init = normal(config.init_std)
  tap = uniform(c.conv_width**-0.5)  # fan-in of a depthwise convolution
  into = ('embed', 'heads', None)
  head = ('heads', None)
  return {
    'query': Parameter((d, h, k), into, init),
    'key': Parameter((d, h, k), into, init),
    'value': Parameter((d, hv, v), into, init),
    'query_conv': Parameter((h, k, c.conv_width), (*head, None), tap),
    'key_conv': Parameter((h, k, c.conv_width), (*head, None), tap),
    'value_conv': Parameter((hv, v, c.conv_width), (*head, None), tap),
    'decay_down': Parameter((d, c.gate_rank), ('embed', None), init),
    'decay_up': Parameter((c.gate_rank, hv, k), ('rank', *head), init),
    'a_log': Parameter((hv,), ('heads',), zeros),
    'dt_bias': Parameter((hv, k), head, dt_bias_init),
    'beta': Parameter((d, hv), ('embed', 'heads'), init),
    'gate': Parameter((d, hv, v), into, init),
    'out_norm': Parameter((v,), (None,), ones),
    'out': Parameter((hv, v, d), ('heads', None, 'embed'), init),
  }


def short_conv(
  x_btshk: jax.Array,
  w_shkw: jax.Array,
  segment_ids: jax.Array | None,
  tail: jax.Array | None,
  tail_ids: jax.Array | None = None,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
  """SiLU(sum_j w[., j] x[t - W + 1 + j]) and the last W - 1 inputs.

  A causal depthwise convolution, tap W - 1 on the current token, of S inputs
  side by side.

  Args:
    x_btshk: inputs [B, T, S, H, K].
    w_shkw: taps [S, H, K, W].
    segment_ids: [B, T] int32; a tap never reaches into another document.
    tail: [B, W - 1, S, H, K], the inputs before the first; None for zeros.
    tail_ids: [B, W - 1], their documents. None for that of the first token that
      is not padding: the tail moves behind the padding that comes first.

  Returns:
    S arrays [B, T, H, K] in x's dtype, accumulated in float32, and the next
    tail.
  """
  batch, time = x_btshk.shape[:2]
  reach = w_shkw.shape[-1] - 1
  silenced = _silenced(x_btshk, segment_ids)
  if tail is None:
    zeros = jnp.zeros((batch, reach, *x_btshk.shape[2:]), x_btshk.dtype)
    padded = jnp.concatenate([zeros, silenced], 1)
    return short_convolutions(x_btshk, w_shkw, segment_ids), padded[:, time:]
  tail = tail.astype(x_btshk.dtype)
  padded, ids = jnp.concatenate([tail, silenced], 1), None
  if segment_ids is not None and tail_ids is None:
    padded, ids = _behind_padding(tail, silenced, segment_ids)
  elif segment_ids is not None:
    ids = jnp.concatenate([tail_ids, segment_ids], 1)
  ys = short_convolutions(padded, w_shkw, ids)
  return tuple(y_bthk[:, reach:] for y_bthk in ys), padded[:, time:]


def _behind_padding(tail_bwshk, x_btshk, segment_ids):
  """Tail and inputs in a row, padding before the tail, and their documents."""
  reach = tail_bwshk.shape[1]
  first_b1 = jnp.argmax(segment_ids > 0, 1)[:, None]
  first_b1 = jnp.where(
    segment_ids.max(1)[:, None] > 0, first_b1, x_btshk.shape[1]
  )
  at_bt = jnp.arange(reach + x_btshk.shape[1]) - first_b1
  in_tail_bt = (at_bt >= 0) & (at_bt < reach)
  wide = lambda at: at[..., None, None, None]
  take = lambda x, at: jnp.take_along_axis(x, wide(at), axis=1)
  moved = take(tail_bwshk, jnp.clip(at_bt, 0, reach - 1))
  nothing = ((0, 0), (reach, 0))
  padded = jnp.pad(x_btshk, (*nothing, *[(0, 0)] * 3))
  ids = jnp.pad(segment_ids, nothing)
  id_b1 = jnp.take_along_axis(
    segment_ids, jnp.minimum(first_b1, x_btshk.shape[1] - 1), axis=1
  )
  return (
    jnp.where(wide(in_tail_bt), moved, padded),
    jnp.where(in_tail_bt, id_b1, ids),
  )


def _joint(config: ModelConfig) -> tuple[tuple[str, ...], ...]:
  """Which projections one product makes: those of equal shapes."""
  c = config.kda
  if (c.state_heads, c.value_dim) == (c.heads, c.key_dim):
    return (('query', 'key', 'value'),)
  return ('query', 'key'), ('value',)


def _convolved(inputs, tail_of, segment_ids, tail_ids=None):
  """Queries, keys and values behind their convolutions, and their tails.

  `tail_of(x, names)` is the tail before the joint input x.
  """
  mixed, tails = [], {}
  for names, x in inputs['joint'].items():
    w_shkw = jnp.stack([inputs[f'{name}_conv'] for name in names])
    tail = tail_of(x, names)
    ys, last = short_conv(x, w_shkw, segment_ids, tail, tail_ids)
    mixed += ys
    tails |= {f'{name}_tail': last[:, :, i] for i, name in enumerate(names)}
  return mixed, tails


def _cached_tail(cache, names):
  """[B, W - 1, S, H, K] of a cache, None of an empty one."""
  if not cache:
    return None
  return jnp.stack([cache[f'{name}_tail'] for name in names], 2)


def _mix_tokens(inputs: dict[str, Any], config: ModelConfig, waits: bool):
  """Convolutions and the recurrence on one device's heads."""
  cache, ids = inputs['cache'] or {}, inputs['segment_ids']
  tail_ids = None
  if ids is not None and not waits:
    reach = config.kda.conv_width - 1
    tail_ids = jnp.broadcast_to(ids[:, :1], (ids.shape[0], reach))
  tail_of = lambda x, names: _cached_tail(cache, names)
  mixed, tails = _convolved(inputs, tail_of, ids, tail_ids)
  tokens = (*mixed, inputs['decay'], inputs['beta'])
  out_bthv, state = _recur(tokens, inputs, cache.get('state'), config)
  return out_bthv, {'state': state, **tails}


def _silenced(x_btshk, segment_ids):
  """Zeros where there is padding: a tail is kept without its documents."""
  if segment_ids is None:
    return x_btshk
  return jnp.where((segment_ids > 0)[..., None, None, None], x_btshk, 0)


def _recur(tokens, inputs, state_bhkv, config: ModelConfig):
  """The recurrence; a single token that continues a state takes one step."""
  segment_ids = inputs['segment_ids']
  if state_bhkv is None or tokens[0].shape[1] != 1:
    return _chunks(tokens, inputs, segment_ids, state_bhkv, config)
  active_b = None if segment_ids is None else segment_ids[:, 0] > 0
  first = (x[:, 0] for x in tokens)
  gate = _gate(inputs, config)
  out_bhv, state_bhkv = decode_step(*first, state_bhkv, **gate, active=active_b)
  return out_bhv[:, None], state_bhkv


def _gate(inputs, config: ModelConfig):
  return {
    'a_log': inputs['a_log'],
    'dt_bias': inputs['dt_bias'],
    'lower_bound': config.kda.lower_bound,
  }


def _chunks(tokens, inputs, segment_ids, state_bhkv, config: ModelConfig):
  return kda(
    *tokens,
    **_gate(inputs, config),
    initial_state=state_bhkv,
    segment_ids=segment_ids,
    chunk_size=config.kda.chunk_size,
    save=_SAVE[config.remat],
    implementation=config.kda.implementation,
  )


def _mix_fragments(inputs: dict[str, Any], config: ModelConfig):
  """`_mix_tokens` of one device's fragments of its sequences."""
  cache, ids_bt = inputs['cache'] or {}, inputs['segment_ids']
  by_fragment = lambda x: None if x is None else context.fragments(x)
  ids = by_fragment(ids_bt)
  reach = config.kda.conv_width - 1
  tail_ids = None
  if ids is not None:
    first = jnp.broadcast_to(ids_bt[:, :1], (ids_bt.shape[0], reach))
    tail_ids = context.halo(ids, first)

  def tail_of(x_btshk, names):
    first = _cached_tail(cache, names)
    if first is None:
      sequences = inputs['decay'].shape[0]
      shape = (sequences, reach, *x_btshk.shape[2:])
      first = jnp.zeros(shape, x_btshk.dtype)
    return context.halo(_silenced(x_btshk, ids), first)

  joint = {n: by_fragment(x) for n, x in inputs['joint'].items()}
  fragments = inputs | {'joint': joint}
  mixed, tails = _convolved(fragments, tail_of, ids, tail_ids)
  tails = {name: context.from_last(x) for name, x in tails.items()}
  mixed += [by_fragment(inputs['decay']), by_fragment(inputs['beta'])]
  maps = affine_summary(
    *mixed[1:],
    **_gate(inputs, config),
    segment_ids=ids,
    chunk_size=config.kda.chunk_size,
    implementation=config.kda.implementation,
  )
  entering, final = context.entering_states(*maps, cache.get('state'), ids)
  out, _ = _chunks(mixed, inputs, ids, entering, config)
  return context.tokens(out), {'state': final, **tails}


def kda_layer(
  params: Table,
  x_btd: jax.Array,
  config: ModelConfig,
  *,
  segment_ids: jax.Array | None = None,
  cache: dict[str, jax.Array] | None = None,
  split: bool = False,
  waits: bool = False,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """W_o [sigmoid(W_g x) * RMSNorm(KDA(x))], and the recurrent cache.

  Queries, keys and values pass a short convolution and SiLU; queries and keys
  are L2-normalized per head; the log-decay is
  lower_bound * sigmoid(exp(A_log) * (W_up W_down x + dt_bias)) per channel and
  the write strength sigmoid(W_beta x) per head.

  Args:
    params: `kda_parameters`.
    x_btd: normalized input [B, T, d].
    config: the model's.
    segment_ids: [B, T] int32, 0 for padding; documents are isolated.
    cache: `CACHE_AXES` arrays of the tokens before, or None at the start.
    split: the tokens lie over the context axis as `context.balance` puts them.
    waits: padding before the first token is none of the sequence, which goes on
      behind it; not with `split`.

  Returns:
    [B, T, d], and the cache after the last token.
  """
  dtype = x_btd.dtype
  weight = lambda name, *axes: sharding.use(params[name], dtype, *axes)
  per_head = ('batch', 'seq', 'heads', None)
  joint_heads = ('batch', 'seq', None, 'heads', None)

  def project(names):
    weights = [weight(name, 'embed', 'heads', None) for name in names]
    w_dshk = jnp.stack(weights, 1)
    return sharding.einsum('btd,dshk->btshk', x_btd, w_dshk, out=joint_heads)

  low_btr, beta_bth = _low_and_beta(weight, x_btd)
  up_rhk = weight('decay_up', 'rank', 'heads', None)
  inputs = {
    'joint': {names: project(names) for names in _joint(config)},
    'decay': sharding.einsum('btr,rhk->bthk', low_btr, up_rhk, out=per_head),
    'beta': beta_bth,
    **{n: params[n] for n in ('query_conv', 'key_conv', 'value_conv')},
    'a_log': params['a_log'],
    'dt_bias': params['dt_bias'],
    'segment_ids': segment_ids,
    'cache': cache,
  }
  # In one piece the recurrence needs every token.
  whole = per_head if split else ('batch', None, 'heads', None)
  names = {'joint': (*whole[:2], None, *whole[2:]), 'decay': whole}
  names |= {n: ('heads',) for n in inputs if n.endswith('_conv')}
  names |= {'beta': whole[:3], 'a_log': ('heads',), 'dt_bias': ('heads',)}
  names |= {'segment_ids': whole[:2], 'cache': cache and CACHE_AXES}
  function = functools.partial(_mix_tokens, waits=waits)
  function = _mix_fragments if split else function
  mix = sharding.local(
    lambda tree: function(tree, config),
    inputs=(names,),
    outputs=(whole, CACHE_AXES),
  )
  out_bthv, cache = mix(inputs)
  gate_dhv = weight('gate', 'embed', 'heads', None)
  gate_bthv = sharding.einsum('btd,dhv->bthv', x_btd, gate_dhv, out=per_head)
  norm = sharding.local(
    functools.partial(gated_norm, eps=config.norm_eps),
    inputs=(per_head, per_head, (None,)),
    outputs=per_head,
  )
  gated = norm(out_bthv, gate_bthv, params['out_norm'])
  out_hvd = weight('out', 'heads', None, 'embed')
  y_btd = sharding.einsum(
    'bthv,hvd->btd', gated, out_hvd, out=('batch', 'seq', None)
  )
  return y_btd, cache


def _low_and_beta(weight, x_btd):
  """The decay's low rank [B, T, r] and beta's logits [B, T, H].

  Two narrow products that mostly read x; in one where heads are not sharded.
  The barrier keeps XLA from making the gate in the same one, which would copy
  the gate's gradient to where this one's is.
  """
  x_btd = jax.lax.optimization_barrier(x_btd)
  down_dr = weight('decay_down', 'embed', None)
  beta_dh = weight('beta', 'embed', 'heads')
  rows, heads = ('batch', 'seq', None), ('batch', 'seq', 'heads')
  if sharding.axis_ways('heads') > 1:
    low_btr = sharding.einsum('btd,dr->btr', x_btd, down_dr, out=rows)
    return low_btr, sharding.einsum('btd,dh->bth', x_btd, beta_dh, out=heads)
  beta_dh = sharding.constrain(beta_dh, None, None)  # says so at size 1 too
  joint_dr = jnp.concatenate([down_dr, beta_dh], 1)
  joint_btr = sharding.einsum('btd,dr->btr', x_btd, joint_dr, out=rows)
  rank = down_dr.shape[1]
  return joint_btr[..., :rank], joint_btr[..., rank:]


def kda_cache(config: ModelConfig, batch: int) -> dict[str, jax.Array]:
  """The empty cache of one layer: a float32 state and three input tails."""
  c, dtype = config.kda, jnp.dtype(config.dtype)
  wide = jnp.promote_types(dtype, jnp.float32)
  tail = (batch, c.conv_width - 1)
  state = (batch, c.state_heads, c.key_dim, c.value_dim)
  cache = {
    'state': jnp.zeros(state, wide),
    'query_tail': jnp.zeros((*tail, c.heads, c.key_dim), dtype),
    'key_tail': jnp.zeros((*tail, c.heads, c.key_dim), dtype),
    'value_tail': jnp.zeros((*tail, c.state_heads, c.value_dim), dtype),
  }
  return {k: sharding.constrain(x, *CACHE_AXES[k]) for k, x in cache.items()}


class Kda(nn.Module):
  """`kda_layer` with its own parameters."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x_btd, *, segment_ids=None, cache=None):
    params = declare(self, kda_parameters(self.config))
    return kda_layer(
      params, x_btd, self.config, segment_ids=segment_ids, cache=cache
    )
