"""Products inside a chunk for the gradient kernel: warps own sub-blocks.

A [64, 64] product of a warpgroup leaves warp w the 16 rows of sub-block w,
eight columns in four registers, which is also how `mma.sync` accumulates. The
gradients of the pairs (query or key, earlier key) are so added to the products
with the states, 16 x 16 blocks at a time: as rows of sub-block I they meet the
keys of each J <= I, as columns of J the queries and keys of each I >= J.
`mosaic_gpu_gradient` has the formulas.
"""

from __future__ import annotations

from jax.experimental.mosaic.gpu import utils

from pallas_kernels.kda import mosaic_gpu_gradient_place as at
from pallas_kernels.kda import mosaic_gpu_warp as warp
from pallas_kernels.kda.mosaic_gpu_gradient_place import Seat, Shared
from pallas_kernels.kda.mosaic_gpu_place import (
  BLOCKS,
  CHUNK,
  ENTERS,
  HALF,
  LEAVES,
  SEGMENT,
  WIDTH,
)

_BOTH_SIGNS = -0x7FFF8000  # the sign bits of both numbers of a word


def _rows(seat: Seat) -> warp.Word:
  """The first of this lane's two tokens; the other is 8 later."""
  return warp.add(warp.shift_left(seat.block, 4), seat.row)


def _flags(shared: Shared, tokens: warp.Word) -> list[warp.Word]:
  address = shared.of_token(at.FLAGS, tokens)
  return [warp.load(address, 32 * i, 1)[0] for i in range(2)]


def _same_document(seat: Seat, shared: Shared, block: int):
  """For the 8 entries a lane holds of a block: are both of one document?"""
  document = lambda w: warp.shift_right(w, SEGMENT)
  rows = [document(w) for w in _flags(shared, _rows(seat))]
  address = shared.of_token(at.FLAGS + 16 * block, seat.column)
  columns = [
    [document(w) for w in warp.load(address, 32 * n, 2)] for n in range(2)
  ]
  return [
    warp.compare(rows[i], 'eq', columns[n][e])
    for n in range(2)
    for i in range(2)
    for e in range(2)
  ]


