"""Chunk operands of Kimi Delta Attention on Hopper, one warpgroup a chunk.

From raw queries, keys and gates of 64 tokens this kernel makes what the scan
consumes (Kimi Linear, arXiv 2510.26692, with the bounded gate of Kimi K3):

    G       in-chunk cumulative sum of the log decay
    -k~     -k exp(G)                  scale q~   scale q exp(G)
    k^      k exp(G_end - G)           gamma      exp(G_end)
    scale P lower triangle of sum_c scale q_ic k_jc exp(G_ic - G_jc)
    T diag(beta), T = (I + A)^-1, A = strict lower triangle of
                               beta_i sum_c k_ic k_jc exp(G_ic - G_jc)

Who does what. Elementwise work gives warp w the 16 tokens of sub-block w and
each lane 4 neighbouring channels, so a cumulative sum is a chain of fused
multiply-adds in one thread and everything that is constant over a sub-block is
4 registers. The tile products are 16-row products inside a warp: queries and
keys scaled by exp(G - s + c), with s the sum before their own sub-block,
against keys scaled by exp(s - G - c) for the same s; c = 8 |lower_bound| keeps
every exponent within +-40 nats, with no later token involved. The inverse is a
doubling ladder inside each 16 x 16 block and a forward substitution across
blocks, with both operands split in two bfloat16 parts.

Shared memory: the query, key and gate tiles are overwritten in place, each warp
its own rows, by scaled queries, scaled keys and inversely scaled keys; `far`
holds the inversely scaled keys for later sub-blocks, by distance in blocks.
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
_BLOCKS = CHUNK // 16
_LOG2E = math.log2(math.e)
_HALF = CHUNK * 64 * 2  # bytes of one [64, 64] bfloat16 tile
_BLOCK_ROWS = 16 * 64 * 2  # bytes of 16 rows of such a tile
# First `far` slot of each distance; slot + 1 is the next sub-block of keys.
_FAR_SLOT = {1: 0, 2: 3, 3: 5}
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
  def offset(self) -> float:
    """c of the file's docstring, in powers of two."""
    return 8 * abs(self.lower_bound) * _LOG2E


class Place:
  """Where this thread sits in its chunk, and the addresses that follow."""

  def __init__(self):
    thread = warp.bit_and(utils.thread_idx(), 127)
    self.lane = warp.bit_and(thread, 31)
    self.block = warp.bit_and(utils.warp_idx(), 3)
    lane, rows = self.lane, warp.times(self.block, _BLOCK_ROWS)
    low, high = warp.bit_and(lane, 7), warp.shift_right(lane, 4)
    chunk = warp.shift_left(warp.bit_and(lane, 14), 3)
    byte = warp.shift_left(warp.bit_and(lane, 1), 3)
    in_row = warp.add(chunk, byte)
    row = warp.add(low, warp.bit_and(lane, 8))
    self._tokens = warp.add(warp.add(warp.times(high, _HALF), in_row), rows)
    self._far_tokens = warp.add(warp.times(high, _BLOCK_ROWS), in_row)
    swizzled = warp.shift_left(warp.xor(high, low), 4)
    self._far_tile = warp.add(warp.times(row, 128), swizzled)
    self._tile = warp.add(self._far_tile, rows)
    self.row = warp.shift_right(lane, 2)
    self.column = warp.shift_left(warp.bit_and(lane, 3), 1)

  def token(self, tile: warp.Word, j: int) -> tuple[warp.Word, int]:
    """Address of this lane's 4 channels of token j in a [2, 64, 64] tile."""
    return self._swizzle(warp.add(tile, self._tokens), j)

  def far_token(self, slot: warp.Word, j: int) -> tuple[warp.Word, int]:
    """The same in a [2, 16, 64] slot of `far`."""
    return self._swizzle(warp.add(slot, self._far_tokens), j)

  @staticmethod
  def _swizzle(address: warp.Word, j: int) -> tuple[warp.Word, int]:
    return warp.xor(address, (j & 7) << 4), j * 128

  def tile(self, tile: warp.Word, columns: int) -> warp.Word:
    """Address for `load_block` of own rows, columns 16 * columns onward."""
    return warp.xor(warp.add(tile, self._tile), columns << 5)

  def tile_at(self, tile, rows: warp.Word, columns: warp.Word) -> warp.Word:
    """The same for any sub-block of rows and any block of columns."""
    address = warp.add(warp.add(tile, self._far_tile), rows)
    return warp.xor(address, warp.shift_left(columns, 5))

  def far_tile(self, slot: warp.Word, columns: int) -> warp.Word:
    """The same for a slot of `far`."""
    return warp.xor(warp.add(slot, self._far_tile), columns << 5)


