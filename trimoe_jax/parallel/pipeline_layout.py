"""Which layers a pipeline stage holds, and its parameters in that order.

The layers are cut into C = P V chunks of ceil(L / C); the last ones are
shorter or empty. All stages run one program, so chunks are laid over one
template of layer kinds, the shortest found that contains every chunk in order;
places that a chunk does not use are identities. For K3 on 8 stages of 3 chunks
the template is (dense KDA, 3 KDA, MLA): the first chunk starts with the dense
layer, the last is the trailing MLA alone.

Attention residuals: slot s of the block cache is the source that layer s S
commits, the embedding for s = 0 and else the sum of block s - 1. A hop into
chunk c brings the slots that its stage does not have from chunk c - P,

    [committed(c - P), committed(c - 1)),  committed(c) = ceil(end of c / S),

at most W = ceil((P - 1) ceil(L / C) / S) of them (Attention Residuals, arXiv
2603.15031, on caching across stages): the peak of a hop is O(P), not O(C).

Parameters keep the model's own layout outside a step. `to_stages` gathers
layers by place, [P, V, ...] over 'pipe', and `from_stages` puts gradients
back.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trimoe_jax import sharding
from trimoe_jax.config import ModelConfig
from trimoe_jax.model import layout

AXIS = 'pipe'
NONE = -1  # a place without a layer


@dataclasses.dataclass(frozen=True)
class Plan:
  """The layers of P stages of V chunks.

  Attributes:
    config: the model's.
    stages, chunks: P and V.
    nodes: the template, equal neighbours folded.
    layer_at: int32 [C, places], the layer at each place of a chunk, or NONE.
    first, last: int32 [C], the cache slots [first, last) that the hop into a
      chunk brings.
    window: W, the slots that every hop has room for.
  """

  config: ModelConfig
  stages: int
  chunks: int
  nodes: tuple[layout.Node, ...]
  layer_at: np.ndarray
  first: np.ndarray
  last: np.ndarray

  @property
  def slots(self) -> int:
    """Of a block cache: every source but the last block's sum."""
    return self.config.sources - 1

  @property
  def window(self) -> int:
    return int((self.last - self.first).max())

  def by_stage(self, x_cn: np.ndarray) -> np.ndarray:
    """[C, ...] as [P, V, ...]."""
    shape = (self.chunks, self.stages, *x_cn.shape[1:])
    return np.swapaxes(x_cn.reshape(shape), 0, 1)

  @functools.cached_property
  def places(self) -> dict[str, Any]:
    """The template's places, nested like the parameters of its nodes."""
    return _places(self.nodes, 0)[0]

  def spread(self, x_n: np.ndarray) -> Any:
    """[..., places] as arrays [..., *repeats] nested like the parameters."""
    return jax.tree.map(lambda at: x_n[..., at], self.places)


