"""The best experts of every token on Hopper, a warp a token.

Legend: t token, e expert, j slot.

Each lane holds the scores of every 32nd group of `width` experts in registers.
The (top_k + 1)-th best of the 32 lanes' maxima is no better than the
(top_k + 1)-th best expert, since that many lanes have an expert at least as
good. Few experts reach it (24 of 896 on average for independent scores and
top_k = 16): they fit one a lane, and each lane counts how many of them beat its
own. If they do not fit, rounds of taking the best expert replace all of this.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir

from pallas_kernels.kda import mosaic_gpu_warp as warp
from pallas_kernels.kda.mosaic_gpu_warp import Real, Word
from pallas_kernels.quantile_router import mosaic_gpu_warp as lane_code

LANES = 32
_PAIR = 8  # bytes of a candidate: its score and its expert
_NONE = 1 << 20  # no expert
_CHAINS = 4


class Plan(NamedTuple):
  """Static choices; `rows` is how many tokens a warp takes in turn."""

  tokens: int
  experts: int
  top_k: int
  cutoff: str
  space: str
  dtype: str
  rows: int = 1
  warpgroups: int = 1

  @property
  def warps(self) -> int:
    return 4 * self.warpgroups

  @property
  def width(self) -> int:
    """Neighbouring experts of a lane; loads of that many stay aligned."""
    fits = (w for w in (4, 2) if self.experts % w == 0)
    return next((w for w in fits if self.experts >= LANES * w), 1)

  @property
  def stripe(self) -> int:
    """Experts that a warp loads at once."""
    return LANES * self.width

  @property
  def stripes(self) -> int:
    return -(-self.experts // self.stripe)

  @property
  def held(self) -> int:
    """Scores of a lane."""
    return self.stripes * self.width

  @property
  def item(self) -> int:
    return jnp.dtype(self.dtype).itemsize


class Row(NamedTuple):
  """What a warp works on: its token, lane and own shared memory."""

  token: Word
  lane: Word
  pairs: Word


def outputs(plan: Plan) -> dict[str, tuple[tuple[int, ...], type]]:
  """Shapes and dtypes; `bound` is the cutoff, NaN in rows not counted."""
  tokens = plan.tokens
  return {
    'indices': ((tokens, plan.top_k), jnp.int32),
    'chosen': ((tokens, plan.top_k), jnp.float32),
    'cutoff': ((tokens,), jnp.float32),
    'bound': ((tokens,), jnp.float32),
    'finite': ((tokens,), jnp.int32),
  }


def select(logits, bias_e, mask_t, plan: Plan):
  """Runs the kernel.

  Args:
    logits: [T, E] float32 or bfloat16.
    bias_e: float32 [E].
    mask_t: int32 [T], 0 for rows that do not count.
    plan: see `Plan`.

  Returns:
    The arrays of `outputs`, by name.
  """
  written = {
    name: jax.ShapeDtypeStruct(shape, dtype)
    for name, (shape, dtype) in outputs(plan).items()
  }
  names = ('logits', 'bias', 'mask', *written)
  blocks = -(-plan.tokens // (plan.warps * plan.rows))
  kernel = plgpu.kernel(
    lambda *refs: _body(plan, names, *refs),
    out_type=tuple(written.values()),
    grid=(blocks,),
    grid_names=('block',),
    num_threads=plan.warpgroups,
    thread_name='warpgroup',
    kernel_name='quantile_router_select',
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane,
      reduction_scratch_bytes=0,
      unsafe_no_auto_barriers=True,
    ),
    scratch_types=[plgpu.SMEM((plan.warps, LANES, 2), jnp.float32)],
  )
  return dict(zip(written, kernel(logits, bias_e, mask_t)))


def _body(plan: Plan, names, *refs):
  plain = plgpu.RefType()

  @plgpu.inline_mgpu(arg_types=(plain,) * len(refs))
  def emit(ctx, *refs):
    del ctx
    *arrays, pairs = refs
    pointers = {n: warp.global_address(r) for n, r in zip(names, arrays)}
    thread = warp.bit_and(utils.thread_idx(), 127)
    index, lane = utils.warp_idx(), warp.bit_and(thread, 31)
    shared = warp.shared_address(pairs)
    own = warp.add(shared, warp.times(index, _PAIR * LANES))
    first = warp.times(lane_code.block(), plan.warps * plan.rows)
    first = warp.add(first, index)

    def one(i):
      token = warp.add(first, warp.times(i, plan.warps))
      inside = warp.compare(token, 'slt', plan.tokens)
      row = Row(token, lane, own)
      warp.only_if(inside, lambda: _row(plan, pointers, row))

    warp.repeat(plan.rows, one)

  emit(*refs)


def _row(plan: Plan, pointers, row: Row):
  """Selects and writes one token."""
  logits = _load(plan, pointers['logits'], row)
  magnitude = lane_code.magnitude(logits)
  below = lambda x: lane_code.less(magnitude, x)
  finite = lane_code.all_lanes(below(float('inf')))
  scores = _scores(
    plan, logits, lane_code.all_lanes(below(lane_code.SMALL)), finite
  )
  biased = _add_bias(plan, pointers['bias'], scores, row.lane)
  _write(plan, pointers, row, (*_ranked(plan, biased, row), finite))


def _offset(
  plan: Plan, stripe: int, lane: Word
) -> tuple[Word, ir.Value | None]:
  """First expert of a lane in a stripe, and whether it exists if not always."""
  expert = warp.add(warp.times(lane, plan.width), stripe * plan.stripe)
  if (stripe + 1) * plan.stripe <= plan.experts:
    return expert, None
  exists = warp.compare(expert, 'slt', plan.experts)
  return warp.where(exists, expert, warp.word(0)), exists


def _load(plan: Plan, base: ir.Value, row: Row) -> list[Real]:
  """Logits of a lane; experts beyond the last repeat others."""
  start = lane_code.row_address(base, row.token, plan.experts * plan.item)
  logits = []
  for stripe in range(plan.stripes):
    expert, _ = _offset(plan, stripe, row.lane)
    address = warp.advance(start, warp.times(expert, plan.item))
    logits += lane_code.load_bytes(address, plan.width, plan.dtype)
  return logits


def _scores(plan: Plan, logits, small, finite) -> list[Real]:
  kinds = [Real] * plan.held

  def careful():
    kept = [warp.where(finite, x, 0.0) for x in logits]
    if plan.space == 'logit':
      return kept
    return [lane_code.sigmoid(x) for x in kept]

  def plain():
    if plan.space == 'logit':
      return logits
    return [lane_code.sigmoid(x, small=True) for x in logits]

  return lane_code.choose(small, plain, careful, kinds)


def _add_bias(plan: Plan, base: ir.Value, scores, lane: Word) -> list[Real]:
  """Biased scores; NaN for experts beyond the last."""
  biased = []
  for stripe in range(plan.stripes):
    expert, exists = _offset(plan, stripe, lane)
    address = warp.advance(base, warp.times(expert, 4))
    bias = warp.load_global(address, 0, plan.width)
    at = stripe * plan.width
    sums = [s + b for s, b in zip(scores[at : at + plan.width], bias)]
    if exists is not None:
      sums = [warp.where(exists, x, float('nan')) for x in sums]
    biased += sums
  return biased


def _ranked(plan: Plan, biased, row: Row) -> tuple[Real, Word, Word]:
  """A candidate of each lane: score, expert and rank."""
  best = lane_code.tree(lane_code.maximum, [Real(-float('inf')), *biased])
  level = lane_code.from_lane(
    _sorted_lanes(best, row.lane), warp.word(plan.top_k)
  )
  # Several counters, since each is a chain of dependent additions.
  counts = [_count_from(level, biased[i::_CHAINS]) for i in range(_CHAINS)]
  count = lane_code.tree(warp.add, counts)
  before = lane_code.running_sum(count)
  total = lane_code.word_from_lane(before, LANES - 1)
  starts = [lane_code.difference(before, count)]
  for count in counts[:-1]:
    starts.append(warp.add(starts[-1], count))
  return tuple(
    lane_code.choose(
      warp.compare(total, 'sle', LANES),
      lambda: _rank_candidates(plan, biased, row, (level, starts, total)),
      lambda: _take_best(plan, biased, row.lane),
      (Real, Word, Word),
    )
  )


def _count_from(level: Real, values) -> Word:
  """How many values reach the level."""
  count = warp.word(0)
  for x in values:
    count = lane_code.count_if(count, lane_code.at_least(x, level))
  return count


def _sorted_lanes(x: Real, lane: Word) -> Real:
  """Values of all lanes in descending order, a bitonic network.

  Lanes that take the smaller of a pair hold negated numbers, so that every
  lane takes the larger of its own and its partner's negated one.
  """
  sign = warp.word(0)
  size = 2
  while size <= LANES:
    distance = size // 2
    while distance:
      wanted = warp.shift_left(lane, 31 - distance.bit_length() + 1)
      if size < LANES:
        turned = warp.shift_left(lane, 31 - size.bit_length() + 1)
        wanted = warp.xor(wanted, turned)
      x = lane_code.flip_sign(x, warp.bit_and(warp.xor(sign, wanted), -(2**31)))
      x = lane_code.maximum(x, -warp.exchange(x, distance))
      sign = wanted
      distance //= 2
    size *= 2
  return lane_code.flip_sign(x, warp.bit_and(sign, -(2**31)))


def _rank_candidates(plan: Plan, biased, row: Row, found):
  """Ranks of the scores that reach the level, one a lane."""
  level, starts, total = found
  lane_code.wait_for_warp()
  own = warp.add(row.pairs, warp.times(row.lane, _PAIR))
  present = warp.compare(row.lane, 'slt', total)
  absent = warp.compare(row.lane, 'sge', total)
  # Comparisons with places that nobody takes must fail.
  warp.store(own, 0, [Real(float('nan'))], predicate=absent)
  free = [warp.add(row.pairs, warp.times(n, _PAIR)) for n in starts]
  for i, x in enumerate(biased):
    pair = x, _expert(plan, i, row.lane)
    chain = i % _CHAINS
    free[chain] = lane_code.append_if_at_least(free[chain], pair, level)
  lane_code.wait_for_warp()
  bits, expert = warp.load(own, 0, 2)
  score = lane_code.as_real(bits)
  rank = _rank(row, score)
  rank = warp.where(present, rank, warp.word(0))
  # Ranks are 0, 1, ... total - 1 but for equal scores, which share the lowest.
  twice = warp.shift_left(lane_code.warp_sum(rank), 1)
  distinct = warp.product(total, warp.add(total, -1))
  (rank,) = lane_code.choose(
    warp.compare(distinct, 'eq', twice),
    lambda: [rank],
    lambda: [_settle_ties(row, score, (rank, expert))],
    [Word],
  )
  return score, expert, warp.where(present, rank, warp.word(_NONE))


def _rank(row: Row, score: Real) -> Word:
  """How many candidates are better than this lane's."""
  ranks = [warp.word(0)] * 4
  for i in range(0, LANES, 2):
    one, _, other, _ = warp.load(row.pairs, i * _PAIR, 4)
    for n, x in ((i % 4, one), (i % 4 + 1, other)):
      x = lane_code.as_real(x)
      ranks[n] = lane_code.count_if_greater(ranks[n], x, score)
  return lane_code.tree(warp.add, ranks)


