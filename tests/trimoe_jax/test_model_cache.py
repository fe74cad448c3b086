"""Prefill and decoding with the cache agree with the logits of one pass."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import (
  FAST_COMPILE,
  VOCABULARY,
  random_tokens,
  random_weights,
  small_config,
)

from pallas_kernels.testing import relative_rms
from trimoe_jax.interop import hf
from trimoe_jax.model.model import Model, init_cache

FOLDER = pathlib.Path(__file__).parents[1] / 'golden' / 'tiny_checkpoint'
CONFIG = small_config()
MODEL = Model(CONFIG)
BATCH, TIME, ROOM = 2, 21, 40
PADDING = VOCABULARY - 1  # not among the tokens


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


@functools.cache
def weights():
  return random_weights(CONFIG)


@functools.cache
def one_pass():
  """Logits of the tokens without a cache."""
  params, state = weights()
  run = jax.jit(MODEL.apply, compiler_options=FAST_COMPILE)
  ones = np.ones((BATCH, TIME), np.int32)
  return run({'params': params}, tokens(), state, segment_ids=ones)


def tokens():
  return random_tokens((BATCH, TIME)) % PADDING


@functools.partial(
  jax.jit, static_argnames='fresh', compiler_options=FAST_COMPILE
)
def extend(params, state, ids, cache, valid, *, fresh):
  return MODEL.apply(
    {'params': params}, ids, cache, state, valid, fresh=fresh, method='extend'
  )


def run_pieces(ids, lengths, valid=None, params=None):
  """Logits of the tokens read in pieces of the given lengths."""
  own, state = weights()
  params = own if params is None else params
  valid = np.ones(ids.shape, bool) if valid is None else valid
  cache, out, at = init_cache(CONFIG, len(ids), ROOM), [], 0
  for length in lengths:
    piece = slice(at, at + length)
    fresh = at == 0 and length > 1
    logits, cache = extend(
      params, state, ids[:, piece], cache, valid[:, piece], fresh=fresh
    )
    out.append(logits)
    at += length
  assert int(cache.length) == at
  return np.concatenate(out, 1)


@pytest.mark.parametrize(
  'lengths',
  [[9] + [1] * 12, [9, 9, 1, 1, 1], [1] * TIME],
  ids=['prompt then tokens', 'prompt in pieces', 'tokens only'],
)
def test_any_split_gives_the_logits_of_one_pass(lengths):
  got = run_pieces(tokens(), lengths)
  np.testing.assert_allclose(got, one_pass(), rtol=1e-9, atol=1e-9)


def padded_left(left):
  """Prompts of TIME tokens whose row b has `left[b]` padding tokens first."""
  width = TIME + max(left)
  ids = np.full((BATCH, width), PADDING)
  valid = np.zeros((BATCH, width), bool)
  for row, count in enumerate(left):
    ids[row, count : count + TIME] = tokens()[row]
    valid[row, count : count + TIME] = True
  return ids, valid


@pytest.mark.parametrize('left', [(8, 8), (3, 8), (8, 6)])
def test_left_padding_changes_nothing(left):
  ids, valid = padded_left(left)
  got = run_pieces(ids, [9] + [1] * 12 + [1] * max(left), valid)
  for row, count in enumerate(left):
    np.testing.assert_allclose(
      got[row, count : count + TIME], one_pass()[row], rtol=1e-9, atol=1e-9
    )


def test_padding_that_ends_a_piece_changes_nothing():
  ids, valid = padded_left((9, 18))
  got = run_pieces(ids, [9, 9, 9, 9] + [1] * 3, valid)
  for row, count in enumerate((9, 18)):
    np.testing.assert_allclose(
      got[row, count : count + TIME], one_pass()[row], rtol=1e-9, atol=1e-9
    )


def test_poisoned_padding_changes_no_bit():
  params, _ = weights()
  ids, valid = padded_left((3, 8))
  nothing = params['embedding'].at[PADDING].set(jnp.nan)
  lengths = [9] + [1] * 20
  clean = run_pieces(ids, lengths, valid)
  got = run_pieces(ids, lengths, valid, params | {'embedding': nothing})
  np.testing.assert_array_equal(got[valid], clean[valid])


def test_rows_do_not_depend_on_each_other():
  other = tokens()
  other[1] = other[1][::-1]
  lengths = [9] + [1] * 12
  np.testing.assert_array_equal(
    run_pieces(other, lengths)[0], run_pieces(tokens(), lengths)[0]
  )


def test_the_golden_checkpoint_decodes_to_its_logits():
  golden = np.load(FOLDER / 'golden.npz')
  with jax.enable_x64(False):
    loaded = hf.load(FOLDER)
    config = dataclasses.replace(loaded.config, dtype='float32')
    params = jax.tree.map(jnp.asarray, loaded.params)
    model = Model(config)
    ids = golden['input_ids']

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def run(params, state):
      step = functools.partial(model.apply, {'params': params}, method='extend')
      logits, cache = step(
        ids[:, :24], init_cache(config, *ids.shape), state, fresh=True
      )

      def decode(cache, token_b):
        logits, cache = step(token_b[:, None], cache, state)
        return cache, logits[:, 0]

      _, rest = jax.lax.scan(decode, cache, ids[:, 24:].T)
      return jnp.concatenate([logits, rest.swapaxes(0, 1)], 1)

    got = run(params, loaded.router)
  assert relative_rms(got, golden['logits']) < 1e-3
