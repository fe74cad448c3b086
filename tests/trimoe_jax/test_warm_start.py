"""Forward passes that balance the router before the first step."""

import dataclasses

import jax
import numpy as np
import pytest

from trimoe_jax import loop
from trimoe_jax.metrics import read_jsonl
from trimoe_jax.run import prepare
from trimoe_jax.train_step import observe

STAGES = [dict(context=64, batch=8, steps=6, micro_batches=2)]


def fresh(config, folder):
  """A run, its first state, and MaxVio of the first batch under a router."""
  run = prepare(config, folder)
  with run.checkpointer() as checkpointer, jax.set_mesh(run.mesh):
    state = run.restore_or_create(checkpointer)
    batch = loop.fetch(run, 0)
    forward = jax.jit(lambda *args: observe(*args, config))

  def violation(router_state):
    with jax.set_mesh(run.mesh):
      _, balance = forward(state.params, batch, router_state)
      return np.asarray(balance['max_vio'])

  return run, state, violation


def with_router(config, **changes):
  router = dataclasses.replace(config.model.router, **changes)
  model = dataclasses.replace(config.model, router=router)
  return dataclasses.replace(config, model=model)


@pytest.fixture(scope='module')
def config(small_config):
  model = dataclasses.asdict(small_config().model)
  model['moe'] |= dict(experts=16, top_k=2)
  model |= dict(layers=2, mla_layers=[2])
  return small_config(stages=STAGES, model=model)


def test_violation_of_the_first_batch_falls(config, tmp_path):
  run, cold, violation = fresh(config, tmp_path / 'run')
  with jax.set_mesh(run.mesh):
    warm, record = loop.warm_start(run, cold)
  before, after = violation(cold.router), violation(warm.router)
  assert np.all(after < 0.5 * before), (before, after)
  # Every pass is recorded with what it found under the bias before it.
  assert record['max_vio'].shape == (4, 1)
  assert record['load_bands'].shape == (4, 1, 7)
  assert np.all(record['max_vio'][-1] < record['max_vio'][0])
  # Nothing else moved, and the state still fits the compiled step.
  assert int(warm.step) == 0
  same = lambda a, b: np.testing.assert_array_equal(a, b)
  jax.tree.map(same, warm.params, cold.params)
  jax.tree.map(same, warm.opt_state, cold.opt_state)
  for new, old in zip(jax.tree.leaves(warm), jax.tree.leaves(cold)):
    assert new.sharding == old.sharding and new.dtype == old.dtype


@pytest.mark.parametrize(
  'changes', [dict(warm_start=0), dict(balance='sign'), dict(balance='none')]
)
def test_nothing_happens_where_it_is_not_wanted(config, tmp_path, changes):
  config = with_router(config, **changes)
  run, state, _ = fresh(config, tmp_path / 'run')
  assert loop.warm_start(run, state) == (state, None)


def test_the_average_does_not_hold_on_to_the_cold_bias(config, tmp_path):
  plain, cold, _ = fresh(config, tmp_path / 'plain')
  slow, _, _ = fresh(with_router(config, ema=0.9), tmp_path / 'slow')
  with jax.set_mesh(plain.mesh):
    want = loop.warm_start(plain, cold)[0].router
    got = loop.warm_start(slow, cold)[0].router
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_the_first_step_is_routed_by_later_batches_only(
  config, tmp_path, monkeypatch
):
  """So that no token of the first step is routed by a bias that knows it."""
  run, state, _ = fresh(config, tmp_path / 'run')
  seen, fetch = [], loop.fetch
  monkeypatch.setattr(
    loop, 'fetch', lambda run, step: seen.append(step) or fetch(run, step)
  )
  with jax.set_mesh(run.mesh):
    loop.warm_start(run, state)
  assert seen == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_run_on_a_mesh_warms_up_and_starts_once(config, tmp_path):
  sizes = dict(data=2, expert=4)
  config = dataclasses.replace(
    config,
    mesh=dataclasses.replace(config.mesh, **sizes),
    stages=tuple(
      dataclasses.replace(s, micro_batches=1, steps=2) for s in config.stages
    ),
  )
  run = prepare(config, tmp_path / 'run')
  assert loop.train(run, should_stop=lambda: False) is not None
  records = read_jsonl(run.metrics_path)
  (warm,) = [r for r in records if r['kind'] == 'warm_start']
  first = next(r for r in records if r['kind'] == 'step')
  assert max(first['max_vio']) < max(warm['max_vio'][0])
