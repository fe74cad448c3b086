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
  start = shared.vector(at.FLAGS, warp.shift_left(seat.block, 4))
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
  address = shared.vector(at.NORMS, index)
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
      (flag,) = warp.load(shared.vector(at.FLAGS, rows), 32 * half, 1)
      valid = warp.compare(warp.bit_and(flag, 1 << VALID), 'ne', 0)
      norm = warp.where(valid, norm, 0.0)
    warp.store(address, 32 * half, [norm], predicate=mine)


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
  if options.activate_gate:
    slope, shift = affine
  flags = flags_of(seat, shared)
  tile = shared.own(seat, at.GATE)
  rows = []
  for j in range(16):
    (word,) = warp.load(*seat.token(tile, j), 1)
    flag = flags(j)
    gates = warp.unpack(_kept(word, flag, VALID))
    bound = options.lower_bound * _LOG2E if options.activate_gate else _LOG2E
    if flag is not None:
      bound = warp.keep_real(bound, warp.bit_mask(flag, VALID))
    for i in range(2):
      strength = gates[i]
      if options.activate_gate:
        strength = _sigmoid(warp.fma(gates[i], slope, shift[i]))[1]
      decay[i] = warp.fma(strength, bound, decay[i])
    rows.append(list(decay))
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
  """Scales queries and keys; returns the decay from the rounded reference.

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
  norms = [shared.vector(at.NORMS + CHUNK * i, tokens) for i in range(2)]
  rows = []
  for j in range(16):
    if j % 4 == 0:
      recent = [warp.load_real(norm, 4 * j, 4) for norm in norms]
    flag = flags(j)
    power = [x + s for x, s in zip(decay[j], shift)]
    rows.append(power)
    growth = [warp.exp2(x) for x in power]
    shrink = [warp.exp2(-x) for x in power]
    words = [warp.load(*seat.token(t, j), 1)[0] for t in (query, key)]
    queries, keys = (
      [x * recent[i][j % 4] for x in warp.unpack(_kept(w, flag, VALID))]
      for i, w in enumerate(words)
    )
    multiplied = lambda a, b: warp.pack(*[x * y for x, y in zip(a, b)])
    scaled = multiplied(keys, growth)
    warp.store(*seat.token(query, j), [multiplied(queries, growth)])
    warp.store(*seat.token(key, j), [scaled])
    warp.store(*seat.token(inverse, j), [multiplied(keys, shrink)])
    word = _kept(warp.multiply_pairs(scaled, to_minus), flag, ENTERS)
    warp.store(*seat.token(minus, j), [word])
  return rows


def mask_rows(seat: Seat, shared: Shared):
  """Zeros in the values and in dO where there is no token."""
  flags = flags_of(seat, shared)
  for name in (at.VALUES, at.D_OUT):
    tile = shared.own(seat, name)
    for j in range(16):
      (word,) = warp.load(*seat.token(tile, j), 1)
      warp.store(*seat.token(tile, j), [_kept(word, flags(j), VALID)])


class Output:
  """Writes a lane's two channels of the tokens of one gradient."""

  def __init__(self, seat: Seat, ref, stride: int):
    """`ref`: the chunk's [64, 128] gradient; stride: bytes of a token."""
    start = warp.add(
      warp.times(seat.block, 16 * stride), warp.shift_left(seat.channel, 1)
    )
    self._address = warp.advance(warp.global_address(ref), start)
    self._stride = stride

  def write(self, j: int, values):
    warp.store_global(self._address, j * self._stride, [warp.pack(*values)])


def _row_sums(shared: Shared, tokens, j: int, options):
  """For 4 tokens: norms of q and k, and their products with the gradients."""
  load = lambda offset: warp.load_real(shared.vector(offset, tokens), 4 * j, 4)
  norms = [load(at.NORMS + CHUNK * i) for i in range(2)]
  if not options.normalize_qk:
    return *norms, None, None
  dots = []
  for i, factor in ((0, -(options.scale**-2)), (1, -1.0)):
    parts = [load(at.DOTS + CHUNK * (2 * role + i)) for role in range(2)]
    dots.append([(x + y) * factor for x, y in zip(*parts)])
  return *norms, *dots


