"""What a thread block of the Hopper grouped matmul knows of its tiles.

Its book is filled by words of all its threads, which are numpy arrays here.
"""

import types

import numpy as np
import pytest

from pallas_kernels.grouped_matmul import mosaic_gpu_tiles as tiles

SIZES = {
  'even': [64] * 4,
  'odd': [13, 0, 300, 5, 64, 1, 129],
  'one': [0, 0, 512, 0],
  'none': [0, 0, 0],
  'first_and_last_empty': [0, 77, 0],
  'too_many_rows': [70, 0, 90, 50],
  'many': np.random.default_rng(0).integers(0, 40, 896),
}


THREAD = np.arange(tiles.THREADS)
COMPARISONS = {
  'slt': np.less,
  'sle': np.less_equal,
  'sgt': np.greater,
  'eq': np.equal,
}


def by_warp(x):
  return np.broadcast_to(x, THREAD.shape).reshape(-1, 32)


LANE_CODE = types.SimpleNamespace(
  row_address=lambda base, row, size: base + row * size,
  difference=lambda a, b: a - b,
  quotient=lambda a, b: a // b,
  running_sum=lambda x: by_warp(x).cumsum(1).reshape(-1),
  wait_for_block=lambda: None,
)


def instructions(sizes, words):
  """Of all threads at once, with sizes and words as their memory."""

  def store(address, offset, values, predicate=None):
    (value,) = values
    where = THREAD >= 0 if predicate is None else predicate
    at = (address + offset)[where]
    assert (at % 4 == 0).all() and (np.bincount(at) <= 1).all()
    words[at // 4] = value[where]

  return types.SimpleNamespace(
    word=lambda x: x,
    add=lambda a, b: a + b,
    times=lambda a, b: a * b,
    bit_and=lambda a, b: a & b,
    shift_left=lambda a, bits: a << bits,
    shift_right=lambda a, bits: a >> bits,
    where=np.where,
    compare=lambda a, relation, b: COMPARISONS[relation](a, b),
    load=lambda address, offset, count: [words[(address + offset) // 4]],
    load_global_words=lambda address, offset, count: [sizes[address // 4]],
    store=store,
    warp_sum=lambda x: np.repeat(by_warp(x).sum(1), 32),
  )


@pytest.fixture
def book(monkeypatch):
  """A function of (cut, sizes, block) that returns the block's book."""

  def run(cut, sizes, block):
    words = np.full(cut.words, -1)

    def fill(address, places, group):
      for t in THREAD:
        own = slice(*(address // 4 + places[i][t] for i in (0, 1)))
        assert (words[own] == -1).all()
        words[own] = group[t]

    made = instructions(np.asarray(sizes), words)
    monkeypatch.setattr(tiles, 'warp', made)
    monkeypatch.setattr(tiles, 'lane_code', LANE_CODE)
    monkeypatch.setattr(tiles, '_fill', fill)
    utils = types.SimpleNamespace(thread_idx=lambda: THREAD)
    monkeypatch.setattr(tiles, 'utils', utils)
    tiles._emit(cut, (0, 0), block)
    return tiles.Book(cut, words)

  return run


@pytest.mark.parametrize('tail', (0, 203))
@pytest.mark.parametrize('name', SIZES)
def test_tiles_cover_every_row_once(book, name, tail):
  sizes = np.array(SIZES[name])
  rows = -(-(int(sizes.sum()) + tail) // 8) * 8 or 8
  if name == 'too_many_rows':
    rows = 200
  owner = np.full((rows, 3), -1)
  cut = tiles.Cut(sizes.size, rows, 64, 3, 7)
  for block in range(cut.blocks):
    own = book(cut, sizes, block)
    mine = (own.tiles() - block + cut.blocks - 1) // cut.blocks
    assert mine <= cut.most
    for i in range(mine):
      index = block + i * cut.blocks
      group = own.group(i)
      start, end = own.bounds(group)
      within = index // 3 - own.first_tile(group)
      first = start // 8 * 8 + within * 64
      inside = np.arange(max(first, start), min(first + 64, end))
      assert inside.size
      assert (owner[inside, index % 3] == -1).all()
      owner[inside, index % 3] = group
  groups = np.repeat(np.arange(sizes.size), sizes)[:rows]
  want = np.concatenate([groups, np.full(rows - groups.size, sizes.size)])
  np.testing.assert_array_equal(owner, want[:, None] + np.zeros((1, 3)))


def test_rows_of_groups_alone(book):
  own = book(tiles.Cut(7, 1024), SIZES['odd'], 0)
  ends = np.cumsum(SIZES['odd'])
  for group, end in enumerate(ends):
    assert own.bounds(group) == (end - SIZES['odd'][group], end)