def plan(config: ModelConfig, stages: int, chunks: int) -> Plan:
  """The layers cut for `stages` stages of `chunks` chunks each."""
  count = stages * chunks
  size = -(-config.layers // count)
  ends = np.minimum(size * np.arange(1, count + 1), config.layers)
  starts = np.minimum(size * np.arange(count), config.layers)
  kinds = _kinds(config)
  parts = [kinds[a:b] for a, b in zip(starts, ends)]
  template = functools.reduce(_merged, parts)
  layer_at = np.full((count, len(template)), NONE, np.int32)
  for c, part in enumerate(parts):
    at = 0
    for i, kind in enumerate(part):
      at = template.index(kind, at)
      layer_at[c, at] = starts[c] + i
      at += 1
  committed = -(-ends // config.residual_block)
  last = np.concatenate([[0], committed[:-1]])
  first = np.concatenate([np.zeros(stages, int), committed[:-stages]])
  return Plan(
    config=config,
    stages=stages,
    chunks=chunks,
    nodes=layout.fold(template),
    layer_at=layer_at,
    first=np.minimum(first, last).astype(np.int32),
    last=last.astype(np.int32),
  )


def _kinds(config: ModelConfig) -> tuple[layout.Layer, ...]:
  return tuple(
    layout.Layer(config.mixer(i), config.ffn(i)) for i in range(config.layers)
  )


def _merged(a: tuple, b: tuple) -> tuple:
  """The shortest sequence that has both `a` and `b` as subsequences."""
  shortest: dict = {(len(a), len(b)): ()}
  for i in range(len(a), -1, -1):
    for j in range(len(b), -1, -1):
      ways = []
      if i < len(a) and j < len(b) and a[i] == b[j]:
        ways.append((a[i], *shortest[i + 1, j + 1]))
      if i < len(a):
        ways.append((a[i], *shortest[i + 1, j]))
      if j < len(b):
        ways.append((b[j], *shortest[i, j + 1]))
      if ways:
        shortest[i, j] = min(ways, key=len)
  return shortest[0, 0]


def _places(nodes, start: int) -> tuple[dict[str, Any], int]:
  """Places of a body from `start` on, and how many it has."""
  found, at = {}, start
  for position, node in enumerate(nodes):
    name = layout.child_name(position, node)
    if isinstance(node, layout.Layer):
      found[name] = np.asarray(at)
    else:
      inner, each = _places(node.body, at)
      copies = [
        jax.tree.map(lambda x, n=n: x + n * each, inner)
        for n in range(node.count)
      ]
      found[name] = jax.tree.map(lambda *xs: np.stack(xs), *copies)
    at += node.layers
  return found, at - start


def leaves(
  nodes: Sequence[layout.Node], tree: Any
) -> Iterator[tuple[tuple[str, ...], layout.Layer, Any]]:
  """(path, kind, entry) of every layer of a body in a tree nested like it."""
  for position, node in enumerate(nodes):
    name = layout.child_name(position, node)
    if isinstance(node, layout.Layer):
      yield (name,), node, tree[name]
    else:
      for path, kind, entry in leaves(node.body, tree[name]):
        yield (name, *path), kind, entry


@dataclasses.dataclass(frozen=True)
class _Row:
  """One stack of equal layers in the model's parameters.

  Attributes:
    path: where.
    layers: int [*repeats], the layers it holds.
  """

  path: tuple[str, ...]
  layers: np.ndarray


def _rows(config: ModelConfig) -> dict[layout.Layer, list[_Row]]:
  """The stacks of each kind, in the order of their first layer."""
  stacks: dict = {}
  for layer, (path, index) in enumerate(layout.layer_addresses(config)):
    stacks.setdefault(path, {})[index] = layer
  rows: dict = {}
  for path, found in stacks.items():
    shape = tuple(np.max(list(found), axis=0) + 1) if () not in found else ()
    layers = np.zeros(shape, int)
    for index, layer in found.items():
      layers[index] = layer
    kind = _kinds(config)[layers.flat[0]]
    rows.setdefault(kind, []).append(_Row(path, layers))
  return rows


def to_stages(plan: Plan, params: Any) -> dict[str, Any]:
  """The layers' parameters by place, [P, V, *repeats, ...] over 'pipe'.

  A place without a layer gets the first layer of its kind, so that what is
  computed there and thrown away is finite.
  """
  config, stacks, out = plan.config, _rows(plan.config), {}
  together = {}
  for kind, rows in stacks.items():
    trees = [_at(params, row.path) for row in rows]
    depths = [row.layers.ndim for row in rows]
    together[kind] = jax.tree.map(
      lambda *xs, depths=depths: _joined(xs, depths), *trees
    )
  place_of = {kind: _order(rows, config) for kind, rows in stacks.items()}
  layers = plan.spread(plan.by_stage(plan.layer_at))
  for path, kind, layer in leaves(plan.nodes, layers):
    at = np.where(layer == NONE, 0, place_of[kind][np.maximum(layer, 0)])
    _put(out, path, jax.tree.map(lambda x: _staged(x, at), together[kind]))
  return out


def from_stages(plan: Plan, grads: Any, params: Any) -> dict[str, Any]:
  """Gradients by place, put back in the model's layout: that of `params`.

  Returns:
    Only what the layers have: `params` without embedding and head.
  """
  layers = plan.spread(plan.by_stage(plan.layer_at))
  found: dict = {}
  for path, kind, layer in leaves(plan.nodes, layers):
    entries, rows = found.setdefault(kind, ([], []))
    entries.append(_at(grads, path))
    rows.append(layer)
  out: dict = {}
  for kind, stacks in _rows(plan.config).items():
    entries, rows = found[kind]
    together = jax.tree.map(
      lambda like, *xs: _joined(
        [_spread_out(x, like, r.ndim) for x, r in zip(xs, rows)],
        [r.ndim for r in rows],
      ),
      _at(params, stacks[0].path),
      *entries,
    )
    flat = np.concatenate([r.reshape(-1) for r in rows])
    where = {int(layer): i for i, layer in enumerate(flat) if layer != NONE}
    for row in stacks:
      at = np.vectorize(where.__getitem__, otypes=[int])(row.layers)
      take = lambda x, like, at=at: _taken(x, at, _spec(like)[at.ndim :])
      _put(out, row.path, jax.tree.map(take, together, _at(params, row.path)))
  return out


def states_to_stages(plan: Plan, states: Any) -> dict[str, Any]:
  """Router states [L, ...] of the MoE layers by place; None where dense."""
  dense, out = plan.config.dense_layers, {}
  layers = plan.spread(plan.by_stage(plan.layer_at))
  for path, kind, layer in leaves(plan.nodes, layers):
    at = np.maximum(layer - dense, 0)
    entry = jax.tree.map(lambda x: _staged(x, at), states)
    _put(out, path, entry if kind.moe_layers else None)
  return out


def stats_from_stages(plan: Plan, stats: Any) -> Any:
  """Statistics by place, [P, V, *repeats, ...], as [L, ...] of MoE layers."""
  layers = plan.spread(plan.by_stage(plan.layer_at))
  entries, rows = [], []
  for path, kind, layer in leaves(plan.nodes, layers):
    if kind.moe_layers:
      entries.append(_at(stats, path))
      rows.append(layer)
  flat = np.concatenate([r.reshape(-1) for r in rows])
  where = {int(layer): i for i, layer in enumerate(flat) if layer != NONE}
  config = plan.config
  at = np.asarray([where[n] for n in range(config.dense_layers, config.layers)])

  def gathered(*xs):
    rest = [(None, *_spec(x)[1:]) for x in xs]
    xs = [jax.sharding.reshard(x, jax.P(*r)) for x, r in zip(xs, rest)]
    x = _joined(xs, [r.ndim for r in rows])
    return _taken(x, at, _spec(x)[1:])

  return jax.tree.map(gathered, *entries)


def _order(rows: Sequence[_Row], config: ModelConfig) -> np.ndarray:
  """[L]: the place of each layer in the rows of its kind; 0 for the others."""
  order = np.zeros(config.layers, int)
  flat = np.concatenate([row.layers.reshape(-1) for row in rows])
  order[flat] = np.arange(len(flat))
  return order


def _at(tree: Any, path: Sequence[str]) -> Any:
  return functools.reduce(lambda t, name: t[name], path, tree)


def _put(tree: dict, path: Sequence[str], value: Any):
  for name in path[:-1]:
    tree = tree.setdefault(name, {})
  tree[path[-1]] = value


def _spec(x: jax.Array) -> tuple:
  spec = jax.typeof(x).sharding.spec
  return (*spec, *(None,) * (x.ndim - len(spec)))


def _joined(xs: Sequence[jax.Array], depths: Sequence[int]) -> jax.Array:
  """Stacks [*repeats, ...] one after the other, [rows, ...]."""
  flat = []
  for x, depth in zip(xs, depths):
    rest = x.shape[depth:]
    where = jax.P(None, *_spec(x)[depth:])
    rows = int(np.prod(x.shape[:depth]))
    flat.append(jax.lax.reshape(x, (rows, *rest), out_sharding=where))
  return jnp.concatenate(flat)


def _taken(x: jax.Array, at: np.ndarray, rest: Sequence[Any]) -> jax.Array:
  """The rows `at` of x [rows, ...], [*at.shape, ...]."""
  where = jax.P(*(None,) * at.ndim, *rest)
  return x.at[jnp.asarray(at)].get(out_sharding=where)


def _staged(x: jax.Array, at: np.ndarray) -> jax.Array:
  """The rows `at` [P, V, ...] of x, over 'pipe'."""
  taken = _taken(x, at, _spec(x)[1:])
  rest = tuple(map(without_pipe, _spec(x)[1:]))
  where = jax.P(AXIS, *(None,) * (at.ndim - 1), *rest)
  return jax.sharding.reshard(taken, where)


def _spread_out(x: jax.Array, like: jax.Array, depth: int) -> jax.Array:
  """x [P, V, *repeats, ...] with the layout of a layer of `like`."""
  rest = _spec(like)[like.ndim - (x.ndim - depth) :]
  return jax.sharding.reshard(x, jax.P(*(None,) * depth, *rest))


def without_pipe(entry: Any) -> Any:
  axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
  kept = tuple(a for a in axes if a != AXIS)
  return kept if len(kept) > 1 else kept[0] if kept else None
