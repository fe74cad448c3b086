"""The gated norm of KDA: its plain form, and the Hopper kernel emulated.

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
from test_short_conv import THREAD_SUBSTITUTES

from pallas_kernels import testing
from pallas_kernels.kda import (
  gated_norm,
  mosaic_gpu,
  mosaic_gpu_norm,
  mosaic_gpu_threads,
)
from pallas_kernels.kda import mosaic_gpu_warp as warp
from pallas_kernels.kda.gated_norm import refusal
from pallas_kernels.kda.norm_bench import run as bench

EPS = 1e-5


def case(rows, width):
  """x, gate, gain and a cotangent; rows of very different sizes."""
  rng = np.random.default_rng(rows)
  half = lambda x: x.astype(ml_dtypes.bfloat16)
  size = np.exp2(rng.integers(-9, 9, (rows, 1)))
  x, gate, d = (rng.normal(size=(rows, width)) for _ in range(3))
  gain = rng.uniform(0.5, 2, width).astype(np.float32)
  return half(x * size), half(4 * gate), gain, half(d)


def by_definition(x, gate, gain, d):
  """Output and gradients of x, gate and gain in float64."""
  with jax.enable_x64(True):
    wide = [jnp.asarray(np.asarray(a, np.float64)) for a in (x, gate, gain)]

    def run(x, gate, gain):
      scale = (jnp.mean(x**2, -1, keepdims=True) + EPS) ** -0.5
      return jax.nn.sigmoid(gate) * gain * x * scale

    y, pull = jax.vjp(run, *wide)
    return map(np.asarray, (y, *pull(jnp.asarray(np.asarray(d, np.float64)))))


def check(got, want):
  for x, y in zip(got, want, strict=True):
    limit = 1e-5 if x.ndim == 1 else 3e-3
    assert testing.relative_rms(x, y) < limit
    # Each row by itself, however small it is beside others.
    if x.ndim > 1:
      error = np.asarray(x, np.float64) - y
      rows = np.linalg.norm(error, axis=1) / np.linalg.norm(y, axis=1)
      assert rows.max() < 6e-3


def in_heads(x):
  return jnp.asarray(x).reshape(1, -1, 2, x.shape[-1])


def test_plain_form_is_the_definition():
  x, gate, gain, d = case(40, 64)
  wide = lambda x: in_heads(np.asarray(x, np.float32))

  def run(x, gate, gain):
    return gated_norm(x, gate, gain, eps=EPS, implementation='xla')

  y, pull = jax.vjp(run, wide(x), wide(gate), gain)
  want = by_definition(x, gate, gain, d)
  for got, exact in zip((y, *pull(wide(d))), want, strict=True):
    assert testing.relative_rms(got.reshape(exact.shape), exact) < 1e-5


@pytest.fixture
def machine(monkeypatch):
  """Replaces instructions and thread numbers by emulated ones."""
  machine = Machine(64)
  for name, function in substitutes(machine).items():
    monkeypatch.setattr(warp, name, function)
  reals = lambda *args: [Real(from_bits(x)) for x in machine.load_words(*args)]
  lane = np.arange(THREADS)
  exchange = lambda x, distance: Real(x.value[lane ^ distance])
  monkeypatch.setattr(warp, 'load_global', reals)
  monkeypatch.setattr(warp, 'exchange', exchange)
  numbers = types.SimpleNamespace(
    thread_idx=lambda: np.arange(THREADS, dtype=np.int32)
  )
  monkeypatch.setattr(mosaic_gpu_norm, 'utils', numbers)
  for name, function in THREAD_SUBSTITUTES.items():
    monkeypatch.setattr(mosaic_gpu_threads, name, function)


@pytest.mark.parametrize('shape', [(600, 128), (77, 64), (3, 256)])
def test_emulated_kernels(machine, shape):
  x, gate, gain, d = case(*shape)
  sizes = mosaic_gpu_norm.Sizes(*shape, EPS)
  at = lambda a: (a.view(np.int32), 0)
  y, d_x, d_gate = (np.zeros_like(x) for _ in range(3))
  partial = np.zeros((sizes.warps, shape[1]), np.float32)
  for block in range(sizes.blocks):
    walk = mosaic_gpu_norm.Walk(sizes, words(block))
    mosaic_gpu_norm._forward(walk, [at(x), at(gate), at(gain)], [at(y)])
    inputs = [at(x), at(gate), at(d), at(gain)]
    outputs = [at(d_x), at(d_gate), at(partial)]
    mosaic_gpu_norm._backward(walk, inputs, outputs)
  got = y, d_x, d_gate, partial.sum(0)
  check(got, by_definition(x, gate, gain, d))


def test_refuses_what_it_does_not_cover():
  x = jax.ShapeDtypeStruct((1, 4096, 2, 128), jnp.bfloat16)
  reason = lambda x, gate=x, kind='NVIDIA H200': refusal(
    x, gate, device_kind=kind
  )
  assert reason(x) is None
  assert 'cpu' in reason(x, kind='cpu')
  wide = jax.ShapeDtypeStruct(x.shape, jnp.float32)
  assert 'x is float32' in reason(wide)
  assert 'gate is float32' in reason(x, wide)
  odd = jax.ShapeDtypeStruct((1, 4096, 2, 96), jnp.bfloat16)
  assert 'not 96' in reason(odd)
  few = jax.ShapeDtypeStruct((1, 1, 2, 128), jnp.bfloat16)
  assert '2 rows' in reason(few)


def test_lowers_for_cuda(monkeypatch):
  monkeypatch.setattr(mosaic_gpu, '_device_kind', lambda: 'NVIDIA H200')

  def loss(x, gate, gain):
    y = gated_norm(x, gate, gain, eps=EPS)
    return jnp.sum(y.astype(jnp.float32))

  rows = jax.ShapeDtypeStruct((2, 2048, 2, 128), jnp.bfloat16)
  gain = jax.ShapeDtypeStruct((128,), jnp.float32)
  gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
  traced = gradient.trace(rows, rows, gain)
  text = traced.lower(lowering_platforms=('cuda',)).as_text()
  assert text.count('@mosaic_gpu') == 2


@pytest.mark.gpu
@pytest.mark.parametrize('shape', [(50000, 128), (4099 * 2, 64), (4096, 256)])
def test_kernels(shape):
  x, gate, gain, d = case(*shape)

  def run(x, gate, gain):
    return gated_norm(x, gate, gain, eps=EPS, implementation='mosaic_gpu')

  y, pull = jax.vjp(jax.jit(run), in_heads(x), in_heads(gate), gain)
  got = y, *pull(in_heads(d))
  got = [np.asarray(a).reshape(-1, shape[1]) for a in got[:3]] + [got[3]]
  check(got, by_definition(x, gate, gain, d))


@pytest.mark.slow
def test_benchmark_prints_two_rows(capsys):
  rows = bench(shapes='1x64x2x8', repeats=1)
  assert [row['pass'] for row in rows] == ['forward', 'gradient']
  assert capsys.readouterr().out.count('1x64x2x8') == 2
