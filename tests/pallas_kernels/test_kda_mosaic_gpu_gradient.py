"""The arithmetic of the Hopper gradient kernel of KDA, emulated on a CPU.

As in `test_kda_mosaic_gpu_emulated`: the instructions of `mosaic_gpu_warp` run
on arrays of 128 threads, one warpgroup after the other between two barriers of
the block. Products with 64 rows are plain matrix products of rounded operands.
"""

import types

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from test_kda_mosaic_gpu_emulated import (
  THREADS,
  Machine,
  Real,
  flags_of,
  substitutes,
  value,
  words,
)

from pallas_kernels import testing
from pallas_kernels.kda import inputs as kda_inputs
from pallas_kernels.kda import (
  mosaic_gpu,
  mosaic_gpu_gradient,
  mosaic_gpu_gradient_pairs,
  mosaic_gpu_gradient_place,
  mosaic_gpu_gradient_rows,
  mosaic_gpu_place,
  mosaic_gpu_prep,
  reference,
  xla,
)
from pallas_kernels.kda import mosaic_gpu_gradient_reference as plain
from pallas_kernels.kda import mosaic_gpu_warp as warp

at, rows = mosaic_gpu_gradient_place, mosaic_gpu_gradient_rows
pairs, HALF = mosaic_gpu_gradient_pairs, mosaic_gpu_place.HALF
VECTORS = at.TILES * HALF
SLOPE, BIAS = 1.3, 0.2
CHUNK, WIDTH = 64, 128


def low(x):
  """Rounded to bfloat16."""
  return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16)


