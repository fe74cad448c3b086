"""The depth mix of one token after another by a thread block, on Hopper.

A thread owns 16-byte units of a row, its `columns`. The rows of a token pass
through a ring in shared memory and stay there until both passes over them are
done, so that each is read from global memory once: scores and then the sum, or
the products with the cotangent and then the gradients. Where a token does not
fit its rows are fetched twice, the second time mostly from the L2 cache.

Lane j of every warp holds the scalars of the j-th source that is not masked.
All sums have one order: over a thread's columns, lanes, warps, and for the
gradient of w = query * gain over a block's tokens and then the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir

from pallas_kernels.attention_residual import mosaic_gpu_ring as ring_code
from pallas_kernels.attention_residual.mosaic_gpu_ring import Place, Ring
from pallas_kernels.kda import mosaic_gpu_warp as warp
from pallas_kernels.kda.mosaic_gpu_warp import Real, Word

LANES = 32
UNIT_BYTES = 16
MOST_SOURCES = LANES
_CHAINS = 4  # independent sums of a thread
_LOG2_E = math.log2(math.e)
_LOWEST = -1e38


class Plan(NamedTuple):
  """Static choices.

  Attributes:
    tokens, width, dtype: of the sources.
    finished: sources in the first array.
    count: sources with the partial sum.
    eps: added to the mean square of a key.
    blocks: thread blocks.
    warps: consuming warps of a block.
    slots: rows of the ring.
    extra: rows of a token besides its sources.
  """

  tokens: int
  width: int
  dtype: str
  finished: int
  count: int
  eps: float
  blocks: int
  warps: int
  slots: int
  extra: int

  @property
  def threads(self) -> int:
    """That consume."""
    return LANES * self.warps

  @property
  def per_unit(self) -> int:
    """Columns of a unit."""
    return UNIT_BYTES // jnp.dtype(self.dtype).itemsize

  @property
  def units(self) -> int:
    """Of a thread."""
    return self.width // (self.per_unit * self.threads)

  @property
  def row_bytes(self) -> int:
    return self.width * jnp.dtype(self.dtype).itemsize

  @property
  def resident(self) -> bool:
    """Whether the rows of a token, and some of the next, fit."""
    return self.count + self.extra + 3 <= self.slots

  @property
  def scratch_words(self) -> int:
    """Of the sums that warps exchange, for two tokens."""
    return 2 * self._scratch_of_token

  @property
  def _scratch_of_token(self) -> int:
    return 2 * self.warps * LANES


class Block(NamedTuple):
  """What a thread of a block works with."""

  plan: Plan
  ring: Ring
  scratch: Word
  thread: Word
  lane: Word
  warp: Word
  live: Word  # sources that are not masked
  source: Word  # index of this lane's source

  @property
  def own_source(self) -> ir.Value:
    """Whether this lane's source is not masked."""
    return warp.compare(self.lane, 'slt', self.live)

  def sums_at(self, n: Word) -> Word:
    """Address of the sums of the n-th token."""
    of_token = 4 * self.plan.scratch_words // 2
    return warp.add(self.scratch, warp.times(warp.bit_and(n, 1), of_token))

  def unit_offset(self, unit: int) -> Word:
    """Bytes from the start of a row to this thread's unit."""
    index = warp.add(self.thread, unit * self.plan.threads)
    return warp.times(index, UNIT_BYTES)


class Arrays(NamedTuple):
  """A [M, T, D] stack and perhaps a last [T, D] apart from it, by address."""

  stack: ir.Value
  last: ir.Value | None

  def row(self, plan: Plan, source: Word, token: Word) -> ir.Value:
    """Address of a row."""
    index = warp.add(warp.times(source, plan.tokens), token)
    address = ring_code.row_address(self.stack, index, plan.row_bytes)
    if self.last is None:
      return address
    other = ring_code.row_address(self.last, token, plan.row_bytes)
    is_last = warp.compare(source, 'eq', plan.finished)
    return warp.where(is_last, other, address)


def _values(plan: Plan, words) -> list[Real]:
  if plan.dtype == 'float32':
    return [ring_code.as_real(w) for w in words]
  return [x for w in words for x in warp.unpack(w)]


def _words(plan: Plan, values) -> list[Word]:
  if plan.dtype == 'float32':
    return [ring_code.as_word(x) for x in values]
  return [warp.pack(a, b) for a, b in zip(values[::2], values[1::2])]


