"""Every configuration builds, shards and differentiates on an abstract mesh."""

import importlib
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from experiments import configs
from experiments.configs import as_dict
from trimoe_jax import sharding, train_state
from trimoe_jax.config import TrainConfig, from_dict
from trimoe_jax.model import parameters
from trimoe_jax.model.model import count_parameters, model_parameters
from trimoe_jax.train_step import BATCH_AXES, make_train_step

NAMES = sorted(
  path.stem
  for path in pathlib.Path(configs.__file__).parent.glob('*.py')
  if 'def get_config' in path.read_text()
)
# (pipe, data, context, expert, tensor): as many ways as the sizes allow.
MESHES = {'k3': (1, 16, 4, 8, 8)}
COUNTS = {
  'nano': (31_857_738, 10_165_322),
  'micro': (191_376_446, 59_124_798),
  'mini': (962_898_392, 194_554_328),
  'k3': (2_779_484_476_000, 104_189_612_640),
}


def load(name: str) -> TrainConfig:
  module = importlib.import_module(f'experiments.configs.{name}')
  return from_dict(TrainConfig, as_dict(module.get_config()))


def test_every_configuration_is_found():
  assert {'tiny', 'nano', 'micro', 'mini', 'k3'} <= set(NAMES)


@pytest.mark.parametrize('name', sorted(COUNTS))
def test_parameter_counts(name):
  count = count_parameters(load(name).model)
  assert (count.total, count.active) == COUNTS[name]


@pytest.mark.parametrize('name', NAMES)
def test_train_step_keeps_shapes_and_shardings(name):
  config = load(name)
  shape = MESHES.get(name, (1, 4, 2, 2, 1))
  mesh = AbstractMesh(
    shape, sharding.AXES, axis_types=(AxisType.Explicit,) * len(shape)
  )
  table = model_parameters(config.model)
  optimizer, schedule = train_state.optimizer_of(config)
  step = make_train_step(config, optimizer, schedule)
  last = config.stages[-1]

  def train():
    state = train_state.init_state(config, optimizer)
    rows = max(last.batch, sharding.token_shards())
    ids = jnp.zeros((1, rows, last.context), jnp.int32)
    ids = jax.sharding.reshard(ids, sharding.spec(BATCH_AXES))
    batch = dict.fromkeys(('tokens', 'targets', 'segment_ids'), ids)
    return state, step(state, batch | {'loss_mask': ids > 0})

  with jax.sharding.use_abstract_mesh(mesh):
    before, (after, metrics) = jax.eval_shape(train)
    wanted = parameters.map_table(
      lambda p: sharding.spec(p.axes, p.shape), table
    )

  assert metrics['loss'].shape == ()
  assert metrics['max_vio'].shape == (config.model.moe_layers,)
  jax.tree.map(_assert_same, before, after)
  jax.tree.map(lambda x, spec: _assert_spec(x, spec), after.params, wanted)
  sharded = [x for x in jax.tree.leaves(after.opt_state) if any(_spec(x))]
  assert len(sharded) > 10  # the moments are sharded like their parameters


def _spec(x):
  return () if x.sharding is None else tuple(x.sharding.spec)


def _assert_spec(x, spec):
  trim = lambda s: tuple(s)[
    : max((i + 1 for i, a in enumerate(s) if a), default=0)
  ]
  assert trim(_spec(x)) == trim(spec), (x, spec)


def _assert_same(before, after):
  assert (before.shape, before.dtype) == (after.shape, after.dtype)
  _assert_spec(after, _spec(before))
