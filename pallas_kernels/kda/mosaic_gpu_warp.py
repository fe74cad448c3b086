"""Values and instructions of one thread or warp, for use inside inline_mgpu.

Mosaic GPU arrays live in layouts that a whole warpgroup shares. The preparation
of a chunk needs finer control: which lane owns which token and channel, and
products of 16 x 16 blocks inside one warp. `Real` is one float32 register with
arithmetic; a `Word` (a plain i32 value) holds two bfloat16 numbers, the first
in its low half. Shared addresses are 32-bit byte addresses.

A 16 x 16 block sits in a warp as four words or eight reals: lane 4g + t owns
rows g and g + 8 and, in each 8 columns, columns 2t and 2t + 1. The order is
(row g, columns 0-7), (g + 8, 0-7), (g, 8-15), (g + 8, 8-15).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.experimental.mosaic.gpu as mgpu
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

Word = ir.Value


def _f32() -> ir.Type:
  return ir.F32Type.get()


def _i32() -> ir.Type:
  return ir.IntegerType.get_signless(32)


def _f32_constant(value: float) -> ir.Value:
  return arith.constant(_f32(), ir.FloatAttr.get(_f32(), value))


class Real:
  """One float32 register; the operators emit one instruction each."""

  def __init__(self, value: ir.Value | float):
    self.value = value if isinstance(value, ir.Value) else _f32_constant(value)

  def __add__(self, other: Real | float) -> Real:
    return Real(arith.addf(self.value, _real(other).value))

  def __sub__(self, other: Real | float) -> Real:
    return Real(arith.subf(self.value, _real(other).value))

  def __mul__(self, other: Real | float) -> Real:
    return Real(arith.mulf(self.value, _real(other).value))

  def __neg__(self) -> Real:
    return Real(arith.negf(self.value))


def _real(x: Real | float) -> Real:
  return x if isinstance(x, Real) else Real(x)


def fma(a: Real, b: Real | float, c: Real | float) -> Real:
  """a * b + c in one rounding."""
  operands = [_real(x).value for x in (a, b, c)]
  return Real(llvm.intr_fma(*operands))


def _unary(instruction: str, x: Real) -> Real:
  return Real(
    utils.inline_ptx(f'{instruction} $0, $1;', x.value, result_types=_f32())
  )


def exp2(x: Real) -> Real:
  """2 ** x; results below 2**-126 become 0."""
  return _unary('ex2.approx.ftz.f32', x)


def reciprocal(x: Real) -> Real:
  """1 / x to about one unit in the last place; 0 for an infinite x."""
  return _unary('rcp.approx.ftz.f32', x)


def rsqrt(x: Real) -> Real:
  """x ** -0.5 to about one unit in the last place."""
  return _unary('rsqrt.approx.ftz.f32', x)


def round_to_integer(x: Real) -> Real:
  return _unary('cvt.rni.f32.f32', x)


def word(value: int) -> Word:
  """A constant."""
  return mgpu.c(value, _i32())


def add(a: Word, b: Word | int) -> Word:
  return arith.addi(a, b if isinstance(b, ir.Value) else word(b))


def times(a: Word, b: int) -> Word:
  return arith.muli(a, word(b))


def product(a: Word, b: Word) -> Word:
  return arith.muli(a, b)


def quotient(a: Word, b: int) -> Word:
  """a / b for a that is not negative."""
  return arith.divui(a, word(b))


def shift_left(a: Word, bits: int) -> Word:
  return arith.shli(a, word(bits))


def shift_right(a: Word, bits: int) -> Word:
  return arith.shrui(a, word(bits))


def bit_and(a: Word, b: int) -> Word:
  return arith.andi(a, word(b))


def union(a: Word, b: Word) -> Word:
  return arith.ori(a, b)


def keep(a: Word, mask: Word) -> Word:
  """a where the mask is all ones, 0 where it is all zeros."""
  return arith.andi(a, mask)


def keep_real(a: float, mask: Word) -> Real:
  """A constant where the mask is all ones, 0 where it is all zeros."""
  bits = arith.bitcast(_i32(), _f32_constant(a))
  return Real(arith.bitcast(_f32(), arith.andi(bits, mask)))


def bit_mask(a: Word, bit: int) -> Word:
  """All ones if the bit of that number is set, else all zeros."""
  return arith.shrsi(shift_left(a, 31 - bit), word(31))


def xor(a: Word, b: Word | int) -> Word:
  return arith.xori(a, b if isinstance(b, ir.Value) else word(b))


def compare(a: Word, relation: str, b: Word | int) -> ir.Value:
  """a relation b for signed integers; relation as in eq, ne, sgt, sge."""
  predicate = getattr(arith.CmpIPredicate, relation)
  return arith.cmpi(predicate, a, b if isinstance(b, ir.Value) else word(b))


def greater(a: Real, b: float) -> ir.Value:
  """a > b; False for NaN."""
  return arith.cmpf(arith.CmpFPredicate.OGT, a.value, _real(b).value)


def both(a: ir.Value, b: ir.Value) -> ir.Value:
  return arith.andi(a, b)


def where(condition: ir.Value, yes: Real | Word, no: Real | Word | float):
  """`yes` where the condition holds, else `no`; reals or words."""
  if isinstance(yes, Real):
    return Real(arith.select(condition, yes.value, _real(no).value))
  return arith.select(condition, yes, no)


def pack(low: Real, high: Real) -> Word:
  """Two numbers rounded to bfloat16 in one word."""
  return utils.inline_ptx(
    'cvt.rn.bf16x2.f32 $0, $1, $2;', high.value, low.value, result_types=_i32()
  )


def unpack(x: Word) -> tuple[Real, Real]:
  """The two bfloat16 numbers of a word, exactly."""
  low = arith.bitcast(_f32(), shift_left(x, 16))
  high = arith.bitcast(_f32(), bit_and(x, -65536))
  return Real(low), Real(high)


def multiply_pairs(a: Word, b: Word) -> Word:
  """Products of two words of bfloat16 pairs, rounded to bfloat16."""
  return utils.inline_ptx('mul.bf16x2 $0, $1, $2;', a, b, result_types=_i32())


def split(low: Real, high: Real) -> tuple[Word, Word]:
  """Leading and trailing bfloat16 parts: 16 bits of mantissa in two words."""
  leading = pack(low, high)
  low0, high0 = unpack(leading)
  return leading, pack(low - low0, high - high0)


def shared_address(ref: ir.Value) -> Word:
  """Byte address of a shared-memory reference."""
  return arith.trunci(
    _i32(),
    llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(ref)),
  )


def global_address(ref: ir.Value) -> ir.Value:
  """64-bit byte address of a global-memory reference."""
  return llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(ref))


def advance(address: ir.Value, offset: Word) -> ir.Value:
  """A 64-bit address moved by a 32-bit number of bytes."""
  wide = arith.extui(ir.IntegerType.get_signless(64), offset)
  return arith.addi(address, wide)


def load(address: Word, offset: int, count: int) -> list[Word]:
  """`count` (1, 2 or 4) consecutive words of shared memory."""
  names = ', '.join(f'${i}' for i in range(count))
  several = '' if count == 1 else f'.v{count}'
  loaded = utils.inline_ptx(
    f'ld.shared{several}.b32 {{{names}}}, [${count}+{offset}];',
    address,
    result_types=[_i32()] * count,
    has_side_effects=True,
  )
  return list(loaded)


def load_real(address: Word, offset: int, count: int) -> list[Real]:
  """`count` (1, 2 or 4) consecutive float32 numbers of shared memory."""
  return [Real(arith.bitcast(_f32(), w)) for w in load(address, offset, count)]


def _load_global(address: ir.Value, kind: str, count: int, of: ir.Type):
  names = ', '.join(f'${i}' for i in range(count))
  several = '' if count == 1 else f'.v{count}'
  return utils.inline_ptx(
    f'ld.global{several}.{kind} {{{names}}}, [${count}];',
    address,
    result_types=[of] * count,
    has_side_effects=True,
  )


def load_global_words(address: ir.Value, offset: int, count: int) -> list[Word]:
  """`count` (1, 2 or 4) consecutive words of global memory."""
  address = arith.addi(address, mgpu.c(offset, address.type))
  return list(_load_global(address, 'b32', count, _i32()))


def load_global(address: ir.Value, offset: int, count: int) -> list[Real]:
  """`count` (2 or 4) consecutive float32 numbers of global memory."""
  address = arith.addi(address, mgpu.c(offset, address.type))
  return [Real(x) for x in _load_global(address, 'f32', count, _f32())]


def load_global_bfloat16(address: ir.Value, count: int) -> list[Real]:
  """`count` (1 or 4) consecutive bfloat16 numbers of global memory."""
  if count == 1:
    i16 = ir.IntegerType.get_signless(16)
    (x,) = _load_global(address, 'u16', 1, i16)
    return [unpack(arith.extui(_i32(), x))[0]]
  words = _load_global(address, 'b32', count // 2, _i32())
  return [x for w in words for x in unpack(w)]


def prefetch(address: ir.Value, offset: int):
  """Brings a line of global memory close, without waiting for it."""
  address = arith.addi(address, mgpu.c(offset, address.type))
  utils.inline_ptx('prefetch.global.L1 [$0];', address)


def warp_sum(x: Word) -> Word:
  """The sum of an integer over the lanes of a warp."""
  return utils.inline_ptx(
    'redux.sync.add.s32 $0, $1, 0xffffffff;',
    x,
    result_types=_i32(),
    convergent=True,
  )


def ballot(condition: ir.Value) -> Word:
  """One bit for each lane of a warp."""
  return utils.inline_ptx(
    '{ .reg .pred p; setp.ne.s32 p, $1, 0; '
    'vote.sync.ballot.b32 $0, p, 0xffffffff; }',
    where(condition, word(1), word(0)),
    result_types=_i32(),
    convergent=True,
  )


def first_lane(lanes: Word) -> Word:
  """The number of the lowest bit that is set; 32 if none is."""
  return utils.inline_ptx(
    '{ .reg .b32 r; brev.b32 r, $1; clz.b32 $0, r; }',
    lanes,
    result_types=_i32(),
  )


def order_global():
  """Puts this thread's global accesses before later bulk copies."""
  utils.inline_ptx('fence.proxy.async.global;', has_side_effects=True)


