"""Short causal depthwise convolutions with SiLU on Hopper, and their gradient.

    total[t] = sum_j w[., j] x[t - W + 1 + j]      y = total * sigmoid(total)

Rows before the first count as zero, as do rows of another document and padding.
One array may hold the inputs of several convolutions side by side, as one
product of weights makes them; each part has an output of its own. A thread owns
neighbouring channels of a run of tokens and walks along it with the last W rows
in registers, so x is read once but for W - 1 rows a run, some tokens before it
is used. The gradient walks the same way: it makes `total` again, holds the last
W gradients of it for dx, and sums over its run what the taps receive; the runs'
sums are added outside in a fixed order.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils

from pallas_kernels.kda import mosaic_gpu_threads as threads
from pallas_kernels.kda import mosaic_gpu_warp as warp

CHANNELS = 8  # the channels of a part are a multiple of it
_AHEAD = 4  # tokens whose loads are on their way
_UNROLLED = 4  # tokens in the body of the loop along a run
_LANE = 4  # channels of one thread
_RUN = 32  # tokens of one thread
_GRADIENT_RUNS = (128, 64, _RUN)  # fewer sums for the taps, fewer threads
_ENOUGH = 2**18  # threads


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Of one call: tokens, channels of a part, parts, taps, documents or not.

  A thread has `lane` channels and `run` tokens, a multiple of _UNROLLED.
  """

  length: int
  channels: int
  parts: int
  taps: int
  packed: bool
  lane: int
  run: int

  @property
  def groups(self) -> int:
    """Threads that together own all channels of a token and part."""
    return self.channels // self.lane

  @property
  def runs(self) -> int:
    return -(-self.length // self.run)

  @property
  def blocks(self) -> int:
    """Blocks of threads for one part of one sequence."""
    return -(-self.groups * self.runs // threads.BLOCK)


class Walk:
  """One thread's channels, and its rows around the first of its run."""

  def __init__(self, sizes: Sizes, part, block: warp.Word):
    thread = warp.bit_and(utils.thread_idx(), threads.BLOCK - 1)
    index = warp.add(warp.times(block, threads.BLOCK), thread)
    self.sizes, self.part = sizes, part
    self.inside = warp.compare(index, 'slt', sizes.groups * sizes.runs)
    index = warp.where(self.inside, index, warp.word(0))
    self.run, group = threads.divide(index, sizes.groups)
    self.channel = warp.times(group, sizes.lane)
    self.first = warp.times(self.run, sizes.run)

  @property
  def joint_channel(self) -> warp.Word:
    """The first channel among those of all parts."""
    return warp.add(warp.times(self.part, self.sizes.channels), self.channel)

  def exists(self, t: warp.Word):
    return warp.both(
      warp.compare(t, 'sge', 0), warp.compare(t, 'slt', self.sizes.length)
    )

  def token(self, j):
    """(index of the j-th token of the run, whether there is one)."""
    t = warp.add(self.first, j)
    exists = self.exists(t)
    return warp.where(exists, t, warp.word(0)), exists

  def joint(self, start):
    """Of this thread's channels in the first row of [T, parts, C] bfloat16."""
    return threads.advance(start, self.joint_channel, 2)

  def single(self, start):
    """Of this thread's channels in the first row of [T, C] bfloat16."""
    return threads.advance(start, self.channel, 2)

  def load(self, rows, j) -> list[warp.Word]:
    """The j-th token's words, zeros if there is no such token.

    `rows` is the address of the first row and the bytes from row to row.
    """
    t, exists = self.token(j)
    words = warp.load_global_words(
      threads.advance(rows[0], t, rows[1]), 0, self.words
    )
    return [warp.where(exists, w, warp.word(0)) for w in words]

  def document(self, start, j) -> warp.Word:
    """The j-th token's document, 0 for padding and where there is no token."""
    t, exists = self.token(j)
    (number,) = warp.load_global_words(threads.advance(start, t, 4), 0, 1)
    return warp.where(exists, number, warp.word(0))

  def store(self, rows, j, values):
    """Writes the j-th token's channels, if there is such a token."""
    t, exists = self.token(j)
    predicate = warp.both(self.inside, exists)
    address = threads.advance(rows[0], t, rows[1])
    words = threads.narrow(values)
    warp.store_global(address, 0, words, predicate=predicate)

  @property
  def words(self) -> int:
    return self.sizes.lane // 2

  @property
  def joint_stride(self) -> int:
    return 2 * self.sizes.channels * self.sizes.parts

  @property
  def single_stride(self) -> int:
    return 2 * self.sizes.channels

  def taps(self, start) -> list[list[warp.Real]]:
    """The weights of this thread's channels, by tap, from [parts * C, W]."""
    count, lane = self.sizes.taps, self.sizes.lane
    address = threads.advance(start, self.joint_channel, 4 * count)
    flat = []
    for i in range(0, lane * count, 4):
      flat += warp.load_global(address, 4 * i, 4)
    return [flat[j::count] for j in range(count)]

  def store_sums(self, start, sums):
    """Writes this run's sums for the taps to [runs, W, parts * C] float32."""
    width = self.sizes.channels * self.sizes.parts
    address = threads.advance(start, self.run, 4 * width * self.sizes.taps)
    address = threads.advance(address, self.joint_channel, 4)
    for j, values in enumerate(sums):
      for i in range(0, len(values), 4):
        offset = 4 * (j * width + i)
        row = values[i : i + 4]
        warp.store_global(address, offset, row, predicate=self.inside)


class Window:
  """The rows that the taps of one token reach, oldest first, as reals.

  Where the array is packed, rows of other documents count as zeros. `state`
  holds what a loop has to carry: rows and their documents before the next
  token, and those that have been asked for.
  """

  def __init__(self, walk: Walk, rows, ids):
    self._walk, self._rows, self._ids = walk, rows, ids
    before = range(1 - walk.sizes.taps, 0)
    self.state = dict(rows=[threads.wide(walk.load(rows, j)) for j in before])
    self.state['waiting'] = [walk.load(rows, j) for j in range(_AHEAD)]
    if walk.sizes.packed:
      self.state['ids'] = [walk.document(ids, j) for j in before]
      ahead = [walk.document(ids, j) for j in range(_AHEAD)]
      self.state['waiting_ids'] = ahead

  def advance(self, j):
    """The taps of the j-th token, which is the next, and their documents."""
    old = self.state
    later = warp.add(j, _AHEAD)
    rows = [*old['rows'], threads.wide(old['waiting'][0])]
    waiting = [*old['waiting'][1:], self._walk.load(self._rows, later)]
    self.state = dict(rows=rows[1:], waiting=waiting)
    if not self._walk.sizes.packed:
      return rows, None
    ids = [*old['ids'], old['waiting_ids'][0]]
    later_id = self._walk.document(self._ids, later)
    waiting_ids = [*old['waiting_ids'][1:], later_id]
    self.state |= dict(ids=ids[1:], waiting_ids=waiting_ids)
    return [
      _where_all(_same_document(number, ids[-1]), row)
      for number, row in zip(ids, rows)
    ], ids


def _same_document(a: warp.Word, b: warp.Word):
  """Whether b is no padding and a in its document."""
  return warp.both(warp.compare(b, 'ne', 0), warp.compare(a, 'eq', b))


def _where_all(condition, values):
  return [warp.where(condition, x, 0.0) for x in values]


def _total(rows, weights) -> list[warp.Real]:
  total = [x * w for x, w in zip(rows[0], weights[0])]
  for row, weight in zip(rows[1:], weights[1:]):
    total = [warp.fma(x, w, t) for x, w, t in zip(row, weight, total)]
  return total


def _forward(walk: Walk, x, w, ids, out):
  """Outputs of one run."""
  weights = walk.taps(w)
  window = Window(walk, (walk.joint(x), walk.joint_stride), ids)
  results = walk.single(out), walk.single_stride

  def some(i, state):
    window.state = state
    for step in range(_UNROLLED):
      j = warp.add(warp.times(i, _UNROLLED), step)
      rows, _ = window.advance(j)
      total = _total(rows, weights)
      walk.store(results, j, [t * threads.sigmoid(t) for t in total])
    return window.state

  threads.loop(walk.sizes.run // _UNROLLED, window.state, some)


class Gradient:
  """The gradient along one run; `state` is what its loop carries."""

  def __init__(self, walk: Walk, arrays):
    x, w, ids, d_out = arrays
    self._walk, self._weights = walk, walk.taps(w)
    self._window = Window(walk, (walk.joint(x), walk.joint_stride), ids)
    self._d_out = walk.single(d_out), walk.single_stride
    lane, count = walk.sizes.lane, walk.sizes.taps
    waiting = [walk.load(self._d_out, j) for j in range(_AHEAD)]
    sums = [[warp.Real(0.0)] * lane for _ in range(count)]
    own = dict(waiting=waiting, recent=[], documents=[], sums=sums)
    self.state = dict(window=self._window.state, own=own)

  def advance(self, j, counts=None):
    """Gradients of the j-th token's total, which then is the most recent.

    Its share of the taps' gradients is added, where `counts` holds if given.
    """
    walk, own = self._walk, self.state['own']
    self._window.state = self.state['window']
    rows, ids = self._window.advance(j)
    total = _total(rows, self._weights)
    d_y = threads.wide(own['waiting'][0])
    later = walk.load(self._d_out, warp.add(j, _AHEAD))
    if ids is not None:  # padding yields zeros whatever stands there
      d_y = _where_all(warp.compare(ids[-1], 'ne', 0), d_y)
    d_total = []
    for t, d in zip(total, d_y):
      s = threads.sigmoid(t)
      d_total.append(d * s * warp.fma(t, warp.Real(1.0) - s, 1.0))
    d_taps = d_total if counts is None else _where_all(counts, d_total)
    sums = [
      [warp.fma(d, x, sum_) for d, x, sum_ in zip(d_taps, row, sums)]
      for row, sums in zip(rows, own['sums'])
    ]
    own = dict(
      waiting=[*own['waiting'][1:], later],
      recent=[*own['recent'], d_total],
      documents=[*own['documents'], *([] if ids is None else ids[-1:])],
      sums=sums,
    )
    self.state = dict(window=self._window.state, own=own)

  def pop(self) -> list[warp.Real]:
    """The gradient of the oldest recent row, all of whose readers are known."""
    own = self.state['own']
    recent, documents = own['recent'], own['documents']
    result = [warp.Real(0.0)] * self._walk.sizes.lane
    for d_total, weight, i in zip(recent, self._weights[::-1], range(99)):
      if documents:
        here = _same_document(documents[i], documents[0])
        d_total = _where_all(here, d_total)
      result = [warp.fma(d, w, r) for d, w, r in zip(d_total, weight, result)]
    later = dict(recent=recent[1:], documents=documents[1:])
    self.state = self.state | {'own': own | later}
    return result


def _backward(walk: Walk, arrays, outputs):
  """Gradients of one run, and a share of those of the taps.

  The taps' share is that of the tokens from W - 1 after the run's first on; the
  first run adds those before.
  """
  d_x, partial = outputs
  reach = walk.sizes.taps - 1
  gradient = Gradient(walk, arrays)
  is_first = warp.compare(walk.run, 'eq', 0)
  for j in range(reach):
    gradient.advance(warp.word(j), is_first)
  results = walk.joint(d_x), walk.joint_stride

  def some(i, state):
    gradient.state = state
    for step in range(_UNROLLED):
      j = warp.add(warp.times(i, _UNROLLED), step)
      gradient.advance(warp.add(j, reach))
      walk.store(results, j, gradient.pop())
    return gradient.state

  state = threads.loop(walk.sizes.run // _UNROLLED, gradient.state, some)
  walk.store_sums(partial, state['own']['sums'])


def _launch(sizes: Sizes, batch: int, name: str, body, trees):
  """Runs `body(walk, addresses of arrays, of results)` in every thread.

  Arrays called d_y and results called y come as lists, one a part, of which a
  block's body gets its own.
  """

  def row(path, block):
    blocks_of_one = sizes.parts * sizes.blocks
    return None if path[0].key == 'taps' else lax.div(block, blocks_of_one)

  def work(arrays, outputs):
    index, block = threads.divide(threads.block_index(), sizes.blocks)
    _, part = threads.divide(index, sizes.parts)
    walk = Walk(sizes, part, block)
    body(walk, _of_part(arrays, part), _of_part(outputs, part))

  blocks = batch * sizes.parts * sizes.blocks
  return threads.launch(name, blocks, work, trees, row)


def _of_part(addresses: dict, part) -> dict:
  """One address in place of every list."""
  chosen = {}
  for name, x in addresses.items():
    if isinstance(x, list):
      first, *others = x
      for i, other in enumerate(others, 1):
        first = warp.where(warp.compare(part, 'eq', i), other, first)
      x = first
    chosen[name] = x
  return chosen


def _sizes(x_btsc, taps_scw, ids_bt, runs=(_RUN,)) -> Sizes:
  """With the longest of the runs that leaves enough threads."""
  batch, length, parts, channels = x_btsc.shape
  threads_of = lambda run: batch * parts * channels * length // (run * _LANE)
  run = next((r for r in runs if threads_of(r) >= _ENOUGH), runs[-1])
  shape = length, channels, parts, taps_scw.shape[2]
  return Sizes(*shape, ids_bt is not None, _LANE, run)


def _arrays(x_btsc, taps_scw, ids_bt) -> dict:
  """The inputs by name, ids only where there are documents."""
  arrays = dict(x=x_btsc, taps=taps_scw.astype(jnp.float32))
  if ids_bt is not None:
    arrays['ids'] = ids_bt.astype(jnp.int32)
  return arrays


def forward(x_btsc: jax.Array, taps_scw: jax.Array, ids_bt) -> list[jax.Array]:
  """y [B, T, C] bfloat16 of every part; see the file's docstring.

  Args:
    x_btsc: [B, T, S, C] bfloat16, C a multiple of CHANNELS.
    taps_scw: [S, C, W], the last one for the token itself.
    ids_bt: [B, T] int32 or None; rows see those of their own document, 0 is
      padding, whose rows are not read and whose results are 0.
  """
  sizes = _sizes(x_btsc, taps_scw, ids_bt)

  def body(walk, arrays, outputs):
    ids = arrays.get('ids')
    _forward(walk, arrays['x'], arrays['taps'], ids, outputs['y'])

  batch, length, parts, channels = x_btsc.shape
  one = jax.ShapeDtypeStruct((batch, length, channels), jnp.bfloat16)
  written = dict(y=[one] * parts)
  arrays = _arrays(x_btsc, taps_scw, ids_bt)
  return _launch(sizes, batch, 'short_conv', body, (arrays, written))['y']


def backward(
  x_btsc: jax.Array, taps_scw: jax.Array, ids_bt, d_y: list[jax.Array]
) -> tuple[jax.Array, jax.Array]:
  """Gradients of x [B, T, S, C] bfloat16 and of the taps [S, C, W] float32.

  Args:
    x_btsc, taps_scw, ids_bt: as for `forward`.
    d_y: gradients of its results, [B, T, C] bfloat16 each.
  """
  sizes = _sizes(x_btsc, taps_scw, ids_bt, _GRADIENT_RUNS)

  def body(walk, arrays, outputs):
    inputs = [arrays.get(name) for name in ('x', 'taps', 'ids', 'd_y')]
    _backward(walk, inputs, (outputs['d_x'], outputs['partial']))

  batch, _, parts, channels = x_btsc.shape
  shape = (batch, sizes.runs, sizes.taps, parts, channels)
  written = dict(
    d_x=jax.ShapeDtypeStruct(x_btsc.shape, jnp.bfloat16),
    partial=jax.ShapeDtypeStruct(shape, jnp.float32),
  )
  arrays = _arrays(x_btsc, taps_scw, ids_bt) | {'d_y': list(d_y)}
  name = 'short_conv_gradient'
  results = _launch(sizes, batch, name, body, (arrays, written))
  sums_wsc = results['partial'].sum((0, 1))
  return results['d_x'], jnp.moveaxis(sums_wsc, 0, 2)
