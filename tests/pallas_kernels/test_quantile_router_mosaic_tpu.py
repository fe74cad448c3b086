"""The TPU routing kernel on a CPU: bit for bit what the reference returns."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import quantile_router as qr
from pallas_kernels.quantile_router import api, arg_specs, mosaic_tpu

SIGMOID = dict(cutoff='kplus1', space='sigmoid')
LOGIT = dict(cutoff='midpoint', space='logit')
# (tokens, experts, top_k, bins, estimator, options). Several planes of experts,
# whole and not; several blocks, the last one not full; one expert a token.
CASES = {
  'k3_log': (150, 896, 16, 33, 'log_edges', SIGMOID),
  'blocks_uniform': (1100, 64, 4, 1000, 'uniform', LOGIT),
  'ragged_log': (300, 200, 1, 9, 'log_edges', LOGIT),
  'ragged_uniform': (130, 200, 4, 50, 'uniform', SIGMOID),
  'nothing_counted': (20, 64, 1, None, None, SIGMOID),
}


@pytest.fixture
def interpreted():
  """Makes 'mosaic_tpu' available here, interpreted."""
  run = functools.partial(mosaic_tpu.route, interpret=True)
  with (
    mock.patch.object(mosaic_tpu, 'refusal', mosaic_tpu.unsupported),
    mock.patch.object(mosaic_tpu, 'route', run),
  ):
    yield


def arguments(tokens, experts, seed=0):
  """Logits with ties, bias and mask; some rows equal, some not finite."""
  rng = np.random.default_rng(seed)
  logits = 2 * rng.normal(size=(tokens, experts)).astype(np.float32)
  logits[5:9] = np.round(logits[5:9])
  logits[9] = 0.0
  logits[10] = np.repeat(logits[10, : experts // 2], 2)
  logits[11, 3] = np.nan
  logits[12] = np.nan
  logits[13, experts - 1] = np.inf
  logits[14, 0] = -np.inf
  logits[15] = -200.0
  bias = 0.1 * rng.normal(size=experts).astype(np.float32)
  bias[: experts // 2] = 0.0
  mask = np.arange(tokens) % 5 != 2
  return jnp.asarray(logits), jnp.asarray(bias), jnp.asarray(mask)


def statistics(num_bins, estimator):
  if estimator is None:
    return None
  lo, hi = jnp.float32(-1.2), jnp.float32(1.3)
  return qr.Statistics(lo, hi, num_bins, estimator)


def gradients(name, given, case):
  """Routing and the gradient of a sum of weights, jitted."""
  _, _, top_k, num_bins, estimator, options = case

  @jax.jit
  def run(logits, bias, mask, stats):
    def loss(logits, bias):
      routing = api.route(
        logits,
        bias,
        top_k=top_k,
        mask=mask,
        statistics=stats,
        implementation=name,
        **options,
      )
      slots = 1.0 + jnp.arange(top_k)
      other = jnp.sum(routing.cutoff)  # must carry no gradient
      return jnp.sum(slots * routing.weights**2) + other, routing

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(logits, bias)

  return run(*given, statistics(num_bins, estimator))


def assert_equal(got, want):
  """Bitwise, but for weights, whose sum XLA may order as it likes."""
  same = np.testing.assert_array_equal
  np.testing.assert_allclose(got.weights, want.weights, rtol=1e-6)
  jax.tree.map(same, got._replace(weights=None), want._replace(weights=None))


@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_equals_the_reference(case, interpreted):
  tokens, experts = case[:2]
  given = arguments(tokens, experts)
  slopes, got = gradients('mosaic_tpu', given, case)
  # The reference holds tokens * experts * bins.
  oracle = 'reference' if case[4] != 'uniform' else 'xla'
  want_slopes, want = gradients(oracle, given, case)
  assert_equal(got, want)
  np.testing.assert_allclose(slopes[0], want_slopes[0], atol=1e-6)
  np.testing.assert_array_equal(slopes[1], np.zeros(experts))
  broken = ~np.isfinite(np.asarray(given[0])).all(1)
  np.testing.assert_array_equal(np.asarray(slopes[0])[broken], 0.0)
  np.testing.assert_array_equal(got.valid, ~broken & np.asarray(given[2]))


def test_low_precision_logits(interpreted):
  case = CASES['nothing_counted']
  logits, bias, mask = arguments(*case[:2])
  given = logits.astype(jnp.bfloat16), bias, mask
  slopes, got = gradients('mosaic_tpu', given, case)
  want_slopes, want = gradients('xla', given, case)
  assert_equal(got, want)
  assert slopes[0].dtype == jnp.bfloat16
  wide = lambda x: np.asarray(x, np.float32)
  np.testing.assert_allclose(wide(slopes[0]), wide(want_slopes[0]), atol=1e-3)


def test_refusals():
  logits = jax.ShapeDtypeStruct((8, 896), jnp.float32)
  reason = mosaic_tpu.refusal(logits, 16, None)
  assert reason == 'the TPU kernel needs a TPU'
  assert mosaic_tpu.unsupported(logits, 16, None) is None
  assert 'top_k=18 of 896' in mosaic_tpu.unsupported(logits, 18, None)
  stats = statistics(2000, 'uniform')
  assert 'up to 1024 bins' in mosaic_tpu.unsupported(logits, 16, stats)
  stats = statistics(201, 'log_edges')
  assert 'up to 129 bins' in mosaic_tpu.unsupported(logits, 16, stats)
  half = jax.ShapeDtypeStruct((8, 896), jnp.float16)
  assert 'float16' in mosaic_tpu.unsupported(half, 16, None)
  spec = arg_specs.tagged('test')[0]
  logits, bias, stats = spec.arguments()
  with pytest.raises(NotImplementedError, match='cannot run on cpu'):
    qr.route(logits, bias, top_k=3, implementation='mosaic_tpu')
