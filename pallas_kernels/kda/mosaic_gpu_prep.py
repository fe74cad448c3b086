"""Chunk operands of Kimi Delta Attention on Hopper, one warpgroup a chunk.

From raw queries, keys and gates of 64 tokens this kernel makes what the scan
consumes (Kimi Linear, arXiv 2510.26692, with the bounded gate of Kimi K3):

    G       in-chunk cumulative sum of the log decay
    -k~     -k exp(G)                  scale q~   scale q exp(G)
    k^      k exp(G_end - G)           gamma      exp(G_end)
    P       lower triangle of sum_c scale q_ic k_jc exp(G_ic - G_jc)
    T       (I + A)^-1, A = strict lower triangle of
                            beta_i sum_c k_ic k_jc exp(G_ic - G_jc)
    W       diag(beta) T^T k^          Q          P T diag(beta)

Writing T into W and Q, rather than out, shortens the scan's chain to two
products and keeps its accuracy for nearly parallel keys, where k^ and T are
large against the differences of keys that W holds.

Who does what. Elementwise work gives warp w the 16 tokens of sub-block w and
each lane 4 neighbouring channels, so a cumulative sum is a chain of fused
multiply-adds in one thread and everything that is constant over a sub-block is
4 registers. The tile products are 16-row products inside a warp: queries and
keys scaled by exp(G - s + c), with s the sum before their own sub-block rounded
to an integer power of two, against keys scaled by exp(s - G - c) for the same
s; c = 8 |lower_bound| keeps every exponent within +-41 nats, with no later
token involved. Since references differ by powers of two, moving a rounded
operand to another one is exact. The inverse is a doubling ladder inside each
16 x 16 block and a forward substitution across blocks.

Shared memory: the query, key and gate tiles are overwritten in place, each warp
its own rows, by scaled queries, scaled keys and inversely scaled keys. Later
the key tile carries blocks of T from warp to warp (its first half is then T),
the query tile holds T diag(beta) in two bfloat16 parts and the gate tile k^.
Three more tiles stage Q, where P was, and W, so that the copies of the next
chunk can start when the last products have read their operands.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir

from pallas_kernels.kda import mosaic_gpu_warp as warp

CHUNK = 64
WIDTH = 128
PROCESSORS = 132  # of an H100 or H200; any number is correct
_BLOCKS = CHUNK // 16
_LOG2E = math.log2(math.e)
_BOTH_SIGNS = -0x7FFF8000  # the sign bits of both numbers of a word
_HALF = CHUNK * 64 * 2  # bytes of one [64, 64] bfloat16 tile
_BLOCK_ROWS = 16 * 64 * 2  # bytes of 16 rows of such a tile
VALID, ENTERS, LEAVES, SEGMENT = 1, 2, 4, 8


@dataclasses.dataclass(frozen=True)
class Options:
  """What the kernel is specialised for.

  Attributes:
    lower_bound: of the log decay, in nats.
    scale: factor of the output.
    normalize_qk: divide queries and keys by their L2 norm.
    activate_gate: the gate is a logit, not a log decay.
    masked: per-token flags say which tokens are valid and where documents end.
    save_inverse: also write T.
  """

  lower_bound: float
  scale: float
  normalize_qk: bool = True
  activate_gate: bool = True
  masked: bool = False
  save_inverse: bool = False

  @property
  def offset(self) -> int:
    """c of the file's docstring, in powers of two."""
    return math.ceil(8 * abs(self.lower_bound) * _LOG2E)


class Place:
  """Where this thread sits in its chunk, and the addresses that follow."""

  def __init__(self):
    thread, index = warp.bit_and(utils.thread_idx(), 127), utils.warp_idx()
    # Later sub-blocks have more work; each warpgroup gives its own elsewhere.
    rotated = warp.add(index, warp.shift_right(index, 2))
    self.block = warp.bit_and(rotated, 3)
    self.lane = lane = warp.bit_and(thread, 31)
    rows = warp.times(self.block, _BLOCK_ROWS)
    low, high = warp.bit_and(lane, 7), warp.shift_right(lane, 4)
    chunk = warp.shift_left(warp.bit_and(lane, 14), 3)
    byte = warp.shift_left(warp.bit_and(lane, 1), 3)
    start = warp.add(warp.times(high, _HALF), warp.add(chunk, byte))
    self._tokens = warp.add(start, rows)
    row = warp.add(low, warp.bit_and(lane, 8))
    swizzled = warp.shift_left(warp.xor(high, low), 4)
    self._left = warp.add(warp.times(row, 128), swizzled)
    side = warp.bit_and(warp.shift_right(lane, 3), 1)
    row = warp.add(low, warp.shift_left(high, 3))
    swizzled = warp.shift_left(warp.xor(side, low), 4)
    self._right = warp.add(warp.times(row, 128), swizzled)
    self.row = warp.shift_right(lane, 2)
    self.column = warp.shift_left(warp.bit_and(lane, 3), 1)

  def token(self, tile: warp.Word, j: int) -> tuple[warp.Word, int]:
    """Address of this lane's 4 channels of token j in a [2, 64, 64] tile."""
    address = warp.add(tile, self._tokens)
    return warp.xor(address, (j & 7) << 4), j * 128

  def left(self, tile, block: warp.Word, columns) -> warp.Word:
    """Address for `load_block` of a sub-block's rows, from 16 * columns on."""
    return self._block_address(self._left, tile, block, columns)

  def right(self, tile, block: warp.Word, columns) -> warp.Word:
    """Like `left`, with the two words of 8 rows next to each other."""
    return self._block_address(self._right, tile, block, columns)

  @staticmethod
  def _block_address(lane_part, tile, block, columns) -> warp.Word:
    rows = warp.times(block, _BLOCK_ROWS)
    address = warp.add(warp.add(tile, lane_part), rows)
    if isinstance(columns, int):
      return warp.xor(address, columns << 5)
    return warp.xor(address, warp.shift_left(columns, 5))


