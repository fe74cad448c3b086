"""A whole KDA layer and a whole train step, compiled for v6e.

In processes of their own: libtpu writes schedules of everything or of nothing,
and those of a train step take gigabytes.

A train step takes the compiler minutes, nearly all of them for XLA's programs,
of which a model has thousands; each kernel is compiled once, however often it
is called. So XLA optimizes least here: that takes 40 % of the time.
"""

import dataclasses
import importlib
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from experiments.configs import as_dict
from pallas_kernels import tpu_schedule
from trimoe_jax import sharding, train_state
from trimoe_jax.config import TrainConfig, from_dict
from trimoe_jax.model import parameters
from trimoe_jax.model.kda import kda_layer, kda_parameters
from trimoe_jax.train_step import BATCH_AXES, make_train_step


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
  'what', ['layer', pytest.param('nano', marks=pytest.mark.slow)]
)
def test_kernels_are_inside(what):
  environment = os.environ | {'JAX_PLATFORMS': 'cpu'}
  environment.pop('LIBTPU_INIT_ARGS', None)
  done = subprocess.run(
    [sys.executable, __file__, what],
    env=environment,
    capture_output=True,
    text=True,
    check=False,
    timeout=1200,  # 200 s on an idle core
  )
  assert done.returncode == 0, done.stderr[-2000:]
  assert done.stdout.split() == ['kda_backward', 'kda_forward']


def load(name):
  module = importlib.import_module(f'experiments.configs.{name}')
  return from_dict(TrainConfig, as_dict(module.get_config()))


def placed(mesh, shape, dtype, names):
  spec = sharding.spec(names, shape)
  where = jax.sharding.NamedSharding(mesh, spec)
  return jax.ShapeDtypeStruct(shape, dtype, sharding=where)


def layer() -> str:
  """Batch and heads over two devices each; forward and gradient."""
  config = load('k3').model
  kda = dataclasses.replace(config.kda, heads=16, value_heads=16)
  config = dataclasses.replace(config, width=512, kda=kda)
  devices = tpu_schedule.devices('v6e', dump=False)
  mesh = sharding.make_mesh({'data': 2, 'tensor': 2}, devices)

  def loss(params, x, ids):
    y, _ = kda_layer(params, x, config, segment_ids=ids)
    return jnp.sum(y.astype(jnp.float32) ** 2)

  with jax.set_mesh(mesh):
    params = parameters.map_table(
      lambda p: placed(mesh, p.shape, jnp.float32, p.axes),
      kda_parameters(config),
    )
    x = placed(mesh, (2, 512, 512), jnp.bfloat16, ('batch', 'seq', None))
    ids = placed(mesh, (2, 512), jnp.int32, ('batch', 'seq'))
    lowered = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x, ids)
    return lowered.compile().as_text()


def nano() -> str:
  """The first stage of nano, its batch over four devices."""
  config = load('nano')
  devices = tpu_schedule.devices('v6e', dump=False)
  mesh = sharding.make_mesh({'data': 4}, devices)
  optimizer, schedule = train_state.optimizer_of(config)
  step = make_train_step(config, optimizer, schedule)
  state = train_state.abstract(config, optimizer, mesh)
  with jax.set_mesh(mesh):
    rows = lambda dtype: placed(
      mesh, (1, 16, config.stages[0].context), dtype, BATCH_AXES
    )
    batch = {n: rows(jnp.int32) for n in ('tokens', 'targets', 'segment_ids')}
    batch['loss_mask'] = rows(jnp.bool_)
    lowered = jax.jit(step, donate_argnums=0).lower(state, batch)
    return lowered.compile({'optimization_level': 'O0'}).as_text()


if __name__ == '__main__':
  program = {'layer': layer, 'nano': nano}[sys.argv[1]]()
  print(*sorted(set(re.findall(r'%(kda_[a-z]+)', program))))
