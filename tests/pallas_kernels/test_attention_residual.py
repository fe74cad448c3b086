"""The depth mix against golden numbers, float64 and its own properties."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels import attention_residual as ar
from pallas_kernels.attention_residual import arg_specs, bench
from pallas_kernels.testing import assert_close, relative_rms

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
IMPLEMENTATIONS = ('xla', 'reference')
TEST_SPECS = [(s.name, s) for s in arg_specs.tagged('test')]


def golden(name):
  return dict(np.load(GOLDEN / f'{name}.npz'))


@functools.partial(jax.jit, static_argnames='implementation')
def outputs_and_gradients(arrays, mask, cotangents, implementation='xla'):
  """((out, weights), gradients by name) of `mix` with the given cotangents."""

  def run(arrays):
    return ar.mix(
      **arrays, mask=mask, return_weights=True, implementation=implementation
    )

  outputs, pull = jax.vjp(run, arrays)
  return outputs, pull(cotangents)[0]


def arrays_of(spec):
  """(float arguments by name, mask or None)."""
  positional, keywords = spec.arguments()
  mask = keywords.pop('mask', None)
  return dict(zip(('sources', 'query', 'gain'), positional)) | keywords, mask


def cotangents_for(spec, dtype):
  rng = np.random.default_rng(7)
  do = rng.standard_normal((*spec.tokens, spec.width))
  dweights = rng.standard_normal((spec.count, *spec.tokens))
  wide = jnp.promote_types(dtype, jnp.float32)
  return jnp.asarray(do, dtype), jnp.asarray(dweights, wide)


def oracle(spec, arrays, mask, cotangents):
  """The reference in float64 on the same values."""
  with jax.enable_x64(True):
    exact = lambda x: jnp.asarray(np.asarray(x, np.float64))
    arrays, cotangents = jax.tree.map(exact, (arrays, cotangents))
    return outputs_and_gradients(arrays, mask, cotangents, 'reference')


class GoldenTest(parameterized.TestCase):
  @parameterized.product(
    name=('attnres_n2', 'attnres_n9'), implementation=IMPLEMENTATIONS
  )
  def test_outputs_and_gradients(self, name, implementation):
    data = golden(name)
    arrays = {n: data[n] for n in ('sources', 'query', 'gain')}
    cotangents = data['do'], np.zeros_like(data['weights'])
    (out, weights), gradients = outputs_and_gradients(
      arrays, None, cotangents, implementation
    )
    close = functools.partial(assert_close, operation='attention_residual')
    close(out, data['out'], output='out', dtype='float32')
    close(weights, data['weights'], output='out', dtype='float32')
    for n, got in gradients.items():
      close(got, data[f'd_{n}'], output='gradient', dtype='float32')

  def test_wrong_variants_are_told_apart(self):
    data = golden('attnres_n9')
    x, query, gain = data['sources'], data['query'], data['gain']
    keys = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5)
    mixed = lambda logits, values: np.einsum(
      'mt,mtd->td', jax.nn.softmax(logits, axis=0), values
    )
    right = keys @ (query * gain)
    self.assertLess(relative_rms(mixed(right, x), data['out']), 1e-5)
    wrong = {
      'normalized values': mixed(right, keys),
      'no gain': mixed(keys @ query, x),
      'scaled by 1/sqrt(D)': mixed(right / x.shape[-1] ** 0.5, x),
      'no key norm': mixed(x @ (query * gain), x),
      'plain mean': x.mean(0),
      'plain sum': x.sum(0),
    }
    for name, out in wrong.items():
      self.assertGreater(relative_rms(out, data['out']), 1e-2, name)


class OracleTest(parameterized.TestCase):
  @parameterized.named_parameters(TEST_SPECS)
  def test_float32_and_bfloat16(self, spec):
    arrays, mask = arrays_of(spec)  # bfloat16 values, exact in float32
    for dtype in ('float32', 'bfloat16'):
      wide = {'query', 'gain'} if dtype == 'bfloat16' else set()
      given = {
        n: x if n in wide else x.astype(dtype) for n, x in arrays.items()
      }
      cotangents = cotangents_for(spec, dtype)
      want, want_gradients = oracle(spec, given, mask, cotangents)
      got, gradients = outputs_and_gradients(given, mask, cotangents)
      self.assertEqual(got[0].dtype, dtype)
      self.assertEqual(got[1].dtype, jnp.float32)
      close = functools.partial(assert_close, operation='attention_residual')
      for one, other in zip(got, want):
        close(one, other, output='out', dtype=dtype)
      for name, one in gradients.items():
        self.assertEqual(one.dtype, given[name].dtype)
        close(one, want_gradients[name], output='gradient', dtype=dtype)

  def test_float64_equals_automatic_differentiation(self):
    spec = arg_specs.ArgSpec(
      'f64', 3, (6,), 20, masked=(1,), dtype='float64', tags=()
    )
    with jax.enable_x64(True):
      arrays, mask = arrays_of(spec)
      cotangents = cotangents_for(spec, 'float64')
      got = outputs_and_gradients(arrays, mask, cotangents, 'xla')
      want = outputs_and_gradients(arrays, mask, cotangents, 'reference')
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
      self.assertEqual(one.dtype, np.float64)
      self.assertLess(relative_rms(one, other), 1e-12)


class PropertyTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.spec = arg_specs.ArgSpec('p', 3, (2, 5), 16, dtype='float32')
    self.arrays, _ = arrays_of(self.spec)
    self.cotangents = cotangents_for(self.spec, 'float32')

  def run_mix(self, mask=None, implementation='xla', **changed):
    return outputs_and_gradients(
      self.arrays | changed, mask, self.cotangents, implementation
    )

  def test_zero_query_gives_the_mean(self):
    (out, weights), gradients = self.run_mix(query=jnp.zeros(16))
    stacked = [*self.arrays['sources'], self.arrays['partial']]
    np.testing.assert_allclose(out, sum(stacked) / 4, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weights, 0.25, rtol=1e-6)
    np.testing.assert_array_equal(gradients['gain'], 0)
    self.assertGreater(float(jnp.abs(gradients['query']).max()), 1e-3)

  def test_partial_is_one_more_source(self):
    (out, weights), gradients = self.run_mix()
    sources, partial = self.arrays['sources'], self.arrays['partial']
    stacked = {n: self.arrays[n] for n in ('query', 'gain')}
    stacked['sources'] = jnp.concatenate([sources, partial[None]])
    (want, want_weights), want_gradients = outputs_and_gradients(
      stacked, None, self.cotangents
    )
    joined = jnp.concatenate([gradients['sources'], gradients['partial'][None]])
    for one, other in (
      (out, want),
      (weights, want_weights),
      (joined, want_gradients['sources']),
      (gradients['query'], want_gradients['query']),
      (gradients['gain'], want_gradients['gain']),
    ):
      self.assertLess(relative_rms(one, other), 1e-6)

  @parameterized.parameters(*IMPLEMENTATIONS)
  def test_masked_sources_are_absent_whatever_they_hold(self, implementation):
    mask = jnp.array([True, False, True, False])
    poisoned = {
      'sources': self.arrays['sources'].at[1].set(jnp.nan),
      'partial': jnp.full_like(self.arrays['partial'], jnp.inf),
    }
    (out, weights), gradients = self.run_mix(mask, implementation, **poisoned)
    kept = {n: self.arrays[n] for n in ('query', 'gain')}
    kept['sources'] = self.arrays['sources'][jnp.array([0, 2])]
    dweights = self.cotangents[1][jnp.array([0, 2])]
    (want, want_weights), want_gradients = outputs_and_gradients(
      kept, None, (self.cotangents[0], dweights)
    )
    np.testing.assert_array_equal(weights[1::2], 0)
    np.testing.assert_array_equal(gradients['sources'][1], 0)
    np.testing.assert_array_equal(gradients['partial'], 0)
    self.assertLess(relative_rms(out, want), 1e-6)
    self.assertLess(relative_rms(weights[::2], want_weights), 1e-6)
    live = gradients['sources'][::2]
    self.assertLess(relative_rms(live, want_gradients['sources']), 1e-5)
    for n in ('query', 'gain'):
      self.assertLess(relative_rms(gradients[n], want_gradients[n]), 1e-5)

  @parameterized.parameters(*IMPLEMENTATIONS)
  def test_nothing_allowed_gives_zero(self, implementation):
    outputs, gradients = self.run_mix(jnp.zeros(4, bool), implementation)
    for x in jax.tree.leaves((outputs, gradients)):
      np.testing.assert_array_equal(x, 0)

  def test_large_scores_stay_finite(self):
    (out, weights), gradients = self.run_mix(query=self.arrays['query'] * 1e4)
    np.testing.assert_allclose(jnp.sum(weights, 0), 1, rtol=1e-5)
    for x in jax.tree.leaves((out, gradients)):
      self.assertTrue(bool(jnp.all(jnp.isfinite(x))))

  def test_zero_source_is_a_source(self):
    zero = {'partial': jnp.zeros_like(self.arrays['partial'])}
    (_, weights), gradients = self.run_mix(**zero)
    self.assertGreater(float(weights[3].min()), 0)
    for x in jax.tree.leaves(gradients):
      self.assertTrue(bool(jnp.all(jnp.isfinite(x))))

  def test_remat_and_repeat_are_bitwise_equal(self):
    arrays = self.arrays
    loss = lambda arrays: jnp.sum(jnp.sin(ar.mix(**arrays)))
    plain = jax.jit(jax.grad(loss))
    first = plain(arrays)
    remat = jax.jit(jax.grad(jax.checkpoint(loss)))(arrays)
    for other in (plain(arrays), remat):
      jax.tree.map(np.testing.assert_array_equal, first, other)

  def test_derivative_needs_less_memory_than_the_sources(self):
    arrays = {
      'sources': jax.ShapeDtypeStruct((8, 1024, 128), jnp.float32),
      'partial': jax.ShapeDtypeStruct((1024, 128), jnp.float32),
      'query': jax.ShapeDtypeStruct((128,), jnp.float32),
      'gain': jax.ShapeDtypeStruct((128,), jnp.float32),
    }
    loss = lambda arrays: jnp.sum(jnp.square(ar.mix(**arrays)))
    compiled = jax.jit(jax.grad(loss)).lower(arrays).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    self.assertLess(temporary, 0.75 * 8 * 1024 * 128 * 4)


class TwoPhaseTest(parameterized.TestCase):
  @parameterized.product(size=(1.0, 60.0), masked=(False, True))
  def test_merge_equals_the_direct_softmax(self, size, masked):
    spec = arg_specs.ArgSpec('two', 4, (2, 6), 24, dtype='float32')
    arrays, _ = arrays_of(spec)
    rng = np.random.default_rng(3)
    queries = jnp.asarray(size * rng.standard_normal((3, 24)), jnp.float32)
    gains = jnp.asarray(1 + 0.2 * rng.standard_normal((3, 24)), jnp.float32)
    mask = jnp.array([True, False, True, True]) if masked else None
    whole = None if mask is None else jnp.append(mask, True)
    phases = jax.jit(ar.phase_one)(arrays['sources'], queries, gains, mask=mask)
    mix, merge = jax.jit(ar.mix), jax.jit(ar.merge)
    # A score is rounded to eps times its size, and the weights move with it.
    allowed = np.finfo(np.float32).eps * float(jnp.abs(phases[1]).max())
    for i in range(3):
      phase = jax.tree.map(lambda x, i=i: x[i], phases)
      got = merge(phase, arrays['partial'], queries[i], gains[i])
      want = mix(
        arrays['sources'],
        queries[i],
        gains[i],
        partial=arrays['partial'],
        mask=whole,
      )
      self.assertLess(relative_rms(got, want), allowed)
      first = merge(phase, None, queries[i], gains[i])
      want = mix(arrays['sources'], queries[i], gains[i], mask=mask)
      self.assertLess(relative_rms(first, want), allowed)

  def test_no_finished_block_leaves_the_partial(self):
    sources, partial = jnp.ones((2, 3, 8)), jnp.arange(24.0).reshape(3, 8)
    vectors = jnp.ones((1, 8))
    phases = ar.phase_one(sources, vectors, vectors, mask=jnp.zeros(2, bool))
    phase = jax.tree.map(lambda x: x[0], phases)
    got = ar.merge(phase, partial, vectors[0], vectors[0])
    np.testing.assert_allclose(got, partial, rtol=1e-6)


class MistakeTest(parameterized.TestCase):
  @parameterized.parameters(
    ({'sources': (8,)}, 'must be'),
    ({'query': (7,)}, 'query'),
    ({'partial': (4, 8)}, 'partial'),
    ({'mask': (2,)}, 'mask'),
  )
  def test_shapes(self, changed, message):
    shapes = {'sources': (3, 5, 8), 'query': (8,), 'gain': (8,)} | changed
    arrays = {
      n: jnp.ones(shape, bool if n == 'mask' else None)
      for n, shape in shapes.items()
    }
    with self.assertRaisesRegex(ValueError, message):
      ar.mix(**arrays)

  def test_mask_dtype_and_implementation(self):
    x, vector = jnp.ones((3, 5, 8)), jnp.ones(8)
    with self.assertRaisesRegex(TypeError, 'booleans'):
      ar.mix(x, vector, vector, mask=jnp.ones(3))
    with self.assertRaisesRegex(ValueError, 'implementation'):
      ar.mix(x, vector, vector, implementation='cuda')
    with self.assertRaisesRegex(ValueError, 'queries'):
      ar.phase_one(x, vector, vector)


class BenchTest(absltest.TestCase):
  def test_rows_name_pass_and_ratio(self):
    specs = [arg_specs.ArgSpec('small', 2, (64,), 32, masked=(0,))]
    rows = bench.run(specs, repeats=1, bandwidth=1e9)
    passes = ['forward', 'backward', 'gradient']
    self.assertEqual([row['pass'] for row in rows[::2]], passes)
    self.assertEqual([row['by'] for row in rows], ['ours', 'reference'] * 3)
    for row in rows:
      self.assertGreater(row['peer_ratio'], 0)
    # Three bfloat16 sources and one output; then both directions again.
    row = 64 * 32 * 2
    self.assertEqual(bench.traffic(specs[0], 'forward'), 4 * row)
    self.assertEqual(bench.traffic(specs[0], 'backward'), 7 * row)
    self.assertEqual(bench.traffic(specs[0], 'gradient'), 11 * row)


if __name__ == '__main__':
  absltest.main()
