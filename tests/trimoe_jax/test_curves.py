"""nano learns the same on every mesh."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.configs import as_dict, nano
from trimoe_jax import sharding, train_state
from trimoe_jax.config import MeshConfig, StageConfig, TrainConfig, from_dict
from trimoe_jax.train_step import BATCH_AXES, batch_shape, make_train_step

pytestmark = pytest.mark.slow  # minutes a mesh
STEPS = 20
STAGE = StageConfig(context=256, batch=8, steps=STEPS, micro_batches=2)
TEXT = ' '.join(f'{i} times {i % 97} is {i * (i % 97)}.' for i in range(4000))


def config_of(mesh):
  """nano with a short batch, in float32, so that a curve can be compared."""
  config = from_dict(TrainConfig, as_dict(nano.get_config()))
  model = dataclasses.replace(config.model, dtype='float32')
  return dataclasses.replace(
    config, model=model, stages=(STAGE,), mesh=MeshConfig(**mesh)
  )


def batch(step):
  """Bytes of a text, in two documents a row."""
  shape = batch_shape(STAGE)
  text = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int32)
  starts = np.random.default_rng(step).integers(
    0, text.size - STAGE.context - 1, shape[:2]
  )
  ids = text[starts[..., None] + np.arange(STAGE.context + 1)]
  segments = np.ones(shape, np.int32)
  segments[..., 100:] = 2
  return {
    'tokens': ids[..., :-1],
    'targets': ids[..., 1:],
    'segment_ids': segments,
    'loss_mask': segments > 0,
  }


def curve(sizes):
  config = config_of(sizes)
  optimizer, schedule = train_state.optimizer_of(config)
  mesh = sharding.make_mesh(config.mesh.sizes())
  state = train_state.create(config, optimizer, mesh)
  step = jax.jit(make_train_step(config, optimizer, schedule), donate_argnums=0)
  where = jax.NamedSharding(mesh, sharding.spec(BATCH_AXES))
  losses = []
  with jax.set_mesh(mesh):
    for i in range(STEPS):
      state, metrics = step(state, jax.device_put(batch(i), where))
      losses.append(float(metrics['loss']))
  return np.array(losses)


@pytest.fixture(scope='module')
def alone():
  losses = curve({})
  assert losses[-1] < losses[0] - 1  # it learns
  return losses


@pytest.mark.parametrize(
  'sizes',
  [{'data': 2, 'context': 2, 'expert': 2}, {'data': 4, 'context': 2}],
  ids=str,
)
def test_curve(alone, sizes):
  losses = curve(sizes)
  difference = np.abs(losses - alone)
  print(sizes, losses, f'largest difference {difference.max():.2e}')
  np.testing.assert_allclose(losses, alone, rtol=0, atol=1e-3)
