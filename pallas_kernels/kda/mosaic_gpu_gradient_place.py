"""Where a thread of the gradient kernel sits, and what shared memory holds.

Two warpgroups work on one chunk of 64 tokens. Warpgroup ("role") r owns 64 of
the 128 key channels and, in products over values, 64 of the 128 values; warp w
of each owns the 16 tokens of sub-block w. Elementwise work gives a lane two
neighbouring channels of all 16 tokens; products leave a lane the pairs of
`mosaic_gpu_warp`'s 16 x 16 blocks.

Shared memory is an array of [64, 64] bfloat16 tiles with the 128-byte swizzle
of bulk copies, and one array of float32 words.
"""

from __future__ import annotations

import dataclasses

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from pallas_kernels.kda import mosaic_gpu_warp as warp
from pallas_kernels.kda.mosaic_gpu_place import (
  BLOCK_ROWS,
  CHUNK,
  HALF,
  WIDTH,
  Place,
)

# Tiles, in halves of channels or values: inversely scaled keys; dP and dM,
# where -k~ was; then two regions that change places from chunk to chunk. The
# first has what is wanted to the end: scaled queries and keys, gates, and the
# state by (half of values, half of keys). The rest is V and later U, dO, dV, dS
# and T, and gives way to the next chunk's first ones early.
INVERSE, PAIRS = 0, 2
FIRST = 4
QUERY, KEY, GATE, STATE = FIRST, FIRST + 2, FIRST + 4, FIRST + 6
REGION = 11
REST = FIRST + REGION
VALUES, D_OUT, D_VALUES, D_STATE = REST, REST + 2, REST + 4, REST + 6
SOLVE = REST + 10
TILES = REST + REGION
MINUS_KEY = PAIRS
STAGE = STATE  # 4 KB a warp, to pass from one layout to the other

# Vectors, as offsets in words: decays of the sub-blocks; factors from one
# sub-block's reference to another's, a pair of bfloat16 a channel; factors from
# a sub-block to the chunk's start and end; sums over tokens; products of rows.
TOTALS = 0
MOVES = TOTALS + 4 * WIDTH
ENTERING = MOVES + 6 * WIDTH
LEAVING = ENTERING + 4 * WIDTH
THROUGH = LEAVING + 4 * WIDTH
SUMS = THROUGH + WIDTH
WRITTEN = SUMS + 4 * WIDTH
DOTS = WRITTEN + 4 * WIDTH
# Betas, flags and norms of queries and of keys come twice, since the next chunk
# has some of them before this one is finished.
OF_TOKENS = DOTS + 4 * CHUNK
WORDS = OF_TOKENS + 8 * CHUNK
BETA, FLAGS, NORMS = 0, CHUNK, 2 * CHUNK


class Seat(Place):
  """Where this thread sits in its chunk, and the addresses that follow."""

  def __init__(self):
    super().__init__()
    index = utils.warp_idx()
    self.role = warp.shift_right(index, 2)
    # Products leave sub-block w to warp w.
    self.block = warp.bit_and(index, 3)
    rows = warp.times(self.block, BLOCK_ROWS)
    self._words = warp.add(warp.shift_left(self.lane, 2), rows)
    self.channel = warp.add(
      warp.shift_left(self.role, 6), warp.shift_left(self.lane, 1)
    )

  def token(self, tile: warp.Word, j: int) -> tuple[warp.Word, int]:
    """Address of this lane's 2 channels of token j in a [64, 64] tile."""
    address = warp.add(tile, self._words)
    return warp.xor(address, (j & 7) << 4), j * 128


@dataclasses.dataclass(frozen=True)
class Shared:
  """Shared addresses of one chunk.

  Attributes:
    fixed, first, rest: of the tiles that never move, and of the two regions.
    vectors: of the words, and `tokens` of those that come twice.
    masked: there are flags of tokens.
  """

  fixed: warp.Word
  first: warp.Word
  rest: warp.Word
  vectors: warp.Word
  tokens: warp.Word
  masked: bool

  def tile(self, index: int) -> warp.Word:
    if index < FIRST:
      return warp.add(self.fixed, index * HALF)
    if index < REST:
      return warp.add(self.first, (index - FIRST) * HALF)
    return warp.add(self.rest, (index - REST) * HALF)

  def own(self, seat: Seat, index: int) -> warp.Word:
    """This role's half of a tile of 128 channels."""
    return warp.add(self.tile(index), warp.times(seat.role, HALF))

  def vector(self, offset: int, index: warp.Word | int = 0) -> warp.Word:
    """Address of a word of a vector."""
    return _word(self.vectors, offset, index)

  def of_token(self, offset: int, index: warp.Word | int = 0) -> warp.Word:
    """Address of a word of a token."""
    return _word(self.tokens, offset, index)


def _word(start: warp.Word, offset: int, index: warp.Word | int) -> warp.Word:
  if isinstance(index, int):
    return warp.add(start, 4 * (offset + index))
  return warp.add(warp.add(start, 4 * offset), warp.shift_left(index, 2))


def row_bytes(ref: ir.Value) -> int:
  """Bytes from one row of a bfloat16 reference to the next."""
  strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
  return 2 * strides[0]


def block_barrier():
  """Waits for both warpgroups that compute."""
  utils.inline_ptx('bar.sync 15, 256;', has_side_effects=True)


def minimum(a: warp.Real, b: float) -> warp.Real:
  """The lesser of two numbers, b if a is none."""
  return warp.Real(arith.minnumf(a.value, warp.Real(b).value))


def update_if(condition: ir.Value, values, body) -> list[warp.Real]:
  """body(values) where the warp's condition holds, else the values."""
  f32 = ir.F32Type.get()
  op = scf.IfOp(condition, [f32] * len(values), has_else=True)
  with ir.InsertionPoint(op.then_block):
    scf.yield_([x.value for x in body(list(values))])
  with ir.InsertionPoint(op.else_block):
    scf.yield_([x.value for x in values])
  return [warp.Real(x) for x in op.results_]


def on_diagonal(seat: Seat):
  """Which element of a [16, 16] product's diagonal a lane holds, if any.

  Returns a condition, and a function of the products' two column halves that
  gives the elements of rows `seat.row` and `seat.row` + 8.
  """
  odd = warp.compare(warp.bit_and(seat.row, 1), 'ne', 0)
  condition = warp.compare(
    warp.bit_and(seat.lane, 3), 'eq', warp.shift_right(seat.lane, 3)
  )

  def elements(near, far) -> tuple[warp.Real, warp.Real]:
    return warp.where(odd, near[1], near[0]), warp.where(odd, far[3], far[2])

  return condition, elements
