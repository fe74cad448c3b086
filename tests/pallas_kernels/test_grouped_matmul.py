"""The grouped matmul against the dense oracle, forward and every gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels.grouped_matmul import arg_specs, bench, grouped_matmul
from pallas_kernels.grouped_matmul.xla import default_block
from pallas_kernels.testing import assert_close, relative_rms

TEST_SPECS = [(s.name, s) for s in arg_specs.tagged('test')]


@functools.partial(jax.jit, static_argnames=('block', 'implementation'))
def outputs_and_gradients(
  arrays, group_sizes, cotangent, block=None, implementation='xla'
):
  """(out, (gradient of the rows, gradient of the weights))."""

  def run(lhs, rhs):
    return grouped_matmul(
      lhs, rhs, group_sizes, block=block, implementation=implementation
    )

  out, pull = jax.vjp(run, *arrays)
  return out, pull(cotangent.astype(out.dtype))


def cotangent_for(spec):
  rng = np.random.default_rng(5)
  shape = spec.rows, spec.out_width
  return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)


def oracle(arrays, group_sizes, cotangent):
  """The dense form in float64 on the same values."""
  with jax.enable_x64(True):
    exact = lambda x: jnp.asarray(np.asarray(x, np.float64))
    arrays, cotangent = jax.tree.map(exact, (arrays, cotangent))
    return outputs_and_gradients(
      arrays, group_sizes, cotangent, implementation='reference'
    )


def assert_all_close(got, want, dtype):
  out, gradients = got
  assert_close(out, want[0], 'grouped_matmul', 'out', dtype)
  for one, other in zip(gradients, want[1]):
    assert_close(one, other, 'grouped_matmul', 'gradient', dtype)


class OracleTest(parameterized.TestCase):
  @parameterized.named_parameters(TEST_SPECS)
  def test_outputs_and_gradients(self, spec):
    lhs, rhs, sizes = spec.arguments()  # bfloat16 values
    cotangent = cotangent_for(spec)
    want = oracle((lhs, rhs), sizes, cotangent)
    single = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
    for block in (None, 4):
      got = outputs_and_gradients(single, sizes, cotangent, block=block)
      assert_all_close(got, want, 'float32')
    got = outputs_and_gradients((lhs, rhs), sizes, cotangent)
    self.assertEqual(got[0].dtype, jnp.bfloat16)
    assert_all_close(got, want, 'bfloat16')
    used = int(sizes.sum())
    np.testing.assert_array_equal(got[0][used:], 0)
    np.testing.assert_array_equal(got[1][0][used:], 0)
    np.testing.assert_array_equal(got[1][1][sizes == 0], 0)

  @parameterized.parameters(1, 3, 7, 37, 64)
  def test_any_block(self, block):
    spec = dict(TEST_SPECS)['odd']
    lhs, rhs, sizes = spec.arguments()
    arrays = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
    want = oracle(arrays, sizes, cotangent_for(spec))
    got = outputs_and_gradients(arrays, sizes, cotangent_for(spec), block=block)
    assert_all_close(got, want, 'float32')

  def test_one_executable_serves_every_load(self):
    spec = arg_specs.ArgSpec('loads', 40, 8, 8, 6, dtype='float32')
    lhs, rhs, _ = spec.arguments()
    traces = outputs_and_gradients._cache_size()
    for sizes in ([40] + [0] * 7, [5] * 8, [0] * 7 + [39], [0, 1, 2, 0] * 2):
      sizes = jnp.asarray(sizes, jnp.int32)
      got = outputs_and_gradients((lhs, rhs), sizes, cotangent_for(spec))
      want = oracle((lhs, rhs), sizes, cotangent_for(spec))
      assert_all_close(got, want, 'float32')
    # One for the loop and one for the oracle.
    self.assertEqual(outputs_and_gradients._cache_size(), traces + 2)

  def test_gradient_of_wide_weights_is_not_rounded(self):
    spec = arg_specs.ArgSpec('wide', 64, 2, 16, 8, 'even')
    lhs, rhs, sizes = spec.arguments()
    cotangent = cotangent_for(spec)
    wide = outputs_and_gradients(
      (lhs, rhs.astype(jnp.float32)), sizes, cotangent
    )
    want = oracle((lhs, rhs), sizes, cotangent)
    self.assertEqual(wide[0].dtype, jnp.bfloat16)
    self.assertEqual(wide[1][1].dtype, jnp.float32)
    self.assertLess(relative_rms(wide[1][1], want[1][1]), 1e-6)

  def test_float64(self):
    with jax.enable_x64(True):
      spec = arg_specs.ArgSpec('f64', 19, 3, 6, 5, dtype='float64')
      lhs, rhs, sizes = spec.arguments()
      cotangent = cotangent_for(spec)
      got = outputs_and_gradients((lhs, rhs), sizes, cotangent, block=4)
      want = outputs_and_gradients(
        (lhs, rhs), sizes, cotangent, implementation='reference'
      )
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
      self.assertEqual(one.dtype, np.float64)
      self.assertLess(relative_rms(one, other), 1e-14)


class PropertyTest(parameterized.TestCase):
  @parameterized.parameters('xla', 'reference')
  def test_rows_past_the_groups_may_hold_anything(self, implementation):
    spec = arg_specs.ArgSpec('tail', 23, 4, 8, 6, tail=5, dtype='float32')
    lhs, rhs, sizes = spec.arguments()
    cotangent = cotangent_for(spec).astype(jnp.float32)
    run = functools.partial(
      outputs_and_gradients, block=4, implementation=implementation
    )
    clean = run((lhs.at[18:].set(0), rhs), sizes, cotangent.at[18:].set(0))
    for poison in (jnp.nan, jnp.inf):
      dirty = run(
        (lhs.at[18:].set(poison), rhs), sizes, cotangent.at[18:].set(poison)
      )
      jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    np.testing.assert_array_equal(clean[0][18:], 0)

  def test_a_bad_row_stays_in_its_group(self):
    spec = arg_specs.ArgSpec('nan', 20, 4, 8, 6, 'even', dtype='float32')
    lhs, rhs, sizes = spec.arguments()
    clean = outputs_and_gradients((lhs, rhs), sizes, cotangent_for(spec))
    bad = lhs.at[6].set(jnp.nan)
    out, (_, drhs) = outputs_and_gradients(
      (bad, rhs), sizes, cotangent_for(spec)
    )
    others = jnp.arange(20) != 6
    np.testing.assert_array_equal(out[others], clean[0][others])
    groups = jnp.array([0, 2, 3])
    np.testing.assert_array_equal(drhs[groups], clean[1][1][groups])

  def test_expert_permutation(self):
    spec = arg_specs.ArgSpec('swap', 24, 4, 8, 6, 'even', dtype='float32')
    lhs, rhs, sizes = spec.arguments()
    out = grouped_matmul(lhs, rhs, sizes)
    swapped = jnp.roll(lhs, 6, axis=0), jnp.roll(rhs, 1, axis=0)
    other = grouped_matmul(*swapped, sizes)
    np.testing.assert_allclose(jnp.roll(other, -6, axis=0), out, rtol=1e-6)

  def test_scan_and_remat_give_the_same_bits(self):
    spec = arg_specs.ArgSpec('layers', 24, 4, 8, 8, 'even', dtype='float32')
    lhs, rhs, sizes = spec.arguments()
    layers = jnp.stack([rhs, rhs + 0.1])

    def loss(layers, wrap):
      step = wrap(lambda x, w: (jnp.tanh(grouped_matmul(x, w, sizes)), None))
      return jnp.sum(jax.lax.scan(step, lhs, layers)[0])

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    plain = gradient(layers, lambda step: step)
    np.testing.assert_array_equal(plain, gradient(layers, jax.checkpoint))
    self.assertGreater(float(jnp.abs(plain).min(axis=(1, 2, 3)).max()), 0)

  def test_no_array_of_groups_times_rows(self):
    rows, groups, width = 4096, 64, 32
    arrays = (
      jax.ShapeDtypeStruct((rows, width), jnp.float32),
      jax.ShapeDtypeStruct((groups, width, width), jnp.float32),
    )
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    forward = jax.jit(lambda a, s: grouped_matmul(*a, s)).lower(arrays, sizes)
    both = outputs_and_gradients.lower(arrays, sizes, arrays[0])
    # A copy of the rows is allowed, 64 of them or a weight a block are not.
    bound = 2 * rows * width * 4
    for lowered in (forward, both):
      temporary = lowered.compile().memory_analysis().temp_size_in_bytes
      self.assertLess(temporary, bound)

  def test_default_block(self):
    self.assertEqual(default_block(32768, 16), 256)
    self.assertEqual(default_block(2048, 64), 32)
    self.assertEqual(default_block(4000, 50), 128)
    self.assertEqual(default_block(1, 8), 32)


class EdgeTest(parameterized.TestCase):
  def test_empty_arrays(self):
    sizes = jnp.zeros(3, jnp.int32)
    for rows, width, out_width in ((0, 4, 5), (6, 0, 5), (6, 4, 0)):
      arrays = jnp.ones((rows, width)), jnp.ones((3, width, out_width))
      cotangent = jnp.ones((rows, out_width))
      out, gradients = outputs_and_gradients(arrays, sizes, cotangent)
      self.assertEqual(out.shape, (rows, out_width))
      self.assertEqual([g.shape for g in gradients], [a.shape for a in arrays])

  @parameterized.parameters(
    ((6,), (3, 4, 5), (3,), 'rows, width'),
    ((6, 3), (3, 4, 5), (3,), 'second axis'),
    ((6, 4), (3, 4, 5), (2,), 'group_sizes'),
    ((6, 4), (0, 4, 5), (0,), 'at least one'),
  )
  def test_shapes(self, lhs, rhs, sizes, message):
    sizes = jnp.zeros(sizes, jnp.int32)
    with self.assertRaisesRegex(ValueError, message):
      grouped_matmul(jnp.ones(lhs), jnp.ones(rhs), sizes)

  def test_other_mistakes(self):
    lhs, rhs = jnp.ones((6, 4)), jnp.ones((3, 4, 5))
    with self.assertRaisesRegex(TypeError, 'integers'):
      grouped_matmul(lhs, rhs, jnp.ones(3))
    with self.assertRaisesRegex(ValueError, 'block=0'):
      grouped_matmul(lhs, rhs, jnp.ones(3, jnp.int32), block=0)
    with self.assertRaisesRegex(ValueError, 'ragged'):
      grouped_matmul(lhs, rhs, jnp.ones(3, jnp.int32), implementation='ragged')


class BenchTest(absltest.TestCase):
  def test_rows_name_pass_and_ratio(self):
    spec = arg_specs.ArgSpec('small', 64, 4, 8, 8, 'sparse', tail=4)
    rows = bench.run([spec], repeats=1)
    self.assertEqual([row['pass'] for row in rows], ['forward', 'gradient'])
    self.assertGreater(min(row['peer_ratio'] for row in rows), 0)
    self.assertEqual(bench.operations(spec), 2 * 60 * 8 * 8)
    self.assertEqual(bench.traffic(spec), 2 * (64 * 16 + 64))


if __name__ == '__main__':
  absltest.main()
