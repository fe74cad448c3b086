"""Writing a warpgroup's accumulator to some of the rows of an array.

Groups start at any row, so a tile's rows belong only in part to its group. Bulk
copies cannot leave rows out; stores under a predicate can. In the layout of
accumulators four neighbouring lanes share 8 columns of a row; exchanging words
among the four gives each lane 16 bytes of its own, in a row of 64 bytes.

Suffixes: c row of a tile, n column.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels.kda import mosaic_gpu_warp as warp

_SCALAR = plgpu.Layout.WG_SPLAT(())


class Window(NamedTuple):
  """Where an accumulator's first element lies and what is written of it.

  Attributes:
    row, column: of the accumulator's first element in the array.
    start, end: rows of the array that are written.
  """

  row: jax.Array
  column: jax.Array
  start: jax.Array
  end: jax.Array


def store(acc_cn, out, window: Window):
  """Writes the accumulator's rows in [start, end) and columns of the array.

  Args:
    acc_cn: float32 [64 i, 32 j] in the layout of accumulators.
    out: reference to [G, N] bfloat16 or float32, N a multiple of 8.
    window: see `Window`.
  """
  _store(acc_cn, out, window, (_emit_narrow, _emit_wide))


def store_transposed(acc_nc, out, window: Window):
  """Writes the transposed accumulator's rows, by columns of the accumulator.

      out[row + c, column + n] = acc[n, c]

  Args:
    acc_nc: float32 [64 i, 16 j] in the layout of accumulators.
    out: as in `store`.
    window: as in `store`, all of the array.
  """
  _store(acc_nc, out, window, (_emit_narrow_transposed, _emit_wide_transposed))


def _store(acc, out, window: Window, emitters):
  """Calls the emitter for the array's width of elements."""
  acc = plgpu.layout_cast(acc.astype(out.dtype), plgpu.Layout.WGMMA)
  scalars = tuple(jnp.asarray(x, jnp.int32) for x in window)
  emitter = emitters[jnp.dtype(out.dtype).itemsize // 4]

  @plgpu.inline_mgpu(
    arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), (_SCALAR,) * 4)
  )
  def emit(ctx, acc, out, scalars):
    del ctx
    emitter(acc, out, Window(*(x.registers.item() for x in scalars)))

  emit(acc, out, scalars)


