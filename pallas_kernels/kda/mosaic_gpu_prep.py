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
the key tile carries blocks of T from warp to warp, the query tile holds T
diag(beta) in two bfloat16 parts and the gate tile k^. Where channels hardly
decay the errors of k^ would add up over chunks: there the key tile holds its
second bfloat16 part, which waits in global memory, where W will be, until T has
left. W is staged where k^ was and Q where P was. A second gate tile takes the
next chunk's gates early; its queries and keys come when the last products have
read their operands, which its work on the gates then hides.

With documents two kernels run, one without masks over the chunks that need
none, and one with masks over the others.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir

from pallas_kernels.kda import mosaic_gpu_tasks as tasks_of
from pallas_kernels.kda import mosaic_gpu_tiles as blocks
from pallas_kernels.kda import mosaic_gpu_warp as warp
from pallas_kernels.kda.mosaic_gpu_place import (
  BLOCKS,
  CHUNK,
  ENTERS,
  HALF,
  LEAVES,
  VALID,
  WIDTH,
  Place,
  Tiles,
)

PROCESSORS = 132  # of an H100 or H200; any number is correct
_LOG2E = math.log2(math.e)
_BOTH_SIGNS = -0x7FFF8000  # the sign bits of both numbers of a word
# A chunk is slow if this many channels keep more than this power of two.
_SLOW_CHANNELS, _SLOW_DECAY = WIDTH // 8, -3.0


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
    chosen: only chunks whose word in `plain` is this one; None: all.
  """

  lower_bound: float
  scale: float
  normalize_qk: bool = True
  activate_gate: bool = True
  masked: bool = False
  save_inverse: bool = False
  chosen: int | None = None

  @property
  def offset(self) -> int:
    """c of the file's docstring, in powers of two."""
    return math.ceil(8 * abs(self.lower_bound) * _LOG2E)


def _inverse_norms(place: Place, tiles: Tiles, scale: float):
  """scale / |q| and 1 / |k| of this warp's rows: diagonals of rows @ rows^T."""
  named = (tiles.query, scale), (tiles.key, 1.0)
  products = [[warp.zeros(4), warp.zeros(4)] for _ in named]
  for s in range(8):
    half = s // 4 * HALF
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
      if tiles.flags is not None:
        # What stands in a row that is no token may not even be a number.
        flag = warp.add(tiles.flags, warp.shift_left(token, 2))
        (flag,) = warp.load(flag, 32 * half, 1)
        valid = warp.compare(warp.bit_and(flag, 1 << VALID), 'ne', 0)
        norm = warp.where(valid, norm, 0.0)
      offset = 4 * CHUNK * i + 32 * half
      warp.store(address, offset, [norm], predicate=on_diagonal)


def _masks(place: Place, tiles: Tiles, bit: int):
  """A function of the token: all ones or zeros, or None if all are tokens."""
  if tiles.flags is None:
    return lambda j: None
  address = warp.add(tiles.flags, warp.times(place.block, 64))
  recent = []

  def mask(j: int) -> warp.Word:
    if j % 4 == 0:
      recent[:] = warp.load(address, 4 * j, 4)
    return warp.bit_mask(recent[j % 4], bit)

  return mask


def _kept(words, mask: warp.Word | None) -> list[warp.Word]:
  return words if mask is None else [warp.keep(w, mask) for w in words]


def _cumulative_decay(place: Place, tiles: Tiles, affine, options: Options):
  """c + G - s for each token and channel of this lane, in powers of two."""
  decay = [warp.Real(float(options.offset))] * 4
  masks = _masks(place, tiles, VALID)
  rows = []
  for j in range(16):
    words = warp.load(*place.token(tiles.gate, j), 2)
    mask = masks(j)
    gates = [x for w in _kept(words, mask) for x in warp.unpack(w)]
    bound = options.lower_bound * _LOG2E if options.activate_gate else _LOG2E
    if mask is not None:
      bound = warp.keep_real(bound, mask)
    for i in range(4):
      strength = gates[i]
      if options.activate_gate:
        slope, shift = affine
        power = warp.exp2(warp.fma(gates[i], slope, shift[i]))
        strength = warp.reciprocal(power + 1.0)
      decay[i] = warp.fma(strength, bound, decay[i])
    rows.append(list(decay))
  return rows


