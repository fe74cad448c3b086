"""The one-token TPU kernel of KDA on a CPU, against the plain JAX step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import testing
from pallas_kernels.kda import decode_step, mosaic_tpu_decode
from pallas_kernels.kda import inputs as kda_inputs

# NaN where memory was never written, and an error where two copies collide.
STRICT = pltpu.InterpretParams(uninitialized_memory='nan', detect_races=True)
SLOTS = [(3, 0, -1, 2), (-1, -1, 4, 1), (-1, -1, -1, -1)]


def given(batch=4, heads=2, value_heads=4, key_dim=64, value_dim=128, pool=6):
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
  token = {
    'q': normal(batch, heads, key_dim),
    'k': normal(batch, heads, key_dim),
    'v': normal(batch, value_heads, value_dim),
    'gate': normal(batch, value_heads, key_dim),
    'beta': normal(batch, value_heads),
    'a_log': 0.1 * normal(value_heads).astype(jnp.float32),
    'dt_bias': normal(value_heads, key_dim).astype(jnp.float32),
  }
  states = normal(pool, value_heads, key_dim, value_dim).astype(jnp.float32)
  return token, states


@functools.partial(jax.jit, static_argnames=('lower_bound', 'interpret'))
def kernel(token, states, slots, lower_bound=-5.0, interpret=True):
  settings = kda_inputs.Settings(
    lower_bound, token['q'].shape[-1] ** -0.5, True, True, True
  )
  return mosaic_tpu_decode.step(
    kda_inputs.Raw(**token), states, slots, settings, interpret
  )


@pytest.mark.parametrize('lower_bound', [-5.0, None])
@pytest.mark.parametrize('slots', SLOTS)
def test_paged_step(slots, lower_bound):
  token, states = given()
  slots = jnp.asarray(slots)
  out, got = kernel(token, states, slots, lower_bound)
  want_out, want = decode_step(
    **token, state=states, slots=slots, lower_bound=lower_bound
  )
  assert testing.relative_rms(out, want_out) < 1e-3
  assert testing.relative_rms(got, want) < 1e-6
  untouched = np.setdiff1d(np.arange(6), slots)
  np.testing.assert_array_equal(got[untouched], states[untouched])


def test_paged_step_in_strict_memory():
  """No race, no byte that nobody wrote; NaN in padding and in free slots."""
  token, states = given()
  for slots in map(jnp.asarray, SLOTS[:2]):
    poisoned = {
      n: jnp.where((slots < 0).reshape(-1, *[1] * (x.ndim - 1)), jnp.nan, x)
      if n not in ('a_log', 'dt_bias')
      else x
      for n, x in token.items()
    }
    free = np.setdiff1d(np.arange(6), slots)
    pool = states.at[free].set(jnp.nan)
    want = kernel(token, states, slots)
    got = kernel(poisoned, pool, slots, interpret=STRICT)
    np.testing.assert_array_equal(
      np.asarray(got[0], np.float32), np.asarray(want[0], np.float32)
    )
    used = np.asarray(slots[slots >= 0])
    np.testing.assert_array_equal(got[1][used], want[1][used])
    assert np.isnan(got[1][free]).all()


def test_plain_steps_over_a_pool():
  """Rows of a pool advance as rows of a batch do; padding changes nothing."""
  token, states = given()
  slots = jnp.asarray([5, -1, 0, 3])
  out, pool = decode_step(**token, state=states, slots=slots)
  rows = states[jnp.maximum(slots, 0)]
  want_out, want = decode_step(**token, state=rows, active=slots >= 0)
  np.testing.assert_array_equal(
    np.asarray(out, np.float32), np.asarray(want_out, np.float32)
  )
  for row, slot in ((0, 5), (2, 0), (3, 3)):
    np.testing.assert_array_equal(pool[slot], want[row])
  np.testing.assert_array_equal(
    pool[jnp.array([1, 2, 4])], states[jnp.array([1, 2, 4])]
  )


@pytest.mark.parametrize(
  'change,message',
  [
    ({'slots': jnp.zeros(3, jnp.int32)}, r'int32\[4\]'),
    ({'slots': jnp.zeros(4)}, r'slots is float32'),
    ({'active': jnp.ones(4, bool)}, 'both given'),
    ({'state': jnp.zeros((6, 4, 64, 64))}, r'must be \[N, \*\(4, 64, 128\)\]'),
  ],
)
def test_mistakes_about_slots(change, message):
  token, states = given()
  arguments = token | {'state': states, 'slots': jnp.arange(4)} | change
  with pytest.raises(ValueError, match=message):
    decode_step(**arguments)
