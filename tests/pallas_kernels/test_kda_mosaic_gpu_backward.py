"""Gradients of the Hopper kernels of KDA.

Without the device the kernels are replaced by their definitions in plain JAX,
so that what lies between them is tested: pieces, documents, widths, grouped
heads, and what is saved. The tests marked gpu run the kernels themselves.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import testing
from pallas_kernels.kda import (
  affine_summary,
  kda,
  mosaic_gpu,
  mosaic_gpu_flags,
  mosaic_gpu_gradient,
  mosaic_gpu_gradient_reference,
  mosaic_gpu_pieces,
  mosaic_gpu_place,
  mosaic_gpu_prep,
  mosaic_gpu_reverse,
  mosaic_gpu_scan,
  reference,
)
from pallas_kernels.kda import inputs as kda_inputs

CHUNK = 64
NAMES = ('q', 'k', 'v', 'gate', 'beta', 'a_log', 'dt_bias', 'initial_state')


def arguments(shape, case='mixed', *, key_heads=None, seed=0):
  """Arguments of `kda` for (batch, length, heads, key and value width)."""
  batch, length, heads, width, value_width = shape
  rng = np.random.default_rng(seed)
  half = lambda x: jnp.asarray(x, jnp.bfloat16)
  rows, key_heads = (batch, length), key_heads or heads
  alike = 10 if case in ('correlated', 'corner') else 0
  gate = 2 * rng.normal(size=(*rows, heads, width))
  gate = {'saturated': 30 + gate, 'zero': gate - 30, 'corner': gate - 30}.get(
    case, gate
  )
  normal = lambda *sizes: rng.normal(size=sizes)
  return dict(
    q=half(normal(*rows, key_heads, width)),
    k=half(normal(*rows, key_heads, width) + alike),
    v=half(normal(*rows, heads, value_width)),
    gate=half(gate),
    beta=half(normal(*rows, heads) + (8 if case == 'corner' else 0)),
    a_log=jnp.asarray(0.3 * normal(heads), jnp.float32),
    dt_bias=jnp.asarray(0.3 * normal(heads, width), jnp.float32),
    initial_state=jnp.asarray(
      normal(batch, heads, width, value_width), jnp.float32
    ),
  )


def cotangents(args, size=1.0, seed=1):
  rng = np.random.default_rng(seed)
  draw = lambda like: size * rng.normal(size=like.shape)
  return (
    jnp.asarray(draw(args['v']), jnp.bfloat16),
    jnp.asarray(0.1 * draw(args['initial_state']), jnp.float32),
  )


def settings_of(args, save='inputs', **changed):
  scale = args['q'].shape[-1] ** -0.5
  flags = dict(normalize_qk=True, activate_gate=True, activate_beta=True)
  return kda_inputs.Settings(-5.0, scale, **flags | changed, save=save)


def gradients(chunked, args, cotangents, segment_ids=None, **options):
  """Gradients by name of what `chunked` makes of the arguments."""
  settings = settings_of(args, **options)

  def run(args):
    raw = kda_inputs.Raw(*[args.get(n) for n in NAMES[:7]])
    return chunked(raw, args['initial_state'], segment_ids, settings)

  _, pull = jax.vjp(run, args)
  return pull(cotangents)[0]


def expected(args, cotangents, segment_ids=None, **options):
  """Automatic derivatives of the float64 recurrence on the same inputs."""
  with jax.enable_x64(True):
    wide = lambda x: jnp.asarray(np.asarray(x, np.float64))
    args, cotangents = jax.tree.map(wide, (args, cotangents))
    if segment_ids is not None:  # what stands on padding is not an output
      valid = (segment_ids != 0)[:, :, None, None]
      cotangents = jnp.where(valid, cotangents[0], 0), cotangents[1]
    run = functools.partial(gradients, reference.recurrence, **options)
    result = jax.jit(run)(args, cotangents, segment_ids)
    return jax.tree.map(np.asarray, result)


# Keys alike, beta near 1, hardly any decay: rounding is amplified where the
# updates of a chunk nearly cancel.
CORNER = dict.fromkeys(('q', 'k', 'v', 'initial_state'), 1.2e-2)
CORNER['beta'] = 2e-2


def check(args, got, want, special=()):
  """Asserts the table's tolerances; `special` has others by name."""
  limits = dict(special)
  for name, x in want.items():
    assert got[name].shape == x.shape, name
    got_x = np.asarray(got[name], np.float64)
    if name == 'a_log':
      # Its terms nearly cancel: an error may be small against them instead.
      z = np.asarray(args['gate'], np.float64) + np.asarray(args['dt_bias'])
      allowed = 1e-2 * np.abs(x)
      allowed += 1e-3 * np.abs(want['gate'] * z).sum((0, 1, 3))
      assert (np.abs(got_x - x) <= allowed).all(), (got_x, x)
      continue
    limit = limits.get(name, testing.TOLERANCES['kda', name, 'bfloat16'])
    error = testing.relative_rms(got_x, x)
    assert error <= limit, f'{name}: {error:.2e}, allowed {limit:.1e}'


