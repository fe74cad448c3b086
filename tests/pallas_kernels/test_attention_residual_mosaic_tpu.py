"""The TPU depth mix, interpreted, against float64."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention_residual import mix, mosaic_tpu
from pallas_kernels.attention_residual.arg_specs import ArgSpec
from pallas_kernels.testing import assert_close

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
EPS = 1e-5
# Blocks of 16 tokens: one or several, whole or ragged.
SPECS = (
  ArgSpec('ragged', 2, (3, 7), 256),
  ArgSpec('masked', 3, (48,), 128, masked=(1, 3)),
  ArgSpec('nothing', 1, (5,), 128, masked=(0, 1)),
  ArgSpec('float32', 1, (33,), 128, partial=False, dtype='float32'),
  ArgSpec('norm', 1, (21,), 128, normalized=True),
  ArgSpec('norm_f32', 2, (5,), 128, dtype='float32', normalized=True),
)


@functools.partial(jax.jit, static_argnums=3)
def both_passes(arrays, mask, cotangents, kernel=True):
  """((out, weights), gradients by array); see `mosaic_tpu.mix`."""

  def run(arrays):
    if kernel:
      return mosaic_tpu.mix(arrays, mask, EPS, interpret=True)
    sources, partial, query, gain, norm_gain = arrays
    return mix(
      sources,
      query,
      gain,
      partial=partial,
      mask=mask,
      norm_gain=norm_gain,
      return_weights=True,
      implementation='reference',
    )

  outputs, pull = jax.vjp(run, arrays)
  return outputs, pull(cotangents)[0]


def exact(arrays, mask, cotangents):
  """The reference in float64."""
  with jax.enable_x64(True):
    wide = lambda x: jnp.asarray(np.asarray(x, np.float64))
    arrays, cotangents = jax.tree.map(wide, (arrays, cotangents))
    return jax.tree.map(
      np.asarray, both_passes(arrays, mask, cotangents, False)
    )


def close(got, want, output, dtype):
  assert_close(got, want, 'attention_residual', output, dtype)


@pytest.mark.parametrize('spec', SPECS, ids=lambda spec: spec.name)
def test_equals_float64(spec, monkeypatch):
  monkeypatch.setattr(mosaic_tpu, '_MOST_TOKENS', 16)
  positional, keywords = spec.arguments()
  mask = keywords.get('mask')
  arrays = positional[0], keywords.get('partial'), *positional[1:]
  arrays = (*arrays, keywords.get('norm_gain'))
  rng = np.random.default_rng(7)
  do = jnp.asarray(rng.standard_normal((*spec.tokens, spec.width)), spec.dtype)
  d_weights = rng.standard_normal((spec.count, *spec.tokens))
  cotangents = do, jnp.asarray(d_weights, jnp.float32)
  want, want_gradients = exact(arrays, mask, cotangents)
  given = arrays
  if mask is not None:  # what is masked counts for nothing
    allowed = mask[: spec.sources].reshape(-1, *[1] * (len(spec.tokens) + 1))
    given = jnp.where(allowed, arrays[0], jnp.nan), *arrays[1:]
  got, gradients = both_passes(given, mask, cotangents)
  for one, other in zip(got, want):
    close(one, other, 'out', spec.dtype)
  for one, other in zip(gradients, want_gradients):
    if other is not None:
      close(one, other, 'gradient', spec.dtype)
  if mask is not None:
    np.testing.assert_array_equal(gradients[0][~mask[: spec.sources]], 0)


@pytest.mark.parametrize(
  'name', ('attnres_n2', pytest.param('attnres_n9', marks=pytest.mark.slow))
)
def test_golden_numbers(name):
  """Rows four times side by side have the same mix with a quarter of w."""
  data = dict(np.load(GOLDEN / f'{name}.npz'))
  wide = lambda x: jnp.asarray(np.concatenate([x] * 4, axis=-1))
  folded = lambda x: np.asarray(x).reshape(*x.shape[:-1], 4, -1).sum(-2)
  sources, query, gain = (wide(data[n]) for n in ('sources', 'query', 'gain'))
  do = jnp.pad(data['do'], ((0, 0), (0, 3 * data['do'].shape[1])))
  cotangents = do, jnp.zeros(data['weights'].shape)
  (out, weights), (d_sources, _, d_query, d_gain, _) = both_passes(
    (sources, None, query / 4, gain, None), None, cotangents
  )
  assert out.dtype == d_sources.dtype == jnp.float32
  close(out, wide(data['out']), 'out', 'float32')
  close(weights, data['weights'], 'out', 'float32')
  close(folded(d_sources), data['d_sources'], 'gradient', 'float32')
  close(folded(d_query) / 4, data['d_query'], 'gradient', 'float32')
  close(folded(d_gain), data['d_gain'], 'gradient', 'float32')


def test_refuses_what_it_does_not_cover():
  def reason(shape, dtype='bfloat16', query='float32'):
    vector = jax.ShapeDtypeStruct(shape[-1:], query)
    return mosaic_tpu.unsupported(jax.ShapeDtypeStruct(shape, dtype), vector)

  assert reason((8, 2, 5, 7168)) is None
  assert reason((8, 5, 7168), 'float32') is None
  assert 'float16' in reason((9, 5, 256), 'float16')
  assert 'float64' in reason((9, 5, 256), query='float64')
  assert 'multiples of 128' in reason((9, 5, 96))
  assert '31 sources' in reason((32, 5, 256))
  assert 'a token' in reason((3, 0, 256))
  assert 'cannot hold' in reason((31, 5, 28672))
  arrays = jax.ShapeDtypeStruct((3, 5, 256), 'float32'), jnp.ones(256)
  assert 'need a TPU' in mosaic_tpu.refusal(*arrays)