def _references(place: Place, tiles: Tiles):
  """Decay before each sub-block and in all of them, exact and rounded."""
  lane = warp.add(tiles.totals, warp.shift_left(place.lane, 4))
  sums = [[warp.Real(0.0)] * 4]
  for m in range(BLOCKS):
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
    rest: of the chunk's decay, what the rounded end leaves out.
    slow: a condition, the same in all warps: many channels hardly decay.
  """

  shift: list[warp.Real]
  entering: list[warp.Word]
  leaving: list[warp.Word]
  earlier: list[list[warp.Word]]
  whole: list[warp.Real]
  rest: list[warp.Real]
  slow: ir.Value


def _block_factors(place: Place, tiles: Tiles, decay, offset: int) -> Factors:
  """Combines the decays of all sub-blocks, through shared memory."""
  own = warp.add(tiles.totals, warp.times(place.block, 512))
  own = warp.add(own, warp.shift_left(place.lane, 4))
  warp.store(own, 0, [x - float(offset) for x in decay])
  utils.warpgroup_barrier()
  sums, references = _references(place, tiles)
  start = _of_block(place, sums[:BLOCKS], 0)
  reference = _of_block(place, references[:BLOCKS], 0)

  def words(exponents) -> list[warp.Word]:
    return warp.packed([warp.exp2(x) for x in exponents])

  earlier = [
    words(_differences(reference, _of_block(place, references[:BLOCKS], -d)))
    for d in range(1, BLOCKS)
  ]
  return Factors(
    shift=_differences(start, reference),
    entering=words([r - float(offset) for r in reference]),
    leaving=words(
      [e - r + float(offset) for e, r in zip(references[-1], reference)]
    ),
    earlier=earlier,
    whole=[warp.exp2(x) for x in sums[-1]],
    rest=_differences(sums[-1], references[-1]),
    slow=_slow(sums[-1]),
  )


def _slow(decay) -> ir.Value:
  """Do so many channels keep so much that rounded keys could add up?"""
  count = warp.word(0)
  for x in decay:
    keeps = warp.greater(x, _SLOW_DECAY)
    count = warp.add(count, warp.where(keeps, warp.word(1), warp.word(0)))
  return warp.compare(warp.warp_sum(count), 'sge', _SLOW_CHANNELS)


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

  def write(self, j: int, words):
    warp.store_global(self._address, j * 2 * WIDTH, words)

  def read(self, j: int) -> list[warp.Word]:
    return warp.load_global_words(self._address, j * 2 * WIDTH, 2)


def _rows_of(place: Place, tile: warp.Word, norm_of, masks):
  """The 16 tokens of this warp, normalised: a function of the token.

  Each call also starts the load of the next token, ahead of any store that
  follows the call, since loads do not pass stores.
  """
  ahead = [warp.load(*place.token(tile, 0), 2)]

  def row(j: int) -> list[warp.Real]:
    words = _kept(ahead[0], masks(j))
    if j < 15:
      ahead[0] = warp.load(*place.token(tile, j + 1), 2)
    values = [x for w in words for x in warp.unpack(w)]
    norm = norm_of(j)
    return values if norm is None else [x * norm for x in values]

  return row


def _scale_rows(options: Options, chunk, decay, outputs) -> Factors:
  """Scales queries and keys in place and writes -k~ and scale q~.

  In a slow chunk what rounding takes from the inversely scaled keys waits in
  global memory, where W will be.
  """
  place, tiles = chunk
  factors = _block_factors(place, tiles, decay[15], options.offset)
  *rows, gamma = outputs
  _write_gamma(place, tiles, factors.whole, gamma)

  def scale(slow: bool):
    loaded = [
      _rows_of(place, tile, norm, _masks(place, tiles, VALID))
      for tile, norm in zip(
        (tiles.query, tiles.key), _norms_of(place, tiles, options)
      )
    ]
    _scale_tokens(chunk, decay, factors, (loaded, rows, slow))

  # Two copies, since a branch for every token would cost more than it spares.
  warp.either(factors.slow, lambda: scale(True), lambda: scale(False))
  return factors


def _scale_tokens(chunk, decay, factors: Factors, io):
  """The tokens of `_scale_rows`, one by one."""
  (place, tiles), ((query_row, key_row), rows, slow) = chunk, io
  minus_key, query, update = rows
  enters = _masks(place, tiles, ENTERS)
  to_minus = [warp.xor(w, _BOTH_SIGNS) for w in factors.entering]
  for j in range(16):
    power = [x + s for x, s in zip(decay[j], factors.shift)]
    growth = [warp.exp2(x) for x in power]
    keys, queries = key_row(j), query_row(j)
    scaled_keys = warp.packed(_products(keys, growth))
    inverse = [k * warp.exp2(-x) for k, x in zip(keys, power)]
    rounded = warp.packed(inverse)
    scaled_queries = warp.packed(_products(queries, growth))
    warp.store(*place.token(tiles.key, j), scaled_keys)
    warp.store(*place.token(tiles.gate, j), rounded)
    warp.store(*place.token(tiles.query, j), scaled_queries)
    if slow:
      update.write(j, _remainders(inverse, rounded))
    mask = enters(j)
    words = warp.pair_products(scaled_keys, to_minus)
    minus_key.write(j, _kept(words, mask))
    words = warp.pair_products(scaled_queries, factors.entering)
    query.write(j, _kept(words, mask))


def _remainders(values, rounded) -> list[warp.Word]:
  whole = [x for w in rounded for x in warp.unpack(w)]
  return warp.packed(_differences(values, whole))


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


def _products(a, b) -> list[warp.Real]:
  return [x * y for x, y in zip(a, b)]


def _write_gamma(place: Place, tiles: Tiles, whole, gamma: ir.Value):
  """exp(G_end); 0 where the document that entered the chunk does not leave."""
  if tiles.flags is not None:
    last = warp.load(tiles.flags, 4 * (CHUNK - 1), 1)
    stays = warp.compare(warp.bit_and(last[0], 1 << ENTERS), 'ne', 0)
    whole = [warp.where(stays, x, 0.0) for x in whole]
  address = warp.advance(
    warp.global_address(gamma), warp.shift_left(place.lane, 4)
  )
  first = warp.compare(place.block, 'eq', 0)
  warp.store_global(address, 0, whole, predicate=first)


def _end_rows(place: Place, tiles: Tiles, factors: Factors):
  """k^ over the inversely scaled keys, but for the factor `rest`."""
  leaves = _masks(place, tiles, LEAVES)
  for first in range(0, 16, 8):
    addresses = [place.token(tiles.gate, first + j) for j in range(8)]
    rows = [warp.load(*address, 2) for address in addresses]
    for j, words in enumerate(rows):
      words = _kept(
        warp.pair_products(words, factors.leaving), leaves(first + j)
      )
      warp.store(*addresses[j], words)


def _end_remainders(place: Place, tiles: Tiles, factors: Factors, rows: Rows):
  """What rounding took from k^ over `rest`, where the keys were."""
  utils.warpgroup_barrier()  # all warps are done with blocks of T there
  leaves = _masks(place, tiles, LEAVES)
  for first in range(0, 16, 8):
    loaded = [rows.read(first + j) for j in range(8)]
    for j, words in enumerate(loaded, first):
      words = _kept(warp.pair_products(words, factors.leaving), leaves(j))
      warp.store(*place.token(tiles.key, j), words)
  warp.order_global()


def _share_rest(place: Place, tiles: Tiles, factors: Factors):
  """Stores the factor of W's channels, in place of norms, and `slow`."""
  address = warp.add(tiles.norms, warp.shift_left(place.lane, 4))
  first = warp.compare(place.block, 'eq', 0)
  rest = [warp.exp2(x) for x in factors.rest]
  warp.store(address, 0, rest, predicate=first)
  slow = warp.where(factors.slow, warp.Real(1.0), 0.0)
  address = warp.add(tiles.norms, 4 * (_SLOW - _NORMS))
  only = warp.compare(warp.union(place.block, place.lane), 'eq', 0)
  warp.store(address, 0, [slow], predicate=only)


