"""The best experts of every token on Hopper, a warp a token.

Legend: t token, e expert, j slot.

Each lane holds the scores of every 32nd group of `width` experts in registers.
The (top_k + 1)-th best of the 32 lanes' maxima is no better than the
(top_k + 1)-th best expert, since that many lanes have an expert at least as
good. Few experts reach it (24 of 896 on average for independent scores and
top_k = 16): they fit one a lane, and each lane counts how many of them beat its
own. If they do not fit, rounds of taking the best expert replace all of this.

Finding who may be among the best needs no exact scores: a sigmoid of half the
instructions, whose error the level allows for, does. Scores of the few that are
left are computed exactly.
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
WARPS = 4  # of a thread block
_LIST = 4 * LANES  # bytes of a list of candidates
_NONE = 1 << 20  # no expert
_CHAINS = 4
_AT_ONCE = 4  # stripes whose biases are in flight
# Rough and exact scores differ by less than 1e-6, and their sums with a bias by
# less than one unit in the last place more.
_SLACK, _RELATIVE_SLACK = 4e-6, 2.0**-20


class Plan(NamedTuple):
  """Static choices."""

  tokens: int
  experts: int
  top_k: int
  cutoff: str
  space: str
  dtype: str

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
  """What a warp works on: its token, lane and lists in shared memory.

  The first list is of experts, the second of their scores.
  """

  token: Word
  lane: Word
  lists: Word


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
  kernel = plgpu.kernel(
    lambda *refs: _body(plan, names, *refs),
    out_type=tuple(written.values()),
    grid=(-(-plan.tokens // WARPS),),
    grid_names=('block',),
    kernel_name='quantile_router_select',
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane,
      reduction_scratch_bytes=0,
      unsafe_no_auto_barriers=True,
    ),
    scratch_types=[plgpu.SMEM((WARPS, LANES, 2), jnp.float32)],
  )
  return dict(zip(written, kernel(logits, bias_e, mask_t)))


def _body(plan: Plan, names, *refs):
  plain = plgpu.RefType()

  @plgpu.inline_mgpu(arg_types=(plain,) * len(refs))
  def emit(ctx, *refs):
    del ctx
    *arrays, lists = refs
    pointers = {n: warp.global_address(r) for n, r in zip(names, arrays)}
    index, lane = utils.warp_idx(), warp.bit_and(utils.thread_idx(), LANES - 1)
    shared = warp.shared_address(lists)
    own = warp.add(shared, warp.times(index, 2 * _LIST))
    token = warp.add(warp.times(lane_code.block(), WARPS), index)
    inside = warp.compare(token, 'slt', plan.tokens)
    row = Row(token, lane, own)
    warp.only_if(inside, lambda: _row(plan, pointers, row))

  emit(*refs)


def _row(plan: Plan, pointers, row: Row):
  """Selects and writes one token."""
  (mask,) = warp.load_global_words(_word_at(pointers['mask'], row.token), 0, 1)
  start = _first_logit(plan, pointers, row)
  logits = []
  for stripe in range(plan.stripes):
    logits += _load(plan, start, stripe, row.lane)
  finite = lane_code.all_lanes(lane_code.all_finite(logits))
  scores = _rough_scores(plan, logits, finite)
  biased = []
  for stripe in range(plan.stripes):
    if stripe % _AT_ONCE == 0:
      # Loads do not pass this, which leaves registers to other warps.
      lane_code.wait_for_warp()
    own = scores[stripe * plan.width : (stripe + 1) * plan.width]
    place = stripe, row.lane
    biased += _add_bias(plan, pointers['bias'], own, place)
  selected = _ranked(plan, pointers, row, (biased, finite))
  counts = warp.both(finite, warp.compare(mask, 'ne', 0))
  _write(plan, pointers, row, (selected, finite, counts))


def _first_logit(plan: Plan, pointers, row: Row) -> ir.Value:
  size = plan.experts * plan.item
  return lane_code.row_address(pointers['logits'], row.token, size)


def _word_at(base: ir.Value, n: Word) -> ir.Value:
  """Address of a word of global memory."""
  return lane_code.row_address(base, n, 4)


def _offset(
  plan: Plan, stripe: int, lane: Word
) -> tuple[Word, ir.Value | None]:
  """First expert of a lane in a stripe, and whether it exists if not always."""
  expert = warp.add(warp.times(lane, plan.width), stripe * plan.stripe)
  if (stripe + 1) * plan.stripe <= plan.experts:
    return expert, None
  exists = warp.compare(expert, 'slt', plan.experts)
  return warp.where(exists, expert, warp.word(0)), exists


def _load(plan: Plan, start: ir.Value, stripe: int, lane: Word) -> list[Real]:
  """Logits of a lane; experts beyond the last repeat others."""
  expert, _ = _offset(plan, stripe, lane)
  address = warp.advance(start, warp.times(expert, plan.item))
  return lane_code.load_bytes(address, plan.width, plan.dtype)


def _rough_scores(plan: Plan, logits, finite) -> list[Real]:
  """Scores, those of a sigmoid only nearly; zeros if not finite."""
  rough = lambda x: x if plan.space == 'logit' else lane_code.rough_sigmoid(x)
  # A branch, so that loads of the bias wait and leave registers for others.
  return lane_code.choose(
    finite,
    lambda: [rough(x) for x in logits],
    lambda: [Real(0.0)] * plan.held,
    [Real] * plan.held,
  )


def _score(plan: Plan, logit: Real) -> Real:
  return logit if plan.space == 'logit' else lane_code.sigmoid(logit)


def _add_bias(plan: Plan, base: ir.Value, scores, place) -> list[Real]:
  """Biased scores of a stripe; NaN for experts beyond the last."""
  stripe, lane = place
  expert, exists = _offset(plan, stripe, lane)
  address = warp.advance(base, warp.times(expert, 4))
  bias = warp.load_global(address, 0, plan.width)
  sums = [s + b for s, b in zip(scores, bias)]
  if exists is None:
    return sums
  return [warp.where(exists, x, float('nan')) for x in sums]


class Candidate(NamedTuple):
  """What a lane offers; `rank` is among all candidates, best first."""

  biased: Real
  expert: Word
  rank: Word
  logit: Real


def _ranked(plan: Plan, pointers, row: Row, scores) -> Candidate:
  """A candidate of each lane, the top_k + 1 best experts among them."""
  biased, finite = scores
  best = lane_code.tree(lane_code.maximum, [Real(-float('inf')), *biased])
  best = _sorted_lanes(best, row.lane)
  level = lane_code.from_lane(best, warp.word(plan.top_k))
  if plan.space == 'sigmoid':
    size = lane_code.absolute(level)
    level = level - warp.fma(size, _RELATIVE_SLACK, _SLACK)
  found = _who_reaches(level, biased)
  count = lane_code.tree(warp.add, [lane_code.bits_set(w) for w in found])
  last = lane_code.running_sum(count)
  total = lane_code.word_from_lane(last, LANES - 1)
  start = lane_code.difference(last, count)
  return Candidate(
    *lane_code.choose(
      warp.both(finite, warp.compare(total, 'sle', LANES)),
      lambda: _rank_candidates(plan, pointers, row, (found, start, total)),
      lambda: _take_best(plan, pointers, row, finite),
      (Real, Word, Word, Real),
    )
  )


def _who_reaches(level: Real, values) -> list[Word]:
  """Bits, of as many words as it takes, of the values that reach the level."""
  words = []
  for first in range(0, len(values), 32):
    # Several words, since each is a chain of dependent operations.
    parts = [warp.word(0)] * _CHAINS
    for bit, x in enumerate(values[first : first + 32]):
      part = bit % _CHAINS
      parts[part] = lane_code.set_bit_if_at_least(parts[part], bit, (x, level))
    words.append(lane_code.tree(warp.union, parts))
  return words


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


def _rank_candidates(plan: Plan, pointers, row: Row, found) -> Candidate:
  """Exact scores and ranks of those that may be among the best, one a lane."""
  words, start, total = found
  lane_code.wait_for_warp()
  free = warp.add(row.lists, warp.shift_left(start, 2))
  for n, word in enumerate(words):

    def append(bit, free, first=32 * n):
      expert = _expert(plan, warp.add(bit, first), row.lane)
      warp.store(free, 0, [expert])
      return warp.add(free, 4)

    free = lane_code.each_bit(word, free, append)
  lane_code.wait_for_warp()
  present = warp.compare(row.lane, 'slt', total)
  own = warp.add(row.lists, warp.shift_left(row.lane, 2))
  (expert,) = warp.load(own, 0, 1)
  expert = warp.where(present, expert, warp.word(0))
  logit = _logit(plan, pointers, row, expert)
  (bias,) = warp.load_global(_word_at(pointers['bias'], expert), 0, 1)
  biased = warp.where(present, _score(plan, logit) + bias, float('nan'))
  # Comparisons with places that nobody takes fail, being with NaN.
  warp.store(own, _LIST, [biased])
  lane_code.wait_for_warp()
  rank = warp.where(present, _rank(row, biased), warp.word(0))
  # Ranks are 0, 1, ... total - 1 but for equal scores, which share the lowest.
  twice = warp.shift_left(lane_code.warp_sum(rank), 1)
  distinct = warp.product(total, warp.add(total, -1))
  (rank,) = lane_code.choose(
    warp.compare(distinct, 'eq', twice),
    lambda: [rank],
    lambda: [_settle_ties(row, biased, (rank, expert))],
    [Word],
  )
  rank = warp.where(present, rank, warp.word(_NONE))
  return Candidate(biased, expert, rank, logit)


def _logit(plan: Plan, pointers, row: Row, expert: Word) -> Real:
  start = _first_logit(plan, pointers, row)
  address = warp.advance(start, warp.times(expert, plan.item))
  return lane_code.load_bytes(address, 1, plan.dtype)[0]


def _rank(row: Row, score: Real) -> Word:
  """How many candidates are better than this lane's."""
  ranks = [warp.word(0)] * _CHAINS
  for i in range(0, LANES, 4):
    for n, x in enumerate(warp.load_real(row.lists, _LIST + 4 * i, 4)):
      ranks[n] = lane_code.count_if_greater(ranks[n], x, score)
  return lane_code.tree(warp.add, ranks)


