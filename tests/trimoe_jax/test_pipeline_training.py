"""Training steps on pipeline stages, and what they refuse."""

import dataclasses

import jax
import numpy as np
import pytest

from trimoe_jax import sharding, train_state
from trimoe_jax.config import MeshConfig, PipelineConfig
from trimoe_jax.train_step import BATCH_AXES, make_train_step

STAGE = dict(context=32, batch=8, steps=4, micro_batches=4)


def make(config):
  """A state on the configuration's mesh, its shardings and its step."""
  optimizer, schedule = train_state.optimizer_of(config)
  mesh = sharding.make_mesh(config.mesh.sizes())
  step = jax.jit(make_train_step(config, optimizer, schedule))

  def run(state, batch):
    where = jax.NamedSharding(mesh, sharding.spec(BATCH_AXES))
    with jax.set_mesh(mesh):
      return step(state, jax.device_put(batch, where))

  return train_state.create(config, optimizer, mesh), run


def random_batch(seed):
  rng = np.random.default_rng(seed)
  ids = rng.integers(0, 256, (4, 2, 33)).astype(np.int32)
  segments = np.ones((4, 2, 32), np.int32)
  segments[:, :, 20:] = 2
  segments[0, 0, 28:] = 0
  return {
    'tokens': ids[..., :-1],
    'targets': ids[..., 1:],
    'segment_ids': segments,
    'loss_mask': segments > 0,
  }


def assert_same_state(got, want):
  close = lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4)
  jax.tree.map(close, jax.device_get(got.params), jax.device_get(want.params))
  # A score on a bin's edge may fall either way.
  np.testing.assert_allclose(got.router.bias, want.router.bias, atol=2.5e-3)


@pytest.mark.slow
def test_stages_take_the_step_of_one_device(small_config):
  """The state knows no stages: training goes on without them."""
  config = small_config(stages=[STAGE])
  one, step = make(config)
  piped, piped_step = make(
    dataclasses.replace(config, mesh=MeshConfig(pipe=2, data=2))
  )
  spec = piped.params['head'].sharding.spec
  assert spec[0] == ('data', 'context', 'pipe')
  one, metrics = step(one, random_batch(0))
  piped, piped_metrics = piped_step(piped, random_batch(0))
  for name in ('loss', 'grad_norm', 'tokens'):
    np.testing.assert_allclose(
      piped_metrics[name], metrics[name], rtol=1e-5, err_msg=name
    )
  assert_same_state(piped, one)
  where = jax.tree.map(lambda x: x.sharding, one)
  moved, _ = step(jax.device_put(piped, where), random_batch(1))
  assert_same_state(moved, step(one, random_batch(1))[0])


def test_refuses_more_chunks_than_layers(small_config):
  config = small_config(stages=[STAGE])
  message = 'are 4 chunks of layers and the model has 3 layers; choose at most'
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(
      config, mesh=MeshConfig(pipe=2), pipeline=PipelineConfig(2)
    )


def test_refuses_stages_that_nothing_fills(small_config):
  config = small_config(stages=[STAGE | dict(micro_batches=1)])
  message = 'micro_batches=1 cannot fill mesh.pipe=2 stages; choose a multiple'
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(config, mesh=MeshConfig(pipe=2))


def test_refuses_margins_of_every_token(small_config):
  config = small_config(stages=[STAGE | dict(micro_batches=1)])
  router = dataclasses.replace(config.model.router, estimator='exact')
  model = dataclasses.replace(config.model, router=router)
  message = "use the 'uniform' or 'log_edges' estimator, or mesh.pipe=1"
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(config, mesh=MeshConfig(pipe=2), model=model)


def test_a_stage_has_a_chunk():
  with pytest.raises(ValueError, match='a stage has at least 1 chunk'):
    PipelineConfig(0)
