"""One step: accumulation, skipping, and what may touch the router's state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trimoe_jax import sharding, train_state
from trimoe_jax.train_step import BATCH_AXES, make_train_step

STAGE = dict(context=32, batch=4, steps=4)


def make(config, mesh_sizes=None):
  """A state and its jitted step on a mesh."""
  optimizer, schedule = train_state.optimizer_of(config)
  mesh = sharding.make_mesh(mesh_sizes or {})
  state = train_state.create(config, optimizer, mesh)
  step = jax.jit(make_train_step(config, optimizer, schedule))

  def run(state, batch):
    where = jax.NamedSharding(mesh, sharding.spec(BATCH_AXES))
    with jax.set_mesh(mesh):
      return step(state, jax.device_put(batch, where))

  return state, run


def random_batch(micro_batches=1, rows=4, time=32):
  rng = np.random.default_rng(0)
  shape = (micro_batches, rows // micro_batches, time)
  ids = rng.integers(0, 256, (rows, time + 1)).astype(np.int32)
  segments = np.ones((rows, time), np.int32)
  segments[:, 20:] = 2
  segments[0, 28:] = 0
  batch = {
    'tokens': ids[:, :-1],
    'targets': ids[:, 1:],
    'segment_ids': segments,
    'loss_mask': segments > 0,
  }
  return {k: v.reshape(shape) for k, v in batch.items()}


@pytest.fixture(scope='module')
def trained(small_config):
  """(state before, run, state after one step, metrics) of the small model."""
  state, run = make(small_config(stages=[STAGE]))
  return state, run, *run(state, random_batch())


def assert_tree_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_one_step_moves_everything(trained):
  before, _, after, metrics = trained
  assert int(after.step) == 1 and not bool(metrics['skipped'])
  assert float(metrics['tokens']) == 4 * 32 - 4
  moved = jax.tree.map(
    lambda a, b: bool(jnp.any(a != b)), before.params, after.params
  )
  still = [
    jax.tree_util.keystr(path)
    for path, m in jax.tree_util.tree_leaves_with_path(moved)
    if not m
  ]
  # A zero query hides its gain; one source alone has weight 1 in any case.
  assert all('_mix' in name for name in still), still
  assert sum('query' in name for name in still) == 1, still
  bias = np.asarray(after.router.bias)
  assert np.any(bias != 0) and abs(bias.mean()) < 1e-6
  assert bias.dtype == np.float32


def test_the_bias_is_no_parameter(trained):
  state = trained[2]
  sizes = {state.router.bias.shape, state.router.bias.shape[1:]}
  names = [
    jax.tree_util.keystr(path)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state)
    if leaf.shape in sizes
  ]
  assert not names
  assert 'bias' not in ''.join(
    jax.tree_util.keystr(path)
    for path, _ in jax.tree_util.tree_leaves_with_path(state.params)
  ).replace('dt_bias', '')


def test_a_step_that_is_not_finite_changes_nothing(trained):
  _, run, state, _ = trained
  broken = state.replace(
    params=state.params | {'final_norm': state.params['final_norm'] * jnp.nan}
  )
  after, metrics = run(broken, random_batch())
  assert bool(metrics['skipped'])
  assert int(after.step) == int(broken.step) + 1
  is_schedule = lambda x: isinstance(x, optax.ScaleByScheduleState)
  split = lambda tree: jax.tree.leaves(tree, is_leaf=is_schedule)
  schedules = 0
  for new, old in zip(split(after.opt_state), split(broken.opt_state)):
    if is_schedule(new):  # the learning rate goes on with the steps
      schedules += 1
      assert int(new.count) == int(after.step) == int(old.count) + 1
    else:
      assert_tree_equal(new, old)
  assert schedules == 2
  assert_tree_equal(after.router, broken.router)
  assert_tree_equal(after.params['head'], broken.params['head'])


def test_the_same_step_gives_the_same_bits(trained):
  state, run, after, metrics = trained
  assert_tree_equal(run(state, random_batch())[1], metrics)
  again = run(state, random_batch())[0]
  assert_tree_equal(again.replace(key=None), after.replace(key=None))


def test_padding_is_not_seen(trained):
  state, run, after, metrics = trained
  batch = random_batch()
  padding = batch['segment_ids'] == 0
  batch['tokens'] = np.where(padding, 7, batch['tokens'])
  batch['targets'] = np.where(padding, 9, batch['targets'])
  other, other_metrics = run(state, batch)
  assert_tree_equal(metrics['loss'], other_metrics['loss'])
  assert_tree_equal(after.params, other.params)
  assert_tree_equal(after.router, other.router)


def test_micro_batches_add_up(trained, small_config):
  _, _, whole, metrics = trained
  stage = STAGE | dict(micro_batches=2)
  state, run = make(small_config(stages=[stage]))
  after, parts = run(state, random_batch(micro_batches=2))
  np.testing.assert_allclose(parts['loss'], metrics['loss'], rtol=1e-5)
  np.testing.assert_allclose(parts['max_vio'], metrics['max_vio'])
  np.testing.assert_allclose(
    after.router.bias, whole.router.bias, atol=2.5e-3
  )  # a score on a bin's edge may fall either way
  np.testing.assert_allclose(
    after.params['head'], whole.params['head'], atol=1e-5
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  'sizes', [dict(data=4, tensor=2), dict(data=2, context=2, expert=2)]
)
def test_a_mesh_gives_the_same_step(trained, small_config, sizes):
  _, _, one, metrics = trained
  state, run = make(small_config(mesh=sizes, stages=[STAGE]), sizes)
  after, many = run(state, random_batch())
  np.testing.assert_allclose(many['loss'], metrics['loss'], rtol=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4),
    jax.device_get(after.params),
    jax.device_get(one.params),
  )
  np.testing.assert_allclose(after.router.bias, one.router.bias, atol=2.5e-3)
