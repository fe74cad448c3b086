"""A layer with experts on meshes of every shape against one device.

Values and all gradients agree; the router's next bias is the same bitwise on
every device, on every mesh, under every dispatch, and however the batch is
split. Inputs and router weights are dyadic, so that scores are exact in
float32 and what is left can only be the counting.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import FAST_COMPILE

from trimoe_jax import sharding
from trimoe_jax.config import ModelConfig, MoeConfig, RouterConfig
from trimoe_jax.model import router
from trimoe_jax.model.latent_moe import moe_layer, moe_parameters
from trimoe_jax.model.parameters import map_table

EXPERTS, ROWS, TIME = 16, 16, 6
CONFIG = ModelConfig(
  width=12,
  dtype='float32',
  moe=MoeConfig(experts=EXPERTS, top_k=3, hidden=8, latent=8),
  router=RouterConfig(num_bins=200),
)
TOKENS = (None, 'batch', 'seq', None)
STRATEGIES = ('replicated', 'ring', 'all_to_all')

needs_devices = pytest.mark.skipif(
  jax.device_count() < 8, reason='tests/conftest.py fakes 8 devices'
)


def drawn():
  """(parameters, inputs [1, B, T, d], mask [1, B, T]) as numpy."""
  rng = np.random.default_rng(0)
  normal = lambda shape: rng.standard_normal(shape).astype(np.float32)
  params = map_table(lambda p: 0.3 * normal(p.shape), moe_parameters(CONFIG))
  params['router'] = np.round(8 * normal((CONFIG.width, EXPERTS))) / 16
  x_btd = np.round(4 * normal((1, ROWS, TIME, CONFIG.width))) / 4
  x_btd += 0.5 * (np.arange(CONFIG.width) < 2)  # a preference for some experts
  return params, x_btd, rng.random((1, ROWS, TIME)) > 0.1


def step(params, x_btd, mask_bt, state, config):
  """Summed loss, its gradients, the statistics and the next router state.

  The leading axis of the inputs counts micro-batches.
  """

  def loss(params, x_btd, mask_bt):
    one = jax.tree.map(lambda s: s[0], state)
    y_btd, stats = moe_layer(
      params, x_btd, config, state=one, mask=mask_bt, observe=True
    )
    stats = jax.tree.map(lambda s: s[None], stats)
    return jnp.sum(jnp.sin(y_btd) * mask_bt[..., None]), stats

  grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
  found = [grad(params, x, m) for x, m in zip(x_btd, mask_bt)]
  value = sum(v for (v, _), _ in found)
  dparams = jax.tree.map(lambda *g: sum(g), *[g for _, (g, _) in found])
  dx_btd = [dx for _, (_, dx) in found]
  stats = functools.reduce(router.combine, [s for (_, s), _ in found])
  stats = router.reduce(stats)
  return (
    (value, dparams, dx_btd),
    stats,
    router.solve(state, stats, config.router),
  )


@functools.cache
def two_steps(sizes=None, dispatch='auto', micro_batches=1):
  """What the first router state gives and the second, on a mesh or without.

  Args:
    sizes: of the mesh's axes, ((name, size), ...); None takes no mesh.
    dispatch: of tokens to experts.
    micro_batches: into which the rows are split.
  """
  moe = dataclasses.replace(CONFIG.moe, dispatch=dispatch)
  config = dataclasses.replace(CONFIG, moe=moe)
  params, x_btd, mask_bt = drawn()
  split = lambda x: x.reshape(micro_batches, -1, *x.shape[2:])
  arguments = [params, split(x_btd), split(mask_bt)]
  state = router.init_state(1, config.router, config.moe)
  run = functools.partial(step, config=config)
  if sizes is None:
    function = jax.jit(run).lower(*arguments, state).compile(FAST_COMPILE)
    return _twice(function, arguments, state)
  mesh = sharding.make_mesh(dict(sizes))
  put = lambda x, names: jax.device_put(x, sharding.named(names, x.shape, mesh))
  table = moe_parameters(config)
  arguments[0] = jax.tree.map(
    put, params, map_table(lambda p: _Axes(p.axes), table)
  )
  arguments[1] = put(arguments[1], TOKENS)
  arguments[2] = put(arguments[2], TOKENS[:3])
  state = jax.device_put(state, jax.NamedSharding(mesh, jax.P()))
  with jax.set_mesh(mesh):
    function = jax.jit(run).lower(*arguments, state).compile(FAST_COMPILE)
  return _twice(function, arguments, state)


class _Axes(tuple):
  """Logical axes as one leaf of a tree."""


def _twice(function, arguments, state):
  first = function(*arguments, state)
  return first, function(*arguments, first[2])


def check(got, want):
  """Values and gradients agree; statistics and biases bitwise, everywhere."""
  for (got_values, got_stats, got_state), (values, stats, state) in zip(
    got, want
  ):
    join = lambda found: (*found[:2], np.concatenate(jax.device_get(found[2])))
    jax.tree.map(assert_close, join(got_values), join(values))
    assert all(np.any(g) for g in jax.tree.leaves(got_values[1]))
    for name in ('load', 'valid', 'counts'):
      np.testing.assert_array_equal(
        getattr(got_stats, name), getattr(stats, name)
      )
    for shard in got_state.bias.addressable_shards:
      np.testing.assert_array_equal(shard.data, state.bias)
  assert np.any(np.asarray(got[0][2].bias) != np.asarray(got[1][2].bias))


def assert_close(got, want):
  want = np.asarray(want)
  scale = np.abs(want).max()
  np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=1e-5 * scale)


@needs_devices
def test_eight_expert_ranks():
  check(two_steps((('expert', 8),), 'ring'), two_steps())


@needs_devices
@pytest.mark.slow
@pytest.mark.parametrize('dispatch', STRATEGIES)
@pytest.mark.parametrize('ranks', [1, 2, 4, 8])
def test_expert_ranks(dispatch, ranks):
  check(two_steps((('expert', ranks),), dispatch), two_steps())


@needs_devices
@pytest.mark.slow
@pytest.mark.parametrize(
  'sizes',
  [
    (('data', 2), ('expert', 2), ('tensor', 2)),
    (('data', 2), ('context', 2), ('expert', 2)),
    (('context', 2), ('tensor', 4)),
  ],
)
def test_meshes_with_other_axes(sizes):
  check(two_steps(sizes), two_steps())


def test_micro_batches():
  check(two_steps(micro_batches=2), two_steps())


@needs_devices
@pytest.mark.slow
@pytest.mark.parametrize('micro_batches', [2, 4])
def test_micro_batches_on_a_mesh(micro_batches):
  sizes = (('expert', 4),)
  check(two_steps(sizes, 'ring', micro_batches), two_steps())
