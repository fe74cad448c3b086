"""A checkpoint written on one mesh continues on another."""

import dataclasses

import jax
import numpy as np
import pytest

from trimoe_jax import sharding, train_state
from trimoe_jax.checkpoint import Checkpointer
from trimoe_jax.train_step import BATCH_AXES, make_train_step

pytestmark = pytest.mark.slow  # a training step to compile for each mesh
ROWS, TIME = 8, 32
BEFORE, AFTER = 2, 2


class Trainer:
  """Steps of one configuration on one mesh."""

  def __init__(self, config, sizes):
    self.config = config
    self.optimizer, schedule = train_state.optimizer_of(config)
    self.mesh = sharding.make_mesh(sizes)
    step = make_train_step(config, self.optimizer, schedule)
    self._step = jax.jit(step, donate_argnums=0)

  def create(self):
    return train_state.create(self.config, self.optimizer, self.mesh)

  def abstract(self):
    return train_state.abstract(self.config, self.optimizer, self.mesh)

  def run(self, state, steps):
    """The state after `steps`, and their losses."""
    where = jax.NamedSharding(self.mesh, sharding.spec(BATCH_AXES))
    losses = []
    with jax.set_mesh(self.mesh):
      for step in steps:
        state, metrics = self._step(state, jax.device_put(batch(step), where))
        losses.append(float(metrics['loss']))
    return state, losses


def batch(step):
  """The batch of a step: a function of its number alone."""
  ids = np.random.default_rng(step).integers(0, 256, (1, ROWS, TIME + 1))
  ids = ids.astype(np.int32)
  segments = np.ones((1, ROWS, TIME), np.int32)
  segments[:, :, 21:] = 2
  return {
    'tokens': ids[..., :-1],
    'targets': ids[..., 1:],
    'segment_ids': segments,
    'loss_mask': segments > 0,
  }


@pytest.fixture(scope='module')
def saved(small_config, tmp_path_factory):
  """A checkpoint after BEFORE steps on eight devices, and what follows there.

  Returns the configuration, the folder, the losses after it and the state.
  """
  config = small_config(stages=[dict(context=TIME, batch=ROWS, steps=4)])
  moe = dataclasses.replace(config.model.moe, dispatch='ring')
  model = dataclasses.replace(config.model, moe=moe)
  config = dataclasses.replace(config, model=model)
  trainer = Trainer(config, {'data': 4, 'expert': 2})
  state, _ = trainer.run(trainer.create(), range(BEFORE))
  folder = tmp_path_factory.mktemp('elastic')
  with Checkpointer(folder) as checkpointer:
    checkpointer.save(BEFORE, state, data_position={'next_step': BEFORE})
    checkpointer.wait()
  state, losses = trainer.run(state, range(BEFORE, BEFORE + AFTER))
  return config, folder, losses, state


@pytest.mark.parametrize(
  'sizes',
  [
    {'data': 2, 'expert': 2},
    {'data': 2, 'expert': 4},
    {'data': 2},
    {},
    {'context': 2, 'tensor': 2},
  ],
  ids=str,
)
def test_continues_on_another_mesh(saved, sizes):
  config, folder, losses, state = saved
  trainer = Trainer(config, sizes)
  with Checkpointer(folder, read_only=True) as checkpointer:
    restored = checkpointer.restore(trainer.abstract())
  assert restored.data_position == {'next_step': BEFORE}
  first = restored.state
  assert jax.tree.leaves(first.params)[0].sharding.mesh == trainer.mesh
  after, got = trainer.run(first, range(BEFORE, BEFORE + AFTER))
  np.testing.assert_allclose(got, losses, rtol=1e-6)
  assert int(after.step) == BEFORE + AFTER
  assert_close(after.params, state.params, 1e-4)
  # A score that changes by its rounding may cross a bin's edge.
  assert_close(after.router.bias, state.router.bias, 5e-3)


def test_restores_every_number_bitwise(saved):
  config, folder, _, _ = saved
  states = []
  for sizes in ({'data': 4, 'expert': 2}, {'tensor': 2}):
    with Checkpointer(folder, read_only=True) as checkpointer:
      states.append(checkpointer.restore(Trainer(config, sizes).abstract()))
  one, other = (s.state.replace(key=None) for s in states)
  jax.tree.map(np.testing.assert_array_equal, one, other)


def assert_close(got, want, tolerance):
  def close(x, y):
    scale = max(float(np.abs(y).max()), 1e-30)
    np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * scale)

  jax.tree.map(lambda x, y: close(np.asarray(x), np.asarray(y)), got, want)