def _affine_address(place: Place, affine: ir.Value) -> ir.Value:
  lane = warp.shift_left(place.lane, 4)
  return warp.advance(warp.global_address(affine), lane)


def _gate_affine(place: Place, affine: ir.Value):
  """-a log2(e) of this head and its product with the bias, for exp2."""
  address = _affine_address(place, affine)
  slope = warp.load_global(address, 0, 4)[0]
  return slope, warp.load_global(address, 4 * WIDTH, 4)


def _emit(options: Options, tiles: Tiles, decay, outputs):
  """What follows the gate, up to the tiles of P, T and k^."""
  place = Place()
  decay = [decay[4 * j : 4 * j + 4] for j in range(16)]
  if options.normalize_qk:
    _inverse_norms(place, tiles, options.scale)
  written = *[Rows(place, ref) for ref in outputs[:3]], outputs[3]
  factors = _scale_rows(options, (place, tiles), decay, written)
  utils.warp_barrier()
  a = blocks.tile_products(place, tiles, 0)
  rows = [blocks.diagonal_inverse(place, a)]
  utils.warpgroup_barrier()
  _share_rest(place, tiles, factors)
  blocks.share_factors(place, tiles, factors.earlier)
  for distance in range(1, BLOCKS):
    rows.append(blocks.tile_products(place, tiles, distance))
  inverse = blocks.invert(place, tiles, rows)
  if options.save_inverse:
    blocks.save_inverse(place, inverse, outputs[4])
  _end_rows(place, tiles, factors)
  warp.only_if(
    factors.slow,
    lambda: _end_remainders(place, tiles, factors, written[2]),
  )
  blocks.write_inverse(place, tiles, inverse)


_TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
# Tiles [64, 64] of one chunk: query and key by halves; gate by halves, twice,
# since the next chunk's gates arrive beside k^ and W of this one; P and then Q.
_QUERY, _KEY, _GATE, _SCORES, _TILES = 0, 2, 4, 8, 9
# Offsets, in words, of the vectors that share one buffer; flags come twice.
_NORMS, _TOTALS, _BETA, _FLAGS, _WORDS = 0, 128, 640, 704, 832
_REST = _NORMS
_SLOW = _TOTALS + 3 * WIDTH  # factors for earlier keys end before it
_PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)
_CARRIED = (CHUNK, WIDTH)


def _local(options: Options, local) -> Tiles:
  """Addresses from references to tiles, gate, vectors and flags."""
  tiles, gate, vectors, flags = map(warp.shared_address, local)
  query, key, scores = [
    warp.add(tiles, i * HALF) for i in (_QUERY, _KEY, _SCORES)
  ]
  norms, totals, beta = [
    warp.add(vectors, 4 * i) for i in (_NORMS, _TOTALS, _BETA)
  ]
  flags = flags if options.masked else None
  return Tiles(query, key, gate, scores, norms, totals, beta, flags)


def _gates(options: Options, local, affine) -> jax.Array:
  """Calls `_cumulative_decay`; the result only carries registers."""
  tile, plain = plgpu.RefType(_TRANSFORMS), plgpu.RefType()
  layout = plgpu.Layout.WG_STRIDED(_CARRIED, vec_size=1)

  @plgpu.inline_mgpu(
    arg_types=((tile, tile, plain, plain), plain),
    return_type=plgpu.ShapeDtypeStruct(_CARRIED, jnp.float32, layout=layout),
  )
  def gates(ctx, local, affine):
    del ctx
    place = Place()
    affine = _gate_affine(place, affine) if options.activate_gate else None
    tiles = _local(options, local)
    rows = _cumulative_decay(place, tiles, affine, options)
    return warp.carry([x for row in rows for x in row], _CARRIED)

  return gates(local, affine)


def _operands(options: Options, local, decay, outputs):
  """Calls `_emit`."""
  tile, plain = plgpu.RefType(_TRANSFORMS), plgpu.RefType()
  layout = plgpu.Layout.WG_STRIDED(_CARRIED, vec_size=1)

  @plgpu.inline_mgpu(
    arg_types=((tile, tile, plain, plain), layout, (plain,) * len(outputs))
  )
  def operands(ctx, local, decay, outputs):
    del ctx
    _emit(options, _local(options, local), warp.carried(decay), outputs)

  operands(local, decay, outputs)


@dataclasses.dataclass(frozen=True)
class Owned:
  """What one warpgroup works with while it is at one chunk.

  Attributes:
    tiles, vectors: its shared memory.
    rows_arrived, gate_arrived: barriers.
    slot: which of the two places holds this chunk's gates and flags, 0 or 1.
  """

  tiles: Any
  vectors: Any
  rows_arrived: Any
  gate_arrived: Any
  slot: Any

  def gate(self, half: int = 0, *, following: bool = False):
    slot = 1 - self.slot if following else self.slot
    return self.tiles.at[_GATE + 2 * slot + half]

  def flags(self, *, following: bool = False):
    slot = 1 - self.slot if following else self.slot
    return self.vectors.at[pl.ds(_FLAGS + CHUNK * slot, CHUNK)]


