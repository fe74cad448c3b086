"""The arithmetic of the Hopper routing kernels, emulated on a CPU.

The kernels are written against the few instructions of two modules. Here these
run on arrays of all lanes in lockstep, with global and shared memory as arrays
of words: everything but timing and races is checked without a GPU. Scores are
logits here, since a sigmoid would round differently on a CPU.
"""

import functools
import types

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import mosaic_gpu_warp as warp
from pallas_kernels.quantile_router import Statistics, xla
from pallas_kernels.quantile_router import mosaic_gpu_count as counting
from pallas_kernels.quantile_router import mosaic_gpu_select as selection
from pallas_kernels.quantile_router import mosaic_gpu_warp as lane_code
from pallas_kernels.quantile_router.statistics import log_edges

np_int, np_real = np.int32, np.float32


class Real:
  """Stands in for `warp.Real`: one float32 number of every lane."""

  def __init__(self, value):
    self.value = np.asarray(value, np_real)

  def _apply(self, operation, other):
    return Real(operation(self.value, plain(other)))

  def __add__(self, other):
    return self._apply(np.add, other)

  def __sub__(self, other):
    return self._apply(np.subtract, other)

  def __mul__(self, other):
    return self._apply(np.multiply, other)

  def __neg__(self):
    return Real(-self.value)


def plain(x):
  return x.value if isinstance(x, Real) else x


def wrapped(x):
  """A word as a signed number; sums of words wrap around."""
  return np.asarray(x, np.int64).astype(np.int32)


def like(x, raw):
  return Real(raw) if isinstance(x, Real) else raw


class Machine:
  """Lanes in lockstep, their memory, and which of them are on."""

  def __init__(self, lanes: int, shared_words: int, arrays):
    self.lanes, self.on = lanes, np.ones(lanes, bool)
    self.shared = np.zeros(shared_words, np_int)
    self.pointers, words = {}, []
    for name, array in arrays.items():
      self.pointers[name] = np.int64(4 * len(words))
      words += list(np.ravel(array).view(np_int))
    self.memory = np.asarray(words, np_int)

  def array(self, name, shape, dtype):
    start = self.pointers[name] // 4
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize // 4
    return self.memory[start : start + size].view(dtype).reshape(shape)

  def wide(self, x):
    return np.broadcast_to(x, (self.lanes,))

  def warps(self, x):
    return self.wide(x).reshape(-1, 32)

  def each(self, x):
    """One value of every warp for all its lanes."""
    return np.repeat(x, 32)

  def load(self, memory, address, offset, count):
    at = (self.wide(address) + offset) // 4
    at = np.where(self.on, at, 0)
    return [memory[at + i].copy() for i in range(count)]

  def store(self, memory, address, values, predicate):
    on = self.on if predicate is None else self.on & self.wide(predicate)
    at = self.wide(address)[on] // 4
    for i, x in enumerate(values):
      raw = plain(x)
      kind = np_real if isinstance(x, Real) else np_int
      bits = np.ascontiguousarray(self.wide(raw).astype(kind)).view(np_int)
      memory[at + i] = bits[on]

  def under(self, condition, body):
    saved, self.on = self.on, self.on & self.wide(condition)
    result = body() if self.on.any() else None
    self.on = saved
    return result


COMPARISONS = dict(eq=np.equal, ne=np.not_equal, slt=np.less, sle=np.less_equal)
COMPARISONS |= dict(sgt=np.greater, sge=np.greater_equal)


