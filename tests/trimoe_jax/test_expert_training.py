"""Whole training steps on a mesh with four expert ranks."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from trimoe_jax import sharding, train_state
from trimoe_jax.train_step import BATCH_AXES, make_train_step

EXPERTS, TIME, ROWS = 20, 32, 8


def train(config, dispatch, steps=2):
  """(state, metrics) after some steps on one batch, and the program's text."""
  moe = dataclasses.replace(
    config.model.moe, experts=EXPERTS, top_k=2, dispatch=dispatch
  )
  model = dataclasses.replace(config.model, moe=moe)
  config = dataclasses.replace(config, model=model)
  optimizer, schedule = train_state.optimizer_of(config)
  mesh = sharding.make_mesh({'data': 2, 'expert': 4})
  state = train_state.create(config, optimizer, mesh)
  where = jax.NamedSharding(mesh, sharding.spec(BATCH_AXES))
  batch = jax.device_put(random_batch(), where)
  with jax.set_mesh(mesh):
    step = jax.jit(make_train_step(config, optimizer, schedule))
    step = step.lower(state, batch).compile()
  for _ in range(steps):
    state, metrics = step(state, batch)
  return state, metrics, step.as_text()


def random_batch():
  rng = np.random.default_rng(0)
  ids = rng.integers(0, 256, (1, ROWS, TIME + 1)).astype(np.int32)
  segments = np.ones((1, ROWS, TIME), np.int32)
  segments[:, :, 20:] = 2
  segments[0, 0, 28:] = 0
  return {
    'tokens': ids[..., :-1],
    'targets': ids[..., 1:],
    'segment_ids': segments,
    'loss_mask': segments > 0,
  }


def collectives(text, kind):
  return re.findall(rf'^.*? {kind}(?:-start)?\(.*$', text, re.M)


def assert_close(got, want):
  scale = np.abs(want).max()
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * scale)


@pytest.mark.slow
def test_strategies_train_the_same_model(small_config):
  config = small_config(stages=[dict(context=TIME, batch=ROWS, steps=4)])
  want, wanted_metrics, _ = train(config, 'replicated')
  for dispatch in ('ring', 'all_to_all'):
    got, metrics, text = train(config, dispatch)
    jax.tree.map(assert_close, got.params, want.params)
    assert_close(metrics['loss'], wanted_metrics['loss'])
    # The second layer's scores are equal up to rounding: so are a bin's counts.
    np.testing.assert_allclose(got.router.bias, want.router.bias, atol=2.5e-3)
    for shard in got.router.bias.addressable_shards:
      np.testing.assert_array_equal(shard.data, got.router.bias)
    sums = [s for s in collectives(text, 'all-reduce') if 's32[' in s]
    assert len(sums) == 1 and f's32[2,{EXPERTS},' in sums[0], sums
    entry = text[text.index('\nENTRY ') :]
    assert sums[0] in entry[: entry.index('\n}')]
    width = config.model.width
    for gather in collectives(text, 'all-gather'):
      assert not re.search(rf'\[(?!{width},)[\d,]*,{EXPERTS}\]', gather), gather
      assert not re.search(rf'\[{EXPERTS},\d+,\d+\]', gather), gather