def _load(block: Block, place: Place) -> list[Real]:
  """This thread's columns of a row in the ring."""
  plan, row = block.plan, block.ring.row(place)
  words = []
  for unit in range(plan.units):
    address = warp.add(row, block.unit_offset(unit))
    words += warp.load(address, 0, 4)
  return _values(plan, words)


def _store(block: Block, row: ir.Value, values):
  """This thread's columns of a row in global memory."""
  plan = block.plan
  for unit in range(plan.units):
    part = values[unit * plan.per_unit : (unit + 1) * plan.per_unit]
    address = warp.advance(row, block.unit_offset(unit))
    ring_code.store_once(address, 0, _words(plan, part))


def _float_offset(block: Block, unit: int) -> Word:
  """Bytes to this thread's unit in a row of float32."""
  scale = 4 * block.plan.per_unit // UNIT_BYTES
  return warp.times(block.unit_offset(unit), scale)


def _vector(block: Block, base: ir.Value) -> list[Real]:
  """This thread's columns of a float32 [D]."""
  values = []
  for unit in range(block.plan.units):
    address = warp.advance(base, _float_offset(block, unit))
    for i in range(0, block.plan.per_unit, 4):
      values += warp.load_global(address, 4 * i, 4)
  return values


def _dot(a, b) -> Real:
  """Products of two lists of columns, summed in a few chains."""
  sums = [Real(0.0)] * _CHAINS
  for i, (x, y) in enumerate(zip(a, b)):
    sums[i % _CHAINS] = warp.fma(x, y, sums[i % _CHAINS])
  return (sums[0] + sums[1]) + (sums[2] + sums[3])


def _over_tokens(block: Block, values, body: Callable):
  """`values = body(n, token, values)` for the tokens of this block."""
  plan, number = block.plan, ring_code.block()
  rest = warp.add(warp.times(number, -1), plan.tokens + plan.blocks - 1)
  count = warp.quotient(rest, plan.blocks)

  def step(n, values):
    token = warp.add(number, warp.times(n, plan.blocks))
    return body(n, token, values)

  return ring_code.iterate(0, count, values, step)


def produce(block: Block, order: ir.Value, rows: Arrays, extra):
  """Fetches the rows in the order in which they are consumed; one lane.

  Args:
    order: address of the sources' indices, those that are not masked first.
    rows: of the sources.
    extra: addresses of [T, D] arrays whose row comes before the sources.
  """
  plan, ring = block.plan, block.ring

  def token_rows(_, token, at):
    for base in extra:
      source = ring_code.row_address(base, token, plan.row_bytes)
      ring.fetch(Place(*at), source)
      at = list(ring.after(Place(*at)))

    def one(j, at):
      address = warp.advance(order, warp.shift_left(j, 2))
      (source,) = warp.load_global_words(address, 0, 1)
      ring.fetch(Place(*at), rows.row(plan, source, token))
      return list(ring.after(Place(*at)))

    for _ in range(1 if plan.resident else 2):
      at = ring_code.iterate(0, block.live, at, one)
    return at

  _over_tokens(block, [warp.word(0), warp.word(0)], token_rows)


def _pass(block: Block, place: Place, values, body: Callable, *, first: bool):
  """`values = body(j, columns, values)` over the sources of a token.

  Returns:
    (the place after them, values).
  """
  ring, lane = block.ring, block.lane
  waits = first or not block.plan.resident
  releases = not first or not block.plan.resident

  def one(j, carry):
    at = Place(*carry[:2])
    if waits:
      ring.wait(at)
    values = body(j, _load(block, at), carry[2:])
    if releases:
      ring.release(at, lane)
    return [*ring.after(at), *values]

  slot, parity, *values = ring_code.iterate(
    0, block.live, [*place, *values], one
  )
  return Place(slot, parity), values


def _second_place(block: Block, first: Place, after: Place) -> Place:
  """Where the second pass over a token's rows begins."""
  return first if block.plan.resident else after


