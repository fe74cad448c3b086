"""Gated multi-head latent attention without position encoding.

Legend: b batch, t query time, s key time, d model width, h heads, r latent
rank, n per-head key width, e width of the shared key slice, v value width.
Equations: Kimi K3 report, Eq. 7. The shared slice is K2's rotary slice, which
K3 never rotates but still uses: the softmax scale is 1/sqrt(n + e).
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from trimoe_jax import sharding
from trimoe_jax.config import MlaConfig, ModelConfig
from trimoe_jax.model.attention import causal_attention, fragment_attention
from trimoe_jax.model.cache import Span
from trimoe_jax.model.cached_attention import Form
from trimoe_jax.model.cached_attention import attend as attend_cache
from trimoe_jax.model.norm import rms_norm
from trimoe_jax.model.parameters import (
  Parameter,
  Table,
  declare,
  normal,
  ones,
)
from trimoe_jax.parallel import context

CACHE_AXES = {'latent': ('batch', None, None)}
PER_HEAD = ('batch', 'seq', 'heads', None)
TOKENS = ('batch', 'seq', None)
_SPAN = Span(start=(), valid=('batch',))


def mla_parameters(config: ModelConfig) -> Table:
  c, d = config.mla, config.width
  init = normal(config.init_std)
  into = ('embed', 'heads', None)
  up = ('rank', 'heads', None)
  kv = c.nope_dim + c.value_dim
  return {
    'query_down': Parameter((d, c.query_rank), ('embed', None), init),
    'query_norm': Parameter((c.query_rank,), (None,), ones),
    'query_up': Parameter((c.query_rank, c.heads, c.query_dim), up, init),
    'kv_down': Parameter((d, c.kv_rank + c.shared_dim), ('embed', None), init),
    'kv_norm': Parameter((c.kv_rank,), (None,), ones),
    'kv_up': Parameter((c.kv_rank, c.heads, kv), up, init),
    'gate': Parameter((d, c.heads, c.value_dim), into, init),
    'out': Parameter((c.heads, c.value_dim, d), ('heads', None, 'embed'), init),
  }


def mla_layer(
  params: Table,
  x_btd: jax.Array,
  config: ModelConfig,
  *,
  segment_ids: jax.Array | None = None,
  cache: dict[str, jax.Array] | None = None,
  span: Span | None = None,
  split: bool = False,
) -> tuple[jax.Array, dict[str, jax.Array] | None]:
  """W_o [sigmoid(W_g x) * softmax(q k^T / sqrt(n + e)) v], and the cache.

  Args:
    params: `mla_parameters`.
    x_btd: normalized input [B, T, d].
    config: the model's.
    segment_ids: [B, T] int32, 0 for padding; documents are isolated.
    cache: latent [B, S, r + e] of the tokens before, the shared slice last.
    span: where the new tokens lie in the cache; required with `cache`.
    split: the tokens lie over the context axis as `context.balance` puts them;
      without a cache.

  Returns:
    [B, T, d], and latent [B, T, r + e] of the new tokens for the cache, zero
    for padding (None without a cache).
  """
  query_bthn = _queries(params, x_btd, config)
  latents = _latents(params, x_btd, config)
  new = None if cache is None else _cached(latents, segment_ids)
  if split:
    out_bthv = _split(params, query_bthn, latents, config, segment_ids)
  elif cache is None or span.fresh:
    out_bthv = _expanded(params, query_bthn, latents, config, segment_ids)
  else:
    out_bthv = _continued(params, query_bthn, (cache, new), config, span)
  gate_dhv = sharding.use(params['gate'], x_btd.dtype, 'embed', 'heads', None)
  gate_bthv = sharding.einsum('btd,dhv->bthv', x_btd, gate_dhv, out=PER_HEAD)
  wide = out_bthv.dtype
  gated_bthv = out_bthv * jax.nn.sigmoid(gate_bthv.astype(wide))
  out_hvd = sharding.use(params['out'], x_btd.dtype, 'heads', None, 'embed')
  y_btd = sharding.einsum(
    'bthv,hvd->btd', gated_bthv.astype(x_btd.dtype), out_hvd, out=TOKENS
  )
  return y_btd, new


def _queries(params, x_btd, config):
  """Queries [B, T, H, n + e] through the normalized query latent."""
  down_dr = sharding.use(params['query_down'], x_btd.dtype, 'embed', None)
  up_rhn = sharding.use(params['query_up'], x_btd.dtype, 'rank', 'heads', None)
  low_btr = sharding.einsum('btd,dr->btr', x_btd, down_dr, out=TOKENS)
  low_btr = rms_norm(low_btr, params['query_norm'], config.latent_norm_eps)
  return sharding.einsum('btr,rhn->bthn', low_btr, up_rhn, out=PER_HEAD)


def _latents(params, x_btd, config):
  """The normalized key-value latent and the shared key slice, unnormalized."""
  rank = config.mla.kv_rank
  down_dr = sharding.use(params['kv_down'], x_btd.dtype, 'embed', None)
  both_btr = sharding.einsum('btd,dr->btr', x_btd, down_dr, out=TOKENS)
  latent_btr = rms_norm(
    both_btr[..., :rank], params['kv_norm'], config.latent_norm_eps
  )
  return latent_btr, both_btr[..., rank:]


def _cached(latents, segment_ids):
  """What the cache keeps of new tokens; zero for padding.

  A weight of zero alone would not silence a slot that is not finite.
  """
  both_btr = jnp.concatenate(latents, -1)
  if segment_ids is not None:
    both_btr = jnp.where((segment_ids > 0)[..., None], both_btr, 0)
  return {'latent': both_btr}


def _expanded(params, query_bthn, latents, config, segment_ids):
  """Attention with per-head keys and values: the form for many queries."""
  c = config.mla
  latent_bsr, shared_bse = latents
  up_rhn = sharding.use(
    params['kv_up'], latent_bsr.dtype, 'rank', 'heads', None
  )
  kv_bshn = sharding.einsum('bsr,rhn->bshn', latent_bsr, up_rhn, out=PER_HEAD)

  def attend(query_bthn, kv_bshn, shared_bse, segment_ids):
    return causal_attention(
      query_bthn,
      *_keys_and_values(kv_bshn, shared_bse, c),
      scale=c.query_dim**-0.5,
      segment_ids=segment_ids,
      block_size=c.block_size,
      implementation=c.implementation,
    )

  whole = ('batch', None, 'heads', None)  # every query sees all earlier keys
  attend = sharding.local(
    attend, inputs=(whole, whole, ('batch',), ('batch',)), outputs=whole
  )
  out_bthv = attend(query_bthn, kv_bshn, shared_bse, segment_ids)
  return sharding.constrain(out_bthv, *PER_HEAD)


def _split(params, query_bthn, latents, config, segment_ids):
  """The expanded form of tokens over the context axis.

  The latents are gathered, r + e numbers a token; a block of keys and values
  exists while queries meet it.
  """
  c = config.mla
  up_rhn = sharding.use(
    params['kv_up'], query_bthn.dtype, 'rank', 'heads', None
  )

  def expand(both_bsr, up_rhn):
    latent_bsr, shared_bse = jnp.split(both_bsr, [c.kv_rank], -1)
    kv_bshn = jnp.einsum('bsr,rhn->bshn', latent_bsr, up_rhn)
    return _keys_and_values(kv_bshn, shared_bse, c)

  def attend(query_bthn, up_rhn, both_btr, segment_ids):
    if segment_ids is not None:
      segment_ids = context.gather(segment_ids)
    batch, time = query_bthn.shape[:2]
    shape = (batch, context.FRAGMENTS, time // context.FRAGMENTS)
    out = fragment_attention(
      query_bthn.reshape(*shape, *query_bthn.shape[2:]),
      context.places(),
      context.gather(both_btr),
      up_rhn,
      expand,
      scale=c.query_dim**-0.5,
      segment_ids=segment_ids,
      block_size=c.block_size,
    )
    return out.reshape(batch, time, *out.shape[3:])

  tokens = ('batch', 'seq')
  attend = sharding.local(
    attend,
    inputs=(PER_HEAD, (None, 'heads'), tokens, tokens),
    outputs=PER_HEAD,
  )
  return attend(query_bthn, up_rhn, jnp.concatenate(latents, -1), segment_ids)


def _keys_and_values(kv_bshn, shared_bse, c):
  """Per-head keys, the shared slice appended, and values."""
  key_bshn, value_bshv = jnp.split(kv_bshn, [c.nope_dim], -1)
  shared_bshe = jnp.broadcast_to(
    shared_bse[:, :, None], (*key_bshn.shape[:3], c.shared_dim)
  )
  return jnp.concatenate([key_bshn, shared_bshe], -1), value_bshv


def _continued(params, query_bthn, rows, config, span):
  """Attention over a cache: in the latent space where queries are few."""
  c = config.mla
  up_rhn = sharding.use(
    params['kv_up'], query_bthn.dtype, 'rank', 'heads', None
  )

  def attend(query_bthn, up_rhn, rows, span):
    form = _absorbed if absorbs(c, query_bthn.shape[1]) else _by_head
    (form, finish), (cache, new) = form(query_bthn, up_rhn, c), rows
    return finish(attend_cache(form, cache, new, span))

  whole = ('batch', None, 'heads', None)
  attend = sharding.local(
    attend,
    inputs=(whole, (None, 'heads'), ('batch',), _SPAN),
    outputs=whole,
  )
  out_bthv = attend(query_bthn, up_rhn, rows, span)
  return sharding.constrain(out_bthv, *PER_HEAD)


def absorbs(c: MlaConfig, time: int) -> bool:
  """Whether `time` queries cost less over latents than over keys and values.

  Multiplications for each head and slot, the expansion included.
  """
  over_latents = time * (2 * c.kv_rank + c.shared_dim)
  by_head = time * (c.query_dim + c.value_dim)
  expansion = c.kv_rank * (c.nope_dim + c.value_dim)
  return over_latents <= by_head + expansion


def _absorbed(query_bthn, up_rhn, c):
  """The form over latents.

  score = (W_uk^T q) . latent + q_shared . shared; the value projection is
  applied once to the weighted latent.
  """
  dtype, einsum = query_bthn.dtype, _wide_einsum(query_bthn)
  key_rhn, value_rhv = jnp.split(up_rhn, [c.nope_dim], -1)
  nope_bthn, shared_bthe = jnp.split(query_bthn, [c.nope_dim], -1)
  query_bthr = einsum('bthn,rhn->bthr', nope_bthn, key_rhn).astype(dtype)
  query_bthr = jnp.concatenate([query_bthr, shared_bthe], -1)

  def score(rows):
    scale = c.query_dim**-0.5
    return scale * einsum('bthr,bsr->bhts', query_bthr, rows['latent'])

  def mix(p_bhts, rows):
    return einsum('bhts,bsr->bhtr', p_bhts.astype(dtype), rows['latent'])

  def finish(mixed_bhtr):
    mixed_bhtr = mixed_bhtr[..., : c.kv_rank].astype(dtype)
    return einsum('bhtr,rhv->bthv', mixed_bhtr, value_rhv)

  return Form(score, mix), finish


def _by_head(query_bthn, up_rhn, c):
  """The form over keys and values of each head, made a block at a time."""
  dtype, einsum = query_bthn.dtype, _wide_einsum(query_bthn)
  key_rhn, value_rhv = jnp.split(up_rhn, [c.nope_dim], -1)

  def score(rows):
    latent_bsr, shared_bse = jnp.split(rows['latent'], [c.kv_rank], -1)
    key_bshn = jnp.einsum('bsr,rhn->bshn', latent_bsr, key_rhn)
    shared_bshe = jnp.broadcast_to(
      shared_bse[:, :, None], (*key_bshn.shape[:3], c.shared_dim)
    )
    key_bshn = jnp.concatenate([key_bshn, shared_bshe], -1)
    return c.query_dim**-0.5 * einsum('bthn,bshn->bhts', query_bthn, key_bshn)

  def mix(p_bhts, rows):
    latent_bsr = rows['latent'][..., : c.kv_rank]
    value_bshv = jnp.einsum('bsr,rhv->bshv', latent_bsr, value_rhv)
    return einsum('bhts,bshv->bhtv', p_bhts.astype(dtype), value_bshv)

  return Form(score, mix), lambda out_bhtv: out_bhtv.swapaxes(1, 2)


def _wide_einsum(x):
  wide = jnp.promote_types(x.dtype, jnp.float32)
  return functools.partial(jnp.einsum, preferred_element_type=wide)


def mla_cache(
  config: ModelConfig, batch: int, length: int
) -> dict[str, jax.Array]:
  """The empty cache of one layer: r + e numbers for each of `length` tokens."""
  c, dtype = config.mla, jnp.dtype(config.dtype)
  latent = jnp.zeros((batch, length, c.kv_rank + c.shared_dim), dtype)
  return {'latent': sharding.constrain(latent, *CACHE_AXES['latent'])}


class Mla(nn.Module):
  """`mla_layer` with its own parameters."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x_btd, *, segment_ids=None, cache=None, span=None):
    return mla_layer(
      declare(self, mla_parameters(self.config)),
      x_btd,
      self.config,
      segment_ids=segment_ids,
      cache=cache,
      span=span,
    )