@dataclasses.dataclass(frozen=True)
class Tiles:
  """Shared addresses of one chunk: tiles and vectors."""

  query: warp.Word
  key: warp.Word
  gate: warp.Word
  scores: warp.Word
  earlier: warp.Word  # [4, 3, 128] bfloat16, where W will be
  norms: warp.Word  # [2, 64]: of queries, of keys
  totals: warp.Word  # [4, 128]
  beta: warp.Word  # [64]
  flags: warp.Word | None  # [64]


def _inverse_norms(place: Place, tiles: Tiles, scale: float):
  """scale / |q| and 1 / |k| of this warp's rows: diagonals of rows @ rows^T."""
  named = (tiles.query, scale), (tiles.key, 1.0)
  products = [[warp.zeros(4), warp.zeros(4)] for _ in named]
  for s in range(8):
    half = s // 4 * _HALF
    for (tile, _), acc in zip(named, products):
      a = warp.load_block(place.left(tile, place.block, s % 4), half)
      b = warp.load_block(place.right(tile, place.block, s % 4), half)
      acc[0] = warp.multiply(acc[0], a, b[:2])
      acc[1] = warp.multiply(acc[1], a, b[2:])
  odd = warp.compare(warp.bit_and(place.row, 1), 'ne', 0)
  on_diagonal = warp.compare(
    warp.bit_and(place.lane, 3), 'eq', warp.shift_right(place.lane, 3)
  )
  token = warp.add(warp.times(place.block, 16), place.row)
  address = warp.add(tiles.norms, warp.shift_left(token, 2))
  for i, ((_, factor), (near, far)) in enumerate(zip(named, products)):
    squares = warp.where(odd, near[1], near[0]), warp.where(odd, far[3], far[2])
    for half, square in enumerate(squares):
      norm = warp.rsqrt(square + 1e-6) * factor
      offset = 4 * CHUNK * i + 32 * half
      warp.store(address, offset, [norm], predicate=on_diagonal)


def _token_vector(place: Place, vector: warp.Word) -> list[warp.Word]:
  """The 16 words of this warp's tokens, the same in every lane."""
  address = warp.add(vector, warp.times(place.block, 64))
  return [w for i in range(4) for w in warp.load(address, 16 * i, 4)]


def _lane_vector(place: Place, vector: warp.Word, offset: int) -> list:
  """This lane's 4 channels of a float32 vector over channels."""
  address = warp.add(vector, warp.shift_left(place.lane, 4))
  return warp.load_real(address, offset, 4)


def _has(flags: list[warp.Word], bit: int) -> list[ir.Value]:
  return [warp.compare(warp.bit_and(f, bit), 'ne', 0) for f in flags]


def _cumulative_decay(place: Place, tiles: Tiles, affine, options: Options):
  """c + G - s for each token and channel of this lane, in powers of two."""
  decay = [warp.Real(float(options.offset))] * 4
  valid = None
  if options.masked:
    valid = _has(_token_vector(place, tiles.flags), VALID)
  rows = []
  for j in range(16):
    words = warp.load(*place.token(tiles.gate, j), 2)
    gates = [x for w in words for x in warp.unpack(w)]
    for i in range(4):
      if options.activate_gate:
        slope, shift = affine
        power = warp.exp2(warp.fma(gates[i], slope, shift[i]))
        strength, bound = warp.reciprocal(power + 1.0), options.lower_bound
      else:
        strength, bound = gates[i], 1.0
      if valid:
        strength = warp.where(valid[j], strength, 0.0)
      decay[i] = warp.fma(strength, bound * _LOG2E, decay[i])
    rows.append(list(decay))
  return rows


