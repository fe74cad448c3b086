"""The benchmark of a KDA layer: its rows, fla's parameters, mistakes."""

import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest

from pallas_kernels.kda import device_bench
from trimoe_jax.model import kda_bench


class KdaBenchTest(absltest.TestCase):
  @pytest.mark.slow
  def test_rows_of_our_layer(self):
    rows = kda_bench.run(shape='1x64x2', width=32, head_dim=8)
    self.assertEqual([row['pass'] for row in rows], ['forward', 'gradient'])
    for row in rows:
      self.assertEqual((row['by'], row['times_ours']), ('ours', 1.0))
      self.assertGreater(row['times_floor'], 0)

  def test_matrices(self):
    shape = device_bench.parse('1x64x2')
    config = kda_bench._config(shape, 32, 8, 'full', None)
    case = kda_bench.Case(config, shape)
    # Queries, keys, values, gate, output; decay down and up; beta.
    want = 5 * 32 * 16 + 32 * 8 + 8 * 16 + 32 * 2
    self.assertEqual(case.matrix_size, want)

  def test_parameters_of_fla_are_transposed(self):
    shape = device_bench.parse('1x64x2')
    case = kda_bench.Case(kda_bench._config(shape, 32, 8, 'full', None), shape)
    params = case.params
    theirs = kda_bench._fla_parameters(params)
    x = np.random.default_rng(0).normal(size=(5, 32))
    want = jnp.einsum('td,dhk->thk', x, params['query']).reshape(5, -1)
    np.testing.assert_allclose(x @ theirs['q_proj.weight'].T, want, atol=1e-6)
    y = np.random.default_rng(0).normal(size=(5, 2, 8))
    want = jnp.einsum('thv,hvd->td', y, params['out'])
    got = y.reshape(5, -1) @ theirs['o_proj.weight'].T
    np.testing.assert_allclose(got, want, atol=1e-6)

  def test_mistakes(self):
    with self.assertRaisesRegex(ValueError, "'torch' is no peer"):
      kda_bench.run(peers='torch')
    with self.assertRaisesRegex(ValueError, 'is no shape'):
      kda_bench.run(shape='1x64')


if __name__ == '__main__':
  absltest.main()
