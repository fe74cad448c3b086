"""Histograms of the required biases on Hopper, in shared memory.

Legend: t token, e expert, n bin, s slice, i edge.

A thread block counts a group of experts over a slice of the tokens: the
histograms of 56 experts with 1000 bins fill the shared memory of a processor.
Adding integers in shared memory is one instruction; the same additions in
global memory would wait for the second-level cache. Slices add up outside.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils

from pallas_kernels.kda import mosaic_gpu_warp as warp
from pallas_kernels.kda.mosaic_gpu_warp import Real, Word
from pallas_kernels.quantile_router import mosaic_gpu_warp as lane_code

PROCESSORS = 132
SHARED_BYTES = 224 * 1024
_FLOOR_BIAS = 0x4B000000  # of `floor_bits`
_THREADS = 128


class Plan(NamedTuple):
  """Static choices; `warpgroups` and `unroll` size a thread block's work."""

  tokens: int
  experts: int
  num_bins: int
  estimator: str
  space: str
  dtype: str
  warpgroups: int = 8
  unroll: int = 4
  guard: str = 'amount'

  @property
  def width(self) -> int:
    """Neighbouring experts of a thread."""
    return next(w for w in (4, 2, 1) if self.experts % w == 0)

  @property
  def levels(self) -> int:
    """Compares of the binary search among all edges."""
    return (self.num_bins - 1).bit_length()

  @property
  def pitch(self) -> int:
    """Words between the edges of two experts, odd to spread the banks."""
    return (1 << self.levels) + 1 if self.estimator == 'log_edges' else 0

  @property
  def expert_bytes(self) -> int:
    return 4 * (self.num_bins + self.pitch)

  @property
  def groups(self) -> int:
    most = SHARED_BYTES // (self.expert_bytes * self.width)
    return -(-self.experts // (most * self.width)) if most else 0

  @property
  def group(self) -> int:
    """Experts of a thread block."""
    vectors = -(-self.experts // (self.groups * self.width))
    return vectors * self.width

  @property
  def slices(self) -> int:
    return max(1, min(PROCESSORS // self.groups, -(-self.tokens // 64)))

  @property
  def rows(self) -> int:
    """Tokens of a slice."""
    return -(-self.tokens // self.slices)

  @property
  def item(self) -> int:
    return jnp.dtype(self.dtype).itemsize


class Place(NamedTuple):
  """What a thread works on, and shared addresses."""

  thread: Word
  first_expert: Word
  first_token: Word
  slice: Word
  counts: Word
  edges: Word | None


def count(logits, bound_t, table, plan: Plan) -> jax.Array:
  """Counts int32 [E, num_bins].

  Args:
    logits: [T, E] float32 or bfloat16, finite where the token counts.
    bound_t: float32 [T], cutoffs; NaN for tokens that do not count.
    table: float32 [2], lower end and bins over length of uniform bins; or the
      edges [E, num_bins - 1].
    plan: see `Plan`.
  """
  scratch = [plgpu.SMEM((plan.group, plan.num_bins), jnp.int32)]
  if plan.estimator == 'log_edges':
    scratch.append(plgpu.SMEM((plan.group, plan.pitch), jnp.float32))
  kernel = plgpu.kernel(
    lambda *refs: _body(plan, *refs),
    out_type=jax.ShapeDtypeStruct(
      (plan.slices, plan.experts, plan.num_bins), jnp.int32
    ),
    grid=(plan.groups * plan.slices,),
    grid_names=('block',),
    num_threads=plan.warpgroups,
    thread_name='warpgroup',
    kernel_name='quantile_router_count',
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane,
      reduction_scratch_bytes=0,
      unsafe_no_auto_barriers=True,
    ),
    scratch_types=scratch,
  )
  return jnp.sum(kernel(logits, bound_t, table), axis=0)


def _body(plan: Plan, *refs):
  plain = plgpu.RefType()

  @plgpu.inline_mgpu(arg_types=(plain,) * len(refs))
  def emit(ctx, logits, bound, table, out, counts, *edges):
    del ctx
    names = ('logits', 'bound', 'table', 'out')
    arrays = (logits, bound, table, out)
    pointers = {n: warp.global_address(r) for n, r in zip(names, arrays)}
    block = lane_code.block()
    group = lane_code.remainder(block, plan.groups)
    slice_ = lane_code.quotient(block, plan.groups)
    place = Place(
      utils.thread_idx(),
      warp.times(group, plan.group),
      warp.times(slice_, plan.rows),
      slice_,
      warp.shared_address(counts),
      warp.shared_address(edges[0]) if edges else None,
    )
    _emit(plan, pointers, place)

  emit(*refs)


def _emit(plan: Plan, pointers, place: Place):
  _clear(plan, place)
  if plan.estimator == 'log_edges':
    _copy_edges(plan, pointers['table'], place)
  lane_code.wait_for_block()
  vectors = plan.rows * (plan.group // plan.width)
  step = _THREADS * plan.warpgroups
  scale = None
  if plan.estimator == 'uniform':
    scale = warp.load_global(pointers['table'], 0, 2)

  def several(i):
    first = warp.add(warp.times(i, step * plan.unroll), place.thread)
    at = [warp.add(first, step * u) for u in range(plan.unroll)]
    loaded = [_load(plan, pointers, place, n) for n in at]
    for item in loaded:
      if plan.guard == 'branch':
        warp.only_if(item[-1], lambda i=item: _count(plan, place, i, scale))
      else:
        _count(plan, place, item, scale)

  warp.repeat(-(-vectors // (step * plan.unroll)), several)
  lane_code.wait_for_block()
  _write(plan, pointers['out'], place)


def _each(plan: Plan, total: int, thread: Word, body):
  """Calls body(n, n < total) for this thread's share of 0 .. total - 1."""
  step = _THREADS * plan.warpgroups

  def one(i):
    n = warp.add(warp.times(i, step), thread)
    body(n, warp.compare(n, 'slt', total))

  warp.repeat(-(-total // step), one)


def _clear(plan: Plan, place: Place):
  def one(n, inside):
    address = warp.add(place.counts, warp.shift_left(n, 2))
    warp.store(address, 0, [warp.word(0)], predicate=inside)

  _each(plan, plan.group * plan.num_bins, place.thread, one)


def _copy_edges(plan: Plan, table, place: Place):
  """Edges of the group's experts, infinite beyond the last edge."""
  edges = plan.num_bins - 1

  def one(n, inside):
    row = lane_code.quotient(n, plan.pitch)
    column = lane_code.remainder(n, plan.pitch)
    expert = warp.add(place.first_expert, row)
    exists = warp.both(
      warp.compare(column, 'slt', edges),
      warp.compare(expert, 'slt', plan.experts),
    )
    source = warp.add(warp.times(expert, edges), column)
    source = warp.where(exists, source, warp.word(0))
    (edge,) = warp.load_global(lane_code.row_address(table, source, 4), 0, 1)
    edge = warp.where(exists, edge, float('inf'))
    address = warp.add(place.edges, warp.shift_left(n, 2))
    warp.store(address, 0, [edge], predicate=inside)

  _each(plan, plan.group * plan.pitch, place.thread, one)


def _load(plan: Plan, pointers, place: Place, n: Word):
  """(logits, cutoff, expert in the group, whether it counts) of a vector."""
  across = plan.group // plan.width
  row = lane_code.quotient(n, across)
  inner = warp.times(lane_code.remainder(n, across), plan.width)
  token = warp.add(place.first_token, row)
  expert = warp.add(place.first_expert, inner)
  exists = warp.both(
    warp.both(
      warp.compare(row, 'slt', plan.rows),
      warp.compare(token, 'slt', plan.tokens),
    ),
    warp.compare(expert, 'slt', plan.experts),
  )
  token = warp.where(exists, token, warp.word(0))
  expert = warp.where(exists, expert, warp.word(0))
  bound_at = lane_code.row_address(pointers['bound'], token, 4)
  (bound,) = warp.load_global(bound_at, 0, 1)
  start = lane_code.row_address(
    pointers['logits'], token, plan.experts * plan.item
  )
  address = warp.advance(start, warp.times(expert, plan.item))
  logits = lane_code.load_bytes(address, plan.width, plan.dtype)
  counts = warp.both(exists, lane_code.equal(bound, bound))
  return logits, bound, inner, counts


def _count(plan: Plan, place: Place, item, scale):
  logits, bound, inner, counts = item
  amount = warp.word(1)
  if plan.guard == 'amount':
    amount = warp.where(counts, warp.word(1), warp.word(0))
  row = warp.times(inner, 4 * plan.num_bins)
  row = warp.add(place.counts, row)
  edges = None
  if plan.estimator == 'log_edges':
    edges = warp.add(place.edges, warp.times(inner, 4 * plan.pitch))
  for i, logit in enumerate(logits):
    score = logit if plan.space == 'logit' else lane_code.sigmoid(logit)
    margin = bound - score
    if plan.estimator == 'uniform':
      bin_bytes = _uniform_bin(plan, margin, scale)
    else:
      bin_bytes = _edges_below(plan, margin, edges, i * plan.pitch * 4)
    address = warp.add(warp.add(row, bin_bytes), i * 4 * plan.num_bins)
    lane_code.add_shared(address, amount)


def _uniform_bin(plan: Plan, margin: Real, scale) -> Word:
  """Four times the bin."""
  lo, per_bin = scale
  position = (margin - lo) * per_bin
  position = lane_code.maximum(position, Real(0.0))
  position = lane_code.minimum(position, Real(float(plan.num_bins - 1)))
  bits = warp.add(lane_code.floor_bits(position), -_FLOOR_BIAS)
  return warp.shift_left(bits, 2)


def _edges_below(plan: Plan, margin: Real, edges: Word, offset: int) -> Word:
  """Four times the number of edges below the margin: a binary search."""
  at = edges
  for level in reversed(range(plan.levels)):
    step = 4 << level
    (edge,) = warp.load_real(at, offset + step - 4, 1)
    at = warp.where(lane_code.greater(margin, edge), warp.add(at, step), at)
  return lane_code.difference(at, edges)


def _write(plan: Plan, out, place: Place):
  slice_words = plan.experts * plan.num_bins
  base = lane_code.row_address(out, place.slice, 4 * slice_words)
  first = warp.times(place.first_expert, 4 * plan.num_bins)
  base = warp.advance(base, first)
  left = lane_code.difference(warp.word(plan.experts), place.first_expert)
  most = warp.times(left, plan.num_bins)

  def one(n, inside):
    inside = warp.both(inside, warp.compare(n, 'slt', most))
    source = warp.where(inside, n, warp.word(0))
    (value,) = warp.load(
      warp.add(place.counts, warp.shift_left(source, 2)), 0, 1
    )
    address = lane_code.row_address(base, source, 4)
    warp.store_global(address, 0, [value], predicate=inside)

  _each(plan, plan.group * plan.num_bins, place.thread, one)
