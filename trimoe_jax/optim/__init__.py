"""The optimizer of the recipe, put together from optax parts."""

from __future__ import annotations

from typing import Any

import optax

from trimoe_jax.optim import groups, muon
from trimoe_jax.optim.clip import clip_by_global_norm, clip_query_key
from trimoe_jax.optim.config import OptimConfig
from trimoe_jax.optim.schedules import Stage, make_schedule

__all__ = (
  'OptimConfig',
  'Stage',
  'clip_by_global_norm',
  'clip_query_key',
  'make_optimizer',
  'make_schedule',
)


def make_optimizer(
  config: OptimConfig, params: Any, schedule: optax.Schedule
) -> optax.GradientTransformation:
  """Muon for the matrices of the layers, AdamW for all other parameters.

  Clipping is not part of it: the training step clips with
  `clip_by_global_norm`, which also returns the norm for the metrics.

  Args:
    config: rates, moments and weight decay.
    params: the parameters, or their shapes; only paths and ranks are read.
    schedule: learning rate as a fraction of its peak, by step
      (`make_schedule`).

  Raises:
    ValueError: a parameter has no group, or too few axes for its matrices.
  """
  groups.check(params)
  adam_lr = config.lr if config.adam_lr is None else config.adam_lr
  decay = optax.add_decayed_weights(config.weight_decay, groups.decay_tree)
  return optax.partition(
    {
      'muon': optax.chain(
        muon.scale_by_muon(
          config.muon_momentum,
          nesterov=config.nesterov,
          dtype=config.muon_dtype,
        ),
        decay,
        _scale_by_rate(config.lr, schedule),
      ),
      'adamw': optax.chain(
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        decay,
        _scale_by_rate(adam_lr, schedule),
      ),
    },
    groups.label_tree,
  )


def _scale_by_rate(
  lr: float, schedule: optax.Schedule
) -> optax.GradientTransformation:
  return optax.scale_by_learning_rate(lambda step: lr * schedule(step))