def input_gradients(seat: Seat, shared: Shared, decay, products, outputs):
  """Writes the gradients of q and k; returns terms of the gate's gradient.

  Args:
    decay: exponents of the scaled queries, [token][channel].
    products: YQ, YK, ZA, ZD of `mosaic_gpu_gradient`, likewise.
    outputs: options, and an `Output` for q and for k.

  Returns:
    dG of each token and channel, but for what the chunk's end adds, and the
    sum of k^ o dk^ over this lane's tokens.
  """
  options, d_query, d_key = outputs
  names = at.QUERY, at.KEY, at.INVERSE
  tiles = [shared.own(seat, name) for name in names]
  tokens = warp.shift_left(seat.block, 4)
  terms, written = [], [warp.Real(0.0)] * 2
  for j in range(16):
    if j % 4 == 0:
      recent = _row_sums(shared, tokens, j, options)
    norm_q, norm_k, dot_q, dot_k = [r and r[j % 4] for r in recent]
    words = [warp.load(*seat.token(tile, j), 1)[0] for tile in tiles]
    q, k, x = map(warp.unpack, words)
    of_q, of_k, own = [], [], []
    for i in range(2):
      y_q, y_k, near, far = (p[j][i] for p in products)
      growth, shrink = warp.exp2(decay[j][i]), warp.exp2(-decay[j][i])
      column = near + far
      written[i] = warp.fma(x[i], far, written[i])
      term = warp.fma(k[i], y_k, q[i] * y_q)
      own.append(warp.fma(-x[i], column, term))
      d_q = growth * y_q
      if dot_q is not None:
        d_q = warp.fma(q[i] * shrink, dot_q, d_q)
        column = warp.fma(k[i], dot_k, column)
      of_q.append(d_q * norm_q)
      of_k.append(warp.fma(growth, y_k, shrink * column) * norm_k)
    d_query.write(j, of_q)
    d_key.write(j, of_k)
    terms.append(own)
  return terms, written


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
        warp.load(shared.vector(at.FLAGS + t), 0, 1)[0]
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
    outputs: options, slope and shift of the gate, and an `Output`.

  Returns:
    For each channel the sum over tokens of the gradient and of its product with
    the argument of the gate's power of two.
  """
  options, affine, d_gate = outputs
  flags = flags_of(seat, shared)
  tile = shared.own(seat, at.GATE)
  last = flags(15)
  plain, weighted = [warp.Real(0.0)] * 2, [warp.Real(0.0)] * 2
  if options.activate_gate:
    factor = affine[0] * (-math.log(2) * options.lower_bound)
  for j in reversed(range(16)):
    flag, total = flags(j), sums[j]
    if flag is None:
      total = [t + c for t, c in zip(total, carry)]
    else:
      same = _same(flag, last)
      total = [t + warp.where(same, c, 0.0) for t, c in zip(total, carry)]
    if options.activate_gate:
      (word,) = warp.load(*seat.token(tile, j), 1)
      gates = warp.unpack(_kept(word, flag, VALID))
      for i in range(2):
        argument = warp.fma(gates[i], affine[0], affine[1][i])
        power, s = _sigmoid(at.minimum(argument, 126.0))
        total[i] = total[i] * (factor * s * (power * s))
        if flag is not None:
          valid = warp.compare(warp.bit_and(flag, 1 << VALID), 'ne', 0)
          total[i] = warp.where(valid, total[i], 0.0)
        plain[i] = plain[i] + total[i]
        weighted[i] = warp.fma(total[i], argument, weighted[i])
    elif flag is not None:
      valid = warp.compare(warp.bit_and(flag, 1 << VALID), 'ne', 0)
      total = [warp.where(valid, t, 0.0) for t in total]
    d_gate.write(j, total)
  return plain, weighted


def write_partials(seat: Seat, ref, plain, weighted):
  """Stores the sums of one sub-block, [4, 2, 128] float32 of a chunk."""
  place = warp.add(warp.times(seat.block, 2 * WIDTH), seat.channel)
  address = warp.advance(warp.global_address(ref), warp.shift_left(place, 2))
  warp.store_global(address, 0, plain)
  warp.store_global(address, 4 * WIDTH, weighted)