@dataclasses.dataclass(frozen=True)
class Tiles:
  """Shared addresses of one chunk: tiles and vectors."""

  query: warp.Word
  key: warp.Word
  gate: warp.Word
  far: warp.Word
  norms: warp.Word  # [2, 64]: of queries, of keys
  totals: warp.Word  # [4, 128]
  beta: warp.Word  # [64]
  flags: warp.Word | None  # [64]

  def scores(self) -> warp.Word:
    """scale P, where the gate was."""
    return self.gate

  def inverse(self) -> warp.Word:
    """T diag(beta)."""
    return warp.add(self.gate, _HALF)

  def saved(self) -> warp.Word:
    """T itself, where the queries were."""
    return self.query


def _inverse_norms(place: Place, tile: warp.Word, dest: warp.Word):
  """1 / L2 norm of this warp's 16 rows: the diagonal of rows @ rows^T."""
  near, far = warp.zeros(4), warp.zeros(4)
  for s in range(8):
    a = warp.load_block(place.tile(tile, s % 4), s // 4 * _HALF)
    near = warp.multiply(near, a, (a[0], a[2]))
    far = warp.multiply(far, a, (a[1], a[3]))
  odd = warp.compare(warp.bit_and(place.row, 1), 'ne', 0)
  on_diagonal = warp.compare(
    warp.bit_and(place.lane, 3), 'eq', warp.shift_right(place.lane, 3)
  )
  squares = warp.where(odd, near[1], near[0]), warp.where(odd, far[3], far[2])
  token = warp.add(warp.times(place.block, 16), place.row)
  address = warp.add(dest, warp.shift_left(token, 2))
  for offset, square in zip((0, 32), squares):
    norm = warp.rsqrt(square + 1e-6)
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
  decay = [warp.Real(options.offset)] * 4
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


def _block_factors(place: Place, tiles: Tiles, decay, options: Options):
  """exp(s - c), exp(G_end - s + c) and exp(G_end) of this lane's channels."""
  totals = [x - options.offset for x in decay]
  lane = warp.add(tiles.totals, warp.shift_left(place.lane, 4))
  own = warp.add(lane, warp.times(place.block, 512))
  warp.store(own, 0, totals)
  utils.warpgroup_barrier()
  before = [warp.Real(-options.offset)] * 4
  after = [warp.Real(options.offset)] * 4
  whole = [warp.Real(0.0)] * 4
  for m in range(_BLOCKS):
    block = warp.load_real(lane, 512 * m, 4)
    earlier = warp.compare(place.block, 'sgt', m)
    before = [b + warp.where(earlier, t, 0.0) for b, t in zip(before, block)]
    late = [warp.where(earlier, warp.Real(0.0), t) for t in block]
    after = [a + t for a, t in zip(after, late)]
    whole = [w + t for w, t in zip(whole, block)]
  return tuple([warp.exp2(x) for x in v] for v in (before, after, whole))


class Rows:
  """Writes tokens of one operand: 4 channels a lane, 256 bytes a token."""

  def __init__(self, place: Place, ref: ir.Value):
    start = warp.add(
      warp.times(place.block, 16 * 2 * WIDTH), warp.shift_left(place.lane, 3)
    )
    self._address = warp.advance(warp.global_address(ref), start)

  def write(self, j: int, values, keep: ir.Value | None):
    words = _packed(values)
    if keep is not None:
      words = [warp.where(keep, w, warp.word(0)) for w in words]
    warp.store_global(self._address, j * 2 * WIDTH, words)


def _packed(values) -> list[warp.Word]:
  return [warp.pack(values[0], values[1]), warp.pack(values[2], values[3])]


def _rows_of(place: Place, tile: warp.Word, vectors, options: Options):
  """The 16 tokens of this warp, normalised: a function of the token."""
  norms, flags = vectors
  valid = _has(flags, VALID) if options.masked else None

  def row(j: int) -> list[warp.Real]:
    words = warp.load(*place.token(tile, j), 2)
    if valid:
      words = [warp.where(valid[j], w, warp.word(0)) for w in words]
    values = [x for w in words for x in warp.unpack(w)]
    if not options.normalize_qk:
      return values
    norm = norms[j]
    if valid:
      norm = warp.where(valid[j], norm, 0.0)
    return [x * norm for x in values]

  return row


def _norm_reals(place: Place, vector: warp.Word) -> list[warp.Real]:
  address = warp.add(vector, warp.times(place.block, 64))
  return [w for i in range(4) for w in warp.load_real(address, 16 * i, 4)]


def _scale_rows(place: Place, tiles: Tiles, decay, outputs, options: Options):
  """Scales queries and keys, writes both operands' rows; returns k / decay."""
  entering, leaving, whole = _block_factors(place, tiles, decay[15], options)
  flags = _token_vector(place, tiles.flags) if options.masked else None
  enters = _has(flags, ENTERS) if flags else [None] * 16
  leaves = _has(flags, LEAVES) if flags else [None] * 16
  minus_key, query, end_key, gamma = outputs
  key_norms = query_norms = None
  if options.normalize_qk:
    query_norms = _norm_reals(place, tiles.norms)
    key_norms = _norm_reals(place, warp.add(tiles.norms, 4 * CHUNK))
  key_row = _rows_of(place, tiles.key, (key_norms, flags), options)
  query_row = _rows_of(place, tiles.query, (query_norms, flags), options)
  entering_key = [-x for x in entering]
  entering_query = [x * options.scale for x in entering]
  inverse_rows = []
  for j in range(16):
    growth = [warp.exp2(x) for x in decay[j]]
    keys = key_row(j)
    scaled = [k * e for k, e in zip(keys, growth)]
    warp.store(*place.token(tiles.key, j), _packed(scaled))
    minus_key.write(j, _products(scaled, entering_key), enters[j])
    inverse = [k * warp.exp2(-x) for k, x in zip(keys, decay[j])]
    warp.store(*place.token(tiles.gate, j), _packed(inverse))
    end_key.write(j, _products(inverse, leaving), leaves[j])
    inverse_rows.append(inverse)
    scaled = _products(query_row(j), growth)
    warp.store(*place.token(tiles.query, j), _packed(scaled))
    query.write(j, _products(scaled, entering_query), enters[j])
  _write_gamma(place, tiles, whole, gamma)
  return inverse_rows


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


def _spread_rows(place: Place, tiles: Tiles, inverse_rows):
  """Copies of this sub-block's keys at the references of later sub-blocks."""

  def write(distance: int):
    factor = [warp.Real(0.0)] * 4
    for m in range(distance):
      address = warp.add(tiles.totals, warp.times(place.block, 512))
      block = _lane_vector(place, address, 512 * m)
      factor = [f + t for f, t in zip(factor, block)]
    factor = [warp.exp2(f) for f in factor]
    slot = _far_slot(tiles, distance, place.block)
    for j in range(16):
      values = _products(inverse_rows[j], factor)
      warp.store(*place.far_token(slot, j), _packed(values))

  for distance in range(1, _BLOCKS):
    inside = warp.compare(place.block, 'slt', _BLOCKS - distance)
    warp.only_if(inside, lambda distance=distance: write(distance))


def _far_slot(tiles: Tiles, distance: int, key_block: warp.Word) -> warp.Word:
  slot = warp.add(key_block, _FAR_SLOT[distance])
  return warp.add(tiles.far, warp.times(slot, 2 * _BLOCK_ROWS))


def _gram(queries, keys, right) -> list[warp.Real]:
  """[16, 16] products of both left operands; right(s) loads 16 channels."""
  acc = [warp.zeros(4) for _ in range(4)]
  for s in range(8):
    b = right(s)
    for i, left in enumerate((queries[s], keys[s])):
      for n in range(2):
        acc[2 * i + n] = warp.multiply(acc[2 * i + n], left, (b[n], b[n + 2]))
  return [x for a in acc for x in a]


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
  """scale P and A of one block from its raw products; 8 entries each."""
  token = warp.add(warp.times(place.block, 16), place.row)
  address = warp.add(tiles.beta, warp.shift_left(token, 2))
  beta = [warp.load_real(address, 32 * i, 1)[0] for i in range(2)]
  scores = [x * options.scale for x in block[:8]]
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


def _tile_products(place: Place, tiles: Tiles, options: Options):
  """Writes scale P; returns the blocks of A of this warp's rows by distance."""
  load = lambda tile: [
    warp.load_block(place.tile(tile, s % 4), s // 4 * _HALF) for s in range(8)
  ]
  queries, keys = load(tiles.query), load(tiles.key)

  def own(s: int):
    return warp.load_block(place.tile(tiles.gate, s % 4), s // 4 * _HALF)

  def products(distance: int) -> list[warp.Real]:
    right = own
    if distance:
      block = warp.add(place.block, -distance)
      slot = _far_slot(tiles, distance, block)

      def right(s: int):
        address = place.far_tile(slot, s % 4)
        return warp.load_block(address, s // 4 * _BLOCK_ROWS)

    raw = _gram(queries, keys, right)
    scores, a = _finish_tiles(place, tiles, raw, distance, options)
    return scores + a

  blocks = []
  for distance in range(_BLOCKS):
    if distance:
      inside = warp.compare(place.block, 'sge', distance)
      both = warp.reals_if(
        inside, 16, lambda distance=distance: products(distance)
      )
    else:
      both = products(0)
    address = _column(place, tiles.scores(), distance)
    warp.store_block(address, 0, _words(both[:8]))
    blocks.append(both[8:])
  return blocks


def _column(place: Place, tile: warp.Word, distance: int) -> warp.Word:
  """Address of own rows and the columns `distance` blocks back, cyclically."""
  own_rows = warp.times(place.block, _BLOCK_ROWS)
  columns = warp.bit_and(warp.add(place.block, -distance), _BLOCKS - 1)
  return place.tile_at(tile, own_rows, columns)


def _invert(place: Place, tiles: Tiles, blocks) -> list[list[warp.Real]]:
  """Blocks of T of this warp's rows, by distance from the diagonal.

  Round d adds T at distance d: T_IJ = -T_II sum_m A_Im T_mJ, where the sum runs
  over J <= m < I and every T_mJ was written in an earlier round. Blocks travel
  through shared memory where the keys were, leading parts in the first half.
  """
  diagonal = _diagonal_inverse(place, blocks[0])
  inverse = [diagonal]
  left = Split([-x for x in diagonal])
  a = [None] + [Split(block) for block in blocks[1:]]

  def share(block, distance: int):
    parts = Split(block)
    address = _column(place, tiles.key, distance)
    warp.store_block(address, 0, parts.leading)
    warp.store_block(address, _HALF, parts.trailing)

  def substitute(distance: int) -> list[warp.Real]:
    y = warp.zeros(8)
    columns = warp.add(place.block, -distance)
    for back in range(1, distance + 1):
      rows = warp.times(warp.add(place.block, -back), _BLOCK_ROWS)
      address = place.tile_at(tiles.key, rows, columns)
      right = [
        warp.load_block(address, half, transposed=True) for half in (0, _HALF)
      ]
      y = _multiply_split(y, a[back], Split(words=right))
    return _multiply_split(warp.zeros(8), left, Split(y).right())

  for distance in range(1, _BLOCKS):
    share(inverse[-1], distance - 1)
    utils.warpgroup_barrier()
    inside = warp.compare(place.block, 'sge', distance)
    inverse.append(
      warp.reals_if(inside, 8, lambda distance=distance: substitute(distance))
    )
  return inverse


def _write_inverse(place: Place, tiles: Tiles, inverse, options: Options):
  """T diag(beta), and T where it is saved, to their tiles."""
  for distance, block in enumerate(inverse):
    if options.save_inverse:
      address = _column(place, tiles.saved(), distance)
      warp.store_block(address, 0, _words(block))
    columns = warp.bit_and(warp.add(place.block, -distance), _BLOCKS - 1)
    token = warp.add(warp.times(columns, 16), place.column)
    address = warp.add(tiles.beta, warp.shift_left(token, 2))
    beta = [warp.load_real(address, 32 * n, 2) for n in range(2)]
    scaled = [x * beta[i // 4][i % 2] for i, x in enumerate(block)]
    address = _column(place, tiles.inverse(), distance)
    warp.store_block(address, 0, _words(scaled))


def _gate_affine(place: Place, affine: ir.Value):
  """-a log2(e) of this head and its product with the bias, for exp2."""
  address = warp.advance(
    warp.global_address(affine), warp.shift_left(place.lane, 4)
  )
  slope = warp.load_global(address, 0, 4)[0]
  return slope, warp.load_global(address, 4 * WIDTH, 4)


def _emit(options: Options, tiles: Tiles, affine: ir.Value, outputs):
  """The work of one warpgroup on one chunk, up to the tiles left in `gate`."""
  place = Place()
  if options.activate_gate:
    affine = _gate_affine(place, affine)
  if options.normalize_qk:
    for i, tile in enumerate((tiles.query, tiles.key)):
      _inverse_norms(place, tile, warp.add(tiles.norms, 4 * CHUNK * i))
  decay = _cumulative_decay(place, tiles, affine, options)
  minus_key, query, end_key, gamma = outputs
  rows = [Rows(place, ref) for ref in (minus_key, query, end_key)]
  inverse_rows = _scale_rows(place, tiles, decay, (*rows, gamma), options)
  _spread_rows(place, tiles, inverse_rows)
  utils.warpgroup_barrier()
  blocks = _tile_products(place, tiles, options)
  inverse = _invert(place, tiles, blocks)
  _write_inverse(place, tiles, inverse, options)


_TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
# Offsets, in words, of the vectors that share one buffer.
_NORMS, _TOTALS, _BETA, _FLAGS = 0, 128, 640, 704


def _chunk(options: Options, refs, affine, outputs):
  """Calls `_emit` on a chunk's references from the surrounding kernel."""
  tile = plgpu.RefType(_TRANSFORMS)
  plain = plgpu.RefType()

  @plgpu.inline_mgpu(
    arg_types=(tile, tile, tile, plain, plain, plain, (plain,) * 4)
  )
  def prepare(ctx, query, key, gate, far, vectors, affine, outputs):
    del ctx
    query, key, gate, far, base = [
      warp.shared_address(ref) for ref in (query, key, gate, far, vectors)
    ]
    norms, totals, beta, flags = [
      warp.add(base, 4 * i) for i in (_NORMS, _TOTALS, _BETA, _FLAGS)
    ]
    flags = flags if options.masked else None
    tiles = Tiles(query, key, gate, far, norms, totals, beta, flags)
    _emit(options, tiles, affine, outputs)

  prepare(*refs, affine, outputs)


def _one_chunk(options: Options, place, outer, scratch):
  """One chunk of one value head, from copy in to copy out."""
  b, head, key_head, n = place
  query_s, key_s, gate_s, far_s, vectors_s, arrived = scratch
  tokens = pl.ds(n * CHUNK, CHUNK)
  sources = (('q', key_head), ('k', key_head), ('gate', head))
  for (name, h), tile in zip(sources, (query_s, key_s, gate_s)):
    for half in range(2):
      part = outer[name].at[b, tokens, h, pl.ds(64 * half, 64)]
      plgpu.copy_gmem_to_smem(part, tile.at[half], arrived)
  beta = vectors_s.at[pl.ds(_BETA, CHUNK)]
  plgpu.copy_gmem_to_smem(outer['beta'].at[b, head, tokens], beta, arrived)
  if options.masked:
    flags = vectors_s.at[pl.ds(_FLAGS, CHUNK)]
    plgpu.copy_gmem_to_smem(outer['flags'].at[b, tokens], flags, arrived)
  plgpu.barrier_wait(arrived)
  rows = [
    outer[o].at[b, head, tokens] for o in ('minus_key', 'query', 'end_key')
  ]
  outputs = (*rows, outer['gamma'].at[b, head, n])
  tiles = (query_s, key_s, gate_s, far_s, vectors_s)
  _chunk(options, tiles, outer['affine'].at[head], outputs)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(gate_s.at[0], outer['scores'].at[b, head, tokens])
  plgpu.copy_smem_to_gmem(gate_s.at[1], outer['inverse'].at[b, head, tokens])
  if options.save_inverse:
    saved = outer['saved_inverse'].at[b, head, tokens]
    plgpu.copy_smem_to_gmem(query_s.at[0], saved)
  plgpu.wait_smem_to_gmem(0)


def _body(options: Options, names, sizes, *refs):
  """One thread block: a chunk for each of its warpgroups."""
  heads, group, chunks, total, warpgroups = sizes
  outer = dict(zip(names, refs))
  role = lax.axis_index('role')
  scratch = [ref.at[role] for ref in refs[len(names) :]]
  index = lax.axis_index('chunk') * warpgroups + role

  @pl.when(index < total)
  def _():
    head, rest = lax.rem(index, heads), lax.div(index, heads)
    b, n = lax.div(rest, chunks), lax.rem(rest, chunks)
    place = (b, head, lax.div(head, group), n)
    _one_chunk(options, place, outer, scratch)


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
    minus_key, query, end_key: -k~, scale q~ and k^ [B, HV, N * 64, 128];
    scores, inverse: scale P and T diag(beta) [B, HV, N * 64, 64], bfloat16;
    gamma [B, HV, N, 128] float32; saved_inverse, T, if options.save_inverse.
  """
  batch, heads, padded = beta.shape
  chunks = padded // CHUNK
  wide = jax.ShapeDtypeStruct((batch, heads, padded, WIDTH), jnp.bfloat16)
  square = jax.ShapeDtypeStruct((batch, heads, padded, CHUNK), jnp.bfloat16)
  gamma = jax.ShapeDtypeStruct((batch, heads, chunks, WIDTH), jnp.float32)
  outputs = dict(minus_key=wide, query=wide, end_key=wide)
  outputs.update(scores=square, inverse=square, gamma=gamma)
  inputs = dict(q=q, k=k, gate=gate, beta=beta, affine=affine)
  if options.masked:
    inputs['flags'] = lax.bitcast_convert_type(flags, jnp.float32)
  if options.save_inverse:
    outputs['saved_inverse'] = square
  names = (*inputs, *outputs)
  total = batch * heads * chunks
  sizes = (heads, heads // q.shape[2], chunks, total, warpgroups)
  lead = (warpgroups,)
  tile = plgpu.SMEM((*lead, 2, CHUNK, 64), jnp.bfloat16, transforms=_TRANSFORMS)
  words = _FLAGS + (CHUNK if options.masked else 0)
  kernel = plgpu.kernel(
    lambda *refs: _body(options, names, sizes, *refs),
    out_type=tuple(outputs.values()),
    grid=(pl.cdiv(total, warpgroups),),
    grid_names=('chunk',),
    num_threads=warpgroups,
    thread_name='role',
    kernel_name='kda_prepare',
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane,
      reduction_scratch_bytes=0,
    ),
    scratch_types=[
      tile,
      tile,
      tile,
      plgpu.SMEM((*lead, 6 * 16 * WIDTH), jnp.bfloat16),
      plgpu.SMEM((*lead, words), jnp.float32),
      plgpu.Barrier(num_arrivals=7 + options.masked, num_barriers=warpgroups),
    ],
  )
  return dict(zip(outputs, kernel(*inputs.values())))
