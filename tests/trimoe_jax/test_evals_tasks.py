"""Synthetic tasks: a solver that reads the row gets every graded position."""

import numpy as np
import pytest

from trimoe_jax.evals.tasks import accuracy, mqar, palindrome, stack


def rng():
  return np.random.default_rng(0)


@pytest.mark.parametrize('task', [mqar, palindrome, stack])
@pytest.mark.parametrize('length', [63, 64, 256])
def test_shapes_and_next_tokens(task, length):
  batch = task(rng(), 4, length)
  for array in batch:
    assert array.shape == (4, length)
  assert batch.tokens.dtype == batch.targets.dtype == np.int32
  assert batch.mask.dtype == bool and batch.mask.any(axis=1).all()
  np.testing.assert_array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])
  again = task(rng(), 4, length)
  np.testing.assert_array_equal(again.tokens, batch.tokens)


@pytest.mark.parametrize('overwrites', [0, 3])
def test_mqar_values_are_the_last_bound(overwrites):
  batch = mqar(rng(), 8, 64, vocab_size=64, overwrites=overwrites)
  keys = (32 - overwrites) // 2
  for tokens, targets, mask in zip(*batch):
    bound = {}
    for t in range(0, 2 * (keys + overwrites), 2):
      bound[tokens[t]] = targets[t]
    assert len(bound) == keys
    graded = np.flatnonzero(mask)
    assert set(tokens[graded]) == set(bound)
    assert len(graded) == keys
    assert [targets[t] for t in graded] == [bound[tokens[t]] for t in graded]
    assert max(bound) < 32 <= min(bound.values())


def test_palindrome_reads_backwards():
  batch = palindrome(rng(), 8, 41)
  for tokens, targets, mask in zip(*batch):
    separator = int(np.flatnonzero(tokens == 1)[0])
    np.testing.assert_array_equal(targets[mask], tokens[:separator][::-1])
    assert mask[separator] and not mask[:separator].any()


def test_stack_pops_what_was_pushed_last():
  batch = stack(rng(), 8, 95, stacks=3)
  assert batch.mask.sum() > 50
  for tokens, targets, mask in zip(*batch):
    contents = {}
    graded = np.zeros_like(mask)
    for t in range(0, 94, 3):
      operation, name, element = tokens[t], tokens[t + 1], targets[t + 1]
      if operation == 1:
        contents.setdefault(name, []).append(element)
      else:
        assert contents[name].pop() == element
        graded[t + 1] = True
    np.testing.assert_array_equal(mask, graded)


def test_accuracy_counts_graded_positions():
  batch = palindrome(rng(), 2, 20)
  assert accuracy(batch.targets, batch) == 1.0
  assert accuracy(np.where(batch.mask, 0, batch.targets), batch) == 0.0
  nothing = batch._replace(mask=np.zeros_like(batch.mask))
  assert np.isnan(accuracy(batch.targets, nothing))


def test_sizes_that_do_not_fit():
  with pytest.raises(ValueError, match='makes 64 keys; choose from 1 to 31'):
    mqar(rng(), 1, 256, vocab_size=64)
  with pytest.raises(ValueError, match='overwrites=20'):
    mqar(rng(), 1, 64, overwrites=20)
  with pytest.raises(ValueError, match='length=1'):
    palindrome(rng(), 1, 1)
  with pytest.raises(ValueError, match='vocab_size=12'):
    stack(rng(), 1, 30, vocab_size=12)
