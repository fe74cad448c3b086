"""Stores of the Hopper grouped matmul, acted out by 128 threads on a CPU.

Which thread writes which element where is index arithmetic on words; here the
words are numpy arrays over threads, and an element is the number of its place.
"""

import types

import numpy as np
import pytest

from pallas_kernels.grouped_matmul import mosaic_gpu_store as store
from pallas_kernels.grouped_matmul import mosaic_gpu_weights as weights

THREAD = np.arange(128)
WARP, GROUP, SLOT = THREAD // 32, THREAD % 32 // 4, THREAD % 4


def transpose_tile(x):
  """`movmatrix`: the words of each warp are an 8 x 8 matrix of halves."""
  halves = np.stack([x & 0xFFFF, x >> 16], -1).reshape(4, 8, 8)
  halves = halves.swapaxes(1, 2).reshape(128, 2)
  return halves[:, 0] | halves[:, 1] << 16


FAKE = types.SimpleNamespace(
  word=lambda x: np.full(128, x),
  add=lambda a, b: a + b,
  times=lambda a, b: a * b,
  bit_and=lambda a, b: a & b,
  shift_left=lambda a, bits: a << bits,
  shift_right=lambda a, bits: a >> bits,
  where=np.where,
  both=lambda a, b: a & b,
  compare=lambda a, relation, b: {
    'ne': a != b,
    'slt': a < b,
    'sge': a >= b,
  }[relation],
  transpose_tile=transpose_tile,
  shared_address=lambda tile: np.zeros(128, int),
)


@pytest.fixture
def threads(monkeypatch):
  """The modules' instructions on all threads at once."""
  utils = types.SimpleNamespace(
    thread_idx=lambda: THREAD, shfl_bfly=lambda x, bit: x[THREAD ^ bit]
  )
  shape = types.SimpleNamespace(MemRefType=lambda shape: shape)
  for module in (store, weights):
    monkeypatch.setattr(module, 'warp', FAKE)
    monkeypatch.setattr(module, 'utils', utils)
    monkeypatch.setattr(module, 'ir', shape)
  monkeypatch.setattr(store, '_as_word', lambda word: word)
  monkeypatch.setattr(store, '_less', lambda a, b: a - b)
  monkeypatch.setattr(store, '_pair', lambda pair: pair)
  arith = types.SimpleNamespace(ori=lambda a, b: a | b)
  monkeypatch.setattr(weights, 'arith', arith)
  return monkeypatch


def accumulator(rows, columns, narrow):
  """Registers whose elements are numbered by row and column."""
  registers = []
  for i in range(rows // 64):
    for j in range(columns // 8):
      for half in range(2):
        row = 64 * i + 16 * WARP + 8 * half + GROUP
        first = row * columns + 8 * j + 2 * SLOT
        pair = (first, first + 1)
        registers.append(pair[0] | pair[1] << 16 if narrow else pair)
  # An object array, so that a register stays whole.
  held = np.empty(len(registers), object)
  held[:] = registers
  return types.SimpleNamespace(registers=held, shape=(rows, columns))


def record(monkeypatch, out, narrow):
  """Collects what is stored in `out`; -1 is never stored."""

  def put(_, place, words, limits):
    (row, column), (window, width) = place, limits
    row = row + window.row
    inside = (row >= window.start) & (row < window.end) & (column < width)
    for index, word in enumerate(words):
      parts = [word & 0xFFFF, word >> 16] if narrow else [word]
      for part, value in enumerate(parts):
        at = column + index * len(parts) + part
        for thread in THREAD[inside]:
          assert out[row[thread], at[thread]] == -1
          out[row[thread], at[thread]] = value[thread]

  monkeypatch.setattr(store, '_store_global', put)


@pytest.mark.parametrize('narrow', (True, False))
def test_rows_of_a_window_are_stored_once(threads, narrow):
  out = np.full((200, 80), -1)
  record(threads, out, narrow)
  emit = store._emit_narrow if narrow else store._emit_wide
  memory = types.SimpleNamespace(type=types.SimpleNamespace(shape=out.shape))
  window = store.Window(*(np.full(128, x) for x in (40, 32, 43, 150)))
  emit(accumulator(128, 64, narrow), memory, window)
  want = np.full_like(out, -1)
  numbers = np.arange(128 * 64).reshape(128, 64)
  want[43:150, 32:80] = numbers[3:110, :48]
  np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize('narrow', (True, False))
def test_a_transposed_accumulator_is_stored_once(threads, narrow):
  out = np.full((72, 136), -1)
  record(threads, out, narrow)
  if narrow:
    emit = store._emit_narrow_transposed
  else:
    emit = store._emit_wide_transposed
  memory = types.SimpleNamespace(type=types.SimpleNamespace(shape=out.shape))
  window = store.Window(*(np.full(128, x) for x in (16, 64, 19, 70)))
  emit(accumulator(128, 64, narrow), memory, window)
  want = np.full_like(out, -1)
  numbers = np.arange(128 * 64).reshape(128, 64)
  want[19:70, 64:136] = numbers[:72, 3:54].T
  np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize('swizzle', (128, 64, 32))
@pytest.mark.parametrize('columns', (64, 192))
def test_rows_outside_are_cleared(threads, swizzle, columns):
  plan = types.SimpleNamespace(swizzle=swizzle, depth=64)
  width = swizzle // 2
  memory = np.ones((8, columns // width, 8, width), np.int16)
  view = memory.reshape(-1)

  def clear(address, offset, values, predicate):
    assert len(values) == 4
    for start in (address + offset)[predicate] // 2:
      view[start : start + 8] = 0

  threads.setattr(FAKE, 'store', clear, raising=False)
  tile = types.SimpleNamespace(type=types.SimpleNamespace(shape=memory.shape))
  bounds = [np.full(128, 3), np.full(128, 41)]
  weights._emit_clear(plan, tile, bounds)
  rows = memory.transpose(0, 2, 1, 3).reshape(64, columns)
  np.testing.assert_array_equal(rows[3:41], 1)
  assert not rows[:3].any() and not rows[41:].any()
