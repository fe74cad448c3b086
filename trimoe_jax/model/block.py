"""One decoder layer, and a residual block of them scanned in groups."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from trimoe_jax import sharding
from trimoe_jax.config import ModelConfig
from trimoe_jax.model import layout, residual
from trimoe_jax.model.cache import Span
from trimoe_jax.model.kda import kda_cache, kda_layer, kda_parameters
from trimoe_jax.model.latent_moe import moe_layer, moe_parameters
from trimoe_jax.model.mha import mha_cache, mha_layer, mha_parameters
from trimoe_jax.model.mla import mla_cache, mla_layer, mla_parameters
from trimoe_jax.model.mlp import mlp, mlp_parameters
from trimoe_jax.model.parameters import Parameter, Table, ones, stack
from trimoe_jax.model.residual import Residual
from trimoe_jax.model.router import RouterState, RouterStats


class Pass(struct.PyTreeNode):
  """What is the same for every layer of one forward pass.

  `mask` [B, T] is False for padding; `span` places the tokens in the cache.
  `observe` counts router statistics and `depth` collects depth-mix weights.
  `split`: the tokens lie over the context axis in `context.balance` order.
  """

  config: ModelConfig = struct.field(pytree_node=False)
  segment_ids: jax.Array | None = None
  mask: jax.Array | None = None
  span: Span | None = None
  observe: bool = struct.field(pytree_node=False, default=False)
  depth: bool = struct.field(pytree_node=False, default=False)
  split: bool = struct.field(pytree_node=False, default=False)


class Aux(struct.PyTreeNode):
  """What layers report, stacked on a leading layer axis.

  `router` counts the MoE layers only. `depth` [layers, 2, columns] holds each
  sublayer's mean depth-mix weights: the finished blocks, then the open one.
  """

  router: RouterStats | None = None
  depth: jax.Array | None = None


def layer_parameters(config: ModelConfig, node: layout.Layer) -> Table:
  norm = Parameter((config.width,), (None,), ones)
  mixer = {'kda': kda_parameters, 'mla': mla_parameters, 'mha': mha_parameters}
  table = {
    'attention_mix': residual.mix_parameters(config),
    'attention_norm': norm,
    node.mixer: mixer[node.mixer](config),
    'ffn_mix': residual.mix_parameters(config),
    'ffn_norm': norm,
  }
  if node.ffn == 'moe':
    return table | {'moe': moe_parameters(config)}
  return table | {'mlp': mlp_parameters(config, config.dense_hidden)}


def body_parameters(config: ModelConfig, body: Sequence[layout.Node]) -> Table:
  """The table of a body; a Repeat stacks its children's."""
  table = {}
  for position, node in enumerate(body):
    name = layout.child_name(position, node)
    if isinstance(node, layout.Layer):
      table[name] = layer_parameters(config, node)
    else:
      table[name] = stack(body_parameters(config, node.body), node.count)
  return table


def body_cache(
  config: ModelConfig, body: Sequence[layout.Node], batch: int, length: int
) -> dict[str, Any]:
  """The empty cache of a body, nested like its parameters."""
  caches = {}
  for position, node in enumerate(body):
    if isinstance(node, layout.Repeat):
      inner = body_cache(config, node.body, batch, length)
      cache = jax.tree.map(
        lambda x, n=node.count: jnp.broadcast_to(x, (n, *x.shape)), inner
      )
    elif node.mixer == 'kda':
      cache = kda_cache(config, batch)
    else:
      empty = {'mla': mla_cache, 'mha': mha_cache}[node.mixer]
      cache = empty(config, batch, length)
    caches[layout.child_name(position, node)] = cache
  return caches


def body_mixes(body: Sequence[layout.Node], params: Any) -> Table:
  """Depth-mix queries and gains [L, d] of a body's sublayers, in order."""
  parts = []
  for position, node in enumerate(body):
    own = params[layout.child_name(position, node)]
    if isinstance(node, layout.Layer):
      both = own['attention_mix'], own['ffn_mix']
      parts.append(jax.tree.map(lambda *x_d: jnp.stack(x_d, -2), *both))
    else:
      merge = lambda x: x.reshape(*x.shape[:-3], -1, x.shape[-1])
      parts.append(jax.tree.map(merge, body_mixes(node.body, own)))
  return jax.tree.map(lambda *x_ld: jnp.concatenate(x_ld, -2), *parts)


