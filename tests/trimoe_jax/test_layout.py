"""Layers are grouped without changing their order."""

import jax
import pytest

from trimoe_jax.config import ModelConfig
from trimoe_jax.model import layout
from trimoe_jax.model.block import body_parameters

K3 = ModelConfig(
  layers=93, mla_layers=(*range(4, 93, 4), 93), residual_block=12
)


def flatten(nodes):
  for node in nodes:
    if isinstance(node, layout.Layer):
      yield node
    else:
      yield from list(flatten(node.body)) * node.count


@pytest.mark.parametrize(
  'config',
  [
    K3,
    ModelConfig(layers=5, mla_layers=(4, 5), residual_block=2),
    ModelConfig(layers=7, mla_layers=(), residual_block=3, dense_layers=2),
  ],
)
def test_order_is_kept(config):
  runs = layout.block_runs(config)
  layers = [x for run in runs for x in list(flatten(run.body)) * run.count]
  wanted = [
    layout.Layer(config.mixer(i), config.ffn(i)) for i in range(config.layers)
  ]
  assert layers == wanted
  assert sum(run.moe_layers for run in runs) == config.moe_layers
  assert [run.first for run in runs] == [
    sum(r.count for r in runs[:i]) for i in range(len(runs))
  ]


def test_k3_is_three_runs_of_nested_scans():
  first, middle, last = layout.block_runs(K3)
  assert (first.count, middle.count, last.count) == (1, 6, 1)
  (group,) = middle.body
  assert group.count == 3 and group.body[0].count == 3
  assert first.body[0] == layout.Layer('kda', 'dense')
  assert list(flatten(last.body))[-2:] == [layout.Layer('mla', 'moe')] * 2


def test_addresses_name_every_layer_once():
  config = ModelConfig(layers=12, mla_layers=(4, 8, 12), residual_block=4)
  found = layout.layer_addresses(config)
  assert len(found) == len(set(found)) == 12
  for number, (path, index) in enumerate(found):
    table = {
      run.name: body_parameters(config, run.body)
      for run in layout.block_runs(config)
    }
    for name in path:
      table = table[name]
    assert config.mixer(number) in table
    depth = len(index)
    stacked = len(jax.tree.leaves(table['ffn_norm'].shape)) - 1
    run = next(r for r in layout.block_runs(config) if r.name == path[0])
    assert depth == stacked + (run.count > 1)
