"""One token of Kimi Delta Attention on Hopper: one read, one write of a state.

A thread block owns 64 value columns of one state. Each lane holds 4 columns of
every second row of its warp's share, all in registers, so the state is read
once, kept while both sweeps over its rows finish, and written once:

    S~ = Diag(exp(g)) S    p = k^T S~    r = q^T S~    e = beta (v - p)
    o = scale (r + (q . k) e)            S' = S~ + k e^T

Source: Kimi Linear (arXiv 2510.26692), equation 1; the bounded gate is that of
the Kimi K3 technical report. All arithmetic is float32.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils

from pallas_kernels.kda import mosaic_gpu_warp as warp

_COLUMNS = 64
_LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Options:
  """What the kernel is specialised for; names as in `kda.decode_step`."""

  lower_bound: float
  scale: float
  normalize_qk: bool
  activate_gate: bool


def _warp_sum(x: warp.Real) -> warp.Real:
  for distance in (16, 8, 4, 2, 1):
    x = x + warp.exchange(x, distance)
  return x


def _block_sums(values, scratch: warp.Word, place) -> list[warp.Real]:
  """Sums of a few numbers over all 128 threads."""
  index, lane = place
  first = warp.compare(lane, 'eq', 0)
  address = warp.add(scratch, warp.shift_left(index, 4))
  sums = [_warp_sum(v) for v in values]
  warp.store(address, 0, [*sums, *warp.zeros(4 - len(sums))], predicate=first)
  utils.warpgroup_barrier()
  parts = [warp.load_real(scratch, 16 * w, 4) for w in range(4)]
  return [
    parts[0][i] + parts[1][i] + (parts[2][i] + parts[3][i])
    for i in range(len(values))
  ]


def _load(address, count: int, dtype) -> list[warp.Real]:
  if dtype == jnp.bfloat16:
    return warp.load_global_bfloat16(address, count)
  return warp.load_global(address, 0, count)


def _channel_rows(options: Options, token, shared, place):
  """Writes (decay, key, query) of each key channel; returns q . k."""
  index, lane = place
  channel = warp.add(warp.times(index, 32), lane)
  inside = warp.compare(channel, 'slt', token.width)
  present = warp.both(inside, token.active)
  channel = warp.where(inside, channel, warp.word(0))
  query, key, gate, shift = [
    warp.where(present, token.channel(name, channel), 0.0)
    for name in ('query', 'key', 'gate', 'shift')
  ]
  products = [query * query, key * key, query * key]
  sums = _block_sums(products, shared['sums'], place)
  norms = [warp.Real(1.0)] * 2
  if options.normalize_qk:
    norms = [warp.rsqrt(s + 1e-6) for s in sums[:2]]
  if options.activate_gate:
    power = warp.exp2(warp.fma(gate, token.slope, shift))
    gate = warp.reciprocal(power + 1.0) * options.lower_bound
  decay = warp.where(present, warp.exp2(gate * _LOG2E), 1.0)
  row = [decay, key * norms[1], query * norms[0], warp.Real(0.0)]
  address = warp.add(shared['rows'], warp.shift_left(channel, 4))
  warp.store(address, 0, row, predicate=inside)
  utils.warpgroup_barrier()
  return sums[2] * norms[0] * norms[1]


class _Token:
  """What one token brings to one head, read from global memory."""

  def __init__(self, pointers, dtypes, width: int):
    self._pointers, self._dtypes, self.width = pointers, dtypes, width
    scalars = warp.load_global(pointers['scalars'], 0, 4)
    self.slope, self.beta = scalars[:2]
    self.active = warp.greater(scalars[2], 0.0)

  def channel(self, name: str, channel: warp.Word) -> warp.Real:
    dtype = self._dtypes[name]
    offset = warp.times(channel, jnp.dtype(dtype).itemsize)
    address = warp.advance(self._pointers[name], offset)
    return _load(address, 1, dtype)[0]

  def columns(self, column: warp.Word) -> list[warp.Real]:
    dtype = self._dtypes['value']
    offset = warp.times(column, 4 * jnp.dtype(dtype).itemsize)
    values = _load(warp.advance(self._pointers['value'], offset), 4, dtype)
    return [warp.where(self.active, v, 0.0) for v in values]


def _emit(options: Options, pointers, shared, shape):
  """The work of one thread block on [width, 64] of a state."""
  width, pitch, dtypes = shape
  thread = warp.bit_and(utils.thread_idx(), 127)
  index, lane = utils.warp_idx(), warp.bit_and(thread, 31)
  half, column = warp.shift_right(lane, 4), warp.bit_and(lane, 15)
  first = warp.add(warp.times(index, width // 4), half)
  offset = warp.add(warp.times(first, 4 * pitch), warp.shift_left(column, 4))
  source = warp.advance(pointers['state'], offset)
  count = width // 8
  state = [warp.load_global(source, 8 * pitch * i, 4) for i in range(count)]
  token = _Token(pointers, dtypes, width)
  alike = _channel_rows(options, token, shared, (index, lane))
  v = token.columns(column)
  channels = warp.add(shared['rows'], warp.shift_left(first, 4))
  p, r = warp.zeros(4), warp.zeros(4)
  for i in range(count):
    decay, key, query, _ = warp.load_real(channels, 32 * i, 4)
    state[i] = [s * decay for s in state[i]]
    p = [warp.fma(s, key, x) for s, x in zip(state[i], p)]
    r = [warp.fma(s, query, x) for s, x in zip(state[i], r)]
  p, r = _column_sums(p, r, shared['columns'], (index, half, column))
  e = [(x - y) * token.beta for x, y in zip(v, p)]
  for i in range(count):
    # Loading the key again frees registers, hence more blocks run at once.
    (key,) = warp.load_real(channels, 32 * i + 4, 1)
    new = [warp.fma(x, key, s) for x, s in zip(e, state[i])]
    # Another block may be writing to a state that this row does not own.
    warp.store_global(source, 8 * pitch * i, new, predicate=token.active)
  out = [warp.fma(alike, x, y) * options.scale for x, y in zip(e, r)]
  _write_out(pointers['out'], dtypes['value'], column, (thread, token, out))


def _write_out(pointer, dtype, column: warp.Word, result):
  thread, token, out = result
  out = [warp.where(token.active, x, 0.0) for x in out]
  if dtype == jnp.bfloat16:
    out = [warp.pack(out[0], out[1]), warp.pack(out[2], out[3])]
  offset = warp.times(column, 4 * jnp.dtype(dtype).itemsize)
  writer = warp.compare(thread, 'slt', 16)
  warp.store_global(warp.advance(pointer, offset), 0, out, predicate=writer)


def _column_sums(p, r, scratch: warp.Word, place):
  """Sums over both halves of a warp and over warps, for each column."""
  index, half, column = place
  p, r = [[x + warp.exchange(x, 16) for x in values] for values in (p, r)]
  lane = warp.add(scratch, warp.shift_left(column, 4))
  address = warp.add(lane, warp.times(index, 2 * 4 * _COLUMNS))
  first = warp.compare(half, 'eq', 0)
  warp.store(address, 0, p, predicate=first)
  warp.store(address, 4 * _COLUMNS, r, predicate=first)
  utils.warpgroup_barrier()
  sums = []
  for offset in (0, 4 * _COLUMNS):
    total = warp.zeros(4)
    for w in range(4):
      part = warp.load_real(lane, offset + 2 * 4 * _COLUMNS * w, 4)
      total = [x + y for x, y in zip(total, part)]
    sums.append(total)
  return sums


def _body(options: Options, names, group: int, *refs):
  """One thread block: a batch row, a value head and 64 of its columns."""
  whole = dict(zip(names, refs))
  rows_s, sums_s, columns_s = refs[len(names) :]
  tile, head, b = [lax.axis_index(n) for n in ('tile', 'head', 'batch')]
  own = pl.ds(tile * _COLUMNS, _COLUMNS)
  key_head = lax.div(head, group)
  row = lax.max(whole['slots'][b], 0) if 'slots' in whole else b
  outer = {
    'query': whole['query'].at[b, key_head],
    'key': whole['key'].at[b, key_head],
    'gate': whole['gate'].at[b, head],
    'shift': whole['shift'].at[head],
    'scalars': whole['scalars'].at[b, head],
    'value': whole['value'].at[b, head, own],
    'state': whole['state'].at[row, head, :, own],
    'out': whole['out'].at[b, head, own],
  }
  dtypes = {name: ref.dtype for name, ref in whole.items()}
  shape = whole['state'].shape[2:]
  shared = {'rows': rows_s, 'sums': sums_s, 'columns': columns_s}
  plain = plgpu.RefType()
  types = jax.tree.map(lambda _: plain, (outer, shared))

  @plgpu.inline_mgpu(arg_types=types)
  def emit(ctx, outer, shared):
    del ctx
    pointers = {n: warp.global_address(ref) for n, ref in outer.items()}
    addresses = {n: warp.shared_address(ref) for n, ref in shared.items()}
    _emit(options, pointers, addresses, (*shape, dtypes))

  emit(outer, shared)


def step(arrays: dict[str, jax.Array], options: Options):
  """One token for every row of a batch.

  Args:
    arrays: query, key [B, H, K], gate [B, HV, K] and value [B, HV, V] float32
      or bfloat16; shift [HV, K] float32; scalars [B, HV, 4] float32: the slope
      inside the gate's power of two, beta, 1 for active rows or else 0, and 0;
      state [N, HV, K, V] float32; perhaps slots [B] int32, the place of each
      row's state, else the row's own number. K at most 128 and a multiple of 8,
      V a multiple of 64.
    options: see `Options`.

  Returns:
    The output [B, HV, V] in the dtype of value, and the new state, which takes
    the old one's place where that was donated. States of rows that are not
    active stay as they are.
  """
  _, heads, width, columns = arrays['state'].shape
  value = arrays['value']
  batch = value.shape[0]
  state = jax.new_ref(arrays['state'])
  names = (*arrays, 'out')
  group = heads // arrays['query'].shape[1]
  kernel = plgpu.kernel(
    lambda *refs: _body(options, names, group, *refs),
    out_type=jax.ShapeDtypeStruct(value.shape, value.dtype),
    grid=(columns // _COLUMNS, heads, batch),
    grid_names=('tile', 'head', 'batch'),
    kernel_name='kda_decode',
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
    ),
    scratch_types=[
      plgpu.SMEM((width, 4), jnp.float32),
      plgpu.SMEM((4, 4), jnp.float32),
      plgpu.SMEM((4, 2, _COLUMNS), jnp.float32),
    ],
  )
  out = kernel(*{**arrays, 'state': state}.values())
  return out, jax.freeze(state)