def exchange(x: Real, distance: int) -> Real:
  """The value of the lane whose number differs by one bit, `distance`."""
  return Real(utils.shfl_bfly(x.value, distance))


def _store(space: str, address: ir.Value, offset: int, values, *, predicate):
  raw = [v.value if isinstance(v, Real) else v for v in values]
  raw = [arith.bitcast(_i32(), v) if v.type == _f32() else v for v in raw]
  names = ', '.join(f'${i + 1}' for i in range(len(raw)))
  several = '' if len(raw) == 1 else f'.v{len(raw)}'
  utils.inline_ptx(
    f'st.{space}{several}.b32 [$0+{offset}], {{{names}}};',
    address,
    *raw,
    predicate=predicate,
  )


def store(
  address: Word,
  offset: int,
  values: Sequence[Real | Word],
  predicate: ir.Value | None = None,
):
  """Writes 1, 2 or 4 consecutive words to shared memory."""
  _store('shared', address, offset, values, predicate=predicate)


def store_global(
  address: ir.Value,
  offset: int,
  values: Sequence[Real | Word],
  predicate: ir.Value | None = None,
):
  """Writes 1, 2 or 4 consecutive words to global memory."""
  _store('global', address, offset, values, predicate=predicate)


def load_block(address: Word, offset: int = 0, *, transposed=False) -> list:
  """Four 8 x 8 bfloat16 tiles; lane i gives row i % 8 of tile i // 8."""
  mode = '.trans' if transposed else ''
  return list(
    utils.inline_ptx(
      f'ldmatrix.sync.aligned.m8n8.x4{mode}.shared.b16 '
      f'{{$0, $1, $2, $3}}, [$4+{offset}];',
      address,
      result_types=[_i32()] * 4,
      has_side_effects=True,
      convergent=True,
    )
  )


