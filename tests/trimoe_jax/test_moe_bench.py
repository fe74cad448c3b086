"""The benchmark of a MoE layer: its rows, its count of operations, mistakes."""

import pytest
from absl.testing import absltest

from trimoe_jax.config import ModelConfig, MoeConfig
from trimoe_jax.model import moe_bench


class MoeBenchTest(absltest.TestCase):
  @pytest.mark.slow
  def test_rows_name_pass_and_rates(self):
    rows = moe_bench.run('tiny', tokens=64, repeats=1)
    self.assertEqual([row['pass'] for row in rows], ['forward', 'gradient'])
    for row in rows:
      self.assertAlmostEqual(row['tokens/s'] * row['ms'], 64e3, delta=1)
      work = moe_bench.PASSES[row['pass']] * row['tokens/s']
      work *= moe_bench.operations(moe_bench.SHAPES['tiny'])
      self.assertAlmostEqual(row['TFLOP/s'], work / 1e12)

  def test_operations(self):
    moe = MoeConfig(experts=5, top_k=2, shared_experts=1, hidden=3, latent=7)
    config = ModelConfig(width=11, moe=moe)
    router, latent, shared = 11 * 5, 2 * 11 * 7, 3 * 11 * 3
    routed = 2 * 3 * 7 * 3
    want = 2 * (router + latent + shared + routed)
    self.assertEqual(moe_bench.operations(config), want)

  def test_mistakes(self):
    with self.assertRaisesRegex(ValueError, "shape='huge'"):
      moe_bench.run('huge')
    with self.assertRaisesRegex(ValueError, 'tokens=0'):
      moe_bench.run('tiny', tokens=0)


if __name__ == '__main__':
  absltest.main()
