"""Pipeline parallelism: interleaved 1F1B and block caches as one program.

The P ranks of the 'pipe' axis are stages. `pipeline_schedule` says which chunk
of layers meets which micro-batch in a tick, `pipeline_layout` which layers a
chunk has. One `lax.scan` a phase runs the ticks; derivatives are taken chunk by
chunk, so a stage keeps the inputs of chunks in flight and nothing else of a
forward pass. A tick ends with one permutation forward and one backward, each of
one array of 1 + W residual streams:

    forward:  the open block's sum, and a window of W slots of the block cache
    backward: its gradient, and the gradients deposited in the same slots

Only 'pipe' is manual here; inside, the model runs as it does without a
pipeline, over whatever the other axes shard. All devices run the same
instructions: an idle stage works on what it has and throws it away, and what
only some stages need (embedding, head, places that not every chunk uses) is
skipped in ticks when none does. Stages tick together, so neither costs time,
and no collective of a layer can wait for a stage that left it out.

Legend: b batch, t time, d model width, n slots of the block cache.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from trimoe_jax import sharding
from trimoe_jax.config import TrainConfig
from trimoe_jax.losses import LossSums, cross_entropy
from trimoe_jax.model import layout, residual, router
from trimoe_jax.model.block import Pass, run_body
from trimoe_jax.model.model import embed, read_out
from trimoe_jax.model.residual import Residual
from trimoe_jax.model.router import RouterState, RouterStats
from trimoe_jax.parallel import context, pipeline_layout, pipeline_schedule
from trimoe_jax.parallel.pipeline_layout import AXIS, NONE, Plan
from trimoe_jax.parallel.pipeline_schedule import IDLE, Schedule

OUTER = ('embedding', 'output_mix', 'final_norm', 'head')
Batch = dict[str, jax.Array]


class _Held(struct.PyTreeNode):
  """What a stage reads: its layers by place, [V, *repeats, ...], the rest."""

  layers: Any
  states: Any
  numbers: Any
  outer: Any
  batch: Batch


class _Carry(struct.PyTreeNode):
  """What a stage keeps from tick to tick.

  `inputs` [places, B, T, d] of chunks in flight; `caches` and `deposits`
  [places, N, B, T, d]; `ahead` and `behind` [1 + W, B, T, d] came from the
  stage before and after.
  """

  inputs: jax.Array
  caches: jax.Array
  deposits: jax.Array
  ahead: jax.Array
  behind: jax.Array
  layers: Any  # summed gradients
  outer: Any
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
    config: of the run; `pipeline.chunks` are those of one stage.
  """
  plan = pipeline_layout.plan(
    config.model, sharding.axis_size(AXIS), config.pipeline.chunks
  )
  schedule = pipeline_schedule.interleaved(
    plan.stages, plan.chunks, batch['tokens'].shape[0]
  )
  program = _Program(plan, schedule, config)
  layers = pipeline_layout.to_stages(plan, params)
  states = pipeline_layout.states_to_stages(plan, state)
  outer = {name: params[name] for name in OUTER}
  staged = (layers, states, program.numbers(), program.own_table())
  run = jax.shard_map(
    program.run,
    in_specs=(jax.P(AXIS), jax.P(), jax.P()),
    out_specs=(jax.P(AXIS), jax.P()),
    axis_names={AXIS},
    check_vma=False,  # stages differ in everything; nothing is left to check
  )
  whole = jax.tree.map(_off_pipe, outer)
  (layers, stats), (outer, sums) = run(staged, whole, batch)
  outer = jax.tree.map(
    lambda g, p: jax.sharding.reshard(g, jax.typeof(p).sharding.spec),
    outer,
    {name: params[name] for name in OUTER},
  )
  grads = pipeline_layout.from_stages(plan, layers, params) | outer
  return grads, sums, pipeline_layout.stats_from_stages(plan, stats)