def store_block(address: Word, offset: int, words: Sequence[Word]):
  """Inverse of `load_block`."""
  utils.inline_ptx(
    f'stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0+{offset}], '
    '{$1, $2, $3, $4};',
    address,
    *words,
    convergent=True,
  )


def transpose_tile(x: Word) -> Word:
  """The transpose of an 8 x 8 tile held one word a lane."""
  return utils.inline_ptx(
    'movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;',
    x,
    result_types=_i32(),
    convergent=True,
  )


def multiply(acc: Sequence[Real], left: Sequence[Word], right) -> list[Real]:
  """acc [16, 8] + left [16, 16] @ right [16, 8]: one tensor-core product."""
  results = utils.inline_ptx(
    'mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 '
    '{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};',
    *left,
    *right,
    *[x.value for x in acc],
    result_types=[_f32()] * 4,
    convergent=True,
  )
  return [Real(x) for x in results]


def zeros(count: int) -> list[Real]:
  return [Real(0.0)] * count


def repeat(count: int, body: Callable[[Word], None]):
  """Runs `body` for 0, 1, ... count - 1."""
  loop = scf.ForOp(word(0), word(count), word(1), [])
  with ir.InsertionPoint(loop.body):
    body(loop.induction_variable)
    scf.yield_([])