def instructions(machine: Machine) -> dict:
  """Replacements of `kda.mosaic_gpu_warp`."""
  m = machine
  reals = lambda words: [Real(w.view(np_real)) for w in words]

  def where(condition, yes, no):
    return like(yes, np.where(condition, plain(yes), plain(no)))

  def exchange(x, distance):
    partner = np.arange(m.lanes) ^ distance
    return Real(m.wide(x.value)[partner])

  def repeat(count, body):
    for i in range(count):
      body(np_int(i))

  return dict(
    Real=Real,
    word=np_int,
    add=lambda a, b: (a + wrapped(b)).astype(np_int),
    times=lambda a, b: (a * np.asarray(b, np_int)).astype(np_int),
    product=lambda a, b: (a * b).astype(np_int),
    shift_left=lambda a, bits: np.left_shift(a, np_int(bits)),
    union=np.bitwise_or,
    bit_and=lambda a, b: np.bitwise_and(a, np_int(b)),
    xor=lambda a, b: np.bitwise_xor(a, b),
    fma=lambda a, b, c: Real(plain(a) * plain(b) + plain(c)),
    compare=lambda a, relation, b: COMPARISONS[relation](a, b),
    both=np.logical_and,
    where=where,
    exchange=exchange,
    repeat=repeat,
    only_if=m.under,
    advance=lambda address, offset: address + np.int64(offset),
    load=lambda a, offset, n: m.load(m.shared, a, offset, n),
    load_real=lambda a, offset, n: reals(m.load(m.shared, a, offset, n)),
    load_global=lambda a, offset, n: reals(m.load(m.memory, a, offset, n)),
    load_global_words=lambda a, offset, n: m.load(m.memory, a, offset, n),
    store=lambda a, offset, values, predicate=None: m.store(
      m.shared, a + offset, values, predicate
    ),
    store_global=lambda a, offset, values, predicate=None: m.store(
      m.memory, a + offset, values, predicate
    ),
  )


