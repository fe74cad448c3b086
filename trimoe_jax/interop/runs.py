"""Runs as checkpoints, and checkpoints as the start of runs."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from trimoe_jax import sharding, train_state
from trimoe_jax.checkpoint import Checkpointer
from trimoe_jax.config import ModelConfig
from trimoe_jax.interop import hf_config
from trimoe_jax.interop.hf import Checkpoint
from trimoe_jax.model import router
from trimoe_jax.run import Run, read_config


def load(workdir: str | pathlib.Path, step: int | None = None) -> Checkpoint:
  """The model that a run has reached, on the first device.

  Args:
    workdir: of the run, which may still be going on.
    step: of the saved ones; None takes the latest.

  Raises:
    FileNotFoundError: no run, or no checkpoint of that step.
  """
  config = read_config(workdir)
  mesh = sharding.make_mesh({}, jax.devices()[:1])
  optimizer, _ = train_state.optimizer_of(config)
  abstract = train_state.abstract(config, optimizer, mesh)
  folder = pathlib.Path(workdir) / 'checkpoints'
  with Checkpointer(folder, read_only=True) as checkpointer:
    state = checkpointer.restore(abstract, step).state
  # Off the mesh, so that it can be used without one in context.
  one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  params, biases = jax.device_put((state.params, state.router), one)
  return Checkpoint(config.model, params, biases)


def save(run: Run, checkpoint: Checkpoint):
  """Makes a checkpoint the state from which a new run starts, at step 0.

  The optimizer starts afresh; the selection biases are kept.

  Raises:
    ValueError: the run has checkpoints already, or its model is another one.
  """
  config = run.config
  _check_same(checkpoint.config, config.model)
  with run.checkpointer() as checkpointer, jax.set_mesh(run.mesh):
    if checkpointer.latest_step() is not None:
      raise ValueError(
        f'{run.workdir} has checkpoints already; start in a new folder.'
      )
    state = train_state.create(config, run.optimizer, run.mesh)
    place = lambda new, old: jax.device_put(
      jnp.asarray(new, old.dtype), old.sharding
    )
    biases = router.from_bias(
      jnp.asarray(checkpoint.router.bias), config.model.router
    )
    state = state.replace(
      params=jax.tree.map(place, checkpoint.params, state.params),
      router=jax.tree.map(place, biases, state.router),
    )
    checkpointer.save(0, state, data_position={'next_step': 0})


def _check_same(have: ModelConfig, want: ModelConfig):
  """Raises ValueError naming what differs between two models."""
  have, want = (_structure(config) for config in (have, want))
  wrong = [
    f'{key} is {have[key]} in the checkpoint and {want[key]} in the run'
    for key in have
    if have[key] != want[key]
  ]
  if wrong:
    raise ValueError(
      "the run's configuration describes another model: " + '; '.join(wrong)
    )


def _structure(config: ModelConfig) -> dict[str, Any]:
  """Released keys and values, but for those that only concern computation."""
  released = hf_config.to_released(config, packed=False)
  text, vision = released['text_config'], released.get('vision_config')
  linear = text.pop('linear_attn_config')
  free = ('dtype', 'initializer_range')
  kept = {k: v for k, v in (text | linear).items() if k not in free}
  return kept | {'vision_config': vision}
