"""A ring of rows in shared memory, and what its warps need to go around it.

One lane of a producing warp copies rows of global memory into the slots with
the copy engine; each slot has a barrier `full`, which the copy completes, and
one `empty`, at which every consuming warp arrives once it has read the row.
Instructions beyond those of `kda.mosaic_gpu_warp` are here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, scf

from pallas_kernels.kda import mosaic_gpu_warp as warp
from pallas_kernels.kda.mosaic_gpu_warp import Real, Word

BARRIER_BYTES = 8


class Place(NamedTuple):
  """A slot of the ring, and the parity of the present round."""

  slot: Word
  parity: Word


class Ring(NamedTuple):
  """Addresses in shared memory: rows, then `full` and `empty` barriers."""

  rows: Word
  barriers: Word
  slots: int
  row_bytes: int

  def row(self, place: Place) -> Word:
    return warp.add(self.rows, warp.times(place.slot, self.row_bytes))

  def full(self, slot: Word) -> Word:
    return warp.add(self.barriers, warp.times(slot, BARRIER_BYTES))

  def empty(self, slot: Word) -> Word:
    return warp.add(self.full(slot), BARRIER_BYTES * self.slots)

  def after(self, place: Place) -> Place:
    """The next slot."""
    slot = warp.add(place.slot, 1)
    wraps = warp.compare(slot, 'eq', self.slots)
    other = warp.xor(place.parity, 1)
    return Place(
      warp.where(wraps, warp.word(0), slot),
      warp.where(wraps, other, place.parity),
    )

  def start(self, warps: int):
    """Sets up the barriers, by one thread; others follow a block barrier."""
    for slot in range(self.slots):
      for at, arrivals in ((self.full, 1), (self.empty, warps)):
        ptx = f'mbarrier.init.shared.b64 [$0], {arrivals};'
        utils.inline_ptx(ptx, at(warp.word(slot)), has_side_effects=True)
    utils.inline_ptx('fence.mbarrier_init.release.cluster;')

  def fetch(self, place: Place, source: ir.Value):
    """Copies a row into a slot once it is free; called by one lane."""
    _wait(self.empty(place.slot), warp.xor(place.parity, 1))
    full, size = self.full(place.slot), self.row_bytes
    ptx = f'mbarrier.arrive.expect_tx.shared.b64 _, [$0], {size};'
    utils.inline_ptx(ptx, full)
    utils.inline_ptx(
      'cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes'
      f' [$0], [$1], {size}, [$2];',
      self.row(place),
      source,
      full,
    )

  def wait(self, place: Place):
    """Until the row is there."""
    _wait(self.full(place.slot), place.parity)

  def release(self, place: Place, lane: Word):
    """This warp needs the row no more."""
    utils.inline_ptx('bar.warp.sync 0xffffffff;', convergent=True)
    utils.inline_ptx(
      'mbarrier.arrive.shared.b64 _, [$0];',
      self.empty(place.slot),
      predicate=warp.compare(lane, 'eq', 0),
    )


def _wait(barrier: Word, parity: Word):
  utils.inline_ptx(
    '{ .reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [$0], $1;'
    ' @!p bra again; }',
    barrier,
    parity,
    has_side_effects=True,
  )


def iterate(
  start: Word | int,
  count: Word,
  values: Sequence[Real | Word],
  body: Callable[[Word, list], Sequence[Real | Word]],
) -> list[Real | Word]:
  """Values after `values = body(i, values)` for i = start, ... count - 1."""
  reals = [isinstance(x, Real) for x in values]
  wrap = lambda raw: [Real(x) if real else x for x, real in zip(raw, reals)]
  raw = lambda x: x.value if isinstance(x, Real) else x
  start = start if isinstance(start, ir.Value) else warp.word(start)
  loop = scf.ForOp(start, count, warp.word(1), [raw(x) for x in values])
  with ir.InsertionPoint(loop.body):
    results = body(loop.induction_variable, wrap(loop.inner_iter_args))
    scf.yield_([raw(x) for x in results])
  return wrap(loop.results_)


def from_lane(x: Real, lane: Word) -> Real:
  """x of another lane of the warp."""
  ptx = 'shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;'
  of = ir.F32Type.get()
  return Real(
    utils.inline_ptx(ptx, x.value, lane, result_types=of, convergent=True)
  )


def word_from_lane(x: Word, lane: Word) -> Word:
  ptx = 'shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;'
  of = ir.IntegerType.get_signless(32)
  return utils.inline_ptx(ptx, x, lane, result_types=of, convergent=True)


def maximum(a: Real, b: Real) -> Real:
  """The larger."""
  of = ir.F32Type.get()
  return Real(
    utils.inline_ptx('max.f32 $0, $1, $2;', a.value, b.value, result_types=of)
  )


def over_lanes(combine: Callable[[Real, Real], Real], x: Real) -> Real:
  """All lanes' values combined, the same in every lane."""
  for distance in (16, 8, 4, 2, 1):
    x = combine(x, warp.exchange(x, distance))
  return x


def sums_of_two(a: Real, b: Real, lane: Word) -> Real:
  """The sum of a over all lanes in lanes 0-15, that of b in 16-31."""
  upper = warp.compare(lane, 'sge', 16)
  own, other = warp.where(upper, b, a), warp.where(upper, a, b)
  x = own + warp.exchange(other, 16)
  for distance in (8, 4, 2, 1):
    x = x + warp.exchange(x, distance)
  return x


def as_real(x: Word) -> Real:
  """The float32 number of the same bits."""
  return Real(arith.bitcast(ir.F32Type.get(), x))


def wait_for_block():
  """Until every thread of the block is here."""
  utils.inline_ptx('bar.sync 0;', convergent=True)


def wait_for_readers(threads: int):
  """Until all consuming threads are here."""
  utils.inline_ptx(f'bar.sync 1, {threads};', convergent=True)


def block() -> Word:
  """The number of this thread block."""
  of = ir.IntegerType.get_signless(32)
  return arith.index_cast(of, gpu.block_id(gpu.Dimension.x))


def remainder(a: Word, b: int) -> Word:
  """a modulo b for a that is not negative."""
  return arith.remui(a, warp.word(b))


def row_address(base: ir.Value, row: Word, row_bytes: int) -> ir.Value:
  """base + row * row_bytes in 64 bits."""
  i64 = ir.IntegerType.get_signless(64)
  size = arith.constant(i64, row_bytes)
  return arith.addi(base, arith.muli(arith.extui(i64, row), size))


def store_once(address: ir.Value, offset: int, words: Sequence[Word]):
  """Writes 4 words that this kernel does not read again."""
  ptx = f'st.global.cs.v4.b32 [$0+{offset}], {{$1, $2, $3, $4}};'
  utils.inline_ptx(ptx, address, *words)


def as_word(x: Real) -> Word:
  return arith.bitcast(ir.IntegerType.get_signless(32), x.value)
