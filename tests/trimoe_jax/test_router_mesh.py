"""The router on eight devices: equal biases, one integer all-reduce a step."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from trimoe_jax.config import MoeConfig, RouterConfig
from trimoe_jax.model import router

MOE = MoeConfig(experts=16, top_k=2)
LAYERS, TOKENS = 3, 256
SHARDS = ('data', 'context')


def route_shard(logits_te, state, config):
  _, weights, stats = router.route(logits_te, state, MOE, config, observe=True)
  return weights, jax.tree.map(lambda s: s[None], stats)


def step(logits_lte, state, config, local):
  """Routing of a scan of layers, then the solve."""

  def layer(total, inputs):
    weights, stats = local(*inputs)
    return total + weights, stats

  total = jnp.zeros_like(logits_lte[0, :, : MOE.top_k])
  total, stats = jax.lax.scan(layer, total, (logits_lte, state))
  stats = router.reduce(stats)
  return total, router.solve(state, stats, config), stats


@functools.cache
def compiled(config, shape):
  """The step for a ('data', 'context') mesh of `shape`, and its arguments."""
  mesh = jax.make_mesh(shape, SHARDS, axis_types=(AxisType.Explicit,) * 2)
  put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
  arguments = (
    put(random_logits(), P(None, SHARDS)),
    put(router.init_state(LAYERS, config, MOE), P()),
  )
  local = jax.shard_map(
    functools.partial(route_shard, config=config),
    in_specs=(P(SHARDS), P()),
    out_specs=(P(SHARDS), P(SHARDS)),
    check_vma=True,
  )
  with jax.set_mesh(mesh):
    function = jax.jit(functools.partial(step, config=config, local=local))
    return function.lower(*arguments).compile(), arguments


def random_logits():
  return jax.random.normal(jax.random.key(0), (LAYERS, TOKENS, MOE.experts))


@absltest.skipIf(jax.device_count() < 8, 'tests/conftest.py fakes 8 devices')
class MeshTest(parameterized.TestCase):
  @parameterized.parameters('uniform', 'log_edges', 'exact')
  def test_every_device_holds_the_single_device_bias(self, estimator):
    config = RouterConfig(num_bins=100, estimator=estimator)
    function, (logits, state) = compiled(config, (4, 2))
    _, solved, stats = function(logits, state)
    again = function(logits, solved)[1]
    local = functools.partial(route_shard, config=config)
    single = jax.jit(functools.partial(step, config=config, local=local))
    want = router.init_state(LAYERS, config, MOE)
    _, want, want_stats = single(random_logits(), want)
    jax.tree.map(np.testing.assert_array_equal, stats, want_stats)
    np.testing.assert_array_equal(solved.bias, want.bias)
    for bias in (solved.bias, again.bias):
      shards = [np.asarray(s.data) for s in bias.addressable_shards]
      self.assertLen(shards, 8)
      for shard in shards:
        np.testing.assert_array_equal(shard, shards[0])
    self.assertGreater(np.abs(again.bias - solved.bias).max(), 0)

  def test_layout_does_not_change_the_statistics(self):
    config = RouterConfig(num_bins=100)
    layouts = []
    for shape in ((4, 2), (8, 1)):
      function, arguments = compiled(config, shape)
      layouts.append(function(*arguments)[1:])
    jax.tree.map(np.testing.assert_array_equal, *layouts)

  def test_one_integer_all_reduce_outside_the_loop(self):
    function, _ = compiled(RouterConfig(num_bins=100), (4, 2))
    text = function.as_text()
    for collective in ('all-gather', 'all-to-all', 'collective-permute'):
      self.assertNotIn(collective, text)
    sums = re.findall(r'^.*? all-reduce(?:-start)?\(.*$', text, re.M)
    self.assertLen(sums, 1)
    self.assertIn('s32[3,16,100]', sums[0])
    self.assertNotRegex(sums[0], r'\bb?f\d+\[')
    entry = text[text.index('\nENTRY ') :]
    self.assertIn(sums[0], entry[: entry.index('\n}')])
    self.assertIn(' while(', text)


if __name__ == '__main__':
  absltest.main()
