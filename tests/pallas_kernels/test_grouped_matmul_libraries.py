"""Kernels of libraries behind the switch, interpreted or compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tpu_schedule
from pallas_kernels.grouped_matmul import arg_specs, grouped_matmul, libraries
from pallas_kernels.testing import assert_close

SPECS = [
  arg_specs.ArgSpec('tail', 200, 5, 128, 128, tail=30),
  arg_specs.ArgSpec('narrow', 150, 3, 48, 40),
]


@pytest.fixture
def interpreted(monkeypatch):
  run = functools.partial(libraries._megablox, interpret=True)
  monkeypatch.setitem(libraries._LIBRARIES, 'megablox', run)


@pytest.mark.parametrize('spec', SPECS, ids=lambda s: s.name)
def test_megablox_against_the_oracle(interpreted, spec):
  lhs, rhs, sizes = spec.arguments()
  cotangent = np.random.default_rng(3).normal(size=(spec.rows, rhs.shape[2]))
  cotangent = jnp.asarray(cotangent, jnp.bfloat16)
  run = functools.partial(libraries.grouped_matmul, 'megablox')
  out, pull = jax.vjp(lambda x, w: run(x, w, sizes), lhs, rhs)
  got = out, *pull(cotangent)
  with jax.enable_x64(True):
    exact = lambda x: jnp.asarray(np.asarray(x, np.float64))
    plain = lambda x, w: grouped_matmul(x, w, sizes, implementation='reference')
    out, pull = jax.vjp(plain, exact(lhs), exact(rhs))
    want = out, *pull(exact(cotangent))
  for name, one, other in zip(('out', 'gradient', 'gradient'), got, want):
    assert_close(one, other, 'grouped_matmul', name, 'bfloat16')
  used = int(sizes.sum())
  assert not np.any(got[0][used:]) and not np.any(got[1][used:])
  np.testing.assert_array_equal(got[2][sizes == 0], 0)


@pytest.mark.tpu_compile
@pytest.mark.parametrize('chip', ['v5e', 'v6e', 'tpu7x'])
def test_no_chip_makes_an_array_of_groups_by_rows(chip):
  rows, groups, width = 2048, 14, 384
  shape = jax.ShapeDtypeStruct
  lhs = shape((rows, width), jnp.bfloat16)
  rhs = shape((groups, width, 256), jnp.bfloat16)
  sizes = shape((groups,), jnp.int32)

  def run(lhs, rhs, sizes):
    multiply = lambda x, w: grouped_matmul(x, w, sizes)
    out, pull = jax.vjp(multiply, lhs, rhs)
    return out, pull(out)

  schedule = tpu_schedule.compile_for(chip, run, lhs, rhs, sizes)
  # An array with an axis of groups would have 14 times the rows.
  assert schedule.temporary_bytes < 8 * rows * width * 2