def _references(place: Place, tiles: Tiles):
  """Decay before each sub-block and in all of them, exact and rounded."""
  lane = warp.add(tiles.totals, warp.shift_left(place.lane, 4))
  sums = [[warp.Real(0.0)] * 4]
  for m in range(_BLOCKS):
    block = warp.load_real(lane, 512 * m, 4)
    sums.append([s + t for s, t in zip(sums[-1], block)] if m else block)
  references = [sums[0]]
  for total in sums[1:]:
    references.append([warp.round_to_integer(x) for x in total])
  return sums, references


@dataclasses.dataclass(frozen=True)
class Factors:
  """Powers of two of this lane's channels.

  Attributes:
    shift: exponents that rounding this sub-block's reference adds to its decay.
    entering: words of exp2(reference - c), which leads to the chunk's start.
    leaving: words of exp2(rounded end - reference + c).
    earlier: words of exp2(reference - that of an earlier sub-block), by
      distance from 1.
    whole: gamma.
  """

  shift: list[warp.Real]
  entering: list[warp.Word]
  leaving: list[warp.Word]
  earlier: list[list[warp.Word]]
  whole: list[warp.Real]


def _block_factors(place: Place, tiles: Tiles, decay, offset: int) -> Factors:
  """Combines the decays of all sub-blocks, through shared memory."""
  own = warp.add(tiles.totals, warp.times(place.block, 512))
  own = warp.add(own, warp.shift_left(place.lane, 4))
  warp.store(own, 0, [x - float(offset) for x in decay])
  utils.warpgroup_barrier()
  sums, references = _references(place, tiles)
  start = _of_block(place, sums[:_BLOCKS], 0)
  reference = _of_block(place, references[:_BLOCKS], 0)

  def words(exponents) -> list[warp.Word]:
    return _packed([warp.exp2(x) for x in exponents])

  earlier = [
    words(_differences(reference, _of_block(place, references[:_BLOCKS], -d)))
    for d in range(1, _BLOCKS)
  ]
  return Factors(
    shift=_differences(start, reference),
    entering=words([r - float(offset) for r in reference]),
    leaving=words(
      [e - r + float(offset) for e, r in zip(references[-1], reference)]
    ),
    earlier=earlier,
    whole=[warp.exp2(x) for x in sums[-1]],
  )


def _differences(a, b) -> list[warp.Real]:
  return [x - y for x, y in zip(a, b)]


def _of_block(place: Place, vectors, ahead: int) -> list[warp.Real]:
  """vectors[this warp's sub-block + ahead], ahead <= 0; else the first one."""
  chosen = vectors[0]
  for m in range(1, len(vectors) + ahead):
    here = warp.compare(place.block, 'sge', m - ahead)
    chosen = [warp.where(here, v, c) for v, c in zip(vectors[m], chosen)]
  return chosen


class Rows:
  """Writes tokens of one operand: 4 channels a lane, 256 bytes a token."""

  def __init__(self, place: Place, ref: ir.Value):
    start = warp.add(
      warp.times(place.block, 16 * 2 * WIDTH), warp.shift_left(place.lane, 3)
    )
    self._address = warp.advance(warp.global_address(ref), start)

  def write(self, j: int, words, keep: ir.Value | None):
    words = _kept(words, keep)
    warp.store_global(self._address, j * 2 * WIDTH, words)


def _kept(words, keep: ir.Value | None) -> list[warp.Word]:
  """`words` where the condition holds or is None, else zero."""
  if keep is None:
    return words
  return [warp.where(keep, w, warp.word(0)) for w in words]


def _packed(values) -> list[warp.Word]:
  return [warp.pack(values[0], values[1]), warp.pack(values[2], values[3])]


def _rows_of(place: Place, tile: warp.Word, norm_of, valid):
  """The 16 tokens of this warp, normalised: a function of the token.

  Each call also starts the load of the next token, ahead of any store that
  follows the call, since loads do not pass stores.
  """
  ahead = [warp.load(*place.token(tile, 0), 2)]

  def row(j: int) -> list[warp.Real]:
    words = _kept(ahead[0], valid[j])
    if j < 15:
      ahead[0] = warp.load(*place.token(tile, j + 1), 2)
    values = [x for w in words for x in warp.unpack(w)]
    norm = norm_of(j)
    if norm is None:
      return values
    if valid[j] is not None:
      norm = warp.where(valid[j], norm, 0.0)
    return [x * norm for x in values]

  return row


