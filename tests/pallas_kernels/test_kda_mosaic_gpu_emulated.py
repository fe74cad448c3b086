"""The arithmetic of the Hopper preparation of KDA, emulated on a CPU.

The kernel's work on one chunk is written against the few instructions of
`mosaic_gpu_warp`. Here these run on arrays of 128 threads in lockstep, with
shared memory as an array of bytes: everything but timing, races, bulk copies
and the last products is checked without a GPU.
"""

import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import testing
from pallas_kernels.kda import inputs as kda_inputs
from pallas_kernels.kda import (
  mosaic_gpu_flags,
  mosaic_gpu_place,
  mosaic_gpu_prep,
  mosaic_gpu_tasks,
  mosaic_gpu_tiles,
  reference,
)
from pallas_kernels.kda import mosaic_gpu_warp as warp

THREADS, HALF = 128, mosaic_gpu_place.HALF
LANE = np.arange(32)
QUERY, KEY, GATE, SCORES = (i * HALF for i in (0, 2, 4, 6))
NORMS, TOTALS, BETA, FLAGS = (7 * HALF + 4 * i for i in (0, 128, 640, 704))


def words(x):
  return np.broadcast_to(np.asarray(x), (THREADS,)).astype(np.int32)


class Real:
  """Stands in for `warp.Real`: one float32 of every thread."""

  def __init__(self, value):
    self.value = np.broadcast_to(np.asarray(value, np.float32), (THREADS,))

  def _apply(self, operation, other):
    other = other.value if isinstance(other, Real) else np.float32(other)
    return Real(operation(self.value, other))

  def __add__(self, other):
    return self._apply(np.add, other)

  def __sub__(self, other):
    return self._apply(np.subtract, other)

  def __mul__(self, other):
    return self._apply(np.multiply, other)

  def __neg__(self):
    return Real(-self.value)


def value(x):
  return x.value if isinstance(x, Real) else np.float32(x)


def from_bits(x):
  return np.asarray(x, np.int32).view(np.float32)


def bfloat16_words(low, high):
  """Two float32 arrays, rounded, in one array of words."""
  pair = np.stack([low, high], -1).astype(ml_dtypes.bfloat16)
  return pair.view(np.uint16).astype(np.uint32) @ np.array(
    [1, 1 << 16], np.uint32
  )


def halves(x):
  bits = np.asarray(x, np.int32).view(np.uint32)
  low, high = bits << np.uint32(16), bits & np.uint32(0xFFFF0000)
  return low.view(np.float32), high.view(np.float32)


def matrix(tile_words):
  """[4, 8, 8] float32 of the four warps from one word a thread."""
  pairs = np.stack(halves(tile_words), -1).reshape(4, 8, 4, 2)
  return pairs.reshape(4, 8, 8)


def tile_words(tile):
  pairs = tile.reshape(4, 8, 4, 2)
  flat = pairs.reshape(THREADS, 2)
  return bfloat16_words(flat[:, 0], flat[:, 1]).view(np.int32)


def blocks(tiles):
  """[4, 16, 16] from the words of four tiles in the order of a left operand."""
  a, b, c, d = map(matrix, tiles)
  return np.block([[a, c], [b, d]])


