"""Needle recall: is one sentence found again across a whole context?

A row is held-out text with the sentence

    # the secret number of <word> is <four digits>

at a known depth, and the same sentence at the end, whose digits the model has
to predict. The digits are drawn uniformly, so a model that does not look back
gets one digit in ten, and all four one time in ten thousand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trimoe_jax.data.tokenizer import Tokenizer

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
ANSWER_DIGITS = 4
WORDS = (
  'amber',
  'basil',
  'cedar',
  'clover',
  'copper',
  'ember',
  'falcon',
  'garnet',
  'harbor',
  'hazel',
  'indigo',
  'jasmine',
  'lantern',
  'maple',
  'marble',
  'meadow',
  'nectar',
  'olive',
  'orchid',
  'pebble',
  'quartz',
  'raven',
  'saffron',
  'silver',
  'spruce',
  'thistle',
  'topaz',
  'tulip',
  'velvet',
  'walnut',
  'willow',
  'zephyr',
)


class Recall(NamedTuple):
  """Scores of predicted answers; chances are those of guessing digits.

  `token_chance` is None where an answer token is not one digit.
  """

  token_accuracy: float
  exact_match: float
  by_depth: dict[float, float]  # depth -> token accuracy
  token_chance: float | None
  exact_chance: float
  rows: int


def needle_batch(
  tokenizer: Tokenizer,
  documents: Sequence[np.ndarray],
  context: int,
  *,
  count: int,
  seed: int,
) -> dict[str, np.ndarray]:
  """Rows of `context` tokens with a needle and a question at the end.

  Depths go round `DEPTHS`: 0 puts the needle at the beginning of the text, 1
  right before the question. A row's text is a stretch of one document where any
  is long enough, else of several, in one segment.

  Args:
    tokenizer: for the needle; it also gives the special ids left out of text.
    documents: held-out documents as ids, such as `Corpus.heldout`.
    context: tokens in a row; 128 is enough for bytes.
    count: rows; a multiple of 5 gives every depth the same share.
    seed: with the other arguments decides everything.

  Returns:
    tokens, targets, segment_ids: int32 [count, context]; answer_mask: bool
    [count, context], true where the target is a token of the answer;
    loss_mask: the same array, so that the batch is also a training batch;
    depths: float64 [count].

  Raises:
    ValueError: the context has no room for needle and question, or there is
      no document.
  """
  with_text = [document for document in documents if len(document) > 2]
  if count < 1 or not with_text:
    raise ValueError(
      f'needle_batch: count={count} rows from {len(with_text)} documents with '
      'text; both must be 1 or more.'
    )
  haystacks = [document for document in with_text if len(document) >= context]
  haystacks = haystacks or with_text
  rng = np.random.default_rng([seed, context])
  sequences = np.empty((count, context + 1), np.int32)
  answer_mask_bt = np.zeros((count, context), bool)
  depths = np.resize(DEPTHS, count)
  for b, depth in enumerate(depths):
    needle, question, answer = _draw_needle(tokenizer, rng)
    room = context - len(needle) - len(question) - len(answer)
    if room < 1:
      raise ValueError(
        f'context={context} has no room for needle, question and answer, '
        f'which take {context - room} tokens with this tokenizer; use at '
        f'least {context - room + 1}.'
      )
    text = _draw_text(tokenizer, haystacks, room, rng)
    at = round(depth * room)
    sequences[b] = np.concatenate(
      [[tokenizer.bos_id], text[:at], needle, text[at:], question, answer]
    )
    answer_mask_bt[b, context - len(answer) :] = True
  return {
    'tokens': sequences[:, :-1].copy(),
    'targets': sequences[:, 1:].copy(),
    'segment_ids': np.ones((count, context), np.int32),
    'answer_mask': answer_mask_bt,
    'loss_mask': answer_mask_bt,
    'depths': depths,
  }


def score_recall(
  predicted_bt: np.ndarray, batch: dict[str, np.ndarray]
) -> Recall:
  """Scores of a model's most likely next tokens on a needle batch.

  Answers are teacher-forced: each token is predicted from the true ones before
  it. `token_accuracy` is the share of answer tokens predicted, `exact_match`
  the share of rows with all of them.

  Args:
    predicted_bt: int [count, context], argmax of the logits at each position.
    batch: from `needle_batch`.

  Raises:
    ValueError: another shape than the batch's.
  """
  predicted_bt = np.asarray(predicted_bt)
  mask_bt = batch['answer_mask']
  if predicted_bt.shape != mask_bt.shape:
    raise ValueError(
      f'predictions have shape {predicted_bt.shape} and the batch '
      f'{mask_bt.shape}; give the predicted id at every position.'
    )
  right_bt = (predicted_bt == batch['targets']) & mask_bt
  depths = batch['depths']
  by_depth = {
    float(depth): float(right_bt[depths == depth].sum())
    / float(mask_bt[depths == depth].sum())
    for depth in np.unique(depths)
  }
  one_digit_each = bool((mask_bt.sum(1) == ANSWER_DIGITS).all())
  return Recall(
    token_accuracy=float(right_bt.sum() / mask_bt.sum()),
    exact_match=float((right_bt.sum(1) == mask_bt.sum(1)).mean()),
    by_depth=by_depth,
    token_chance=0.1 if one_digit_each else None,
    exact_chance=10.0**-ANSWER_DIGITS,
    rows=len(depths),
  )


def _draw_needle(
  tokenizer: Tokenizer, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Ids of a needle, its question and the answer that completes it.

  The answer is what the sentence's ids add to those of its beginning: a
  tokenizer that joins the space to the digits keeps them joined in both places.
  """
  word = WORDS[rng.integers(len(WORDS))]
  number = f'{rng.integers(10**ANSWER_DIGITS):0{ANSWER_DIGITS}d}'
  beginning = f'\n# the secret number of {word} is '
  sentence_ids = tokenizer.encode(beginning + number)
  beginning_ids = tokenizer.encode(beginning)
  shared = min(len(sentence_ids), len(beginning_ids))
  differs = sentence_ids[:shared] != beginning_ids[:shared]
  split = int(np.argmax(differs)) if differs.any() else shared
  needle = np.concatenate([sentence_ids, tokenizer.encode('\n')])
  return needle, sentence_ids[:split], sentence_ids[split:]


def _draw_text(
  tokenizer: Tokenizer,
  documents: Sequence[np.ndarray],
  length: int,
  rng: np.random.Generator,
) -> np.ndarray:
  """`length` ids of real text from a random place, special ids left out."""
  special = [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id]
  if tokenizer.media_id is not None:
    special.append(tokenizer.media_id)
  stretches: list[np.ndarray] = []
  missing = length
  while missing > 0:
    text = documents[rng.integers(len(documents))]
    text = text[~np.isin(text, special)]
    start = rng.integers(max(1, len(text) - missing + 1))
    stretches.append(text[start : start + missing])
    missing -= len(stretches[-1])
  return np.concatenate(stretches)
