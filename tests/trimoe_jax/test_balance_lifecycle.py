"""When the router's state may move, and when it must not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import (
  FAST_COMPILE,
  random_tokens,
  random_weights,
  small_config,
)

from pallas_kernels.grouped_matmul import grouped_matmul
from trimoe_jax.config import MoeConfig, RouterConfig
from trimoe_jax.model import router
from trimoe_jax.model.model import Model

MOE = MoeConfig(experts=8, top_k=3)


@functools.partial(jax.jit, static_argnums=2, compiler_options=FAST_COMPILE)
def observe(logits, state, config):
  """Routes and statistics of one layer, and the state they solve to."""
  one = jax.tree.map(lambda s: s[0], state)
  routes = router.route(logits, one, MOE, config, observe=True)
  stats = jax.tree.map(lambda s: s[None], routes[2])
  return routes[:2], stats, router.solve(state, stats, config)


@pytest.mark.parametrize('estimator', ['uniform', 'log_edges', 'exact'])
def test_constant_scores_leave_the_bias_at_zero(estimator):
  """Ties are not resolved: the lowest experts get all, for ever."""
  config = RouterConfig(estimator=estimator)
  state = router.init_state(1, config, MOE)
  logits = jnp.full((40, 8), 0.25)
  for _ in range(3):
    (indices, weights), _, state = observe(logits, state, config)
    np.testing.assert_array_equal(indices, np.tile([0, 1, 2], (40, 1)))
    np.testing.assert_allclose(weights, 1 / 3, rtol=1e-6)
    np.testing.assert_array_equal(state.bias, np.zeros((1, 8)))


def test_forward_passes_observe_nothing_unless_asked():
  config = small_config(dtype='float32')
  params, state = random_weights(config)
  before = jax.tree.map(np.array, state)
  tokens = random_tokens((2, 16))
  forward = jax.jit(
    lambda state: Model(config).apply(
      {'params': params}, tokens, state, method='hidden'
    ),
    compiler_options=FAST_COMPILE,
  )
  (first, aux), (second, _) = forward(state), forward(state)
  assert aux.router is None
  np.testing.assert_array_equal(first, second)
  jax.tree.map(np.testing.assert_array_equal, state, before)


def test_two_forward_passes_count_twice_and_solve_alike():
  """A pass observed twice by mistake doubles the sums, not the bias."""
  config = RouterConfig()
  state = router.init_state(1, config, MOE)
  logits = jax.random.normal(jax.random.key(0), (64, 8))
  _, stats, once = observe(logits, state, config)
  twice = router.combine(stats, stats)
  assert int(twice.valid[0]) == 128
  assert int(twice.load.sum()) == 2 * int(stats.load.sum())
  again = router.solve(state, twice, config)
  np.testing.assert_array_equal(once.bias, again.bias)


def test_bands_are_the_loads_in_order():
  load = np.array([[7, 0, 3, 2, 4, 8, 1, 5, 6, 4, 4]], np.int32)
  stats = router.RouterStats(
    load=jnp.asarray(load),
    valid=jnp.asarray([22]),
    nonfinite=jnp.asarray([0]),
    top_k=2,
  )
  found = router.metrics(stats)
  np.testing.assert_allclose(
    found['load_bands'][0], np.array([0, 0, 2, 4, 6, 8, 8]) / 4
  )
  bands = found['load_bands'][0]
  np.testing.assert_allclose(found['max_vio'][0], bands[-1] - 1)
  np.testing.assert_allclose(found['min_vio'][0], 1 - bands[0])
  assert len(bands) == len(router.LOAD_BANDS)


@pytest.mark.parametrize('rows', [8193, 16500])
def test_more_blocks_than_float32_counts_apart(rows):
  """Tile tables made by float32 histograms go wrong from about 5,000 tiles."""
  rng = np.random.default_rng(0)
  cuts = np.sort(rng.integers(0, rows + 1, 895))
  sizes = np.diff(np.concatenate([[0], cuts, [rows]])).astype(np.int32)
  groups = np.repeat(np.arange(896), sizes)
  lhs = rng.integers(-4, 5, (rows, 2)).astype(np.float32)
  rhs = rng.integers(-4, 5, (896, 2, 3)).astype(np.float32)
  got = jax.jit(lambda *args: grouped_matmul(*args, block=1))(lhs, rhs, sizes)
  want = np.einsum('gk,gkn->gn', lhs, rhs[groups])
  np.testing.assert_array_equal(got, want)
