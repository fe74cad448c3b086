"""Body of the routing kernel for TPUs: select by groups, count in one pass.

Legend: t token of a tile, s lane, g group, j slot, e experts, i edges, n bins.
A tile is 128 tokens; a plane of it is 128 experts on the lanes. `row` arrays
have tokens on the lanes, [1, 128].

Selection. Lane s of all planes together is group s. The top_k + 1 best experts
lie in the top_k + 1 groups whose best experts are best: each of those groups
has a representative no worse than that of any other group, and equal scores are
ordered by the lower expert everywhere. So a first set of rounds ranks 128
representatives, the members of the groups that won fit one register of 128
lanes, and a second set of rounds ranks those. The rounds run on the transposed
tile, where a maximum over candidates is a maximum of registers.

Counting. A binary search between the edges finds the bin of a margin: the next
edge to compare with is in the row, of a register of edges, that the compares so
far name. The bin becomes a one in its nibble of a word; such words add up over
a few tokens, then as bytes over a block, then in the counts. Uniform bins
are numbers of two digits: the histogram of an expert is the product of the
one-hot matrices of both digits over the tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

LANES = 128
# Tokens of a tile.
TILE = 128
SUBLANES = 8
DIGIT = 32
# Expert histograms side by side in one product.
SIDE = LANES // DIGIT
_TABLE_BITS = 3
_NIBBLES, _BYTES = 1 << _TABLE_BITS, 4
_EVEN = 0x0F0F0F0F
# Tokens whose sum by sublane a nibble holds.
_HALF = 64


class Plan(NamedTuple):
  """Static choices.

  count: the estimator, None counts nothing.
  unroll: planes one after another in one piece of code, in which the compiler
    finds more to do at once; a CPU takes long to compile that.
  """

  experts: int
  top_k: int
  cutoff: str
  space: str
  block: int
  count: str | None
  edges: int = 0
  num_bins: int = 0
  unroll: bool = True

  @property
  def planes(self) -> int:
    return -(-self.experts // LANES)

  @property
  def width(self) -> int:
    return self.planes * LANES

  @property
  def slots(self) -> int:
    """Rows of an array of slots, whole registers."""
    return -(-(self.top_k + 1) // SUBLANES) * SUBLANES

  @property
  def levels(self) -> int:
    """Compares of the binary search between all edges but the last."""
    return max((self.edges - 1).bit_length(), _TABLE_BITS)

  @property
  def words(self) -> int:
    """Words of byte counters."""
    return (1 << self.levels) // _BYTES


class Inputs(NamedTuple):
  """Blocks in VMEM; `scale` is in SMEM."""

  logits: jax.Array  # [block, width]
  bias: jax.Array  # [1, width]
  mask: jax.Array  # [1, block], 1.0 where a row counts
  edges: jax.Array  # [rows of `table_rows`, width]; [1, width] without
  scale: jax.Array  # [2]: lower end, bins over length; of uniform bins


class Results(NamedTuple):
  """Blocks in VMEM, tokens on the lanes; counts stay over the grid."""

  indices: jax.Array  # [slots, block] int32
  chosen: jax.Array  # [slots, block]
  rows: jax.Array  # [8, block]: cutoff, finite
  counts: jax.Array  # see `counts_shape`


class Scratch(NamedTuple):
  logits: jax.Array  # [128, width] of the tile, zero where a row is not finite
  scores: jax.Array  # [128, width]
  biased: jax.Array  # [128, width], -inf beyond the experts
  level: jax.Array  # [128, 128], cutoffs by row, inf where not counted
  count: jax.Array  # [words + 1, 8, width] int32, or bins [width, block]


def counts_shape(plan: Plan) -> tuple[int, ...]:
  """Log edges: sums by sublane; uniform: digits, `SIDE` experts on lanes."""
  if plan.count == 'log_edges':
    return plan.edges + 1, SUBLANES, plan.width
  if plan.count == 'uniform':
    return plan.width // SIDE, DIGIT, LANES
  return 1, SUBLANES, LANES


def scratch_shape(plan: Plan) -> tuple[tuple[int, ...], type]:
  if plan.count == 'log_edges':
    return (plan.words + 1, SUBLANES, plan.width), jnp.int32
  if plan.count == 'uniform':
    return (plan.width, plan.block), jnp.float32
  return (SUBLANES, LANES), jnp.float32


def kernel(*refs, plan: Plan, tokens: int):
  """One block of tokens."""
  inputs, results = Inputs(*refs[:5]), Results(*refs[5:9])
  scratch = Scratch(*refs[9:])
  steps = pl.num_programs(1)
  step = pl.program_id(1)
  left = tokens - (pl.program_id(0) * steps + step) * plan.block

  @pl.when(step == 0)
  def _():
    results.counts[...] = jnp.zeros_like(results.counts)

  if plan.count == 'log_edges':
    scratch.count[...] = jnp.zeros_like(scratch.count)

  def tile(n, _):
    at = pl.ds(pl.multiple_of(n * TILE, TILE), TILE)
    margin_bound_row = _select(inputs, results, scratch, (plan, at))
    lane = lax.broadcasted_iota(jnp.int32, (1, TILE), 1)
    counted = (inputs.mask[:, at] > 0) & (n * TILE + lane < left)
    finite = results.rows[1:2, at] > 0
    level_row = jnp.where(counted & finite, margin_bound_row, jnp.inf)
    level_ts = jnp.broadcast_to(level_row, (LANES, TILE)).T
    if plan.count == 'log_edges':
      _count_bins(level_ts, inputs, scratch, plan)
    elif plan.count == 'uniform':
      _place(level_ts, inputs, scratch, (plan, at))
    return 0

  lax.fori_loop(0, plan.block // TILE, tile, 0)
  if plan.count == 'log_edges':
    _unpack(results, scratch, plan)
  elif plan.count == 'uniform':
    _multiply(results, scratch, plan)


def _plane(n: int) -> slice:
  return slice(n * LANES, (n + 1) * LANES)


def _select(inputs, results, scratch, static) -> jax.Array:
  """Writes what was selected, returns the cutoffs [1, 128]."""
  plan, at = static
  finite_t1 = _prepare(inputs, scratch, static)
  lane_ts = lax.broadcasted_iota(jnp.int32, (TILE, LANES), 1)
  if plan.planes == 1:
    values_ts, experts_ts = scratch.biased[...], lane_ts
  else:
    values_ts, experts_ts = _candidates(scratch, lane_ts, plan)
  values_jt, experts_jt = _rounds(
    values_ts.T, experts_ts.astype(jnp.float32).T, plan
  )
  chosen_ts = _lookup(scratch.logits, _slots_to_lanes(experts_jt), plan)
  results.indices[:, at] = experts_jt.astype(jnp.int32)
  results.chosen[:, at] = chosen_ts.T[: plan.slots]
  cutoff_row = values_jt[plan.top_k : plan.top_k + 1]
  if plan.cutoff == 'midpoint':
    cutoff_row = (values_jt[plan.top_k - 1 : plan.top_k] + cutoff_row) / 2
  finite_ts = jnp.broadcast_to(finite_t1.astype(jnp.float32), (TILE, LANES))
  results.rows[0:1, at] = cutoff_row
  results.rows[1:2, at] = finite_ts.T[:1]
  return cutoff_row


def _prepare(inputs, scratch, static) -> jax.Array:
  """Logits, scores and biased scores of the tile; finite rows [128, 1]."""
  plan, at = static
  lane_ts = lax.broadcasted_iota(jnp.int32, (TILE, LANES), 1)
  real = lambda n: lane_ts + n * LANES < plan.experts
  bad_ts = jnp.zeros((TILE, LANES), jnp.float32)
  for n in range(plan.planes):
    logits_ts = inputs.logits[at, _plane(n)].astype(jnp.float32)
    finite_ts = jnp.abs(logits_ts) < jnp.inf
    if (n + 1) * LANES > plan.experts:
      finite_ts |= ~real(n)
    bad_ts = jnp.where(finite_ts, bad_ts, 1.0)
  finite_t1 = jnp.max(bad_ts, 1, keepdims=True) == 0
  for n in range(plan.planes):
    logits_ts = inputs.logits[at, _plane(n)].astype(jnp.float32)
    logits_ts = jnp.where(finite_t1, logits_ts, 0.0)
    scores_ts = logits_ts
    if plan.space == 'sigmoid':
      scores_ts = jax.nn.sigmoid(logits_ts)
    biased_ts = scores_ts + inputs.bias[:, _plane(n)]
    if (n + 1) * LANES > plan.experts:
      biased_ts = jnp.where(real(n), biased_ts, -jnp.inf)
    scratch.logits[:, _plane(n)] = logits_ts
    scratch.scores[:, _plane(n)] = scores_ts
    scratch.biased[:, _plane(n)] = biased_ts
  return finite_t1


def _candidates(scratch, lane_ts, plan: Plan) -> tuple[jax.Array, jax.Array]:
  """Biased scores and experts of the members of the best groups."""
  best_ts = scratch.biased[:, _plane(0)]
  plane_ts = jnp.zeros((TILE, LANES), jnp.float32)
  for n in range(1, plan.planes):
    biased_ts = scratch.biased[:, _plane(n)]
    plane_ts = jnp.where(biased_ts > best_ts, float(n), plane_ts)
    best_ts = jnp.maximum(best_ts, biased_ts)
  experts_ts = plane_ts * LANES + lane_ts.astype(jnp.float32)
  _, experts_jt = _rounds(best_ts.T, experts_ts.T, plan)
  groups_ts = _slots_to_lanes(experts_jt) & (LANES - 1)
  count = plan.top_k + 1
  groups_ts = _gather(groups_ts, lane_ts % count, 1)
  experts_ts = lane_ts // count * LANES + groups_ts
  values_ts = _lookup(scratch.biased, experts_ts, plan)
  return (
    jnp.where(lane_ts < count * plan.planes, values_ts, -jnp.inf),
    experts_ts,
  )


def _rounds(values_gt, experts_gt, plan: Plan) -> tuple[jax.Array, jax.Array]:
  """The top_k + 1 best of each column, best first, ties by lower expert."""
  values, experts = [], []
  for _ in range(plan.top_k + 1):
    best_row = jnp.max(values_gt, 0, keepdims=True)
    expert_row = jnp.min(
      jnp.where(values_gt == best_row, experts_gt, jnp.inf), 0, keepdims=True
    )
    values_gt = jnp.where(experts_gt == expert_row, -jnp.inf, values_gt)
    values.append(best_row)
    experts.append(expert_row)
  fill = [jnp.zeros_like(values[0])] * (plan.slots - plan.top_k - 1)
  return jnp.concatenate(values + fill), jnp.concatenate(experts + fill)


def _slots_to_lanes(x_jt) -> jax.Array:
  """[slots, 128] numbers to int32 [128 tokens, 128], zero beyond the slots."""
  pad = jnp.zeros((LANES - x_jt.shape[0], TILE), jnp.float32)
  return jnp.concatenate([x_jt, pad]).T.astype(jnp.int32)


def _lookup(ref, experts_ts, plan: Plan) -> jax.Array:
  """ref[t, experts[t, s]] of the planes in `ref`."""
  lane_ts = experts_ts & (LANES - 1)
  out_ts = _gather(ref[:, _plane(0)], lane_ts, 1)
  for n in range(1, plan.planes):
    there_ts = _gather(ref[:, _plane(n)], lane_ts, 1)
    out_ts = jnp.where(experts_ts >= n * LANES, there_ts, out_ts)
  return out_ts


def _count_bins(level_ts, inputs, scratch, plan: Plan):
  """Adds the tile's bins to the byte counters, one plane after another."""
  scratch.level[...] = level_ts

  def plane(n, _):
    at = n * LANES
    at = pl.ds(at if plan.unroll else pl.multiple_of(at, LANES), LANES)
    tables = [
      inputs.edges[i : i + SUBLANES, at]
      for i in range(0, inputs.edges.shape[0], SUBLANES)
    ]
    sums, beyond = [0] * plan.words, 0
    for first in range(0, TILE, _HALF):
      words = [0] * plan.words
      for row in range(first, first + _HALF, SUBLANES):
        rows = pl.ds(row, SUBLANES)
        margin_st = scratch.level[rows, :] - scratch.scores[rows, at]
        beyond += jnp.where(margin_st <= tables[-1][1:2], 0, 1)
        own = _nibbles(margin_st, tables, plan)
        words = [x + y for x, y in zip(words, own)]
      for w in range(plan.words // 2):
        sums[2 * w] += words[w] & _EVEN
        sums[2 * w + 1] += (words[w] >> 4) & _EVEN
    for w in range(plan.words):
      scratch.count[w, :, at] += sums[w]
    scratch.count[plan.words, :, at] += beyond
    return 0

  lax.fori_loop(0, plan.planes, plane, 0, unroll=plan.unroll)


def _nibbles(margin_st, tables, plan: Plan) -> list[jax.Array]:
  """One in the nibble of the margin's leaf, eight leaves a word."""
  tables, ends = tables[:-1], tables[-1]
  above = margin_st > ends[:1]
  own = jnp.where(above, 1, 0)
  late = []
  for level in range(1, plan.levels):
    count = 1 << max(level - _TABLE_BITS, 0)
    edges = [_gather(table, own, 0) for table in tables[:count]]
    tables = tables[count:]
    for bit in late:
      edges = [jnp.where(bit, y, x) for x, y in zip(edges[::2], edges[1::2])]
    above = margin_st > edges[0]
    if level < _TABLE_BITS:
      own += jnp.where(above, 1 << level, 0)
    else:
      late.append(above)
  words = [jnp.left_shift(1, 4 * own)]
  for bit in late:
    words = [jnp.where(bit, 0, x) for x in words] + [
      jnp.where(bit, x, 0) for x in words
    ]
  return words


def _gather(x, index, axis: int) -> jax.Array:
  """x[index, s] or x[t, index]; the index is in bounds and not negative.

  `take_along_axis` would spend three operations on negative indices.
  """
  numbers = lax.GatherDimensionNumbers(
    offset_dims=(),
    collapsed_slice_dims=(axis,),
    start_index_map=(axis,),
    operand_batching_dims=(1 - axis,),
    start_indices_batching_dims=(1 - axis,),
  )
  mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
  return lax.gather(x, index[..., None], numbers, (1, 1), mode=mode)


def _unpack(results, scratch, plan: Plan):
  """Adds the byte counters to the counts, and the margins beyond all edges."""
  for leaf in range(plan.edges):
    word, nibble = divmod(_reverse(leaf, plan.levels), _NIBBLES)
    count = scratch.count[2 * word + nibble % 2] >> (8 * (nibble // 2))
    results.counts[0, leaf] += count & 255
  results.counts[0, plan.edges] += scratch.count[plan.words]


def _reverse(number: int, bits: int) -> int:
  """The number with its bits in the opposite order."""
  return sum((number >> i & 1) << (bits - 1 - i) for i in range(bits))


def table_rows(plan: Plan) -> list[int]:
  """Which edge each row of `Inputs.edges` holds.

  Tables of eight rows, level by level from the second; a row's number is made
  of the outcomes of the compares before it, the first in the lowest bit. Then
  the edge of the first level and the last of all.
  """
  rows = []
  for level in range(1, plan.levels):
    below = plan.levels - level
    own = [
      (_reverse(n, level) << below) + (1 << (below - 1)) - 1
      for n in range(1 << level)
    ]
    rows += own + [0] * (-len(own) % SUBLANES)
  first, last = (1 << (plan.levels - 1)) - 1, (1 << plan.levels) - 1
  return rows + [first, last] + [0] * (SUBLANES - 2)


def _place(level_ts, inputs, scratch, static):
  """The bins of the tile's margins, experts on sublanes; -1 is uncounted."""
  plan, at = static
  for n in range(plan.planes):
    margin_ts = level_ts - scratch.scores[:, _plane(n)]
    position_ts = (margin_ts - inputs.scale[0]) * inputs.scale[1]
    bin_ts = jnp.clip(jnp.floor(position_ts), 0, plan.num_bins - 1)
    bin_ts = jnp.where(margin_ts < jnp.inf, bin_ts, -1.0)
    scratch.count[_plane(n), at] = bin_ts.T


def _multiply(results, scratch, plan: Plan):
  """Histograms of the block's bins, eight experts at a time."""
  digit = lax.broadcasted_iota(jnp.int32, (DIGIT, plan.block), 0)
  digit = digit.astype(jnp.float32)
  lane = lax.broadcasted_iota(jnp.int32, (DIGIT, LANES), 1) // DIGIT

  def one_hot(rows):
    hot = [jnp.where(row == digit, 1.0, 0.0) for row in rows]
    return jnp.concatenate(hot).astype(jnp.bfloat16)

  def eight(n, _):
    rows = pl.ds(pl.multiple_of(n * SUBLANES, SUBLANES), SUBLANES)
    bins_et = scratch.count[rows, :]
    high_et = jnp.floor(bins_et * (1 / DIGIT))
    low_et = bins_et - DIGIT * high_et
    for half in range(SUBLANES // SIDE):
      pick = lambda x, half=half: [
        x[e : e + 1] for e in range(half * SIDE, (half + 1) * SIDE)
      ]
      both = lax.dot_general(
        one_hot(pick(high_et)),
        one_hot(pick(low_et)),
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
      )
      own = both[:DIGIT]
      for e in range(1, SIDE):
        own = jnp.where(lane == e, both[e * DIGIT : (e + 1) * DIGIT], own)
      results.counts[0, n * (SUBLANES // SIDE) + half] += own.astype(jnp.int32)
    return 0

  lax.fori_loop(0, plan.width // SUBLANES, eight, 0)