def _settle_ties(row: Row, score: Real, own) -> Word:
  """The rank with equal scores in the order of their experts."""
  rank, expert = own
  for i in range(LANES):
    other, index = warp.load(row.pairs, i * _PAIR, 2)
    same = lane_code.equal(lane_code.as_real(other), score)
    lower = warp.compare(index, 'slt', expert)
    rank = lane_code.count_if(rank, warp.both(same, lower))
  return rank


def _expert(plan: Plan, held: int, lane: Word) -> Word:
  stripe, at = divmod(held, plan.width)
  return warp.add(warp.times(lane, plan.width), stripe * plan.stripe + at)


def _take_best(plan: Plan, biased, lane: Word):
  """Lane i gets the expert of rank i: rounds over all scores."""

  def one(i, state):
    *left, score, expert, rank = state
    best, where = Real(-float('inf')), warp.word(_NONE)
    for n, x in enumerate(left):
      better = lane_code.greater(x, best)
      best = warp.where(better, x, best)
      where = warp.where(better, _expert(plan, n, lane), where)
    top = lane_code.warp_maximum(best)
    own = lane_code.equal(best, top)
    taken = lane_code.warp_least(warp.where(own, where, warp.word(_NONE)))
    left = [
      warp.where(
        warp.compare(_expert(plan, n, lane), 'eq', taken),
        Real(float('nan')),
        x,
      )
      for n, x in enumerate(left)
    ]
    mine = warp.compare(lane, 'eq', i)
    score = warp.where(mine, top, score)
    expert = warp.where(mine, taken, expert)
    return [*left, score, expert, warp.where(mine, lane, rank)]

  start = [*biased, Real(0.0), warp.word(0), warp.word(_NONE)]
  return lane_code.iterate(plan.top_k + 1, start, one)[-3:]