class Block(Machine):
  """Shared memory of a block, and which of its warpgroups runs."""

  def __init__(self):
    super().__init__(VECTORS + 4 * at.WORDS)
    self.role, self.slot = 0, 0

  def update_if(self, condition, values, body):
    before, self.on = self.on, self.on & condition
    results = body(list(values))
    self.on = before
    return [
      Real(np.where(condition, new.value, old.value))
      for new, old in zip(results, values)
    ]

  def halves(self):
    return self.bytes().view(np.uint16)

  def place(self, index):
    """Number of a tile from the start of shared memory."""
    shift = at.REGION * self.slot * (index >= at.FIRST)
    return index - shift if index >= at.REST else index + shift

  def tokens(self):
    return VECTORS + 4 * (at.OF_TOKENS + 4 * CHUNK * self.slot)

  def _tile(self, index):
    index = self.place(index)
    row, column = np.indices((64, 64))
    byte = row * 128 + (((column // 8) ^ (row % 8)) * 16) + column % 8 * 2
    return (index * HALF + byte) // 2

  def read(self, index):
    bits = self.halves()[self._tile(index)]
    return bits.view(ml_dtypes.bfloat16).astype(np.float32)

  def write(self, index, x):
    self.halves()[self._tile(index)] = low(x).view(np.uint16)

  def write_wide(self, index, x):
    for half in range(2):
      self.write(index + half, x[:, 64 * half : 64 * half + 64])

  def of_tokens(self, offset):
    start = self.tokens() // 4 + offset
    return self.shared[start : start + CHUNK]


@pytest.fixture
def block(monkeypatch):
  """Replaces instructions and thread numbers by emulated ones."""
  block = Block()
  for name, function in substitutes(block).items():
    monkeypatch.setattr(warp, name, function)
  thread = lambda: np.arange(THREADS, dtype=np.int32) + 128 * block.role
  nothing = lambda: None
  threads = types.SimpleNamespace(
    thread_idx=thread,
    warp_idx=lambda: thread() // 32,
    warp_barrier=nothing,
    warpgroup_barrier=nothing,
  )
  for module in (mosaic_gpu_place, at, pairs):
    monkeypatch.setattr(module, 'utils', threads)
  monkeypatch.setattr(at, 'update_if', block.update_if)
  monkeypatch.setattr(at, 'row_bytes', lambda ref: 2 * WIDTH)
  monkeypatch.setattr(
    at, 'minimum', lambda a, b: Real(np.fmin(value(a), np.float32(b)))
  )
  return block


def accumulator(x):
  """[64, 64] as [8][4] registers."""
  lane, warps = np.arange(THREADS) % 32, np.arange(THREADS) // 32
  row, column = 16 * warps + lane // 4, lane % 4 * 2
  return [
    [Real(x[row + 8 * (i // 2), 8 * n + column + i % 2]) for i in range(4)]
    for n in range(8)
  ]


def each_role(block, function):
  """function(seat) of both warpgroups, up to a barrier of the block."""
  results = []
  for block.role in range(2):
    results.append(function(at.Seat()))
  return results


def load(block, chunk):
  """What bulk copies bring."""
  for name, x in chunk.items():
    if name in ('q', 'k', 'gate', 'values', 'd_out', 'd_values'):
      tables = mosaic_gpu_gradient._LOADED | mosaic_gpu_gradient._REST
      block.write_wide(tables[name], x)
  for name, first in (('state', at.STATE), ('dstate', at.D_STATE)):
    for half in range(2):
      block.write_wide(first + 2 * half, chunk[name][64 * half :][:64])
  block.write(at.SOLVE, chunk['inverse'])
  block.of_tokens(at.BETA)[:] = chunk['beta'].view(np.int32)
  if chunk['flags'] is not None:
    block.of_tokens(at.FLAGS)[:] = chunk['flags']


def solve(block, beta):
  """U over V."""
  wide = lambda index: np.concatenate(
    [block.read(index), block.read(index + 1)], 1
  )
  for role in range(2):
    state = wide(at.STATE + 2 * role)
    e = block.read(at.VALUES + role) + wide(at.MINUS_KEY) @ state.T
    block.write(at.VALUES + role, beta[:, None] * e)
    right = block.read(at.VALUES + role)
    block.write(at.VALUES + role, block.read(at.SOLVE) @ right)


def state_products(block, role):
  """The products of `_state_products` for one role."""
  total = lambda left, right: sum(
    block.read(left + half) @ right(half) for half in range(2)
  )
  weights = total(
    at.D_OUT + 2 * role, lambda half: block.read(at.VALUES + half).T
  )
  states = [
    total(left, lambda half, right=right: block.read(right + 2 * half + role))
    for left, right in (
      (at.D_OUT, at.STATE),
      (at.D_VALUES, at.STATE),
      (at.VALUES, at.D_STATE),
    )
  ]
  return weights, states


def run(block, options, chunk):
  """Emulates the kernel on one chunk."""
  load(block, chunk)
  masked = chunk['flags'] is not None
  tiles = [words(HALF * block.place(i)) for i in (0, at.FIRST, at.REST)]
  shared = at.Shared(*tiles, words(VECTORS), words(block.tokens()), masked)
  slope = -SLOPE * np.log2(np.e)
  affine = Real(slope), [Real(slope * BIAS)] * 2
  if not options.activate_gate:
    affine = None

  def first(seat):
    rows.store_norms(seat, shared, options)
    return rows.running_decay(seat, shared, affine, options)

  decays = each_role(block, first)

  def second(seat):
    shift = rows.scale_rows(seat, shared, decays[block.role], options)
    if masked:
      rows.mask_rows(seat, shared)
    return shift

  shifts = each_role(block, second)
  solve(block, chunk['beta'])
  products = [state_products(block, role) for role in range(2)]
  out = {n: np.zeros((CHUNK, 64), np.int32) for n in ('dq', 'dk', 'dgate')}
  out['dbeta'] = np.zeros(CHUNK, np.int32)
  out['partial'] = np.zeros((4, 2, WIDTH), np.int32)

  def third(seat):
    product = accumulator(products[block.role][0])
    pairs.store_pairs(seat, shared, product)
    pairs.write_beta_gradient(seat, shared, product, out['dbeta'])
    pairs.store_through(seat, shared)

  each_role(block, third)
  return finish(block, options, shared, affine, (shifts, products), out)


def finish(block, options, shared, affine, given, out):
  """Emulates `_emit`."""
  shifts, products = given
  outputs = lambda seat: [
    rows.Output(seat, out[n]) for n in ('dq', 'dk', 'dgate')
  ]

  def fourth(seat):
    states = [accumulator(x) for x in products[block.role][1]]
    y_q, y_k, far = pairs.scale_products(seat, shared, states)
    y_q, y_k = pairs.add_rows(seat, shared, [y_q, y_k])
    near = pairs.column_sums(seat, shared)
    four = y_q, y_k, near, far
    pairs.store_dots(seat, shared, four)
    return [pairs.to_rows(seat, shared, p) for p in four]

  four = each_role(block, fourth)

  def fifth(seat):
    d_query, d_key, _ = outputs(seat)
    role = block.role
    given = options, affine, d_query, d_key
    terms, written, slopes = rows.input_gradients(
      seat, shared, shifts[role], four[role], given
    )
    sums = rows.later_sums(seat, shared, terms)
    rows.share_sums(seat, shared, sums[0], written)
    return sums, slopes

  sums = each_role(block, fifth)

  def sixth(seat):
    carry = rows.carried_sums(seat, shared)
    own, slopes = sums[block.role]
    given = options, affine, slopes, outputs(seat)[2]
    totals = rows.gate_gradients(seat, shared, own, carry, given)
    rows.write_partials(seat, out['partial'], *totals)

  each_role(block, sixth)
  wide = lambda x: x.view(ml_dtypes.bfloat16).astype(np.float64)
  single = lambda x: x.view(np.float32).astype(np.float64)
  result = {n: wide(out[n]) for n in ('dq', 'dk', 'dgate')}
  result['dbeta'] = single(out['dbeta'])
  partial = single(out['partial']).sum(0)
  if affine is not None:
    slope = affine[0].value[0]
    result['dt_bias'], result['a_log'] = partial[0], partial[1].sum() / slope
  return result


def problem(seed, case, ids=None, scale=1.0):
  """Raw inputs of one head, gradients of its results, an initial state."""
  rng = np.random.default_rng(seed)
  length = 3 * CHUNK
  shape = (1, length, 1, WIDTH)
  q, k, v, gate, d_out = (low(rng.normal(size=shape)) for _ in range(5))
  gate = low(2 * gate.astype(np.float32))
  if case == 'bare':
    q, k = (low(x.astype(np.float32) / 12) for x in (q, k))
    gate = low(-5 * rng.uniform(size=shape) ** 3)
  elif case != 'mixed':
    gate = np.full_like(gate, {'saturated': 30, 'zero': -30}[case])
  beta = rng.uniform(size=(1, length, 1)).astype(np.float32)
  final, initial = rng.normal(size=(2, 1, 1, WIDTH, WIDTH))
  d_out = low(scale * d_out.astype(np.float32))
  return (q, k, v, gate, beta), (d_out, scale * final), initial


def recurrence(x, documents, scale, cotangents, state):
  """States before, and gradients after, each chunk; and T; for one head."""
  q, k, v, decay, beta = (np.asarray(a)[0, :, 0] for a in x)
  reset, index = (np.asarray(a)[0] for a in (documents.reset, documents.index))
  valid = np.asarray(documents.valid)[0]
  d_out, d_state = cotangents
  d_out = np.where(valid[:, None], np.asarray(d_out, np.float64)[0, :, 0], 0)
  length = len(q)
  entering, inverse = [], []
  for t in range(length):
    if t % CHUNK == 0:
      entering.append(state)
      at_chunk = slice(t, t + CHUNK)
      total = np.cumsum(decay[at_chunk], 0)
      ratio = np.exp(np.minimum(total[:, None] - total, 0))
      keys = k[at_chunk]
      alike = np.einsum('ik,jk,ijk->ij', keys, keys, ratio)
      alike *= index[at_chunk, None] == index[at_chunk]
      a = np.tril(beta[at_chunk, None] * alike, -1)
      inverse.append(np.linalg.inv(np.eye(CHUNK) + a))
    state = np.exp(decay[t])[:, None] * state * (not reset[t])
    state = state + beta[t] * np.outer(k[t], v[t] - k[t] @ state)
  leaving = []
  for t in reversed(range(length)):
    if t % CHUNK == CHUNK - 1:
      leaving.append(d_state)
    d_state = d_state + scale * np.outer(q[t], d_out[t])
    d_state = d_state - beta[t] * np.outer(k[t], k[t] @ d_state)
    d_state = np.exp(decay[t])[:, None] * d_state * (not reset[t])
  turned = lambda states: np.stack([s.T for s in states])
  return turned(entering), np.stack(inverse), turned(leaving[::-1])


def exact(arrays, cotangents, initial, ids, settings):
  """Gradients and, for every chunk, states and T, in float64."""
  with jax.enable_x64(True):
    wide = lambda x: jnp.asarray(np.asarray(x, np.float64))
    bias = np.full((1, WIDTH), BIAS)
    raw = kda_inputs.Raw(*map(wide, arrays), jnp.log(wide([SLOPE])), wide(bias))
    ids = jnp.asarray(ids[None])
    call = lambda raw: reference.recurrence(raw, wide(initial), ids, settings)
    _, pull = jax.vjp(call, raw)
    (want,) = pull(tuple(map(wide, cotangents)))
    documents = kda_inputs.documents(ids)
    x = kda_inputs.activate(raw, documents.valid, settings)
    of_head = cotangents[0], cotangents[1][0, 0]
    states = recurrence(x, documents, settings.scale, of_head, initial[0, 0])
  return jax.tree.map(np.asarray, want), states


def gradients_of(block, given, ids, masked: bool, bare=False):
  """What the emulated kernel makes of all chunks, and what it should.

  `bare`: without norms, and with log decays for gates.
  """
  arrays, cotangents, initial = given
  active = not bare
  settings = kda_inputs.Settings(-5.0, WIDTH**-0.5, active, active, False)
  want, states = exact(arrays, cotangents, initial, ids, settings)
  options = mosaic_gpu_prep.Options(
    lower_bound=-5.0,
    scale=settings.scale,
    masked=masked,
    normalize_qk=active,
    activate_gate=active,
  )
  q, k, v, gate, beta = (x[0, :, 0] for x in arrays)
  beta = np.where(ids != 0, beta, 0).astype(np.float32)
  named = dict(q=q, k=k, gate=gate, values=v, beta=beta)
  named |= dict(d_out=cotangents[0][0, :, 0], d_values=low(want.v[0, :, 0]))
  flags, chunks = flags_of(ids), []
  for n in range(len(ids) // CHUNK):
    part = {m: x[CHUNK * n : CHUNK * n + CHUNK] for m, x in named.items()}
    part |= dict(zip(('state', 'inverse', 'dstate'), (s[n] for s in states)))
    part['flags'] = flags[n] if masked else None
    block.slot = n % 2
    chunks.append(run(block, options, part))
  rows = lambda name: np.concatenate([c[name] for c in chunks])
  got = {n: rows('d' + n) for n in ('q', 'k', 'gate', 'beta')}
  if not bare:
    got |= {n: sum(c[n] for c in chunks) for n in ('a_log', 'dt_bias')}
  return got, {n: getattr(want, n).squeeze() for n in got}


# Relative RMS, by result; the two rules of rounding are what keeps the last.
LIMITS = dict(q=6e-3, k=6e-3, gate=6e-3, beta=6e-3, a_log=1e-2, dt_bias=8e-3)


def check(got, want):
  for name, x in want.items():
    assert np.isfinite(got[name]).all(), name
    error = testing.relative_rms(got[name], x)
    assert error < LIMITS[name], f'{name}: {error:.1e}'


@pytest.mark.parametrize(
  'case, scale',
  [('mixed', 1.0), ('saturated', 2.0**-13), ('zero', 2.0**-30)],
)
def test_gradients(block, case, scale):
  given = problem(0, case, scale=scale)
  check(*gradients_of(block, given, np.ones(3 * CHUNK, np.int32), False))


def test_without_norm_and_gate(block):
  given = problem(2, 'bare')
  check(*gradients_of(block, given, np.ones(3 * CHUNK, np.int32), False, True))


def test_documents_and_padding(block):
  ids = np.ones(3 * CHUNK, np.int32)
  ids[:3], ids[40:100], ids[100:110], ids[150:] = 0, 2, 0, 3
  ids[80:83] = 4
  given = problem(1, 'mixed')
  for x in (*given[0][:4], given[1][0]):
    x[0, ids == 0] = np.nan
  with np.errstate(invalid='ignore'):
    check(*gradients_of(block, given, ids, True))


SETTINGS = kda_inputs.Settings(-5.0, WIDTH**-0.5, True, True, True)


@jax.jit
def many_chunks(segment_ids):
  """Arguments of the plain gradients, more chunks than there are blocks.

  The states and the gradients of values are no more than numbers.
  """
  batch, length, heads, values = 2, 1024, 16, 8
  keys = jax.random.split(jax.random.key(0), 12)
  draw = lambda i, *shape: jax.random.normal(keys[i], shape, jnp.bfloat16)
  tokens = (batch, length, heads, WIDTH)
  raw = kda_inputs.Raw(
    draw(0, batch, length, values, WIDTH),
    draw(1, batch, length, values, WIDTH),
    draw(2, *tokens),
    2 * draw(3, *tokens),
    jax.random.normal(keys[4], tokens[:3]),
    0.3 * jax.random.normal(keys[5], (heads,)),
    0.3 * jax.random.normal(keys[6], (heads, WIDTH)),
  )
  group = plain._whole(raw, segment_ids)
  x = xla._activate(group.arrays, raw[5:], group.valid, SETTINGS)
  prepared = xla._prepare(x, group, None, SETTINGS)
  inverse = jnp.moveaxis(prepared.scan.inverse, 0, 2).astype(jnp.bfloat16)
  shape = (batch, heads, length // CHUNK, WIDTH, WIDTH)
  entering, leaving = draw(7, *shape), draw(8, *shape)
  d_values = draw(9, *tokens)
  if segment_ids is not None:
    d_values = jnp.where((segment_ids != 0)[..., None, None], d_values, 0)
  states = plain.States(entering, inverse, leaving, d_values)
  return raw, states, draw(10, *tokens)


@pytest.mark.gpu
@pytest.mark.parametrize('packed', [False, True])
def test_many_chunks_on_a_card(packed):
  """Every gradient against the plain one, and equal in every run."""
  segment_ids = None
  if packed:
    ids = np.repeat(np.arange(12) % 4, 100)[:1024]
    segment_ids = jnp.asarray(np.stack([ids, ids[::-1]]), jnp.int32)
  raw, states, d_out = many_chunks(segment_ids)
  gradients = jax.jit(plain.gradients, static_argnums=4)
  want = gradients(raw, segment_ids, states, d_out, SETTINGS)
  arrays, options = mosaic_gpu._inputs(raw, segment_ids, SETTINGS, False)
  inverse = states.inverse.reshape(*states.inverse.shape[:2], -1, CHUNK)
  arrays |= dict(state=states.entering, dstate=states.d_leaving)
  arrays |= dict(inverse=inverse, d_values=states.d_values, d_out=d_out)
  work = mosaic_gpu._work(arrays)
  run = jax.jit(lambda a: mosaic_gpu_gradient.gradient(a, work, options))
  got = run(arrays)
  for _ in range(100):
    chex.assert_trees_all_equal(run(arrays), got)
  d_raw = mosaic_gpu._raw_gradients(raw, states.d_values, got, SETTINGS)
  for name, limit in LIMITS.items():
    error = testing.relative_rms(getattr(d_raw, name), getattr(want, name))
    assert error < limit, f'{name}: {error:.1e}'
