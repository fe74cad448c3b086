"""The short convolution of KDA: its two forms, and the Hopper kernel emulated.

The tests marked gpu need a Hopper GPU: `JAX_PLATFORMS=cuda pytest -m gpu`.
"""

import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from test_kda_mosaic_gpu_emulated import (
  THREADS,
  Machine,
  Real,
  from_bits,
  substitutes,
  words,
)

from pallas_kernels import testing
from pallas_kernels.kda import (
  conv_bench,
  mosaic_gpu,
  mosaic_gpu_conv,
  mosaic_gpu_threads,
  short_convolution,
  short_convolutions,
)
from pallas_kernels.kda import mosaic_gpu_warp as warp
from pallas_kernels.kda.short_conv import refusal


def by_definition(x_btc, taps_cw, ids_bt):
  """The convolution in float64, token by token."""
  x = np.asarray(x_btc, np.float64)
  y = np.zeros_like(x)
  width = taps_cw.shape[1]
  for b, t in np.ndindex(x.shape[:2]):
    if ids_bt is not None and ids_bt[b, t] == 0:
      continue
    total = np.zeros(x.shape[2])
    for j in range(width):
      s = t - width + 1 + j
      if s >= 0 and (ids_bt is None or ids_bt[b, s] == ids_bt[b, t]):
        total += np.asarray(taps_cw, np.float64)[:, j] * x[b, s]
    y[b, t] = total / (1 + np.exp(-total))
  return y


