"""Algebra and life cycle of the router state: observe, combine, solve."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from trimoe_jax.config import MoeConfig, RouterConfig
from trimoe_jax.model import router

MOE = MoeConfig(experts=8, top_k=2)
TOKENS = 96
ESTIMATORS = ('uniform', 'log_edges', 'exact')


@functools.partial(jax.jit, static_argnums=(3, 4))
def _observe(logits, state, mask, config, moe):
  one = jax.tree.map(lambda x: x[0], state)
  indices, weights, stats = router.route(
    logits, one, moe, config, mask=mask, observe=True
  )
  return indices, weights, jax.tree.map(lambda x: x[None], stats)


def observe(logits, state, config, *, mask=None, moe=MOE):
  """Route one layer whose state has a layer axis of 1."""
  mask = np.ones(logits.shape[:-1], bool) if mask is None else mask
  return _observe(logits, state, mask, config, moe)


solve = jax.jit(router.solve, static_argnums=2)


def normal(*shape, seed):
  return jnp.asarray(
    np.random.default_rng(seed).normal(size=shape), jnp.float32
  )


@functools.cache
def random_logits():
  return normal(TOKENS, MOE.experts, seed=0) + normal(MOE.experts, seed=1)


def biased_state(config):
  state = router.init_state(1, config, MOE)
  bias = 0.1 * normal(1, MOE.experts, seed=3)
  return state.replace(bias=bias, lo=bias.min(1) - 1, hi=bias.max(1) + 1)


def assert_trees_equal(got, want):
  jax.tree.map(np.testing.assert_array_equal, got, want)


class GoldenTest(absltest.TestCase):
  LOADS = (
    (38, 29, 12, 1, 1, 3, 12, 32),
    (14, 21, 15, 15, 10, 13, 21, 19),
    (16, 18, 16, 16, 12, 14, 19, 17),
    (16, 17, 16, 16, 13, 15, 17, 18),
  )
  BIASES = (
    (-0.18469, -0.09869, -0.00169, 0.12531),
    (-0.17689, -0.11597, 0.00688, 0.13436),
    (-0.17409, -0.12694, 0.00506, 0.13706),
    (-0.17719, -0.12527, 0.00722, 0.13195),
  )
  REST = (
    (0.17131, 0.10531, -0.00216, -0.11469),
    (0.18030, 0.11492, -0.01820, -0.12539),
    (0.18578, 0.12213, -0.02441, -0.12459),
    (0.18938, 0.12535, -0.02498, -0.12645),
  )

  def logits(self):
    i, j = np.arange(64)[:, None], np.arange(8)
    wave = np.sin(1.7 * i + 2.3 * j**2 + 0.31 * i * j) + 0.9 * np.cos(0.8 * j)
    return jnp.asarray(wave, jnp.float32)

  def test_four_steps_on_smooth_scores(self):
    config = RouterConfig()
    state = router.init_state(1, config, MOE)
    for load, first, rest in zip(self.LOADS, self.BIASES, self.REST):
      _, _, stats = observe(self.logits(), state, config)
      np.testing.assert_array_equal(stats.load[0], load)
      state = solve(state, stats, config)
      np.testing.assert_allclose(state.bias[0], first + rest, atol=2e-3)

  def test_exact_quantile_of_the_first_step(self):
    config = RouterConfig(estimator='exact')
    state = router.init_state(1, config, MOE)
    _, _, stats = observe(self.logits(), state, config)
    state = solve(state, stats, config)
    np.testing.assert_allclose(
      state.bias[0],
      (-0.17962, -0.10275, -0.00801, 0.12911)
      + (0.16977, 0.11827, -0.00801, -0.11876),
      atol=1e-5,
    )
    _, _, stats = observe(self.logits(), state, config)
    np.testing.assert_array_equal(
      stats.load[0], (14, 22, 14, 15, 10, 14, 20, 19)
    )

  def test_published_histogram(self):
    config = RouterConfig(num_bins=4)
    state = router.init_state(1, config, MoeConfig(experts=2, top_k=1))
    stats = router.RouterStats(
      load=jnp.asarray([[2, 2]]),
      valid=jnp.asarray([4]),
      nonfinite=jnp.asarray([0]),
      counts=jnp.asarray([[[0, 2, 2, 0], [2, 2, 0, 0]]]),
      top_k=1,
    )
    state = solve(state, stats, config)
    np.testing.assert_array_equal(state.bias, [[0.25, -0.25]])
    np.testing.assert_array_equal((state.lo, state.hi), ([-1.25], [1.25]))


class AlgebraTest(parameterized.TestCase):
  @parameterized.parameters(*ESTIMATORS)
  def test_centred_and_inside_the_range(self, estimator):
    config = RouterConfig(estimator=estimator)
    state = biased_state(config)
    for _ in range(3):
      _, _, stats = observe(random_logits(), state, config)
      if stats.counts is not None:
        np.testing.assert_array_equal(
          stats.counts.sum(-1), np.full((1, 8), TOKENS)
        )
      state = solve(state, stats, config)
      self.assertLess(abs(float(state.bias.mean())), 1e-6)
      self.assertEqual(state.bias.dtype, jnp.float32)
    exact = dataclasses.replace(config, estimator='exact')
    margins = observe(random_logits(), state, exact)[2].margins
    self.assertGreater(float(margins.min()), float(state.lo[0]))
    self.assertLess(float(margins.max()), float(state.hi[0]))

  @parameterized.parameters(*ESTIMATORS)
  def test_permutations_and_duplication(self, estimator):
    config = RouterConfig(estimator=estimator)
    state, logits = biased_state(config), random_logits()
    bias = solve(state, observe(logits, state, config)[2], config).bias
    tokens = np.random.default_rng(1).permutation(TOKENS)
    stats = observe(logits[tokens], state, config)[2]
    np.testing.assert_array_equal(solve(state, stats, config).bias, bias)
    experts = np.random.default_rng(2).permutation(MOE.experts)
    moved = state.replace(bias=state.bias[:, experts])
    stats = observe(logits[:, experts], moved, config)[2]
    np.testing.assert_allclose(
      solve(moved, stats, config).bias, bias[:, experts], atol=1e-7
    )
    stats = observe(logits, state, config)[2]
    twice = router.combine(stats, stats)
    np.testing.assert_array_equal(solve(state, twice, config).bias, bias)

  def test_logit_space_shifts(self):
    """Dyadic numbers, so that every sum below is exact in float32."""
    config = RouterConfig(estimator='exact', space='logit')
    grid = lambda x: jnp.round(x * 64) / 64
    state = biased_state(config)
    state = state.replace(bias=grid(state.bias))
    # A small multiple of the index keeps scores distinct.
    logits = grid(random_logits()) + jnp.arange(8) / 2**14
    indices, _, stats = observe(logits, state, config)
    a_token = grid(normal(TOKENS, 1, seed=4))
    shifted, _, same = observe(logits + a_token, state, config)
    np.testing.assert_array_equal(shifted, indices)
    np.testing.assert_array_equal(same.margins, stats.margins)
    an_expert = grid(normal(8, seed=5))
    moved = state.replace(bias=state.bias - an_expert)
    shifted, _, lower = observe(logits + an_expert, moved, config)
    np.testing.assert_array_equal(shifted, indices)
    np.testing.assert_array_equal(
      lower.margins, stats.margins - an_expert[:, None]
    )

  @parameterized.parameters(*ESTIMATORS)
  def test_micro_batches_add_up_bitwise(self, estimator):
    config = RouterConfig(estimator=estimator)
    state, logits = biased_state(config), random_logits()
    mask = jnp.arange(TOKENS) % 5 != 2
    whole = observe(logits, state, config, mask=mask)[2]
    for pieces in (2, 4):
      parts = [
        observe(x, state, config, mask=m)[2]
        for x, m in zip(jnp.split(logits, pieces), jnp.split(mask, pieces))
      ]
      total = functools.reduce(router.combine, parts)
      assert_trees_equal(total, whole)
      shards = jax.tree.map(lambda *x: jnp.stack(x, 1), *parts)
      assert_trees_equal(router.reduce(shards), whole)
    with self.assertRaisesRegex(ValueError, 'sum the token shards'):
      router.solve(state, shards, config)

  def test_solve_has_no_memory(self):
    config = RouterConfig()
    state = biased_state(config)
    stats = observe(random_logits(), state, config)[2]
    assert_trees_equal(solve(state, stats, config), solve(state, stats, config))

  @parameterized.parameters('kplus1', 'midpoint')
  def test_dual_objective_never_rises(self, cutoff):
    config = RouterConfig(estimator='exact', cutoff=cutoff)
    state = router.init_state(1, config, MOE)
    logits = random_logits()
    scores = np.asarray(jax.nn.sigmoid(logits), np.float64)
    values = []
    for _ in range(6):
      stats = observe(logits, state, config)[2]
      margins = np.asarray(stats.margins[0].T, np.float64)
      alpha = np.mean(margins + scores, axis=1, keepdims=True)
      bias = np.asarray(state.bias[0], np.float64)
      excess = np.maximum(0, scores - alpha + bias).sum()
      values.append(
        excess + MOE.top_k * alpha.sum() - TOKENS * MOE.top_k / 8 * bias.sum()
      )
      state = solve(state, stats, config)
    self.assertLess(np.diff(values).max(), 1e-4)
    self.assertLess(values[-1], values[0] - 0.1)

  def test_balanced_loads_are_a_fixed_point(self):
    """Every row in all rotations loads experts alike; offsets are undone."""
    config = RouterConfig(space='logit')
    rows = normal(TOKENS // 8, 8, seed=0)
    logits = jnp.concatenate([jnp.roll(rows, i, axis=1) for i in range(8)])
    offset = normal(8, seed=1)
    offset -= offset.mean()
    state = router.init_state(1, config, MOE).replace(bias=-offset[None])
    state = state.replace(lo=state.bias.min(1) - 16, hi=state.bias.max(1) + 16)
    stats = observe(logits + offset, state, config)[2]
    np.testing.assert_array_equal(stats.load[0], np.full(8, TOKENS * 2 // 8))
    moved = np.abs(solve(state, stats, config).bias - state.bias).max()
    width = float((state.hi - state.lo)[0]) / config.num_bins
    self.assertLess(moved, 2 * width)


class LifecycleTest(parameterized.TestCase):
  def test_training_and_inference_select_alike(self):
    config = RouterConfig()
    state = biased_state(config)
    one = jax.tree.map(lambda x: x[0], state)
    indices, weights, _ = observe(random_logits(), state, config)
    frozen = jax.jit(lambda x: router.route(x, one, MOE, config))
    got, got_weights, nothing = frozen(random_logits())
    self.assertIsNone(nothing)
    np.testing.assert_array_equal(got, indices)
    np.testing.assert_array_equal(got_weights, weights)

  def test_raising_a_bias_raises_the_load(self):
    config = RouterConfig()
    state = router.init_state(1, config, MOE)
    before = observe(random_logits(), state, config)[2].load[0]
    for expert in range(8):
      raised = state.replace(bias=state.bias.at[0, expert].add(0.3))
      after = observe(random_logits(), raised, config)[2].load[0]
      self.assertGreater(int(after[expert]), int(before[expert]))

  @parameterized.parameters(*ESTIMATORS)
  def test_padding_equals_removal(self, estimator):
    config = RouterConfig(estimator=estimator)
    state, logits = biased_state(config), random_logits()
    mask = jnp.arange(TOKENS) % 10 < 7
    other = jnp.where(mask[:, None], logits, jnp.float32(3.0))
    padded = observe(other, state, config, mask=mask)[2]
    removed = observe(logits[mask], state, config)[2]
    for name in ('load', 'valid', 'nonfinite', 'counts'):
      np.testing.assert_array_equal(
        getattr(padded, name), getattr(removed, name)
      )
    np.testing.assert_array_equal(
      solve(state, padded, config).bias, solve(state, removed, config).bias
    )

  @parameterized.parameters(*ESTIMATORS)
  def test_nonfinite_rows(self, estimator):
    config = RouterConfig(estimator=estimator)
    state, logits = biased_state(config), random_logits()
    broken = logits.at[5, 2].set(jnp.nan)
    stats = observe(broken, state, config)[2]
    self.assertEqual(int(stats.nonfinite[0]), 1)
    self.assertEqual(int(stats.valid[0]), TOKENS - 1)
    self.assertEqual(int(stats.load.sum()), 2 * (TOKENS - 1))
    solved = solve(state, stats, config)
    without = observe(logits, state, config, mask=jnp.arange(TOKENS) != 5)[2]
    assert_trees_equal(solved, solve(state, without, config))
    self.assertTrue(np.isfinite(solved.bias).all())

  @parameterized.product(estimator=ESTIMATORS, timing=('lagged', 'in_batch'))
  def test_no_token_keeps_the_state(self, estimator, timing):
    config = RouterConfig(estimator=estimator, timing=timing)
    state = biased_state(config)
    nothing = jnp.zeros(TOKENS, bool)
    indices, weights, stats = observe(
      random_logits(), state, config, mask=nothing
    )
    self.assertTrue(np.isfinite(weights).all())
    self.assertLess(int(indices.max()), 8)
    assert_trees_equal(solve(state, stats, config), state)
    self.assertTrue(
      all(np.isfinite(v).all() for v in router.metrics(stats).values())
    )

  def test_one_layer_without_tokens_does_not_stop_the_others(self):
    config = RouterConfig()
    state = biased_state(config)
    full = observe(random_logits(), state, config)[2]
    both = jax.tree.map(lambda x: jnp.concatenate([jnp.zeros_like(x), x]), full)
    two = jax.tree.map(lambda x: jnp.concatenate([x, x]), state)
    solved = solve(two, both, config)
    np.testing.assert_array_equal(solved.bias[0], state.bias[0])
    np.testing.assert_array_equal(
      solved.bias[1], solve(state, full, config).bias[0]
    )

  def test_lagged_routing_is_causal_and_in_batch_is_not(self):
    logits = random_logits()
    other = logits.at[-20:].multiply(-3.0)
    changed = {}
    for timing in ('lagged', 'in_batch'):
      config = RouterConfig(timing=timing)
      state = biased_state(config)
      first, _, stats = observe(logits, state, config)
      second, _, other_stats = observe(other, state, config)
      changed[timing] = np.any(first[:-20] != second[:-20])
      now = solve(state, stats, config).bias
      later = solve(state, other_stats, config).bias
      self.assertGreater(np.abs(now - later).max(), 1e-3)
    self.assertFalse(changed['lagged'])
    self.assertTrue(changed['in_batch'])

  def test_in_batch_balances_the_batch_it_routes(self):
    config = RouterConfig(timing='in_batch')
    state = router.init_state(1, config, MOE)
    vio = lambda c: router.metrics(observe(random_logits(), state, c)[2])
    cold = vio(RouterConfig())['max_vio'][0]
    self.assertLess(float(vio(config)['max_vio'][0]), 0.5 * float(cold))
    # Inference routes with the state, not with the batch.
    one = jax.tree.map(lambda x: x[0], state)
    frozen = router.route(random_logits(), one, MOE, config)[0]
    lagged = observe(random_logits(), state, RouterConfig())[0]
    np.testing.assert_array_equal(frozen, lagged)

  def test_ema_averages_with_the_old_bias(self):
    config = RouterConfig()
    state = biased_state(config)
    stats = observe(random_logits(), state, config)[2]
    sharp = solve(state, stats, config).bias
    smooth = solve(state, stats, dataclasses.replace(config, ema=0.75)).bias
    old = state.bias - state.bias.mean()
    np.testing.assert_allclose(smooth, 0.75 * old + 0.25 * sharp, atol=1e-6)

  def test_bias_must_stay_float32(self):
    config = RouterConfig()
    state = router.init_state(1, config, MOE)
    low = jax.tree.map(lambda x: x[0].astype(jnp.bfloat16), state)
    with self.assertRaisesRegex(TypeError, 'must stay float32'):
      router.route(random_logits(), low, MOE, config)

  @parameterized.parameters(*ESTIMATORS)
  def test_state_stays_float32_under_x64(self, estimator):
    config = RouterConfig(estimator=estimator)
    logits = np.asarray(random_logits(), np.float64)
    with jax.enable_x64(True):
      state = router.init_state(1, config, MOE)
      logits = jnp.asarray(logits)
      _, weights, stats = observe(logits, state, config)
      state = solve(state, stats, config)
      self.assertEqual(weights.dtype, jnp.float64)
      self.assertEqual(stats.load.dtype, jnp.int32)
      for leaf in jax.tree.leaves(state):
        self.assertEqual(leaf.dtype, jnp.float32)
    single = router.init_state(1, config, MOE)
    single = solve(single, observe(random_logits(), single, config)[2], config)
    np.testing.assert_allclose(state.bias, single.bias, atol=2e-3)


class BaselineTest(parameterized.TestCase):
  def test_sign_rule(self):
    config = RouterConfig(balance='sign', sign_rate=0.01)
    state = biased_state(config)
    stats = observe(random_logits(), state, config)[2]
    self.assertIsNone(stats.counts)
    solved = solve(state, stats, config)
    load = np.asarray(stats.load, np.float64)
    want = state.bias + 0.01 * np.sign(load.mean() - load)
    np.testing.assert_allclose(solved.bias, want, atol=1e-7)
    # A fractional mean: 25 tokens, 50 routes, mean 6.25; load 6 is below it.
    stats = router.RouterStats(
      load=jnp.asarray([[6, 7, 6, 6, 6, 7, 6, 6]]),
      valid=jnp.asarray([25]),
      nonfinite=jnp.asarray([0]),
      top_k=2,
    )
    moved = solve(state, stats, config).bias - state.bias
    np.testing.assert_array_equal(np.sign(moved[0]), (1, -1, 1, 1, 1, -1, 1, 1))

  def test_auxiliary_loss(self):
    config = RouterConfig(balance='aux_loss')
    state = router.init_state(1, config, MOE)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(offset):
      one = jax.tree.map(lambda x: x[0], state)
      logits = random_logits() + offset
      stats = router.route(logits, one, MOE, config, observe=True)[2]
      stats = jax.tree.map(lambda x: x[None], stats)
      return router.aux_loss(stats), stats

    offset = jnp.zeros(8)
    (value, stats), gradient = loss(offset)
    assert_trees_equal(solve(state, stats, config), state)
    self.assertGreater(float(value), 1.1)
    for _ in range(60):
      offset -= 2.0 * gradient
      (value, after), gradient = loss(offset)
    self.assertLess(float(value), 1.02)
    vio = lambda s: float(router.metrics(s)['max_vio'][0])
    self.assertLess(vio(after), 0.3 * vio(stats))
    plain = observe(random_logits(), state, RouterConfig())[2]
    with self.assertRaisesRegex(ValueError, "balance='aux_loss'"):
      router.aux_loss(plain)

  def test_none_and_freeze_keep_the_bias(self):
    config = RouterConfig()
    state = biased_state(config)
    frozen = router.freeze(config)
    self.assertEqual(frozen.balance, 'none')
    indices, _, stats = observe(random_logits(), state, frozen)
    assert_trees_equal(solve(state, stats, frozen), state)
    np.testing.assert_array_equal(
      indices, observe(random_logits(), state, config)[0]
    )
    self.assertEqual(int(stats.load.sum()), 2 * TOKENS)


class LayerTest(absltest.TestCase):
  """Statistics leave scans, rematerialisation and gradients counted once."""

  def losses(self, config, moe):
    state = router.init_state(3, config, moe)
    bias = 0.1 * normal(3, 8, seed=3)
    state = state.replace(bias=bias)
    w_lde = normal(3, 16, 8, seed=0) / 4
    x_td = normal(TOKENS, 16, seed=1)

    def layer(x_td, inputs):
      w_de, one = inputs
      logits = x_td @ w_de
      indices, weights, stats = router.route(
        logits, one, moe, config, observe=True
      )
      mixed = (
        jnp.zeros_like(logits)
        .at[jnp.arange(TOKENS)[:, None], indices]
        .add(weights)
      )
      return x_td + jnp.tanh(mixed @ w_de.T), stats

    def scanned(w_lde, wrap):
      x, stats = jax.lax.scan(wrap(layer), x_td, (w_lde, state))
      return jnp.sum(x**2), stats

    def unrolled(w_lde):
      x, found = x_td, []
      for l in range(3):
        x, stats = layer(x, jax.tree.map(lambda a, l=l: a[l], (w_lde, state)))
        found.append(stats)
      return jnp.sum(x**2), jax.tree.map(lambda *s: jnp.stack(s), *found)

    gradient = lambda f: jax.jit(jax.grad(f, has_aux=True))(w_lde)
    return (
      gradient(lambda w: scanned(w, lambda f: f)),
      gradient(lambda w: scanned(w, jax.checkpoint)),
      gradient(unrolled),
    )

  def test_scan_remat_and_unrolled_agree(self):
    plain, remat, unrolled = self.losses(RouterConfig(), MOE)
    for other in (remat, unrolled):
      np.testing.assert_allclose(plain[0], other[0], rtol=1e-5, atol=1e-6)
      for name in ('load', 'valid', 'nonfinite'):
        np.testing.assert_array_equal(
          getattr(plain[1], name), getattr(other[1], name)
        )
      counts = np.asarray(plain[1].counts)
      np.testing.assert_array_equal(counts.sum(-1), np.full((3, 8), TOKENS))
      off = np.abs(np.cumsum(counts - np.asarray(other[1].counts), -1))
      self.assertLessEqual(off.max(), 1)


if __name__ == '__main__':
  absltest.main()