def only_if(condition: ir.Value, body: Callable[[], None]):
  """Runs `body` where the condition, equal in the whole warp, holds."""
  op = scf.IfOp(condition)
  with ir.InsertionPoint(op.then_block):
    body()
    scf.yield_([])


def either(
  condition: ir.Value, yes: Callable[[], None], no: Callable[[], None]
):
  """Runs one of two, as the condition, equal in the whole warp, says."""
  op = scf.IfOp(condition, has_else=True)
  for block, body in ((op.then_block, yes), (op.else_block, no)):
    with ir.InsertionPoint(block):
      body()
      scf.yield_([])


def reals_if(
  condition: ir.Value, count: int, body: Callable[[], Sequence[Real]]
) -> list[Real]:
  """What `body` returns where the warp's condition holds, else zeros."""
  op = scf.IfOp(condition, [_f32()] * count, has_else=True)
  with ir.InsertionPoint(op.then_block):
    scf.yield_([x.value for x in body()])
  with ir.InsertionPoint(op.else_block):
    scf.yield_([x.value for x in zeros(count)])
  return [Real(x) for x in op.results_]


def carry(values: Sequence[Real], shape: tuple[int, int]):
  """An array that hands registers from one inline function to another."""
  layout = mgpu.WGStridedFragLayout(shape, vec_size=1)
  single = ir.VectorType.get((1,), _f32())
  registers = np.array(
    [vector.broadcast(single, x.value) for x in values], dtype=object
  )
  return mgpu.FragmentedArray(
    _registers=registers, _layout=layout, _is_signed=None
  )


def carried(array) -> list[Real]:
  """The registers of an array that `carry` made."""
  return [
    Real(vector.extract(x, dynamic_position=[], static_position=[0]))
    for x in array.registers.flat
  ]


def packed(values) -> list[Word]:
  """Two words of four numbers."""
  return [pack(values[0], values[1]), pack(values[2], values[3])]


def pair_products(a, b) -> list[Word]:
  """Products of words of bfloat16 pairs, one by one."""
  return [multiply_pairs(x, y) for x, y in zip(a, b)]