def chunks(x, axis):
  """The axis of N * 64 tokens cut in two, N and 64."""
  shape = x.shape[:axis] + (-1, CHUNK) + x.shape[axis + 1 :]
  return x.reshape(shape)


def half(x):
  return x.astype(jnp.bfloat16)


def product(subscripts, a, b):
  return jnp.einsum(
    subscripts, a, b, precision='highest', preferred_element_type=jnp.float32
  )


def plain_flags(segment_ids):
  """`mosaic_gpu_flags.flags` by its definition."""
  index = chunks(kda_inputs.documents(segment_ids).index, 1)
  last = index[:, :, -1:]
  entered = jnp.pad(last[:, :-1], ((0, 0), (1, 0), (0, 0)))
  flags = (
    (chunks(segment_ids != 0, 1).astype(int) << mosaic_gpu_place.VALID)
    + ((index == entered).astype(int) << mosaic_gpu_place.ENTERS)
    + ((index == last).astype(int) << mosaic_gpu_place.LEAVES)
    + ((index - entered) << mosaic_gpu_place.SEGMENT)
  )
  return flags.reshape(segment_ids.shape), (flags == 7).all(-1).astype(int)


def plain_prepare(arrays, work, options):
  """`mosaic_gpu_prep.prepare` by its definitions."""

  def rows(x):  # [B, T, H, K] to [B, HV, N, 64, K]
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % CHUNK), (0, 0), (0, 0)])
    x = jnp.moveaxis(x.astype(jnp.float32), 2, 1)
    return chunks(jnp.repeat(x, work.heads // x.shape[1], axis=1), 2)

  q, k, gate = (rows(arrays[name]) for name in ('q', 'k', 'gate'))
  beta = chunks(arrays['beta'], 2)
  flags = jnp.full((work.batch, work.chunks, CHUNK), 7)
  if options.masked:
    flags = chunks(arrays['flags'], 1)
  bit = lambda n: (flags >> n & 1)[:, None, :, :, None] != 0
  valid = bit(mosaic_gpu_place.VALID)
  q, k, gate = (jnp.where(valid, x, 0.0) for x in (q, k, gate))
  if options.normalize_qk:
    q, k = (kda_inputs.l2_normalize(x) for x in (q, k))
  decay = gate
  if options.activate_gate:
    slope, shift = arrays['affine'].swapaxes(0, 1)[:, None, :, None, None]
    decay = options.lower_bound / (1 + jnp.exp2(slope * gate + shift))
    decay = jnp.where(valid, decay, 0.0)
  total = jnp.cumsum(decay, axis=3)
  segment = flags >> mosaic_gpu_place.SEGMENT
  same = (segment[..., :, None] == segment[..., None, :])[:, None]
  pairs = jnp.exp(
    jnp.minimum(total[..., :, None, :] - total[..., None, :, :], 0)
  )
  scores = jnp.einsum('bhnik,bhnjk,bhnijk->bhnij', q, k, pairs) * same
  alike = jnp.einsum('bhnik,bhnjk,bhnijk->bhnij', k, k, pairs) * same
  a = jnp.tril(beta[..., None] * alike, -1)
  inverse = jnp.linalg.inv(jnp.eye(CHUNK) + a)
  scaled = inverse * beta[..., None, :]
  enters, leaves = bit(mosaic_gpu_place.ENTERS), bit(mosaic_gpu_place.LEAVES)
  head = jnp.where(enters & valid, jnp.exp(total), 0.0)
  tail = jnp.exp(total[..., -1:, :] - total)
  end = jnp.where(leaves & valid, k * tail, 0.0)
  stays = enters[..., -1, :]
  tokens = lambda x: half(x).reshape(*x.shape[:2], -1, x.shape[-1])
  scores = options.scale * jnp.tril(scores)
  return dict(
    minus_key=tokens(-k * head),
    query=tokens(options.scale * q * head),
    update=tokens(product('bhnij,bhnik->bhnjk', scaled, end)),
    scores=tokens(product('bhnij,bhnjl->bhnil', scores, scaled)),
    gamma=jnp.where(stays, jnp.exp(total[..., -1, :]), 0.0),
    saved_inverse=tokens(inverse),
  )


def cut_rows(array, arrays, masked):
  """Values or their cotangents as [B, HV, N, 64, V], 0 outside documents."""
  tail = arrays['minus_key'].shape[2] - array.shape[1]
  array = jnp.pad(array, [(0, 0), (0, tail), (0, 0), (0, 0)])
  if masked:
    valid = (arrays['flags'] >> mosaic_gpu_place.VALID & 1) != 0
    array = jnp.where(valid[..., None, None], array, 0)
  return chunks(jnp.moveaxis(array, 2, 1), 2)


def cut_operands(arrays):
  names = ('minus_key', 'query', 'update', 'scores')
  return [*[chunks(arrays[n], 2) for n in names], arrays['gamma']]


def pieces_of(plan, chunk_count):
  longest = -(-chunk_count // plan.pieces)
  for i, piece in enumerate(plan.running):
    start = piece * longest
    yield i, range(start, max(start, min(start + longest, chunk_count)))


def plain_scan(arrays, plan):
  """`mosaic_gpu_scan.scan` by its definition, with its roundings."""
  minus_key, query, update, scores, gamma = cut_operands(arrays)
  wide = arrays['values'].shape[3]
  lead, count = minus_key.shape[:2], minus_key.shape[2]
  values = cut_rows(arrays['values'], arrays, plan.masked)
  outs, saved, finals = {}, {}, []
  for i, piece in pieces_of(plan, count):
    state = jnp.zeros((*lead, wide, 128), jnp.float32)
    if plan.initial:
      state = arrays['initial'][:, :, i]
    for n in piece:
      saved[n] = half(state)
      e = product('bhvk,bhck->bhcv', half(state), minus_key[:, :, n])
      e += values[:, :, n]
      outs[n] = product('bhck,bhvk->bhcv', query[:, :, n], half(state))
      outs[n] += product('bhcd,bhdv->bhcv', scores[:, :, n], half(e))
      state = gamma[:, :, n, None] * state
      state += product('bhcv,bhck->bhvk', half(e), update[:, :, n])
    finals.append(state)
  result = {'final': jnp.stack(finals, 2)}
  if plan.save_state:
    result['saved'] = jnp.stack([saved[n] for n in range(count)], 2)
  if plan.output:
    out = jnp.stack([half(outs[n]) for n in range(count)], 2)
    out = jnp.moveaxis(out.reshape(*lead, -1, wide), 1, 2)
    result['out'] = out[:, : arrays['values'].shape[1]]
  return result


def plain_maps(arrays, pieces, reverse=False):
  """`mosaic_gpu_pieces.maps` by its definition, with its roundings."""
  minus_key, _, update, _, gamma = cut_operands(arrays)
  lead, count = minus_key.shape[:2], minus_key.shape[2]
  longest, found = -(-count // pieces), []
  left, right = (minus_key, update) if reverse else (update, minus_key)
  for piece in range(pieces - 1):
    start = (pieces - 1 - piece if reverse else piece) * longest
    chunk_range = range(start, min(start + longest, count))
    x = jnp.broadcast_to(jnp.eye(128), (*lead, 128, 128))
    for n in chunk_range if reverse else reversed(chunk_range):
      e = product('bhlk,bhck->bhlc', half(x), left[:, :, n])
      x = gamma[:, :, n, None] * x
      x += product('bhlc,bhck->bhlk', half(e), right[:, :, n])
    found.append(x)
  first = jnp.zeros((*lead, pieces - 1, 128), jnp.int32)
  return {'map': jnp.stack(found, 2), 'first': first}


def plain_fold(arrays):
  """`mosaic_gpu_pieces.fold` by its definition."""
  matrix, constant = arrays['map'], arrays['constant']
  start = jnp.zeros_like(constant[:, :, :1])
  entering = [arrays.get('initial', start)[:, :, 0]]
  for p in range(constant.shape[2]):
    moved = product('bhvk,bhlk->bhvl', entering[-1], matrix[:, :, p])
    entering.append(moved + constant[:, :, p])
  return jnp.stack(entering, 2)


def plain_reverse(arrays, plan):
  """`mosaic_gpu_reverse.scan` by its definition, with its roundings."""
  minus_key, query, update, scores, gamma = cut_operands(arrays)
  lead, count = minus_key.shape[:2], minus_key.shape[2]
  wide = arrays['d_out'].shape[3]
  d_out = cut_rows(arrays['d_out'], arrays, plan.masked)
  d_values, d_state, entering = {}, {}, []
  ranges = [
    r for _, r in pieces_of(dataclasses.replace(plan, some=None), count)
  ]
  for i, piece in enumerate(plan.running):
    state = jnp.zeros((*lead, wide, 128), jnp.float32)
    if plan.leaving:
      state = arrays['leaving'][:, :, i]
    for n in reversed(ranges[plan.pieces - 1 - piece]):
      d_state[n] = half(state)
      e = product('bhck,bhvk->bhcv', update[:, :, n], half(state))
      e += product('bhdc,bhdv->bhcv', scores[:, :, n], d_out[:, :, n])
      state = gamma[:, :, n, None] * state
      state += product('bhcv,bhck->bhvk', d_out[:, :, n], query[:, :, n])
      state += product('bhcv,bhck->bhvk', half(e), minus_key[:, :, n])
      d_values[n] = half(e)
    entering.append(state)
  result = {'entering': jnp.stack(entering, 2)}
  if plan.output:
    d_values = jnp.stack([d_values[n] for n in range(count)], 2)
    d_values = jnp.moveaxis(d_values.reshape(*lead, -1, wide), 1, 2)
    result['d_values'] = d_values[:, : arrays['d_out'].shape[1]]
    result['d_state'] = jnp.stack([d_state[n] for n in range(count)], 2)
  return result


def plain_gradient(arrays, work, options):
  """`mosaic_gpu_gradient.gradient` by its reference."""
  bit = mosaic_gpu_place.VALID
  ids = arrays['flags'] >> bit & 1 if options.masked else None
  if ids is not None:  # a new number where a document begins
    segment = chunks(arrays['flags'] >> mosaic_gpu_place.SEGMENT, 1)
    last = segment[:, :, -1]
    before = jnp.cumsum(last, axis=1) - last
    ids *= 1 + (segment + before[:, :, None]).reshape(ids.shape)
  slope = arrays['affine'][:, 0, :1]
  gate = (jnp.log(-slope[:, 0] * np.log(2)), arrays['affine'][:, 1] / slope)
  raw = kda_inputs.Raw(
    *[whole(arrays[name], work) for name in ('q', 'k', 'values', 'gate')],
    jnp.swapaxes(arrays['beta'], 1, 2),
    *(gate if options.activate_gate else (None, None)),
  )
  settings = kda_inputs.Settings(
    options.lower_bound,
    options.scale,
    options.normalize_qk,
    options.activate_gate,
    activate_beta=False,
  )
  shape = (work.batch, work.heads, work.chunks, CHUNK, CHUNK)
  states = mosaic_gpu_gradient_reference.States(
    arrays['state'],
    arrays['inverse'].reshape(shape),
    arrays['dstate'],
    whole(arrays['d_values'], work),
  )
  d_out = whole(arrays['d_out'], work)
  d = mosaic_gpu_gradient_reference.gradients(raw, ids, states, d_out, settings)
  # Each value head's own part is not known here, only their sum.
  d_q, d_k = (
    jnp.repeat(x.astype(jnp.float32) / work.group, work.group, axis=2)
    for x in (d.q, d.k)
  )
  d_beta = jnp.swapaxes(d.beta, 1, 2).astype(jnp.float32)
  result = dict(dq=d_q, dk=d_k, dgate=d.gate, dbeta=d_beta)
  return result | dict(a_log=d.a_log, dt_bias=d.dt_bias)


def whole(x, work):
  """Rows of all chunks, zeros after the last token."""
  missing = work.chunks * CHUNK - x.shape[1]
  return jnp.pad(x, [(0, 0), (0, missing), (0, 0), (0, 0)])


@pytest.fixture
def plain(monkeypatch):
  """Every kernel by its definition."""
  monkeypatch.setattr(mosaic_gpu, '_device_kind', lambda: 'NVIDIA H200')
  monkeypatch.setattr(mosaic_gpu_flags, 'flags', plain_flags)
  monkeypatch.setattr(mosaic_gpu_prep, 'prepare', plain_prepare)
  monkeypatch.setattr(mosaic_gpu_scan, 'scan', plain_scan)
  monkeypatch.setattr(mosaic_gpu_pieces, 'maps', plain_maps)
  monkeypatch.setattr(mosaic_gpu_pieces, 'fold', plain_fold)
  monkeypatch.setattr(mosaic_gpu_reverse, 'scan', plain_reverse)
  monkeypatch.setattr(mosaic_gpu_gradient, 'gradient', plain_gradient)


def check_plain(shape, segment_ids=None, **options):
  args = arguments(shape, key_heads=options.pop('key_heads', None))
  given = cotangents(args)
  run = functools.partial(gradients, mosaic_gpu.chunked, **options)
  got = jax.jit(run)(args, given, segment_ids)
  check(args, got, expected(args, given, segment_ids))


@pytest.mark.slow
def test_everything_kept(plain):
  check_plain((2, 128, 2, 128, 128), save='state_and_t')


@pytest.fixture
def in_pieces(monkeypatch):
  monkeypatch.setattr(mosaic_gpu, '_pieces', lambda chains, chunks: 3)


def test_nothing_kept_in_pieces(plain, in_pieces):
  check_plain((1, 320, 1, 128, 64))


def packed_ids(length):
  ids = np.zeros((2, length), np.int32)
  bounds = [3, 50, 64, 100, 104, 105, length]
  for i, (start, end) in enumerate(zip(bounds[:-1], bounds[1:])):
    ids[0, start:end] = 0 if start == 100 else i + 1
  ids[1, : length - 40] = 1
  return jnp.asarray(ids)


def test_states_kept_of_documents_and_grouped_heads(plain):
  args, ids = arguments((2, 150, 2, 64, 128), key_heads=1), packed_ids(150)
  function = functools.partial(gradients, mosaic_gpu.chunked, save='state')
  compiled, given = jax.jit(function), cotangents(args)
  clean = compiled(args, given, ids)
  check(args, clean, expected(args, given, ids))
  got = compiled(*poisoned(args, given, ids), ids)
  for name, x in clean.items():
    np.testing.assert_array_equal(got[name], x, err_msg=name)


def poisoned(args, cotangents, ids):
  """Arguments and cotangents with NaN wherever there is padding."""

  def poison(x):
    padding = (ids == 0).reshape(ids.shape + (1,) * (x.ndim - 2))
    return jnp.where(padding, jnp.nan, x)

  per_token = ('q', 'k', 'v', 'gate', 'beta')
  args = {n: poison(x) if n in per_token else x for n, x in args.items()}
  return args, (poison(cotangents[0]), cotangents[1])


def test_affine_summary(plain):
  """Its two parts together are wider than the kernels' values."""
  args = arguments((1, 64, 1, 128, 128))
  state = args.pop('initial_state')

  @jax.jit
  def both(args, state):
    named = {n: x for n, x in args.items() if n != 'q'}
    maps = affine_summary(**named, implementation='mosaic_gpu')
    options = dict(initial_state=state, implementation='mosaic_gpu')
    return maps, kda(**args, **options)[1]

  (transition, offset), want = both(args, state)
  moved = jnp.einsum('bhkl,bhlv->bhkv', transition, state)
  assert testing.relative_rms(moved + offset, want) < 5e-3


run = jax.jit(
  functools.partial(gradients, mosaic_gpu.chunked),
  static_argnames=('save', 'activate_gate', 'activate_beta', 'normalize_qk'),
)


def check_kernels(args, segment_ids=None, *, size=1.0, special=(), **options):
  given = cotangents(args, size)
  got = run(args, given, segment_ids, **options)
  flags = {n: x for n, x in options.items() if n != 'save'}
  check(args, got, expected(args, given, segment_ids, **flags), special)


@pytest.mark.gpu
@pytest.mark.parametrize(
  'case', ['mixed', 'saturated', 'zero', 'correlated', 'corner']
)
def test_numbers(case):
  special = CORNER if case in ('correlated', 'corner') else ()
  check_kernels(arguments((2, 512, 4, 128, 128), case), special=special)


@pytest.mark.gpu
@pytest.mark.parametrize('case', ['mixed', 'saturated'])
@pytest.mark.parametrize('power', [-13, -20, -30])
def test_small_cotangents(case, power):
  """A mean over tokens makes them small; no gradient may be flushed to 0."""
  args = arguments((1, 512, 4, 128, 128), case)
  check_kernels(args, size=2.0**power)
  scaled = jax.tree.map(lambda x: x * 2.0**power, cotangents(args))
  got, whole = run(args, scaled), run(args, cotangents(args))
  for name, x in whole.items():
    x = np.asarray(x, np.float64) * 2.0**power
    assert testing.relative_rms(got[name], x) < 1e-3, name


@pytest.mark.gpu
@pytest.mark.parametrize('length', [1, 15, 16, 17, 63, 64, 65, 1000])
def test_any_length(length):
  # Of few tokens one large term may be all that a gradient consists of.
  special = {} if length > 64 else {'beta': 2e-2}
  check_kernels(arguments((1, length, 4, 128, 128)), special=special)


@pytest.mark.gpu
@pytest.mark.parametrize(
  'width, value_width, key_heads', [(64, 64, 4), (64, 128, 2), (128, 64, 1)]
)
def test_widths_and_grouped_heads(width, value_width, key_heads):
  shape = (2, 192, 4, width, value_width)
  check_kernels(arguments(shape, key_heads=key_heads), save='state')


@pytest.mark.gpu
@pytest.mark.parametrize('case', ['mixed', 'zero', 'corner'])
def test_kernels_in_pieces(in_pieces, case):
  special = CORNER if case == 'corner' else ()
  args = arguments((1, 1024, 2, 128, 128), case)
  compiled = jax.jit(functools.partial(gradients, mosaic_gpu.chunked))
  given = cotangents(args)
  check(args, compiled(args, given), expected(args, given), special)


@pytest.mark.gpu
def test_kept_tensors_change_nothing():
  args = arguments((2, 256, 4, 128, 128))
  given = cotangents(args)
  want = run(args, given, save='inputs')
  for save in ('state', 'state_and_t'):
    got = run(args, given, save=save)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.gpu
def test_inputs_that_are_active_already():
  args = arguments((1, 256, 4, 128, 128))
  del args['a_log'], args['dt_bias']
  gate = args['gate'].astype(jnp.float32)
  args['gate'] = (-5 * jax.nn.sigmoid(gate)).astype(jnp.bfloat16)
  args['beta'] = jax.nn.sigmoid(args['beta']).at[:, 100].set(0)
  for name in ('q', 'k'):
    args[name] = args[name] * jnp.bfloat16(0.0884)
  flags = ('activate_gate', 'activate_beta', 'normalize_qk')
  check_kernels(args, **dict.fromkeys(flags, False))


@pytest.mark.gpu
def test_documents_and_poisoned_padding():
  args = arguments((2, 613, 4, 128, 128))
  ids = packed_ids(613)
  check_kernels(args, ids)
  given = cotangents(args)
  clean = run(args, given, ids)
  got = run(*poisoned(args, given, ids), ids)
  for name, x in clean.items():
    np.testing.assert_array_equal(got[name], x, err_msg=name)
    if name in ('q', 'k', 'v', 'gate', 'beta'):
      assert not np.asarray(x)[np.asarray(ids) == 0].any(), name


@pytest.mark.gpu
def test_hundred_runs_are_equal():
  args = arguments((1, 512, 48, 128, 128))
  given = cotangents(args)
  first = run(args, given)
  differs = jax.jit(lambda a, b: sum(jnp.any(a[name] != b[name]) for name in a))
  assert not sum(int(differs(run(args, given), first)) for _ in range(100))
