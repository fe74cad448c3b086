"""Held-out loss: pooled means, bits per byte and the curve by position."""

import math

import numpy as np
import pytest

from trimoe_jax.data.tokenizer import ByteTokenizer
from trimoe_jax.evals.perplexity import (
  LossMeter,
  heldout_loss,
  position_edges,
  segment_positions,
)


def make_batch(segment_ids, targets=None):
  segment_ids = np.asarray(segment_ids, np.int32)
  targets = np.full_like(segment_ids, 97) if targets is None else targets
  return {
    'tokens': np.zeros_like(segment_ids),
    'targets': np.asarray(targets, np.int32),
    'segment_ids': segment_ids,
    'loss_mask': segment_ids > 0,
  }


def test_positions_restart_with_segments():
  positions = segment_positions([[1, 1, 1, 2, 2, 0], [1, 2, 3, 3, 3, 3]])
  np.testing.assert_array_equal(
    positions, [[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]]
  )


def test_edges_double_up_to_the_context():
  assert position_edges(128) == (0, 8, 16, 32, 64, 128)
  assert position_edges(100) == (0, 8, 16, 32, 64, 100)
  assert position_edges(5) == (0, 5)
  assert len(position_edges(16384)) == 13


def test_batches_are_pooled_and_padding_ignored():
  batches = [make_batch([[1, 1, 1, 1]]), make_batch([[1, 0, 0, 0]])]
  losses = iter([np.full((1, 4), 2.0), np.array([[7.0, 99, 99, np.nan]])])

  def token_losses(params, router, batch):
    assert (params, router) == ('params', 'router')
    return next(losses)

  result = heldout_loss(token_losses, 'params', 'router', batches)
  assert result.nats_per_token == pytest.approx((4 * 2.0 + 7.0) / 5)
  assert result.tokens == 5
  assert result.bits_per_byte is None


def test_bits_per_byte_of_uniform_bytes_is_eight():
  tokenizer = ByteTokenizer()
  batch = make_batch([[1, 1, 1]], targets=[[97, 98, 99]])
  meter = LossMeter(tokenizer.token_bytes)
  meter.add(np.full((1, 3), math.log(256)), batch)
  assert meter.result().bits_per_byte == pytest.approx(8.0)
  # An end-of-document token costs nats and stands for no byte.
  batch = make_batch([[1, 1, 1, 1]], targets=[[97, 98, 99, tokenizer.eos_id]])
  meter = LossMeter(tokenizer.token_bytes)
  meter.add(np.full((1, 4), math.log(256)), batch)
  assert meter.result().bits_per_byte == pytest.approx(8.0 * 4 / 3)
  assert meter.result().nats_per_token == pytest.approx(math.log(256))


def test_curve_by_position():
  segment_ids = np.repeat([[1, 2]], 16, axis=1)  # two documents of 16 in 32
  batch = make_batch(segment_ids)
  meter = LossMeter()
  meter.add(segment_positions(segment_ids), batch)  # the loss is the position
  curve = meter.result().by_position
  assert [(c.start, c.stop) for c in curve] == [(0, 8), (8, 16), (16, 32)]
  assert [c.tokens for c in curve] == [16, 16, 0]
  assert curve[0].nats_per_token == pytest.approx(3.5)
  assert curve[1].nats_per_token == pytest.approx(11.5)
  assert math.isnan(curve[2].nats_per_token)


def test_mistakes():
  meter = LossMeter()
  with pytest.raises(ValueError, match='no held-out token'):
    meter.result()
  with pytest.raises(ValueError, match='one loss a token'):
    meter.add(np.zeros((1, 3)), make_batch([[1, 1]]))
  meter.add(np.zeros((1, 2)), make_batch([[1, 1]]))
  with pytest.raises(ValueError, match='context 3 after batches of context 2'):
    meter.add(np.zeros((1, 3)), make_batch([[1, 1, 1]]))
