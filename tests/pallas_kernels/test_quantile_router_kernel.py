"""Selection, weights and counts of quantile routing, against definitions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels import quantile_router as qr
from pallas_kernels.quantile_router import arg_specs, bench
from pallas_kernels.quantile_router.statistics import log_edges

TEST_SPECS = [(s.name, s) for s in arg_specs.tagged('test')]


@functools.cache
def jitted(**kwargs):
  return jax.jit(functools.partial(qr.route, **kwargs))


def route(logits, bias=None, *, mask=None, stats=None, **kwargs):
  """`qr.route`, compiled once per shape and option."""
  bias = jnp.zeros(logits.shape[-1]) if bias is None else bias
  mask = jnp.ones(logits.shape[:-1], bool) if mask is None else mask
  return jitted(**kwargs)(logits, bias, mask=mask, statistics=stats)


def statistics(num_bins=20, estimator='uniform', lo=-1.0, hi=1.0):
  return qr.Statistics(
    jnp.float32(lo), jnp.float32(hi), num_bins=num_bins, estimator=estimator
  )


def random_logits(*shape, seed=0):
  return jnp.asarray(
    np.random.default_rng(seed).normal(size=shape), jnp.float32
  )


@jax.jit
@jax.grad
def square_gradient(logits):
  return jnp.sum(qr.route(logits, jnp.zeros(8), top_k=2).weights ** 2)


sigmoid = jax.jit(jax.nn.sigmoid)


class OracleTest(parameterized.TestCase):
  @parameterized.named_parameters(TEST_SPECS)
  def test_xla_equals_reference(self, spec):
    logits, bias, stats = spec.arguments()
    bias = 0.3 * random_logits(spec.experts, seed=5)
    mask = jnp.arange(spec.tokens) % 4 != 1
    got, want = (
      route(
        logits,
        bias,
        mask=mask,
        stats=stats,
        top_k=spec.top_k,
        implementation=name,
      )
      for name in ('xla', 'reference')
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)
    np.testing.assert_array_equal(
      got.counts.sum(-1), np.full(spec.experts, mask.sum())
    )

  @parameterized.product(
    cutoff=('kplus1', 'midpoint'), space=('sigmoid', 'logit')
  )
  def test_selection_against_numpy(self, cutoff, space):
    logits, bias = random_logits(40, 8), 0.2 * random_logits(8, seed=1)
    got = route(logits, bias, top_k=2, cutoff=cutoff, space=space)
    share = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    score = share if space == 'sigmoid' else np.asarray(logits, np.float64)
    biased = score + np.asarray(bias)
    order = np.argsort(-biased, axis=-1, kind='stable')
    ranked = np.take_along_axis(biased, order, -1)
    np.testing.assert_array_equal(got.indices, order[:, :2])
    chosen = np.take_along_axis(share, order[:, :2], -1)
    np.testing.assert_allclose(
      got.weights, chosen / chosen.sum(-1, keepdims=True), rtol=1e-6
    )
    level = ranked[:, 2]
    if cutoff == 'midpoint':
      level = (level + ranked[:, 1]) / 2
    np.testing.assert_allclose(got.cutoff, level, rtol=1e-6, atol=1e-6)
    if cutoff == 'midpoint':  # r_ij < b_j exactly for the selected experts
      margins = np.asarray(got.cutoff)[:, None] - score
      selected = np.zeros((40, 8), bool)
      np.put_along_axis(selected, np.asarray(got.indices), True, 1)
      np.testing.assert_array_equal(np.asarray(bias) > margins, selected)

  @parameterized.parameters('uniform', 'log_edges')
  def test_counts_against_numpy(self, estimator):
    logits, bias = random_logits(40, 8), 0.2 * random_logits(8, seed=1)
    num_bins = 21
    stats = statistics(num_bins, estimator, lo=-1.5, hi=1.4)
    got = route(logits, bias, stats=stats, top_k=2)
    margins = np.asarray(got.cutoff)[:, None] - np.asarray(sigmoid(logits))
    if estimator == 'uniform':
      edges = np.tile(np.linspace(-1.5, 1.4, num_bins + 1)[1:-1], (8, 1))
    else:
      edges = np.asarray(log_edges(bias, stats.lo, stats.hi, num_bins))
    for j in range(8):
      want = np.searchsorted(edges[j], margins[:, j])
      want = np.bincount(want, minlength=num_bins)
      # A margin on an edge may fall either way in float32.
      off = np.abs(np.cumsum(got.counts[j]) - np.cumsum(want))
      self.assertLessEqual(off.max(), 1)

  def test_leading_axes_are_one_batch_of_tokens(self):
    logits, stats = random_logits(40, 8), statistics()
    mask = jnp.arange(40) % 3 != 0
    flat = route(logits, mask=mask, stats=stats, top_k=2)
    folded = route(
      logits.reshape(4, 10, 8), mask=mask.reshape(4, 10), stats=stats, top_k=2
    )
    np.testing.assert_array_equal(folded.indices.reshape(40, 2), flat.indices)
    np.testing.assert_array_equal(folded.counts, flat.counts)
    self.assertEqual(folded.valid.shape, (4, 10))


class GradientTest(parameterized.TestCase):
  def test_gradient_is_that_of_unbiased_weights(self):
    logits, bias = random_logits(40, 8), 0.3 * random_logits(8, seed=1)
    upstream = random_logits(40, 2, seed=2)
    indices = route(logits, bias, top_k=2).indices

    def loss(logits, bias):
      routing = qr.route(logits, bias, top_k=2, statistics=statistics())
      nothing = jnp.sum(routing.cutoff)  # must carry no gradient
      return jnp.sum(routing.weights * upstream) + nothing

    def plain(logits):
      share = jnp.take_along_axis(sigmoid(logits), indices, -1)
      share = share / (share.sum(-1, keepdims=True) + 1e-20)
      return jnp.sum(share * upstream)

    got, got_bias = jax.jit(jax.grad(loss, argnums=(0, 1)))(logits, bias)
    want = jax.jit(jax.grad(plain))(logits)
    np.testing.assert_allclose(got, want, atol=1e-7)
    np.testing.assert_array_equal(got_bias, np.zeros(8))

  def test_weights_do_not_see_the_bias(self):
    logits, bias = random_logits(40, 8), 0.01 * random_logits(8, seed=1)
    plain, biased = route(logits, top_k=2), route(logits, bias, top_k=2)
    same = np.all(np.asarray(plain.indices == biased.indices), axis=-1)
    self.assertTrue(same.any())
    np.testing.assert_array_equal(
      np.asarray(plain.weights)[same], np.asarray(biased.weights)[same]
    )

  def test_top_1_still_trains_the_router(self):
    loss = lambda x: qr.route(x, jnp.zeros(8), top_k=1).weights.sum()
    gradient = jax.jit(jax.grad(loss))(random_logits(40, 8))
    self.assertGreater(np.abs(gradient).max(), 0.01)

  def test_weight_scale(self):
    scaled = route(random_logits(40, 8), top_k=2, weight_scale=2.5)
    np.testing.assert_allclose(scaled.weights.sum(-1), 2.5, rtol=1e-6)

  def test_extreme_logits_keep_weights_and_gradient_finite(self):
    logits = jnp.full((40, 8), 200.0)
    logits = logits.at[0].set(-200.0 - jnp.arange(8)).at[1].set(-1e30)
    logits = logits.at[2].set(-46.0)  # the sum of sigmoids is near 1e-20
    self.assertTrue(np.isfinite(route(logits, top_k=2).weights).all())
    self.assertTrue(np.isfinite(square_gradient(logits)).all())


class EdgeTest(parameterized.TestCase):
  @parameterized.parameters('xla', 'reference')
  def test_ties_go_to_the_lowest_index(self, name):
    constant = route(jnp.zeros((40, 8)), top_k=2, implementation=name)
    np.testing.assert_array_equal(constant.indices, np.tile([0, 1], (40, 1)))
    np.testing.assert_array_equal(constant.cutoff, np.full(40, 0.5))
    twins = jnp.repeat(random_logits(40, 4), 2, axis=1)
    indices = np.asarray(route(twins, top_k=2, implementation=name).indices)
    np.testing.assert_array_equal(indices[:, 0] % 2, np.zeros(40))
    np.testing.assert_array_equal(indices[:, 1], indices[:, 0] + 1)

  @parameterized.parameters(jnp.nan, jnp.inf, -jnp.inf)
  def test_nonfinite_rows_are_harmless_and_not_counted(self, value):
    logits = random_logits(40, 8)
    broken = logits.at[3, 5].set(value).at[7].set(value)
    got = route(broken, stats=statistics(), top_k=2)
    self.assertTrue(np.isfinite(got.weights).all())
    indices, keep = np.asarray(got.indices), np.asarray(got.valid)
    self.assertTrue(((indices >= 0) & (indices < 8)).all())
    np.testing.assert_array_equal(np.flatnonzero(~keep), [3, 7])
    clean = route(logits, mask=got.valid, stats=statistics(), top_k=2)
    np.testing.assert_array_equal(got.counts, clean.counts)
    np.testing.assert_array_equal(
      indices[keep], np.asarray(clean.indices)[keep]
    )
    gradient = np.asarray(square_gradient(broken))
    self.assertTrue(np.isfinite(gradient).all())
    np.testing.assert_array_equal(gradient[7], np.zeros(8))

  @parameterized.parameters('uniform', 'log_edges')
  def test_masked_content_changes_nothing(self, estimator):
    logits, stats = random_logits(40, 8), statistics(21, estimator)
    mask = jnp.arange(40) % 10 < 7
    other = jnp.where(mask[:, None], logits, 50 * random_logits(40, 8, seed=9))
    other = other.at[9].set(jnp.nan)
    first = route(logits, mask=mask, stats=stats, top_k=2)
    second = route(other, mask=mask, stats=stats, top_k=2)
    removed = route(logits[mask], stats=stats, top_k=2)
    np.testing.assert_array_equal(first.counts, second.counts)
    np.testing.assert_array_equal(first.counts, removed.counts)

  def test_low_precision_logits_are_upcast(self):
    logits = random_logits(40, 8).astype(jnp.bfloat16)
    low = route(logits, top_k=2)
    high = route(logits.astype(jnp.float32), top_k=2)
    self.assertEqual(low.weights.dtype, jnp.float32)
    np.testing.assert_array_equal(low.weights, high.weights)

  @parameterized.parameters(0, 8, 9)
  def test_top_k_out_of_range(self, top_k):
    with self.assertRaisesRegex(ValueError, 'smaller than the number'):
      qr.route(random_logits(40, 8), jnp.zeros(8), top_k=top_k)

  def test_refusals(self):
    logits, bias = random_logits(40, 8), jnp.zeros(8)
    with self.assertRaisesRegex(TypeError, 'must stay float32'):
      qr.route(logits, bias.astype(jnp.bfloat16), top_k=2)
    with self.assertRaisesRegex(ValueError, 'one bias an expert'):
      qr.route(logits, jnp.zeros(7), top_k=2)
    with self.assertRaisesRegex(ValueError, 'mask has shape'):
      qr.route(logits, bias, top_k=2, mask=jnp.ones((1, 40), bool))
    with self.assertRaisesRegex(ValueError, 'cutoff='):
      qr.route(logits, bias, top_k=2, cutoff='kth')
    with self.assertRaisesRegex(ValueError, 'space='):
      qr.route(logits, bias, top_k=2, space='softmax')
    with self.assertRaisesRegex(ValueError, 'implementation='):
      qr.route(logits, bias, top_k=2, implementation='cuda')
    with self.assertRaisesRegex(ValueError, 'odd number from 5'):
      statistics(32, 'log_edges')
    with self.assertRaisesRegex(ValueError, 'at least 2 bins'):
      statistics(1)
    with self.assertRaisesRegex(ValueError, 'estimator='):
      statistics(10, 'exact')


class QuantileTest(parameterized.TestCase):
  def test_published_histogram(self):
    counts = jnp.asarray([[0, 2, 2, 0], [2, 2, 0, 0]])
    got = qr.quantile_of_counts(
      counts,
      jnp.zeros(2),
      jnp.int32(4),
      statistics=statistics(4),
      top_k=1,
    )
    np.testing.assert_array_equal(got - got.mean(), [0.25, -0.25])

  def test_target_does_not_overflow(self):
    target = jax.jit(qr.target, static_argnums=(1, 2))
    for valid in (2**28, 2**31 - 1, 10**9 + 7, 895, 1):
      floor, rest = target(jnp.int32(valid), 896, 16)
      self.assertEqual(int(floor) * 896 + int(rest), valid * 16)

  def test_crossing_with_many_tokens(self):
    """2^28 tokens, top_k 16: the product would leave int32."""
    counts = jnp.full((896, 4), 2**26, jnp.int32)
    bin_e, fraction_e, _ = qr.crossing(counts, jnp.int32(2**28), 16)
    np.testing.assert_array_equal(bin_e, np.zeros(896))
    want = (2**28 * 16 / 896) / 2**26
    np.testing.assert_allclose(fraction_e, np.full(896, want), rtol=1e-6)

  @parameterized.parameters(250, 4000)
  def test_histogram_is_within_a_bin_of_the_exact_quantile(self, num_bins):
    logits, bias, _ = arg_specs.ArgSpec('', 4096, 16, 3).arguments()
    stats = statistics(num_bins)
    got = route(logits, bias, stats=stats, top_k=3)
    solved = qr.quantile_of_counts(
      got.counts, bias, jnp.int32(4096), statistics=stats, top_k=3
    )
    margins = np.asarray(got.cutoff)[:, None] - np.asarray(sigmoid(logits))
    load, ordered = 4096 * 3 // 16, np.sort(margins, axis=0)
    width = 2.0 / num_bins
    error = np.abs(solved - ordered[load - 1])
    self.assertLessEqual(error.max(), width + 1e-6)
    self.assertTrue(((margins < solved - width).sum(0) <= load).all())
    self.assertTrue(((margins <= solved + width).sum(0) >= load).all())
    exact = qr.quantile_of_margins(jnp.asarray(margins.T), jnp.int32(4096), 3)
    np.testing.assert_array_equal(exact, ordered[load])
    self.assertTrue(((margins < exact).sum(0) <= load).all())
    self.assertTrue(((margins <= exact).sum(0) >= load).all())

  def test_log_edges_are_fine_near_the_bias_and_reach_the_range(self):
    bias = jnp.asarray([-0.4, 0.0, 0.4])
    edges = np.asarray(log_edges(bias, jnp.float32(-1.4), jnp.float32(1.4), 33))
    self.assertEqual(edges.shape, (3, 32))
    self.assertTrue((np.diff(edges, axis=1) >= 0).all())
    np.testing.assert_array_equal(edges[:, 0], np.float32([-1.4] * 3))
    np.testing.assert_array_equal(edges[:, -1], np.float32([1.4] * 3))
    nearest = np.abs(edges - np.asarray(bias)[:, None]).min(1)
    np.testing.assert_allclose(nearest, 2.8e-4, rtol=1e-3)

  def test_masked_margins_do_not_count(self):
    margins = jnp.asarray([[0.3, jnp.inf, 0.1, 0.2, jnp.inf, 0.4]] * 4)
    got = qr.quantile_of_margins(margins, jnp.int32(4), 2)  # target 2
    np.testing.assert_allclose(got, np.full(4, 0.3))


class MemoryTest(absltest.TestCase):
  def test_no_temporary_of_tokens_times_bins(self):
    logits, bias, stats = arg_specs.ArgSpec('', 2048, 64, 8).arguments()
    compiled = jitted(top_k=8).lower(logits, bias, statistics=stats).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    self.assertLess(temporary, 8 * logits.nbytes)  # the product: 1000 times


class BenchTest(absltest.TestCase):
  def test_rows_name_every_column(self):
    rows = bench.run(arg_specs.tagged('test')[:1], repeats=1, bandwidth=1e9)
    self.assertEqual(tuple(rows[0]), bench.COLUMNS)
    self.assertTrue(all(v > 0 for k, v in rows[0].items() if k != 'spec'))


if __name__ == '__main__':
  absltest.main()
