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
from trimoe_jax.config import ModelConfig
from trimoe_jax.model.attention import causal_attention, fragment_attention
from trimoe_jax.model.cache import Span
from trimoe_jax.model.norm import rms_norm
from trimoe_jax.model.parameters import (
  Parameter,
  Table,
  declare,
  normal,
  ones,
)
from trimoe_jax.parallel import context

CACHE_AXES = {
  'latent': ('batch', None, None),
  'shared': ('batch', None, None),
}
PER_HEAD = ('batch', 'seq', 'heads', None)
TOKENS = ('batch', 'seq', None)


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
    cache: latent [B, S, r] and shared [B, S, e] of the tokens before; new
      tokens are written at `span.start`.
    span: where the new tokens lie in the cache; required with `cache`.
    split: the tokens lie over the context axis as `context.balance` puts them;
      without a cache.

  Returns:
    [B, T, d], and the cache with the new tokens (None without a cache).
  """
  query_bthn = _queries(params, x_btd, config)
  latents = _latents(params, x_btd, config)
  if cache is not None:
    cache = _extended(cache, latents, segment_ids, span)
  if split:
    out_bthv = _split(params, query_bthn, latents, config, segment_ids)
  elif cache is None or span.fresh:
    out_bthv = _expanded(params, query_bthn, latents, config, segment_ids)
  else:
    out_bthv = _absorbed(params, query_bthn, cache, config, span)
  gate_dhv = sharding.use(params['gate'], x_btd.dtype, 'embed', 'heads', None)
  gate_bthv = sharding.einsum('btd,dhv->bthv', x_btd, gate_dhv, out=PER_HEAD)
  wide = out_bthv.dtype
  gated_bthv = out_bthv * jax.nn.sigmoid(gate_bthv.astype(wide))
  out_hvd = sharding.use(params['out'], x_btd.dtype, 'heads', None, 'embed')
  y_btd = sharding.einsum(
    'bthv,hvd->btd', gated_bthv.astype(x_btd.dtype), out_hvd, out=TOKENS
  )
  return y_btd, cache


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


def _extended(cache, latents, segment_ids, span):
  """The cache with new latents; those of padding are zero.

  A weight of zero alone would not silence a slot that is not finite.
  """
  if segment_ids is not None:
    real_bt = segment_ids > 0
    latents = [jnp.where(real_bt[..., None], x_btr, 0) for x_btr in latents]
  new = zip(('latent', 'shared'), latents)
  return {name: span.write(cache[name], x_btr) for name, x_btr in new}


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


def _absorbed(params, query_bthn, cache, config, span):
  """Attention in the latent space: the form for few queries and a cache.

  score = (W_uk^T q) . latent + q_shared . shared; the value projection is
  applied once to the weighted latent.
  """
  up_rhn = sharding.use(
    params['kv_up'], query_bthn.dtype, 'rank', 'heads', None
  )
  whole = ('batch', None, 'heads', None)
  attend = sharding.local(
    lambda *args: _attend_latents(*args, config=config),
    inputs=(whole, (None, 'heads'), ('batch',), ('batch',)),
    outputs=whole,
  )
  visible_bts = span.visible(query_bthn.shape[1])
  out_bthv = attend(query_bthn, up_rhn, cache, visible_bts)
  return sharding.constrain(out_bthv, *PER_HEAD)


def _attend_latents(query_bthn, up_rhn, cache, visible_bts, *, config):
  """Attention of one device's sequences and heads over the latents."""
  c, dtype = config.mla, query_bthn.dtype
  wide = jnp.promote_types(dtype, jnp.float32)
  einsum = functools.partial(jnp.einsum, preferred_element_type=wide)
  latent_bsr, shared_bse = cache['latent'], cache['shared']
  key_rhn, value_rhv = jnp.split(up_rhn, [c.nope_dim], -1)
  nope_bthn, shared_bthe = jnp.split(query_bthn, [c.nope_dim], -1)
  query_bthr = einsum('bthn,rhn->bthr', nope_bthn, key_rhn).astype(dtype)
  score_bhts = einsum('bthr,bsr->bhts', query_bthr, latent_bsr)
  score_bhts += einsum('bthe,bse->bhts', shared_bthe, shared_bse)
  score_bhts = jnp.where(
    visible_bts[:, None], score_bhts * c.query_dim**-0.5, -jnp.inf
  )
  weight_bhts = jax.nn.softmax(score_bhts, -1).astype(dtype)
  mixed_bthr = einsum('bhts,bsr->bthr', weight_bhts, latent_bsr).astype(dtype)
  return einsum('bthr,rhv->bthv', mixed_bthr, value_rhv)


def mla_cache(
  config: ModelConfig, batch: int, length: int
) -> dict[str, jax.Array]:
  """The empty cache of one layer: r + e numbers for each of `length` tokens."""
  c, dtype = config.mla, jnp.dtype(config.dtype)
  widths = {'latent': c.kv_rank, 'shared': c.shared_dim}
  return {
    name: sharding.constrain(
      jnp.zeros((batch, length, width), dtype), *CACHE_AXES[name]
    )
    for name, width in widths.items()
  }


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
