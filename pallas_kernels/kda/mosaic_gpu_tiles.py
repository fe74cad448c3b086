"""The tiles P and A of a chunk of Kimi Delta Attention, and the inverse T.

All products are of 16 x 16 blocks inside one warp, which owns 16 rows of the
result; blocks of its rows are numbered by their distance from the diagonal.
`mosaic_gpu_prep` says what the tiles are.
"""

from __future__ import annotations

from jax.experimental.mosaic.gpu import utils

from pallas_kernels.kda import mosaic_gpu_warp as warp
from pallas_kernels.kda.mosaic_gpu_place import (
  BLOCKS,
  HALF,
  SEGMENT,
  WIDTH,
  Place,
  Tiles,
  column,
)


def _factor_address(place: Place, tiles: Tiles) -> warp.Word:
  """Where this warp keeps its factors: warp w has w of them, in `totals`."""
  first = warp.product(place.block, warp.add(place.block, -1))
  return warp.add(tiles.totals, warp.shift_left(first, 7))


def share_factors(place: Place, tiles: Tiles, earlier):
  """Stores factors for `_inverse_keys`: words of 4 channels, by distance."""
  address = _factor_address(place, tiles)
  address = warp.add(address, warp.shift_left(place.lane, 3))
  for i, words in enumerate(earlier):
    exists = warp.compare(place.block, 'sgt', i)
    warp.store(address, i * 2 * WIDTH, words, predicate=exists)
  utils.warp_barrier()