def _settle_ties(row: Row, score: Real, own) -> Word:
  """The rank with equal scores in the order of their experts."""
  rank, expert = own
  for i in range(0, LANES, 4):
    scores = warp.load_real(row.lists, _LIST + 4 * i, 4)
    experts = warp.load(row.lists, 4 * i, 4)
    for other, index in zip(scores, experts):
      same = lane_code.equal(other, score)
      lower = warp.compare(index, 'slt', expert)
      rank = lane_code.count_if(rank, warp.both(same, lower))
  return rank


def _expert(plan: Plan, held: Word, lane: Word) -> Word:
  """The expert of a lane's score of that number."""
  stripe = warp.shift_left(warp.bit_and(held, -plan.width), 5)
  inner = warp.bit_and(held, plan.width - 1)
  return warp.add(warp.add(stripe, inner), warp.times(lane, plan.width))


def _take_best(plan: Plan, pointers, row: Row, finite) -> Candidate:
  """Lane i gets the expert of rank i: rounds over all scores.

  Tokens whose logits are not all finite are routed as zeros.
  """
  start = _first_logit(plan, pointers, row)
  biased = []
  for stripe in range(plan.stripes):
    lane_code.wait_for_warp()
    logits = _load(plan, start, stripe, row.lane)
    logits = [warp.where(finite, x, 0.0) for x in logits]
    scores = [_score(plan, x) for x in logits]
    place = stripe, row.lane
    biased += _add_bias(plan, pointers['bias'], scores, place)
  first = warp.times(row.lane, plan.width)
  # Experts of the first lane, that is, of this one from its first expert on.
  offsets = [
    n // plan.width * plan.stripe + n % plan.width for n in range(plan.held)
  ]

  def one(i, state):
    *left, score, expert = state
    best, where = Real(-float('inf')), warp.word(_NONE)
    for x, offset in zip(left, offsets):
      better = lane_code.greater(x, best)
      best = warp.where(better, x, best)
      where = warp.where(better, warp.word(offset), where)
    top = lane_code.warp_maximum(best)
    own = warp.where(
      lane_code.equal(best, top), warp.add(first, where), warp.word(_NONE)
    )
    taken = lane_code.warp_least(own)
    inner = lane_code.difference(taken, first)
    left = [
      warp.where(warp.compare(inner, 'eq', offset), Real(float('nan')), x)
      for x, offset in zip(left, offsets)
    ]
    mine = warp.compare(row.lane, 'eq', i)
    score = warp.where(mine, top, score)
    return [*left, score, warp.where(mine, taken, expert)]

  start = [*biased, Real(0.0), warp.word(0)]
  score, expert = lane_code.iterate(plan.top_k + 1, start, one)[-2:]
  logit = warp.where(finite, _logit(plan, pointers, row, expert), 0.0)
  return Candidate(score, expert, row.lane, logit)


def _write(plan: Plan, pointers, row: Row, results):
  """Lanes of the first ranks write what they hold."""
  best, finite, counts = results
  writes = warp.compare(best.rank, 'slt', plan.top_k)
  slot = warp.add(warp.times(row.token, plan.top_k), best.rank)
  slot = warp.where(writes, slot, warp.word(0))
  for name, x in (('indices', best.expert), ('chosen', best.logit)):
    address = _word_at(pointers[name], slot)
    warp.store_global(address, 0, [x], predicate=writes)
  level = best.biased
  if plan.cutoff == 'midpoint':
    before = warp.compare(best.rank, 'eq', plan.top_k - 1)
    before = lane_code.from_lane(best.biased, lane_code.lane_of(before))
    level = (before + best.biased) * 0.5
  bound = warp.where(counts, level, float('nan'))
  flag = warp.where(finite, warp.word(1), warp.word(0))
  last = warp.compare(best.rank, 'eq', plan.top_k)
  for name, x in (('cutoff', level), ('bound', bound), ('finite', flag)):
    address = _word_at(pointers[name], row.token)
    warp.store_global(address, 0, [x], predicate=last)