def lane_instructions(machine: Machine) -> dict:
  """Replacements of `quantile_router.mosaic_gpu_warp`."""
  m = machine

  def real(operation):
    return lambda *xs: Real(operation(*(x.value for x in xs)))

  def magnitude(a, b):
    return Real(np.maximum(np.abs(a.value), np.abs(b.value)))

  def compares(operation):
    return lambda a, b: operation(plain(a), plain(b))

  def flip(x, sign):
    bits = np.ascontiguousarray(m.wide(x.value)).view(np_int)
    return Real(np.bitwise_xor(bits, sign).view(np_real))

  def lane_of(condition):
    last = 31 - np.argmax(m.warps(condition)[:, ::-1], axis=1)
    return m.each(last)

  def from_lane(x, lane):
    first = np.arange(m.lanes) // 32 * 32
    return like(x, m.wide(plain(x))[first + m.wide(lane)])

  def choose(condition, yes, no, kinds):
    sides = [m.under(c, f) for c, f in ((condition, yes), (~condition, no))]
    if sides[0] is None or sides[1] is None:
      return list(sides[0] or sides[1])
    pick = lambda a, b: like(a, np.where(condition, plain(a), plain(b)))
    return [pick(a, b) for a, b in zip(*sides)]

  def iterate(count, values, body):
    for i in range(count):
      values = body(np_int(i), list(values))
    return list(values)

  def load_bytes(address, count, of):
    assert of == 'float32'
    return [Real(w.view(np_real)) for w in m.load(m.memory, address, 0, count)]

  def add_shared(address, amount):
    on = m.on
    np.add.at(m.shared, m.wide(address)[on] // 4, m.wide(amount)[on])

  def set_bit(word, bit, values):
    reaches = m.wide(values[0].value >= values[1].value)
    return np.where(reaches, word | wrapped(1 << bit), word).astype(np_int)

  def each_bit(word, value, body):
    word, value = m.wide(word).view(np.uint32), m.wide(value)
    while (word[m.on] > 0).any():
      some = word > 0
      bit = np.where(some, np.log2(np.maximum(word, 1)), 0).astype(np_int)
      next_value = m.under(some, functools.partial(body, bit, value))
      value = np.where(some, next_value, value).astype(np_int)
      word = np.where(some, word ^ (np.uint32(1) << bit.astype(np.uint32)), 0)
    return value

  def sigmoid(x):
    with np.errstate(over='ignore'):
      return Real(1 / (1 + np.exp(-x.value)))

  def rough_sigmoid(x):
    noise = np.random.default_rng(0).uniform(-5e-7, 5e-7, m.lanes)
    return Real(sigmoid(x).value + noise.astype(np_real))

  return dict(
    Real=Real,
    maximum=real(np.fmax),
    minimum=real(np.fmin),
    largest_magnitude=magnitude,
    floor_bits=lambda x: (np.floor(x.value) + np_real(2**23)).view(np_int),
    ceiling=real(np.ceil),
    integer=lambda x: x.value.astype(np_int),
    log2_magnitude=real(lambda x: np.log2(np.abs(x))),
    is_within=lambda x, bound: np.abs(x.value) < bound.value,
    negate=np.logical_not,
    set_bit_if_at_least=set_bit,
    each_bit=each_bit,
    bits_set=lambda x: np.bitwise_count(m.wide(x).view(np.uint32)).astype(
      np_int
    ),
    sigmoid=sigmoid,
    rough_sigmoid=rough_sigmoid,
    absolute=real(np.abs),
    at_least=compares(np.greater_equal),
    greater=compares(np.greater),
    less=compares(np.less),
    equal=compares(np.equal),
    either=np.logical_or,
    flip_sign=flip,
    as_real=lambda x: Real(m.wide(x).astype(np_int).view(np_real)),
    difference=lambda a, b: (a - b).astype(np_int),
    count_if=lambda total, c: (total + m.wide(c)).astype(np_int),
    count_if_greater=lambda total, a, b: (
      total + m.wide(a.value > b.value)
    ).astype(np_int),
    warp_sum=lambda x: m.each(m.warps(x).sum(1, dtype=np_int)),
    all_lanes=lambda c: m.each(m.warps(c).all(1)),
    lane_of=lane_of,
    from_lane=from_lane,
    word_from_lane=from_lane,
    running_sum=lambda x: m.warps(x).cumsum(1, dtype=np_int).reshape(-1),
    warp_least=lambda x: m.each(m.warps(x).view(np.uint32).min(1)).view(np_int),
    warp_maximum=lambda x: Real(m.each(m.warps(x.value).max(1))),
    wait_for_warp=lambda: None,
    wait_for_block=lambda: None,
    quotient=lambda a, b: (a // b).astype(np_int),
    remainder=lambda a, b: (a % b).astype(np_int),
    add_shared=add_shared,
    load_bytes=load_bytes,
    row_address=lambda base, row, size: base + np.int64(row) * size,
    choose=choose,
    iterate=iterate,
  )


@pytest.fixture
def patched(monkeypatch):
  def install(machine):
    for module, functions in (
      (warp, instructions(machine)),
      (lane_code, lane_instructions(machine)),
    ):
      for name, function in functions.items():
        monkeypatch.setattr(module, name, function, raising=False)
    for module in (selection, counting):
      monkeypatch.setattr(module, 'Real', Real)
    return machine

  return install


def arguments(tokens, experts, seed=0):
  """Logits with ties and rows that are equal, not finite or of one lane."""
  rng = np.random.default_rng(seed)
  logits = 2 * rng.normal(size=(tokens, experts)).astype(np.float32)
  logits[1:4] = np.round(logits[1:4])
  logits[4] = 0.0
  logits[5, 3] = np.nan
  logits[6, experts - 1] = np.inf
  logits[7, 0] = -np.inf
  logits[8] = -200.0
  # All of the best sit in one lane: its maximum bounds the others from below.
  logits[9] = np.where(np.arange(experts) % 128 < 4, 5, -5) + logits[9] / 100
  bias = 0.1 * rng.normal(size=experts).astype(np.float32)
  bias[: experts // 2] = 0.0
  mask = (np.arange(tokens) % 5 != 2).astype(np.int32)
  return logits, bias, mask


# (tokens, experts, top_k, cutoff, space)
SELECTIONS = {
  'k3': (24, 896, 16, 'kplus1', 'sigmoid'),
  'k3_logit': (24, 896, 16, 'midpoint', 'logit'),
  'one_expert': (12, 200, 1, 'midpoint', 'sigmoid'),
  'odd': (12, 37, 31, 'midpoint', 'sigmoid'),
  'one_score_a_lane': (12, 11, 3, 'kplus1', 'logit'),
  'two_words_of_bits': (12, 1100, 8, 'kplus1', 'sigmoid'),
}


@pytest.mark.parametrize('case', SELECTIONS.values(), ids=SELECTIONS)
def test_selection(case, patched):
  tokens, experts, top_k, cutoff, space = case
  logits, bias, mask = arguments(tokens, experts)
  plan = selection.Plan(tokens, experts, top_k, cutoff, space, 'float32')
  arrays = dict(logits=logits, bias=bias, mask=mask)
  shapes = selection.outputs(plan)
  # Words that nothing wrote would show.
  arrays |= {n: np.full(s, -7, np.int32) for n, (s, _) in shapes.items()}
  lanes = tokens * selection.LANES
  machine = patched(Machine(lanes, 2 * lanes, arrays))
  token, lane = np.divmod(np.arange(lanes, dtype=np.int32), 32)
  row = selection.Row(token, lane, token * 32 * 8)
  with np.errstate(invalid='ignore'):
    selection._row(plan, machine.pointers, row)
  got = types.SimpleNamespace(
    **{n: machine.array(n, s, np.dtype(d)) for n, (s, d) in shapes.items()}
  )

  finite = np.isfinite(logits).all(1)
  kept = np.where(finite[:, None], logits, 0)
  scores = kept
  if space == 'sigmoid':
    with np.errstate(over='ignore'):
      scores = 1 / (1 + np.exp(-kept))
  indices, level, _ = xla.select_and_count(
    jnp.asarray(scores),
    jnp.asarray(bias),
    None,
    top_k=top_k,
    cutoff=cutoff,
    statistics=None,
  )
  np.testing.assert_array_equal(got.indices, indices)
  np.testing.assert_array_equal(got.cutoff, level)
  np.testing.assert_array_equal(got.finite, finite)
  chosen = np.take_along_axis(kept, np.asarray(indices), 1)
  np.testing.assert_array_equal(got.chosen, chosen)
  counted = finite & (mask > 0)
  np.testing.assert_array_equal(got.bound, np.where(counted, level, np.nan))


# (tokens, experts, bins, estimator): experts that divide into vectors or not.
COUNTS = {
  'uniform': (70, 12, 1000, 'uniform'),
  'uniform_odd': (9, 11, 20, 'uniform'),
  'log_edges': (70, 12, 33, 'log_edges'),
  'log_edges_odd': (9, 11, 9, 'log_edges'),
}


@pytest.mark.parametrize('unroll', [1, 2])
@pytest.mark.parametrize('case', COUNTS.values(), ids=COUNTS)
def test_counts(case, unroll, patched):
  tokens, experts, bins, estimator = case
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(tokens, experts)).astype(np.float32)
  bias = 0.1 * rng.normal(size=experts).astype(np.float32)
  valid = np.arange(tokens) % 5 != 2
  stats = Statistics(jnp.float32(-2.2), jnp.float32(1.9), bins, estimator)
  _, level, want = xla.select_and_count(
    jnp.asarray(logits),
    jnp.asarray(bias),
    jnp.asarray(valid),
    top_k=3,
    cutoff='kplus1',
    statistics=stats,
  )
  bound = np.where(valid, level, np.float32(np.nan))
  plan = counting.Plan(
    tokens,
    experts,
    bins,
    estimator,
    'logit',
    'float32',
    warpgroups=1,
    unroll=unroll,
  )
  arrays = dict(logits=logits, bound=bound, bias=bias)
  arrays['parameters'] = np.asarray(counting.parameters(stats, bias))
  arrays['edges'] = np.asarray(log_edges(bias, stats.lo, stats.hi, bins))
  shape = plan.slices, experts, bins
  kind = np.int16 if plan.narrow else np.int32
  assert plan.narrow == (experts % 2 == 0 or bins % 2 == 0)
  # Words that nothing wrote would show.
  arrays['out'] = np.full(shape, -7, kind)
  words = plan.group * plan.expert_bytes // 4 + 1
  machine = patched(Machine(128, words, arrays))
  for block in range(plan.groups * plan.slices):
    slice_, group = divmod(block, plan.groups)
    place = counting.Place(
      np.arange(128, dtype=np.int32),
      np.int32(group * plan.group),
      np.int32(slice_ * plan.rows),
      np.int32(slice_),
      np.int32(0),
      np.int32(4 * plan.group * bins),
      np.int32(4 * plan.group * (bins + plan.pitch)),
    )
    machine.shared[:] = -9
    with np.errstate(invalid='ignore', divide='ignore'):
      counting._emit(plan, machine.pointers, place)
  got = machine.array('out', shape, kind).sum(0)
  np.testing.assert_array_equal(got, want)