def _write(plan: Plan, pointers, row: Row, selected):
  """Lanes of the first ranks write what they hold."""
  score, expert, rank, finite = selected
  writes = warp.compare(rank, 'slt', plan.top_k)
  slot = warp.add(warp.times(row.token, plan.top_k), rank)
  expert_or_zero = warp.where(writes, expert, warp.word(0))
  start = lane_code.row_address(
    pointers['logits'], row.token, plan.experts * plan.item
  )
  (logit,) = lane_code.load_bytes(
    warp.advance(start, warp.times(expert_or_zero, plan.item)), 1, plan.dtype
  )
  logit = warp.where(finite, logit, 0.0)
  to = lambda name, n: lane_code.row_address(pointers[name], n, 4)
  slot = warp.where(writes, slot, warp.word(0))
  warp.store_global(to('indices', slot), 0, [expert], predicate=writes)
  warp.store_global(to('chosen', slot), 0, [logit], predicate=writes)
  last = warp.compare(rank, 'eq', plan.top_k)
  level = score
  if plan.cutoff == 'midpoint':
    before = lane_code.lane_of(warp.compare(rank, 'eq', plan.top_k - 1))
    level = (lane_code.from_lane(score, before) + score) * 0.5
  (mask,) = warp.load_global_words(to('mask', row.token), 0, 1)
  counted = warp.both(finite, warp.compare(mask, 'ne', 0))
  bound = warp.where(counted, level, float('nan'))
  flag = warp.where(finite, warp.word(1), warp.word(0))
  for name, x in (('cutoff', level), ('bound', bound), ('finite', flag)):
    warp.store_global(to(name, row.token), 0, [x], predicate=last)