def _expect_affine(affine):
  """Prefetches what `_gate_affine` will load."""

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
  def prefetch(ctx, affine):
    del ctx
    address = _affine_address(Place(), affine)
    for row in range(2):
      warp.prefetch(address, 4 * WIDTH * row)

  prefetch(affine)


def _fetch_gate(options: Options, place, refs, *, following: bool):
  """Starts the copies of a chunk's gates and flags."""
  (outer, own), (b, head, _, n) = refs, place
  tokens = pl.ds(n * CHUNK, CHUNK)
  _expect_affine(outer['affine'].at[head])
  for half in range(2):
    source = outer['gate'].at[b, tokens, head, pl.ds(64 * half, 64)]
    dest = own.gate(half, following=following)
    plgpu.copy_gmem_to_smem(source, dest, own.gate_arrived)
  if options.masked:
    dest = own.flags(following=following)
    source = outer['flags'].at[b, tokens]
    plgpu.copy_gmem_to_smem(source, dest, own.gate_arrived)


def _fetch_rows(place, outer, own: Owned):
  """Starts the copies of a chunk's queries, keys and betas."""
  b, head, key_head, n = place
  tokens = pl.ds(n * CHUNK, CHUNK)
  for name, first in (('q', _QUERY), ('k', _KEY)):
    for half in range(2):
      source = outer[name].at[b, tokens, key_head, pl.ds(64 * half, 64)]
      dest = own.tiles.at[first + half]
      plgpu.copy_gmem_to_smem(source, dest, own.rows_arrived)
  dest = own.vectors.at[pl.ds(_BETA, CHUNK)]
  source = outer['beta'].at[b, head, tokens]
  plgpu.copy_gmem_to_smem(source, dest, own.rows_arrived)


def _apply_inverse(own: Owned, slow: bool):
  """The halves of W and Q, from T diag(beta) in two parts, k^ and P.

  In a slow chunk k^ has two parts as well.
  """

  def products(*accumulators):
    for part in range(2):
      inverse = own.tiles.at[_QUERY + part]
      for half in range(2):
        plgpu.wgmma(accumulators[half], inverse.T, own.gate(half))
      plgpu.wgmma(accumulators[2], own.tiles.at[_SCORES], inverse)
    if slow:
      inverse = own.tiles.at[_QUERY]
      for half in range(2):
        remainder = own.tiles.at[_KEY + half]
        plgpu.wgmma(accumulators[half], inverse.T, remainder)
    return tuple(acc[...] for acc in accumulators)

  tile = plgpu.ACC((CHUNK, 64), jnp.float32)
  *update, scores = lax.optimization_barrier(
    pl.run_scoped(products, tile, tile, tile)
  )
  for half in range(2):
    rest = own.vectors.at[pl.ds(_REST + 64 * half, 64)]
    rest = plgpu.load(rest, layout=_PER_COLUMN, optimized=False)
    update[half] *= lax.broadcast_in_dim(rest, (CHUNK, 64), [1])
  return *update, scores


def _stage_products(own: Owned, slow: bool):
  """W, where k^ was, and Q, where P was."""
  *update, scores = _apply_inverse(own, slow)
  plgpu.commit_smem()  # every warp's products have read their operands
  for half in range(2):
    own.gate(half)[...] = update[half].astype(jnp.bfloat16)
  own.tiles.at[_SCORES][...] = scores.astype(jnp.bfloat16)
  plgpu.commit_smem()


def _store_tiles(place, outer, own: Owned):
  """Starts the copies of W and Q."""
  b, head, _, n = place
  tokens = pl.ds(n * CHUNK, CHUNK)
  for half in range(2):
    dest = outer['update'].at[b, head, tokens, pl.ds(64 * half, 64)]
    plgpu.copy_smem_to_gmem(own.gate(half), dest)
  dest = outer['scores'].at[b, head, tokens]
  plgpu.copy_smem_to_gmem(own.tiles.at[_SCORES], dest)


