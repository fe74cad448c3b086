"""Attention within media against a dense mask, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import FAST_COMPILE

from pallas_kernels.testing import relative_rms
from trimoe_jax.model.media import places
from trimoe_jax.model.vision_attention import Bounds, attend_within

GRIDS = np.array(
  [
    [[1, 2, 4], [2, 2, 2], [1, 4, 4]],
    [[1, 4, 6], [0, 0, 0], [0, 0, 0]],
    [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
    [[1, 2, 2], [1, 2, 2], [3, 4, 2]],
  ],
  np.int32,
)
PATCHES = 36


def inputs(seed=0):
  rng = np.random.default_rng(seed)
  shape = (len(GRIDS), PATCHES, 2, 8)
  return [jnp.asarray(rng.normal(size=shape)) for _ in range(3)]


def dense(q_bphk, k_bshk, v_bshk, medium_bp):
  same = medium_bp[:, :, None] == medium_bp[:, None, :]
  same &= medium_bp[:, :, None] > 0
  logits = jnp.einsum('bphk,bshk->bhps', q_bphk, k_bshk) / 8**0.5
  logits = jnp.where(same[:, None], logits, -1e30)
  p_bhps = jax.nn.softmax(logits, axis=-1)
  out = jnp.einsum('bhps,bshk->bphk', p_bhps, v_bshk)
  return jnp.where(medium_bp[..., None, None] > 0, out, 0)


def media_numbers():
  """1, 2, ... for the patches of each medium, 0 for padding."""
  numbers = np.zeros((len(GRIDS), PATCHES), np.int32)
  for row, grids in zip(numbers, GRIDS):
    sizes = grids.prod(1)
    row[: sizes.sum()] = np.repeat(np.arange(1, 4), sizes)
  return jnp.asarray(numbers)


@pytest.mark.parametrize('block_size', [64, 7])
def test_forward_and_gradients_are_those_of_a_dense_mask(block_size):
  with jax.enable_x64(True):
    arrays, medium = inputs(), media_numbers()
    bounds = places(jnp.asarray(GRIDS), PATCHES).bounds
    weight = inputs(1)[0]

    def run(function):
      loss = lambda *arrays: jnp.sum(weight * function(*arrays))
      out = jax.jit(function, compiler_options=FAST_COMPILE)(*arrays)
      return out, jax.jit(
        jax.grad(loss, argnums=(0, 1, 2)), compiler_options=FAST_COMPILE
      )(*arrays)

    got = run(
      lambda *x: attend_within(*x, bounds, scale=8**-0.5, block_size=block_size)
    )
    want = run(lambda *x: dense(*x, medium))
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
      assert relative_rms(ours, theirs) < 1e-12


def test_padding_that_is_not_a_number_stays_out():
  bounds = places(jnp.asarray(GRIDS), PATCHES).bounds
  seen = (bounds.end > bounds.start)[..., None, None]
  poison = [jnp.where(seen, x, jnp.nan) for x in inputs()]
  grad = jax.grad(
    lambda *x: jnp.sum(attend_within(*x, bounds, scale=1.0, block_size=8)),
    argnums=(0, 1, 2),
  )
  assert all(np.isfinite(x).all() for x in jax.jit(grad)(*poison))


def test_nothing_grows_with_the_square_of_the_patches():
  shape = jax.ShapeDtypeStruct((1, 8192, 1, 8), jnp.float32)
  bounds = jax.ShapeDtypeStruct((1, 8192), jnp.int32)

  def grads(q, k, v, start, end):
    loss = lambda *x: jnp.sum(
      attend_within(*x, Bounds(start, end), scale=1.0, block_size=256)
    )
    return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

  lowered = jax.jit(grads).lower(shape, shape, shape, bounds, bounds)
  memory = lowered.compile().memory_analysis()
  assert memory.temp_size_in_bytes < 8192 * 8192
