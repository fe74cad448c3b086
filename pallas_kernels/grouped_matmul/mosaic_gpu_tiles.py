"""Which rows a tile has, found by every thread block for itself, on Hopper.

Small kernels that list the tiles would take as long as some of the products.
Instead each thread block adds up all sizes, a few groups a thread, and notes in
shared memory where groups start and which groups its own tiles belong to.

Suffixes: none; a thread holds consecutive groups. The group behind the last
one has the rows past all groups, the one behind that has none.
"""

from __future__ import annotations

import dataclasses

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import scf

from pallas_kernels.kda import mosaic_gpu_warp as warp
from pallas_kernels.kda.mosaic_gpu_warp import Word
from pallas_kernels.quantile_router import mosaic_gpu_warp as lane_code

THREADS = 384
ALIGNMENT = 8  # rows, from where bulk copies can start
_WARPS = 32  # sums of warps that are kept


@dataclasses.dataclass(frozen=True)
class Cut:
  """Sizes of arrays and tiles.

  Attributes:
    groups, rows: of the sorted array.
    tile: rows of a tile, or 0 where tiles are not cut along the rows.
    across: tiles side by side, a pair as one.
    blocks: thread blocks, a pair as one; block b has tiles b, b + blocks, ...
  """

  groups: int
  rows: int
  tile: int = 0
  across: int = 1
  blocks: int = 1

  @property
  def held(self) -> int:
    """Groups of a thread."""
    return pl.cdiv(self.groups + 2, THREADS)

  @property
  def entries(self) -> int:
    """Words of a list over groups."""
    return self.held * THREADS

  @property
  def most(self) -> int:
    """Tiles of a thread block in the worst case."""
    if not self.tile:
      return 0
    slack = (self.groups + 1) * (self.tile + ALIGNMENT - 2) // self.tile
    tiles = (self.rows // self.tile + slack + 1) * self.across
    return pl.cdiv(tiles, self.blocks)

  @property
  def words(self) -> int:
    """Of the book in shared memory: starts, first tiles, own tiles, sums."""
    return 2 * self.entries + self.most + 2 * _WARPS

  def scratch(self):
    return plgpu.SMEM((self.words,), jnp.int32)


@dataclasses.dataclass(frozen=True)
class Book:
  """What a thread block knows of the groups and of its tiles."""

  cut: Cut
  words: object  # reference to shared memory

  def bounds(self, group):
    """(first row, row behind the last) of a group."""
    return self.words[group], self.words[group + 1]

  def group(self, i):
    """The group of this block's tile number i."""
    return self.words[2 * self.cut.entries + i]

  def first_tile(self, group):
    """Number of the group's first tile, of those on the left."""
    return self.words[self.cut.entries + group]

  def tiles(self):
    """Tiles of all blocks, a pair as one."""
    return self.first_tile(self.cut.groups + 1) * self.cut.across


def write_book(cut: Cut, sizes, words, block) -> Book:
  """Fills the book; all threads of the block call it and can read it after."""
  scalar = plgpu.Layout.WG_SPLAT(())
  plain = plgpu.RefType()

  @plgpu.inline_mgpu(arg_types=(plain, plain, scalar))
  def emit(ctx, sizes, words, block):
    del ctx
    at = warp.global_address(sizes), warp.shared_address(words)
    _emit(cut, at, block.registers.item())

  emit(sizes, words, jnp.asarray(block, jnp.int32))
  return Book(cut, words)


def _emit(cut: Cut, addresses, block: Word):
  sizes, book = addresses
  thread = utils.thread_idx()
  sums = warp.add(book, 4 * (2 * cut.entries + cut.most))
  first = warp.times(thread, cut.held)
  groups = [warp.add(first, i) for i in range(cut.held)]
  starts, ends = _bounds(cut, sizes, groups, (thread, sums))
  _note(book, groups, starts)
  if cut.tile:
    counts = [_tiles(cut, *bounds) for bounds in zip(starts, ends)]
    above = warp.add(sums, 4 * _WARPS)
    before = _sums_before(counts, (thread, above))
    _note(warp.add(book, 4 * cut.entries), groups, before)
    own = warp.add(book, 8 * cut.entries)
    for group, number, count in zip(groups, before, counts):
      number, count = (warp.times(x, cut.across) for x in (number, count))
      least = _own_before(cut, number, block)
      behind = _own_before(cut, warp.add(number, count), block)
      _fill(own, (least, behind), group)
  lane_code.wait_for_block()


def _bounds(cut: Cut, sizes, groups, place):
  """First rows of a thread's groups, and the rows behind them."""
  loaded = []
  for group in groups:
    exists = warp.compare(group, 'slt', cut.groups)
    at = lane_code.row_address(
      sizes, warp.where(exists, group, warp.word(0)), 4
    )
    (size,) = warp.load_global_words(at, 0, 1)
    loaded.append(warp.where(exists, size, warp.word(0)))
  before = _sums_before(loaded, place)
  rows = warp.word(cut.rows)
  starts, ends = [], []
  for group, size, start in zip(groups, loaded, before):
    end = warp.add(start, size)
    end = _least(end, rows)
    # The rows past all groups, then nothing.
    end = warp.where(warp.compare(group, 'slt', cut.groups), end, rows)
    start = warp.where(
      warp.compare(group, 'sle', cut.groups), _least(start, rows), rows
    )
    starts.append(start)
    ends.append(end)
  return starts, ends


def _least(a: Word, b: Word) -> Word:
  return warp.where(warp.compare(a, 'slt', b), a, b)


def _tiles(cut: Cut, start: Word, end: Word) -> Word:
  """Tiles of a group, the first from a row on where copies can start."""
  first = warp.bit_and(start, -ALIGNMENT)
  rows = warp.add(lane_code.difference(end, first), cut.tile - 1)
  used = warp.compare(end, 'sgt', start)
  return warp.where(used, lane_code.quotient(rows, cut.tile), warp.word(0))


def _own_before(cut: Cut, tile: Word, block: Word) -> Word:
  """How many tiles of this block come before a tile."""
  ahead = lane_code.difference(warp.add(tile, cut.blocks - 1), block)
  return lane_code.quotient(ahead, cut.blocks)


def _sums_before(values, place) -> list[Word]:
  """For each value the sum of all before it, over this and lower threads.

  place: this thread, and the address of a word for each warp.
  """
  thread, sums = place
  total = values[0]
  for x in values[1:]:
    total = warp.add(total, x)
  running = lane_code.running_sum(total)
  lane = warp.bit_and(thread, 31)
  number = warp.shift_right(thread, 5)
  last = warp.compare(lane, 'eq', 31)
  warp.store(warp.add(sums, warp.shift_left(number, 2)), 0, [running], last)
  lane_code.wait_for_block()
  lower = warp.compare(lane, 'slt', number)
  at = warp.where(lower, lane, warp.word(0))
  (other,) = warp.load(warp.add(sums, warp.shift_left(at, 2)), 0, 1)
  below = warp.warp_sum(warp.where(lower, other, warp.word(0)))
  before = [warp.add(below, lane_code.difference(running, total))]
  for x in values[:-1]:
    before.append(warp.add(before[-1], x))
  return before


def _note(book: Word, groups, values):
  for group, x in zip(groups, values):
    warp.store(warp.add(book, warp.shift_left(group, 2)), 0, [x])


def _fill(address: Word, places, value: Word):
  """Writes the value to words number places[0] to places[1] - 1."""
  loop = scf.ForOp(*places, warp.word(1), [])
  with ir.InsertionPoint(loop.body):
    at = warp.add(address, warp.shift_left(loop.induction_variable, 2))
    warp.store(at, 0, [value])
    scf.yield_([])
