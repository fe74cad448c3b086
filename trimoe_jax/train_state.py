"""Everything that training carries from one step to the next."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from trimoe_jax import sharding
from trimoe_jax.config import TrainConfig
from trimoe_jax.model import parameters, router
from trimoe_jax.model.model import model_parameters
from trimoe_jax.model.router import RouterState
from trimoe_jax.optim import Stage, make_optimizer, make_schedule


class TrainState(struct.PyTreeNode):
  """A checkpoint's contents. The data position is `step`: batches are pure.

  `step` int32 counts optimizer steps, skipped ones too; `router` is state and
  not a parameter; `key` is the run's PRNG key.
  """

  step: jax.Array
  params: Any
  opt_state: Any
  router: RouterState
  key: jax.Array


def optimizer_of(
  config: TrainConfig,
) -> tuple[optax.GradientTransformation, optax.Schedule]:
  """A run's optimizer, and its learning rate as a fraction of the peak."""
  stages = [Stage(s.num_steps, s.step_tokens, s.peak) for s in config.stages]
  schedule = make_schedule(config.optim, stages)
  shapes = parameters.abstract(model_parameters(config.model))
  return make_optimizer(config.optim, shapes, schedule), schedule


def init_state(
  config: TrainConfig, optimizer: optax.GradientTransformation
) -> TrainState:
  """A fresh state; jit it with `out_shardings` to create it in place."""
  key = jax.random.key(config.seed)
  table = model_parameters(config.model)
  params = parameters.initialize(table, key)
  if sharding.mesh_is_set():
    shape = lambda p: sharding.spec(p.axes, p.shape)
    specs = parameters.map_table(shape, table)
    params = jax.tree.map(jax.sharding.reshard, params, specs)
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=optimizer.init(params),
    router=router.init_state(
      config.model.moe_layers, config.model.router, config.model.moe
    ),
    key=key,
  )


def create(
  config: TrainConfig,
  optimizer: optax.GradientTransformation,
  mesh: jax.sharding.Mesh,
) -> TrainState:
  """A fresh state on the devices of `mesh`."""
  with jax.set_mesh(mesh):
    return jax.jit(lambda: init_state(config, optimizer))()


def abstract(
  config: TrainConfig,
  optimizer: optax.GradientTransformation,
  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
) -> TrainState:
  """Shapes, dtypes and shardings of the state, without an array."""
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    shapes = jax.eval_shape(lambda: init_state(config, optimizer))

  def placed(x):
    spec = x.sharding.spec if x.sharding is not None else ()
    where = jax.sharding.NamedSharding(mesh, jax.P(*spec))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

  return jax.tree.map(placed, shapes)
