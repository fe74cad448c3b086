"""Where a thread sits in a chunk of Kimi Delta Attention, and its addresses.

A chunk is 64 tokens by 128 channels, in four sub-blocks of 16 tokens, one for
each warp of a warpgroup. Its tiles in shared memory are [64, 64] bfloat16 with
the 128-byte swizzle of bulk copies: 16-byte piece i of row r lies at i XOR
(r mod 8). A tile of 128 channels is two of them, one behind the other.
"""

from __future__ import annotations

import dataclasses

from jax.experimental.mosaic.gpu import utils

from pallas_kernels.kda import mosaic_gpu_warp as warp

CHUNK = 64
WIDTH = 128
BLOCKS = CHUNK // 16
HALF = CHUNK * 64 * 2  # bytes of one [64, 64] bfloat16 tile
BLOCK_ROWS = 16 * 64 * 2  # bytes of 16 rows of such a tile
# Flags of a token, as numbers of bits: it is no padding, it is of the document
# that entered the chunk, of the one that leaves it; then the document's number
# in the chunk.
VALID, ENTERS, LEAVES, SEGMENT = range(4)


class Place:
  """Where this thread sits in its chunk, and the addresses that follow."""

  def __init__(self):
    thread, index = warp.bit_and(utils.thread_idx(), 127), utils.warp_idx()
    # Later sub-blocks have more work; each warpgroup gives its own elsewhere.
    rotated = warp.add(index, warp.shift_right(index, 2))
    self.block = warp.bit_and(rotated, 3)
    self.lane = lane = warp.bit_and(thread, 31)
    rows = warp.times(self.block, BLOCK_ROWS)
    low, high = warp.bit_and(lane, 7), warp.shift_right(lane, 4)
    chunk = warp.shift_left(warp.bit_and(lane, 14), 3)
    byte = warp.shift_left(warp.bit_and(lane, 1), 3)
    start = warp.add(warp.times(high, HALF), warp.add(chunk, byte))
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
    rows = warp.times(block, BLOCK_ROWS)
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
  norms: warp.Word  # [2, 64]: of queries, of keys
  totals: warp.Word  # [4, 128]
  beta: warp.Word  # [64]
  flags: warp.Word | None  # [64]


def lane_vector(place: Place, vector: warp.Word, offset: int) -> list:
  """This lane's 4 channels of a float32 vector over channels."""
  address = warp.add(vector, warp.shift_left(place.lane, 4))
  return warp.load_real(address, offset, 4)


def column(place: Place, tile: warp.Word, distance: int) -> warp.Word:
  """Address of own rows and the columns `distance` blocks back, cyclically."""
  columns = warp.bit_and(warp.add(place.block, -distance), BLOCKS - 1)
  return place.left(tile, place.block, columns)
