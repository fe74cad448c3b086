"""Held-out loss, as one number and by position in the context.

A single number hides a model that stops using its context: the loss by
position keeps falling as far as the context is used, and a model that fails
beyond its trained length shows there first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from trimoe_jax.data.packing import Batch


class PositionLoss(NamedTuple):
  """Mean loss of tokens that have `start` to `stop` - 1 tokens before them."""

  start: int
  stop: int
  nats_per_token: float  # nan where no held-out token has this position
  tokens: int


class HeldoutLoss(NamedTuple):
  """Mean held-out loss; `bits_per_byte` is None where bytes are not known."""

  nats_per_token: float
  bits_per_byte: float | None
  tokens: int
  by_position: tuple[PositionLoss, ...]


def heldout_loss(
  token_losses: Callable[[Any, Any, Batch], Any],
  params: Any,
  router: Any,
  batches: Iterable[Batch],
  *,
  token_bytes: np.ndarray | None = None,
) -> HeldoutLoss:
  """The loss of a model over held-out batches.

  nats_per_token = sum of masked losses / number of masked tokens;
  bits_per_byte = that sum / (ln 2 * bytes of the predicted text). End-of-
  document tokens count as tokens and as no bytes. Losses of all batches are
  pooled, so a batch with more padding weighs less.

  Args:
    token_losses: (params, router, batch) -> [B, T] losses in nats, jitted.
    params: handed to `token_losses`.
    router: handed to `token_losses`, which must not change it.
    batches: see `Corpus.heldout_batches`; all of one context.
    token_bytes: the tokenizer's `token_bytes`, [vocab_size] or None.

  Raises:
    ValueError: no batch, no masked token, or losses of another shape.
  """
  meter = LossMeter(token_bytes)
  for batch in batches:
    meter.add(token_losses(params, router, batch), batch)
  return meter.result()


class LossMeter:
  """Sums of loss over batches, in float64, total and by position."""

  def __init__(self, token_bytes: np.ndarray | None = None):
    self._token_bytes = token_bytes
    self._bytes = 0
    self._edges: tuple[int, ...] = ()
    self._losses = np.zeros(0)  # [buckets]
    self._tokens = np.zeros(0, np.int64)  # [buckets]

  def add(self, losses_bt: Any, batch: Batch):
    """Adds a batch's losses [B, T] where its `loss_mask` is true.

    Raises:
      ValueError: losses and batch, or this batch and earlier ones, differ in
        shape.
    """
    losses_bt = np.asarray(losses_bt, np.float64)
    mask_bt = np.asarray(batch['loss_mask'], bool)
    if losses_bt.shape != mask_bt.shape:
      raise ValueError(
        f'losses have shape {losses_bt.shape} and the batch {mask_bt.shape}; '
        'give one loss a token.'
      )
    edges = position_edges(mask_bt.shape[1])
    if not self._edges:
      self._edges = edges
      self._losses = np.zeros(len(edges) - 1)
      self._tokens = np.zeros(len(edges) - 1, np.int64)
    elif edges != self._edges:
      raise ValueError(
        f'a batch of context {edges[-1]} after batches of context '
        f'{self._edges[-1]}; use one meter for each context.'
      )
    position = segment_positions(batch['segment_ids'])[mask_bt]
    bucket = np.searchsorted(edges, position, side='right') - 1
    count = len(edges) - 1
    self._losses += np.bincount(bucket, losses_bt[mask_bt], minlength=count)
    self._tokens += np.bincount(bucket, minlength=count)
    if self._token_bytes is not None:
      targets = np.asarray(batch['targets'])[mask_bt]
      self._bytes += int(self._token_bytes[targets].sum())

  def result(self) -> HeldoutLoss:
    """The means so far.

    Raises:
      ValueError: nothing was added.
    """
    tokens = int(self._tokens.sum())
    if not tokens:
      raise ValueError(
        'no held-out token to measure; give at least one batch whose '
        'loss_mask is not all false.'
      )
    total = float(self._losses.sum())
    return HeldoutLoss(
      nats_per_token=total / tokens,
      bits_per_byte=total / math.log(2) / self._bytes if self._bytes else None,
      tokens=tokens,
      by_position=tuple(
        PositionLoss(start, stop, loss / n if n else math.nan, int(n))
        for start, stop, loss, n in zip(
          self._edges[:-1],
          self._edges[1:],
          self._losses.tolist(),
          self._tokens.tolist(),
        )
      ),
    )


def position_edges(context: int, first: int = 8) -> tuple[int, ...]:
  """Bucket edges 0, `first`, and doubling from there to `context`."""
  edges: list[int] = [0]
  edge = first
  while edge < context:
    edges.append(edge)
    edge *= 2
  return tuple(edges + [context])


def segment_positions(segment_ids_bt: Sequence | np.ndarray) -> np.ndarray:
  """How many tokens of its own segment precede each token, [B, T]."""
  segment_ids_bt = np.asarray(segment_ids_bt)
  index_t = np.arange(segment_ids_bt.shape[1])
  begins_bt = np.ones(segment_ids_bt.shape, bool)
  begins_bt[:, 1:] = segment_ids_bt[:, 1:] != segment_ids_bt[:, :-1]
  start_bt = np.maximum.accumulate(np.where(begins_bt, index_t, 0), axis=1)
  return index_t - start_bt
