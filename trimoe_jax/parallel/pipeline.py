"""Pipeline parallelism: interleaved 1F1B and block caches as one program.

The P ranks of the 'pipe' axis are stages. `pipeline_schedule` says which chunk
of layers meets which micro-batch in a tick, `pipeline_layout` which layers a
chunk has, `pipeline_chunk` how it runs. A `lax.scan` runs the ticks, and
derivatives are taken chunk by chunk: a stage keeps the inputs of the chunks in
flight, a block cache for each of their micro-batches and nothing else of a
forward pass. In every tick a stage sends one array forward and one backward,
1 + W residual streams each:

    forward:  the open block's sum, and a window of W slots of the block cache
    backward: its gradient, and the gradients deposited in the same slots

Only 'pipe' is manual here; inside, the model runs as it does without a
pipeline, over whatever the other axes shard. All devices run the same
instructions: an idle stage works on what it has and throws it away, and what
only some stages need (embedding, head, places that not every chunk uses) is
skipped in ticks when none does. Stages tick together, so neither costs time,
and no collective of a layer can wait for a stage that left it out.

Legend: b batch, t time, d model width.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import struct

from trimoe_jax import sharding
from trimoe_jax.config import TrainConfig
from trimoe_jax.losses import LossSums, cross_entropy
from trimoe_jax.model import residual
from trimoe_jax.model.block import Pass
from trimoe_jax.model.model import embed, read_out
from trimoe_jax.model.router import RouterState, RouterStats
from trimoe_jax.parallel import (
  context,
  pipeline_chunk,
  pipeline_layout,
  pipeline_schedule,
)
from trimoe_jax.parallel.pipeline_chunk import Layers
from trimoe_jax.parallel.pipeline_layout import AXIS, Plan
from trimoe_jax.parallel.pipeline_schedule import IDLE, Schedule

OUTER = ('embedding', 'output_mix', 'final_norm', 'head')
Batch = dict[str, jax.Array]
_LOW = 0.6  # share of what the bubble leaves, below which a run is warned


class _Held(struct.PyTreeNode):
  """What a stage reads: its layers on a leading axis [V], and the rest."""

  layers: Layers
  outer: Any
  batch: Batch


class _Carry(struct.PyTreeNode):
  """What a stage keeps from tick to tick.

  `inputs` [places, B, T, d] of chunks in flight; `caches` and `deposits`
  [places, N, B, T, d]; `ahead` and `behind` [1 + W, B, T, d] came from the
  stage before and after. The others are sums.
  """

  inputs: jax.Array
  caches: jax.Array
  deposits: jax.Array
  ahead: jax.Array
  behind: jax.Array
  layers: Any  # gradients
  outer: Any  # gradients
  sums: LossSums
  stats: Any


def accumulate(
  params: Any, batch: Batch, state: RouterState, config: TrainConfig
) -> tuple[Any, LossSums, RouterStats]:
  """Summed gradients, loss parts and statistics over the micro-batches.

  Args:
    params: in the model's own layout.
    batch: [M, B, T] arrays, the micro-batches of the pipeline.
    state: the router's.
    config: of the run; a stage has `pipeline.chunks` chunks.
  """
  plan, schedule = _planned(config, batch['tokens'].shape[0])
  program = _Program(plan, schedule, config)
  layers = Layers(
    params=pipeline_layout.to_stages(plan, params),
    states=pipeline_layout.states_to_stages(plan, state),
    numbers=plan.spread(plan.by_stage(plan.layer_at)),
  )
  run = jax.shard_map(
    program.run,
    in_specs=((jax.P(AXIS), jax.P(AXIS)), jax.P()),
    out_specs=(jax.P(AXIS), jax.P()),
    axis_names={AXIS},
    check_vma=False,  # stages differ in everything; nothing is left to check
  )
  outer = {name: params[name] for name in OUTER}
  own, common = _own_table(schedule), _common_table(plan, schedule)
  whole = jax.tree.map(_off_pipe, outer)
  (d_layers, stats), (d_outer, sums) = run(
    (layers, own), (whole, batch, common)
  )
  place = lambda g, p: jax.sharding.reshard(g, jax.typeof(p).sharding.spec)
  grads = pipeline_layout.from_stages(plan, d_layers, params)
  grads |= jax.tree.map(place, d_outer, outer)
  if 'vision' in params:  # no images here; see config.py
    grads['vision'] = jax.tree.map(jnp.zeros_like, params['vision'])
  return grads, sums, pipeline_layout.stats_from_stages(plan, stats)


def _planned(config: TrainConfig, micro_batches: int) -> tuple[Plan, Schedule]:
  """Who has which layers and when; says once how much of a step is lost."""
  stages, chunks = sharding.axis_size(AXIS), config.pipeline.chunks
  plan = pipeline_layout.plan(config.model, stages, chunks)
  schedule = pipeline_schedule.interleaved(stages, chunks, micro_batches)
  bubble = schedule.bubble()
  useful = pipeline_layout.efficiency(plan, schedule)
  logging.info(
    'pipeline: %d ticks, bubble %.0f%%; in %.0f%% of the places that a stage '
    'waits for it has a layer.',
    *(schedule.ticks, 100 * bubble, 100 * useful),
  )
  if useful < _LOW * (1 - bubble):
    logging.warning(
      'pipeline.chunks=%d cuts the layers against their pattern: %.0f%% of the '
      'places that stages wait for have a layer, at most %.0f%% could; choose '
      'another number of chunks.',
      *(chunks, 100 * useful, 100 * (1 - bubble)),
    )
  return plan, schedule


def _off_pipe(x: jax.Array) -> jax.Array:
  rest = map(pipeline_layout.without_pipe, jax.typeof(x).sharding.spec)
  return jax.sharding.reshard(x, jax.P(*rest))


def _own_table(schedule: Schedule) -> dict[str, np.ndarray]:
  """What each stage does, [P, ticks, 5]: chunk, micro-batch, places."""
  slots = [
    pipeline_schedule.input_slots(schedule),
    pipeline_schedule.cache_slots(schedule),
    pipeline_schedule.deposit_slots(schedule),
  ]
  table = {}
  for kind in ('forward', 'backward'):
    places = [getattr(s, kind)[..., None] for s in slots]
    operations = np.concatenate([getattr(schedule, kind), *places], -1)
    table[kind] = np.swapaxes(operations, 0, 1)
  return table


def _common_table(plan: Plan, schedule: Schedule) -> dict[str, Any]:
  """What some stage needs in a tick, bool [ticks, ...]: the same for all."""
  last = plan.stages * plan.chunks - 1
  table = {
    'embeds': (schedule.forward[..., 0] == 0).any(1),
    'embeds_back': (schedule.backward[..., 0] == 0).any(1),
    'reads_out': (schedule.backward[..., 0] == last).any(1),
  }
  for kind in ('forward', 'backward'):
    operations = getattr(schedule, kind)
    table[kind] = (operations[..., 0] != IDLE).any(1)
    used = pipeline_layout.used_places(plan, operations)
    table[f'{kind}_places'] = plan.spread(used)
  return table


@dataclasses.dataclass(frozen=True)
class _Program:
  """The program of one stage; methods run inside the `shard_map`."""

  plan: Plan
  schedule: Schedule
  config: TrainConfig

  def run(self, own, common):
    """All ticks: (gradients by place, statistics), (the rest of both)."""
    layers, own = jax.tree.map(lambda x: x[0], own)
    outer, batch, common = common
    held = _Held(layers, outer, batch)
    carry, _ = jax.lax.scan(
      functools.partial(self._tick, held), self._start(held), (own, common)
    )
    total = functools.partial(jax.lax.psum, axis_name=AXIS)
    return (
      jax.tree.map(lambda x: x[None], (carry.layers, carry.stats)),
      jax.tree.map(total, (carry.outer, carry.sums)),
    )

  def _start(self, held: _Held) -> _Carry:
    plan, model = self.plan, self.config.model
    tokens = held.batch['tokens'].shape[1:]

    def room(*leading):
      x = jnp.zeros((*leading, *tokens, model.width), model.dtype)
      return sharding.constrain(x, *(None,) * len(leading), *residual.STREAM)

    streams = (room(), room(plan.slots))
    batch = self._micro_batch(held, 0)
    used = jax.tree.map(lambda at: jnp.ones(at.shape, bool), plan.places)
    one = held.layers.row(0).replace(used=used)
    run = lambda *args: self._run_chunk(one, batch, one.params, *args)[1]
    stats = jax.eval_shape(run, *streams)
    loss = lambda *args: self._loss(held.outer, *args, batch)[1]
    count = lambda slots: slots(self.schedule).count
    return _Carry(
      inputs=room(count(pipeline_schedule.input_slots)),
      caches=room(count(pipeline_schedule.cache_slots), plan.slots),
      deposits=room(count(pipeline_schedule.deposit_slots), plan.slots),
      ahead=room(1 + plan.window),
      behind=room(1 + plan.window),
      layers=jax.tree.map(jnp.zeros_like, held.layers.params),
      outer=jax.tree.map(jnp.zeros_like, held.outer),
      sums=jax.tree.map(sharding.zeros, jax.eval_shape(loss, *streams)),
      stats=jax.tree.map(lambda x: _zero_rows(plan.chunks, x), stats),
    )

  def _tick(self, held: _Held, carry: _Carry, rows):
    own, common = rows
    stages = range(self.plan.stages)
    before = [(p, (p - 1) % len(stages)) for p in stages]
    carry, message = jax.lax.cond(
      common['forward'],
      functools.partial(self._forward, held, own['forward'], common),
      lambda carry: (carry, carry.ahead),
      carry,
    )
    after = [(p, q) for q, p in before]
    carry = carry.replace(ahead=jax.lax.ppermute(message, AXIS, after))
    carry, message = jax.lax.cond(
      common['backward'],
      functools.partial(self._backward, held, own['backward'], common),
      lambda carry: (carry, carry.behind),
      carry,
    )
    return carry.replace(behind=jax.lax.ppermute(message, AXIS, before)), None

  def _forward(self, held: _Held, row, common, carry: _Carry):
    """One chunk forward, and the message to the next stage."""
    plan = self.plan
    chunk, micro_batch, place, cache, _ = row
    live, chunk = chunk != IDLE, jnp.maximum(chunk, 0)
    batch = self._micro_batch(held, micro_batch)
    begin = lambda x_btd: jnp.where(
      chunk == 0, self._embed(held.outer['embedding'], batch), x_btd
    )
    x_btd = jax.lax.cond(
      common['embeds'], begin, lambda x_btd: x_btd, carry.ahead[0]
    )
    blocks = pipeline_chunk.received(
      plan, carry.ahead, chunk, _row(carry.caches, cache)
    )
    layers = held.layers.row(chunk // plan.stages)
    layers = layers.replace(used=common['forward_places'])
    (y_btd, after, _), _ = self._run_chunk(
      layers, batch, layers.params, x_btd, blocks
    )
    carry = carry.replace(
      inputs=_stored(carry.inputs, place, x_btd, live),
      caches=_stored(carry.caches, cache, after, live),
    )
    return carry, pipeline_chunk.sent(plan, y_btd, after, chunk + 1)

  def _backward(self, held: _Held, row, common, carry: _Carry):
    """The gradients of one chunk, and the message to the stage before."""
    plan = self.plan
    chunk, micro_batch, place, cache, deposit = row
    live, chunk = chunk != IDLE, jnp.maximum(chunk, 0)
    v = chunk // plan.stages
    batch = self._micro_batch(held, micro_batch)
    layers = held.layers.row(v).replace(used=common['backward_places'])
    outputs, transpose, stats = jax.vjp(
      functools.partial(self._run_chunk, layers, batch),
      layers.params,
      _row(carry.inputs, place),
      _row(carry.caches, cache),
      has_aux=True,
    )
    # The first B of a micro-batch at this stage finds another's deposits.
    d_blocks = jnp.where(v == plan.chunks - 1, 0, _row(carry.deposits, deposit))
    none = jnp.zeros_like(d_blocks)
    d_blocks += pipeline_chunk.received(plan, carry.behind, chunk + 1, none)
    is_last = live & (chunk == plan.stages * plan.chunks - 1)
    carry, d_y, d_blocks = jax.lax.cond(
      common['reads_out'],
      functools.partial(self._read_out, held, batch, outputs[:2], is_last),
      lambda *args: args,
      *(carry, carry.behind[0], d_blocks),
    )
    d_balance = self._balance_weight(batch).astype(outputs[2].dtype)
    d_params, d_x, d_blocks = transpose((d_y, d_blocks, d_balance))
    carry = carry.replace(
      deposits=_stored(carry.deposits, deposit, d_blocks, live),
      layers=_added(carry.layers, v, d_params, live),
      stats=_added(carry.stats, v, stats, live),
    )
    d_first = jnp.where(live & (chunk == 0), d_x, 0)
    carry = jax.lax.cond(
      common['embeds_back'],
      functools.partial(self._embed_back, held, batch, d_first),
      lambda carry: carry,
      carry,
    )
    return carry, pipeline_chunk.sent(plan, d_x, d_blocks, chunk)

  def _run_chunk(self, layers: Layers, batch, params, x_btd, blocks):
    shared = Pass(
      config=self.config.model,
      segment_ids=batch['segment_ids'],
      mask=batch['segment_ids'] > 0,
      observe=True,
      split=self._is_split(batch),
    )
    layers = layers.replace(params=params)
    return pipeline_chunk.run_chunk(self.plan, layers, x_btd, blocks, shared)

  def _read_out(self, held, batch, streams, is_last, carry, d_y, d_blocks):
    """Adds loss and head after the last chunk; other stages add nothing."""
    grad = jax.grad(self._loss, (0, 1, 2), has_aux=True)
    (d_outer, *d_streams), sums = grad(held.outer, *streams, batch)
    add = lambda total, x: total + jnp.where(is_last, x, 0)
    carry = carry.replace(
      outer=jax.tree.map(add, carry.outer, d_outer),
      sums=jax.tree.map(add, carry.sums, sums),
    )
    choose = functools.partial(jnp.where, is_last)
    return carry, *map(choose, d_streams, (d_y, d_blocks))

  def _loss(self, outer, y_btd, blocks, batch):
    sources = jnp.concatenate([blocks, y_btd[None]])
    hidden_btd, _ = read_out(outer, sources, self.config.model)
    sums = cross_entropy(
      hidden_btd,
      outer['head'],
      batch['targets'],
      batch['loss_mask'],
      chunk=self.config.loss.chunk,
      z_loss=self.config.loss.z_loss,
    )
    return sums.loss + sums.z, sums

  def _balance_weight(self, batch):
    """The factor of the auxiliary loss, as in an undivided objective."""
    model = self.config.model
    if model.router.balance != 'aux_loss':
      return jnp.zeros(())
    mask_bt = batch['loss_mask'].astype(jnp.float32)
    return model.router.aux_weight * jnp.sum(mask_bt)

  def _embed(self, embedding_ad, batch):
    return embed(embedding_ad, batch['tokens'], self.config.model)

  def _embed_back(self, held, batch, d_x, carry):
    run = lambda embedding_ad: self._embed(embedding_ad, batch)
    _, transpose = jax.vjp(run, held.outer['embedding'])
    (d_embedding,) = transpose(d_x)
    total = carry.outer['embedding'] + d_embedding
    return carry.replace(outer=carry.outer | {'embedding': total})

  def _micro_batch(self, held: _Held, number) -> Batch:
    """[B, T] arrays; on a context axis in the order of its fragments.

    The loss is a sum over tokens: its targets follow the mixers' order, so
    that nothing of the model's width has to be put back.
    """
    batch = jax.tree.map(lambda x: _row(x, number), held.batch)
    if not self._is_split(batch):
      return batch
    return jax.tree.map(lambda x: context.balance(x, 'batch', 'seq'), batch)

  def _is_split(self, batch: Batch) -> bool:
    reach = self.config.model.kda.conv_width - 1
    return context.is_split(batch['tokens'].shape[-1], reach)


def _row(x, at):
  return jax.lax.dynamic_index_in_dim(x, at, keepdims=False)


def _stored(buffer, place, x, live):
  """`x` at a place of a buffer, where the operation is not idle."""
  x = jnp.where(live, x, _row(buffer, place))
  return jax.lax.dynamic_update_index_in_dim(buffer, x, place, 0)


def _added(totals, at, tree, live):
  """`tree` added to the row `at` of every total."""

  def add(total, x):
    x = _row(total, at) + jnp.where(live, x, 0)
    return jax.lax.dynamic_update_index_in_dim(total, x, at, 0)

  return jax.tree.map(add, totals, tree)


def _zero_rows(count, like):
  x = jnp.zeros((count, *like.shape), like.dtype)
  return jax.sharding.reshard(x, jax.P(None, *like.sharding.spec))
