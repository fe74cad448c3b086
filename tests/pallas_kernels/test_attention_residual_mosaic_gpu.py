"""The Hopper depth mix: what it refuses, that it lowers, its numbers.

The tests marked gpu need a Hopper GPU: `JAX_PLATFORMS=cuda pytest -m gpu`.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attention_residual as ar
from pallas_kernels.attention_residual import mosaic_gpu
from pallas_kernels.attention_residual.arg_specs import ArgSpec
from pallas_kernels.testing import assert_close

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
# Each width has another number of warps and units a thread; the last two cases
# do not keep the rows of a token in shared memory.
SPECS = (
  ArgSpec('one', 1, (5,), 256, partial=False),
  ArgSpec('two_odd', 2, (3, 45), 512),
  ArgSpec('masked', 4, (133,), 1024, masked=(1, 3)),
  ArgSpec('closed', 3, (270,), 2304, masked=(3,)),
  ArgSpec('none', 3, (9,), 256, masked=(0, 1, 2, 3)),
  ArgSpec('k3', 8, (301,), 7168),
  ArgSpec('k3_masked', 8, (140,), 7168, masked=(5, 6, 7)),
  ArgSpec('many', 20, (150,), 7168),
  ArgSpec('k3_f32', 8, (139,), 7168, dtype='float32'),
  ArgSpec('small_f32', 3, (50,), 384, dtype='float32'),
  ArgSpec('norm', 8, (271,), 7168, masked=(6,), normalized=True),
  ArgSpec('norm_f32', 3, (41,), 7168, dtype='float32', normalized=True),
)


def arrays_of(spec):
  """(float arguments by name, mask or None), cotangents."""
  positional, keywords = spec.arguments()
  mask = keywords.pop('mask', None)
  arrays = dict(zip(('sources', 'query', 'gain'), positional)) | keywords
  rng = np.random.default_rng(7)
  do = rng.standard_normal((*spec.tokens, spec.width))
  d_weights = rng.standard_normal((spec.count, *spec.tokens))
  cotangents = jnp.asarray(do, spec.dtype), jnp.asarray(d_weights, jnp.float32)
  return arrays, mask, cotangents


@functools.partial(jax.jit, static_argnames='implementation')
def both_passes(arrays, mask, cotangents, implementation):
  """((out, weights), gradients by name)."""

  def run(arrays):
    return ar.mix(
      **arrays, mask=mask, return_weights=True, implementation=implementation
    )

  outputs, pull = jax.vjp(run, arrays)
  return outputs, pull(cotangents)[0]


def exact(arrays, mask, cotangents):
  """The reference in float64."""
  with jax.enable_x64(True):
    wide = lambda x: jnp.asarray(np.asarray(x, np.float64))
    arrays, cotangents = jax.tree.map(wide, (arrays, cotangents))
    return jax.tree.map(
      np.asarray, both_passes(arrays, mask, cotangents, 'reference')
    )


def test_refuses_what_it_does_not_cover():
  def reason(shape, dtype='bfloat16', query='float32'):
    vector = jax.ShapeDtypeStruct(shape[-1:], query)
    return mosaic_gpu.unsupported(jax.ShapeDtypeStruct(shape, dtype), vector)

  assert reason((9, 5, 7168)) is None
  assert reason((9, 2, 5, 896), 'float32') is None
  assert 'float16' in reason((9, 5, 256), 'float16')
  assert 'float64' in reason((9, 5, 256), query='float64')
  assert 'multiples of 256' in reason((9, 5, 128))
  assert 'multiples of 128' in reason((9, 5, 96), 'float32')
  assert 'not 4352' in reason((9, 5, 17 * 256))
  assert '31 sources' in reason((32, 5, 256))
  assert '0 tokens' in reason((3, 0, 256))
  x, vector = jnp.ones((2, 3, 256)), jnp.ones(256)
  with pytest.raises(NotImplementedError, match='H100'):
    ar.mix(x, vector, vector, implementation='mosaic_gpu')


@pytest.mark.parametrize('width', range(256, 15360 + 1, 256))
def test_blocks_fit_their_multiprocessor(width):
  for dtype in ('bfloat16', 'float32'):
    source = jax.ShapeDtypeStruct((8, 16384, width), dtype)
    if mosaic_gpu.unsupported(source, jax.ShapeDtypeStruct((width,), 'f4')):
      continue
    plan = mosaic_gpu.plan_of(
      source.shape, dtype, True, eps=1e-5, extra=1, passes=3
    )
    assert plan.warps * plan.units * plan.per_unit * 32 == width
    assert plan.slots >= 3 and plan.units * plan.per_unit <= 32
    arrays = (
      plan.row_bytes * plan.slots,
      16 * plan.slots,
      4 * plan.scratch_words,
    )
    shared = sum(-(-size // 1024) * 1024 for size in arrays)
    together = plan.blocks // 132
    assert together * (shared + 1024) < 228 * 1024
    assert shared <= 227 * 1024
    assert together * (plan.warps + 1) <= 64


@pytest.mark.parametrize('seed', range(3))
def test_order_has_the_live_sources_first(seed):
  mask = np.random.default_rng(seed).random(9) < 0.5
  order, live = mosaic_gpu._order(jnp.asarray(mask), 9)
  np.testing.assert_array_equal(order, np.argsort(~mask, kind='stable'))
  np.testing.assert_array_equal(live, [mask.sum()])


@pytest.mark.parametrize('partial', (True, False))
def test_lowers_for_cuda(partial):
  shape = jax.ShapeDtypeStruct
  sources, vector = shape((3, 2, 7, 512), 'bfloat16'), shape((512,), 'f4')
  last = shape((2, 7, 512), 'bfloat16') if partial else None
  mask = shape((3 + partial,), bool) if partial else None

  def gradients(sources, last, vector, mask):
    last_gain = vector if partial else None
    run = lambda *arrays: mosaic_gpu.mix(arrays, mask, 1e-5)
    outputs, pull = jax.vjp(run, sources, last, vector, vector, last_gain)
    return pull(outputs)

  exported = jax.export.export(jax.jit(gradients), platforms=['cuda'])
  text = exported(sources, last, vector, mask).mlir_module()
  assert text.count('@mosaic_gpu_v2') == 2


@pytest.mark.gpu
@pytest.mark.parametrize('spec', SPECS, ids=lambda spec: spec.name)
def test_both_passes_on_a_gpu(spec):
  arrays, mask, cotangents = arrays_of(spec)
  if mask is not None:  # what is masked is not read
    allowed = mask[: spec.sources].reshape(-1, *[1] * (len(spec.tokens) + 1))
    poisoned = jnp.where(allowed, arrays['sources'], jnp.nan)
    clean, arrays = arrays, arrays | {'sources': poisoned}
  else:
    clean = arrays
  got, gradients = both_passes(arrays, mask, cotangents, 'mosaic_gpu')
  want, want_gradients = exact(clean, mask, cotangents)
  close = functools.partial(
    assert_close, operation='attention_residual', dtype=spec.dtype
  )
  assert got[0].dtype == spec.dtype
  for one, other in zip(got, want):
    close(one, other, output='out')
  for name, one in gradients.items():
    close(one, want_gradients[name], output='gradient')
  if mask is not None:
    np.testing.assert_array_equal(gradients['sources'][~mask[:-1]], 0)
  again = both_passes(arrays, mask, cotangents, 'mosaic_gpu')
  jax.tree.map(np.testing.assert_array_equal, again, (got, gradients))


@pytest.mark.gpu
@pytest.mark.parametrize('name', ('attnres_n2', 'attnres_n9'))
def test_golden_numbers_on_a_gpu(name):
  """Rows four times side by side have the same mix with a quarter of w."""
  data = dict(np.load(GOLDEN / f'{name}.npz'))
  wide = lambda x: jnp.asarray(np.concatenate([x] * 4, axis=-1))
  folded = lambda x: np.asarray(x).reshape(*x.shape[:-1], 4, -1).sum(-2)
  arrays = {n: wide(data[n]) for n in ('sources', 'query', 'gain')}
  arrays['query'] /= 4
  do = jnp.pad(data['do'], ((0, 0), (0, 3 * data['do'].shape[1])))
  cotangents = do, jnp.zeros(data['weights'].shape)
  (out, weights), gradients = both_passes(
    arrays, None, cotangents, 'mosaic_gpu'
  )
  close = functools.partial(
    assert_close, operation='attention_residual', dtype='float32'
  )
  close(out, wide(data['out']), output='out')
  close(weights, data['weights'], output='out')
  got = {n: folded(x) for n, x in gradients.items()}
  got['query'] /= 4
  for n, x in got.items():
    close(x, data[f'd_{n}'], output='gradient')


@pytest.mark.gpu
def test_remat_and_scan_on_a_gpu():
  arrays, _, (do, _) = arrays_of(ArgSpec('scan', 3, (65,), 512))
  mix = functools.partial(ar.mix, implementation='mosaic_gpu')

  def loss(arrays, remat):
    wrap = jax.checkpoint if remat else lambda f: f

    def step(partial, query):
      given = arrays | {'partial': partial, 'query': query}
      return wrap(lambda given: mix(**given))(given), None

    queries = jnp.stack([arrays['query'], -arrays['query']])
    last, _ = jax.lax.scan(step, arrays['partial'], queries)
    return jnp.sum((last * do).astype(jnp.float32))

  gradient = jax.jit(jax.grad(loss), static_argnums=1)
  jax.tree.map(
    np.testing.assert_array_equal,
    gradient(arrays, False),
    gradient(arrays, True),
  )
