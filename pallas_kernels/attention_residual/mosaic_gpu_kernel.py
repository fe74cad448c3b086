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
    passes: over the rows of a token.
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
  passes: int

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
  def token_words(self) -> int:
    """Of the sums that warps exchange: two a source, and one more.

    An even number, since two are read at once.
    """
    return 2 * (LANES + 1) * self.warps

  @property
  def scratch_words(self) -> int:
    """For two tokens."""
    return 2 * self.token_words


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
    of_token = warp.times(warp.bit_and(n, 1), 4 * self.plan.token_words)
    return warp.add(self.scratch, of_token)

  def total_at(self, n: Word) -> Word:
    """Address of the warps' parts of one more sum."""
    return warp.add(self.sums_at(n), 4 * 2 * LANES * self.plan.warps)

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


def _rounded(plan: Plan, values) -> list[Real]:
  """The values in the dtype of the sources."""
  return _values(plan, _words(plan, values))


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

    for _ in range(1 if plan.resident else plan.passes):
      at = ring_code.iterate(0, block.live, at, one)
    return at

  _over_tokens(block, [warp.word(0), warp.word(0)], token_rows)


def _pass(block: Block, place: Place, index: int, values, body: Callable):
  """`values = body(j, columns, values)` over the sources of a token.

  Args:
    place: where the first row is.
    index: of the pass. Resident rows are waited for in the first pass and
      released in the last.

  Returns:
    (where the first row of the next pass or token is, values).
  """
  ring, plan = block.ring, block.plan
  waits = index == 0 or not plan.resident
  last = index == plan.passes - 1
  releases = last or not plan.resident

  def one(j, carry):
    at = Place(*carry[:2])
    if waits:
      ring.wait(at)
    values = body(j, _load(block, at), carry[2:])
    if releases:
      ring.release(at, block.lane)
    return [*ring.after(at), *values]

  slot, parity, *values = ring_code.iterate(
    0, block.live, [*place, *values], one
  )
  after = Place(slot, parity)
  return place if plan.resident and not last else after, values


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


def _sum_of_block(block: Block, n: Word, x: Real) -> Real:
  """x summed over the consuming threads; once a token."""
  x = ring_code.over_lanes(Real.__add__, x)
  base = block.total_at(n)
  first = warp.compare(block.lane, 'eq', 0)
  address = warp.add(base, warp.shift_left(block.warp, 2))
  warp.store(address, 0, [x], predicate=first)
  ring_code.wait_for_readers(block.plan.threads)
  total = Real(0.0)
  for i in range(block.plan.warps):
    (part,) = warp.load_real(base, 4 * i, 1)
    total = total + part
  return total


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


def _mixture(block: Block, place: Place, index: int, weight: Real):
  """(place after it, this thread's columns of the mixture) by a pass."""

  def add(j, x_d, out_d):
    p = ring_code.from_lane(weight, j)
    return [warp.fma(p, x, out) for x, out in zip(x_d, out_d)]

  zeros = warp.zeros(block.plan.units * block.plan.per_unit)
  return _pass(block, place, index, zeros, add)


def forward(block: Block, read: dict, written: dict):
  """The mix of this block's tokens, by the consuming warps.

  Args:
    read: addresses of w, query * gain, and norm_gain if the mixture is to be
      normalized; float32 [D].
    written: addresses of out [T, D]; rstd, logits, weights [M, T] float32;
      scale [T], the reciprocal RMS of the mixture, if it is normalized.
  """
  plan, w_d = block.plan, _vector(block, read['w'])
  if 'norm_gain' in read:
    norm_d = _vector(block, read['norm_gain'])

  def token_mix(n, token, at):
    def score(j, x_d, _):
      pair = _dot(x_d, x_d), _dot(x_d, w_d)
      sums = ring_code.sums_of_two(*pair, block.lane)
      _keep_sum(block, n, j, sums, 2)
      return []

    place, _ = _pass(block, Place(*at), 0, [], score)
    ring_code.wait_for_readers(plan.threads)
    rstd, logit, weight = _scores(block, n, plan.eps)
    _store_scalars(block, token, written, (rstd, logit, weight))
    place, out_d = _mixture(block, place, 1, weight)
    if 'norm_gain' in read:
      out_d = _rounded(plan, out_d)
      square = _sum_of_block(block, n, _dot(out_d, out_d))
      scale = warp.rsqrt(warp.fma(square, 1.0 / plan.width, plan.eps))
      _store_scale(block, written['scale'], token, scale)
      out_d = _rounded(plan, [x * scale for x in out_d])
      out_d = [x * g for x, g in zip(out_d, norm_d)]
    row = ring_code.row_address(written['out'], token, plan.row_bytes)
    _store(block, row, out_d)
    return list(place)

  _over_tokens(block, [warp.word(0), warp.word(0)], token_mix)