def _scale_rows(place: Place, tiles: Tiles, decay, outputs, options: Options):
  """Scales queries and keys in place and writes -k~ and scale q~."""
  factors = _block_factors(place, tiles, decay[15], options.offset)
  minus_key, query, gamma = outputs
  flags = _token_vector(place, tiles.flags) if options.masked else None
  enters, valid = [
    _has(flags, bit) if flags else [None] * 16 for bit in (ENTERS, VALID)
  ]
  _write_gamma(place, tiles, factors.whole, gamma)
  norms = _norms_of(place, tiles, options)
  query_row = _rows_of(place, tiles.query, norms[0], valid)
  key_row = _rows_of(place, tiles.key, norms[1], valid)
  to_minus = [warp.xor(w, _BOTH_SIGNS) for w in factors.entering]
  for j in range(16):
    power = [x + s for x, s in zip(decay[j], factors.shift)]
    growth = [warp.exp2(x) for x in power]
    keys, queries = key_row(j), query_row(j)
    scaled_keys = _packed(_products(keys, growth))
    inverse = _packed([k * warp.exp2(-x) for k, x in zip(keys, power)])
    scaled_queries = _packed(_products(queries, growth))
    warp.store(*place.token(tiles.key, j), scaled_keys)
    warp.store(*place.token(tiles.gate, j), inverse)
    warp.store(*place.token(tiles.query, j), scaled_queries)
    minus_key.write(j, _pair_products(scaled_keys, to_minus), enters[j])
    query.write(j, _pair_products(scaled_queries, factors.entering), enters[j])
  return factors


def _norms_of(place: Place, tiles: Tiles, options: Options):
  """What queries and keys are multiplied by: two functions of the token."""
  if not options.normalize_qk:
    return lambda j: warp.Real(options.scale), lambda j: None
  start = warp.add(tiles.norms, warp.times(place.block, 64))

  def function(offset: int):
    recent = []

    def norm(j: int) -> warp.Real:
      if j % 4 == 0:
        recent[:] = warp.load_real(start, offset + 4 * j, 4)
      return recent[j % 4]

    return norm

  return function(0), function(4 * CHUNK)


def _pair_products(a, b) -> list[warp.Word]:
  return [warp.multiply_pairs(x, y) for x, y in zip(a, b)]


def _products(a, b) -> list[warp.Real]:
  return [x * y for x, y in zip(a, b)]


def _write_gamma(place: Place, tiles: Tiles, whole, gamma: ir.Value):
  """exp(G_end); 0 where the document that entered the chunk does not leave."""
  if tiles.flags is not None:
    last = warp.load(tiles.flags, 4 * (CHUNK - 1), 1)
    stays = _has(last, ENTERS)[0]
    whole = [warp.where(stays, x, 0.0) for x in whole]
  address = warp.advance(
    warp.global_address(gamma), warp.shift_left(place.lane, 4)
  )
  first = warp.compare(place.block, 'eq', 0)
  warp.store_global(address, 0, whole, predicate=first)


def _end_rows(place: Place, tiles: Tiles, factors: Factors, options: Options):
  """k^ over the inversely scaled keys, but for a factor left in `totals`."""
  leaves = [None] * 16
  if options.masked:
    leaves = _has(_token_vector(place, tiles.flags), LEAVES)
  for first in range(0, 16, 8):
    addresses = [place.token(tiles.gate, first + j) for j in range(8)]
    rows = [warp.load(*address, 2) for address in addresses]
    for j, words in enumerate(rows):
      words = _kept(_pair_products(words, factors.leaving), leaves[first + j])
      warp.store(*addresses[j], words)


def _share_rest(place: Place, tiles: Tiles):
  """What rounding left out of the chunk's decay, for W, in place of norms."""
  sums, references = _references(place, tiles)
  rest = [warp.exp2(x) for x in _differences(sums[-1], references[-1])]
  address = warp.add(tiles.norms, warp.shift_left(place.lane, 4))
  first = warp.compare(place.block, 'eq', 0)
  warp.store(address, 0, rest, predicate=first)


def _share_factors(place: Place, tiles: Tiles, factors: Factors):
  """Stores `earlier` for `_inverse_keys`."""
  lane = warp.add(tiles.earlier, warp.times(place.block, 3 * 2 * WIDTH))
  lane = warp.add(lane, warp.shift_left(place.lane, 3))
  for i, words in enumerate(factors.earlier):
    warp.store(lane, i * 2 * WIDTH, words)


