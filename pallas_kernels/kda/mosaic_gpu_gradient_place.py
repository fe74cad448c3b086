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
from jaxlib.mlir.dialects import arith, gpu, scf

from pallas_kernels.kda import mosaic_gpu_warp as warp
from pallas_kernels.kda.mosaic_gpu_place import (
  BLOCK_ROWS,
  CHUNK,
  HALF,
  WIDTH,
  Place,
)

# Tiles, in halves of channels or values: scaled queries and keys, inversely
# scaled keys, gates, V and later U, dO, dV; states by (half of values, half of
# keys), dS likewise; T; dP and dM, where -k~ was.
QUERY, KEY, INVERSE, GATE, VALUES, D_OUT, D_VALUES = range(0, 14, 2)
STATE, D_STATE, SOLVE, PAIRS, TILES = 14, 18, 22, 23, 25
MINUS_KEY = PAIRS
STAGE = STATE  # 4 KB a warp, to pass from one layout to the other

# Vectors, as offsets in words: norms of queries and of keys; decays of the
# sub-blocks; factors from one sub-block's reference to another's, a pair of
# bfloat16 a channel; factors from a sub-block to the chunk's start and end;
# sums over tokens; products of rows; betas; flags.
NORMS = 0
TOTALS = NORMS + 2 * CHUNK
MOVES = TOTALS + 4 * WIDTH
ENTERING = MOVES + 6 * WIDTH
LEAVING = ENTERING + 4 * WIDTH
THROUGH = LEAVING + 4 * WIDTH
SUMS = THROUGH + WIDTH
WRITTEN = SUMS + 4 * WIDTH
DOTS = WRITTEN + 4 * WIDTH
BETA = DOTS + 4 * CHUNK
FLAGS = BETA + CHUNK
WORDS = FLAGS + CHUNK


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
  """Shared addresses of one chunk; `masked`: there are flags of tokens."""

  tiles: warp.Word
  vectors: warp.Word
  masked: bool

  def tile(self, index: int) -> warp.Word:
    return warp.add(self.tiles, index * HALF)

  def own(self, seat: Seat, index: int) -> warp.Word:
    """This role's half of a tile of 128 channels."""
    return warp.add(self.tile(index), warp.times(seat.role, HALF))

  def vector(self, offset: int, index: warp.Word | int = 0) -> warp.Word:
    """Address of a word of a vector."""
    address = warp.add(self.vectors, 4 * offset)
    if isinstance(index, int):
      return warp.add(address, 4 * index)
    return warp.add(address, warp.shift_left(index, 2))


def block_barrier():
  """Waits for both warpgroups."""
  gpu.barrier()


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
