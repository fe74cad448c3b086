"""Elementwise work of the gradient kernel: lanes own channels, warps tokens.

A lane has two channels of the 16 tokens of a sub-block. Before the products:
norms, the running decay, and scaled queries and keys; after them: the
gradients of q and k through their norms, and the sums over later tokens that
make the gradient of the gate. `mosaic_gpu_gradient` has the formulas.
"""

from __future__ import annotations

import math

from pallas_kernels.kda import mosaic_gpu_gradient_place as at
from pallas_kernels.kda import mosaic_gpu_warp as warp
from pallas_kernels.kda.mosaic_gpu_gradient_place import Seat, Shared
from pallas_kernels.kda.mosaic_gpu_place import (
  BLOCKS,
  CHUNK,
  ENTERS,
  HALF,
  SEGMENT,
  VALID,
  WIDTH,
)

_LOG2E = math.log2(math.e)
_BOTH_SIGNS = -0x7FFF8000  # the sign bits of both numbers of a word


def flags_of(seat: Seat, shared: Shared):
  """A function of the token j of this sub-block: its flags, or None."""
  if not shared.masked:
    return lambda j: None
  start = shared.of_token(at.FLAGS, warp.shift_left(seat.block, 4))
  recent = {}

  def flags(j: int) -> warp.Word:
    if j // 4 not in recent:
      recent.clear()
      recent[j // 4] = warp.load(start, 16 * (j // 4), 4)
    return recent[j // 4][j % 4]

  return flags


def _kept(w: warp.Word, flags: warp.Word | None, bit: int) -> warp.Word:
  return w if flags is None else warp.keep(w, warp.bit_mask(flags, bit))


def store_norms(seat: Seat, shared: Shared, options):
  """Role 0: scale / |q|; role 1: 1 / |k|; without normalisation scale and 1."""
  first = warp.compare(seat.role, 'eq', 0)
  factor = warp.where(first, warp.Real(options.scale), 1.0)
  rows = warp.add(warp.shift_left(seat.block, 4), seat.row)
  index = warp.add(warp.shift_left(seat.role, 6), rows)
  address = shared.of_token(at.NORMS, index)
  mine, elements = at.on_diagonal(seat)
  if not options.normalize_qk:
    for half in range(2):
      warp.store(address, 32 * half, [factor], predicate=mine)
    return
  tile = warp.add(shared.tile(at.QUERY), warp.times(seat.role, 2 * HALF))
  near, far = warp.zeros(4), warp.zeros(4)
  for s in range(8):
    half = s // 4 * HALF
    a = warp.load_block(seat.left(tile, seat.block, s % 4), half)
    b = warp.load_block(seat.right(tile, seat.block, s % 4), half)
    near = warp.multiply(near, a, b[:2])
    far = warp.multiply(far, a, b[2:])
  for half, square in enumerate(elements(near, far)):
    norm = warp.rsqrt(square + 1e-6) * factor
    if shared.masked:
      # What stands in a row that is no token may not even be a number.
      (flag,) = warp.load(shared.of_token(at.FLAGS, rows), 32 * half, 1)
      valid = warp.compare(warp.bit_and(flag, 1 << VALID), 'ne', 0)
      norm = warp.where(valid, norm, 0.0)
    warp.store(address, 32 * half, [norm], predicate=mine)


class Gates:
  """The gates of this lane's channels, token by token.

  Attributes:
    affine: slope and shift of the argument of the sigmoid's power of two; None
      if the gates are log decays.
  """

  def __init__(self, seat: Seat, shared: Shared, affine, options):
    self.affine = affine
    self._seat, self._tile = seat, shared.own(seat, at.GATE)
    self._flags = flags_of(seat, shared)
    bound = options.lower_bound if affine is not None else 1.0
    self._bound = bound * _LOG2E

  def load(self, j: int) -> list[warp.Real]:
    """Arguments of the powers of two, or log decays, of a token."""
    (word,) = warp.load(*self._seat.token(self._tile, j), 1)
    gates = warp.unpack(_kept(word, self._flags(j), VALID))
    if self.affine is None:
      return list(gates)
    slope, shift = self.affine
    return [warp.fma(x, slope, s) for x, s in zip(gates, shift)]

  def decay(self, j: int, sigmoids, decay) -> list[warp.Real]:
    """The running decay after a token, in powers of two."""
    flag, bound = self._flags(j), self._bound
    if flag is not None:
      bound = warp.keep_real(bound, warp.bit_mask(flag, VALID))
    return [warp.fma(s, bound, d) for s, d in zip(sigmoids, decay)]


def _sigmoid(argument: warp.Real) -> tuple[warp.Real, warp.Real]:
  """2 ** argument, and 1 / (1 + that)."""
  power = warp.exp2(argument)
  return power, warp.reciprocal(power + 1.0)


def running_decay(seat: Seat, shared: Shared, affine, options):
  """c + G - s for each token and channel of this lane, in powers of two.

  The decay of the whole sub-block goes to the vector of totals.
  """
  offset = float(options.offset)
  decay = [warp.Real(offset)] * 2
  gates, rows = Gates(seat, shared, affine, options), []
  for j in range(16):
    strengths = gates.load(j)
    if affine is not None:
      strengths = [_sigmoid(x)[1] for x in strengths]
    decay = gates.decay(j, strengths, decay)
    rows.append(decay)
  own = warp.add(warp.times(seat.block, WIDTH), seat.channel)
  totals = [x - offset for x in decay]
  warp.store(shared.vector(at.TOTALS, own), 0, totals)
  return rows


def _references(seat: Seat, shared: Shared):
  """Decay before each sub-block and in all of them, exact and rounded."""
  address = shared.vector(at.TOTALS, seat.channel)
  sums = [[warp.Real(0.0)] * 2]
  for m in range(BLOCKS):
    total = warp.load_real(address, 4 * WIDTH * m, 2)
    sums.append([s + t for s, t in zip(sums[-1], total)] if m else total)
  rounded = [sums[0]]
  for total in sums[1:]:
    rounded.append([warp.round_to_integer(x) for x in total])
  return sums, rounded


def _of_block(seat: Seat, vectors) -> list[warp.Real]:
  """vectors[this warp's sub-block]."""
  chosen = vectors[0]
  for m in range(1, BLOCKS):
    here = warp.compare(seat.block, 'sge', m)
    chosen = [warp.where(here, v, c) for v, c in zip(vectors[m], chosen)]
  return chosen


def _share_factors(seat: Seat, shared: Shared, sums, rounded, options):
  """Stores the factors that `mosaic_gpu_gradient_pairs` will want."""
  offset = float(options.offset)
  own = _of_block(seat, rounded[:BLOCKS])
  address = shared.vector(at.MOVES, seat.channel)
  # Row of the triangle of moves: this sub-block from each earlier one.
  row = warp.product(seat.block, warp.add(seat.block, -1))
  address = warp.add(address, warp.times(row, 2 * WIDTH))
  for m in range(BLOCKS - 1):
    powers = [warp.exp2(x - y) for x, y in zip(own, rounded[m])]
    later = warp.compare(seat.block, 'sgt', m)
    both = [warp.pack(p, p) for p in powers]
    warp.store(address, 4 * WIDTH * m, both, predicate=later)
  place = warp.add(warp.times(seat.block, WIDTH), seat.channel)
  entering = [warp.exp2(x - offset) for x in own]
  warp.store(shared.vector(at.ENTERING, place), 0, entering)
  leaving = [warp.exp2(e - x + offset) for e, x in zip(sums[BLOCKS], own)]
  warp.store(shared.vector(at.LEAVING, place), 0, leaving)
  return entering


def scale_rows(seat: Seat, shared: Shared, decay, options):
  """Scales queries and keys; returns what rounding adds to the reference.

  Own tokens and channels of the queries and keys are overwritten; inversely
  scaled keys and -k~ go to their own tiles.
  """
  sums, rounded = _references(seat, shared)
  start, reference = (_of_block(seat, v[:BLOCKS]) for v in (sums, rounded))
  shift = [s - r for s, r in zip(start, reference)]
  entering = _share_factors(seat, shared, sums, rounded, options)
  to_minus = warp.xor(warp.pack(*entering), _BOTH_SIGNS)
  flags = flags_of(seat, shared)
  names = at.QUERY, at.KEY, at.INVERSE, at.MINUS_KEY
  query, key, inverse, minus = (shared.own(seat, n) for n in names)
  tokens = warp.shift_left(seat.block, 4)
  norms = [shared.of_token(at.NORMS + CHUNK * i, tokens) for i in range(2)]
  # Loads do not pass stores, so they all come first.
  loaded = [
    [warp.load(*seat.token(t, j), 1)[0] for t in (query, key)]
    for j in range(16)
  ]
  norms = [
    [x for j in range(0, 16, 4) for x in warp.load_real(norm, 4 * j, 4)]
    for norm in norms
  ]
  for j, words in enumerate(loaded):
    flag = flags(j)
    power = [x + s for x, s in zip(decay[j], shift)]
    growth = [warp.exp2(x) for x in power]
    shrink = [warp.exp2(-x) for x in power]
    queries, keys = (
      [x * norms[i][j] for x in warp.unpack(_kept(w, flag, VALID))]
      for i, w in enumerate(words)
    )
    multiplied = lambda a, b: warp.pack(*[x * y for x, y in zip(a, b)])
    scaled = multiplied(keys, growth)
    warp.store(*seat.token(query, j), [multiplied(queries, growth)])
    warp.store(*seat.token(key, j), [scaled])
    warp.store(*seat.token(inverse, j), [multiplied(keys, shrink)])
    word = _kept(warp.multiply_pairs(scaled, to_minus), flag, ENTERS)
    warp.store(*seat.token(minus, j), [word])
  return shift


def mask_rows(seat: Seat, shared: Shared):
  """Zeros in the values and in dO where there is no token."""
  flags = flags_of(seat, shared)
  for name in (at.VALUES, at.D_OUT):
    tile = shared.own(seat, name)
    loaded = [warp.load(*seat.token(tile, j), 1)[0] for j in range(16)]
    for j, word in enumerate(loaded):
      warp.store(*seat.token(tile, j), [_kept(word, flags(j), VALID)])


class Output:
  """Writes a lane's two channels of the tokens of one gradient."""

  def __init__(self, seat: Seat, ref):
    """`ref`: the chunk's [64, 128] gradient."""
    self._stride = stride = at.row_bytes(ref)
    start = warp.add(
      warp.times(seat.block, 16 * stride), warp.shift_left(seat.channel, 1)
    )
    self._address = warp.advance(warp.global_address(ref), start)

  def write(self, j: int, values):
    warp.store_global(self._address, j * self._stride, [warp.pack(*values)])


def _row_sums(shared: Shared, tokens, j: int, options):
  """For 4 tokens: norms of q and k, and their products with the gradients."""
  norms = [
    warp.load_real(shared.of_token(at.NORMS + CHUNK * i, tokens), 4 * j, 4)
    for i in range(2)
  ]
  if not options.normalize_qk:
    return *norms, None, None
  dots = []
  for i, factor in ((0, -(options.scale**-2)), (1, -1.0)):
    places = [at.DOTS + CHUNK * (2 * role + i) for role in range(2)]
    parts = [
      warp.load_real(shared.vector(place, tokens), 4 * j, 4) for place in places
    ]
    dots.append([(x + y) * factor for x, y in zip(*parts)])
  return *norms, *dots


def input_gradients(seat: Seat, shared: Shared, shift, products, outputs):
  """Writes the gradients of q and k; returns terms of the gate's gradient.

  Args:
    shift: of `scale_rows`.
    products: YQ, YK, ZA, ZD of `mosaic_gpu_gradient`, [token][channel].
    outputs: options, the gate's affine map, and an `Output` for q and for k.

  Returns:
    dG of each token and channel, but for what the chunk's end adds; the sum of
    k^ o dk^ over this lane's tokens; and for each token and channel the gate's
    argument and the slope s (1 - s) of its sigmoid.
  """
  options, affine, d_query, d_key = outputs
  names = at.QUERY, at.KEY, at.INVERSE
  tiles = [shared.own(seat, name) for name in names]
  tokens = warp.shift_left(seat.block, 4)
  gates = Gates(seat, shared, affine, options)
  decay = [x + float(options.offset) for x in shift]
  terms, slopes, written = [], [], [warp.Real(0.0)] * 2
  for j in range(16):
    if j % 4 == 0:
      recent = _row_sums(shared, tokens, j, options)
    sums = [r and r[j % 4] for r in recent]
    strengths = gates.load(j)
    if affine is not None:
      arguments = [at.minimum(x, 126.0) for x in strengths]
      pairs = [_sigmoid(x) for x in arguments]
      strengths = [s for _, s in pairs]
      slopes.append((arguments, [s * (power * s) for power, s in pairs]))
    decay = gates.decay(j, strengths, decay)
    words = [warp.load(*seat.token(tile, j), 1)[0] for tile in tiles]
    operands = list(map(warp.unpack, words))
    of_q, of_k, own = [], [], []
    for i in range(2):
      y = [p[j][i] for p in products]
      term, *both = _element([x[i] for x in operands], y, decay[i], sums)
      written[i] = warp.fma(operands[2][i], y[3], written[i])
      own.append(term)
      of_q.append(both[0])
      of_k.append(both[1])
    d_query.write(j, of_q)
    d_key.write(j, of_k)
    terms.append(own)
  return terms, written, slopes


def _element(operands, products, decay: warp.Real, sums):
  """One token's and channel's dG, and the gradients of its raw q and k."""
  q, k, x = operands
  y_q, y_k, near, far = products
  norm_q, norm_k, dot_q, dot_k = sums
  growth, shrink = warp.exp2(decay), warp.exp2(-decay)
  column = near + far
  term = warp.fma(-x, column, warp.fma(k, y_k, q * y_q))
  d_q = growth * y_q
  if dot_q is not None:
    d_q = warp.fma(q * shrink, dot_q, d_q)
    column = warp.fma(k, dot_k, column)
  return term, d_q * norm_q, warp.fma(growth, y_k, shrink * column) * norm_k


def _same(a: warp.Word, b: warp.Word):
  return warp.compare(warp.shift_right(warp.xor(a, b), SEGMENT), 'eq', 0)


def later_sums(seat: Seat, shared: Shared, terms):
  """Sums of dG over each token and the later ones of its document."""
  flags = flags_of(seat, shared)
  sums, total, later = [None] * 16, None, None
  for j in reversed(range(16)):
    flag = flags(j)
    if total is None:
      total = terms[j]
    elif flag is None:
      total = [t + x for t, x in zip(total, terms[j])]
    else:
      same = _same(flag, later)
      total = [warp.where(same, t, 0.0) + x for t, x in zip(total, terms[j])]
    sums[j], later = total, flag
  return sums


def share_sums(seat: Seat, shared: Shared, first, written):
  """Stores the first token's sum and the sum of k^ o dk^ of a sub-block."""
  place = warp.add(warp.times(seat.block, WIDTH), seat.channel)
  warp.store(shared.vector(at.SUMS, place), 0, first)
  warp.store(shared.vector(at.WRITTEN, place), 0, written)


def carried_sums(seat: Seat, shared: Shared):
  """What later sub-blocks and the chunk's end add to the last token's sum."""
  load = lambda offset, m: warp.load_real(
    shared.vector(offset + WIDTH * m, seat.channel), 0, 2
  )
  carry = load(at.THROUGH, 0)
  for m in range(BLOCKS):
    carry = [c + w for c, w in zip(carry, load(at.WRITTEN, m))]
  for m in reversed(range(1, BLOCKS)):
    inside = load(at.SUMS, m)
    if shared.masked:
      first, last, before = (
        warp.load(shared.of_token(at.FLAGS + t), 0, 1)[0]
        for t in (16 * m, 16 * m + 15, 16 * m - 1)
      )
      whole, before = _same(first, last), _same(first, before)
      through = [warp.where(whole, c, 0.0) for c in carry]
      following = [c + x for c, x in zip(through, inside)]
      following = [warp.where(before, x, 0.0) for x in following]
    else:
      following = [c + x for c, x in zip(carry, inside)]
    here = warp.compare(seat.block, 'slt', m)
    carry = [warp.where(here, f, c) for f, c in zip(following, carry)]
  return carry


def gate_gradients(seat: Seat, shared: Shared, sums, carry, outputs):
  """Writes the gradient of the gate; returns its sums over this sub-block.

  Args:
    sums, carry: of `later_sums` and `carried_sums`.
    outputs: options, slope and shift of the gate, what `input_gradients` found
      of the sigmoids, and an `Output`.

  Returns:
    For each channel the sum over tokens of the gradient and of its product with
    the argument of the gate's power of two.
  """
  options, affine, slopes, d_gate = outputs
  flags = flags_of(seat, shared)
  last = flags(15)
  plain, weighted = [warp.Real(0.0)] * 2, [warp.Real(0.0)] * 2
  if affine is not None:
    factor = affine[0] * (-math.log(2) * options.lower_bound)
  for j in reversed(range(16)):
    flag, total = flags(j), sums[j]
    if flag is None:
      total = [t + c for t, c in zip(total, carry)]
    else:
      same = _same(flag, last)
      total = [t + warp.where(same, c, 0.0) for t, c in zip(total, carry)]
      valid = warp.compare(warp.bit_and(flag, 1 << VALID), 'ne', 0)
      total = [warp.where(valid, t, 0.0) for t in total]
    if affine is not None:
      arguments, slope = slopes[j]
      total = [t * (factor * s) for t, s in zip(total, slope)]
      plain = [p + t for p, t in zip(plain, total)]
      weighted = [
        warp.fma(t, a, w) for t, a, w in zip(total, arguments, weighted)
      ]
    d_gate.write(j, total)
  return plain, weighted


def write_partials(seat: Seat, ref, plain, weighted):
  """Stores the sums of one sub-block, [4, 2, 128] float32 of a chunk."""
  place = warp.add(warp.times(seat.block, 2 * WIDTH), seat.channel)
  address = warp.advance(warp.global_address(ref), warp.shift_left(place, 2))
  warp.store_global(address, 0, plain)
  warp.store_global(address, 4 * WIDTH, weighted)
