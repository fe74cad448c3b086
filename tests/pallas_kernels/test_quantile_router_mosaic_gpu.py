"""The Hopper routing kernels: what they refuse, that they lower, their numbers.

The tests marked gpu need a Hopper GPU: `JAX_PLATFORMS=cuda pytest -m gpu`.
"""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import quantile_router as qr
from pallas_kernels.quantile_router import api, arg_specs, mosaic_gpu

SIGMOID = dict(cutoff='kplus1', space='sigmoid')
MIDPOINT = dict(cutoff='midpoint', space='sigmoid')
LOGIT = dict(cutoff='midpoint', space='logit')
# (tokens, experts, top_k, bins, estimator, dtype, options). Experts that divide
# into vectors of 4, 2 and 1; rows that fill no thread block; the most experts.
CASES = {
  'k3_uniform': (4096, 896, 16, 1000, 'uniform', 'float32', SIGMOID),
  'k3_log': (150, 896, 16, 33, 'log_edges', 'float32', SIGMOID),
  'bfloat16': (1000, 896, 16, 1000, 'uniform', 'bfloat16', MIDPOINT),
  'few_experts': (1100, 64, 4, 1000, 'uniform', 'float32', LOGIT),
  'one_expert': (300, 200, 1, 9, 'log_edges', 'float32', LOGIT),
  'odd': (37, 11, 3, 50, 'uniform', 'float32', SIGMOID),
  'odd_bfloat16': (70, 129, 31, 129, 'log_edges', 'bfloat16', SIGMOID),
  'pairs': (66, 898, 16, 77, 'uniform', 'bfloat16', MIDPOINT),
  'most_experts': (50, 2048, 8, 100, 'uniform', 'float32', SIGMOID),
  'nothing_counted': (20, 64, 1, None, None, 'float32', SIGMOID),
}