class Machine:
  """128 threads in lockstep, their shared memory, and which of them are on."""

  def __init__(self, shared_bytes: int):
    self.shared = np.zeros(shared_bytes // 4, np.int32)
    self.on = np.ones(THREADS, bool)

  def bytes(self):
    return self.shared.view(np.uint8)

  def _enabled(self, predicate):
    return self.on if predicate is None else self.on & predicate

  def load(self, address, offset, count):
    index = (words(address) + offset) // 4
    index = np.clip(index, 0, self.shared.size - count)
    return [self.shared[index + i].copy() for i in range(count)]

  def store(self, address, offset, values, predicate=None):
    on = self._enabled(predicate)
    index = (words(address) + offset) // 4
    for i, x in enumerate(values):
      x = x.value.view(np.int32) if isinstance(x, Real) else words(x)
      self.shared[index[on] + i] = x[on]

  def store_global(self, address, offset, values, predicate=None):
    array, start = address
    on = self._enabled(predicate)
    index = (words(start) + offset) // 4
    flat = array.reshape(-1)
    for i, x in enumerate(values):
      x = x.value if isinstance(x, Real) else words(x)
      flat[index[on] + i] = x.view(np.int32)[on]

  def load_words(self, address, offset, count):
    array, start = address
    index = (words(start) + offset) // 4
    return [array.reshape(-1)[index + i].copy() for i in range(count)]

  def _rows(self, address, offset, tile):
    """Indices of 16 bytes, as 4 words, of 8 rows of a tile: [4, 8, 4]."""
    rows = (words(address) + offset).reshape(4, 32)[:, 8 * tile : 8 * tile + 8]
    rows = np.clip(rows // 4, 0, self.shared.size - 4)
    return rows[..., None] + np.arange(4)

  def load_block(self, address, offset=0, *, transposed=False):
    result = []
    for tile in range(4):
      loaded = self.shared[self._rows(address, offset, tile)].reshape(-1)
      if transposed:
        loaded = tile_words(matrix(loaded).swapaxes(1, 2))
      result.append(loaded)
    return result

  def store_block(self, address, offset, values):
    on = self.on.reshape(4, 32)[:, 0]
    for tile, x in enumerate(values):
      rows = self._rows(address, offset, tile)
      self.shared[rows[on]] = words(x).reshape(4, 8, 4)[on]

  def only_if(self, condition, body):
    before, self.on = self.on, self.on & condition
    body()
    self.on = before

  def either(self, condition, yes, no):
    self.only_if(condition, yes)
    self.only_if(~condition, no)

  def reals_if(self, condition, count, body):
    before, self.on = self.on, self.on & condition
    results = body()
    self.on = before
    assert len(results) == count
    return [Real(np.where(condition, x.value, 0)) for x in results]


def multiply(acc, left, right):
  a = blocks(left)
  b = np.concatenate([matrix(w).swapaxes(1, 2) for w in right], axis=1)
  product = a.astype(np.float64) @ b
  result = []
  for i, x in enumerate(acc):
    rows = product[:, 8 * (i // 2) : 8 * (i // 2) + 8].reshape(4, 8, 4, 2)
    result.append(Real(x.value + rows[..., i % 2].reshape(-1)))
  return result


def ballot(condition):
  bits = condition.reshape(4, 32).astype(np.uint32) << np.arange(32, dtype='u4')
  return np.repeat(bits.sum(1, dtype=np.uint32), 32).view(np.int32)


def first_lane(lanes):
  bits = lanes.view(np.uint32)[:, None] >> np.arange(32, dtype='u4') & 1
  return np.where(bits.any(1), bits.argmax(1), 32).astype(np.int32)


RELATIONS = {
  'eq': np.equal,
  'ne': np.not_equal,
  'slt': np.less,
  'sgt': np.greater,
  'sge': np.greater_equal,
}


def where(condition, yes, no):
  if isinstance(yes, Real):
    return Real(np.where(condition, yes.value, value(no)))
  return np.where(condition, yes, no)


def substitutes(machine: Machine) -> dict:
  """What replaces the instructions of `mosaic_gpu_warp`."""

  def keep_real(a, mask):
    return Real(from_bits(np.float32(a).view(np.int32) & mask))

  return dict(
    Real=Real,
    fma=lambda a, b, c: Real(value(a) * value(b) + value(c)),
    exp2=lambda x: Real(np.exp2(x.value)),
    reciprocal=lambda x: Real(1 / x.value),
    # Lanes off the diagonal hold products of different rows, maybe negative.
    rsqrt=lambda x: Real(np.abs(x.value) ** -0.5),
    round_to_integer=lambda x: Real(np.rint(x.value)),
    word=words,
    add=lambda a, b: words(a) + words(b),
    times=lambda a, b: words(a) * np.int32(b),
    product=lambda a, b: words(a) * words(b),
    shift_left=lambda a, bits: words(a) << bits,
    shift_right=lambda a, bits: (words(a).view(np.uint32) >> bits).view(
      np.int32
    ),
    bit_and=lambda a, b: words(a) & np.int32(b),
    xor=lambda a, b: words(a) ^ words(b),
    union=lambda a, b: words(a) | words(b),
    keep=lambda a, mask: words(a) & mask,
    keep_real=keep_real,
    bit_mask=lambda a, bit: words(a) << (31 - bit) >> 31,
    warp_sum=lambda x: np.repeat(x.reshape(4, 32).sum(1), 32).astype(np.int32),
    order_global=lambda: None,
    quotient=lambda a, b: words(a) // np.int32(b),
    ballot=ballot,
    first_lane=first_lane,
    greater=lambda a, b: a.value > np.float32(b),
    compare=lambda a, relation, b: RELATIONS[relation](words(a), words(b)),
    both=np.logical_and,
    where=where,
    pack=lambda a, b: bfloat16_words(a.value, b.value).view(np.int32),
    unpack=lambda x: tuple(map(Real, halves(x))),
    multiply_pairs=lambda a, b: bfloat16_words(
      *[x * y for x, y in zip(halves(a), halves(b))]
    ).view(np.int32),
    load=machine.load,
    load_real=lambda *args: [Real(from_bits(x)) for x in machine.load(*args)],
    store=machine.store,
    store_global=machine.store_global,
    load_global_words=machine.load_words,
    global_address=lambda ref: (ref, 0),
    advance=lambda address, offset: (address[0], address[1] + words(offset)),
    load_block=machine.load_block,
    store_block=machine.store_block,
    transpose_tile=lambda x: tile_words(matrix(x).swapaxes(1, 2)),
    multiply=multiply,
    only_if=machine.only_if,
    either=machine.either,
    reals_if=machine.reals_if,
  )


@pytest.fixture
def machine(monkeypatch):
  """Replaces instructions and thread numbers by emulated ones."""
  machine = Machine(FLAGS + 4 * 64)
  for name, function in substitutes(machine).items():
    monkeypatch.setattr(warp, name, function)
  threads = types.SimpleNamespace(
    thread_idx=lambda: np.arange(THREADS, dtype=np.int32),
    warp_idx=lambda: np.arange(THREADS, dtype=np.int32) // 32,
    warp_barrier=lambda: None,
    warpgroup_barrier=lambda: None,
  )
  for module in (
    mosaic_gpu_flags,
    mosaic_gpu_place,
    mosaic_gpu_prep,
    mosaic_gpu_tiles,
  ):
    monkeypatch.setattr(module, 'utils', threads)
  return machine


def swizzled_bytes():
  """Byte of each [row, channel] of a [64, 128] tile."""
  row, channel = np.indices((64, 128))
  half, channel = channel // 64, channel % 64
  piece = (channel // 8) ^ (row % 8)
  return half * HALF + row * 128 + piece * 16 + channel % 8 * 2


def write_tile(machine, start, x):
  view = machine.bytes().view(np.uint16)
  bits = np.asarray(x).astype(ml_dtypes.bfloat16).view(np.uint16)
  view[(start + swizzled_bytes()[:, : x.shape[1]]) // 2] = bits


def read_tile(machine, start, columns):
  view = machine.bytes().view(np.uint16)
  bits = view[(start + swizzled_bytes()[:, :columns]) // 2]
  return bits.view(ml_dtypes.bfloat16).astype(np.float64)


def write_vector(machine, start, x):
  x = np.asarray(x)
  machine.shared[start // 4 : start // 4 + x.size] = x.view(np.int32)


def chunk(seed, case):
  """Raw inputs of one chunk, and log decays in float64."""
  rng = np.random.default_rng(seed)
  rounded = lambda x: x.astype(ml_dtypes.bfloat16)
  q, k, gate = (rounded(rng.normal(size=(64, 128))) for _ in range(3))
  gate = rounded(2 * gate.astype(np.float32))
  if case == 'saturated':
    gate = np.full_like(gate, 30)
  if case in ('zero', 'corner'):
    gate = np.full_like(gate, -30)
  if case == 'corner':  # keys alike: W is a small difference of large terms
    k = rounded(1 + 0.1 * k.astype(np.float32))
  if case == 'log decay':
    gate = rounded(-5 * rng.uniform(size=(64, 128)) ** 3)
  beta = rng.uniform(size=64).astype(np.float32)
  if case == 'corner':
    beta = 1 - 1e-3 * beta
  return q, k, gate, beta


def run(machine, options, raw, flags=None):
  """Emulates the kernel on one chunk: its operands in float64."""
  q, k, gate, beta = raw
  slope, bias = -1.3 * np.log2(np.e), 0.2
  for start, x in ((QUERY, q), (KEY, k), (GATE, gate)):
    write_tile(machine, start, x)
  write_vector(machine, BETA, beta)
  if flags is not None:
    write_vector(machine, FLAGS, flags)
  tiles = mosaic_gpu_place.Tiles(
    *[words(x) for x in (QUERY, KEY, GATE, SCORES, NORMS, TOTALS, BETA)],
    flags=None if flags is None else words(FLAGS),
  )
  affine = Real(slope), [Real(slope * bias)] * 4
  place = mosaic_gpu_place.Place()
  decay = mosaic_gpu_prep._cumulative_decay(place, tiles, affine, options)
  rows = [np.zeros((64, 64), np.int32) for _ in range(3)]
  gamma, saved = np.zeros(128, np.int32), np.zeros((64, 32), np.int32)
  outputs = *rows, gamma, saved
  mosaic_gpu_prep._emit(
    options, tiles, [x for row in decay for x in row], outputs
  )
  wide = lambda x: x.view(ml_dtypes.bfloat16).astype(np.float64)
  inverse = sum(read_tile(machine, QUERY + half * HALF, 64) for half in (0, 1))
  rest = machine.shared[NORMS // 4 : NORMS // 4 + 128].view(np.float32)
  end = read_tile(machine, GATE, 128)
  if machine.shared[NORMS // 4 + mosaic_gpu_prep._SLOW]:
    end = end + read_tile(machine, KEY, 128)
  return dict(
    minus_key=wide(rows[0]),
    query=wide(rows[1]),
    gamma=gamma.view(np.float32).astype(np.float64),
    update=inverse.T @ end * rest,
    scores=read_tile(machine, SCORES, 64) @ inverse,
    saved=wide(saved),
  )


def expected(options, raw, flags=None):
  """The definitions in `mosaic_gpu_prep`, in float64."""
  q, k, gate, beta = (np.asarray(x, np.float64) for x in raw)
  entered = leaves = np.ones(64, bool)
  documents = np.zeros(64, int)
  if flags is not None:
    bit = lambda number: (flags >> number & 1).astype(bool)
    valid = bit(mosaic_gpu_place.VALID)
    entered, leaves = (
      bit(number) & valid
      for number in (mosaic_gpu_place.ENTERS, mosaic_gpu_place.LEAVES)
    )
    documents = flags >> mosaic_gpu_place.SEGMENT
    q, k, gate = (np.where(valid[:, None], x, 0) for x in (q, k, gate))
  if options.normalize_qk:
    q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
  g = gate
  if options.activate_gate:
    g = options.lower_bound / (1 + np.exp(-1.3 * (gate + 0.2)))
  if flags is not None:
    g = np.where(valid[:, None], g, 0)
  total = np.cumsum(g, axis=0)
  same = documents[:, None] == documents
  pairs = np.exp(np.minimum(total[:, None] - total, 0))
  product = lambda x: np.einsum('ik,jk,ijk->ij', x, k, pairs) * same
  scores = np.tril(product(options.scale * q))
  a = np.tril(beta[:, None] * product(k), -1)
  inverse = np.linalg.inv(np.eye(64) + a)
  end = k * np.exp(total[-1] - total) * leaves[:, None]
  stays = flags is None or flags[-1] >> mosaic_gpu_place.ENTERS & 1
  return dict(
    minus_key=-k * np.exp(total) * entered[:, None],
    query=options.scale * q * np.exp(total) * entered[:, None],
    gamma=np.exp(total[-1]) * stays,
    update=(inverse * beta).T @ end,
    scores=scores @ (inverse * beta),
    saved=inverse,
  )


def check(got, want, saved=False):
  # Most of gamma is below the range of float32 where decays are strong.
  gamma = got.pop('gamma'), want.pop('gamma')
  if not saved:
    del got['saved'], want['saved']
  np.testing.assert_allclose(*gamma, rtol=1e-4, atol=1e-30)
  for name, x in want.items():
    error = testing.relative_rms(got[name], x)
    assert error < 4e-3, f'{name}: {error:.1e}'


def options(**more):
  return mosaic_gpu_prep.Options(lower_bound=-5.0, scale=128**-0.5, **more)


@pytest.mark.parametrize('case', ['mixed', 'saturated', 'zero'])
def test_operands(machine, case):
  raw = chunk(0, case)
  check(run(machine, options(), raw), expected(options(), raw))


@pytest.mark.parametrize(
  'changed, case',
  [
    (dict(normalize_qk=False), 'mixed'),
    (dict(activate_gate=False), 'log decay'),
    (dict(save_inverse=True), 'mixed'),
  ],
)
def test_options(machine, changed, case):
  raw = chunk(1, case)
  if 'normalize_qk' in changed:
    raw = tuple(x / 12 for x in raw[:2]) + raw[2:]
    raw = tuple(x.astype(ml_dtypes.bfloat16) for x in raw[:3]) + raw[3:]
  check(
    run(machine, options(**changed), raw),
    expected(options(**changed), raw),
    saved='save_inverse' in changed,
  )


def flags_of(ids):
  """Flags of every chunk of a sequence, [N, 64]."""
  index = np.asarray(kda_inputs.documents(jnp.asarray(ids[None])).index)
  index = index.reshape(-1, 64)
  last = index[:, -1:]
  entered = np.concatenate([np.zeros((1, 1), int), last[:-1]])
  return (
    ((ids != 0).reshape(index.shape) << mosaic_gpu_place.VALID)
    + ((index == entered) << mosaic_gpu_place.ENTERS)
    + ((index == last) << mosaic_gpu_place.LEAVES)
    + ((index - entered) << mosaic_gpu_place.SEGMENT)
  ).astype(np.int32)


@pytest.mark.parametrize(
  'bounds', [(80, 81, 100), (64, 70, 128), (30, 140, 150), (66, 66, 90)]
)
def test_documents_and_padding(machine, bounds):
  ids = np.ones(192, np.int32)
  first, second, third = bounds
  ids[first:second], ids[second:third], ids[third:] = 2, 0, 3
  flags = flags_of(ids)[1]
  q, k, gate, beta = chunk(2, 'mixed')
  for x in (q, k, gate):
    x[ids[64:128] == 0] = np.nan
  raw = q, k, gate, np.where(ids[64:128] == 0, 0, beta).astype(np.float32)
  masked = options(masked=True)
  with np.errstate(invalid='ignore'):
    got = run(machine, masked, raw, flags)
  check(got, expected(masked, raw, flags))


@pytest.mark.parametrize('chunks', [1, 3, 150])
def test_flags(machine, chunks):
  rng = np.random.default_rng(chunks)
  lengths = rng.integers(1, 150, chunks * 64)
  ids = np.repeat(rng.integers(0, 4, lengths.size), lengths)[: chunks * 64]
  ids = ids.astype(np.int32)
  flags, plain = np.zeros_like(ids), np.zeros(chunks, np.int32)
  for start in range(0, chunks, THREADS):
    references = (ids, 0), (flags, 0), (plain, 0), words(0)
    mosaic_gpu_flags._round(chunks, references, words(start))
  want = flags_of(ids)
  np.testing.assert_array_equal(flags.reshape(want.shape), want)
  np.testing.assert_array_equal(plain, (want == 7).all(-1))


@pytest.mark.parametrize('share', [0.0, 0.04, 0.9, 1.0])
def test_tasks_are_the_chosen_ones(machine, share):
  """In order, each once, whatever part of 32 a look finds nothing in."""
  rng = np.random.default_rng(0)
  rows, step, total = 3, 7, 3 * 500
  listed = (rng.uniform(size=500) < share).astype(np.int32)
  thread = np.arange(THREADS, dtype=np.int32)
  stash, lane = thread // 32 * 16, thread % 32
  tasks = mosaic_gpu_tasks.Tasks(total, rows, step, chosen=1)

  def advance():
    while tasks.exhausted(stash)[0]:
      tasks.look(stash, (listed, 0), lane)
    tasks.take(stash)
    return [x[0] for x in machine.load(stash, 8, 2)]

  for worker in (0, 3, 6):
    tasks.begin(stash, words(worker))
    assert advance()[0] == total
    want = [i for i in range(worker, total, step) if listed[i // rows]]
    want += [total, total]
    for at_hand, following in zip(want[:-1], want[1:]):
      assert advance() == [at_hand, following]


def scan(chunks, values, state):
  """What `mosaic_gpu_scan` computes, without its roundings."""
  outs = []
  for operands, v in zip(chunks, values):
    e = v + operands['minus_key'] @ state
    outs.append(operands['query'] @ state + operands['scores'] @ e)
    state = operands['gamma'][:, None] * state + operands['update'].T @ e
  return np.concatenate(outs), state


@pytest.mark.parametrize(
  'case, packed', [('mixed', False), ('mixed', True), ('corner', False)]
)
def test_chunks_make_the_recurrence(machine, case, packed):
  """Operands of three chunks, scanned, against the float64 reference."""
  ids = np.ones(192, np.int32)
  if packed:
    ids[:3], ids[40:100], ids[100:110], ids[150:] = 0, 2, 0, 3
  valid = (ids != 0).reshape(3, 64)
  masked, flags = options(masked=packed), flags_of(ids)
  raws = [chunk(10 + n, case) for n in range(3)]
  raws = [(*r[:3], np.where(v, r[3], 0)) for r, v in zip(raws, valid)]
  rng = np.random.default_rng(0)
  values = np.where(valid[..., None], rng.normal(size=(3, 64, 16)), 0)
  state = rng.normal(size=(128, 16))
  chunks = [
    run(machine, masked, raw, flags[n] if packed else None)
    for n, raw in enumerate(raws)
  ]
  out, final = scan(chunks, values, state)
  with jax.enable_x64(True):
    whole = lambda x: jnp.asarray(np.concatenate(x)[None, :, None], jnp.float64)
    q, k, gate, beta = (whole(x) for x in zip(*raws))
    raw = kda_inputs.Raw(
      *(q, k, whole(values), gate, beta),
      jnp.log(jnp.full((1,), 1.3, jnp.float64)),
      jnp.full((1, 128), 0.2, jnp.float64),
    )
    settings = kda_inputs.Settings(-5.0, 128**-0.5, True, True, False)
    want = reference.recurrence(
      raw, jnp.asarray(state[None, None]), jnp.asarray(ids[None]), settings
    )
    want_out, want_final = map(np.asarray, want)
  assert testing.relative_rms(out, want_out[0, :, 0]) < 4e-3
  assert testing.relative_rms(final, want_final[0, 0]) < 4e-3
