"""States of generation: continued, forked, saved, grown, read into."""

import dataclasses
import functools
import re

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

from trimoe_jax import sampling
from trimoe_jax.model import layout
from trimoe_jax.model.model import Model
from trimoe_jax.sampling import sample

# As `sampling.served` has it, so that `generate` runs the same programs.
CONFIG = layout.Unrolled.of(small_config(dtype='float32'))
MODEL = Model(CONFIG)
BATCH, EVERY = 2, 4  # one compiled loop for all tests
WARM = sampling.Drawing(temperature=0.9)
GREEDY = sampling.Drawing(temperature=0.0)


@pytest.fixture(autouse=True, scope='module')
def quick_compilation():
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', False)


@functools.cache
def weights():
  return random_weights(CONFIG)


def start(ids=None, **changes):
  ids = random_tokens((BATCH, 11)) if ids is None else ids
  settings = {'key': jax.random.key(0), 'max_tokens': 32}
  return sampling.start(MODEL, weights(), ids, **(settings | changes))


def proceed(state, count, drawing=WARM, **changes):
  """(tokens, the state after them); uses the state up."""
  steps = sampling.proceed(
    MODEL, weights(), state, drawing, max_tokens=count, every=EVERY, **changes
  )
  pieces, states = zip(
    *[(np.asarray(tokens), after) for tokens, after in steps]
  )
  return np.concatenate(pieces, 1), states[-1]


def assert_same_bits(a, b):
  plain = lambda s: s.replace(keys=jax.random.key_data(s.keys))
  jax.tree.map(np.testing.assert_array_equal, plain(a), plain(b))


def one_pass(rows):
  """Logits [B, a] of the token after each row, without a cache."""
  params, state = weights()
  ids, real = np.zeros((2, BATCH, 24), np.int32)
  for b, row in enumerate(rows):
    ids[b, : len(row)], real[b, : len(row)] = row, 1
  logits = one_pass_program()({'params': params}, ids, state, segment_ids=real)
  return logits[np.arange(BATCH), real.sum(1) - 1]


@functools.cache
def one_pass_program():
  return jax.jit(MODEL.apply, compiler_options=FAST_COMPILE)


def test_one_call_and_several_go_the_same_way_bit_by_bit():
  whole, end = proceed(start(), 8)
  state, pieces = start(), []
  for count in (3, 1, 4):
    tokens, state = proceed(state, count)
    pieces.append(tokens)
  np.testing.assert_array_equal(np.concatenate(pieces, 1), whole)
  assert_same_bits(state, end)


def test_a_fork_shares_nothing():
  first = start()
  fork = sampling.fork(first)
  buffers = lambda cache: {
    x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)
  }
  assert not buffers(first.cache) & buffers(fork.cache)
  kept = sampling.fork(fork)
  want, end = proceed(first, 6)  # donates the first state
  assert first.cache.valid.is_deleted()
  assert_same_bits(fork, kept)
  got, other_end = proceed(fork, 6)
  np.testing.assert_array_equal(got, want)
  assert_same_bits(other_end, end)


def test_copies_of_a_row_draw_alike_until_they_get_keys():
  state = start()
  twins = sampling.fork(state, [1, 1])
  same, _ = proceed(twins, 8)
  np.testing.assert_array_equal(same[0], same[1])
  other = sampling.fork(state, [1, 1], key=jax.random.key(7))
  different, _ = proceed(other, 8)
  assert (different[0] != different[1]).any()
  alone, _ = proceed(state, 8)
  np.testing.assert_array_equal(alone[1], same[0])


def test_a_saved_state_resumes_bitwise(tmp_path):
  _, state = proceed(start(), 5)
  sampling.save(tmp_path / 'state', state, CONFIG)
  assert [p.name for p in tmp_path.iterdir()] == ['state']
  loaded = sampling.load(tmp_path / 'state', CONFIG)
  assert_same_bits(loaded, state)
  want, end = proceed(state, 6)
  got, resumed_end = proceed(loaded, 6)
  np.testing.assert_array_equal(got, want)
  assert_same_bits(resumed_end, end)


@pytest.mark.slow
def test_a_cache_grows_when_it_is_full(monkeypatch):
  roomy = start(max_tokens=64)
  assert roomy.cache.room == 128
  monkeypatch.setattr(sample, 'AT_ONCE', 48)
  tight = start(max_tokens=64)
  assert tight.cache.room == 64
  want, _ = proceed(roomy, 64, GREEDY)
  got, end = proceed(tight, 64, GREEDY)
  assert end.cache.room == 128
  np.testing.assert_array_equal(got, want)


def test_reading_on_equals_one_prompt():
  ids, more = random_tokens((BATCH, 11)), random_tokens((BATCH, 4), seed=9)
  state = sampling.read(MODEL, weights(), start(ids), more)
  want = one_pass(np.concatenate([ids, more], 1))
  np.testing.assert_allclose(state.logits, want, rtol=1e-3, atol=1e-4)