def _one_chunk(options: Options, place, following, refs):
  """One chunk, with the copies of the next as soon as there is room.

  `place` is a function; `following` has two: for the gates, and for the rest.
  """
  outer, own = refs
  b, head, _, n = place()
  tokens = pl.ds(n * CHUNK, CHUNK)
  names = 'minus_key', 'query', 'update'
  written = [outer[o].at[b, head, tokens] for o in names]
  written.append(outer['gamma'].at[b, head, n])
  if options.save_inverse:
    written.append(outer['saved_inverse'].at[b, head, tokens])

  plgpu.barrier_wait(own.gate_arrived)
  flags = own.flags() if options.masked else own.vectors
  local = own.tiles, own.gate(), own.vectors, flags
  decay = _gates(options, local, outer['affine'].at[head])
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)
  following[0]()
  plgpu.barrier_wait(own.rows_arrived)
  _operands(options, local, decay, tuple(written))
  plgpu.commit_smem()
  # Two copies, since accumulators that cross a branch serialise the products.
  slow = own.vectors[_SLOW] != 0
  pl.when(slow)(lambda: _stage_products(own, True))
  pl.when(~slow)(lambda: _stage_products(own, False))
  following[1]()
  _store_tiles(place(), outer, own)


@dataclasses.dataclass(frozen=True)
class Work:
  """How many chunks there are, and how many warpgroups in a block.

  Attributes:
    batch, heads, group: rows, value heads, and value heads to a key head.
    chunks: of a sequence.
    warpgroups: of a thread block; each has its own chunk.
  """

  batch: int
  heads: int
  group: int
  chunks: int
  warpgroups: int = 3

  @property
  def total(self) -> int:
    return self.batch * self.heads * self.chunks

  @property
  def blocks(self) -> int:
    return min(PROCESSORS, pl.cdiv(self.total, self.warpgroups))

  def locate(self, index):
    """(batch row, value head, key head, chunk) of one task."""
    head, rest = lax.rem(index, self.heads), lax.div(index, self.heads)
    b, n = lax.div(rest, self.chunks), lax.rem(rest, self.chunks)
    return b, head, lax.div(head, self.group), n


def _body(options: Options, work: Work, names, *refs):
  """One thread block: each of its warpgroups works through chunks."""
  outer, scratch = dict(zip(names, refs)), refs[len(names) :]
  role = lax.axis_index('role')
  worker = lax.axis_index('block') * work.warpgroups + role
  workers = work.blocks * work.warpgroups

  def owned(zero, slot) -> Owned:
    words = _words(options)
    vectors = scratch[1].at[pl.ds((role + zero) * words, words)]
    tiles, *barriers = [scratch[i].at[role + zero] for i in (0, 2, 3)]
    return Owned(tiles, vectors, *barriers, slot)

  def fetches(index, own: Owned, ahead: bool):
    """Two functions that start the copies of task index(), if it exists."""

    def gate(place):
      _fetch_gate(options, place, (outer, own), following=ahead)

    def if_any(fetch):
      i = index()
      pl.when(i < work.total)(lambda: fetch(work.locate(i)))

    rows = lambda place: _fetch_rows(place, outer, own)
    return (lambda: if_any(gate)), (lambda: if_any(rows))

  def task(i, index, then):
    """One chunk; `index` and `then` are functions."""
    # A zero that the compiler cannot see: addresses computed before the loop
    # would have to wait in local memory, which is slower than computing them.
    own = owned(lax.shift_right_logical(i, 30), lax.rem(i, 2))
    following = fetches(then, own, True)
    place = lambda: work.locate(index())
    _one_chunk(options, place, following, (outer, own))

  def begin(index):
    for start in fetches(index, owned(0, 0), False):
      start()

  if options.chosen is None:
    begin(lambda: worker)

    @pl.loop(0, lax.div(work.total - worker + workers - 1, workers))
    def _(i):
      index = worker + i * workers
      task(i, lambda: index, lambda: index + workers)
  else:
    tasks = tasks_of.Tasks(work.total, work.heads, workers, options.chosen)
    first = work.warpgroups * _words(options) + role * tasks_of.WORDS
    stash = scratch[1].at[pl.ds(first, tasks_of.WORDS)]
    chosen = tasks_of.Worker(tasks, outer['plain'], stash)
    chosen.begin(worker)
    begin(chosen.following)

    def step(carry):
      i, _ = carry
      chosen.advance()
      task(i, chosen.at_hand, chosen.following)
      return i + 1, chosen.following()

    start = jnp.int32(0), chosen.following()
    lax.while_loop(lambda carry: carry[1] < work.total, step, start)
  plgpu.wait_smem_to_gmem(0)


