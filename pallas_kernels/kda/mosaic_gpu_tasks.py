"""Which chunks a warpgroup takes, where it takes only some of all.

Tasks are numbered, a worker takes every `step`-th from its own number on, and
of these only the chosen. Each warp keeps four words in shared memory: the first
of the 32 tasks it looks at, one bit for each chosen one that is left, the task
at hand and the one after it. A look costs a load from global memory, and 32
tasks are a round of a whole kernel or more.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils

from pallas_kernels.kda import mosaic_gpu_warp as warp

WORDS = 16  # of a warpgroup
_LANES = 32
_HAND, _NEXT = 8, 12  # bytes before the task at hand and the one after it


@dataclasses.dataclass(frozen=True)
class Tasks:
  """Numbered tasks, `rows` of them for each word of a list.

  Attributes:
    total: tasks, and the number that stands for none.
    rows: neighbouring tasks that share a word.
    step: between tasks of one worker.
    chosen: the word of tasks to take.
  """

  total: int
  rows: int
  step: int
  chosen: int

  def begin(self, stash: warp.Word, worker: warp.Word):
    """Nothing seen, no task at hand."""
    before = warp.add(worker, -_LANES * self.step)
    none = warp.word(self.total)
    warp.store(stash, 0, [before, warp.word(0), none, none])

  def exhausted(self, stash: warp.Word) -> warp.Word:
    """1 if nothing is left of what was looked at, but there is more; else 0."""
    first, left = warp.load(stash, 0, 2)
    more = warp.compare(self._further(first), 'slt', self.total)
    empty = warp.compare(left, 'eq', 0)
    return warp.where(warp.both(more, empty), warp.word(1), warp.word(0))

  def _further(self, first: warp.Word) -> warp.Word:
    return warp.add(first, _LANES * self.step)

  def look(self, stash: warp.Word, words, lane: warp.Word):
    """Looks at the next tasks; `words` is the list's global address."""
    (first,) = warp.load(stash, 0, 1)
    first = self._further(first)
    own = warp.add(first, warp.times(lane, self.step))
    inside = warp.compare(own, 'slt', self.total)
    row = warp.quotient(warp.where(inside, own, warp.word(0)), self.rows)
    address = warp.advance(words, warp.shift_left(row, 2))
    (word,) = warp.load_global_words(address, 0, 1)
    chosen = warp.both(inside, warp.compare(word, 'eq', self.chosen))
    warp.store(stash, 0, [first, warp.ballot(chosen)])

  def take(self, stash: warp.Word):
    """The next task comes to hand, and another one after it."""
    first, left, _, then = warp.load(stash, 0, 4)
    steps = warp.times(warp.first_lane(left), self.step)
    index = warp.where(
      warp.compare(left, 'ne', 0), warp.add(first, steps), warp.word(self.total)
    )
    left = warp.keep(left, warp.add(left, -1))
    warp.store(stash, 0, [first, left, then, index])


def _scalar():
  layout = plgpu.Layout.WG_SPLAT(())
  return plgpu.ShapeDtypeStruct((), jnp.int32, layout=layout)


def _lane() -> warp.Word:
  return warp.bit_and(utils.thread_idx(), _LANES - 1)


def _stash(words) -> warp.Word:
  own = warp.shift_left(warp.bit_and(utils.warp_idx(), 3), 4)
  return warp.add(warp.shared_address(words), own)


def _splat(x: warp.Word) -> mgpu.FragmentedArray:
  return mgpu.FragmentedArray.splat(x, (), is_signed=True)


class Worker:
  """One warpgroup's tasks.

  Args:
    tasks: see `Tasks`.
    words: the list, in global memory.
    stash: WORDS words of shared memory of the warpgroup's own.
  """

  def __init__(self, tasks: Tasks, words, stash):
    self._tasks, self._words, self._stash = tasks, words, stash

  def begin(self, worker: jax.Array):
    """The first task is the one after that at hand, which is none."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def begin(ctx, stash, worker):
      del ctx
      self._tasks.begin(_stash(stash), worker.registers.item())

    begin(self._stash, worker)
    self.advance()

  def _exhausted(self) -> jax.Array:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_scalar())
    def exhausted(ctx, stash):
      del ctx
      return _splat(self._tasks.exhausted(_stash(stash)))

    return exhausted(self._stash)

  def advance(self):
    """Moves on by one task."""
    reference = plgpu.RefType()

    @plgpu.inline_mgpu(arg_types=(reference, reference), return_type=_scalar())
    def look(ctx, stash, words):
      del ctx
      own = _stash(stash)
      self._tasks.look(own, warp.global_address(words), _lane())
      return _splat(self._tasks.exhausted(own))

    @plgpu.inline_mgpu(arg_types=(reference,))
    def take(ctx, stash):
      del ctx
      self._tasks.take(_stash(stash))

    lax.while_loop(
      lambda empty: empty != 0,
      lambda _: look(self._stash, self._words),
      self._exhausted(),
    )
    take(self._stash)

  def _read(self, offset: int) -> jax.Array:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_scalar())
    def read(ctx, stash):
      del ctx
      return _splat(warp.load(_stash(stash), offset, 1)[0])

    return read(self._stash)

  def at_hand(self) -> jax.Array:
    """The number of the task at hand; tasks.total if there is none."""
    return self._read(_HAND)

  def following(self) -> jax.Array:
    """The number of the task after that."""
    return self._read(_NEXT)
