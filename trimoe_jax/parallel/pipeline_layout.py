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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trimoe_jax.config import ModelConfig
from trimoe_jax.model import layout
from trimoe_jax.parallel.pipeline_schedule import IDLE, Schedule

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
    return _places(self.nodes, 0)

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


def used_places(plan: Plan, operations: np.ndarray) -> np.ndarray:
  """The places that some stage needs, bool [ticks, places].

  Args:
    plan: of the pipeline.
    operations: [ticks, P, 2], the forward or backward half of a schedule.
  """
  chunk = operations[..., 0]
  is_used = (plan.layer_at[chunk] != NONE) & (chunk != IDLE)[..., None]
  return is_used.any(1)


def efficiency(plan: Plan, schedule: Schedule) -> float:
  """Layers that a stage has to run, over those it waits for.

  Lost are the bubble, and ticks in which stages use different places: count
  all places as equal.
  """
  waited = used_places(plan, schedule.forward).sum()
  needed = plan.config.layers * schedule.micro_batches / plan.stages
  return float(needed / waited)


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


def _places(nodes, start: int) -> dict[str, Any]:
  """The places of a body whose first is `start`."""
  found, at = {}, start
  for position, node in enumerate(nodes):
    name = layout.child_name(position, node)
    if isinstance(node, layout.Layer):
      found[name] = np.asarray(at)
    else:
      each = node.layers // node.count
      copies = [_places(node.body, at + n * each) for n in range(node.count)]
      found[name] = jax.tree.map(lambda *xs: np.stack(xs), *copies)
    at += node.layers
  return found


class _Stack(NamedTuple):
  """Equal layers on leading axes: int [*leading] with NONE, and their path."""

  path: tuple[str, ...]
  kind: layout.Layer
  layers: np.ndarray


def _model_stacks(config: ModelConfig) -> list[_Stack]:
  """The stacks of the model's parameters."""
  found: dict = {}
  for layer, (path, index) in enumerate(layout.layer_addresses(config)):
    found.setdefault(path, {})[index] = layer
  stacks = []
  for path, layer_of in found.items():
    layers = np.zeros([1 + max(axis) for axis in zip(*layer_of)], int)
    for index, layer in layer_of.items():
      layers[index] = layer
    stacks.append(_Stack(path, _kinds(config)[layers.flat[0]], layers))
  return stacks


def _stage_stacks(plan: Plan) -> list[_Stack]:
  """The stacks of the template, [P, V, *repeats]."""
  layers = plan.spread(plan.by_stage(plan.layer_at))
  return list(_stage_leaves(plan.nodes, layers, ()))


def _stage_leaves(nodes, tree, path) -> Iterator[_Stack]:
  for position, node in enumerate(nodes):
    name = layout.child_name(position, node)
    here = (*path, name)
    if isinstance(node, layout.Layer):
      yield _Stack(here, node, tree[name])
    else:
      yield from _stage_leaves(node.body, tree[name], here)


def to_stages(plan: Plan, params: Any) -> dict[str, Any]:
  """The layers' parameters by place, [P, V, *repeats, ...] over 'pipe'.

  A place without a layer gets another of its kind, so that what is computed
  there and thrown away is finite.
  """
  stacks, out = _model_stacks(plan.config), {}
  for target in _stage_stacks(plan):
    sources = [s for s in stacks if s.kind == target.kind]
    trees = [_at(params, s.path) for s in sources]
    _put(out, target.path, _to_stage(trees, sources, target))
  return out


def states_to_stages(plan: Plan, states: Any) -> dict[str, Any]:
  """Router states [L, ...] of the MoE layers by place; None where dense."""
  source, out = _moe_stack(plan.config), {}
  for target in _stage_stacks(plan):
    moe = target.kind.moe_layers
    _put(
      out, target.path, _to_stage([states], [source], target) if moe else None
    )
  return out