def _keep_sum(block: Block, n: Word, j: Word, x: Real, parts: int):
  """Writes a warp's sums of a source; with 2 parts, lanes 0 and 16 do."""
  index = warp.add(warp.times(j, block.plan.warps), block.warp)
  index = warp.times(index, parts)
  if parts == 2:
    index = warp.add(index, warp.shift_right(block.lane, 4))
  writes = warp.compare(warp.bit_and(block.lane, 32 // parts - 1), 'eq', 0)
  address = warp.add(block.sums_at(n), warp.shift_left(index, 2))
  warp.store(address, 0, [x], predicate=writes)


def _total_sums(block: Block, n: Word, parts: int) -> list[Real]:
  """The sums of lane j's source over the warps; junk in masked lanes."""
  stride = 4 * parts * block.plan.warps
  address = warp.add(block.sums_at(n), warp.times(block.lane, stride))
  totals = [Real(0.0)] * parts
  for i in range(block.plan.warps):
    loaded = warp.load_real(address, 4 * parts * i, parts)
    totals = [total + x for total, x in zip(totals, loaded)]
  return totals


def _scores(block: Block, n: Word, eps: float):
  """(rstd, logit, weight) of lane j's source."""
  square, product = _total_sums(block, n, 2)
  own = block.own_source
  square = warp.where(own, square, 0.0)
  rstd = warp.rsqrt(warp.fma(square, 1.0 / block.plan.width, eps))
  logit = warp.where(own, product * rstd, _LOWEST)
  top = ring_code.over_lanes(ring_code.maximum, logit)
  term = warp.exp2((logit - top) * _LOG2_E)
  term = warp.where(own, term, 0.0)
  total = ring_code.over_lanes(Real.__add__, term)
  # Without any source the total is 0 and the weights are zero times 2.
  total = ring_code.maximum(total, Real(0.5))
  return rstd, warp.where(own, logit, 0.0), term * warp.reciprocal(total)


def _lane_address(block: Block, base: ir.Value, token: Word) -> ir.Value:
  """Of lane j's source in a float32 [M, T]."""
  index = warp.add(warp.times(block.source, block.plan.tokens), token)
  return ring_code.row_address(base, index, 4)


def forward(block: Block, w: ir.Value, written: dict):
  """The mix of this block's tokens, by the consuming warps.

  Args:
    w: address of query * gain, float32 [D].
    written: addresses of out [T, D]; rstd, logits, weights [M, T] float32.
  """
  plan, w_d = block.plan, _vector(block, w)

  def token_mix(n, token, at):
    first = Place(*at)

    def score(j, x_d, _):
      pair = _dot(x_d, x_d), _dot(x_d, w_d)
      sums = ring_code.sums_of_two(*pair, block.lane)
      _keep_sum(block, n, j, sums, 2)
      return []

    after, _ = _pass(block, first, [], score, first=True)
    ring_code.wait_for_readers(plan.threads)
    rstd, logit, weight = _scores(block, n, plan.eps)
    _store_scalars(block, token, written, (rstd, logit, weight))

    def add(j, x_d, out_d):
      p = ring_code.from_lane(weight, j)
      return [warp.fma(p, x, out) for x, out in zip(x_d, out_d)]

    zeros = warp.zeros(plan.units * plan.per_unit)
    second = _second_place(block, first, after)
    after, out_d = _pass(block, second, zeros, add, first=False)
    row = ring_code.row_address(written['out'], token, plan.row_bytes)
    _store(block, row, out_d)
    return list(after)

  _over_tokens(block, [warp.word(0), warp.word(0)], token_mix)


def _store_scalars(block: Block, token: Word, written: dict, scalars):
  exists = warp.compare(block.lane, 'slt', block.plan.count)
  writes = warp.both(warp.compare(block.warp, 'eq', 0), exists)
  for name, x in zip(('rstd', 'logits', 'weights'), scalars):
    address = _lane_address(block, written[name], token)
    warp.store_global(address, 0, [x], predicate=writes)


def _load_scalars(block: Block, token: Word, read: dict) -> dict:
  """rstd, logits, weights and d_weights of lane j's source, 0 if masked."""
  own, scalars = block.own_source, {}
  for name in ('rstd', 'logits', 'weights', 'd_weights'):
    address = _lane_address(block, read[name], token)
    (x,) = warp.load_global_words(address, 0, 1)
    scalars[name] = warp.where(own, ring_code.as_real(x), 0.0)
  return scalars


def _slopes(block: Block, n: Word, scalars: dict):
  """(slope, pull) of lane j's source: what w and the row are scaled by."""
  (product,) = _total_sums(block, n, 1)
  d_weight = warp.where(block.own_source, product, 0.0) + scalars['d_weights']
  weight, rstd = scalars['weights'], scalars['rstd']
  mean = ring_code.over_lanes(Real.__add__, weight * d_weight)
  slope = weight * (d_weight - mean) * rstd
  pull = slope * rstd * scalars['logits'] * (1.0 / block.plan.width)
  return slope, pull


def backward(block: Block, read: dict, d_rows: Arrays, d_w: ir.Value):
  """Gradients of this block's tokens, by the consuming warps.

      dx_j = p_j do + slope_j w - pull_j x_j        dw += slope_j x_j

  Args:
    read: addresses of w [D] and of rstd, logits, weights and d_weights [M, T],
      all float32.
    d_rows: where the sources' gradients go.
    d_w: address of this launch's [blocks, D] float32 shares of dw.
  """
  plan, w_d = block.plan, _vector(block, read['w'])
  columns = plan.units * plan.per_unit

  def token_gradient(n, token, carry):
    place, dw_d = Place(*carry[:2]), carry[2:]
    scalars = _load_scalars(block, token, read)
    block.ring.wait(place)
    do_d = _load(block, place)
    block.ring.release(place, block.lane)
    first = block.ring.after(place)

    def product(j, x_d, _):
      sums = ring_code.over_lanes(Real.__add__, _dot(x_d, do_d))
      _keep_sum(block, n, j, sums, 1)
      return []

    after, _ = _pass(block, first, [], product, first=True)
    ring_code.wait_for_readers(plan.threads)
    slope, pull = _slopes(block, n, scalars)

    def gradient(j, x_d, dw_d):
      p, s, minus = (
        ring_code.from_lane(x, j) for x in (scalars['weights'], slope, -pull)
      )
      source = ring_code.word_from_lane(block.source, j)
      dx_d = [
        warp.fma(p, do, warp.fma(s, w, minus * x))
        for do, w, x in zip(do_d, w_d, x_d)
      ]
      _store(block, d_rows.row(plan, source, token), dx_d)
      return [warp.fma(s, x, dw) for x, dw in zip(x_d, dw_d)]

    second = _second_place(block, first, after)
    after, dw_d = _pass(block, second, dw_d, gradient, first=False)

    def nothing(j, _):
      source = ring_code.word_from_lane(block.source, j)
      _store(block, d_rows.row(plan, source, token), warp.zeros(columns))
      return []

    ring_code.iterate(block.live, warp.word(plan.count), [], nothing)
    return [*after, *dw_d]

  start = [warp.word(0), warp.word(0), *warp.zeros(columns)]
  dw_d = _over_tokens(block, start, token_gradient)[2:]
  row = ring_code.row_address(d_w, ring_code.block(), 4 * plan.width)
  for unit in range(plan.units):
    address = warp.advance(row, _float_offset(block, unit))
    for i in range(0, plan.per_unit, 4):
      start = unit * plan.per_unit + i
      warp.store_global(address, 4 * i, dw_d[start : start + 4])


def run(plan: Plan, pointers: dict, shared, consume: Callable, produced):
  """A thread block: `consume(block)` and the producing lane.

  Args:
    pointers: addresses of order, int32 [M], and live, int32 [1].
    shared: addresses of the rows, the barriers and the scratch.
    produced: (rows of the sources, addresses of extra arrays).
  """
  rows, barriers, scratch = shared
  thread = utils.thread_idx()
  lane = warp.bit_and(thread, LANES - 1)
  index = utils.warp_idx()
  ring = Ring(rows, barriers, plan.slots, plan.row_bytes)
  (live,) = warp.load_global_words(pointers['live'], 0, 1)
  exists = warp.compare(lane, 'slt', plan.count)
  at = warp.where(exists, lane, warp.word(0))
  address = warp.advance(pointers['order'], warp.shift_left(at, 2))
  (source,) = warp.load_global_words(address, 0, 1)
  block = Block(plan, ring, scratch, thread, lane, index, live, source)
  warp.only_if(warp.compare(thread, 'eq', 0), lambda: ring.start(plan.warps))
  ring_code.wait_for_block()
  sources, extra = produced

  def copy():
    is_first = warp.compare(thread, 'eq', plan.threads)
    warp.only_if(
      is_first, lambda: produce(block, pointers['order'], sources, extra)
    )

  consuming = warp.compare(index, 'slt', plan.warps)
  warp.either(consuming, lambda: consume(block), copy)
