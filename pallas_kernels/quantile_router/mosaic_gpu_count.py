"""Histograms of the required biases on Hopper, in shared memory.

Legend: t token, e expert, n bin, s slice, i edge.

A thread block counts a group of experts over a slice of the tokens: the
histograms of 56 experts with 1000 bins fill the shared memory of a processor.
Adding integers in shared memory is one instruction; the same additions in
global memory would be eight times slower. Slices add up outside.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir

from pallas_kernels.kda import mosaic_gpu_warp as warp
from pallas_kernels.kda.mosaic_gpu_warp import Real, Word
from pallas_kernels.quantile_router import mosaic_gpu_warp as lane_code
from pallas_kernels.quantile_router import statistics as stat

PROCESSORS = 132
SHARED_BYTES = 224 * 1024


class Plan(NamedTuple):
  """Static choices; `warpgroups` and `unroll` size a thread block's work."""

  tokens: int
  experts: int
  num_bins: int
  estimator: str
  space: str
  dtype: str
  warpgroups: int = 8
  unroll: int = 1

  @property
  def width(self) -> int:
    """Neighbouring experts of a thread."""
    return next(w for w in (4, 2, 1) if self.experts % w == 0)

  @property
  def edges(self) -> int:
    return self.num_bins - 1 if self.estimator == 'log_edges' else 0

  @property
  def pitch(self) -> int:
    """Words between the edges of two experts, odd to spread the banks."""
    return self.edges | 1 if self.edges else 0

  @property
  def expert_bytes(self) -> int:
    return 4 * (self.num_bins + self.pitch + (self.edges > 0))

  @property
  def threads(self) -> int:
    return 128 * self.warpgroups

  @property
  def groups(self) -> int:
    most = SHARED_BYTES // (self.expert_bytes * self.width)
    most = min(most, self.threads)
    return -(-self.experts // (most * self.width)) if most else 0

  @property
  def group(self) -> int:
    """Experts of a thread block."""
    vectors = -(-self.experts // (self.groups * self.width))
    return vectors * self.width

  @property
  def across(self) -> int:
    """Threads side by side in a token."""
    return self.group // self.width

  @property
  def down(self) -> int:
    """Tokens that the threads of a block take at once."""
    return self.threads // self.across

  @property
  def slices(self) -> int:
    return max(1, min(PROCESSORS // self.groups, -(-self.tokens // 64)))

  @property
  def rows(self) -> int:
    """Tokens of a slice."""
    return -(-self.tokens // self.slices)

  @property
  def narrow(self) -> bool:
    """Counts of a slice fit 16 bits, and words hold two of the same slice."""
    even = self.num_bins % 2 == 0 or self.group % 2 == self.experts % 2 == 0
    return even and self.rows < 2**15

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
  bias: Word | None


class Column(NamedTuple):
  """Neighbouring experts, a thread's own for all tokens that it takes."""

  logits: ir.Value  # global addresses, of the first token
  bound: ir.Value
  left: Word  # tokens from the first one on
  counts: Word  # shared addresses, of the first expert
  edges: Word | None
  centres: list[Real]
  numbers: list[Real]


def parameters(statistics, bias_e) -> jax.Array:
  """What places a margin, float32 [8].

  Uniform bins: the lower end and the bins in a unit. Log edges: both ends, then
  slope and offset of the number of an edge as a function of the logarithm of
  its distance from the bias, and how far from a whole number it is certain.
  """
  lo, hi, bins = statistics.lo, statistics.hi, statistics.num_bins
  if statistics.estimator == 'uniform':
    values = [lo, bins / (hi - lo)]
  else:
    last = (bins - 1) // 2 - 1
    slope = last / -math.log2(stat.INNER)
    offset = last - slope * jnp.log2(hi - lo)
    ends = jnp.maximum(jnp.abs(lo), jnp.abs(hi))
    most = jnp.maximum(jnp.max(jnp.abs(bias_e)), ends)
    finest = stat.INNER * (hi - lo)
    doubt = 1e-3 + slope / math.log(2) * 2**-22 * most / finest
    values = [lo, hi, slope, offset, 0.5 - doubt]
  values = [jnp.asarray(x, jnp.float32) for x in values]
  return jnp.stack(values + [jnp.float32(0)] * (8 - len(values)))


def count(logits, bound_t, statistics, bias_e, plan: Plan) -> jax.Array:
  """Counts int32 [E, num_bins].

  Args:
    logits: [T, E] float32 or bfloat16, finite where the token counts.
    bound_t: float32 [T], cutoffs; NaN for tokens that do not count.
    statistics: what to count.
    bias_e: float32 [E].
    plan: see `Plan`.
  """
  read = dict(
    logits=logits, bound=bound_t, parameters=parameters(statistics, bias_e)
  )
  scratch = [plgpu.SMEM((plan.group, plan.num_bins), jnp.int32)]
  if plan.edges:
    read['bias'] = bias_e
    read['edges'] = stat.log_edges(
      bias_e, statistics.lo, statistics.hi, statistics.num_bins
    )
    scratch.append(plgpu.SMEM((plan.group, plan.pitch), jnp.float32))
    scratch.append(plgpu.SMEM((plan.group,), jnp.float32))
  kernel = plgpu.kernel(
    lambda *refs: _body(plan, (*read, 'out'), *refs),
    out_type=jax.ShapeDtypeStruct(
      (plan.slices, plan.experts, plan.num_bins),
      jnp.int16 if plan.narrow else jnp.int32,
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
  return jnp.sum(kernel(*read.values()), axis=0, dtype=jnp.int32)


def _body(plan: Plan, names, *refs):
  plain = plgpu.RefType()

  @plgpu.inline_mgpu(arg_types=(plain,) * len(refs))
  def emit(ctx, *refs):
    del ctx
    pointers = {n: warp.global_address(r) for n, r in zip(names, refs)}
    shared = [warp.shared_address(r) for r in refs[len(names) :]]
    block = lane_code.block()
    slice_ = lane_code.quotient(block, plan.groups)
    place = Place(
      utils.thread_idx(),
      warp.times(lane_code.remainder(block, plan.groups), plan.group),
      warp.times(slice_, plan.rows),
      slice_,
      *(shared + [None, None])[:3],
    )
    _emit(plan, pointers, place)

  emit(*refs)


def _emit(plan: Plan, pointers, place: Place):
  _clear(plan, place)
  if plan.edges:
    _copy_edges(plan, pointers, place)
  lane_code.wait_for_block()
  own = _column(plan, pointers, place)

  step = plan.down * plan.unroll
  held = plan.width + 1

  def load(first):
    rows = [warp.add(first, plan.down * n) for n in range(plan.unroll)]
    return [x for row in rows for x in _load(plan, own, row)]

  def several(i, loaded):
    # What comes next is on its way while this is counted.
    following = load(warp.times(warp.add(i, 1), step))
    tokens = [loaded[n : n + held] for n in range(0, len(loaded), held)]
    scores = _scores(plan, [x for token in tokens for x in token[:-1]])
    for n, token in enumerate(tokens):
      ours = scores[n * plan.width : (n + 1) * plan.width]
      _count(plan, own, ours, token[-1])
    return following

  lane_code.iterate(-(-plan.rows // step), load(warp.word(0)), several)
  lane_code.wait_for_block()
  _write(plan, pointers['out'], place)


def _column(plan: Plan, pointers, place: Place) -> Column:
  """The experts of this thread, the same for all its tokens."""
  inner = warp.times(lane_code.remainder(place.thread, plan.across), plan.width)
  row = lane_code.quotient(place.thread, plan.across)
  expert = warp.add(place.first_expert, inner)
  exists = warp.both(
    warp.compare(row, 'slt', plan.down),
    warp.compare(expert, 'slt', plan.experts),
  )
  # A thread without experts reads others and counts nothing.
  expert = warp.where(exists, expert, warp.word(0))
  token = warp.add(place.first_token, row)
  left = lane_code.difference(warp.word(plan.rows), row)
  inside = lane_code.difference(warp.word(plan.tokens), token)
  left = warp.where(warp.compare(left, 'slt', inside), left, inside)
  left = warp.where(exists, left, warp.word(0))
  token = warp.where(warp.compare(left, 'sgt', 0), token, warp.word(0))
  start = lane_code.row_address(
    pointers['logits'], token, plan.experts * plan.item
  )
  counts = warp.add(place.counts, warp.times(inner, 4 * plan.num_bins))
  edges, centres = None, []
  if not plan.edges:
    counts = warp.add(counts, -(4 * lane_code.FLOOR_BITS % 2**32))
  else:
    edges = warp.add(place.edges, warp.times(inner, 4 * plan.pitch))
    bias = warp.add(place.bias, warp.shift_left(inner, 2))
    centres = warp.load_real(bias, 0, plan.width)
  return Column(
    warp.advance(start, warp.times(expert, plan.item)),
    lane_code.row_address(pointers['bound'], token, 4),
    left,
    counts,
    edges,
    centres,
    [
      x for n in (0, 16) for x in warp.load_global(pointers['parameters'], n, 4)
    ],
  )


def _each(plan: Plan, total: int, thread: Word, body):
  """Calls body(n, n < total) for this thread's share of 0 .. total - 1."""
  step = plan.threads

  def one(i):
    n = warp.add(warp.times(i, step), thread)
    body(n, warp.compare(n, 'slt', total))

  warp.repeat(-(-total // step), one)


def _clear(plan: Plan, place: Place):
  def one(n, inside):
    address = warp.add(place.counts, warp.shift_left(n, 2))
    warp.store(address, 0, [warp.word(0)], predicate=inside)

  _each(plan, plan.group * plan.num_bins, place.thread, one)


def _copy_edges(plan: Plan, pointers, place: Place):
  """Biases and edges of the group's experts."""

  def copy(name: str, width: int, target: Word):
    pitch = width | 1
    last = plan.experts - 1

    def one(n, inside):
      row = lane_code.quotient(n, pitch)
      column = lane_code.remainder(n, pitch)
      expert = warp.add(place.first_expert, row)
      beyond = warp.compare(expert, 'sgt', last)
      expert = warp.where(beyond, warp.word(last), expert)
      source = warp.add(warp.times(expert, width), column)
      within = warp.compare(column, 'slt', width)
      source = warp.where(within, source, warp.word(0))
      address = lane_code.row_address(pointers[name], source, 4)
      values = warp.load_global(address, 0, 1)
      address = warp.add(target, warp.shift_left(n, 2))
      warp.store(address, 0, values, predicate=inside)

    _each(plan, plan.group * pitch, place.thread, one)

  copy('bias', 1, place.bias)
  copy('edges', plan.edges, place.edges)


def _load(plan: Plan, own: Column, row: Word) -> list[Real]:
  """Logits and cutoff of a token; the cutoff is NaN if it does not count."""
  exists = warp.compare(row, 'slt', own.left)
  row = warp.where(exists, row, warp.word(0))
  (bound,) = warp.load_global(lane_code.row_address(own.bound, row, 4), 0, 1)
  address = lane_code.row_address(own.logits, row, plan.experts * plan.item)
  logits = lane_code.load_bytes(address, plan.width, plan.dtype)
  return [*logits, warp.where(exists, bound, float('nan'))]


def _scores(plan: Plan, logits) -> list[Real]:
  if plan.space == 'logit':
    return logits
  magnitude = lane_code.magnitude(logits)
  return lane_code.choose(
    lane_code.all_lanes(lane_code.less(magnitude, lane_code.SMALL)),
    lambda: [lane_code.sigmoid(x, small=True) for x in logits],
    lambda: [lane_code.sigmoid(x) for x in logits],
    [Real] * len(logits),
  )


def _count(plan: Plan, own: Column, scores, bound: Real):
  counts = lane_code.equal(bound, bound)
  amount = warp.where(counts, warp.word(1), warp.word(0))
  for i, score in enumerate(scores):
    margin = bound - score
    if plan.edges:
      edges = warp.add(own.edges, i * plan.pitch * 4)
      beside = own.centres[i], edges, counts
      number = _edges_below(plan, margin, beside, own.numbers)
    else:
      number = _uniform_bin(plan, margin, own.numbers)
    address = warp.add(own.counts, warp.shift_left(number, 2))
    address = warp.add(address, i * 4 * plan.num_bins)
    lane_code.add_shared(address, amount)


def _uniform_bin(plan: Plan, margin: Real, numbers) -> Word:
  """The bin, plus FLOOR_BITS."""
  lo, per_unit = numbers[:2]
  position = (margin - lo) * per_unit
  position = lane_code.maximum(position, Real(0.0))
  position = lane_code.minimum(position, Real(float(plan.num_bins - 1)))
  return lane_code.floor_bits(position)


def _edges_below(plan: Plan, margin: Real, beside, numbers) -> Word:
  """The number of edges below the margin, which is its bin.

  Distances of edges from the bias grow geometrically, so that a logarithm tells
  how many of them are below, except where the result is close to a whole number
  or where edges are clipped: there a search among the edges decides.
  """
  centre, edges, counts = beside
  lo, hi, slope, offset, certain = numbers[:5]
  side = plan.edges // 2
  distance = margin - centre
  number = warp.fma(lane_code.log2_magnitude(distance), slope, offset)
  number = lane_code.maximum(number, Real(-0.5))
  number = lane_code.minimum(number, Real(side - 0.5))
  whole = lane_code.ceiling(number)
  from_middle = whole - number - 0.5
  above = lane_code.greater(distance, Real(0.0))
  steps = lane_code.integer(whole)
  steps = warp.where(above, steps, lane_code.difference(warp.word(0), steps))
  sure = warp.both(
    lane_code.is_within(from_middle, certain),
    warp.both(lane_code.greater(margin, lo), lane_code.greater(hi, margin)),
  )
  (found,) = lane_code.choose(
    lane_code.either(sure, lane_code.negate(counts)),
    lambda: [warp.add(steps, side)],
    lambda: [_search(plan, margin, edges)],
    [Word],
  )
  return found


def _search(plan: Plan, margin: Real, edges: Word) -> Word:
  """The number of edges below the margin, by bisection."""
  found = warp.word(0)
  for level in reversed(range(plan.edges.bit_length())):
    further = warp.add(found, 1 << level)
    exists = warp.compare(further, 'sle', plan.edges)
    # Edge number `further` in the order of edges, from one.
    at = warp.where(exists, further, warp.word(1))
    (edge,) = warp.load_real(warp.add(edges, warp.shift_left(at, 2)), -4, 1)
    passed = warp.both(exists, lane_code.greater(margin, edge))
    found = warp.where(passed, further, found)
  return found


def _write(plan: Plan, out, place: Place):
  """Writes the group's counts of this slice, a word at a time."""
  item, each = (2, 2) if plan.narrow else (4, 1)
  slice_bytes = plan.experts * plan.num_bins * item
  base = lane_code.row_address(out, place.slice, slice_bytes)
  first = warp.times(place.first_expert, plan.num_bins * item)
  base = warp.advance(base, first)
  left = lane_code.difference(warp.word(plan.experts), place.first_expert)
  most = warp.times(left, plan.num_bins)

  def one(n, inside):
    n = warp.times(n, each)
    inside = warp.both(inside, warp.compare(n, 'slt', most))
    n = warp.where(inside, n, warp.word(0))
    address = warp.add(place.counts, warp.shift_left(n, 2))
    word, *other = warp.load(address, 0, each)
    if other:
      word = warp.union(word, warp.shift_left(other[0], 16))
    to = lane_code.row_address(base, n, item)
    warp.store_global(to, 0, [word], predicate=inside)

  _each(plan, plan.group * plan.num_bins // each, place.thread, one)
