"""Chunks of layers, block caches, and parameters by stage and back."""

import jax
import numpy as np
import pytest
from small_model import FAST_COMPILE, random_weights, small_config

from trimoe_jax import sharding
from trimoe_jax.config import ModelConfig
from trimoe_jax.model import layout
from trimoe_jax.model.model import model_parameters
from trimoe_jax.model.parameters import map_table
from trimoe_jax.parallel import pipeline_layout
from trimoe_jax.parallel.pipeline_layout import NONE
from trimoe_jax.parallel.pipeline_schedule import interleaved

K3 = ModelConfig(
  layers=93, mla_layers=(*range(4, 93, 4), 93), residual_block=12
)
SMALL = small_config(layers=7, mla_layers=(3, 4, 7), residual_block=2)


@pytest.mark.parametrize(
  'config, stages, chunks',
  [(K3, 8, 3), (K3, 4, 2), (K3, 16, 2), (SMALL, 2, 2), (SMALL, 3, 2)],
)
def test_every_layer_has_one_place_of_its_kind(config, stages, chunks):
  plan = pipeline_layout.plan(config, stages, chunks)
  assert plan.layer_at.shape[0] == stages * chunks
  layers = plan.layer_at[plan.layer_at != NONE]
  np.testing.assert_array_equal(layers, range(config.layers))
  for stack in pipeline_layout._stage_stacks(plan):
    for layer in stack.layers[stack.layers != NONE]:
      kind = layout.Layer(config.mixer(layer), config.ffn(layer))
      assert stack.kind == kind


@pytest.mark.parametrize('stages, chunks', [(8, 3), (4, 2), (4, 6), (16, 2)])
def test_a_hop_carries_a_fixed_window_of_slots(stages, chunks):
  plan = pipeline_layout.plan(K3, stages, chunks)
  count, block = stages * chunks, K3.residual_block
  size = -(-K3.layers // count)
  assert plan.window <= -(-(stages - 1) * size // block) < count
  # What a stage has after the hop into chunk c is all that was committed.
  held = [set() for _ in range(stages)]
  for chunk in range(count):
    stage, start = chunk % stages, min(chunk * size, K3.layers)
    came = set(range(plan.first[chunk], plan.last[chunk]))
    assert not came & held[stage]
    held[stage] |= came
    end = min(start + size, K3.layers)
    assert held[stage] == set(range(-(-start // block)))
    held[stage] |= set(range(-(-end // block)))
  assert max(map(max, held)) < plan.slots


def test_k3_loses_little_where_chunks_follow_its_pattern():
  """Groups of three KDA and one MLA: 8 x 3 chunks of 4, the last of 1."""
  plan = pipeline_layout.plan(K3, 8, 3)
  assert plan.layer_at.shape[1] == 5 and plan.window == 3
  assert 0.86 < pipeline_layout.efficiency(plan, interleaved(8, 3, 64)) < 0.88
  np.testing.assert_array_equal(plan.layer_at[0], [0, 1, 2, NONE, 3])
  np.testing.assert_array_equal(plan.layer_at[-1], [NONE] * 4 + [92])


@pytest.mark.parametrize(
  'mesh, chunks',
  [
    ({'pipe': 2, 'data': 2}, 2),
    pytest.param({'pipe': 4}, 1, marks=pytest.mark.slow),
  ],
)
def test_parameters_go_to_their_stages_and_back(mesh, chunks):
  plan = pipeline_layout.plan(SMALL, mesh['pipe'], chunks)

  def both(params, state):
    staged = pipeline_layout.to_stages(plan, params)
    states = pipeline_layout.states_to_stages(plan, state)
    back = pipeline_layout.from_stages(plan, staged, params)
    # A state stands here for statistics, which have an axis of token shards.
    stats = jax.tree.map(lambda x: x[..., None], states)
    return staged, back, pipeline_layout.stats_from_stages(plan, stats)

  mesh = sharding.make_mesh(mesh)
  with jax.set_mesh(mesh), jax.enable_x64(True):
    params, state = random_weights(SMALL)
    table = model_parameters(SMALL)
    where = map_table(lambda p: sharding.named(p.axes, p.shape, mesh), table)
    args = jax.device_put(params, where), state
    program = jax.jit(both).lower(*args).compile(FAST_COMPILE)
    staged, back, stats = program(*args)
  for leaf in jax.tree.leaves(staged):
    assert leaf.shape[:2] == (plan.stages, chunks)
    assert leaf.sharding.spec[0] == 'pipe'
  layers = {name: params[name] for name in back}
  assert sum(name.startswith('blocks') for name in params) == len(layers)
  jax.tree.map(np.testing.assert_array_equal, back, layers)
  same = lambda x, y: np.testing.assert_array_equal(x[..., 0], y)
  jax.tree.map(same, stats, state)