def _gram(place: Place, tiles: Tiles, right) -> list[warp.Real]:
  """[16, 16] products of own queries and keys; right(s) loads 16 channels."""
  acc = [warp.zeros(4) for _ in range(4)]
  for s in range(8):
    b = right(s)
    for i, tile in enumerate((tiles.query, tiles.key)):
      # Loading again for every block costs less than 64 registers throughout.
      address = place.left(tile, place.block, s % 4)
      left = warp.load_block(address, s // 4 * _HALF)
      for n in range(2):
        pair = b[2 * n : 2 * n + 2]
        acc[2 * i + n] = warp.multiply(acc[2 * i + n], left, pair)
  return [x for a in acc for x in a]


def _inverse_keys(place: Place, tiles: Tiles, distance: int):
  """A function that loads 16 channels of the keys `distance` blocks back.

  They come scaled for this warp's reference instead of their own.
  """
  block = warp.add(place.block, -distance)
  factor = warp.add(tiles.earlier, warp.times(place.block, 3 * 2 * WIDTH))
  factor = warp.add(factor, warp.shift_left(place.column, 1))

  def load(s: int) -> list[warp.Word]:
    address = place.right(tiles.gate, block, s % 4)
    words = warp.load_block(address, s // 4 * _HALF)
    if distance == 0:
      return words
    offset = (distance - 1) * 2 * WIDTH + 32 * s
    factors = [warp.load(factor, offset + 16 * i, 1)[0] for i in range(2)]
    return _pair_products(words, factors * 2)

  return load


def _pairs(block) -> list[tuple[warp.Real, warp.Real]]:
  return [(block[2 * i], block[2 * i + 1]) for i in range(4)]


def _words(block) -> list[warp.Word]:
  return [warp.pack(a, b) for a, b in _pairs(block)]


class Split:
  """A 16 x 16 block as leading and trailing bfloat16 words."""

  def __init__(self, block=None, words=None):
    if words is None:
      split = [warp.split(a, b) for a, b in _pairs(block)]
      words = [s[0] for s in split], [s[1] for s in split]
    self.leading, self.trailing = words

  def right(self) -> Split:
    """This block as the right operand of a product."""
    flip = lambda words: [warp.transpose_tile(w) for w in words]
    return Split(words=(flip(self.leading), flip(self.trailing)))


def _multiply_split(acc, left: Split, right: Split) -> list[warp.Real]:
  """acc + left @ right to about 16 bits of mantissa."""
  result = []
  for n in range(2):
    part = acc[4 * n : 4 * n + 4]
    pairs = (
      (left.trailing, right.leading),
      (left.leading, right.trailing),
      (left.leading, right.leading),
    )
    for a, b in pairs:
      part = warp.multiply(part, a, (b[2 * n], b[2 * n + 1]))
    result += part
  return result


def _diagonal_inverse(place: Place, a) -> list[warp.Real]:
  """(I + a)^-1 for a strictly lower triangular [16, 16] block."""
  distance = [warp.xor(place.row, warp.add(place.column, e)) for e in (0, 1)]

  def level(size: int) -> list[warp.Real]:
    zero = warp.Real(0.0)
    if size == 8:
      return [zero, zero, a[2], a[3], zero, zero, zero, zero]
    near = [warp.compare(warp.xor(d, size), 'slt', size) for d in distance]
    pick = lambda i: [warp.where(near[e], a[i + e], 0.0) for e in (0, 1)]
    return [*pick(0), zero, zero, zero, zero, *pick(6)]

  one = [
    warp.where(warp.compare(d, 'eq', 0), warp.Real(1.0), 0.0) for d in distance
  ]
  blank = warp.zeros(2)
  identity = [*one, *blank, *blank, *one]
  x = [i - l for i, l in zip(identity, level(1))]
  for size in (2, 4, 8):
    inverse = Split(x)
    y = _multiply_split(warp.zeros(8), inverse, Split(level(size)).right())
    x = _multiply_split(x, Split([-v for v in y]), inverse.right())
  return x


def _same_segment(place: Place, tiles: Tiles, columns: warp.Word):
  """For the 8 entries a lane holds of a block: are both of one document?"""
  shift = lambda w: warp.shift_right(w, SEGMENT.bit_length() - 1)
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


def _finish_tiles(place: Place, tiles: Tiles, block, distance, options):
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
  if options.masked:
    columns = warp.add(place.block, -distance)
    same = _same_segment(place, tiles, columns)
    scores = [warp.where(s, x, 0.0) for s, x in zip(same, scores)]
    a = [warp.where(s, x, 0.0) for s, x in zip(same, a)]
  return scores, a


def _tile_products(place: Place, tiles: Tiles, distance: int, options: Options):
  """Writes a block of P of this warp's rows and returns the block of A."""

  def products() -> list[warp.Real]:
    raw = _gram(place, tiles, _inverse_keys(place, tiles, distance))
    scores, a = _finish_tiles(place, tiles, raw, distance, options)
    return scores + a

  if distance:
    inside = warp.compare(place.block, 'sge', distance)
    both = warp.reals_if(inside, 16, products)
  else:
    both = products()
  address = _column(place, tiles.scores, distance)
  warp.store_block(address, 0, _words(both[:8]))
  return both[8:]


def _column(place: Place, tile: warp.Word, distance: int) -> warp.Word:
  """Address of own rows and the columns `distance` blocks back, cyclically."""
  columns = warp.bit_and(warp.add(place.block, -distance), _BLOCKS - 1)
  return place.left(tile, place.block, columns)


def _invert(place: Place, tiles: Tiles, blocks, save: bool):
  """Blocks of T of this warp's rows, by distance from the diagonal.

  The first of `blocks` is T's already, the others are A's.

  Round d adds T at distance d: T_IJ = -T_II sum_m A_Im T_mJ, where the sum runs
  over J <= m < I and every T_mJ was written in an earlier round. Blocks travel
  through shared memory where the keys were, leading parts in the first half,
  which is all of T in the end if `save`.
  """
  inverse = blocks[:1]
  left = Split([-x for x in inverse[0]])
  a = [None] + [Split(block) for block in blocks[1:]]

  def share(distance: int):
    parts = Split(inverse[distance])
    address = _column(place, tiles.key, distance)
    warp.store_block(address, 0, parts.leading)
    warp.store_block(address, _HALF, parts.trailing)

  def substitute(distance: int) -> list[warp.Real]:
    y = warp.zeros(8)
    columns = warp.add(place.block, -distance)
    for back in range(1, distance + 1):
      block = warp.add(place.block, -back)
      address = place.left(tiles.key, block, columns)
      right = [
        warp.load_block(address, half, transposed=True) for half in (0, _HALF)
      ]
      y = _multiply_split(y, a[back], Split(words=right))
    return _multiply_split(warp.zeros(8), left, Split(y).right())

  for distance in range(1, _BLOCKS):
    share(distance - 1)
    utils.warpgroup_barrier()
    inside = warp.compare(place.block, 'sge', distance)
    inverse.append(
      warp.reals_if(inside, 8, lambda distance=distance: substitute(distance))
    )
  if save:
    share(_BLOCKS - 1)
  return inverse


def _write_inverse(place: Place, tiles: Tiles, inverse):
  """T diag(beta) in two parts, where the queries were."""
  for distance, block in enumerate(inverse):
    columns = warp.bit_and(warp.add(place.block, -distance), _BLOCKS - 1)
    token = warp.add(warp.times(columns, 16), place.column)
    address = warp.add(tiles.beta, warp.shift_left(token, 2))
    beta = [warp.load_real(address, 32 * n, 2) for n in range(2)]
    scaled = Split([x * beta[i // 4][i % 2] for i, x in enumerate(block)])
    address = _column(place, tiles.query, distance)
    warp.store_block(address, 0, scaled.leading)
    warp.store_block(address, _HALF, scaled.trailing)


def _gate_affine(place: Place, affine: ir.Value):
  """-a log2(e) of this head and its product with the bias, for exp2."""
  address = warp.advance(
    warp.global_address(affine), warp.shift_left(place.lane, 4)
  )
  slope = warp.load_global(address, 0, 4)[0]
  return slope, warp.load_global(address, 4 * WIDTH, 4)


def _emit(options: Options, tiles: Tiles, affine: ir.Value, outputs):
  """The work of one warpgroup on one chunk, up to the tiles of P, T and k^."""
  place = Place()
  if options.activate_gate:
    affine = _gate_affine(place, affine)
  if options.normalize_qk:
    _inverse_norms(place, tiles, options.scale)
  decay = _cumulative_decay(place, tiles, affine, options)
  rows = [Rows(place, ref) for ref in outputs[:2]]
  factors = _scale_rows(place, tiles, decay, (*rows, outputs[2]), options)
  _share_factors(place, tiles, factors)
  utils.warp_barrier()
  diagonal = _tile_products(place, tiles, 0, options)
  blocks = [_diagonal_inverse(place, diagonal)]
  utils.warpgroup_barrier()
  _share_rest(place, tiles)
  blocks += [
    _tile_products(place, tiles, distance, options)
    for distance in range(1, _BLOCKS)
  ]
  inverse = _invert(place, tiles, blocks, options.save_inverse)
  _end_rows(place, tiles, factors, options)
  _write_inverse(place, tiles, inverse)


_TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
# Tiles [64, 64] of one chunk: query, key, gate and W by halves, P and then Q.
_QUERY, _KEY, _GATE, _UPDATE, _SCORES, _TILES = 0, 2, 4, 6, 8, 9
# Offsets, in words, of the vectors that share one buffer.
_NORMS, _TOTALS, _BETA, _FLAGS = 0, 128, 640, 704
_REST = _NORMS
_PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)


def _chunk(options: Options, tiles_s, vectors_s, affine, outputs):
  """Calls `_emit` on a chunk's references from the surrounding kernel."""
  plain = plgpu.RefType()

  @plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(_TRANSFORMS), plain, plain, (plain,) * 3)
  )
  def prepare(ctx, tiles, vectors, affine, outputs):
    del ctx
    tiles, vectors = warp.shared_address(tiles), warp.shared_address(vectors)
    query, key, gate, scores, earlier = [
      warp.add(tiles, i * _HALF)
      for i in (_QUERY, _KEY, _GATE, _SCORES, _UPDATE)
    ]
    norms, totals, beta, flags = [
      warp.add(vectors, 4 * i) for i in (_NORMS, _TOTALS, _BETA, _FLAGS)
    ]
    flags = flags if options.masked else None
    tiles = Tiles(query, key, gate, scores, earlier, norms, totals, beta, flags)
    _emit(options, tiles, affine, outputs)

  prepare(tiles_s, vectors_s, affine, outputs)


def _sources(place, outer):
  """(what a chunk reads, its tile)."""
  b, head, key_head, n = place
  tokens = pl.ds(n * CHUNK, CHUNK)
  names = ('q', key_head, _QUERY), ('k', key_head, _KEY), ('gate', head, _GATE)
  return [
    (outer[name].at[b, tokens, h, pl.ds(64 * half, 64)], first + half)
    for name, h, first in names
    for half in range(2)
  ]


def _fetch(options: Options, place, outer, scratch, barriers):
  """Starts the copies of a chunk's inputs, queries and keys on barrier 0."""
  b, head, _, n = place
  tiles_s, vectors_s = scratch
  tokens = pl.ds(n * CHUNK, CHUNK)
  for source, tile in _sources(place, outer):
    arrived = barriers[tile >= _GATE]
    plgpu.copy_gmem_to_smem(source, tiles_s.at[tile], arrived)
  beta = vectors_s.at[pl.ds(_BETA, CHUNK)]
  plgpu.copy_gmem_to_smem(outer['beta'].at[b, head, tokens], beta, barriers[1])
  if options.masked:
    flags = vectors_s.at[pl.ds(_FLAGS, CHUNK)]
    plgpu.copy_gmem_to_smem(outer['flags'].at[b, tokens], flags, barriers[1])


def _apply_inverse(tiles_s, vectors_s):
  """The halves of W and Q, from T diag(beta) in two parts, k^ and P."""

  def products(*accumulators):
    for part in range(2):
      inverse = tiles_s.at[_QUERY + part]
      for half in range(2):
        end_key = tiles_s.at[_GATE + half]
        plgpu.wgmma(accumulators[half], inverse.T, end_key)
      plgpu.wgmma(accumulators[2], tiles_s.at[_SCORES], inverse)
    return tuple(acc[...] for acc in accumulators)

  tile = plgpu.ACC((CHUNK, 64), jnp.float32)
  *update, scores = lax.optimization_barrier(
    pl.run_scoped(products, tile, tile, tile)
  )
  for half in range(2):
    rest = vectors_s.at[pl.ds(_REST + 64 * half, 64)]
    rest = plgpu.load(rest, layout=_PER_COLUMN, optimized=False)
    update[half] *= lax.broadcast_in_dim(rest, (CHUNK, 64), [1])
  return update, scores


def _store_tiles(place, outer, tiles_s):
  """Starts the copies of W and Q."""
  b, head, _, n = place
  tokens = pl.ds(n * CHUNK, CHUNK)
  for half in range(2):
    dest = outer['update'].at[b, head, tokens, pl.ds(64 * half, 64)]
    plgpu.copy_smem_to_gmem(tiles_s.at[_UPDATE + half], dest)
  dest = outer['scores'].at[b, head, tokens]
  plgpu.copy_smem_to_gmem(tiles_s.at[_SCORES], dest)


def _one_chunk(options: Options, places, outer, scratch, barriers):
  """One chunk; the copies of the next one start as its tiles become free."""
  place, following = places
  tiles_s, vectors_s = scratch
  rows_arrived, rest_arrived = barriers
  b, head, _, n = place
  tokens = pl.ds(n * CHUNK, CHUNK)
  plgpu.barrier_wait(rows_arrived)
  plgpu.barrier_wait(rest_arrived)
  rows = [outer[o].at[b, head, tokens] for o in ('minus_key', 'query')]
  outputs = (*rows, outer['gamma'].at[b, head, n])
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)
  _chunk(options, tiles_s, vectors_s, outer['affine'].at[head], outputs)
  plgpu.commit_smem()
  update, scores = _apply_inverse(tiles_s, vectors_s)
  plgpu.commit_smem()  # every warp's products have read their operands
  if options.save_inverse:
    saved = outer['saved_inverse'].at[b, head, tokens]
    plgpu.copy_smem_to_gmem(tiles_s.at[_KEY], saved)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
  following()
  for half in range(2):
    tiles_s.at[_UPDATE + half][...] = update[half].astype(jnp.bfloat16)
  tiles_s.at[_SCORES][...] = scores.astype(jnp.bfloat16)
  plgpu.commit_smem()
  _store_tiles(place, outer, tiles_s)


def _body(options: Options, names, sizes, *refs):
  """One thread block: each of its warpgroups works through chunks."""
  heads, group, chunks, total, warpgroups = sizes
  outer = dict(zip(names, refs))
  role = lax.axis_index('role')
  worker = lax.axis_index('block') * warpgroups + role
  workers = lax.axis_size('block') * warpgroups

  def locate(index):
    head, rest = lax.rem(index, heads), lax.div(index, heads)
    b, n = lax.div(rest, chunks), lax.rem(rest, chunks)
    return b, head, lax.div(head, group), n

  def fetch(index, scratch, barriers):
    @pl.when(index < total)
    def _():
      place = locate(index)
      _fetch(options, place, outer, scratch, barriers)

  def owned(zero):
    *scratch, rows, rest = [ref.at[role + zero] for ref in refs[len(names) :]]
    return scratch, (rows, rest)

  fetch(worker, *owned(0))

  @pl.loop(0, lax.div(total - worker + workers - 1, workers))
  def _(i):
    index = worker + i * workers
    # A zero that the compiler cannot see: addresses computed before the loop
    # would have to wait in local memory, which is slower than computing them.
    scratch, barriers = owned(lax.shift_right_logical(i, 30))
    following = index + workers
    places = locate(index), lambda: fetch(following, scratch, barriers)
    _one_chunk(options, places, outer, scratch, barriers)

  plgpu.wait_smem_to_gmem(0)


def prepare(
  q, k, gate, beta, *, affine, flags, options: Options, warpgroups=3
) -> dict[str, jax.Array]:
  """The scan's operands for every chunk.

  Args:
    q, k: [B, T, H, 128] bfloat16, raw.
    gate: [B, T, HV, 128] bfloat16.
    beta: [B, HV, N * 64] float32 in (0, 1), zero for tokens that are no tokens.
    affine: [HV, 2, 128] float32: -exp(a_log) log2(e) and its product with the
      bias.
    flags: [B, N * 64] int32, or None unless options.masked: VALID, ENTERS (of
      the document that entered the chunk), LEAVES (of the one that leaves), and
      SEGMENT times a number that differs between the chunk's documents.
    options: see `Options`.

    warpgroups: chunks in one thread block.

  Returns:
    minus_key, query, update: -k~, scale q~ and W [B, HV, N * 64, 128]; scores:
    Q [B, HV, N * 64, 64], bfloat16; gamma [B, HV, N, 128] float32;
    saved_inverse, T, like Q, if options.save_inverse.
  """
  batch, heads, padded = beta.shape
  chunks = padded // CHUNK
  wide = jax.ShapeDtypeStruct((batch, heads, padded, WIDTH), jnp.bfloat16)
  square = jax.ShapeDtypeStruct((batch, heads, padded, CHUNK), jnp.bfloat16)
  gamma = jax.ShapeDtypeStruct((batch, heads, chunks, WIDTH), jnp.float32)
  outputs = dict(minus_key=wide, query=wide, update=wide)
  outputs.update(scores=square, gamma=gamma)
  inputs = dict(q=q, k=k, gate=gate, beta=beta, affine=affine)
  if options.masked:
    inputs['flags'] = lax.bitcast_convert_type(flags, jnp.float32)
  if options.save_inverse:
    outputs['saved_inverse'] = square
  names = (*inputs, *outputs)
  total = batch * heads * chunks
  sizes = (heads, heads // q.shape[2], chunks, total, warpgroups)
  tiles = (warpgroups, _TILES, CHUNK, 64)
  words = _FLAGS + (CHUNK if options.masked else 0)
  kernel = plgpu.kernel(
    lambda *refs: _body(options, names, sizes, *refs),
    out_type=tuple(outputs.values()),
    grid=(min(PROCESSORS, pl.cdiv(total, warpgroups)),),
    grid_names=('block',),
    num_threads=warpgroups,
    thread_name='role',
    kernel_name='kda_prepare',
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane,
      reduction_scratch_bytes=0,
      unsafe_no_auto_barriers=True,
    ),
    scratch_types=[
      plgpu.SMEM(tiles, jnp.bfloat16, transforms=_TRANSFORMS),
      plgpu.SMEM((warpgroups, words), jnp.float32),
      plgpu.Barrier(num_arrivals=4, num_barriers=warpgroups),
      plgpu.Barrier(num_arrivals=3 + options.masked, num_barriers=warpgroups),
    ],
  )
  return dict(zip(outputs, kernel(*inputs.values())))