def _gram(place: Place, tiles: Tiles, right) -> list[warp.Real]:
  """[16, 16] products of own queries and keys; right(s) loads 16 channels."""
  acc = [warp.zeros(4) for _ in range(4)]
  for s in range(8):
    b = right(s)
    for i, tile in enumerate((tiles.query, tiles.key)):
      # Loading again for every block costs less than 64 registers throughout.
      address = place.left(tile, place.block, s % 4)
      left = warp.load_block(address, s // 4 * HALF)
      for n in range(2):
        pair = b[2 * n : 2 * n + 2]
        acc[2 * i + n] = warp.multiply(acc[2 * i + n], left, pair)
  return [x for a in acc for x in a]


def _inverse_keys(place: Place, tiles: Tiles, distance: int):
  """A function that loads 16 channels of the keys `distance` blocks back.

  They come scaled for this warp's reference instead of their own.
  """
  block = warp.add(place.block, -distance)
  factor = _factor_address(place, tiles)
  factor = warp.add(factor, warp.shift_left(place.column, 1))

  def load(s: int) -> list[warp.Word]:
    address = place.right(tiles.gate, block, s % 4)
    words = warp.load_block(address, s // 4 * HALF)
    if distance == 0:
      return words
    offset = (distance - 1) * 2 * WIDTH + 32 * s
    factors = [warp.load(factor, offset + 16 * i, 1)[0] for i in range(2)]
    return warp.pair_products(words, factors * 2)

  return load


def _pairs(block) -> list[tuple[warp.Real, warp.Real]]:
  return [(block[2 * i], block[2 * i + 1]) for i in range(4)]


def _words(block) -> list[warp.Word]:
  return [warp.pack(a, b) for a, b in _pairs(block)]


def _as_right(words) -> list[warp.Word | None]:
  """A block held as a left operand, as the right operand of a product."""
  return [None if w is None else warp.transpose_tile(w) for w in words]


def _multiply(acc, left, right) -> list[warp.Real]:
  """acc + left @ right, from words; None stands for a word of zeros."""
  zero = warp.word(0)
  left = [zero if w is None else w for w in left]
  result = []
  for n in range(2):
    part, pair = acc[4 * n : 4 * n + 4], right[2 * n : 2 * n + 2]
    if any(w is not None for w in pair):
      pair = [zero if w is None else w for w in pair]
      part = warp.multiply(part, left, pair)
    result += part
  return result


class Split:
  """A 16 x 16 block as leading and trailing bfloat16 words."""

  def __init__(self, block=None, words=None):
    if words is None:
      split = [warp.split(a, b) for a, b in _pairs(block)]
      words = [s[0] for s in split], [s[1] for s in split]
    self.leading, self.trailing = words

  def right(self) -> Split:
    """This block as the right operand of a product."""
    return Split(words=(_as_right(self.leading), _as_right(self.trailing)))


def _multiply_split(acc, left: Split, right: Split) -> list[warp.Real]:
  """acc + left @ right to about 16 bits of mantissa."""
  acc = _multiply(acc, left.trailing, right.leading)
  acc = _multiply(acc, left.leading, right.trailing)
  return _multiply(acc, left.leading, right.leading)


def diagonal_inverse(place: Place, a) -> list[warp.Real]:
  """(I + a)^-1 for a strictly lower triangular [16, 16] block.

  A ladder: while X inverts the diagonal blocks of some size, X - X L X does for
  the double, with L what `a` holds inside the larger blocks and outside the
  smaller ones. Rounding its operands to bfloat16 loses nothing that the
  operands of the scan do not lose as well.
  """
  distance = [warp.xor(place.row, warp.add(place.column, e)) for e in (0, 1)]

  def diagonal(block) -> list[warp.Word | None]:
    first, last = warp.pack(*block[:2]), warp.pack(*block[6:])
    return [first, None, None, last]

  def in_level(size: int) -> list[warp.Real]:
    level = warp.zeros(8)
    for e in (0, 1):
      near = warp.compare(warp.xor(distance[e], size), 'slt', size)
      for i in (e, 6 + e):
        level[i] = warp.where(near, a[i], 0.0)
    return level

  x = warp.zeros(8)
  for i, value in enumerate(in_level(1)):
    if i in (0, 1, 6, 7):
      same = warp.compare(distance[i % 2], 'eq', 0)
      x[i] = warp.where(same, warp.Real(1.0), 0.0) - value
  for size in (2, 4, 8):
    inverse, below = diagonal(x), size == 8
    level = [None, warp.pack(*a[2:4]), None, None]
    if not below:
      level = diagonal(in_level(size))
    y = _multiply(warp.zeros(8), inverse, _as_right(level))
    y = [-v for v in y]
    left = [None, warp.pack(*y[2:4]), None, None] if below else diagonal(y)
    x = _multiply(x, left, _as_right(inverse))
  return x


def _same_segment(place: Place, tiles: Tiles, columns: warp.Word):
  """For the 8 entries a lane holds of a block: are both of one document?"""
  shift = lambda w: warp.shift_right(w, SEGMENT)
  token = warp.add(warp.times(place.block, 16), place.row)
  address = warp.add(tiles.flags, warp.shift_left(token, 2))
  rows = [shift(warp.load(address, 32 * i, 1)[0]) for i in range(2)]
  other = warp.add(warp.times(columns, 16), place.column)
  address = warp.add(tiles.flags, warp.shift_left(other, 2))
  keys = [[shift(w) for w in warp.load(address, 32 * n, 2)] for n in range(2)]
  return [
    warp.compare(rows[i], 'eq', keys[n][e])
    for n in range(2)
    for i in range(2)
    for e in range(2)
  ]


def _finish_tiles(place: Place, tiles: Tiles, block, distance: int):
  """P and A of one block from its raw products; 8 entries each."""
  token = warp.add(warp.times(place.block, 16), place.row)
  address = warp.add(tiles.beta, warp.shift_left(token, 2))
  beta = [warp.load_real(address, 32 * i, 1)[0] for i in range(2)]
  scores = list(block[:8])
  a = [x * beta[i // 2 % 2] for i, x in enumerate(block[8:])]
  if distance == 0:
    for e in range(2):
      column = warp.add(place.column, e)
      causal = warp.compare(place.row, 'sge', column)
      strict = warp.compare(place.row, 'sgt', column)
      for i in (e, 6 + e):
        scores[i] = warp.where(causal, scores[i], 0.0)
        a[i] = warp.where(strict, a[i], 0.0)
      scores[4 + e] = a[4 + e] = warp.Real(0.0)
  if tiles.flags is not None:
    columns = warp.add(place.block, -distance)
    same = _same_segment(place, tiles, columns)
    scores = [warp.where(s, x, 0.0) for s, x in zip(same, scores)]
    a = [warp.where(s, x, 0.0) for s, x in zip(same, a)]
  return scores, a


def tile_products(place: Place, tiles: Tiles, distance: int):
  """Writes a block of P of this warp's rows and returns the block of A."""

  def products() -> list[warp.Real]:
    raw = _gram(place, tiles, _inverse_keys(place, tiles, distance))
    scores, a = _finish_tiles(place, tiles, raw, distance)
    return scores + a

  if distance:
    inside = warp.compare(place.block, 'sge', distance)
    both = warp.reals_if(inside, 16, products)
  else:
    both = products()
  address = column(place, tiles.scores, distance)
  warp.store_block(address, 0, _words(both[:8]))
  return both[8:]


def invert(place: Place, tiles: Tiles, blocks):
  """Blocks of T of this warp's rows, by distance from the diagonal.

  The first of `blocks` is T's already, the others are A's.

  Round d adds T at distance d: T_IJ = -T_II sum_m A_Im T_mJ, where the sum runs
  over J <= m < I and every T_mJ was written in an earlier round. Blocks travel
  through shared memory where the keys were, leading parts in the first half.
  """
  inverse = blocks[:1]
  left = Split([-x for x in inverse[0]])
  a = [None] + [Split(block) for block in blocks[1:]]

  def share(distance: int):
    parts = Split(inverse[distance])
    address = column(place, tiles.key, distance)
    warp.store_block(address, 0, parts.leading)
    warp.store_block(address, HALF, parts.trailing)

  def substitute(distance: int) -> list[warp.Real]:
    y = warp.zeros(8)
    columns = warp.add(place.block, -distance)
    for back in range(1, distance + 1):
      block = warp.add(place.block, -back)
      address = place.left(tiles.key, block, columns)
      right = [
        warp.load_block(address, half, transposed=True) for half in (0, HALF)
      ]
      y = _multiply_split(y, a[back], Split(words=right))
    return _multiply_split(warp.zeros(8), left, Split(y).right())

  for distance in range(1, BLOCKS):
    share(distance - 1)
    utils.warpgroup_barrier()
    inside = warp.compare(place.block, 'sge', distance)
    inverse.append(
      warp.reals_if(inside, 8, lambda distance=distance: substitute(distance))
    )
  return inverse


def save_inverse(place: Place, inverse, ref):
  """T, rounded, to global memory [64, 64]."""
  row = warp.add(warp.times(place.block, 16), place.row)
  for distance, block in enumerate(inverse):
    columns = warp.bit_and(warp.add(place.block, -distance), BLOCKS - 1)
    first = warp.add(warp.times(columns, 16), place.column)
    offset = warp.add(warp.shift_left(row, 7), warp.shift_left(first, 1))
    address = warp.advance(warp.global_address(ref), offset)
    for i, w in enumerate(_words(block)):
      down, right = i % 2, i // 2
      warp.store_global(address, 8 * 128 * down + 16 * right, [w])


def write_inverse(place: Place, tiles: Tiles, inverse):
  """T diag(beta) in two parts, where the queries were."""
  for distance, block in enumerate(inverse):
    columns = warp.bit_and(warp.add(place.block, -distance), BLOCKS - 1)
    token = warp.add(warp.times(columns, 16), place.column)
    address = warp.add(tiles.beta, warp.shift_left(token, 2))
    beta = [warp.load_real(address, 32 * n, 2) for n in range(2)]
    scaled = Split([x * beta[i // 4][i % 2] for i, x in enumerate(block)])
    address = column(place, tiles.query, distance)
    warp.store_block(address, 0, scaled.leading)
    warp.store_block(address, HALF, scaled.trailing)
