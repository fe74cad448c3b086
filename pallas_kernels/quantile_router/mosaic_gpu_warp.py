"""Instructions that routing needs beyond those of `kda.mosaic_gpu_warp`.

A `Real` is one float32 register, a `Word` one 32-bit integer. Everything whose
last bit decides where a score falls is written as PTX, so that no compiler
reorders or fuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, scf

from pallas_kernels.kda import mosaic_gpu_warp as warp
from pallas_kernels.kda.mosaic_gpu_warp import Real, Word

# 1 / (1 + exp(-x)), bit for bit what XLA emits for `jax.nn.sigmoid`: a power of
# two split into an integer and a fraction, which the last step divides.
_SIGMOID = (
  '{{ .reg .f32 a, j, n, f, p, s; .reg .b32 w;'
  ' fma.rn.sat.f32 a, $1, 0fBBBB989D, 0f3F000000;'
  ' fma.rm.f32 j, a, 0f437C0000, 0f4B400001;'
  ' add.rn.f32 n, j, 0fCB40007F; neg.f32 n, n;'
  ' fma.rn.f32 f, $1, 0fBFB8AA3B, n;'
  ' fma.rn.f32 f, $1, 0fB2A57060, f;'
  ' mov.b32 w, j; shl.b32 w, w, 23; mov.b32 s, w;'
  ' ex2.approx.ftz.f32 p, f; mul.rn.f32 p, p, s;'
  ' add.rn.f32 p, p, 0f3F800000; rcp.approx{ftz}.f32 $0, p; }}'
)


# Below this magnitude the sigmoid needs no care for under- and overflow.
SMALL = 80.0
# The bits of 2**23, from which on float32 numbers are whole.
FLOOR_BITS = 0x4B000000


def _f32() -> ir.Type:
  return ir.F32Type.get()


def _i32() -> ir.Type:
  return ir.IntegerType.get_signless(32)


def _i64() -> ir.Type:
  return ir.IntegerType.get_signless(64)


def sigmoid(x: Real, *, small: bool = False) -> Real:
  """The sigmoid as XLA computes it; `small` is for |x| < 80, a bit faster."""
  ptx = _SIGMOID.format(ftz='.ftz' if small else '')
  return Real(utils.inline_ptx(ptx, x.value, result_types=_f32()))


def rough_sigmoid(x: Real) -> Real:
  """The sigmoid with an error below 5e-7."""
  ptx = (
    '{ .reg .f32 p; mul.rn.f32 p, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 p, p;'
    ' add.rn.f32 p, p, 0f3F800000; rcp.approx.ftz.f32 $0, p; }'
  )
  return Real(
    utils.inline_ptx(ptx, x.value, result_types=_f32(), has_side_effects=True)
  )


def _real(ptx: str, *operands: Real) -> Real:
  values = [x.value for x in operands]
  return Real(utils.inline_ptx(ptx, *values, result_types=_f32()))


def maximum(a: Real, b: Real) -> Real:
  """The larger; the number where the other is NaN."""
  return _real('max.f32 $0, $1, $2;', a, b)


def minimum(a: Real, b: Real) -> Real:
  return _real('min.f32 $0, $1, $2;', a, b)


def largest_magnitude(a: Real, b: Real) -> Real:
  """max(|a|, |b|), NaN if one is."""
  return _real(
    '{ .reg .f32 x, y; abs.f32 x, $1; abs.f32 y, $2; max.NaN.f32 $0, x, y; }',
    a,
    b,
  )


def floor_bits(x: Real) -> Word:
  """floor(x) + FLOOR_BITS as an integer, for 0 <= x < 2**23."""
  ptx = '{ .reg .f32 y; add.rm.f32 y, $1, 0f4B000000; mov.b32 $0, y; }'
  return utils.inline_ptx(ptx, x.value, result_types=_i32())


def ceiling(x: Real) -> Real:
  """The least whole number from x on, for |x| < 2**22."""
  return _real(
    '{ .reg .f32 y; add.rp.f32 y, $1, 0f4B400000;'
    ' sub.rn.f32 $0, y, 0f4B400000; }',
    x,
  )


def integer(x: Real) -> Word:
  """A whole number with |x| < 2**22 as an integer."""
  ptx = (
    '{ .reg .f32 y; add.rn.f32 y, $1, 0f4B400000; mov.b32 $0, y;'
    ' add.s32 $0, $0, -0x4B400000; }'
  )
  return utils.inline_ptx(ptx, x.value, result_types=_i32())


def log2_magnitude(x: Real) -> Real:
  """log2(|x|) to a few units in the last place."""
  return _real('{ .reg .f32 y; abs.f32 y, $1; lg2.approx.ftz.f32 $0, y; }', x)


def is_within(x: Real, bound: Real) -> ir.Value:
  """|x| < bound."""
  ptx = '{ .reg .f32 y; abs.f32 y, $1; setp.lt.f32 $0, y, $2; }'
  kind = ir.IntegerType.get_signless(1)
  return utils.inline_ptx(ptx, x.value, bound.value, result_types=kind)


def negate(a: ir.Value) -> ir.Value:
  return arith.xori(a, arith.constant(ir.IntegerType.get_signless(1), 1))


def absolute(x: Real) -> Real:
  return _real('abs.f32 $0, $1;', x)


def tree(combine: Callable, values: Sequence):
  """All values combined, neighbours first."""
  values = list(values)
  while len(values) > 1:
    pairs = [combine(a, b) for a, b in zip(values[::2], values[1::2])]
    values = pairs + values[len(pairs) * 2 :]
  return values[0]


def all_finite(values: Sequence[Real]) -> ir.Value:
  """Whether no value is infinite or NaN, which times 0 are not 0."""
  sums = [Real(0.0)] * 4
  for n, x in enumerate(values):
    sums[n % 4] = warp.fma(x, 0.0, sums[n % 4])
  return equal(tree(Real.__add__, sums), Real(0.0))


def magnitude(values: Sequence[Real]) -> Real:
  """The largest |x|, NaN if any is NaN."""
  return tree(largest_magnitude, [values[0], *values])


def at_least(a: Real, b: Real) -> ir.Value:
  """a >= b; False for NaN."""
  return arith.cmpf(arith.CmpFPredicate.OGE, a.value, b.value)


def greater(a: Real, b: Real) -> ir.Value:
  return arith.cmpf(arith.CmpFPredicate.OGT, a.value, b.value)


def less(a: Real, b: float) -> ir.Value:
  """a < b; False for NaN."""
  return arith.cmpf(arith.CmpFPredicate.OLT, a.value, Real(b).value)


def equal(a: Real, b: Real) -> ir.Value:
  return arith.cmpf(arith.CmpFPredicate.OEQ, a.value, b.value)


def set_bit_if_at_least(word: Word, bit: int, values) -> Word:
  """`word` with a bit set if the first value is at least the second."""
  a, b = values
  ptx = (
    '{ .reg .pred p; setp.ge.f32 p, $2, $3; mov.b32 $0, $1;'
    f' @p or.b32 $0, $0, {1 << bit}; }}'
  )
  return utils.inline_ptx(ptx, word, a.value, b.value, result_types=_i32())


def bits_set(x: Word) -> Word:
  return utils.inline_ptx('popc.b32 $0, $1;', x, result_types=_i32())


def each_bit(word: Word, value: Word, body: Callable) -> Word:
  """value after `value = body(bit, value)` for every bit set, highest first."""
  loop = scf.WhileOp([_i32()] * 2, [word, value])
  before = loop.before.blocks.append(_i32(), _i32())
  with ir.InsertionPoint(before):
    left = arith.cmpi(arith.CmpIPredicate.ne, before.arguments[0], warp.word(0))
    scf.condition(left, list(before.arguments))
  after = loop.after.blocks.append(_i32(), _i32())
  with ir.InsertionPoint(after):
    word, value = after.arguments
    bit = utils.inline_ptx('bfind.u32 $0, $1;', word, result_types=_i32())
    rest = arith.xori(word, arith.shli(warp.word(1), bit))
    scf.yield_([rest, body(bit, value)])
  return loop.results[1]


def either(a: ir.Value, b: ir.Value) -> ir.Value:
  return arith.ori(a, b)


def flip_sign(x: Real, sign: Word) -> Real:
  """x with its sign inverted where the top bit of `sign` is set."""
  bits = arith.xori(arith.bitcast(_i32(), x.value), sign)
  return Real(arith.bitcast(_f32(), bits))


def as_real(x: Word) -> Real:
  """The float32 number of the same bits."""
  return Real(arith.bitcast(_f32(), x))


def difference(a: Word, b: Word) -> Word:
  return arith.subi(a, b)


def count_if(total: Word, condition: ir.Value) -> Word:
  """total, one more where the condition holds."""
  ptx = 'mov.b32 $0, $1; @$2 add.s32 $0, $0, 1;'
  return utils.inline_ptx(ptx, total, condition, result_types=_i32())


def count_if_greater(total: Word, a: Real, b: Real) -> Word:
  """total, one more where a > b."""
  ptx = (
    '{ .reg .pred p; setp.gt.f32 p, $2, $3; mov.b32 $0, $1;'
    ' @p add.s32 $0, $0, 1; }'
  )
  operands = (total, a.value, b.value)
  return utils.inline_ptx(ptx, *operands, result_types=_i32())


def _warp_wide(ptx: str, *operands, of: ir.Type):
  return utils.inline_ptx(ptx, *operands, result_types=of, convergent=True)


def all_lanes(condition: ir.Value) -> ir.Value:
  """Whether the condition holds in every lane."""
  return _warp_wide(
    'vote.sync.all.pred $0, $1, 0xffffffff;',
    condition,
    of=ir.IntegerType.get_signless(1),
  )


def lane_of(condition: ir.Value) -> Word:
  """The highest lane in which the condition holds."""
  ptx = (
    '{ .reg .b32 b; vote.sync.ballot.b32 b, $1, 0xffffffff; bfind.u32 $0, b; }'
  )
  return _warp_wide(ptx, condition, of=_i32())


def from_lane(x: Real, lane: Word) -> Real:
  ptx = 'shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;'
  return Real(_warp_wide(ptx, x.value, lane, of=_f32()))


def word_from_lane(x: Word, lane: int) -> Word:
  ptx = f'shfl.sync.idx.b32 $0, $1, {lane}, 31, 0xffffffff;'
  return _warp_wide(ptx, x, of=_i32())


def running_sum(x: Word) -> Word:
  """The sum of x over this lane and all lower ones."""
  for distance in (1, 2, 4, 8, 16):
    ptx = (
      '{ .reg .b32 t; .reg .pred p;'
      f' shfl.sync.up.b32 t|p, $1, {distance}, 0, 0xffffffff;'
      ' mov.b32 $0, $1; @p add.s32 $0, $1, t; }'
    )
    x = _warp_wide(ptx, x, of=_i32())
  return x


def warp_sum(x: Word) -> Word:
  return _warp_wide('redux.sync.add.s32 $0, $1, 0xffffffff;', x, of=_i32())


def warp_least(x: Word) -> Word:
  return _warp_wide('redux.sync.min.u32 $0, $1, 0xffffffff;', x, of=_i32())


def warp_maximum(x: Real) -> Real:
  for distance in (16, 8, 4, 2, 1):
    x = maximum(x, warp.exchange(x, distance))
  return x


def wait_for_warp():
  """Shared memory that lanes of this warp wrote is there for all of them."""
  utils.inline_ptx('bar.warp.sync 0xffffffff;', convergent=True)


def wait_for_block():
  """Shared memory that threads of this block wrote is there for all of them."""
  utils.inline_ptx('bar.sync 0;', convergent=True)


def quotient(a: Word, b: int) -> Word:
  """a // b of numbers that are not negative."""
  return arith.divui(a, warp.word(b))


