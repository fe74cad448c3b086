"""Choosing tokens, and generation against the logits of one pass."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import (
  FAST_COMPILE,
  random_tokens,
  random_weights,
  small_config,
)

from trimoe_jax import sampling, sharding
from trimoe_jax.model.model import Model, model_parameters
from trimoe_jax.model.parameters import map_table
from trimoe_jax.sampling import sample

CONFIG = small_config(dtype='float32')
MODEL = Model(CONFIG)
BATCH, TOKENS = 2, 6


@functools.cache
def weights():
  return random_weights(CONFIG)


def prompts(length=11):
  return random_tokens((BATCH, length))


def generate(ids, **changes):
  settings = {
    'max_tokens': TOKENS,
    'temperature': 0.0,
    'key': jax.random.key(0),
  }
  return np.asarray(
    sampling.generate(MODEL, *weights(), ids, **(settings | changes))
  )


def test_greedy_tokens_are_the_largest_logits_of_one_pass():
  params, state = weights()
  ids = prompts()
  out = generate(ids)
  assert out.shape == (BATCH, TOKENS)
  assert out.dtype == np.int32
  run = jax.jit(MODEL.apply, compiler_options=FAST_COMPILE)
  whole = np.concatenate([ids, out], 1)
  logits = run({'params': params}, whole, state)
  np.testing.assert_array_equal(
    np.argmax(logits[:, ids.shape[1] - 1 : -1], -1), out
  )


def test_padding_may_lie_anywhere():
  ids = prompts()
  want = generate(ids[:, :4])
  for places in ([7, 8, 9, 10], [0, 1, 2, 3], [1, 4, 5, 9]):
    padded, valid = np.full((2, 11), 7), np.zeros((2, 11), bool)
    padded[:, places], valid[:, places] = ids[:, :4], True
    np.testing.assert_array_equal(generate(padded, valid=valid), want)


def test_prompts_may_have_different_lengths():
  ids = prompts()
  valid = np.arange(11) < np.array([[1], [11]])
  want = [generate(ids[:, :1])[0], generate(ids)[1]]
  np.testing.assert_array_equal(generate(ids, valid=valid), want)


def test_one_compilation_serves_lengths_temperatures_and_keys():
  generate(prompts(3))
  compiled = lambda: (
    sample._start._cache_size(),
    sampling.advance._cache_size(),
  )
  before = compiled()
  generate(prompts(16), temperature=0.7, key=jax.random.key(5))
  generate(prompts(9), temperature=1.3)
  assert compiled() == before


def test_a_key_decides_the_tokens():
  draw = lambda seed: generate(
    prompts(), temperature=1.0, key=jax.random.key(seed)
  )
  np.testing.assert_array_equal(draw(1), draw(1))
  assert (draw(1) != draw(2)).any()


def test_a_stopped_row_repeats_its_stop_token():
  free = generate(prompts())
  stop = int(free[0, 2])
  first = [list(row).index(stop) if stop in row else None for row in free]
  got = generate(prompts(), stop=stop)
  for row, at in enumerate(first):
    end = TOKENS if at is None else at
    np.testing.assert_array_equal(got[row, :end], free[row, :end])
    np.testing.assert_array_equal(got[row, end:], stop)


def test_a_prompt_read_in_pieces_gives_the_same_logits_and_cache():
  params, state = weights()
  ids = prompts(16)
  valid = np.arange(16) >= np.array([[3], [9]])

  @functools.partial(jax.jit, static_argnums=0, compiler_options=FAST_COMPILE)
  def read(piece, ids):
    return sampling.prefill(
      MODEL, params, state, ids, length=20, valid_bt=valid, piece=piece
    )

  whole, pieces = read(None, ids), read(4, ids)
  np.testing.assert_allclose(pieces[0], whole[0], rtol=1e-4, atol=1e-5)
  assert int(pieces[1].length) == 16
  np.testing.assert_array_equal(pieces[1].valid, whole[1].valid)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
    pieces[1].layers,
    whole[1].layers,
  )


@pytest.mark.parametrize('rows', [None, 1], ids=['divisible', 'one'])
def test_a_mesh_draws_the_same_tokens(rows):
  params, state = weights()
  settings = {'temperature': 0.9, 'key': jax.random.key(3)}
  tokens = prompts()[:rows]
  want = generate(tokens, **settings)
  mesh = sharding.make_mesh({'data': 2, 'tensor': 2}, jax.devices()[:4])
  where = map_table(
    lambda p: sharding.named(p.axes, p.shape, mesh), model_parameters(CONFIG)
  )
  with jax.set_mesh(mesh):
    got = sampling.generate(
      MODEL,
      jax.device_put(params, where),
      state,
      tokens,
      max_tokens=TOKENS,
      **settings,
    )
  np.testing.assert_array_equal(got, want)


# Choosing


def frequencies(logits, count=4000, **settings):
  """How often each token is drawn from one row of logits."""
  rows = jnp.tile(jnp.asarray(logits, jnp.float32), (count, 1))
  drawn = sampling.choose(rows, jax.random.key(0), sampling.Drawing(**settings))
  return np.bincount(drawn, minlength=len(logits)) / count


def test_draws_follow_the_tempered_softmax():
  logits = np.array([2.0, 1.0, 0.0, -1.0])
  for temperature in (0.5, 1.0, 2.0):
    p = np.exp(logits / temperature)
    got = frequencies(logits, temperature=temperature)
    np.testing.assert_allclose(got, p / p.sum(), atol=0.03)


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
  p = np.array([0.1, 0.5, 0.25, 0.15])
  kept = lambda top_p: set(
    np.nonzero(frequencies(np.log(p), temperature=1.0, top_p=top_p))[0]
  )
  assert kept(0.4) == {1}
  assert kept(0.6) == {1, 2}
  assert kept(0.8) == {1, 2, 3}
  assert kept(1.0) == {0, 1, 2, 3}
  got = frequencies(np.log(p), temperature=1.0, top_p=0.6)
  np.testing.assert_allclose(got, [0, 2 / 3, 1 / 3, 0], atol=0.03)


def test_temperature_zero_takes_the_first_largest_logit():
  logits = jnp.array([[0.0, 3.0, 3.0], [1e9, -1e9, 0.0]])
  got = sampling.choose(logits, jax.random.key(0), sampling.Drawing(0.0))
  np.testing.assert_array_equal(got, [1, 0])


# Refusals


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'max_tokens': 0}, 'max_tokens=0'),
    ({'temperature': -1.0}, 'temperature=-1.0'),
    ({'top_p': 0.0}, 'top_p=0.0 is outside'),
    ({'valid': np.ones((2, 3), bool)}, 'valid has shape'),
    ({'ids': np.zeros((2, 0), np.int32)}, 'at least one token'),
    ({'ids': np.zeros(4, np.int32)}, r'give \[batch, time\]'),
  ],
)
def test_refusals(changes, message):
  changes = {'ids': prompts()} | changes
  with pytest.raises(ValueError, match=message):
    generate(changes.pop('ids'), **changes)


@pytest.mark.parametrize(
  ('settings', 'message'),
  [({'length': 8}, 'does not fit'), ({'length': 16, 'piece': 5}, 'piece=5')],
)
def test_prefill_refusals(settings, message):
  with pytest.raises(ValueError, match=message):
    sampling.prefill(MODEL, *weights(), prompts(), **settings)


# The model prepared for generation


@pytest.mark.slow
def test_a_served_model_gives_the_same_bits():
  config = small_config(
    dtype='bfloat16', layers=4, mla_layers=(4,), residual_block=2
  )
  params, state = random_weights(dataclasses.replace(config, dtype='float32'))
  model, laid_out = sampling.served(Model(config), params)
  assert not model.config.scans_layers
  assert laid_out['blocks_0']['layer_1']['kda']['query'].dtype == jnp.bfloat16
  assert laid_out['blocks_0']['layer_1']['moe']['router'].dtype == jnp.float32
  ids = prompts(4)
  run = lambda model, params: jax.jit(
    model.apply, compiler_options=FAST_COMPILE
  )({'params': params}, ids, state)
  np.testing.assert_array_equal(
    run(model, laid_out), run(Model(config), params)
  )