def _inputs(arrays: dict[str, jax.Array], options: Options) -> dict:
  """What the kernel reads, by name, from `prepare`'s arrays."""
  names = ['q', 'k', 'gate', 'beta', 'affine']
  read = {name: arrays[name] for name in names}
  if options.masked:
    # One buffer holds all vectors, so the flags travel as float32 words.
    flags = arrays['flags']
    read['flags'] = lax.bitcast_convert_type(flags, jnp.float32)
  if options.chosen is not None:
    read['plain'] = arrays['plain']
  return read


def _outputs(work: Work, options: Options) -> dict[str, jax.ShapeDtypeStruct]:
  """What the kernel writes, by name."""
  lead = (work.batch, work.heads)
  tokens = (*lead, work.chunks * CHUNK)
  wide = jax.ShapeDtypeStruct((*tokens, WIDTH), jnp.bfloat16)
  square = jax.ShapeDtypeStruct((*tokens, CHUNK), jnp.bfloat16)
  gamma = jax.ShapeDtypeStruct((*lead, work.chunks, WIDTH), jnp.float32)
  named = dict(minus_key=wide, query=wide, update=wide)
  named.update(scores=square, gamma=gamma)
  if options.save_inverse:
    named['saved_inverse'] = square
  return named


def _words(options: Options) -> int:
  """Length of the vectors of one chunk."""
  return _WORDS if options.masked else _FLAGS


def _scratch(work: Work, options: Options) -> list:
  """Shared memory and barriers of a thread block."""
  warpgroups = work.warpgroups
  tiles = (warpgroups, _TILES, CHUNK, 64)
  # All vectors in one array: its end, too, lies on a whole KiB.
  words = _words(options) + tasks_of.WORDS * (options.chosen is not None)
  return [
    plgpu.SMEM(tiles, jnp.bfloat16, transforms=_TRANSFORMS),
    plgpu.SMEM((warpgroups * words,), jnp.float32),
    plgpu.Barrier(num_arrivals=5, num_barriers=warpgroups),
    plgpu.Barrier(num_arrivals=2 + options.masked, num_barriers=warpgroups),
  ]


def prepare(
  arrays: dict[str, jax.Array], work: Work, options: Options
) -> dict[str, jax.Array]:
  """The scan's operands for every chunk.

  Args:
    arrays: q, k [B, T, H, 128] and gate [B, T, HV, 128] bfloat16, raw; beta
      [B, HV, N * 64] float32, zero for tokens that are no tokens; affine
      [HV, 2, 128] float32, -exp(a_log) log2(e) and its product with the bias;
      if options.masked flags [B, N * 64] and plain [B, N], int32, see
      `mosaic_gpu_flags`.
    work: see `Work`.
    options: see `Options`.

  Returns:
    minus_key, query, update: -k~, scale q~ and W [B, HV, N * 64, 128]; scores:
    Q [B, HV, N * 64, 64], bfloat16; gamma [B, HV, N, 128] float32;
    saved_inverse, T, like Q, if options.save_inverse.
  """
  if not options.masked:
    return _launch(arrays, work, options)
  # Most chunks lie inside one document and need no masks.
  plain = dataclasses.replace(options, masked=False, chosen=1)
  written = _launch(arrays, work, plain)
  return _launch(arrays, work, dataclasses.replace(options, chosen=0), written)


def _launch(arrays, work: Work, options: Options, into=None) -> dict:
  """One kernel, whose results go to new arrays or `into` those given."""
  read, written = _inputs(arrays, options), _outputs(work, options)
  names = (*read, *written)
  refs = {} if into is None else {n: jax.new_ref(x) for n, x in into.items()}
  kernel = plgpu.kernel(
    lambda *refs: _body(options, work, names, *refs),
    out_type=() if refs else tuple(written.values()),
    grid=(work.blocks,),
    grid_names=('block',),
    num_threads=work.warpgroups,
    thread_name='role',
    kernel_name='kda_prepare',
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane,
      reduction_scratch_bytes=0,
      unsafe_no_auto_barriers=True,
    ),
    scratch_types=_scratch(work, options),
  )
  results = kernel(*read.values(), *refs.values())
  if refs:
    return {name: jax.freeze(ref) for name, ref in refs.items()}
  return dict(zip(written, results))
