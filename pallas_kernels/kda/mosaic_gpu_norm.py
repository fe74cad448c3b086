"""RMSNorm of heads times a sigmoid gate on Hopper, and its gradient.

    r = (mean(x^2) + eps)^-1/2      y = gain r x sigmoid(gate)

over the V channels of a head of a token, a row. V / 8 neighbouring lanes share
a row, 16 bytes each, and a warp walks along its rows some steps behind its
loads, so every array is read or written once. The gradient sums over a warp's
rows what the gain receives; the warps' sums are added outside in a fixed order:

    d = dy gain sigmoid(gate)
    dx = r d - r^3 x mean(d x)
    dgate = dy gain r x sigmoid(gate) (1 - sigmoid(gate))
    dgain = sum over rows of dy r x sigmoid(gate)
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils

from pallas_kernels.kda import mosaic_gpu_threads as threads
from pallas_kernels.kda import mosaic_gpu_warp as warp

WIDTHS = (64, 128, 256)
_LANE = 8  # channels of one thread
_AHEAD = 2  # steps whose loads are on their way
_UNROLLED = 2  # steps in the body of the loop along a run
_STEPS = 32  # of a warp


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Of one call: rows, channels of a row, eps."""

  rows: int
  channels: int
  eps: float

  @property
  def lanes(self) -> int:
    """Threads that share a row."""
    return self.channels // _LANE

  @property
  def abreast(self) -> int:
    """Rows of a warp's step."""
    return 32 // self.lanes

  @property
  def warps(self) -> int:
    return -(-self.rows // (self.abreast * _STEPS))

  @property
  def blocks(self) -> int:
    return -(-self.warps // (threads.BLOCK // 32))


class Walk:
  """One thread's channels, and the rows of its warp."""

  def __init__(self, sizes: Sizes, block: warp.Word):
    thread = warp.bit_and(utils.thread_idx(), threads.BLOCK - 1)
    lane = warp.bit_and(thread, 31)
    self.sizes = sizes
    self.warp = warp.add(
      warp.times(block, threads.BLOCK // 32), warp.shift_right(thread, 5)
    )
    self.channel = warp.times(warp.bit_and(lane, sizes.lanes - 1), _LANE)
    self._group = warp.quotient(lane, sizes.lanes)
    first = warp.times(self.warp, sizes.abreast * _STEPS)
    self._first = warp.add(first, self._group)
    # The lanes that write for all rows abreast of their warp.
    self.writes = warp.both(
      warp.compare(self._group, 'eq', 0),
      warp.compare(self.warp, 'slt', sizes.warps),
    )

  def row(self, step):
    """(number of this thread's row, whether there is one)."""
    row = warp.add(self._first, warp.times(step, self.sizes.abreast))
    exists = warp.compare(row, 'slt', self.sizes.rows)
    return warp.where(exists, row, warp.word(0)), exists

  def _address(self, start, row):
    start = threads.advance(start, row, 2 * self.sizes.channels)
    return threads.advance(start, self.channel, 2)

  def load(self, start, step) -> list[warp.Word]:
    """Channels of the step's row; of any row if there is none."""
    row, _ = self.row(step)
    return warp.load_global_words(self._address(start, row), 0, _LANE // 2)

  def store(self, start, step, values):
    row, exists = self.row(step)
    address = self._address(start, row)
    warp.store_global(address, 0, threads.narrow(values), predicate=exists)

  def gains(self, start) -> list[warp.Real]:
    address = threads.advance(start, self.channel, 4)
    first = warp.load_global(address, 0, 4)
    return first + warp.load_global(address, 16, 4)

  def row_sum(self, values) -> warp.Real:
    """The sum over all channels of a row, the same in all its lanes."""
    total = values[0]
    for x in values[1:]:
      total = total + x
    distance = 1
    while distance < self.sizes.lanes:
      total = total + warp.exchange(total, distance)
      distance *= 2
    return total

  def store_sums(self, start, sums):
    """Writes the sums over the warp's rows to [warps, V] float32."""
    distance = self.sizes.lanes
    while distance < 32:
      sums = [x + warp.exchange(x, distance) for x in sums]
      distance *= 2
    address = threads.advance(start, self.warp, 4 * self.sizes.channels)
    address = threads.advance(address, self.channel, 4)
    for i in range(0, _LANE, 4):
      row = sums[i : i + 4]
      warp.store_global(address, 4 * i, row, predicate=self.writes)


def _walk(walk: Walk, arrays, state, body):
  """`state = body(step, rows, state)` along a warp's steps.

  `rows` has the step's channels of every array, loaded _AHEAD steps before.
  """
  load = lambda step: [walk.load(start, step) for start in arrays]
  waiting = [load(warp.word(i)) for i in range(_AHEAD)]

  def some(i, carried):
    waiting, state = carried
    for j in range(_UNROLLED):
      step = warp.add(warp.times(i, _UNROLLED), j)
      waiting = [*waiting, load(warp.add(step, _AHEAD))]
      state = body(step, [threads.wide(x) for x in waiting[0]], state)
      waiting = waiting[1:]
    return waiting, state

  return threads.loop(_STEPS // _UNROLLED, (waiting, state), some)[1]


def _scale(walk: Walk, x) -> warp.Real:
  sizes = walk.sizes
  squares = walk.row_sum([a * a for a in x])
  return warp.rsqrt(squares * (1 / sizes.channels) + sizes.eps)


def _forward(walk: Walk, arrays, outputs):
  *rows, gain = arrays
  gains = walk.gains(gain)

  def body(step, rows, state):
    x, gate = rows
    r = _scale(walk, x)
    y = [a * r * w * threads.sigmoid(g) for a, g, w in zip(x, gate, gains)]
    walk.store(outputs[0], step, y)
    return state

  _walk(walk, rows, (), body)


def _backward(walk: Walk, arrays, outputs):
  *rows, gain = arrays
  d_x, d_gate, partial = outputs
  gains = walk.gains(gain)

  def body(step, rows, sums):
    x, gate, d_y = rows
    r = _scale(walk, x)
    _, exists = walk.row(step)
    s = [threads.sigmoid(g) for g in gate]
    # What is common to the gradients of gain and gate, and that of the norm.
    open_ = [d * a for d, a in zip(d_y, s)]
    d = [a * w for a, w in zip(open_, gains)]
    inner = walk.row_sum([a * b for a, b in zip(d, x)])
    slope = r * r * r * inner * (1 / walk.sizes.channels)
    normed = [a * r for a in x]
    walk.store(d_x, step, [a * r - b * slope for a, b in zip(d, x)])
    one = warp.Real(1.0)
    walk.store(
      d_gate, step, [a * n * (one - b) for a, n, b in zip(d, normed, s)]
    )
    shares = [warp.where(exists, a * n, 0.0) for a, n in zip(open_, normed)]
    return [sum_ + a for sum_, a in zip(sums, shares)]

  sums = _walk(walk, rows, [warp.Real(0.0)] * _LANE, body)
  walk.store_sums(partial, sums)


def _launch(sizes: Sizes, name: str, body, trees):
  """Runs `body(walk, addresses of arrays, of results)` in every thread."""

  def work(arrays, outputs):
    body(Walk(sizes, threads.block_index()), arrays, outputs)

  return threads.launch(name, sizes.blocks, work, trees)


def forward(x_nv, gate_nv, gain_v, eps: float) -> jax.Array:
  """y [N, V] bfloat16; see the file's docstring.

  Args:
    x_nv, gate_nv: [N, V] bfloat16, V one of WIDTHS.
    gain_v: [V].
    eps: added to the mean square.
  """
  sizes = Sizes(*x_nv.shape, eps)
  written = [jax.ShapeDtypeStruct(x_nv.shape, jnp.bfloat16)]
  arrays = x_nv, gate_nv, gain_v.astype(jnp.float32)
  return _launch(sizes, 'gated_norm', _forward, (arrays, written))[0]


def backward(x_nv, gate_nv, gain_v, d_y_nv, eps: float):
  """Gradients of x and gate [N, V] bfloat16 and of the gain [V] float32.

  Args:
    x_nv, gate_nv, gain_v, eps: as for `forward`.
    d_y_nv: gradient of its result, [N, V] bfloat16.
  """
  sizes = Sizes(*x_nv.shape, eps)
  like = jax.ShapeDtypeStruct(x_nv.shape, jnp.bfloat16)
  partial = jax.ShapeDtypeStruct((sizes.warps, sizes.channels), jnp.float32)
  arrays = x_nv, gate_nv, d_y_nv, gain_v.astype(jnp.float32)
  written = [like, like, partial]
  name = 'gated_norm_gradient'
  d_x, d_gate, sums = _launch(sizes, name, _backward, (arrays, written))
  return d_x, d_gate, sums.sum(0)
