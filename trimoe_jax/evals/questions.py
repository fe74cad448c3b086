"""Answers about held-out pictures: how often, and against which guess.

A document reads `question? answer. question? answer.`, its image before
the first answer. Every character of an answer and the full stop are predicted
from the true ones before them; where all are right, greedy generation gives the
same answer.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from trimoe_jax.data.packing import Batch
from trimoe_jax.data.tokenizer import Tokenizer


class Answer(NamedTuple):
  """One question, its answer and what the model said.

  Attributes:
    question: without the question mark.
    want, got: the answer and the predicted characters in its place.
    right: whether every character and the full stop are predicted.
    image: (row of the batch, number in it) of the picture it is about.
  """

  question: str
  want: str
  got: str
  right: bool
  image: tuple[int, int]


def answers(
  batch: Batch, predicted_bt: np.ndarray, tokenizer: Tokenizer
) -> Iterator[Answer]:
  """The questions of a batch of held-out rows, in order.

  Args:
    batch: rows with images; documents with one image each.
    predicted_bt: most likely next tokens at every position.
    tokenizer: of bytes, or another that keeps `?`, the space and `.` apart.
  """
  for b, targets in enumerate(batch['targets']):
    number = 0
    for segment in range(1, int(batch['segment_ids'][b].max()) + 1):
      at = np.flatnonzero(batch['segment_ids'][b] == segment)
      is_image = batch['tokens'][b, at] == tokenizer.media_id
      if not is_image.any():
        continue
      at = at[targets[at] != tokenizer.media_id]
      yield from _answers(
        targets[at], predicted_bt[b, at], (b, number), tokenizer
      )
      number += 1


def _answers(want_t, got_t, image, tokenizer) -> Iterator[Answer]:
  """The questions of one document, from its text's tokens."""
  mark, space, stop = (tokenizer.encode(c)[0] for c in '? .')
  start = 0
  for end in np.flatnonzero(want_t == stop):
    sentence = want_t[start:end]
    marks = np.flatnonzero(sentence == mark)
    if len(marks) and sentence[marks[0] + 1 : marks[0] + 2] == space:
      first = start + marks[0] + 2
      span = slice(first, end + 1)
      yield Answer(
        question=tokenizer.decode(sentence[: marks[0]]).strip(),
        want=tokenizer.decode(want_t[first:end]),
        got=tokenizer.decode(got_t[first:end]),
        right=bool((want_t[span] == got_t[span]).all()),
        image=image,
      )
    start = end + 1


def examples(
  found: Sequence[Sequence[Answer]], count: int
) -> list[dict[str, Any]]:
  """`count` pictures of batches of answers, evenly spaced, to show.

  Args:
    found: the answers of each batch.
    count: pictures.

  Returns:
    {'place': (batch, row, number), 'answers': [[question, want, got, right]]}.
  """
  grouped: dict[tuple, list] = {}
  for number, own in enumerate(found):
    for answer in own:
      fields = [answer.question, answer.want, answer.got, answer.right]
      grouped.setdefault((number, *answer.image), []).append(fields)
  pairs = list(grouped.items())
  picked = np.linspace(0, len(pairs) - 1, min(count, len(pairs))).astype(int)
  return [{'place': pairs[i][0], 'answers': pairs[i][1]} for i in picked]


def row_images(batch: Batch, row: int) -> Iterator[np.ndarray]:
  """The images of one row, first frames, [H, W, 3] uint8."""
  start = 0
  for frames, rows, columns in batch['grids'][row].tolist():
    count = rows * columns
    patches = batch['patches'][row, start : start + count]
    if not count:
      return
    size = patches.shape[-1]
    tiles = patches.reshape(rows, columns, 3, size, size)
    yield tiles.transpose(0, 3, 1, 4, 2).reshape(rows * size, columns * size, 3)
    start += frames * count


def score(found: Sequence[Answer]) -> dict[str, dict[str, Any]]:
  """By question: the share of right answers and of right characters.

  Answers in digits and in words are counted apart. `chance` is the share that
  the most frequent answer would get.
  """
  by_question = collections.defaultdict(list)
  for answer in found:
    kind = 'a word' if answer.want.isalpha() else 'digits'
    by_question[f'{answer.question}? In {kind}'].append(answer)
  result = {}
  for question, own in by_question.items():
    pairs = [p for x in own for p in zip(x.want, x.got.ljust(len(x.want)))]
    frequent = collections.Counter(x.want for x in own).most_common(1)[0][1]
    result[question] = {
      'count': len(own),
      'right': sum(x.right for x in own) / len(own),
      'characters': sum(a == b for a, b in pairs) / len(pairs),
      'chance': frequent / len(own),
    }
  return result