def _layer(
  node: layout.Layer, inputs: tuple, stream: Residual, shared: Pass
) -> tuple[Residual, Aux, Any]:
  """One decoder layer. `inputs` is (params, router states, cache)."""
  params, states, cache = inputs
  config = shared.config
  h_btd, attention_weights = residual.read(
    params['attention_mix'], stream, config, params['attention_norm']
  )
  if node.mixer == 'kda':
    a_btd, cache = kda_layer(
      params['kda'],
      h_btd,
      config,
      segment_ids=shared.segment_ids,
      cache=cache,
      split=shared.split,
      waits=shared.span is not None,
    )
  else:
    attend = {'mla': mla_layer, 'mha': mha_layer}[node.mixer]
    a_btd, cache = attend(
      params[node.mixer],
      h_btd,
      config,
      segment_ids=shared.segment_ids,
      cache=cache,
      span=shared.span,
      split=shared.split,
    )
  stream = stream.add(a_btd)
  h_btd, ffn_weights = residual.read(
    params['ffn_mix'], stream, config, params['ffn_norm']
  )
  stats = None
  if node.ffn == 'moe':
    m_btd, stats = moe_layer(
      params['moe'],
      h_btd,
      config,
      state=jax.tree.map(lambda x: x[0], states),
      mask=shared.mask,
      observe=shared.observe,
    )
    stats = jax.tree.map(lambda x: x[None], stats)
  else:
    m_btd = mlp(params['mlp'], h_btd, config)
  depth = None
  if shared.depth:
    rows = [_depth_row(w, shared) for w in (attention_weights, ffn_weights)]
    depth = jnp.stack(rows)[None]
  keep = cache if shared.span is not None else None
  return stream.add(m_btd), Aux(stats, depth), keep


def _depth_row(weights_mbt: jax.Array, shared: Pass) -> jax.Array:
  """Mean weights over real tokens, spread to the widest layer's columns."""
  mean_m = masked_mean(weights_mbt, shared.mask)
  blocks = shared.config.sources - 1
  row = jnp.zeros((blocks + 1,), mean_m.dtype)
  return (
    row.at[: mean_m.shape[0] - 1].set(mean_m[:-1]).at[blocks].set(mean_m[-1])
  )


def masked_mean(x_mbt: jax.Array, mask_bt: jax.Array | None) -> jax.Array:
  """The mean over tokens [M], leaving out those that the mask leaves out."""
  if mask_bt is None:
    return x_mbt.mean((1, 2))
  total = jnp.where(mask_bt, x_mbt, 0).sum((1, 2))
  return total / jnp.maximum(mask_bt.sum(), 1)


def run_body(
  body: Sequence[layout.Node],
  inputs: tuple,
  stream: Residual,
  shared: Pass,
) -> tuple[Residual, Aux, Any]:
  """Runs a body's layers in order.

  Args:
    body: its nodes.
    inputs: (params, router states of its MoE layers on a leading axis, cache),
      the first and the last nested by child name; states and cache may be None.
    stream: the residual state.
    shared: the forward pass.

  Returns:
    The new residual state, Aux in layer order, and the new caches.
  """
  params, states, caches = inputs
  reports, kept, at = [], {}, 0
  for position, node in enumerate(body):
    name = layout.child_name(position, node)
    own = rows(states, at, node.moe_layers)
    cache = None if caches is None else caches[name]
    run = _repeat if isinstance(node, layout.Repeat) else _checkpointed_layer
    stream, aux, kept[name] = run(
      node, (params[name], own, cache), stream, shared
    )
    reports.append(aux)
    at += node.moe_layers
  return stream, join(reports), kept


# Equal layers that are written out are traced and lowered once.
_shared_layer = jax.jit(_layer, static_argnums=0)


def _checkpointed_layer(node, inputs, stream, shared):
  scans = shared.config.scans_layers
  layer = functools.partial(_layer if scans else _shared_layer, node)
  if shared.config.remat == 'full':
    layer = jax.checkpoint(layer)
  return layer(inputs, stream, shared)


def _repeat(
  node: layout.Repeat, inputs: tuple, stream: Residual, shared: Pass
) -> tuple[Residual, Aux, Any]:
  """Scans `count` copies of a body over stacked parameters."""
  params, states, cache = inputs
  each = moe_rows(states, node.count)

  def step(stream, inputs):
    stream, aux, cache = run_body(node.body, inputs, stream, shared)
    return stream, (aux, cache)

  stream, (aux, cache) = jax.lax.scan(step, stream, (params, each, cache))
  return stream, unstack(aux), cache


def rows(states: RouterState, start: int, count: int) -> RouterState:
  """The router states of `count` consecutive MoE layers."""
  return jax.tree.map(lambda x: x[start : start + count], states)


def moe_rows(states: RouterState, count: int) -> RouterState:
  """[count * n, ...] router states as [count, n, ...]."""
  return jax.tree.map(
    lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), states
  )


def unstack(aux: Aux) -> Aux:
  """[count, layers, ...] reports of a scan as [count * layers, ...]."""
  return jax.tree.map(sharding.merge_leading, aux)


def join(reports: Sequence[Aux]) -> Aux:
  """Reports one after the other; a field is None when nobody reports it."""
  router = [aux.router for aux in reports if aux.router is not None]
  depth = [aux.depth for aux in reports if aux.depth is not None]
  together = lambda *xs: jnp.concatenate(xs)
  return Aux(
    router=jax.tree.map(together, *router) if router else None,
    depth=jnp.concatenate(depth) if depth else None,
  )