def case(batch, length, channels, width, packed):
  rng = np.random.default_rng(length)
  x = rng.normal(size=(batch, length, channels)).astype(ml_dtypes.bfloat16)
  d = rng.normal(size=x.shape).astype(ml_dtypes.bfloat16)
  taps = rng.uniform(-0.7, 0.7, (channels, width)).astype(np.float32)
  ids = None
  if packed:
    ids = np.sort(rng.integers(1, length // 9 + 2, (batch, length)), 1)
    ids[:, length // 2 : length // 2 + 2] = 0
    ids = ids.astype(np.int32)
  return x, taps, ids, d


def heads(x):
  """[..., C, rest] as [..., 2, C / 2, rest] for x [B, T, C] or taps [C, W]."""
  if x.ndim == 2:
    return jnp.asarray(x).reshape(2, -1, x.shape[1])
  return jnp.asarray(x).reshape(*x.shape[:2], 2, -1)


def plain_gradients(x, taps, ids, d):
  """Of the form in plain JAX, in float32."""
  run = lambda x, taps: short_convolution(x, taps, ids, implementation='xla')
  wide = lambda x: heads(np.asarray(x, np.float32))
  _, pull = jax.vjp(run, wide(x), heads(taps))
  d_x, d_taps = pull(wide(d))
  return d_x.reshape(x.shape), d_taps.reshape(taps.shape)


@pytest.mark.parametrize('packed', [False, True])
def test_plain_form_is_the_definition(packed):
  x, taps, ids, _ = case(2, 20, 16, 4, packed)
  wide = heads(x.astype(np.float32))
  got = short_convolution(wide, heads(taps), ids, implementation='xla')
  want = by_definition(x, taps, ids)
  np.testing.assert_allclose(got.reshape(x.shape), want, atol=1e-5)


def test_padding_hides_what_stands_there():
  x, taps, ids, d = case(1, 30, 16, 4, True)
  clean = plain_gradients(x, taps, ids, d)
  x[ids == 0] = d[ids == 0] = np.nan
  for got, want in zip(plain_gradients(x, taps, ids, d), clean):
    np.testing.assert_array_equal(got, want)
  assert not np.asarray(clean[0])[ids == 0].any()


def loop(count, state, body):
  for i in range(count):
    state = body(words(i), state)
  return state


# What replaces the rest of `mosaic_gpu_threads`.
THREAD_SUBSTITUTES = dict(
  loop=loop,
  advance=lambda a, count, size: (a[0], a[1] + words(count) * size),
)


@pytest.fixture
def machine(monkeypatch):
  """Replaces instructions and thread numbers by emulated ones."""
  machine = Machine(64)
  for name, function in substitutes(machine).items():
    monkeypatch.setattr(warp, name, function)
  reals = lambda *args: [Real(from_bits(x)) for x in machine.load_words(*args)]
  monkeypatch.setattr(warp, 'load_global', reals)
  numbers = types.SimpleNamespace(
    thread_idx=lambda: np.arange(THREADS, dtype=np.int32)
  )
  monkeypatch.setattr(mosaic_gpu_conv, 'utils', numbers)
  for name, function in (('divide', np.divmod), *THREAD_SUBSTITUTES.items()):
    monkeypatch.setattr(mosaic_gpu_threads, name, function)
  return machine


def emulated(x, taps, ids, d):
  """Outputs, and gradients of x and the taps, by the kernels' threads.

  x is [B, T, S, C], taps [S, C, W], d and the outputs lists of [B, T, C].
  """
  batch, length, parts, channels = x.shape
  bits = lambda a: np.ascontiguousarray(a).view(np.int32)
  own = lambda a, b: (bits(a[b]), 0)
  y, d_x = [np.zeros_like(one) for one in d], np.zeros_like(x)
  d_taps = np.zeros((taps.shape[2], parts, channels), np.float32)
  packed = ids is not None
  shape = length, channels, parts, taps.shape[2], packed
  for b, part in np.ndindex(batch, parts):
    document = own(ids, b) if packed else None
    inputs = own(x, b), own(taps[None], 0), document
    for run, backward in ((32, False), (64, True)):
      sizes = mosaic_gpu_conv.Sizes(*shape, 4, run)
      partial = np.zeros((sizes.runs, *d_taps.shape), np.float32)
      for block in range(sizes.blocks):
        walk = mosaic_gpu_conv.Walk(sizes, part, words(block))
        if backward:
          arrays = *inputs, own(d[part], b)
          outputs = own(d_x, b), own(partial[None], 0)
          mosaic_gpu_conv._backward(walk, arrays, outputs)
        else:
          mosaic_gpu_conv._forward(walk, *inputs, own(y[part], b))
      d_taps += partial.sum(0)
  return y, d_x, np.moveaxis(d_taps, 0, 2)


SHAPES = [(1, 70, 64, 4), (2, 33, 40, 2), (1, 3, 16, 4)]


@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('packed', [False, True])
def test_emulated_kernels(machine, shape, packed):
  x, taps, ids, d = case(*shape, packed)
  xs, tapss, ds = (x, x[:, ::-1]), (taps, -taps), [d, d[:, ::-1]]
  y, d_x, d_taps = emulated(np.stack(xs, 2), np.stack(tapss), ids, ds)
  for i in range(2):
    want_y = by_definition(xs[i], tapss[i], ids)
    assert testing.relative_rms(y[i], want_y) < 3e-3
    want_x, want_taps = plain_gradients(xs[i], tapss[i], ids, ds[i])
    assert testing.relative_rms(d_x[:, :, i], want_x) < 3e-3
    assert testing.relative_rms(d_taps[i], want_taps) < 1e-5


def test_refuses_what_it_does_not_cover():
  x = jax.ShapeDtypeStruct((1, 64, 1, 2, 128), jnp.bfloat16)
  reason = lambda x, kind='NVIDIA H200': refusal(x, device_kind=kind)
  assert reason(x) is None
  assert 'cpu' in reason(x, 'cpu')
  assert 'float32' in reason(jax.ShapeDtypeStruct(x.shape, jnp.float32))
  odd = jax.ShapeDtypeStruct((1, 64, 3, 1, 12), jnp.bfloat16)
  assert 'not 12' in reason(odd)
  short = jax.ShapeDtypeStruct((1, 1, 1, 2, 128), jnp.bfloat16)
  assert '1 tokens' in reason(short)


def test_lowers_for_cuda(monkeypatch):
  monkeypatch.setattr(mosaic_gpu, '_device_kind', lambda: 'NVIDIA H200')
  shape = jax.ShapeDtypeStruct

  def loss(x, taps, ids):
    return jnp.sum(short_convolution(x, taps, ids).astype(jnp.float32))

  args = (
    shape((2, 70, 2, 64), jnp.bfloat16),
    shape((2, 64, 4), jnp.float32),
    shape((2, 70), jnp.int32),
  )
  traced = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).trace(*args)
  text = traced.lower(lowering_platforms=('cuda',)).as_text()
  assert text.count('@mosaic_gpu') == 2


@pytest.mark.gpu
@pytest.mark.parametrize('shape', [(2, 1000, 512, 4), (1, 333, 1024, 3)])
@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('parts', [1, 3])
def test_kernels(shape, packed, parts):
  x, taps, ids, d = case(*shape, packed)
  xs, ds = ([np.roll(a, i, 1) for i in range(parts)] for a in (x, d))
  tapss = [taps * (1 - i) for i in range(parts)]
  run = lambda x, taps: short_convolutions(
    x, taps, ids, implementation='mosaic_gpu'
  )
  joint = lambda arrays, axis: jnp.stack([heads(a) for a in arrays], axis)
  ys, pull = jax.vjp(jax.jit(run), joint(xs, 2), joint(tapss, 0))
  d_x, d_taps = pull(tuple(heads(d) for d in ds))
  for i in range(parts):
    want_y = by_definition(xs[i], tapss[i], ids)
    assert testing.relative_rms(ys[i].reshape(x.shape), want_y) < 3e-3
    want_x, want_taps = plain_gradients(xs[i], tapss[i], ids, ds[i])
    assert testing.relative_rms(d_x[:, :, i].reshape(x.shape), want_x) < 3e-3
    got_taps = d_taps[i].reshape(taps.shape)
    assert testing.relative_rms(got_taps, want_taps) < 1e-5


@pytest.mark.slow
def test_benchmark_prints_two_rows(capsys):
  rows = conv_bench.run(shapes='1x64x3x2x8', repeats=1)
  assert [row['pass'] for row in rows] == ['forward', 'gradient']
  assert capsys.readouterr().out.count('1x64x3x2x8') == 2