def test_a_stopped_row_waits_and_goes_on():
  free, _ = proceed(start(), 8, GREEDY)
  stop = int(free[0, 2])
  ends = [list(row).index(stop) + 1 if stop in row else 8 for row in free]
  made, state = proceed(start(), 8, GREEDY, stop=stop)
  assert bool(state.stopped[0])
  more = random_tokens((BATCH, 3), seed=9)
  state = sampling.read(MODEL, weights(), state, more)
  assert not bool(state.stopped.any())
  parts = zip(random_tokens((BATCH, 11)), made, ends, more)
  seen = [np.concatenate([p, new[:end], m]) for p, new, end, m in parts]
  np.testing.assert_allclose(state.logits, one_pass(seen), rtol=1e-3, atol=1e-4)


def test_a_row_that_reads_nothing_stays_as_it_was():
  state = start()
  before = np.asarray(state.logits)
  valid = np.array([[True] * 3, [False] * 3])
  more = random_tokens((BATCH, 3), seed=9)
  state = sampling.read(MODEL, weights(), state, more, valid=valid)
  np.testing.assert_array_equal(state.logits[1], before[1])
  assert (np.asarray(state.logits[0]) != before[0]).any()


@pytest.mark.parametrize('side', ['left', 'right'])
def test_poisoned_padding_changes_no_token(side):
  params, router = weights()
  padding = VOCABULARY - 1
  ids = random_tokens((BATCH, 11)) % padding
  valid = np.ones(ids.shape, bool)
  valid[1, :5] = False
  if side == 'right':
    valid = valid[:, ::-1]
  ids[~valid] = padding
  poisoned = params | {
    'embedding': params['embedding'].at[padding].set(jnp.nan)
  }
  # A padding token that is drawn would be real; its logit is kept away.
  head = params['head'].at[:, padding].set(0)
  run = lambda p: sampling.generate(
    MODEL,
    p | {'head': head},
    router,
    ids,
    valid=valid,
    max_tokens=8,
    temperature=0.0,
    key=jax.random.key(0),
    every=EVERY,
  )
  want = np.asarray(run(params))
  assert (want != padding).all(), 'choose another seed'
  np.testing.assert_array_equal(run(poisoned), want)


def test_a_stream_brings_the_tokens_of_generate():
  ids = random_tokens((BATCH, 11))
  settings = {
    'max_tokens': 10,
    'temperature': 0.9,
    'key': jax.random.key(3),
    'every': EVERY,
  }
  pieces = list(sampling.stream(MODEL, *weights(), ids, **settings))
  assert [p.shape for p in pieces] == [(2, 4), (2, 4), (2, 2)]
  whole = sampling.generate(MODEL, *weights(), ids, **settings)
  np.testing.assert_array_equal(np.concatenate(pieces, 1), whole)


def test_a_row_draws_the_same_alone():
  ids = random_tokens((BATCH, 11))
  together, _ = proceed(start(ids), 6)
  twice, _ = proceed(start(ids[[0, 0]]), 6)
  np.testing.assert_array_equal(together[0], twice[0])


def test_a_step_copies_no_cache():
  state = start()
  room = 2**16
  state = state.replace(cache=state.cache.grown(room))
  program = sampling.advance.lower(
    MODEL, weights(), state, GREEDY, np.zeros(4, np.int32), count=1, most=1
  ).compile(compiler_options=FAST_COMPILE)
  latents = rf'f32\[{BATCH},{room},\d+\]'
  assert re.search(latents, program.as_text()), 'the test looks for latents'
  assert not re.search(latents + r'\S* copy\(', program.as_text())
  held = sum(x.nbytes for x in jax.tree.leaves(state.cache))
  assert program.memory_analysis().alias_size_in_bytes >= held


# Refusals


def test_a_snapshot_of_another_model_is_refused(tmp_path):
  sampling.save(tmp_path / 'state', start(), CONFIG)
  other = dataclasses.replace(CONFIG, width=48)
  with pytest.raises(ValueError, match=r"another model: \['width'\]"):
    sampling.load(tmp_path / 'state', other)


def test_files_that_are_no_snapshot_are_refused(tmp_path):
  with pytest.raises(FileNotFoundError, match='does not exist'):
    sampling.load(tmp_path / 'nothing', CONFIG)
  (tmp_path / 'junk').write_bytes(b'junk')
  with pytest.raises(ValueError, match='cannot be read'):
    sampling.load(tmp_path / 'junk', CONFIG)


@pytest.mark.parametrize('rows', [[], [2], [-1]])
def test_rows_out_of_range_are_refused(rows):
  with pytest.raises(ValueError, match='rows'):
    sampling.fork(start(), rows)