def remainder(a: Word, b: int) -> Word:
  return arith.remui(a, warp.word(b))


def add_shared(address: Word, amount: Word):
  """Adds to a word of shared memory."""
  utils.inline_ptx('red.shared.add.u32 [$0], $1;', address, amount)


def load_bytes(address: ir.Value, count: int, of) -> list[Real]:
  """`count` consecutive float32 or bfloat16 numbers of global memory."""
  if of == 'float32':
    return warp.load_global(address, 0, count)
  if count == 2:
    (pair,) = warp.load_global_words(address, 0, 1)
    return list(warp.unpack(pair))
  return warp.load_global_bfloat16(address, count)


def block() -> Word:
  """The number of this thread block."""
  return arith.index_cast(_i32(), gpu.block_id(gpu.Dimension.x))


def row_address(base: ir.Value, row: Word, row_bytes: int) -> ir.Value:
  """base + row * row_bytes in 64 bits."""
  wide = arith.extui(_i64(), row)
  size = arith.constant(_i64(), row_bytes)
  return arith.addi(base, arith.muli(wide, size))


def choose(
  condition: ir.Value,
  yes: Callable[[], Sequence[Real | Word]],
  no: Callable[[], Sequence[Real | Word]],
  kinds: Sequence[type],
) -> list[Real | Word]:
  """What `yes` or `no` return; the condition is equal in the whole warp.

  `kinds` holds Real or Word for each of the values.
  """
  types = [_f32() if kind is Real else _i32() for kind in kinds]
  op = scf.IfOp(condition, types, has_else=True)
  for side, body in ((op.then_block, yes), (op.else_block, no)):
    with ir.InsertionPoint(side):
      scf.yield_([_raw(x) for x in body()])
  return [Real(x) if k is Real else x for x, k in zip(op.results_, kinds)]


def iterate(
  count: int,
  values: Sequence[Real | Word],
  body: Callable[[Word, list], Sequence[Real | Word]],
) -> list[Real | Word]:
  """Values after `values = body(i, values)` for i = 0, 1, ... count - 1."""
  kinds = [isinstance(x, Real) for x in values]
  wrap = lambda raw: [Real(x) if real else x for x, real in zip(raw, kinds)]
  bounds = [warp.word(i) for i in (0, count, 1)]
  loop = scf.ForOp(*bounds, [_raw(x) for x in values])
  with ir.InsertionPoint(loop.body):
    results = body(loop.induction_variable, wrap(loop.inner_iter_args))
    scf.yield_([_raw(x) for x in results])
  return wrap(loop.results_)


def _raw(x: Real | Word) -> ir.Value:
  return x.value if isinstance(x, Real) else x
