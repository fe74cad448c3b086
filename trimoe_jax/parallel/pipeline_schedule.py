"""Interleaved 1F1B as a table: what every stage does in every tick.

P stages hold V chunks of layers each; chunk c = v P + p is the v-th of stage p,
and a micro-batch passes the chunks in order. All stages tick together, so a
tick takes as long as its slowest part. With an F in one tick and a B in
another, every tick of the steady state would cost max(F, B) at all stages;
here a tick holds one F and one B of every stage, after V P - 1 ticks of F alone
and before as many of B alone. Then

    F of the k-th (group, v, m) of stage p     runs in tick k + p,
    B of the k-th (group, V - 1 - v, m)        in tick V P - 1 + k + P - 1 - p,

with groups of P micro-batches. Every hop takes exactly one tick, a B follows
the F of the last chunk in its own tick, and the whole step costs

    (M V + P - 1) (F + B),

the bubble (P - 1) / (M V + P - 1) of interleaved 1F1B (Narayanan et al.,
arXiv 2104.04473, section 2.2), with its number of micro-batches in flight.

No array of jax here: the table is made before tracing.
"""

from __future__ import annotations

import dataclasses

import numpy as np

IDLE = -1


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The operations of `stages` stages.

  Attributes:
    stages, chunks, micro_batches: P, V (of one stage) and M.
    forward: int32 [ticks, P, 2], the chunk c = v P + p and the micro-batch
      that a stage runs forward, or IDLE twice.
    backward: likewise; within a tick it comes after the forward operation.
  """

  stages: int
  chunks: int
  micro_batches: int
  forward: np.ndarray
  backward: np.ndarray

  @property
  def ticks(self) -> int:
    return len(self.forward)

  def phases(self) -> tuple[range, range, range]:
    """Ticks of F alone, of F and B, and of B alone."""
    has_forward = np.flatnonzero((self.forward != IDLE).any((1, 2)))
    has_backward = np.flatnonzero((self.backward != IDLE).any((1, 2)))
    first, last = int(has_backward[0]), int(has_forward[-1]) + 1
    return range(first), range(first, last), range(last, self.ticks)

  def duration(self, forward: float, backward: float) -> float:
    """Time of a step whose chunks take `forward` and `backward`."""
    alone, both, after = map(len, self.phases())
    return (alone + both) * forward + (both + after) * backward

  def bubble(self, forward: float = 1.0, backward: float = 2.0) -> float:
    """The share of a step in which a stage has nothing to do."""
    busy = self.chunks * self.micro_batches * (forward + backward)
    return 1.0 - busy / self.duration(forward, backward)


def interleaved(stages: int, chunks: int, micro_batches: int) -> Schedule:
  """The table above; a last group of fewer than P leaves idle places."""
  groups = -(-micro_batches // stages)
  ticks = (groups + 1) * stages * chunks + stages
  forward = np.full((ticks, stages, 2), IDLE, np.int32)
  backward = np.full((ticks, stages, 2), IDLE, np.int32)
  first = stages * chunks - 1
  for k in range(groups * stages * chunks):
    group, rest = divmod(k, stages * chunks)
    v, within = divmod(rest, stages)
    micro_batch = group * stages + within
    if micro_batch >= micro_batches:
      continue
    for p in range(stages):
      forward[k + p, p] = v * stages + p, micro_batch
      last = (chunks - 1 - v) * stages + p
      backward[first + k + stages - 1 - p, p] = last, micro_batch
  used = np.flatnonzero((backward != IDLE).any((1, 2)))[-1] + 1
  return Schedule(
    stages, chunks, micro_batches, forward[:used], backward[:used]
  )


@dataclasses.dataclass(frozen=True)
class Slots:
  """Where stages keep what they wait for, in buffers as small as they can be.

  Attributes:
    count: places of the buffer, enough for the fullest stage.
    forward, backward: int32 [ticks, P], the place that an operation uses; 0
      where it is idle.
  """

  count: int
  forward: np.ndarray
  backward: np.ndarray


def input_slots(schedule: Schedule) -> Slots:
  """Places of chunk inputs, from the F of (chunk, micro-batch) to its B."""
  return _slots(schedule, lambda chunk, micro_batch: (chunk, micro_batch))


def cache_slots(schedule: Schedule) -> Slots:
  """Places of block caches: a micro-batch's from its first F to its last B."""
  return _slots(schedule, lambda chunk, micro_batch: micro_batch)


def deposit_slots(schedule: Schedule) -> Slots:
  """Places of the gradients of block caches, from a first B to the last B."""
  return _slots(schedule, lambda chunk, micro_batch: micro_batch, forward=False)


def _slots(schedule, key, forward=True):
  """The lowest free place for each key, from its first use to its last."""
  shape = schedule.forward.shape[:2]
  places = np.zeros((2, *shape), np.int32)
  count = 0
  for p in range(schedule.stages):
    uses = _uses(schedule, p, key, forward)
    last = {name: use for use, name in enumerate(n for n, _ in uses)}
    held: dict = {}
    for use, (name, where) in enumerate(uses):
      if name not in held:
        taken = set(held.values())
        held[name] = next(i for i in range(len(taken) + 1) if i not in taken)
        count = max(count, held[name] + 1)
      places[where] = held[name]
      if last[name] == use:
        del held[name]
  return Slots(count, *places)


def _uses(schedule, p, key, forward):
  """(key, place in the tables) of a stage's operations in order."""
  uses = []
  for tick in range(schedule.ticks):
    for kind, table in enumerate((schedule.forward, schedule.backward)):
      chunk, micro_batch = table[tick, p]
      if chunk != IDLE and (forward or kind):
        uses.append((key(int(chunk), int(micro_batch)), (kind, tick, p)))
  return uses