def from_stages(plan: Plan, grads: Any, params: Any) -> dict[str, Any]:
  """Gradients by place, put back in the layout of `params`.

  Returns:
    Only what the layers have: `params` without embedding and head.
  """
  stacks, out = _stage_stacks(plan), {}
  for target in _model_stacks(plan.config):
    sources = [s for s in stacks if s.kind == target.kind]
    like = _at(params, target.path)
    trees = [
      jax.tree.map(
        lambda x, p, skip=s.layers.ndim, own=target.layers.ndim: _off_stages(
          x, skip, _spec(p)[own:]
        ),
        _at(grads, s.path),
        like,
      )
      for s in sources
    ]
    _put(out, target.path, _regrouped(trees, sources, target))
  return out


def stats_from_stages(plan: Plan, stats: Any) -> Any:
  """Statistics by place, [P, V, *repeats, ...], as [L, ...] of MoE layers."""
  sources = [s for s in _stage_stacks(plan) if s.kind.moe_layers]
  trees = [
    jax.tree.map(
      lambda x, skip=s.layers.ndim: _off_stages(x, skip, _spec(x)[skip:]),
      _at(stats, s.path),
    )
    for s in sources
  ]
  return _regrouped(trees, sources, _moe_stack(plan.config))


def _moe_stack(config: ModelConfig) -> _Stack:
  layers = np.arange(config.dense_layers, config.layers)
  return _Stack((), layout.Layer('kda', 'moe'), layers)


def _to_stage(trees, sources, target: _Stack) -> Any:
  """`_regrouped`, and over 'pipe'."""
  depth = target.layers.ndim

  def place(x):
    rest = tuple(map(without_pipe, _spec(x)[depth:]))
    where = jax.P(AXIS, *(None,) * (depth - 1), *rest)
    return jax.sharding.reshard(x, where)

  return jax.tree.map(place, _regrouped(trees, sources, target))


def _off_stages(x: jax.Array, depth: int, rest: Sequence[Any]) -> jax.Array:
  """x [P, V, *repeats, ...] whole in those, the others laid out by `rest`."""
  return jax.sharding.reshard(x, jax.P(*(None,) * depth, *rest))


def _regrouped(trees, sources: Sequence[_Stack], target: _Stack) -> Any:
  """The layers of `target` from trees of stacked arrays of `sources`."""
  flat = np.concatenate([s.layers.reshape(-1) for s in sources])
  row_of = {int(layer): row for row, layer in enumerate(flat)}
  rows = [row_of.get(int(n), 0) for n in target.layers.reshape(-1)]
  at = jnp.asarray(np.reshape(rows, target.layers.shape).astype(np.int32))

  def regroup(*xs):
    x = jnp.concatenate([_flat(x, s) for x, s in zip(xs, sources)])
    where = jax.P(*(None,) * at.ndim, *_spec(x)[1:])
    return x.at[at].get(out_sharding=where)

  return jax.tree.map(regroup, *trees)


def _flat(x: jax.Array, stack: _Stack) -> jax.Array:
  """[*leading, ...] as [rows, ...]."""
  depth = stack.layers.ndim
  shape = (stack.layers.size, *x.shape[depth:])
  where = jax.P(None, *_spec(x)[depth:])
  return jax.lax.reshape(x, shape, out_sharding=where)


def _at(tree: Any, path: Sequence[str]) -> Any:
  return functools.reduce(lambda t, name: t[name], path, tree)


def _put(tree: dict, path: Sequence[str], value: Any):
  for name in path[:-1]:
    tree = tree.setdefault(name, {})
  tree[path[-1]] = value


def _spec(x: jax.Array) -> tuple:
  spec = jax.typeof(x).sharding.spec
  return (*spec, *(None,) * (x.ndim - len(spec)))


def without_pipe(entry: Any) -> Any:
  """An entry of a PartitionSpec without the axis 'pipe'."""
  axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
  kept = tuple(a for a in axes if a != AXIS)
  return kept if len(kept) > 1 else kept[0] if kept else None