def _store_scale(block: Block, base: ir.Value, token: Word, scale: Real):
  is_first = warp.compare(block.thread, 'eq', 0)
  address = ring_code.row_address(base, token, 4)
  warp.store_global(address, 0, [scale], predicate=is_first)


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


def _through_norm(block: Block, at, read: dict, rows):
  """(gradient of the mixture, that of norm_gain by this token).

  With h the mixture, r its reciprocal RMS and dn = do norm_gain:

      dh = r dn - r^3 h <dn, h> / D

  Args:
    at: (number of the token in this block, token).
    rows: columns of the cotangent and of the mixture.
  """
  plan, (n, token), (do_d, h_d) = block.plan, at, rows
  norm_d = _vector(block, read['norm_gain'])
  address = ring_code.row_address(read['scale'], token, 4)
  (scale,) = warp.load_global_words(address, 0, 1)
  scale = ring_code.as_real(scale)
  dn_d = [do * g for do, g in zip(do_d, norm_d)]
  product = _sum_of_block(block, n, _dot(dn_d, h_d))
  pull = scale * scale * scale * product * (-1.0 / plan.width)
  dh_d = [warp.fma(pull, h, scale * dn) for h, dn in zip(h_d, dn_d)]
  n_d = _rounded(plan, [h * scale for h in h_d])
  return dh_d, [do * x for do, x in zip(do_d, n_d)]


def backward(block: Block, read: dict, d_rows: Arrays, written: dict):
  """Gradients of this block's tokens, by the consuming warps.

      dx_j = p_j do + slope_j w - pull_j x_j        dw += slope_j x_j

  with the gradient of the mixture in the place of do where it is normalized.

  Args:
    read: addresses of w [D] and of rstd, logits, weights and d_weights [M, T],
      and if the mixture is normalized of norm_gain [D] and scale [T], all
      float32.
    d_rows: where the sources' gradients go.
    written: addresses of this launch's [blocks, D] float32 shares of the
      gradients of w, d_w, and of norm_gain, d_norm_gain.
  """
  plan, w_d = block.plan, _vector(block, read['w'])
  normalized = 'norm_gain' in read
  columns = plan.units * plan.per_unit

  def token_gradient(n, token, carry):
    place, sums = Place(*carry[:2]), carry[2:]
    dw_d, dg_d = sums[:columns], sums[columns:]
    scalars = _load_scalars(block, token, read)
    block.ring.wait(place)
    do_d = _load(block, place)
    block.ring.release(place, block.lane)
    place = block.ring.after(place)
    if normalized:
      place, h_d = _mixture(block, place, 0, scalars['weights'])
      rows = do_d, _rounded(plan, h_d)
      do_d, more_d = _through_norm(block, (n, token), read, rows)
      dg_d = [dg + x for dg, x in zip(dg_d, more_d)]

    def product(j, x_d, _):
      sums = ring_code.over_lanes(Real.__add__, _dot(x_d, do_d))
      _keep_sum(block, n, j, sums, 1)
      return []

    place, _ = _pass(block, place, plan.passes - 2, [], product)
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

    place, dw_d = _pass(block, place, plan.passes - 1, dw_d, gradient)
    _store_zeros(block, token, d_rows)
    return [*place, *dw_d, *dg_d]

  start = warp.zeros(columns * (1 + normalized))
  start = [warp.word(0), warp.word(0), *start]
  sums = _over_tokens(block, start, token_gradient)[2:]
  _store_share(block, written['d_w'], sums[:columns])
  if normalized:
    _store_share(block, written['d_norm_gain'], sums[columns:])


def _store_zeros(block: Block, token: Word, d_rows: Arrays):
  """Gradients of the masked sources."""
  plan = block.plan

  def nothing(j, _):
    source = ring_code.word_from_lane(block.source, j)
    zeros = warp.zeros(plan.units * plan.per_unit)
    _store(block, d_rows.row(plan, source, token), zeros)
    return []

  ring_code.iterate(block.live, warp.word(plan.count), [], nothing)


def _store_share(block: Block, base: ir.Value, values):
  """This thread's columns of this block's float32 row."""
  plan = block.plan
  row = ring_code.row_address(base, ring_code.block(), 4 * plan.width)
  for unit in range(plan.units):
    address = warp.advance(row, _float_offset(block, unit))
    for i in range(0, plan.per_unit, 4):
      start = unit * plan.per_unit + i
      warp.store_global(address, 4 * i, values[start : start + 4])


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
