"""Standard multi-head attention: the peer that KDA and MLA are compared with.

Every head has a key and a value of its own for every token, so the cache grows
by heads (k + v) numbers a token. The output gate is that of the other mixers,
the sizes are KDA's, and there is no position encoding. No configuration of a
model uses it; `FullAttention` puts it into every layer of one.

Legend: b batch, t query time, s key time, d model width, h heads, k key width,
v value width.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from trimoe_jax import sharding
from trimoe_jax.config import ModelConfig
from trimoe_jax.model.attention import causal_attention
from trimoe_jax.model.cache import Span
from trimoe_jax.model.cached_attention import Form, attend
from trimoe_jax.model.layout import Unrolled
from trimoe_jax.model.parameters import Parameter, Table, normal

PER_HEAD = ('batch', 'seq', 'heads', None)


@dataclasses.dataclass(frozen=True)
class FullAttention(Unrolled):
  """A model's configuration with multi-head attention in every layer."""

  def mixer(self, layer: int) -> str:
    del layer
    return 'mha'


def mha_parameters(config: ModelConfig) -> Table:
  c, d = config.kda, config.width
  init = normal(config.init_std)
  into = ('embed', 'heads', None)
  h, k, v = c.state_heads, c.key_dim, c.value_dim
  return {
    'query': Parameter((d, h, k), into, init),
    'key': Parameter((d, h, k), into, init),
    'value': Parameter((d, h, v), into, init),
    'gate': Parameter((d, h, v), into, init),
    'out': Parameter((h, v, d), ('heads', None, 'embed'), init),
  }


def mha_layer(
  params: Table,
  x_btd: jax.Array,
  config: ModelConfig,
  *,
  segment_ids: jax.Array | None = None,
  cache: dict[str, jax.Array] | None = None,
  span: Span | None = None,
  split: bool = False,
) -> tuple[jax.Array, dict[str, jax.Array] | None]:
  """W_o [sigmoid(W_g x) * softmax(q k^T / sqrt(k)) v], and the cache.

  Args:
    params: `mha_parameters`.
    x_btd: normalized input [B, T, d].
    config, segment_ids, span: as for `mla_layer`.
    cache: keys [B, H, S, K] and values [B, H, S, V] of the tokens before.
    split: not supported.

  Returns:
    [B, T, d], and keys and values [B, H, T, .] of the new tokens.
  """
  if split:
    raise NotImplementedError('mha: sequences over the context axis.')

  def project(name):
    w_dhk = sharding.use(params[name], x_btd.dtype, 'embed', 'heads', None)
    return sharding.einsum('btd,dhk->bthk', x_btd, w_dhk, out=PER_HEAD)

  query, key, value = (project(name) for name in ('query', 'key', 'value'))
  scale, new = config.kda.key_dim**-0.5, None
  if cache is not None:
    if segment_ids is not None:
      live = (segment_ids > 0)[..., None, None]
      key, value = jnp.where(live, key, 0), jnp.where(live, value, 0)
    new = {'keys': key.swapaxes(1, 2), 'values': value.swapaxes(1, 2)}
  if cache is None or span.fresh:
    out = causal_attention(
      query, key, value, scale=scale, segment_ids=segment_ids
    )
  else:
    out = _continued(query * scale, (cache, new), span)
  gate = jax.nn.sigmoid(project('gate').astype(out.dtype))
  gated_bthv = (out * gate).astype(x_btd.dtype)
  out_hvd = sharding.use(params['out'], x_btd.dtype, 'heads', None, 'embed')
  y_btd = sharding.einsum(
    'bthv,hvd->btd', gated_bthv, out_hvd, out=('batch', 'seq', None)
  )
  return y_btd, new


def _continued(query_bthk, rows, span):
  wide = jnp.promote_types(query_bthk.dtype, jnp.float32)
  by_slot = lambda x: x.swapaxes(1, 2)  # a view: `attend` has slots second

  def score(rows):
    return jnp.einsum(
      'bthk,bshk->bhts', query_bthk, rows['keys'], preferred_element_type=wide
    )

  def mix(p_bhts, rows):
    p_bhts = p_bhts.astype(query_bthk.dtype)
    return jnp.einsum(
      'bhts,bshv->bhtv', p_bhts, rows['values'], preferred_element_type=wide
    )

  cache, new = jax.tree.map(by_slot, rows)
  return attend(Form(score, mix), cache, new, span).swapaxes(1, 2)


def mha_cache(
  config: ModelConfig, batch: int, length: int
) -> dict[str, jax.Array]:
  """The empty cache of one layer: heads (k + v) numbers a token."""
  c, dtype = config.kda, jnp.dtype(config.dtype)
  shape = (batch, c.state_heads, length)
  return {
    'keys': jnp.zeros((*shape, c.key_dim), dtype),
    'values': jnp.zeros((*shape, c.value_dim), dtype),
  }
