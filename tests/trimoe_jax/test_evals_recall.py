"""Needle recall: the answer is where the mask says, and only there."""

import numpy as np
import pytest
from test_data_tokenizer import write_tokenizer

from trimoe_jax.data.packing import Documents
from trimoe_jax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from trimoe_jax.evals.recall import DEPTHS, needle_batch, score_recall

SENTENCE = '# the secret number of '


def make_documents(tokenizer, lengths):
  rng = np.random.default_rng(0)
  letters = np.frombuffer(b'abc def\nxyz ', np.uint8)
  documents = [
    np.concatenate(
      [
        [tokenizer.bos_id],
        tokenizer.encode(rng.choice(letters, length).tobytes().decode()),
        [tokenizer.eos_id],
      ]
    )
    for length in lengths
  ]
  return Documents([str(n) for n in range(len(lengths))], documents)


@pytest.fixture(scope='module')
def documents():
  return make_documents(ByteTokenizer(), [40, 300, 2000, 700])


@pytest.mark.parametrize('context', [128, 1024, 4096, 16384])
def test_answers_are_at_the_masked_positions(documents, context):
  tokenizer = ByteTokenizer()
  batch = needle_batch(tokenizer, documents, context, count=10, seed=1)
  for name in ('tokens', 'targets', 'segment_ids', 'answer_mask'):
    assert batch[name].shape == (10, context)
  np.testing.assert_array_equal(
    batch['tokens'][:, 1:], batch['targets'][:, :-1]
  )
  assert (batch['segment_ids'] == 1).all()
  for row, targets in enumerate(batch['targets']):
    answer = tokenizer.decode(targets[batch['answer_mask'][row]])
    text = tokenizer.decode(targets)
    _, needle, question = text.split(SENTENCE)
    assert len(answer) == 4 and answer.isdigit()
    assert question.endswith(f' is {answer}')
    assert needle.startswith(question + '\n')
    assert len(text) == context  # no special token inside the text
    at, end = text.index('\n' + SENTENCE), text.rindex('\n' + SENTENCE)
    room = context - 2 * (context - end) - 1  # the needle also ends its line
    assert at == round(batch['depths'][row] * room)


def test_depths_go_round(documents):
  batch = needle_batch(ByteTokenizer(), documents, 256, count=12, seed=0)
  np.testing.assert_array_equal(batch['depths'][:5], DEPTHS)
  np.testing.assert_array_equal(batch['depths'][10:], DEPTHS[:2])


def test_seed_decides(documents):
  def tokens(seed):
    return needle_batch(ByteTokenizer(), documents, 256, count=4, seed=seed)[
      'tokens'
    ]

  np.testing.assert_array_equal(tokens(5), tokens(5))
  assert (tokens(5) != tokens(6)).any()


def test_scores(documents):
  batch = needle_batch(ByteTokenizer(), documents, 256, count=10, seed=0)
  perfect = score_recall(batch['targets'], batch)
  assert perfect.token_accuracy == perfect.exact_match == 1.0
  assert perfect.by_depth == dict.fromkeys(DEPTHS, 1.0)
  assert perfect.token_chance == 0.1 and perfect.exact_chance == 1e-4
  assert perfect.rows == 10
  wrong = batch['targets'].copy()
  wrong[~batch['answer_mask']] = 0  # predictions elsewhere do not count
  wrong[0, -1] = 0  # one digit, at depth 0, which has two rows
  score = score_recall(wrong, batch)
  assert score.token_accuracy == 39 / 40
  assert score.exact_match == 0.9
  assert score.by_depth[0.0] == 7 / 8 and score.by_depth[1.0] == 1.0
  with pytest.raises(ValueError, match='shape'):
    score_recall(batch['targets'][:, :-1], batch)


def test_guessing_digits_scores_as_stated(documents):
  batch = needle_batch(ByteTokenizer(), documents, 128, count=1000, seed=0)
  rng = np.random.default_rng(0)
  guess = rng.integers(ord('0'), ord('9') + 1, batch['targets'].shape)
  score = score_recall(guess, batch)
  # Four standard deviations of 4000 guesses.
  assert abs(score.token_accuracy - score.token_chance) < 0.02
  assert score.exact_match < 0.005


def test_subword_tokenizer_answers_with_the_digits(tmp_path):
  tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path))
  documents = make_documents(tokenizer, [500])
  batch = needle_batch(tokenizer, documents, 256, count=5, seed=0)
  for row, targets in enumerate(batch['targets']):
    answer = targets[batch['answer_mask'][row]]
    assert tokenizer.decode(answer).strip().isdigit()
    needle, question = tokenizer.decode(targets).split(SENTENCE)[1:]
    assert needle.startswith(question + '\n')
  np.testing.assert_array_equal(
    batch['tokens'][:, 1:], batch['targets'][:, :-1]
  )


def test_too_short_a_context_is_refused(documents):
  with pytest.raises(ValueError, match='context=64 has no room.*at least'):
    needle_batch(ByteTokenizer(), documents, 64, count=1, seed=0)
  with pytest.raises(ValueError, match='0 documents'):
    needle_batch(ByteTokenizer(), [], 128, count=1, seed=0)
