"""The Hopper kernels of the grouped matmul: tiles, refusals, lowering, numbers.

The tests marked gpu need a Hopper GPU: `JAX_PLATFORMS=cuda pytest -m gpu`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tpu_schedule
from pallas_kernels.grouped_matmul import (
  arg_specs,
  grouped_matmul,
  libraries,
  mosaic_gpu,
  mosaic_gpu_ring,
  mosaic_gpu_rows,
  mosaic_gpu_weights,
)
from pallas_kernels.testing import assert_close, relative_rms

HOPPER = 'NVIDIA H200'
SPECS = (
  arg_specs.ArgSpec('odd', 1000, 7, 384, 320, tail=13),
  arg_specs.ArgSpec('mini', 520, 6, 384, 336),
  arg_specs.ArgSpec('mini_down', 520, 6, 336, 384, tail=5),
  arg_specs.ArgSpec('narrow', 264, 4, 48, 160, tail=3),
  arg_specs.ArgSpec('one_group', 512, 4, 128, 256, 'one'),
  arg_specs.ArgSpec('empty_groups', 304, 9, 192, 128, 'sparse', tail=2),
  arg_specs.ArgSpec('no_rows_used', 256, 3, 64, 64, 'none'),
  arg_specs.ArgSpec('few_rows', 72, 16, 448, 384),
  arg_specs.ArgSpec('few_narrow', 72, 16, 80, 112, tail=8),
  arg_specs.ArgSpec('wide', 640, 3, 512, 1024),
)


def shapes(rows=1024, groups=7, width=384, out_width=320, dtype=jnp.bfloat16):
  lhs = jax.ShapeDtypeStruct((rows, width), dtype)
  return lhs, jax.ShapeDtypeStruct((groups, width, out_width), dtype)


def test_refusals_name_the_reason():
  refusal = functools.partial(mosaic_gpu.refusal, device_kind=HOPPER)
  assert refusal(*shapes()) is None
  assert 'bfloat16' in refusal(*shapes(dtype=jnp.float32))
  assert 'multiples of 8' in refusal(*shapes(rows=1001))
  assert 'multiples of 16' in refusal(*shapes(out_width=40))
  assert 'in shared memory' in refusal(*shapes(groups=2**15))
  assert 'this is NVIDIA A100' in mosaic_gpu.refusal(
    *shapes(), device_kind='NVIDIA A100'
  )


def test_a_cpu_has_no_hopper_kernel():
  lhs, rhs = (jnp.zeros(x.shape, x.dtype) for x in shapes(16, 2, 64, 64))
  with pytest.raises(NotImplementedError, match='need an H100 or H200'):
    grouped_matmul(lhs, rhs, jnp.array([8, 8]), implementation='mosaic_gpu')


@pytest.mark.parametrize('spec', SPECS, ids=lambda s: s.name)
def test_forward_and_gradients_lower(spec):
  lhs, rhs = shapes(spec.rows, spec.groups, spec.width, spec.out_width)
  sizes = jax.ShapeDtypeStruct((spec.groups,), jnp.int32)
  cotangent = jax.ShapeDtypeStruct((spec.rows, spec.out_width), lhs.dtype)
  lower = jax.export.export(jax.jit(outputs_and_gradients), platforms=['cuda'])
  program = lower((lhs, rhs), sizes, cotangent).mlir_module()
  assert program.count('custom_call @mosaic_gpu') == 3


@pytest.mark.parametrize('transposed', (False, True))
@pytest.mark.parametrize('by_rows', (False, True))
def test_pairs_of_thread_blocks_lower(by_rows, transposed):
  plan = mosaic_gpu_ring.Plan(
    128, 256, 4, by_rows=by_rows, pairs=True, transposed=transposed
  )
  lhs, rhs = shapes(width=512, out_width=512)
  sizes = jax.ShapeDtypeStruct((7,), jnp.int32)
  run = functools.partial(mosaic_gpu_rows.multiply, plan=plan)
  lower = jax.export.export(jax.jit(run), platforms=['cuda'])
  program = lower(lhs, rhs, sizes).mlir_module()
  assert program.count('custom_call @mosaic_gpu') == 1


@functools.partial(jax.jit, static_argnames='implementation')
def outputs_and_gradients(arrays, sizes, cotangent, implementation=None):
  """(out, (gradient of the rows, gradient of the weights))."""

  def run(lhs, rhs):
    if implementation is None:
      return mosaic_gpu.grouped_matmul(lhs, rhs, sizes)
    return grouped_matmul(lhs, rhs, sizes, implementation=implementation)

  out, pull = jax.vjp(run, *arrays)
  return out, pull(cotangent.astype(out.dtype))


def arguments(spec):
  """((rows, weights), sizes, cotangent); past the groups there is no number."""
  lhs, rhs, sizes = spec.arguments()
  rng = np.random.default_rng(5)
  shape = spec.rows, spec.out_width
  cotangent = jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
  used = (jnp.arange(spec.rows) < sizes.sum())[:, None]
  poison = lambda x: jnp.where(used, x, jnp.nan)
  return (poison(lhs), rhs), sizes, poison(cotangent)


def oracle(arrays, sizes, cotangent):
  """The same, group by group in float64."""
  lhs, rhs, dout = (np.asarray(x, np.float64) for x in (*arrays, cotangent))
  out, dlhs, drhs = map(np.zeros, (dout.shape, lhs.shape, rhs.shape))
  end = 0
  for group, size in enumerate(np.asarray(sizes)):
    rows, end = slice(end, end + size), end + size
    out[rows], dlhs[rows] = lhs[rows] @ rhs[group], dout[rows] @ rhs[group].T
    drhs[group] = lhs[rows].T @ dout[rows]
  return out, (dlhs, drhs)


def check(spec, implementation, dtype=jnp.bfloat16):
  """Numbers against the oracle; exact zeros where nothing is summed."""
  arrays, sizes, cotangent = arguments(spec)
  want = oracle(arrays, sizes, cotangent)
  arrays = arrays[0], arrays[1].astype(dtype)
  out, (dlhs, drhs) = outputs_and_gradients(
    arrays, sizes, cotangent, implementation=implementation
  )
  assert drhs.dtype == dtype
  assert_close(out, want[0], 'grouped_matmul', 'out', 'bfloat16')
  for got, wanted in zip((dlhs, drhs), want[1]):
    assert_close(got, wanted, 'grouped_matmul', 'gradient', 'bfloat16')
  used = int(sizes.sum())
  for rows in (out, dlhs):
    np.testing.assert_array_equal(rows[used:], 0)
  np.testing.assert_array_equal(drhs[np.asarray(sizes) == 0], 0)


@pytest.mark.gpu
@pytest.mark.parametrize('spec', SPECS, ids=lambda s: s.name)
def test_numbers_on_hopper(spec):
  check(spec, 'mosaic_gpu')


@pytest.mark.gpu
@pytest.mark.parametrize('spec', SPECS[:2], ids=lambda s: s.name)
def test_gradient_of_wide_weights_is_not_rounded(spec):
  check(spec, 'mosaic_gpu', jnp.float32)
  arrays, sizes, cotangent = arguments(spec)
  arrays = arrays[0], arrays[1].astype(jnp.float32)
  got = outputs_and_gradients(
    arrays, sizes, cotangent, implementation='mosaic_gpu'
  )
  want = oracle(arrays, sizes, cotangent)
  assert relative_rms(got[1][1], want[1][1]) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize('pairs', (False, True))
@pytest.mark.parametrize('by_rows', (False, True))
def test_every_division_of_labour(by_rows, pairs):
  spec = SPECS[-1]
  (lhs, rhs), sizes, cotangent = arguments(spec)
  out, (dlhs, drhs) = oracle((lhs, rhs), sizes, cotangent)
  plan = mosaic_gpu_ring.Plan(128, 256, 4, by_rows=by_rows, pairs=pairs)
  turned = dataclasses.replace(plan, transposed=True)
  rows = jax.jit(mosaic_gpu_rows.multiply, static_argnums=3)
  weights = jax.jit(
    mosaic_gpu_weights.multiply, static_argnums=3, static_argnames='dtype'
  )
  got = rows(lhs, rhs, sizes, plan), rows(cotangent, rhs, sizes, turned)
  assert_close(got[0], out, 'grouped_matmul', 'out', 'bfloat16')
  assert_close(got[1], dlhs, 'grouped_matmul', 'gradient', 'bfloat16')
  got = weights(lhs, cotangent, sizes, plan, dtype=jnp.bfloat16)
  assert_close(got, drhs, 'grouped_matmul', 'gradient', 'bfloat16')


@pytest.mark.gpu
def test_repeats_are_bitwise_equal():
  run = functools.partial(outputs_and_gradients, implementation='mosaic_gpu')
  first, again = (run(*arguments(SPECS[0])) for _ in range(2))
  jax.tree.map(np.testing.assert_array_equal, first, again)


@pytest.mark.gpu
@pytest.mark.parametrize('implementation', ('pallas_ops', 'tokamax'))
def test_libraries(implementation):
  if implementation == 'tokamax':
    pytest.importorskip('tokamax')
  check(
    arg_specs.ArgSpec('library', 1024, 4, 256, 128, 'sparse', tail=40),
    implementation,
  )


@pytest.mark.gpu
def test_no_temporary_of_groups_times_rows():
  rows, width, out_width = 65536, 384, 336
  lhs, rhs = shapes(rows, 128, width, out_width)
  sizes = jax.ShapeDtypeStruct((128,), jnp.int32)
  cotangent = jax.ShapeDtypeStruct((rows, out_width), lhs.dtype)
  both = outputs_and_gradients.lower((lhs, rhs), sizes, cotangent)
  assert both.compile().memory_analysis().temp_size_in_bytes < 2**20


@pytest.mark.tpu_compile
def test_libtpu_makes_no_temporary_of_groups_times_rows():
  rows, groups, width, out_width = 2048, 16, 128, 128
  lhs, rhs = shapes(rows, groups, width, out_width)
  sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
  cotangent = jax.ShapeDtypeStruct((rows, out_width), lhs.dtype)

  def run(lhs, rhs, sizes, cotangent):
    multiply = functools.partial(libraries.grouped_matmul, 'ragged_dot')
    out, pull = jax.vjp(lambda x, w: multiply(x, w, sizes), lhs, rhs)
    return out, pull(cotangent)

  schedule = tpu_schedule.compile_for('v6e', run, lhs, rhs, sizes, cotangent)
  # A few copies of the rows; an array with a group axis would have 16 times.
  assert schedule.temporary_bytes < 4 * rows * width * 2