def arguments(case, seed=0):
  """Logits with ties, bias and mask; some rows equal, some not finite."""
  tokens, experts, _, _, _, dtype, _ = case
  rng = np.random.default_rng(seed)
  logits = 2 * rng.normal(size=(tokens, experts)).astype(np.float32)
  logits[5:9] = np.round(logits[5:9])
  logits[9] = 0.0
  logits[10] = np.repeat(logits[10], 2)[:experts]
  logits[11, 3] = np.nan
  logits[12] = np.nan
  logits[13, experts - 1] = np.inf
  logits[14, 0] = -np.inf
  logits[15] = -200.0
  # Scores below the least normal number, and scores that round to 1.
  logits[16] = -88.0 - np.arange(experts) / 100
  logits[17] = np.linspace(60, 120, experts)
  # The best of one lane only.
  logits[18] = np.where(np.arange(experts) % 128 < 4, 5, -5) + logits[18] / 100
  bias = 0.1 * rng.normal(size=experts).astype(np.float32)
  bias[: experts // 2] = 0.0
  mask = np.arange(tokens) % 5 != 2
  return jnp.asarray(logits, dtype), jnp.asarray(bias), jnp.asarray(mask)


def statistics(num_bins, estimator):
  if estimator is None:
    return None
  lo, hi = jnp.float32(-1.2), jnp.float32(1.3)
  return qr.Statistics(lo, hi, num_bins, estimator)


def gradients(name, case):
  """A function of logits, bias, mask and statistics."""
  _, _, top_k, _, _, _, options = case

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

  return jax.jit(run)


def test_refusals():
  logits = jax.ShapeDtypeStruct((8, 896), jnp.float32)
  reason = mosaic_gpu.refusal(logits, 16, None)
  assert reason == 'the Hopper kernels need an H100 or H200, this is cpu'
  assert mosaic_gpu.unsupported(logits, 16, None) is None
  assert 'top_k=32 of 896' in mosaic_gpu.unsupported(logits, 32, None)
  half = jax.ShapeDtypeStruct((8, 896), jnp.float16)
  assert 'float16' in mosaic_gpu.unsupported(half, 16, None)
  empty = jax.ShapeDtypeStruct((0, 896), jnp.float32)
  assert 'tokens, not 0' in mosaic_gpu.unsupported(empty, 16, None)
  stats = statistics(100_000, 'uniform')
  assert 'hold 100000 bins' in mosaic_gpu.unsupported(logits, 16, stats)
  stats = statistics(1001, 'log_edges')
  assert 'hold 1001 bins' in mosaic_gpu.unsupported(logits, 16, stats)
  logits, bias, _ = arg_specs.tagged('test')[0].arguments()
  with pytest.raises(NotImplementedError, match='cannot run on cpu'):
    qr.route(logits, bias, top_k=3, implementation='mosaic_gpu')


@pytest.mark.parametrize('name', ['k3_uniform', 'k3_log', 'odd_bfloat16'])
def test_lowers_for_cuda(name):
  case = CASES[name]
  stats = statistics(*case[3:5])
  with mock.patch.object(mosaic_gpu, 'refusal', mosaic_gpu.unsupported):
    run = gradients('mosaic_gpu', case)
    given = jax.eval_shape(lambda: (*arguments(case), stats))
    text = jax.export.export(run, platforms=['cuda'])(*given).mlir_module()
  assert text.count('mosaic_gpu_v2') == 2
  size = f'tensor<{case[0]}x{case[1]}x'
  # Of the size of the logits there are the logits, their gradient and its
  # zeros, but no scores.
  assert f'logistic {size}' not in text


def test_lowers_in_rematerialised_layers_and_under_vmap():
  """Nothing of the kernels stands in the way of either."""
  given = jnp.zeros((128, 64)), jnp.zeros((3, 64, 64)), jnp.zeros((3, 64))
  stats = statistics(100, 'uniform')

  def route(logits, bias):
    return api.route(
      logits,
      bias,
      top_k=4,
      statistics=stats,
      implementation='mosaic_gpu',
    )

  def loss(weight, x, bias):
    @jax.checkpoint
    def layer(x, parameters):
      routing = route(x @ parameters[0], parameters[1])
      return x * jnp.sum(routing.weights**2, 1, keepdims=True), routing.counts

    x, counts = jax.lax.scan(layer, x, (weight, bias))
    return jnp.sum(x), counts

  with mock.patch.object(mosaic_gpu, 'refusal', mosaic_gpu.unsupported):
    run = jax.jit(jax.grad(loss, has_aux=True))
    text = jax.export.export(run, platforms=['cuda'])(
      given[1], given[0], given[2]
    ).mlir_module()
    # The counts of the second pass are dropped.
    assert text.count('mosaic_gpu_v2') == 3
    run = jax.jit(jax.vmap(route, in_axes=(None, 0)))
    jax.export.export(run, platforms=['cuda'])(given[0], given[2])


def sharded(case, mesh):
  """Routing and its gradient with tokens spread over a mesh, jitted."""
  rows, whole = jax.P('data'), jax.P()

  def local(logits, bias, mask, stats):
    slopes, routing = gradients('mosaic_gpu', case)(logits, bias, mask, stats)
    # Counts of shards are summed outside.
    return slopes[0], routing._replace(counts=routing.counts[None])

  given = rows, whole, rows, whole
  run = jax.shard_map(local, mesh=mesh, in_specs=given, out_specs=rows)
  return jax.jit(run), given


@pytest.mark.parametrize('name', ['k3_uniform', 'k3_log'])
def test_lowers_in_a_sharded_region(name):
  """Varying axes are checked."""
  case = CASES[name]
  mesh = jax.make_mesh((2,), ('data',), devices=jax.devices()[:2])
  run, specs = sharded(case, mesh)
  shapes = jax.eval_shape(lambda: (*arguments(case), statistics(*case[3:5])))

  def placed(tree, spec):
    where = jax.sharding.NamedSharding(mesh, spec)
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
    return jax.tree.map(place, tree)

  given = [placed(tree, spec) for tree, spec in zip(shapes, specs)]
  with mock.patch.object(mosaic_gpu, 'refusal', mosaic_gpu.unsupported):
    text = jax.export.export(run, platforms=['cuda'])(*given).mlir_module()
  assert text.count('mosaic_gpu_v2') == 2


@pytest.mark.gpu
@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_equals_xla(case):
  """Bitwise, but for weights, whose sum XLA may order as it likes."""
  given = *arguments(case), statistics(*case[3:5])
  slopes, got = gradients('mosaic_gpu', case)(*given)
  want_slopes, want = gradients('xla', case)(*given)
  same = np.testing.assert_array_equal
  np.testing.assert_allclose(got.weights, want.weights, rtol=1e-6)
  jax.tree.map(same, got._replace(weights=None), want._replace(weights=None))
  wide = lambda x: np.asarray(x, np.float32)
  atol = 1e-6 if case[5] == 'float32' else 1e-3
  assert slopes[0].dtype == given[0].dtype
  np.testing.assert_allclose(wide(slopes[0]), wide(want_slopes[0]), atol=atol)
  same(slopes[1], np.zeros(case[1]))
  broken = ~np.isfinite(wide(given[0])).all(1)
  same(wide(slopes[0])[broken], 0.0)
  same(got.valid, ~broken & np.asarray(given[2]))
  if got.counts is not None:
    same(got.counts.sum(1), np.full(case[1], got.valid.sum()))


@pytest.mark.gpu
def test_equals_the_reference():
  case = CASES['k3_log']
  given = *arguments(case), statistics(*case[3:5])
  _, got = gradients('mosaic_gpu', case)(*given)
  _, want = gradients('reference', case)(*given)
  same = np.testing.assert_array_equal
  jax.tree.map(same, got._replace(weights=None), want._replace(weights=None))


@pytest.mark.gpu
@pytest.mark.parametrize('name', ['k3_uniform', 'k3_log'])
def test_repeated_runs_are_bitwise_equal(name):
  case = CASES[name]
  given = *arguments(case), statistics(*case[3:5])
  run = gradients('mosaic_gpu', case)
  first = run(*given)
  for _ in range(20):
    jax.tree.map(np.testing.assert_array_equal, run(*given), first)


@pytest.mark.gpu
def test_a_sharded_region_changes_nothing():
  case = CASES['k3_uniform']
  given = *arguments(case), statistics(*case[3:5])
  mesh = jax.make_mesh((1,), ('data',), devices=jax.devices()[:1])
  run, specs = sharded(case, mesh)
  place = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
  slopes, got = run(*map(place, given, specs))
  want_slopes, want = gradients('mosaic_gpu', case)(*given)
  same = np.testing.assert_array_equal
  same(slopes, want_slopes[0])
  jax.tree.map(same, got._replace(counts=got.counts[0]), want)
