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
from trimoe_jax.model.model import Model
from trimoe_jax.model.router import RouterState, RouterStats
from trimoe_jax.optim import clip_by_global_norm
from trimoe_jax.train_state import TrainState

# Arrays [micro-batches, B, T]: tokens, targets, segment_ids int32, loss_mask.
Batch = dict[str, jax.Array]
BATCH_AXES = (None, 'batch', 'seq')
Metrics = dict[str, jax.Array]


def batch_shape(stage: StageConfig) -> tuple[int, int, int]:
  """[micro-batches, B, T] of a stage's batches."""
  rows = stage.batch // stage.micro_batches
  return stage.micro_batches, rows, stage.context


def objective(
  params: Any, batch: Batch, state: RouterState, config: TrainConfig
) -> tuple[jax.Array, tuple[LossSums, RouterStats]]:
  """Summed loss of one micro-batch [B, T], its parts, and what was routed."""
  hidden_btd, aux = Model(config.model).apply(
    {'params': params},
    batch['tokens'],
    state,
    batch['segment_ids'],
    observe=True,
    method='hidden',
  )
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
    balance = router.aux_loss(router.reduce(aux.router))
    total += config.model.router.aux_weight * balance * sums.tokens
  return total, (sums, aux.router)


def accumulate(
  params: Any, batch: Batch, state: RouterState, config: TrainConfig
) -> tuple[Any, LossSums, RouterStats]:
  """Summed gradients, loss parts and statistics over the micro-batches."""
  grad = jax.grad(objective, has_aux=True)
  count = batch['tokens'].shape[0]
  if count == 1:
    only = jax.tree.map(lambda x: x[0], batch)
    grads, (sums, stats) = grad(params, only, state, config)
    return grads, sums, stats

  def step(carry, micro_batch):
    grads, (sums, stats) = grad(params, micro_batch, state, config)
    sums = jax.tree.map(jnp.add, carry[:2], (grads, sums))
    return (*sums, router.combine(carry[2], stats)), None

  first = jax.tree.map(lambda x: x[0], batch)
  grads, (sums, stats) = jax.eval_shape(
    lambda *args: grad(*args, config), params, first, state
  )
  zero = jax.tree.map(sharding.zeros, (grads, sums, stats))
  carry, _ = jax.lax.scan(step, zero, batch)
  return carry


def make_train_step(
  config: TrainConfig,
  optimizer: optax.GradientTransformation,
  schedule: optax.Schedule,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
  """The training step, to be jitted with the state donated.

  The loss is the mean over the step's tokens, whatever the micro-batches. A
  step whose gradient is not finite changes nothing but the step count: the
  parameters, the optimizer and the router keep their state.
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
    new = jax.tree.map(
      lambda new, old: jnp.where(finite, new, old),
      new.replace(key=None),
      state.replace(key=None),
    )
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
