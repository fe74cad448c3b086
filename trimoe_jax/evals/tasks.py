"""Synthetic tasks that separate token mixers: MQAR, palindrome and stack.

Kimi Linear (arXiv 2510.26692, section 5.1) compares mixers on these: each
needs an exact memory of what was read, which a decaying state without a delta
rule loses first. Ids are their own small vocabulary; `targets` is the next
token at every position, and `mask` is true where it follows from the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class TaskBatch(NamedTuple):
  """tokens, targets int32 [B, T]; mask bool [B, T]: the graded positions."""

  tokens: np.ndarray
  targets: np.ndarray
  mask: np.ndarray


def mqar(
  rng: np.random.Generator,
  batch: int,
  length: int,
  *,
  vocab_size: int = 512,
  overwrites: int = 0,
) -> TaskBatch:
  """Multi-query associative recall: pairs first, then every key again.

  `key value key value ... | key value key value ...`: at each key of the second
  part its value is graded. Keys are ids 1 to vocab_size // 2 - 1, values the
  upper half, 0 is padding. As many pairs as fit into half of `length`.

  Args:
    rng: advanced by this call.
    batch: rows.
    length: tokens in a row.
    vocab_size: of keys, values and padding together.
    overwrites: the first keys that are bound a second time, to another random
      value; the later binding counts. They shorten the list of distinct keys.

  Raises:
    ValueError: more distinct keys than the vocabulary has, or no room.
  """
  # One id beyond the row gives the last position a target.
  slots = (length + 1) // 2  # pairs of both parts
  keys = (slots - overwrites) // 2
  low, high = 1, vocab_size // 2
  if keys < 1 or overwrites > keys or keys > high - low:
    raise ValueError(
      f'mqar: length={length} with overwrites={overwrites} makes {keys} keys; '
      f'choose from 1 to {high - low} for vocab_size={vocab_size}, and at most '
      'as many overwrites as keys.'
    )
  key_ids = _permutations(rng, batch, high - low)[:, :keys] + low
  values = rng.integers(high, vocab_size, (batch, keys))
  rewritten = rng.integers(high, vocab_size, (batch, overwrites))
  final = np.concatenate([rewritten, values[:, overwrites:]], axis=1)
  query = _permutations(rng, batch, keys)
  key_list = [key_ids, key_ids[:, :overwrites]]
  key_list.append(np.take_along_axis(key_ids, query, 1))
  value_list = [values, rewritten, np.take_along_axis(final, query, 1)]
  pairs = np.stack(
    [np.concatenate(key_list, 1), np.concatenate(value_list, 1)], axis=-1
  )
  sequence = pairs.reshape(batch, -1)
  graded = np.arange(sequence.shape[1]) >= 2 * (keys + overwrites)
  graded &= np.arange(sequence.shape[1]) % 2 == 1
  return _shift(sequence, np.broadcast_to(graded, sequence.shape), length)


def palindrome(
  rng: np.random.Generator, batch: int, length: int, *, vocab_size: int = 32
) -> TaskBatch:
  """Random symbols, a separator, and the same symbols backwards.

  Symbols are ids 2 to vocab_size - 1, the separator is 1, padding 0. Every
  symbol after the separator is graded.

  Raises:
    ValueError: `length` below 2 or fewer than two symbols.
  """
  if length < 2 or vocab_size < 4:
    raise ValueError(
      f'palindrome: length={length} and vocab_size={vocab_size}; use at least '
      '2 tokens and 4 ids (padding, separator, two symbols).'
    )
  half = length // 2
  symbols = rng.integers(2, vocab_size, (batch, half))
  separator = np.ones((batch, 1), np.int64)
  sequence = np.concatenate([symbols, separator, symbols[:, ::-1]], axis=1)
  graded = np.arange(sequence.shape[1]) > half
  return _shift(sequence, np.broadcast_to(graded, sequence.shape), length)


def stack(
  rng: np.random.Generator,
  batch: int,
  length: int,
  *,
  stacks: int = 8,
  vocab_size: int = 32,
) -> TaskBatch:
  """Interleaved pushes and pops on several last-in-first-out stacks.

  Each operation is three tokens: `push stack element`, or `pop stack element`
  with the element that comes off, which is graded. Padding is 0, push 1, pop
  2, the stacks follow, and the other ids are elements. An empty stack is pushed
  to; any other is popped half of the time.

  Raises:
    ValueError: no room for one operation, or fewer than two elements.
  """
  first_element = 3 + stacks
  elements = vocab_size - first_element
  operations = (length + 1) // 3
  if operations < 1 or stacks < 1 or elements < 2:
    raise ValueError(
      f'stack: length={length}, stacks={stacks} and vocab_size={vocab_size}; '
      'use at least 2 tokens, 1 stack, and 5 more ids than stacks.'
    )
  row = np.arange(batch)
  contents = np.zeros((batch, stacks, operations), np.int64)
  heights = np.zeros((batch, stacks), np.int64)
  sequence = np.zeros((batch, operations, 3), np.int64)
  graded = np.zeros((batch, operations, 3), bool)
  for operation in range(operations):
    chosen = rng.integers(stacks, size=batch)
    height = heights[row, chosen]
    pops = (height > 0) & (rng.random(batch) < 0.5)
    pushed = rng.integers(elements, size=batch)
    top = contents[row, chosen, np.maximum(height - 1, 0)]
    contents[row, chosen, height] = np.where(pops, 0, pushed)
    heights[row, chosen] += np.where(pops, -1, 1)
    sequence[:, operation, 0] = np.where(pops, 2, 1)
    sequence[:, operation, 1] = 3 + chosen
    sequence[:, operation, 2] = first_element + np.where(pops, top, pushed)
    graded[:, operation, 2] = pops
  return _shift(sequence.reshape(batch, -1), graded.reshape(batch, -1), length)


def accuracy(predicted_bt: np.ndarray, batch: TaskBatch) -> float:
  """The share of graded positions where the predicted id is the target.

  nan where nothing is graded.
  """
  right = np.asarray(predicted_bt)[batch.mask] == batch.targets[batch.mask]
  return float(right.mean()) if right.size else float('nan')


def _permutations(
  rng: np.random.Generator, batch: int, size: int
) -> np.ndarray:
  return rng.permuted(np.tile(np.arange(size), (batch, 1)), axis=1)


def _shift(sequence: np.ndarray, graded: np.ndarray, length: int) -> TaskBatch:
  """Inputs and next tokens of `sequence`, padded with 0 to `length`."""
  missing = length + 1 - sequence.shape[1]
  sequence = np.pad(sequence, ((0, 0), (0, max(missing, 0))))
  graded = np.pad(graded, ((0, 0), (0, max(missing, 0))))
  return TaskBatch(
    sequence[:, :length].astype(np.int32),
    sequence[:, 1 : length + 1].astype(np.int32),
    graded[:, 1 : length + 1].copy(),
  )
