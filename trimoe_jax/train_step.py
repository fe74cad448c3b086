"""One optimizer step: loss, gradients, update, router solve.

Legend: b batch, t time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from trimoe_jax import sharding
from trimoe_jax.config import TrainConfig
from trimoe_jax.data import StageConfig
from trimoe_jax.losses import LossSums, cross_entropy
from trimoe_jax.model import router
from trimoe_jax.model.media import images_of
from trimoe_jax.model.model import Model
from trimoe_jax.model.router import RouterState, RouterStats
from trimoe_jax.model.vision_config import PATCH
from trimoe_jax.optim import clip_by_global_norm
from trimoe_jax.parallel import pipeline
from trimoe_jax.train_state import TrainState

# Arrays [micro-batches, B, T]: tokens, targets, segment_ids int32, loss_mask;
# and of stages with images patches [micro-batches, B, P, 3, 14, 14] uint8 and
# grids [micro-batches, B, M, 3] int32 (`model/media.py`).
Batch = dict[str, jax.Array]
BATCH_AXES = (None, 'batch', 'seq')
IMAGE_AXES = (None, 'batch')
Metrics = dict[str, jax.Array]


def batch_axes(name: str) -> tuple[str | None, ...]:
  """The leading axes of one array of a batch."""
  return IMAGE_AXES if name in ('patches', 'grids') else BATCH_AXES


def batch_shape(stage: StageConfig) -> tuple[int, int, int]:
  """[micro-batches, B, T] of a stage's batches."""
  rows = stage.batch // stage.micro_batches
  return stage.micro_batches, rows, stage.context


def abstract_batch(stage: StageConfig, mesh) -> Batch:
  """Shapes, dtypes and shardings of a stage's batches, without an array."""
  shape = batch_shape(stage)
  where = jax.NamedSharding(mesh, sharding.spec(BATCH_AXES))
  ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=where)
  batch = dict.fromkeys(('tokens', 'targets', 'segment_ids'), ids)
  mask = jax.ShapeDtypeStruct(shape, bool, sharding=where)
  batch['loss_mask'] = mask
  if stage.patches:
    where = jax.NamedSharding(mesh, sharding.spec(IMAGE_AXES))
    array = lambda *shape, dtype: jax.ShapeDtypeStruct(
      (*batch_shape(stage)[:2], *shape), dtype, sharding=where
    )
    pixels = (stage.patches, 3, PATCH, PATCH)
    batch['patches'] = array(*pixels, dtype=jnp.uint8)
    batch['grids'] = array(stage.images, 3, dtype=jnp.int32)
  return batch


def objective(
  params: Any, batch: Batch, state: RouterState, config: TrainConfig
) -> tuple[jax.Array, tuple[LossSums, RouterStats]]:
  """Summed loss of one micro-batch [B, T], its parts, and what was routed."""
  hidden_btd, stats = _hidden(params, batch, state, config)
  sums = cross_entropy(
    hidden_btd,
    params['head'],
    batch['targets'],
    batch['loss_mask'],
    chunk=config.loss.chunk,
    z_loss=config.loss.z_loss,
  )
  total = sums.loss + sums.z
  if config.model.router.balance == 'aux_loss':
    balance = router.aux_loss(router.reduce(stats))
    total += config.model.router.aux_weight * balance * sums.tokens
  return total, (sums, stats)


def accumulate(
  params: Any, batch: Batch, state: RouterState, config: TrainConfig
) -> tuple[Any, LossSums, RouterStats]:
  """Summed gradients, loss parts and statistics over the micro-batches."""
  if sharding.axis_size('pipe') > 1:
    return pipeline.accumulate(params, batch, state, config)
  grad = jax.grad(objective, has_aux=True)

  def one(micro_batch):
    grads, (sums, stats) = grad(params, micro_batch, state, config)
    return (grads, sums), stats

  def add(first, second):
    sums = jax.tree.map(jnp.add, first[0], second[0])
    return sums, router.combine(first[1], second[1])

  (grads, sums), stats = _over_micro_batches(one, batch, add)
  return grads, sums, stats


def observe(
  params: Any, batch: Batch, state: RouterState, config: TrainConfig
) -> tuple[RouterStats, Metrics]:
  """What a step would observe, reduced, and its balance: forward passes only.

  For `router.warm_start`; the same statistics as those of the training step.
  """
  one = lambda micro_batch: _hidden(params, micro_batch, state, config)[1]
  stats = router.reduce(_over_micro_batches(one, batch, router.combine))
  return stats, router.metrics(stats)


def _hidden(params, batch, state, config):
  """What the head reads, and the statistics of the routers."""
  hidden_btd, aux = Model(config.model).apply(
    {'params': params},
    batch['tokens'],
    state,
    batch['segment_ids'],
    images=images_of(batch),
    observe=True,
    method='hidden',
  )
  return hidden_btd, aux.router


def _over_micro_batches(function, batch: Batch, add):
  """The sum, by `add`, of `function` over the micro-batches."""
  first = jax.tree.map(lambda x: x[0], batch)
  if batch['tokens'].shape[0] == 1:
    return function(first)
  zero = jax.tree.map(sharding.zeros, jax.eval_shape(function, first))
  step = lambda total, micro_batch: (add(total, function(micro_batch)), None)
  return jax.lax.scan(step, zero, batch)[0]


def make_train_step(
  config: TrainConfig,
  optimizer: optax.GradientTransformation,
  schedule: optax.Schedule,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
  """The training step, to be jitted with the state donated.

  The loss is the mean over the step's tokens, whatever the micro-batches. A
  step whose gradient is not finite changes nothing but the step count, which
  the learning rate follows: the parameters, the moments and the router keep
  their state.
  """

  def train_step(state: TrainState, batch: Batch):
    grads, sums, stats = accumulate(state.params, batch, state.router, config)
    tokens = jnp.maximum(sums.tokens, 1)
    grads = jax.tree.map(lambda g: g / tokens, grads)
    grads, norm = clip_by_global_norm(grads, config.optim.clip_norm)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    stats = router.reduce(stats)
    new = state.replace(
      params=optax.apply_updates(state.params, updates),
      opt_state=opt_state,
      router=router.solve(state.router, stats, config.model.router),
    )
    finite = jnp.isfinite(norm)
    new = _choose(finite, new.replace(key=None), state.replace(key=None))
    metrics = {
      'loss': sums.loss / tokens,
      'z_loss': sums.z / tokens,
      'tokens': sums.tokens,
      'grad_norm': norm,
      'learning_rate': config.optim.lr * schedule(state.step),
      'skipped': ~finite,
      **router.metrics(stats),
    }
    return new.replace(step=state.step + 1, key=state.key), metrics

  return train_step


def _choose(finite: jax.Array, new: Any, old: Any) -> Any:
  """`new` where finite, else `old`; schedules count skipped steps too."""
  counts = lambda x: isinstance(x, optax.ScaleByScheduleState)

  def choose(new, old):
    if counts(new):
      return new
    return jnp.where(finite, new, old)

  return jax.tree.map(choose, new, old, is_leaf=counts)