def store_pairs(seat: Seat, shared: Shared, product):
  """Stores dP, by role 0, or dM, by role 1: [8][4] of dO U^T or dV U^T."""
  second = warp.compare(seat.role, 'ne', 0)
  tile = shared.own(seat, at.PAIRS)
  sign = warp.where(second, warp.word(_BOTH_SIGNS), warp.word(0))
  for block in range(BLOCKS):

    def write(block=block):
      values = [x for n in product[2 * block : 2 * block + 2] for x in n]
      if shared.masked:
        same = _same_document(seat, shared, block)
        values = [warp.where(s, x, 0.0) for s, x in zip(same, values)]
      below = warp.compare(seat.block, 'sgt', block)
      for i, x in enumerate(values):
        column = warp.add(seat.column, i % 2 + 8 * (i // 4))
        row = warp.add(seat.row, 8 * (i // 2 % 2))
        # dP has its diagonal, dM has none.
        row = warp.add(row, warp.where(second, warp.word(-1), warp.word(0)))
        causal = warp.compare(row, 'sge', column)
        x = warp.where(causal, x, 0.0)
        values[i] = warp.where(below, values[i], x)
      words = [warp.pack(*values[2 * i : 2 * i + 2]) for i in range(4)]
      words = [warp.xor(w, sign) for w in words]
      warp.store_block(seat.left(tile, seat.block, block), 0, words)

    warp.only_if(warp.compare(seat.block, 'sge', block), write)


def _own_block(seat: Seat, product):
  """The two column halves of this warp's diagonal block of [8][4]."""
  near, far = product[0], product[1]
  for m in range(1, BLOCKS):
    here = warp.compare(seat.block, 'eq', m)
    both = zip(product[2 * m : 2 * m + 2], (near, far))
    near, far = (
      [warp.where(here, x, y) for x, y in zip(*columns)] for columns in both
    )
  return near, far


def write_beta_gradient(seat: Seat, shared: Shared, product, ref):
  """From role 1's dV U^T: the diagonal over beta squared."""
  mine, elements = at.on_diagonal(seat)
  mine = warp.both(mine, warp.compare(seat.role, 'ne', 0))
  rows = _rows(seat)
  address = warp.advance(warp.global_address(ref), warp.shift_left(rows, 2))
  betas = shared.of_token(at.BETA, rows)
  for half, x in enumerate(elements(*_own_block(seat, product))):
    (bits,) = warp.load(betas, 32 * half, 1)
    (beta,) = warp.load_real(betas, 32 * half, 1)
    inverse = warp.reciprocal(beta)
    some = warp.compare(warp.bit_and(bits, 0x7FFFFFFF), 'ne', 0)
    x = warp.where(some, x * inverse * inverse, 0.0)
    warp.store_global(address, 32 * half, [x], predicate=mine)


def store_through(seat: Seat, shared: Shared):
  """gamma rowsum(S o dS) of this warp's 16 channels of its role's half."""
  near, far = warp.zeros(4), warp.zeros(4)
  for half in range(2):
    state, d_state = (
      shared.own(seat, first + 2 * half) for first in (at.STATE, at.D_STATE)
    )
    for b in range(BLOCKS):
      block = warp.word(b)
      left = warp.load_block(
        seat.right(state, block, seat.block), transposed=True
      )
      right = warp.load_block(
        seat.left(d_state, block, seat.block), transposed=True
      )
      near = warp.multiply(near, left, right[:2])
      far = warp.multiply(far, left, right[2:])
  mine, elements = at.on_diagonal(seat)
  channel = warp.add(warp.shift_left(seat.role, 6), _rows(seat))
  totals = shared.vector(at.TOTALS, channel)
  stays = None
  if shared.masked:
    (last,) = warp.load(shared.of_token(at.FLAGS + CHUNK - 1), 0, 1)
    stays = warp.compare(warp.bit_and(last, 1 << ENTERS), 'ne', 0)
  for half, x in enumerate(elements(near, far)):
    exponent = warp.Real(0.0)
    for m in range(BLOCKS):
      (total,) = warp.load_real(totals, 4 * WIDTH * m + 32 * half, 1)
      exponent = exponent + total
    x = x * warp.exp2(exponent)
    if stays is not None:
      x = warp.where(stays, x, 0.0)
    address = shared.vector(at.THROUGH, channel)
    warp.store(address, 32 * half, [x], predicate=mine)


def _scaled(seat: Seat, shared: Shared, product, how):
  """[8][4] times the factor of its channels, 0 in tokens without the bit."""
  offset, bit, negative = how
  place = warp.add(warp.times(seat.block, WIDTH), seat.column)
  place = warp.add(place, warp.shift_left(seat.role, 6))
  address = shared.vector(offset, place)
  kept = None
  if shared.masked:
    flags = _flags(shared, _rows(seat))
    kept = [warp.compare(warp.bit_and(f, 1 << bit), 'ne', 0) for f in flags]
  result = []
  for n, values in enumerate(product):
    factor = warp.load_real(address, 32 * n, 2)
    factor = [-x for x in factor] if negative else factor
    values = [x * factor[i % 2] for i, x in enumerate(values)]
    if kept is not None:
      values = [warp.where(kept[i // 2], x, 0.0) for i, x in enumerate(values)]
    result.append(values)
  return result


def scale_products(seat: Seat, shared: Shared, products):
  """The parts of YQ, YK and ZK that come from the states.

  From dO S, dV S and U dS, [8][4] each, at the references of the scaled
  operands.
  """
  into, past = (at.ENTERING, ENTERS, False), (at.LEAVING, LEAVES, False)
  minus = at.ENTERING, ENTERS, True
  how = into, minus, past
  return [_scaled(seat, shared, p, h) for p, h in zip(products, how)]


def _moves(seat: Seat, shared: Shared, later, earlier):
  """Address of factors from sub-block `earlier` to `later`, by lane's row."""
  row = warp.product(later, warp.add(later, -1))
  row = warp.add(warp.times(row, WIDTH // 2), warp.times(earlier, WIDTH))
  channel = warp.add(warp.shift_left(seat.role, 6), seat.row)
  return shared.vector(at.MOVES, warp.add(row, channel))


def _right(seat: Seat, tile, block, s: int, moves):
  """16 tokens by 16 channels as the right operand, moved if `moves`."""
  words = warp.load_block(seat.left(tile, block, s), transposed=True)
  if moves is None:
    return words
  factors = [warp.load(moves, 64 * s + 32 * n, 1)[0] for n in range(2)]
  both = [factors[0], factors[0], factors[1], factors[1]]
  return warp.pair_products(words, both)


def _accumulate(acc, left, right, s: int):
  """Adds a product to columns 16 s .. 16 s + 15 of [8][4]."""
  for n in range(2):
    pair = right[2 * n : 2 * n + 2]
    acc[2 * s + n] = warp.multiply(acc[2 * s + n], left, pair)


def _flat(sums) -> list[warp.Real]:
  return [x for acc in sums for values in acc for x in values]


def _nested(values, count: int):
  rows = [list(values[i : i + 4]) for i in range(0, len(values), 4)]
  return [rows[8 * i : 8 * i + 8] for i in range(count)]


def _if_inside(condition, sums, body):
  """`body(sums)` where the condition holds; sums are lists of [8][4]."""
  changed = lambda values: _flat(body(_nested(values, len(sums))))
  return _nested(at.update_if(condition, _flat(sums), changed), len(sums))


def add_rows(seat: Seat, shared: Shared, sums):
  """YQ and YK: adds dP and dM times inversely scaled keys."""
  pairs = [shared.tile(at.PAIRS + i) for i in range(2)]
  keys = shared.own(seat, at.INVERSE)

  def add(sums, distance: int):
    block = warp.add(seat.block, -distance)
    moves = _moves(seat, shared, seat.block, block) if distance else None
    left = [warp.load_block(seat.left(p, seat.block, block)) for p in pairs]
    for s in range(4):
      right = _right(seat, keys, block, s, moves)
      for acc, a in zip(sums, left):
        _accumulate(acc, a, right, s)
    return sums

  sums = add(sums, 0)
  for distance in range(1, BLOCKS):
    inside = warp.compare(seat.block, 'sge', distance)
    body = lambda sums, distance=distance: add(sums, distance)
    sums = _if_inside(inside, sums, body)
  return sums


def column_sums(seat: Seat, shared: Shared):
  """ZA: dP^T times scaled queries plus dM^T times scaled keys."""
  pairs = [shared.tile(at.PAIRS + i) for i in range(2)]
  tiles = [shared.own(seat, name) for name in (at.QUERY, at.KEY)]

  def add(sums, distance: int):
    block = warp.add(seat.block, distance)
    moves = _moves(seat, shared, block, seat.block) if distance else None
    for pair, tile in zip(pairs, tiles):
      address = seat.right(pair, block, seat.block)
      left = warp.load_block(address, transposed=True)
      for s in range(4):
        right = _right(seat, tile, block, s, moves)
        _accumulate(sums[0], left, right, s)
    return sums

  sums = add([[warp.zeros(4) for _ in range(8)]], 0)
  for distance in range(1, BLOCKS):
    inside = warp.compare(seat.block, 'slt', BLOCKS - distance)
    body = lambda sums, distance=distance: add(sums, distance)
    sums = _if_inside(inside, sums, body)
  return sums[0]


def store_dots(seat: Seat, shared: Shared, products):
  """Sums over this role's channels of q YQ, and of k YK + X (ZA + ZD)."""
  y_q, y_k, near, far = products
  column = [[a + b for a, b in zip(*pair)] for pair in zip(near, far)]
  terms = ((at.QUERY, y_q),), ((at.KEY, y_k), (at.INVERSE, column))
  mine, elements = at.on_diagonal(seat)
  for i, sums in enumerate(terms):
    first, second = warp.zeros(4), warp.zeros(4)
    for name, values in sums:
      tile = shared.own(seat, name)
      for s in range(4):
        left = warp.load_block(seat.left(tile, seat.block, s))
        a, b = values[2 * s : 2 * s + 2]
        above = [warp.pack(*a[:2]), warp.pack(*b[:2])]
        below = [warp.pack(*a[2:]), warp.pack(*b[2:])]
        first = warp.multiply(first, left, above)
        second = warp.multiply(second, left, below)
    index = warp.add(warp.shift_left(seat.role, 7), _rows(seat))
    address = shared.vector(at.DOTS + CHUNK * i, index)
    for half, x in enumerate(elements(first, second)):
      warp.store(address, 32 * half, [x], predicate=mine)


def to_rows(seat: Seat, shared: Shared, product):
  """[8][4] of a product as 16 tokens of this lane's 2 channels.

  Through 4 KB of shared memory of this warp: rows of 256 bytes, whose 32-byte
  pieces are permuted so that neither side meets a bank twice.
  """
  warps = warp.add(warp.shift_left(seat.role, 2), seat.block)
  stage = warp.add(shared.tile(at.STAGE), warp.times(warps, HALF // 2))
  corner = warp.add(
    warp.shift_left(seat.row, 8), warp.shift_left(seat.column, 2)
  )
  corner = warp.add(stage, warp.add(corner, warp.shift_left(seat.row, 5)))
  utils.warp_barrier()
  for n, values in enumerate(product):
    address = warp.xor(corner, n << 5)
    for half in range(2):
      pair = values[2 * half : 2 * half + 2]
      warp.store(address, 2048 * half, pair)
  utils.warp_barrier()
  start = warp.add(stage, warp.shift_left(seat.lane, 3))
  return [
    warp.load_real(warp.xor(start, (j & 7) << 5), 256 * j, 2) for j in range(16)
  ]
