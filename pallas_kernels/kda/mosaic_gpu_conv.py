"""Short causal depthwise convolution with SiLU on Hopper, and its gradient.

    total[t] = sum_j w[., j] x[t - W + 1 + j]      y = total * sigmoid(total)

Rows before the first count as zero, as do rows of another document and padding.
A thread owns 8 neighbouring channels, 16 bytes, of a run of tokens and walks
along it with the last W rows in registers, so x is read once but for W - 1 rows
a run. The gradient walks the same way: it makes `total` again, holds the last W
gradients of it for dx, and sums over its run what the taps receive; the runs'
sums are added outside in a fixed order.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu

from pallas_kernels.kda import mosaic_gpu_warp as warp

_LANE = 8  # channels of one thread
_THREADS = 128
_FORWARD_RUN, _BACKWARD_RUN = 16, 32  # tokens of one thread
_AHEAD = 6  # tokens whose loads are on their way


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Of one call: tokens, channels, taps, tokens of a thread, documents."""

  length: int
  channels: int
  taps: int
  run: int
  packed: bool

  @property
  def groups(self) -> int:
    """Threads that together own all channels of a token."""
    return self.channels // _LANE

  @property
  def runs(self) -> int:
    return -(-self.length // self.run)


class Walk:
  """One thread's channels, and its rows around the first of its run."""

  def __init__(self, sizes: Sizes, block: warp.Word):
    thread = warp.bit_and(utils.thread_idx(), _THREADS - 1)
    index = warp.add(warp.times(block, _THREADS), thread)
    self.sizes = sizes
    self.inside = warp.compare(index, 'slt', sizes.groups * sizes.runs)
    index = warp.where(self.inside, index, warp.word(0))
    self.run, self.group = _divide(index, sizes.groups)
    self.first = warp.times(self.run, sizes.run)

  def token(self, j: int):
    """(index of the j-th token of the run, whether there is one)."""
    t = warp.add(self.first, j)
    exists = warp.both(
      warp.compare(t, 'sge', 0), warp.compare(t, 'slt', self.sizes.length)
    )
    return warp.where(exists, t, warp.word(0)), exists

  def address(self, start, t: warp.Word):
    """Of this thread's channels of a token in a [T, C] bfloat16 array."""
    row = warp.times(t, 2 * self.sizes.channels)
    offset = warp.add(row, warp.times(self.group, 2 * _LANE))
    return warp.advance(start, offset)

  def load(self, start, j: int) -> list[warp.Word]:
    """The j-th token's words, zeros if there is no such token."""
    t, exists = self.token(j)
    words = warp.load_global_words(self.address(start, t), 0, _LANE // 2)
    return [warp.where(exists, w, warp.word(0)) for w in words]

  def document(self, start, j: int) -> warp.Word:
    """The j-th token's document, 0 for padding and where there is no token."""
    t, exists = self.token(j)
    address = warp.advance(start, warp.shift_left(t, 2))
    (number,) = warp.load_global_words(address, 0, 1)
    return warp.where(exists, number, warp.word(0))

  def store(self, start, j: int, values):
    """Writes the j-th token's channels, if there is such a token."""
    t, exists = self.token(j)
    words = [warp.pack(a, b) for a, b in zip(values[::2], values[1::2])]
    predicate = warp.both(self.inside, exists)
    warp.store_global(self.address(start, t), 0, words, predicate=predicate)

  def taps(self, start) -> list[list[warp.Real]]:
    """The weights of this thread's channels, by tap."""
    count = self.sizes.taps
    offset = warp.times(self.group, 4 * _LANE * count)
    address = warp.advance(start, offset)
    flat = []
    for i in range(0, _LANE * count, 4):
      flat += warp.load_global(address, 4 * i, 4)
    return [flat[j::count] for j in range(count)]


def _wide(words) -> list[warp.Real]:
  return [x for w in words for x in warp.unpack(w)]


class Queue:
  """Rows of one array in order, loaded some tokens before they are used."""

  def __init__(self, load, first: int, stop: int):
    self._load, self._stop = load, stop
    self._next = first
    self._waiting = []

  def pop(self):
    while self._next < self._stop and len(self._waiting) <= _AHEAD:
      self._waiting.append(self._load(self._next))
      self._next += 1
    return self._waiting.pop(0)


def _sigmoid(x: warp.Real) -> warp.Real:
  return warp.reciprocal(warp.exp2(x * -math.log2(math.e)) + 1.0)


class Window:
  """The rows that the taps of one token reach, oldest first, as reals.

  Where the array is packed, rows of other documents count as zeros.
  """

  def __init__(self, walk: Walk, x, ids, last: int):
    taps = walk.sizes.taps
    self._rows = Queue(lambda j: walk.load(x, j), 1 - taps, last)
    self._ids = None
    if walk.sizes.packed:
      load = lambda j: walk.document(ids, j)
      self._ids = Queue(load, 1 - taps, last)
    self.rows, self.ids = [], []
    for _ in range(taps - 1):
      self._append()

  def _append(self):
    self.rows.append(_wide(self._rows.pop()))
    if self._ids is not None:
      self.ids.append(self._ids.pop())

  def advance(self) -> list[list[warp.Real]]:
    """Moves on by a token and returns its taps."""
    self._append()
    rows, ids = self.rows, self.ids
    if self._ids is not None:
      valid = warp.compare(ids[-1], 'ne', 0)
      same = [
        warp.both(valid, warp.compare(number, 'eq', ids[-1])) for number in ids
      ]
      rows = [
        [warp.where(here, x, 0.0) for x in row] for here, row in zip(same, rows)
      ]
    self.rows, self.ids = self.rows[1:], self.ids[1:]
    return rows


def _total(rows, weights) -> list[warp.Real]:
  total = [x * w for x, w in zip(rows[0], weights[0])]
  for row, weight in zip(rows[1:], weights[1:]):
    total = [warp.fma(x, w, t) for x, w, t in zip(row, weight, total)]
  return total


def _forward(walk: Walk, x, w, ids, out):
  """Outputs of one run."""
  weights = walk.taps(w)
  window = Window(walk, x, ids, walk.sizes.run)
  for j in range(walk.sizes.run):
    total = _total(window.advance(), weights)
    walk.store(out, j, [t * _sigmoid(t) for t in total])


def _backward(walk: Walk, arrays, outputs):
  """Gradients of one run, and its share of those of the taps."""
  x, w, d_out, ids = arrays
  d_x, partial = outputs
  run, count = walk.sizes.run, walk.sizes.taps
  weights = walk.taps(w)
  end = run + count - 1
  window = Window(walk, x, ids, end)
  cotangents = Queue(lambda j: walk.load(d_out, j), 0, end)
  d_taps = [[warp.Real(0.0)] * _LANE for _ in range(count)]
  recent, documents = [], []  # gradients of `total`, oldest first
  for j in range(end):
    rows = window.advance()
    total = _total(rows, weights)
    d_total, d_y = [], _wide(cotangents.pop())
    if walk.sizes.packed:  # padding yields zeros whatever stands there
      valid = warp.compare(window.ids[-1], 'ne', 0)
      d_y = [warp.where(valid, d, 0.0) for d in d_y]
    for t, d in zip(total, d_y):
      s = _sigmoid(t)
      d_total.append(d * s * warp.fma(t, warp.Real(1.0) - s, 1.0))
    recent.append(d_total)
    documents.append(window.ids[-1] if walk.sizes.packed else None)
    if j < run:
      for i, row in enumerate(rows):
        d_taps[i] = [
          warp.fma(d, x, sum_) for d, x, sum_ in zip(d_total, row, d_taps[i])
        ]
    if len(recent) == count:
      _store_d_x(walk, d_x, j - count + 1, (recent, documents, weights))
      recent, documents = recent[1:], documents[1:]
  offset = warp.times(walk.run, 4 * walk.sizes.channels * count)
  offset = warp.add(offset, warp.times(walk.group, 4 * _LANE * count))
  address = warp.advance(partial, offset)
  flat = [d_taps[i % count][i // count] for i in range(_LANE * count)]
  for i in range(0, len(flat), 4):
    warp.store_global(address, 4 * i, flat[i : i + 4], predicate=walk.inside)


def _store_d_x(walk: Walk, d_x, j: int, around):
  """The gradient of a row, from those of the tokens whose taps reach it."""
  recent, documents, weights = around
  result = [warp.Real(0.0)] * _LANE
  for ahead, d_total in enumerate(recent):
    if walk.sizes.packed:
      valid = warp.compare(documents[0], 'ne', 0)
      same = warp.compare(documents[ahead], 'eq', documents[0])
      here = warp.both(valid, same)
      d_total = [warp.where(here, d, 0.0) for d in d_total]
    weight = weights[len(recent) - 1 - ahead]
    result = [warp.fma(d, w, r) for d, w, r in zip(d_total, weight, result)]
  walk.store(d_x, j, result)


def _launch(sizes: Sizes, batch: int, name: str, body, arrays, written):
  """Runs `body(walk, addresses of arrays, of results)` in every thread."""
  reference = plgpu.RefType()
  count = len(arrays)
  blocks = -(-sizes.groups * sizes.runs // _THREADS)

  def kernel_body(*refs):
    b = lax.div(lax.axis_index('block'), blocks)
    rows = dict(zip((*arrays, *written), refs))
    own = [ref if n == 'taps' else ref.at[b] for n, ref in rows.items()]

    @plgpu.inline_mgpu(arg_types=(reference,) * len(own))
    def work(ctx, *own):
      del ctx
      addresses = [warp.global_address(ref) for ref in own]
      walk = Walk(sizes, _divide(_block(), blocks)[1])
      body(walk, addresses[:count], addresses[count:])

    work(*own)

  kernel = plgpu.kernel(
    kernel_body,
    out_type=tuple(written.values()),
    grid=(batch * blocks,),
    grid_names=('block',),
    kernel_name=name,
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
    ),
  )
  return dict(zip(written, kernel(*arrays.values())))


def _block() -> warp.Word:
  i32 = ir.IntegerType.get_signless(32)
  return arith.index_cast(i32, gpu.block_id(gpu.Dimension.x))


def _divide(a: warp.Word, b: int) -> tuple[warp.Word, warp.Word]:
  """Quotient and remainder of a number that is not negative."""
  divisor = warp.word(b)
  return arith.divui(a, divisor), arith.remui(a, divisor)


def _sizes(x_btc, taps_cw, ids_bt, run: int) -> Sizes:
  _, length, channels = x_btc.shape
  return Sizes(length, channels, taps_cw.shape[1], run, ids_bt is not None)


def _arrays(x_btc, taps_cw, ids_bt) -> dict:
  """The inputs by name, ids only where there are documents."""
  arrays = dict(x=x_btc, taps=taps_cw.astype(jnp.float32))
  if ids_bt is not None:
    arrays['ids'] = ids_bt.astype(jnp.int32)
  return arrays


def forward(x_btc: jax.Array, taps_cw: jax.Array, ids_bt) -> jax.Array:
  """y [B, T, C] bfloat16; see the file's docstring.

  Args:
    x_btc: [B, T, C] bfloat16, C a multiple of 8.
    taps_cw: [C, W], the last one for the token itself.
    ids_bt: [B, T] int32 or None; rows see those of their own document, 0 is
      padding, whose rows are not read and whose results are 0.
  """
  sizes = _sizes(x_btc, taps_cw, ids_bt, _FORWARD_RUN)

  def body(walk, arrays, outputs):
    x, w, *ids = arrays
    _forward(walk, x, w, ids[0] if ids else None, outputs[0])

  written = dict(y=jax.ShapeDtypeStruct(x_btc.shape, jnp.bfloat16))
  arrays = _arrays(x_btc, taps_cw, ids_bt)
  batch = x_btc.shape[0]
  return _launch(sizes, batch, 'short_conv', body, arrays, written)['y']


def backward(
  x_btc: jax.Array, taps_cw: jax.Array, ids_bt, d_y_btc: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Gradients of x [B, T, C] bfloat16 and of the taps [C, W] float32.

  Args:
    x_btc, taps_cw, ids_bt: as for `forward`.
    d_y_btc: gradient of its result, [B, T, C] bfloat16.
  """
  sizes = _sizes(x_btc, taps_cw, ids_bt, _BACKWARD_RUN)

  def body(walk, arrays, outputs):
    x, w, *ids, d_y = arrays
    _backward(walk, (x, w, d_y, ids[0] if ids else None), outputs)

  batch = x_btc.shape[0]
  shape = (batch, sizes.runs, *taps_cw.shape)
  written = dict(
    d_x=jax.ShapeDtypeStruct(x_btc.shape, jnp.bfloat16),
    partial=jax.ShapeDtypeStruct(shape, jnp.float32),
  )
  arrays = _arrays(x_btc, taps_cw, ids_bt) | {'d_y': d_y_btc}
  name = 'short_conv_gradient'
  results = _launch(sizes, batch, name, body, arrays, written)
  return results['d_x'], results['partial'].sum((0, 1))
