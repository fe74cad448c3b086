"""Learning-rate curves over the tokens of a run with several stages.

A curve is a function of the global step and nothing else, so a resumed run
continues on it. Stages have different batches and context lengths; progress
is counted in tokens, which keeps the curve the same when a stage's batch
changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trimoe_jax.optim.config import OptimConfig


@dataclasses.dataclass(frozen=True)
class Stage:
  """What a curve needs to know about one stage of training."""

  steps: int
  tokens_per_step: int = 1
  peak: float = 1.0  # multiplies the curve while the stage lasts

  def __post_init__(self):
    if self.steps < 1 or self.tokens_per_step < 1:
      raise ValueError(
        f'a stage has steps={self.steps} and '
        f'tokens_per_step={self.tokens_per_step}; both must be at least 1.'
      )
    if not self.peak > 0:
      raise ValueError(f'a stage has peak={self.peak}; it must be positive.')


def make_schedule(
  config: OptimConfig, stages: Sequence[Stage]
) -> optax.Schedule:
  """The learning rate as a fraction of its peak, as a function of the step.

  cosine: linear from 0 over `warmup_fraction` of the tokens, then half a
  cosine from 1 to `floor` at the last token. wsd (warm-up, stable, decay): the
  same warm-up, 1, then linear to `floor` over the last `decay_fraction`. Both
  are multiplied by the `peak` of the stage that the step lies in. A step takes
  the value at its last token: the first step is never lost to a rate of 0, and
  the last one gets `floor`. Steps past the end keep the last value.

  Args:
    config: the curve's shape.
    stages: in the order in which they run; at least one.

  Raises:
    ValueError: there are no stages.
  """
  if not stages:
    raise ValueError('make_schedule got no stages; give at least one.')
  last_steps = np.cumsum([s.steps for s in stages])
  # Float64 on the host: token counts of a long run do not fit in int32.
  last_tokens = np.cumsum([float(s.steps) * s.tokens_per_step for s in stages])
  # Progress, not tokens: float32 holds a fraction as exactly as it holds 1e13.
  knots = np.concatenate([[0.0], last_tokens / last_tokens[-1]])
  steps = np.concatenate([[0], last_steps])
  peaks = np.array([s.peak for s in stages], np.float32)
  curve = _cosine(config) if config.schedule == 'cosine' else _wsd(config)

  def schedule(step: jax.typing.ArrayLike) -> jax.Array:
    done = jnp.asarray(step, jnp.float32) + 1
    progress = jnp.interp(
      done, jnp.asarray(steps, jnp.float32), jnp.asarray(knots, jnp.float32)
    )
    stage = jnp.searchsorted(jnp.asarray(last_steps), step, side='right')
    peak = jnp.asarray(peaks)[jnp.minimum(stage, len(peaks) - 1)]
    return peak * curve(progress)

  return schedule


def _cosine(config: OptimConfig) -> optax.Schedule:
  warmup = config.warmup_fraction
  if warmup == 1:
    return optax.linear_schedule(0.0, 1.0, 1)
  decay = optax.cosine_decay_schedule(1.0, 1 - warmup, alpha=config.floor)
  return _after_warmup(warmup, decay)


def _wsd(config: OptimConfig) -> optax.Schedule:
  begin = 1 - config.decay_fraction - config.warmup_fraction
  if config.decay_fraction == 0:
    return _after_warmup(config.warmup_fraction, lambda _: 1.0)
  decay = optax.linear_schedule(
    1.0, config.floor, config.decay_fraction, transition_begin=begin
  )
  return _after_warmup(config.warmup_fraction, decay)


def _after_warmup(warmup: float, then: optax.Schedule) -> optax.Schedule:
  """Linear from 0 to 1 at progress `warmup`, followed by `then`."""
  if warmup == 0:
    return then
  return optax.join_schedules(
    [optax.linear_schedule(0.0, 1.0, warmup), then], [warmup]
  )
