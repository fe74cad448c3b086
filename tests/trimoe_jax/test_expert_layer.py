"""Layers with experts on a mesh: strategies agree; what they communicate."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from small_model import FAST_COMPILE

from trimoe_jax import sharding
from trimoe_jax.config import ModelConfig, MoeConfig, RouterConfig
from trimoe_jax.model import router
from trimoe_jax.model.latent_moe import moe_layer, moe_parameters
from trimoe_jax.model.parameters import map_table, stack

LAYERS, EXPERTS, BATCH, TIME = 2, 32, 8, 9
CONFIG = ModelConfig(
  width=12,
  dtype='float32',
  moe=MoeConfig(experts=EXPERTS, top_k=3, hidden=8, latent=16),
  router=RouterConfig(num_bins=100),
)
TOKENS = ('batch', 'seq', None)


def step(params, x_btd, mask_bt, state, config):
  """Gradients of a scan of layers, then the solve."""

  def loss(params, x_btd):
    # All layers read x, so that all scores are bitwise those of any strategy.
    def layer(total_btd, inputs):
      own, state = inputs
      y_btd, stats = moe_layer(
        own, x_btd, config, state=state, mask=mask_bt, observe=True
      )
      return total_btd + y_btd, stats

    total_btd, stats = jax.lax.scan(layer, x_btd, (params, state))
    return jnp.sum(jnp.sin(total_btd)), stats

  grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
  (value, stats), gradients = grad(params, x_btd)
  stats = router.reduce(stats)
  return value, gradients, router.solve(state, stats, config.router), stats


@functools.cache
def program(dispatch, capacity=None):
  """The compiled step, and its arguments laid out on the mesh."""
  moe = dataclasses.replace(CONFIG.moe, dispatch=dispatch, capacity=capacity)
  config = dataclasses.replace(CONFIG, moe=moe)
  mesh = sharding.make_mesh({'data': 2, 'expert': 4})
  rng = np.random.default_rng(0)
  table = stack(moe_parameters(config), LAYERS)

  def draw(names, shape):
    where = sharding.named(names, shape, mesh)
    x = 0.3 * rng.standard_normal(shape)
    return jax.device_put(x.astype(np.float32), where)

  params = map_table(lambda p: draw(p.axes, p.shape), table)
  x_btd = draw(TOKENS, (BATCH, TIME, config.width))
  mask_bt = jax.device_put(
    rng.random((BATCH, TIME)) > 0.1,
    sharding.named(TOKENS[:2], (BATCH, TIME), mesh),
  )
  state = jax.device_put(
    router.init_state(LAYERS, config.router, config.moe),
    jax.NamedSharding(mesh, jax.P()),
  )
  arguments = params, x_btd, mask_bt, state
  with jax.set_mesh(mesh):
    function = jax.jit(functools.partial(step, config=config))
    return function.lower(*arguments).compile(FAST_COMPILE), arguments


@functools.cache
def two_steps(dispatch, capacity=None):
  """What the program gives under the first router state and the second."""
  function, arguments = program(dispatch, capacity)
  first = function(*arguments)
  return first, function(*arguments[:3], first[2])


@absltest.skipIf(jax.device_count() < 8, 'tests/conftest.py fakes 8 devices')
class LayerTest(parameterized.TestCase):
  @parameterized.parameters('ring', 'all_to_all')
  def test_strategies_agree_over_two_router_states(self, dispatch):
    for got, want in zip(two_steps(dispatch), two_steps('replicated')):
      jax.tree.map(assert_close, got[:2], want[:2])
      self.assertTrue(all(np.any(g) for g in jax.tree.leaves(got[1])))

  def test_bias_is_the_same_bitwise_on_every_device_and_strategy(self):
    want = two_steps('replicated')
    self.assertTrue(np.any(want[0][2].bias != want[1][2].bias))
    for dispatch in ('replicated', 'ring', 'all_to_all'):
      for got, other in zip(two_steps(dispatch), want):
        shards = got[2].bias.addressable_shards
        self.assertLen(shards, 8)
        for shard in shards:
          np.testing.assert_array_equal(shard.data, other[2].bias)

  def test_dropped_copies_are_reported(self):
    (_, _, _, stats), _ = two_steps('all_to_all', 1.0)
    whole = two_steps('replicated')[0][3]
    self.assertIsNone(whole.dropped)
    self.assertEqual(stats.dropped.dtype, jnp.int32)
    self.assertEqual(stats.dropped.shape, (LAYERS,))
    np.testing.assert_array_equal(stats.load[0], whole.load[0])
    self.assertGreater(int(stats.dropped.min()), 0)
    np.testing.assert_array_equal(
      router.metrics(stats)['dropped'],
      np.float32(stats.dropped) / np.sum(stats.load, axis=1),
    )

  def test_nothing_is_dropped_outside_training(self):
    moe = dataclasses.replace(CONFIG.moe, dispatch='all_to_all', capacity=1.0)
    tight = dataclasses.replace(CONFIG, moe=moe)
    _, (params, x_btd, mask_bt, states) = program('replicated')
    params, state = jax.tree.map(lambda x: x[0], (params, states))

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def both(params, x_btd, mask_bt, state):
      layer = functools.partial(moe_layer, params, x_btd)
      return [layer(c, state=state, mask=mask_bt) for c in (tight, CONFIG)]

    with jax.set_mesh(x_btd.sharding.mesh):
      (got_btd, _), (want_btd, _) = both(params, x_btd, mask_bt, state)
    assert_close(got_btd, want_btd)

  @parameterized.parameters(('ring', None), ('all_to_all', 1.0))
  def test_communication(self, dispatch, capacity):
    text = program(dispatch, capacity)[0].as_text()
    sums = [line for line in collectives(text, 'all-reduce') if 's32[' in line]
    self.assertLen(sums, 1)
    self.assertIn(f's32[{LAYERS},{EXPERTS},100]', sums[0])
    self.assertNotRegex(sums[0], r'\bb?f\d+\[')
    entry = text[text.index('\nENTRY ') :]
    self.assertIn(sums[0], entry[: entry.index('\n}')])
    self.assertIn(' while(', text)
    gathers = collectives(text, 'all-gather')
    self.assertNotEmpty(gathers)
    for line in gathers:
      # Router weights are gathered, scores and other devices' experts not.
      self.assertNotRegex(line, rf'\[(?!{CONFIG.width},)[\d,]*,{EXPERTS}\]')
      self.assertNotRegex(line, rf'\[(?:1,)?{EXPERTS},\d+,\d+\]')
    exchanges = collectives(text, 'all-to-all')
    self.assertEqual(bool(exchanges), dispatch == 'all_to_all')

  def test_replicated_gathers_all_experts(self):
    """What `test_communication` forbids is found where it happens."""
    text = program('replicated')[0].as_text()
    gathers = '\n'.join(collectives(text, 'all-gather'))
    self.assertRegex(gathers, rf'\[(?:1,)?{EXPERTS},\d+,\d+\]')

  @parameterized.parameters(
    (dict(dispatch='ring', capacity=1.25), "set moe.dispatch='all_to_all'"),
    (dict(dispatch='all_to_all', capacity=0.5), 'use at least 1'),
  )
  def test_capacity_errors(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      MoeConfig(**fields)


def collectives(text, kind):
  """The lines of a compiled program that start collectives of a kind."""
  return re.findall(rf'^.*? {kind}(?:-start)?\(.*$', text, re.M)


def assert_close(got, want):
  scale = float(jnp.abs(want).max())
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * scale)


if __name__ == '__main__':
  absltest.main()
