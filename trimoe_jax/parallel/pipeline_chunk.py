"""One chunk of a pipeline stage, and what its hops carry.

A chunk is the template of `pipeline_layout` with the layers of one chunk in
its places. Which layer that is comes as a number, so that all stages run one
program: the layer says by it whether it opens a residual block, and a place
without a layer returns what it was given.

Legend: b batch, t time, d model width, n slots of the block cache.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from trimoe_jax import sharding
from trimoe_jax.model import layout, router
from trimoe_jax.model.block import Pass, run_body
from trimoe_jax.model.residual import Residual
from trimoe_jax.parallel.pipeline_layout import NONE, Plan


class Layers(struct.PyTreeNode):
  """Layers by place, trees of [*repeats, ...] arrays nested like the template.

  `states` are those of the routers, None where a layer is dense; `numbers` the
  layers, or NONE; `used` whether any stage has a layer there now.
  """

  params: Any
  states: Any
  numbers: Any
  used: Any = None

  def at(self, name: str) -> Layers:
    """Those of one child of the template."""
    own = lambda tree: None if tree is None else tree[name]
    return Layers(
      *map(own, (self.params, self.states, self.numbers, self.used))
    )

  def row(self, v: jax.Array) -> Layers:
    """Those of chunk v, from a stage's on a leading axis."""
    take = lambda x: jax.lax.dynamic_index_in_dim(x, v, keepdims=False)
    return jax.tree.map(take, self)


def run_chunk(
  plan: Plan, layers: Layers, x_btd: jax.Array, blocks_nbtd: jax.Array, shared
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], Any]:
  """The layers of a chunk in turn.

  Args:
    plan: of the pipeline.
    layers: of this chunk.
    x_btd: the sum of the open block; at its first layer, that of the block
      before or the embedding.
    blocks_nbtd: the block cache, where slots of later chunks may hold anything
      that is finite.
    shared: the forward pass.

  Returns:
    (the sum of the open block, the block cache with what this chunk committed,
    the auxiliary loss of its routers), and their statistics by place.
  """
  certain = plan.spread((plan.layer_at != NONE).all(0))
  carry = (x_btd, blocks_nbtd, jnp.zeros((), jnp.float32))
  return _run_nodes(plan.nodes, certain, shared, carry, layers)


def _run_nodes(nodes, certain, shared, carry, layers):
  stats = {}
  for position, node in enumerate(nodes):
    name = layout.child_name(position, node)
    if isinstance(node, layout.Layer):
      run = functools.partial(_place, node, certain[name], shared)
    else:
      inner = functools.partial(_run_nodes, node.body, certain[name], shared)
      run = functools.partial(jax.lax.scan, inner)
    carry, stats[name] = run(carry, layers.at(name))
  return carry, stats


def _place(node, certain, shared, carry, own):
  """One place, left out in ticks in which no stage has a layer there."""
  run = lambda carry: _layer(node, shared, carry, own)
  if np.all(certain):
    return run(carry)
  zeros = jax.tree.map(sharding.zeros, jax.eval_shape(run, carry)[1])
  return jax.lax.cond(own.used, run, lambda carry: (carry, zeros), carry)


def _layer(node: layout.Layer, shared: Pass, carry, own: Layers):
  x_btd, blocks_nbtd, balance = carry
  live, number = own.numbers != NONE, jnp.maximum(own.numbers, 0)
  slot, within = jnp.divmod(number, shared.config.residual_block)
  begins = live & (within == 0)
  kept = jax.lax.dynamic_index_in_dim(blocks_nbtd, slot, keepdims=False)
  committed = jnp.where(begins, x_btd, kept)
  blocks_nbtd = jax.lax.dynamic_update_index_in_dim(
    blocks_nbtd, committed, slot, 0
  )
  x_btd = jnp.where(begins, 0, x_btd)
  state = jax.tree.map(lambda x: x[None], own.states)
  stream, aux, _ = run_body(
    (node,),
    ({layout.child_name(0, node): own.params}, state, None),
    Residual(blocks_nbtd, x_btd, slot + 1, ~begins),
    shared,
  )
  stats = jax.tree.map(lambda x: jnp.where(live, x, 0), aux.router)
  if stats is not None and shared.config.router.balance == 'aux_loss':
    balance += router.aux_loss(router.reduce(stats)).astype(balance.dtype)
  x_btd = jnp.where(live, stream.partial, x_btd)
  return (x_btd, blocks_nbtd, balance), jax.tree.map(lambda x: x[0], stats)


def sent(
  plan: Plan, x_btd: jax.Array, blocks_nbtd: jax.Array, chunk: jax.Array
) -> jax.Array:
  """[1 + W, B, T, d]: a stream, and the window of the hop into `chunk`.

  The same both ways: gradients of slots go back by the hop that brought them.
  """
  first, _ = _hop(plan, chunk)
  at = jnp.minimum(first + jnp.arange(plan.window), plan.slots - 1)
  return jnp.concatenate([x_btd[None], _rows(blocks_nbtd, at)])


def received(
  plan: Plan, message: jax.Array, chunk: jax.Array, blocks_nbtd: jax.Array
) -> jax.Array:
  """`blocks_nbtd` with the slots that the hop into `chunk` brings."""
  first, last = _hop(plan, chunk)
  slot = jnp.arange(plan.slots)
  came = (first <= slot) & (slot < last)
  at = 1 + jnp.clip(slot - first, 0, plan.window - 1)
  return jnp.where(came[:, None, None, None], _rows(message, at), blocks_nbtd)


def _hop(plan: Plan, chunk):
  """The cache slots [first, last) of the hop into `chunk`; C has none."""
  first, last = (np.append(x, 0) for x in (plan.first, plan.last))
  return jnp.asarray(first)[chunk], jnp.asarray(last)[chunk]


def _rows(x, at):
  """x[at] along the first axis; the others keep their layout."""
  where = jax.P(None, *jax.typeof(x).sharding.spec[1:])
  return x.at[at].get(out_sharding=where)
