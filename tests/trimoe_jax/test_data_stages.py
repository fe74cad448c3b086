"""Stages: the batch is a function of the step, and of nothing else."""

import numpy as np
import pytest

from trimoe_jax.data import DataConfig, StageConfig, StagedBatches, load_corpus
from trimoe_jax.data.corpus import Corpus, shuffled_rows
from trimoe_jax.data.packing import Documents
from trimoe_jax.data.tokenizer import ByteTokenizer


@pytest.fixture(scope='module')
def corpus():
  rng = np.random.default_rng(0)
  first, documents = 300, []
  for length in rng.integers(5, 300, 80):
    documents.append(np.arange(first, first + length, dtype=np.int32))
    first += length
  documents = Documents([f'{n}.txt' for n in range(80)], documents)
  return Corpus(ByteTokenizer(), documents, documents)


STAGES = (
  StageConfig(context=32, batch=8, tokens=2000),
  StageConfig(context=128, batch=4, steps=70),
  StageConfig(context=256, batch=2, steps=5, long_repeats=3),
)


def assert_same(one, other):
  assert one.keys() == other.keys()
  for name in one:
    np.testing.assert_array_equal(one[name], other[name])


def test_order_of_asking_changes_nothing(corpus):
  forward = StagedBatches(corpus, STAGES, seed=3)
  batches = [forward.batch_at(step) for step in range(forward.total_steps)]
  backward = StagedBatches(corpus, STAGES, seed=3)
  for step in reversed(range(backward.total_steps)):
    assert_same(backward.batch_at(step), batches[step])
  assert_same(StagedBatches(corpus, STAGES, seed=3).batch_at(5), batches[5])


def test_batches_differ_by_step_seed_and_stage(corpus):
  same_twice = (StageConfig(64, 4, steps=9), StageConfig(64, 4, steps=9))
  data = StagedBatches(corpus, same_twice, seed=0)
  tokens = [data.batch_at(step)['tokens'] for step in range(18)]
  tokens.append(StagedBatches(corpus, same_twice, seed=1).batch_at(0)['tokens'])
  assert len({t.tobytes() for t in tokens}) == len(tokens)


def test_a_batch_does_not_depend_on_later_stages(corpus):
  short = StagedBatches(corpus, STAGES[:1])
  whole = StagedBatches(corpus, STAGES)
  for step in range(short.total_steps):
    assert_same(short.batch_at(step), whole.batch_at(step))


@pytest.mark.parametrize('process_count', [2, 4])
def test_hosts_share_the_same_global_batch(corpus, process_count):
  data = StagedBatches(corpus, STAGES)
  for step in (0, 7, 8, 40):
    whole = data.batch_at(step)
    parts = [
      data.batch_at(step, process_index, process_count)
      for process_index in range(process_count)
    ]
    joined = {
      name: np.concatenate([part[name] for part in parts]) for name in whole
    }
    assert_same(joined, whole)


def test_an_epoch_uses_every_token_once(corpus):
  stage = StageConfig(context=64, batch=9, steps=1000)
  data = StagedBatches(corpus, [stage])
  rows = data.plans[0].rows
  assert rows % 9  # so that some batch spans two epochs
  steps = range(-(-2 * rows // 9))
  batches = [data.batch_at(step) for step in steps]
  joined = {
    name: np.concatenate([batch[name] for batch in batches])
    for name in ('targets', 'loss_mask')
  }
  starts = set(corpus.train.offsets[:-1] + 300)
  expected = set(corpus.train.tokens) - starts
  epochs = []
  for epoch in range(2):
    part = slice(epoch * rows, (epoch + 1) * rows)
    seen = joined['targets'][part][joined['loss_mask'][part]]
    assert len(seen) == len(expected)
    assert set(seen) == expected
    epochs.append(seen.tobytes())
  assert epochs[0] != epochs[1]


def test_locating_steps_and_counting_tokens(corpus):
  data = StagedBatches(corpus, STAGES)
  assert STAGES[0].num_steps == 8  # 2000 tokens at 256 a step, rounded up
  assert data.first_steps == (0, 8, 78, 83)
  assert data.locate(0) == (0, 0)
  assert data.locate(7) == (0, 7)
  assert data.locate(8) == (1, 0)
  assert data.locate(82) == (2, 4)
  assert data.batch_at(7)['tokens'].shape == (8, 32)
  assert data.batch_at(8)['tokens'].shape == (4, 128)
  assert data.tokens_before(0) == 0
  assert data.tokens_before(9) == 8 * 256 + 512
  assert data.tokens_before(83) == 8 * 256 + 70 * 512 + 5 * 512
  for step in (-1, 83):
    with pytest.raises(ValueError, match=f'step={step} is outside'):
      data.batch_at(step)


def test_mistakes(corpus):
  with pytest.raises(ValueError, match='stages is empty'):
    StagedBatches(corpus, [])
  with pytest.raises(ValueError, match='than stage 1, whose context is 32'):
    StagedBatches(corpus, STAGES, long_documents='refuse')
  wide = [StageConfig(context=300, batch=1, steps=1)]
  StagedBatches(corpus, wide, long_documents='refuse')
  data = StagedBatches(corpus, STAGES)
  with pytest.raises(ValueError, match='stage 1 has batch=8.*process_count=3'):
    data.batch_at(0, 0, 3)
  with pytest.raises(ValueError, match='process_index=2'):
    data.batch_at(0, 2, 2)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    (dict(context=0, batch=1, steps=1), 'stage.context=0'),
    (dict(context=1, batch=0, steps=1), 'stage.batch=0'),
    (dict(context=1, batch=1), 'give exactly one'),
    (dict(context=1, batch=1, steps=1, tokens=1), 'give exactly one'),
    (dict(context=1, batch=1, steps=0), 'stage.steps=0'),
    (dict(context=1, batch=1, tokens=-5), 'stage.tokens=-5'),
    (dict(context=1, batch=1, steps=1, long_repeats=0), 'stage.long_repeats=0'),
  ],
)
def test_stage_mistakes(fields, message):
  with pytest.raises(ValueError, match=message):
    StageConfig(**fields)


def test_shuffle_is_a_permutation_that_stays_the_same():
  order = shuffled_rows((0, 1, 2), 1000)
  np.testing.assert_array_equal(np.sort(order), np.arange(1000))
  # Written down once: resumed runs depend on it.
  expected = [3, 4, 7, 6, 1, 5, 2, 0]
  np.testing.assert_array_equal(shuffled_rows((0, 1, 2), 8), expected)


def test_standard_library_through_four_contexts():
  corpus = load_corpus(DataConfig())
  data = StagedBatches(
    corpus,
    [
      StageConfig(context=context, batch=16384 // context, steps=2)
      for context in (128, 1024, 4096, 16384)
    ],
  )
  for step in range(data.total_steps):
    batch = data.batch_at(step)
    assert batch['tokens'].max() < corpus.tokenizer.vocab_size
    assert batch['loss_mask'].mean() > 0.5
  assert all(plan.padding < 0.01 for plan in data.plans)
  assert 'def ' in corpus.tokenizer.decode(data.batch_at(6)['tokens'][0])