def _off_pipe(x: jax.Array) -> jax.Array:
  rest = map(pipeline_layout.without_pipe, jax.typeof(x).sharding.spec)
  return jax.sharding.reshard(x, jax.P(*rest))


@dataclasses.dataclass(frozen=True)
class _Program:
  """The program of one stage; methods run inside the `shard_map`."""

  plan: Plan
  schedule: Schedule
  config: TrainConfig

  def numbers(self) -> Any:
    """The layer at each place, [P, V, *repeats]."""
    plan = self.plan
    numbers = plan.spread(plan.by_stage(plan.layer_at))
    return jax.tree.map(lambda x: x.astype(np.int32), numbers)

  def own_table(self) -> dict[str, np.ndarray]:
    """What each stage does, [P, ticks, ...]; chunk, micro-batch, places."""
    inputs, caches, deposits = self._slots()
    by_kind = {}
    for kind in ('forward', 'backward'):
      places = [getattr(s, kind)[..., None] for s in (inputs, caches, deposits)]
      table = np.concatenate([getattr(self.schedule, kind), *places], -1)
      by_kind[kind] = np.swapaxes(table, 0, 1)
    return by_kind

  def _slots(self):
    schedule = self.schedule
    return (
      pipeline_schedule.input_slots(schedule),
      pipeline_schedule.cache_slots(schedule),
      pipeline_schedule.deposit_slots(schedule),
    )

  def common_table(self) -> dict[str, Any]:
    """What any stage needs in a tick, [ticks, ...]: the same for all."""
    plan, schedule = self.plan, self.schedule
    last = plan.stages * plan.chunks - 1
    table = {
      'embeds': (schedule.forward[..., 0] == 0).any(1),
      'embeds_back': (schedule.backward[..., 0] == 0).any(1),
      'reads_out': (schedule.backward[..., 0] == last).any(1),
    }
    for kind in ('forward', 'backward'):
      chunk = getattr(schedule, kind)[..., 0]
      used = (plan.layer_at[chunk] != NONE) & (chunk != IDLE)[..., None]
      table[f'{kind}_used'] = plan.spread(used.any(1))
    return table

  def run(self, staged, outer, batch):
    """All ticks: (gradients by place, statistics), (the rest of both)."""
    layers, states, numbers, own = jax.tree.map(lambda x: x[0], staged)
    held = _Held(layers, states, numbers, outer, batch)
    carry = self._start(held)
    table = (own, self.common_table())
    for phase, ops in zip(self.schedule.phases(), _PHASES):
      if not len(phase):
        continue
      rows = jax.tree.map(lambda x, p=phase: x[p.start : p.stop], table)
      tick = functools.partial(self._tick, held=held, ops=ops)
      carry, _ = jax.lax.scan(tick, carry, rows)
    total = functools.partial(jax.lax.psum, axis_name=AXIS)
    stage = lambda tree: jax.tree.map(lambda x: x[None], tree)
    return (
      stage((carry.layers, carry.stats)),
      jax.tree.map(total, (carry.outer, carry.sums)),
    )

  def _start(self, held: _Held) -> _Carry:
    plan, model = self.plan, self.config.model
    inputs, caches, deposits = (slots.count for slots in self._slots())
    tokens = held.batch['tokens'].shape[1:]

    def room(*leading):
      x = jnp.zeros((*leading, *tokens, model.width), model.dtype)
      return sharding.constrain(x, *(None,) * len(leading), *residual.STREAM)

    own = lambda tree: jax.tree.map(lambda x: x[0], tree)
    first, blocks = room(), room(plan.slots)
    used = jax.tree.map(lambda at: jnp.ones(at.shape, bool), plan.places)
    shapes = jax.eval_shape(
      lambda *args: self._chunk(
        *args, held=own(held.replace(outer=None, batch=None)), used=used,
        shared=self._shared(self._micro_batch(held, 0)),
      )[1],
      own(held.layers), first, blocks,
    )  # fmt: skip
    sums = jax.eval_shape(
      lambda: self._loss(held.outer, first, blocks, self._micro_batch(held, 0))[
        1
      ]
    )
    return _Carry(
      inputs=room(inputs),
      caches=room(caches, plan.slots),
      deposits=room(deposits, plan.slots),
      ahead=room(1 + plan.window),
      behind=room(1 + plan.window),
      layers=jax.tree.map(jnp.zeros_like, held.layers),
      outer=jax.tree.map(jnp.zeros_like, held.outer),
      sums=jax.tree.map(sharding.zeros, sums),
      stats=jax.tree.map(lambda x: _stacked_zeros(plan.chunks, x), shapes),
    )

  def _tick(self, carry, rows, *, held, ops):
    own, common = rows
    stages = self.plan.stages
    sent = {}
    if 'forward' in ops:
      carry, ahead = self._forward(carry, held, own['forward'], common)
      up = [(p, (p + 1) % stages) for p in range(stages)]
      sent['ahead'] = jax.lax.ppermute(ahead, AXIS, up)
    if 'backward' in ops:
      carry, behind = self._backward(carry, held, own['backward'], common)
      down = [(p, (p - 1) % stages) for p in range(stages)]
      sent['behind'] = jax.lax.ppermute(behind, AXIS, down)
    return carry.replace(**sent), None

  def _forward(self, carry, held, row, common):
    """One chunk forward: the carry and what the next stage gets."""
    chunk, micro, place, cache, _ = row
    live, chunk = chunk != IDLE, jnp.maximum(chunk, 0)
    batch = self._micro_batch(held, micro)
    x_btd = carry.ahead[0]
    x_btd = jax.lax.cond(
      common['embeds'],
      lambda x_btd: jnp.where(
        chunk == 0,
        embed(held.outer['embedding'], batch['tokens'], self.config.model),
        x_btd,
      ),
      lambda x_btd: x_btd,
      x_btd,
    )
    blocks = _row(carry.caches, cache)
    blocks = self._received(carry.ahead[1:], chunk, blocks)
    mine = self._of_chunk(held, chunk)
    (y_btd, after, _), _ = self._chunk(
      mine.layers,
      x_btd,
      blocks,
      held=mine,
      used=common['forward_used'],
      shared=self._shared(batch),
    )
    carry = carry.replace(
      inputs=_stored(carry.inputs, place, x_btd, live),
      caches=_stored(carry.caches, cache, after, live),
    )
    return carry, self._sent(y_btd, after, chunk + 1)

  def _backward(self, carry, held, row, common):
    """One chunk again, and its gradients: what the stage before gets."""
    chunk, micro, place, cache, deposit = row
    live, chunk = chunk != IDLE, jnp.maximum(chunk, 0)
    batch = self._micro_batch(held, micro)
    mine = self._of_chunk(held, chunk)
    run = functools.partial(
      self._chunk,
      held=mine,
      used=common['backward_used'],
      shared=self._shared(batch),
    )
    (y_btd, blocks, balance), transpose, stats = jax.vjp(
      run,
      mine.layers,
      _row(carry.inputs, place),
      _row(carry.caches, cache),
      has_aux=True,
    )
    d_blocks = _row(carry.deposits, deposit)
    # The first B of a micro-batch at this stage finds another's deposits.
    is_first = chunk // self.plan.stages == self.plan.chunks - 1
    d_blocks = jnp.where(is_first, 0, d_blocks)
    d_blocks += self._received(
      carry.behind[1:], chunk + 1, jnp.zeros_like(d_blocks)
    )
    is_last = live & (chunk == self.plan.stages * self.plan.chunks - 1)
    d_y, d_blocks, carry = jax.lax.cond(
      common['reads_out'],
      lambda args: self._read_out(*args, held, batch, (y_btd, blocks), is_last),
      lambda args: args,
      (carry.behind[0], d_blocks, carry),
    )
    d_balance = self._balance_weight(batch).astype(balance.dtype)
    d_layers, d_x, d_blocks = transpose((d_y, d_blocks, d_balance))
    carry = carry.replace(
      deposits=_stored(carry.deposits, deposit, d_blocks, live),
      layers=_added(carry.layers, chunk // self.plan.stages, d_layers, live),
      stats=_added(carry.stats, chunk // self.plan.stages, stats, live),
    )
    carry = jax.lax.cond(
      common['embeds_back'],
      lambda carry: self._embed_back(
        carry, held, batch, d_x, live & (chunk == 0)
      ),
      lambda carry: carry,
      carry,
    )
    return carry, self._sent(d_x, d_blocks, chunk)

  def _read_out(self, d_y, d_blocks, carry, held, batch, at, is_last):
    """Loss and head of the last chunk; other stages throw theirs away."""
    grads, sums = jax.grad(self._loss, (0, 1, 2), has_aux=True)(
      held.outer, *at, batch
    )
    d_outer, d_read, d_sources = grads
    keep = lambda total, x: total + jnp.where(is_last, x, 0)
    carry = carry.replace(
      outer=jax.tree.map(keep, carry.outer, d_outer),
      sums=jax.tree.map(keep, carry.sums, sums),
    )
    d_y = jnp.where(is_last, d_read, d_y)
    return d_y, jnp.where(is_last, d_sources, d_blocks), carry

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

  def _embed_back(self, carry, held, batch, d_x, is_first):
    model = self.config.model
    run = lambda weight: embed(weight, batch['tokens'], model)
    _, transpose = jax.vjp(run, held.outer['embedding'])
    (d_weight,) = transpose(jnp.where(is_first, d_x, 0))
    total = carry.outer['embedding'] + d_weight
    return carry.replace(outer=carry.outer | {'embedding': total})

  def _chunk(self, layers, x_btd, blocks, *, held, used, shared):
    """(open block's sum, block cache, auxiliary loss) and statistics."""
    start = (x_btd, blocks, jnp.zeros((), jnp.float32))
    inputs = (layers, held.states, held.numbers, used)
    certain = self.plan.spread((self.plan.layer_at != NONE).all(0))
    return self._run_nodes(self.plan.nodes, certain, inputs, start, shared)

  def _run_nodes(self, nodes, certain, inputs, carry, shared):
    stats = {}
    for position, node in enumerate(nodes):
      name = layout.child_name(position, node)
      own = tuple(tree[name] for tree in inputs)
      if isinstance(node, layout.Layer):
        run = functools.partial(self._layer, node, certain[name], shared)
      else:
        inner = functools.partial(
          self._run_nodes, node.body, certain[name], shared=shared
        )
        run = lambda carry, own, inner=inner: jax.lax.scan(
          lambda carry, own: inner(inputs=own, carry=carry), carry, own
        )
      carry, stats[name] = run(carry, own)
    return carry, stats

  def _layer(self, node, certain, shared, carry, own):
    """One place of the template, left out in ticks when no stage uses it."""
    *own, used = own
    run = lambda carry: self._live_layer(node, shared, carry, own)
    if np.all(certain):
      return run(carry)
    zeros = jax.tree.map(sharding.zeros, jax.eval_shape(run, carry)[1])
    return jax.lax.cond(used, run, lambda carry: (carry, zeros), carry)

  def _live_layer(self, node, shared, carry, own):
    params, state, number = own
    x_btd, blocks, balance = carry
    live, number = number != NONE, jnp.maximum(number, 0)
    slot, within = jnp.divmod(number, self.config.model.residual_block)
    begins = live & (within == 0)
    kept = jax.lax.dynamic_index_in_dim(blocks, slot, keepdims=False)
    blocks = jax.lax.dynamic_update_index_in_dim(
      blocks, jnp.where(begins, x_btd, kept), slot, 0
    )
    x_btd = jnp.where(begins, 0, x_btd)
    stream = Residual(blocks, x_btd, slot + 1, ~begins)
    if state is not None:
      state = jax.tree.map(lambda x: x[None], state)
    stream, aux, _ = run_body(
      (node,), ({'layer_0': params}, state, None), stream, shared
    )
    stats = jax.tree.map(lambda x: jnp.where(live, x, 0), aux.router)
    if stats is not None and self.config.model.router.balance == 'aux_loss':
      balance += router.aux_loss(router.reduce(stats)).astype(balance.dtype)
    x_btd = jnp.where(live, stream.partial, x_btd)
    return (x_btd, blocks, balance), jax.tree.map(lambda x: x[0], stats)

  def _balance_weight(self, batch):
    """The weight of the auxiliary loss, which counts per token."""
    model = self.config.model
    if model.router.balance != 'aux_loss':
      return jnp.zeros(())
    return model.router.aux_weight * jnp.sum(batch['loss_mask'], dtype=float)

  def _micro_batch(self, held, number) -> Batch:
    """[B, T] arrays, over the context axis in the order of the mixers.

    The loss is a sum over tokens, so its targets follow instead of what is
    wide being put back.
    """
    batch = jax.tree.map(lambda x: _row(x, number), held.batch)
    if not self._is_split(batch):
      return batch
    balance = lambda x: context.balance(x, 'batch', 'seq')
    return jax.tree.map(balance, batch)

  def _is_split(self, batch) -> bool:
    reach = self.config.model.kda.conv_width - 1
    return context.is_split(batch['tokens'].shape[-1], reach)

  def _shared(self, batch) -> Pass:
    return Pass(
      config=self.config.model,
      segment_ids=batch['segment_ids'],
      mask=batch['segment_ids'] > 0,
      observe=True,
      split=self._is_split(batch),
    )

  def _of_chunk(self, held, chunk) -> _Held:
    """What this stage holds of one of its chunks."""
    v = chunk // self.plan.stages
    own = lambda tree: jax.tree.map(lambda x: _row(x, v), tree)
    return _Held(
      own(held.layers), own(held.states), own(held.numbers), None, None
    )

  def _hop(self, chunk):
    """The cache slots [first, last) of the hop into `chunk`; C has none."""
    none = np.zeros(1, np.int32)
    first = np.concatenate([self.plan.first, none])
    last = np.concatenate([self.plan.last, none])
    return jnp.asarray(first)[chunk], jnp.asarray(last)[chunk]

  def _sent(self, x_btd, blocks, chunk):
    """[1 + W, B, T, d]: a stream, and the window of the hop into `chunk`."""
    first, _ = self._hop(chunk)
    at = first + jnp.arange(self.plan.window)
    window = _rows(blocks, jnp.minimum(at, self.plan.slots - 1))
    return jnp.concatenate([x_btd[None], window])

  def _received(self, window, chunk, blocks):
    """`blocks` with the slots of the hop into `chunk`."""
    first, last = self._hop(chunk)
    slot = jnp.arange(self.plan.slots)
    came = (first <= slot) & (slot < last)
    at = jnp.clip(slot - first, 0, self.plan.window - 1)
    return jnp.where(came[:, None, None, None], _rows(window, at), blocks)


_PHASES = (('forward',), ('forward', 'backward'), ('backward',))


def _row(x, at):
  return jax.lax.dynamic_index_in_dim(x, at, keepdims=False)


def _rows(x, at):
  """x[at] along the first axis; the others keep their layout."""
  spec = jax.typeof(x).sharding.spec
  return x.at[at].get(out_sharding=jax.P(None, *spec[1:]))


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


def _stacked_zeros(count, like):
  spec = like.sharding.spec
  x = jnp.zeros((count, *like.shape), like.dtype)
  return jax.sharding.reshard(x, jax.P(None, *spec))