def _emit_narrow_transposed(acc_nc, out, window):
  """Tiles of 8 by 8 are turned in place; then two rows of 16 are 32 bytes."""
  lane, columns = _lane_and_row()
  slot, line = warp.bit_and(lane, 3), warp.shift_right(lane, 2)
  words = acc_nc.registers.reshape(acc_nc.shape[0] // 64, -1, 2, 2)
  width = ir.MemRefType(out.type).shape[-1]
  half = warp.shift_left(warp.bit_and(slot, 1), 3)
  column = warp.add(window.column, warp.add(_less(columns, line), half))
  row = warp.add(line, warp.shift_left(warp.shift_right(slot, 1), 3))
  for i in range(words.shape[0]):
    for j in range(words.shape[1]):
      group = [
        _as_word(words[i, j, q, half]) for q in (0, 1) for half in (0, 1)
      ]
      group = _exchange([warp.transpose_tile(word) for word in group], slot)
      place = warp.add(row, j * 16), warp.add(column, i * 64)
      _store_global(out, place, group, (window, width))


def _emit_wide_transposed(acc_nc, out, window):
  """Single elements; eight lanes write 32 bytes of a row."""
  lane, columns = _lane_and_row()
  pairs = acc_nc.registers.reshape(acc_nc.shape[0] // 64, -1, 2)
  width = ir.MemRefType(out.type).shape[-1]
  row = warp.shift_left(warp.bit_and(lane, 3), 1)
  column = warp.add(window.column, columns)
  for i, j, half in _indices(pairs.shape[:2]):
    for x, word in enumerate(_pair(pairs[i, j, half])):
      place = warp.add(row, j * 8 + x), warp.add(column, i * 64 + half * 8)
      _store_global(out, place, [word], (window, width))


def _emit_narrow(acc_cn, out, window):
  """Two-byte elements: 32 columns of 8 rows an instruction."""
  lane, rows = _lane_and_row()
  slot = warp.bit_and(lane, 3)
  words = acc_cn.registers.reshape(acc_cn.shape[0] // 64, -1, 4, 2)
  width = ir.MemRefType(out.type).shape[-1]
  column = warp.add(window.column, warp.shift_left(slot, 3))
  for i, j, half in _indices(words.shape[:2]):
    group = [_as_word(words[i, j, q, half]) for q in range(4)]
    group = _exchange(group, slot)
    row = warp.add(rows, i * 64 + half * 8)
    _store_global(out, (row, warp.add(column, j * 32)), group, (window, width))


def _emit_wide(acc_cn, out, window):
  """Four-byte elements: lanes hold two neighbouring columns already."""
  lane, rows = _lane_and_row()
  pairs = acc_cn.registers.reshape(acc_cn.shape[0] // 64, -1, 2)
  width = ir.MemRefType(out.type).shape[-1]
  column = warp.shift_left(warp.bit_and(lane, 3), 1)
  column = warp.add(window.column, column)
  for i, j, half in _indices(pairs.shape[:2]):
    words = _pair(pairs[i, j, half])
    row = warp.add(rows, i * 64 + half * 8)
    _store_global(out, (row, warp.add(column, j * 8)), words, (window, width))


def _indices(shape):
  return [
    (i, j, half)
    for i in range(shape[0])
    for j in range(shape[1])
    for half in range(2)
  ]


def _lane_and_row():
  """This lane, and its first row in the accumulator."""
  thread = warp.bit_and(utils.thread_idx(), 127)
  lane = warp.bit_and(thread, 31)
  row = warp.shift_left(warp.shift_right(thread, 5), 4)
  return lane, warp.add(row, warp.shift_right(lane, 2))


def _less(a: warp.Word, b: warp.Word) -> warp.Word:
  return arith.subi(a, b)


def _pair(pair: ir.Value) -> list[warp.Real]:
  return [
    warp.Real(vector.extract(pair, dynamic_position=[], static_position=[x]))
    for x in range(2)
  ]


def _as_word(pair: ir.Value) -> warp.Word:
  i32 = ir.IntegerType.get_signless(32)
  words = vector.bitcast(ir.VectorType.get((1,), i32), pair)
  return vector.extract(words, dynamic_position=[], static_position=[0])


def _exchange(words: list[warp.Word], slot: warp.Word) -> list[warp.Word]:
  """Transposes the 4 x 4 words of four neighbouring lanes."""
  for bit in (1, 2):
    odd = warp.compare(warp.bit_and(slot, bit), 'ne', 0)
    for low in [i for i in range(4) if not i & bit]:
      high = low | bit
      sent = warp.where(odd, words[low], words[high])
      got = utils.shfl_bfly(sent, bit)
      words[low], words[high] = (
        warp.where(odd, got, words[low]),
        warp.where(odd, words[high], got),
      )
  return words


def _store_global(out, place, words, limits):
  """Consecutive words of one row, where the window and the array have it."""
  (row, column), (window, width) = place, limits
  row = warp.add(row, window.row)
  inside = warp.both(
    warp.compare(row, 'sge', window.start), warp.compare(row, 'slt', window.end)
  )
  inside = warp.both(inside, warp.compare(column, 'slt', width))
  i64 = ir.IntegerType.get_signless(64)
  size = mgpu.c(utils.bytewidth(ir.MemRefType(out.type).element_type), i64)
  index = arith.muli(arith.extsi(i64, row), mgpu.c(width, i64))
  index = arith.addi(index, arith.extsi(i64, column))
  address = arith.addi(warp.global_address(out), arith.muli(index, size))
  warp.store_global(address, 0, words, inside)
