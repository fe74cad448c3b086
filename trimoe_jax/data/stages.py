"""Training batches through stages of growing context.

The batch is a pure function of (data, stages, seed, step). Nothing here has a
position to save: a resumed run, a later stage or another number of hosts asks
for the step it needs. Cost is a batch's, plus one shuffle at each new epoch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trimoe_jax.data.corpus import Corpus, shuffled_rows
from trimoe_jax.data.packing import (
  Batch,
  Room,
  gather_rows,
  plan_rows,
  refuse_images,
  refuse_long,
)
from trimoe_jax.data.sources import LongDocuments


@dataclasses.dataclass(frozen=True)
class StageConfig:
  """One stage of training: rows of `context` tokens, `batch` of them a step.

  Its length is a budget of `tokens` (rounded up to whole steps) or a number of
  `steps`. `long_repeats` > 1 uses documents of at least `context` tokens that
  many times in an epoch; shorter ones are used once. The learning rate is
  multiplied by `peak`, and gradients are accumulated over `micro_batches`
  equal parts of the batch. A row has room for `images` images of `patches`
  patches together; a quarter of the patches become tokens of its context.
  """

  context: int
  batch: int
  tokens: int | None = None
  steps: int | None = None
  long_repeats: int = 1
  peak: float = 1.0
  micro_batches: int = 1
  patches: int = 0
  images: int = 0

  def __post_init__(self):
    for name in ('context', 'batch', 'long_repeats', 'micro_batches'):
      if getattr(self, name) < 1:
        raise ValueError(f'stage.{name}={getattr(self, name)}; use 1 or more.')
    if self.batch % self.micro_batches:
      raise ValueError(
        f'stage.batch={self.batch} is not divisible by '
        f'stage.micro_batches={self.micro_batches}; choose a divisor.'
      )
    if min(self.patches, self.images) < 0 or self.patches % 4:
      raise ValueError(
        f'stage.patches={self.patches} and stage.images={self.images}; use 0 '
        'for text alone, and a multiple of 4 patches.'
      )
    if (self.patches > 0) != (self.images > 0):
      raise ValueError(
        f'stage.patches={self.patches} and stage.images={self.images} must '
        'both be given, or neither.'
      )
    if not self.peak > 0:
      raise ValueError(f'stage.peak={self.peak} must be positive.')
    if (self.tokens is None) == (self.steps is None):
      raise ValueError(
        f'stage.tokens={self.tokens} and stage.steps={self.steps}: give '
        'exactly one of them, a token budget or a number of steps.'
      )
    budget = self.tokens if self.steps is None else self.steps
    if budget < 1:
      name = 'tokens' if self.steps is None else 'steps'
      raise ValueError(
        f'stage.{name}={budget}; a stage needs 1 or more, or leave it out of '
        'the list of stages.'
      )

  @property
  def room(self) -> Room:
    """For images in a row."""
    return Room(self.patches, self.images)

  @property
  def step_tokens(self) -> int:
    """Positions in one step, padding included."""
    return self.context * self.batch

  @property
  def num_steps(self) -> int:
    if self.steps is not None:
      return self.steps
    return -(-self.tokens // self.step_tokens)


class StagePosition(NamedTuple):
  """A step of training as the stage it falls into and the step within it."""

  stage: int
  step: int


class StagedBatches:
  """The training batches of a corpus, for every step of every stage.

  Each stage shuffles on its own, and reads every document once (a long one
  `long_repeats` times) before any comes again. Where a batch reaches the end
  of an epoch it goes on with the next, so no row is dropped.

  Args:
    corpus: the tokenised documents.
    stages: in the order in which they are trained, duck-typed `StageConfig`.
    seed: decides the order of rows.
    long_documents: 'split' cuts documents longer than a row into consecutive
      pieces, each a segment of its own; 'refuse' raises.

  Raises:
    ValueError: no stage, a document longer than one under 'refuse', or one
      whose images do not fit into a row.
  """

  def __init__(
    self,
    corpus: Corpus,
    stages: Sequence[StageConfig],
    *,
    seed: int = 0,
    long_documents: LongDocuments = 'split',
  ):
    if not stages:
      raise ValueError('stages is empty; a run needs at least one stage.')
    self.corpus = corpus
    self.stages = tuple(stages)
    self.seed = seed
    if long_documents == 'refuse':
      for number, stage in enumerate(self.stages, start=1):
        refuse_long(corpus.train, stage.context, f'stage {number}')
    for number, stage in enumerate(self.stages, start=1):
      refuse_images(corpus.train, stage.context, stage.room, f'stage {number}')
    self.plans = tuple(
      plan_rows(
        corpus.train.positions,
        stage.context,
        long_repeats=stage.long_repeats,
        needs=corpus.train.needs,
        room=stage.room,
      )
      for stage in self.stages
    )
    self.first_steps = tuple(
      np.cumsum([0] + [stage.num_steps for stage in self.stages]).tolist()
    )

  @property
  def total_steps(self) -> int:
    return self.first_steps[-1]

  def locate(self, step: int) -> StagePosition:
    """The stage that `step` of the whole run falls into.

    Raises:
      ValueError: `step` outside [0, total_steps).
    """
    if not 0 <= step < self.total_steps:
      raise ValueError(
        f'step={step} is outside [0, {self.total_steps}), the steps of the '
        f'{len(self.stages)} stages together.'
      )
    stage = int(np.searchsorted(self.first_steps, step, side='right')) - 1
    return StagePosition(stage, step - self.first_steps[stage])

  def tokens_before(self, step: int) -> int:
    """Positions trained on before `step`, padding included.

    `step` may be `total_steps`: then it is the whole run's.
    """
    if step == self.total_steps:
      return sum(s.num_steps * s.step_tokens for s in self.stages)
    position = self.locate(step)
    done = self.stages[: position.stage]
    here = position.step * self.stages[position.stage].step_tokens
    return here + sum(s.num_steps * s.step_tokens for s in done)

  def batch_at(
    self, step: int, process_index: int = 0, process_count: int = 1
  ) -> Batch:
    """The batch of `step` of the whole run, or one host's rows of it.

    Args:
      step: 0-based, counted over all stages.
      process_index: this host, in [0, process_count).
      process_count: hosts that share the batch; each gets a contiguous block
        of its rows, and together they have it whole.

    Returns:
      See `packing.gather_rows`; [batch / process_count, context] each.

    Raises:
      ValueError: a step outside the run, or rows that do not divide.
    """
    stage, local_step = self.locate(step)
    batch = self.stages[stage].batch
    if batch % process_count or not 0 <= process_index < process_count:
      raise ValueError(
        f'stage {stage + 1} has batch={batch}, process_index={process_index} '
        f'and process_count={process_count}; the batch must be a multiple of '
        'process_count, and process_index smaller than it.'
      )
    share = batch // process_count
    first = local_step * batch + process_index * share
    plan = self.plans[stage]
    rows = []
    for number in range(first, first + share):
      epoch, place = divmod(number, plan.rows)
      rows.append(_epoch_order(self.seed, stage, epoch, plan.rows)[place])
    return gather_rows(
      self.corpus.train,
      plan,
      rows,
      self.corpus.tokenizer.pad_id,
      self.stages[stage].room,
    )


@functools.lru_cache(maxsize=8)
def _epoch_order(seed: int, stage: int, epoch: int, rows: int) -> np.ndarray:
  return shuffled_rows((seed, stage, epoch), rows)
