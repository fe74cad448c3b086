"""The Hopper kernels of KDA: what they refuse, that they lower, their numbers.

The tests marked gpu need a Hopper GPU: `JAX_PLATFORMS=cuda pytest -m gpu`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import testing
from pallas_kernels.kda import (
  decode_step,
  kda,
  mosaic_gpu,
  mosaic_gpu_flags,
  mosaic_gpu_place,
  reference,
)
from pallas_kernels.kda import inputs as kda_inputs

HOPPER = 'NVIDIA H200'


def arguments(shape, case='mixed', *, key_heads=None, seed=0):
  """Arguments of the kernel for (batch, length, heads, key and value width)."""
  batch, length, heads, width, value_width = shape
  keys = jax.random.split(jax.random.key(seed), 8)

  def normal(i, *shape, dtype=jnp.bfloat16):
    return jax.random.normal(keys[i], shape, dtype)

  key_heads = key_heads or heads
  args = dict(
    q=normal(0, batch, length, key_heads, width),
    k=normal(1, batch, length, key_heads, width),
    v=normal(2, batch, length, heads, value_width),
    gate=2 * normal(3, batch, length, heads, width),
    beta=normal(4, batch, length, heads),
    a_log=0.3 * normal(5, heads, dtype=jnp.float32),
    dt_bias=0.3 * normal(6, heads, width, dtype=jnp.float32),
    initial_state=normal(
      7, batch, heads, width, value_width, dtype=jnp.float32
    ),
  )
  if case == 'saturated':
    args['gate'] = jnp.full_like(args['gate'], 30.0)
  if case in ('zero', 'corner'):
    args['gate'] = jnp.full_like(args['gate'], -30.0)
  if case in ('correlated', 'corner'):
    args['k'] = 1 + jnp.bfloat16(0.1) * args['k']
  if case == 'corner':
    args['beta'] = jnp.full_like(args['beta'], 8.0)
  return args


def shapes_of(shape, **more):
  return jax.eval_shape(functools.partial(arguments, shape, **more))


def test_refuses_what_it_does_not_cover():
  args = shapes_of((1, 64, 2, 128, 128))
  named = {n: args[n] for n in ('q', 'k', 'v', 'gate', 'beta')}

  def reason(kind=HOPPER, bound=-5.0, **changed):
    return mosaic_gpu.refusal(
      **named | changed, lower_bound=bound, device_kind=kind
    )

  assert reason() is None
  assert 'A100' in reason(kind='NVIDIA A100')
  assert 'bounded gate' in reason(bound=None)
  wide = jax.ShapeDtypeStruct((1, 64, 2, 256), jnp.bfloat16)
  assert 'K=256' in reason(q=wide)
  assert 'V=256' in reason(v=wide)
  single = jax.ShapeDtypeStruct((1, 64, 2, 128), jnp.float32)
  assert 'q is float32' in reason(q=single)
  empty = jax.ShapeDtypeStruct((1, 0, 2, 128), jnp.bfloat16)
  assert 'one token' in reason(q=empty)


def test_decode_refuses_what_it_does_not_cover():
  q = jax.ShapeDtypeStruct((3, 2, 128), jnp.bfloat16)
  state = jax.ShapeDtypeStruct((3, 2, 128, 128), jnp.float32)

  def reason(kind=HOPPER, bound=-5.0, q=q, state=state):
    return mosaic_gpu.decode_refusal(
      *(q, q, q, q, state), lower_bound=bound, device_kind=kind
    )

  assert reason() is None
  assert 'cpu' in reason(kind='cpu')
  assert 'bounded gate' in reason(bound=None)
  assert 'K=96' in reason(q=jax.ShapeDtypeStruct((3, 2, 96), jnp.bfloat16))
  half = jax.ShapeDtypeStruct(state.shape, jnp.bfloat16)
  assert 'bfloat16' in reason(state=half)
  double = jax.ShapeDtypeStruct(q.shape, jnp.float64)
  assert 'q is float64' in reason(q=double)


def test_raises_on_another_device():
  if jax.default_backend() == 'gpu':
    pytest.skip('this device is the one they are for')
  with pytest.raises(NotImplementedError, match='this is cpu'):
    mosaic_gpu.kda_mosaic_gpu(**arguments((1, 64, 1, 128, 128)))


@pytest.fixture
def on_hopper(monkeypatch):
  """Lets the kernels be traced and lowered without the device."""
  monkeypatch.setattr(mosaic_gpu, '_device_kind', lambda: HOPPER)


def lower(function, *args):
  traced = jax.jit(function).trace(*args)
  return traced.lower(lowering_platforms=('cuda',)).as_text()


@pytest.mark.parametrize(
  'shape, more, kernels',
  [
    ((1, 128, 2, 128, 128), {}, 2),
    ((1, 200, 2, 64, 64), {'key_heads': 1}, 4),
    ((1, 2048, 2, 128, 128), {}, 5),
  ],
)
def test_lowers_for_cuda(on_hopper, shape, more, kernels):
  args = shapes_of(shape, **more)
  text = lower(lambda a: mosaic_gpu.kda_mosaic_gpu(**a), args)
  assert text.count('@mosaic_gpu') == kernels


def test_is_chosen_and_has_a_gradient(on_hopper):
  args = shapes_of((1, 100, 2, 128, 128))
  ids = jax.ShapeDtypeStruct((1, 100), jnp.int32)

  def loss(args, ids):
    out, state = kda(**args, segment_ids=ids)
    return jnp.sum(out.astype(jnp.float32) ** 2) + jnp.sum(state)

  text = lower(jax.grad(loss), args, ids)
  assert text.count('@mosaic_gpu') == 10  # 3 forward, then 5 for the gradient
  gradients = jax.eval_shape(jax.grad(loss), args, ids)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), gradients) == jax.tree.map(
    lambda x: (x.shape, x.dtype), args
  )


def test_lowers_with_documents_and_saved_tensors(on_hopper):
  args = shapes_of((2, 320, 2, 128, 128))
  args['segment_ids'] = jax.ShapeDtypeStruct((2, 320), jnp.int32)
  run = functools.partial(mosaic_gpu.kda_mosaic_gpu, save=True)
  saved = jax.eval_shape(lambda a: run(**a), args)[2]
  assert saved['state'].shape == (2, 2, 5, 128, 128)
  assert saved['inverse'].shape == (2, 2, 5, 64, 64)
  assert lower(lambda a: run(**a), args).count('@mosaic_gpu') == 4


def decode_arguments(batch, heads, key_heads, width, value_width):
  shape = (batch, 1, heads, width, value_width)
  args = arguments(shape, key_heads=key_heads)
  state = args.pop('initial_state')
  per_token = ('q', 'k', 'v', 'gate', 'beta')
  return {n: x[:, 0] if n in per_token else x for n, x in args.items()} | {
    'state': state
  }


def test_decode_lowers_in_place(on_hopper):
  args = jax.eval_shape(lambda: decode_arguments(2, 4, 2, 128, 128))
  text = lower(lambda a: mosaic_gpu.decode_mosaic_gpu(**a), args)
  assert text.count('@mosaic_gpu') == 1
  assert 'output_operand_alias' in text


def test_decode_step_chooses_the_kernel(on_hopper):
  """Rows by their own number, by `active`, and by `slots` in a larger pool."""
  args = jax.eval_shape(lambda: decode_arguments(2, 4, 2, 128, 128))
  pool = jax.ShapeDtypeStruct((5, 4, 128, 128), jnp.float32)
  active = jax.ShapeDtypeStruct((2,), jnp.bool_)
  slots = jax.ShapeDtypeStruct((2,), jnp.int32)
  for more in ({}, {'active': active}, {'slots': slots, 'state': pool}):
    text = lower(lambda a: decode_step(**a), args | more)
    assert text.count('@mosaic_gpu') == 1


@pytest.mark.gpu
def test_flags_describe_documents():
  """Bits against the definition, token by token, across 128 chunks too."""
  rng = np.random.default_rng(0)
  length = 150 * 64
  ids = np.zeros((3, length), np.int32)
  ids[0, 5:192] = np.repeat([3, 1, 3, 0, 3, 7], [50, 20, 40, 30, 20, 27])
  ids[0, 8190:8200] = [7, 7, 7, 2, 2, 0, 0, 2, 5, 5]
  ids[1] = np.sort(rng.integers(0, 50, length))
  flags, plain = map(np.asarray, mosaic_gpu_flags.flags(jnp.asarray(ids)))
  index = np.asarray(kda_inputs.documents(jnp.asarray(ids)).index)
  index = index.reshape(3, -1, 64)
  last = index[:, :, -1]
  entered = np.pad(last[:, :-1], ((0, 0), (1, 0)))
  want = (
    ((ids != 0).reshape(index.shape) << mosaic_gpu_place.VALID)
    + ((index == entered[..., None]) << mosaic_gpu_place.ENTERS)
    + ((index == last[..., None]) << mosaic_gpu_place.LEAVES)
    + ((index - entered[..., None]) << mosaic_gpu_place.SEGMENT)
  )
  np.testing.assert_array_equal(flags.reshape(want.shape), want)
  np.testing.assert_array_equal(plain, (want == 7).all(-1))


def test_pieces_fill_the_chip():
  assert mosaic_gpu._pieces(96, 128) == 1
  assert mosaic_gpu._pieces(256, 32) == 1
  assert mosaic_gpu._pieces(16, 1024) == 8
  assert mosaic_gpu._pieces(2, 32) == 2


run = jax.jit(mosaic_gpu.kda_mosaic_gpu, static_argnames=('save', 'pieces'))


def expected(args, segment_ids=None, **options):
  """The float64 recurrence on the same inputs."""
  with jax.enable_x64(True):
    args = {n: jnp.asarray(x, jnp.float64) for n, x in args.items()}
    state = args.pop('initial_state')
    raw = kda_inputs.Raw(**{'a_log': None, 'dt_bias': None} | args)
    settings = kda_inputs.Settings(
      -5.0, raw.q.shape[-1] ** -0.5, True, True, True
    )._replace(**options)
    evaluate = jax.jit(reference.recurrence, static_argnums=3)
    result = evaluate(raw, state, segment_ids, settings)
    return jax.tree.map(np.asarray, result)


def check(args, segment_ids=None, **more):
  out, state, *_ = run(**args, segment_ids=segment_ids, **more)
  want_out, want_state = expected(args, segment_ids)
  testing.assert_close(out, want_out, 'kda', 'out', 'bfloat16')
  testing.assert_close(state, want_state, 'kda', 'final_state', 'bfloat16')


@pytest.mark.gpu
@pytest.mark.parametrize(
  'case', ['mixed', 'saturated', 'zero', 'correlated', 'corner']
)
def test_numbers(case):
  check(arguments((2, 512, 4, 128, 128), case))


def arguments_without(option, shape):
  """Arguments that need one activation less."""
  args = arguments(shape)
  wide = lambda name: args[name].astype(jnp.float32)
  if option == 'normalize_qk':
    args |= {n: (wide(n) / 12).astype(jnp.bfloat16) for n in ('q', 'k')}
  if option == 'activate_beta':
    args['beta'] = jax.nn.sigmoid(wide('beta'))
  if option == 'activate_gate':
    del args['a_log'], args['dt_bias']
    decay = -5 * jax.nn.sigmoid(wide('gate'))
    args['gate'] = decay.astype(jnp.bfloat16)
  return args


@pytest.mark.gpu
@pytest.mark.parametrize(
  'option', ['normalize_qk', 'activate_beta', 'activate_gate']
)
def test_options_through_the_public_function(option):
  args = arguments_without(option, (2, 300, 4, 128, 128))
  function = functools.partial(kda, **{option: False})
  implicit = jax.jit(function)(**args)
  chosen = functools.partial(function, implementation='mosaic_gpu')
  for got, want in zip(jax.jit(chosen)(**args), implicit):
    np.testing.assert_array_equal(got, want)
  want_out, want_state = expected(args, **{option: False})
  testing.assert_close(implicit[0], want_out, 'kda', 'out', 'bfloat16')
  testing.assert_close(
    implicit[1], want_state, 'kda', 'final_state', 'bfloat16'
  )


@pytest.mark.gpu
def test_other_dtypes_take_another_implementation():
  args = arguments((1, 64, 2, 128, 128))
  args |= {n: args[n].astype(jnp.float32) for n in ('q', 'k', 'v', 'gate')}
  with pytest.raises(NotImplementedError, match='q is float32'):
    kda(**args, implementation='mosaic_gpu')
  out, state = jax.jit(kda)(**args)
  want_out, want_state = expected(args)
  testing.assert_close(out, want_out, 'kda', 'out', 'bfloat16')
  testing.assert_close(state, want_state, 'kda', 'final_state', 'bfloat16')


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
  """Copies of a few heads, past what 32-bit offsets reach, all come out."""
  few = arguments((1, 8256, 8, 128, 128))
  want = run(**few)
  copies = 256
  many = {
    n: jnp.tile(x, [copies if size == 8 else 1 for size in x.shape])
    for n, x in few.items()
  }
  assert many['q'].size > 2**31
  got = run(**many)

  @jax.jit
  def different(got, want):
    axis = want.shape.index(8)
    shape = (*want.shape[:axis], copies, *want.shape[axis:])
    return jnp.sum(got.reshape(shape) != jnp.expand_dims(want, axis))

  assert [int(different(g, w)) for g, w in zip(got, want)] == [0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize('length', [1, 15, 16, 17, 63, 64, 65, 1000])
def test_any_length(length):
  check(arguments((1, length, 3, 128, 128)))


@pytest.mark.gpu
@pytest.mark.parametrize(
  'width, value_width, key_heads', [(64, 64, 4), (64, 128, 2), (128, 64, 1)]
)
def test_widths_and_grouped_heads(width, value_width, key_heads):
  shape = (2, 192, 4, width, value_width)
  check(arguments(shape, key_heads=key_heads))


@pytest.mark.gpu
@pytest.mark.parametrize('case', ['mixed', 'zero', 'corner'])
@pytest.mark.parametrize('pieces', [1, 4])
def test_pieces_of_a_chain(case, pieces):
  check(arguments((1, 2048, 2, 128, 128), case), pieces=pieces)


@pytest.mark.gpu
@pytest.mark.parametrize('case', ['mixed', 'zero'])
def test_pieces_from_zero(case):
  args = arguments((1, 2048, 2, 128, 128), case)
  args['initial_state'] = jnp.zeros_like(args['initial_state'])
  want = expected(args)
  del args['initial_state']
  for got, x, name in zip(run(**args, pieces=4), want, ('out', 'final_state')):
    testing.assert_close(got, x, 'kda', name, 'bfloat16')


@pytest.mark.gpu
@pytest.mark.parametrize('case', ['mixed', 'zero'])
def test_uneven_pieces_of_narrow_heads(case):
  """21 chunks in pieces of 6, 6, 6 and 3, the last of them not whole."""
  check(arguments((2, 1300, 2, 64, 64), case), pieces=4)


@pytest.mark.gpu
@pytest.mark.parametrize('case', ['mixed', 'zero'])
def test_pieces_with_documents(case):
  args = arguments((2, 1280, 2, 128, 128), case)
  check(args, packed_ids(1280), pieces=4)


@pytest.mark.gpu
def test_pieces_of_a_chain_that_forgets_late():
  """Only the first chunk of a piece decays, so its map vanishes there."""
  args = arguments((1, 1280, 2, 128, 128), 'zero')
  args['gate'] = args['gate'].at[:, 640:704].set(30.0)
  check(args, pieces=2)


def packed_ids(length):
  ids = np.zeros((2, length), np.int32)
  bounds = [3, 50, 64, 200, 210, 211, 500, length]
  for i, (start, end) in enumerate(zip(bounds[:-1], bounds[1:])):
    ids[0, start:end] = 0 if start == 200 else i + 1
  ids[1, : length - 40] = 1
  return jnp.asarray(ids)


@pytest.mark.gpu
@pytest.mark.parametrize('length', [640, 613])
def test_documents_and_poisoned_padding(length):
  args = arguments((2, length, 4, 128, 128))
  ids = packed_ids(length)
  check(args, ids)
  clean = run(**args, segment_ids=ids)
  poisoned = {}
  for name, x in args.items():
    poisoned[name] = x
    if name in ('q', 'k', 'v', 'gate', 'beta'):
      padding = (ids == 0).reshape(ids.shape + (1,) * (x.ndim - 2))
      poisoned[name] = jnp.where(padding, jnp.nan, x)
  for got, want in zip(run(**poisoned, segment_ids=ids), clean):
    np.testing.assert_array_equal(got, want)
  assert not np.asarray(clean[0])[np.asarray(ids) == 0].any()


@pytest.mark.gpu
def test_later_tokens_change_nothing_before_them():
  args = arguments((1, 256, 4, 128, 128))
  other = arguments((1, 256, 4, 128, 128), seed=1)
  for cut in (1, 16, 100, 130, 255):
    mixed = {
      name: x.at[:, cut:].set(other[name][:, cut:])
      if name in ('q', 'k', 'v', 'gate', 'beta')
      else x
      for name, x in args.items()
    }
    got, want = run(**mixed)[0], run(**args)[0]
    np.testing.assert_array_equal(got[:, :cut], want[:, :cut])


@pytest.mark.gpu
def test_a_thousand_runs_are_equal():
  args = arguments((1, 512, 96, 128, 128))
  first = run(**args)
  differs = jax.jit(lambda a, b: sum(jnp.any(x != y) for x, y in zip(a, b)))
  assert not sum(int(differs(run(**args), first)) for _ in range(1000))


@pytest.mark.gpu
def test_saved_state_and_inverse():
  """The state before a chunk is the final state of what comes before it."""
  args = arguments((1, 256, 2, 128, 128))
  saved = run(**args, save=True)[2]
  part = {
    n: x[:, :128] if n in ('q', 'k', 'v', 'gate', 'beta') else x
    for n, x in args.items()
  }
  before = np.swapaxes(expected(part)[1], 2, 3)
  state = np.asarray(saved['state'][:, :, 2], np.float64)
  assert testing.relative_rms(state, before) < 5e-3
  inverse = np.asarray(saved['inverse'], np.float32)
  np.testing.assert_array_equal(np.triu(inverse, 1), 0)
  np.testing.assert_array_equal(np.einsum('bhncc->bhnc', inverse), 1)


@pytest.mark.gpu
@pytest.mark.parametrize(
  'sizes', [(5, 8, 4, 128, 128), (3, 2, 2, 64, 64), (4, 3, 3, 128, 64)]
)
def test_decode(sizes):
  args = decode_arguments(*sizes)
  active = np.arange(sizes[0]) != 1
  shaped = lambda x: active.reshape((-1,) + (1,) * (x.ndim - 1))
  poisoned = {
    n: jnp.where(shaped(x), x, jnp.nan)
    if n in ('q', 'k', 'v', 'gate', 'beta')
    else x
    for n, x in args.items()
  }
  step = jax.jit(mosaic_gpu.decode_mosaic_gpu)
  out, state = step(**poisoned, active=jnp.asarray(active))
  token = {
    n: x[:, None] if n in ('q', 'k', 'v', 'gate', 'beta') else x
    for n, x in args.items()
  }
  token['initial_state'] = token.pop('state')
  want_out, want_state = expected(token)
  assert testing.relative_rms(out[active], want_out[active, 0]) < 2e-3
  assert testing.relative_rms(state[active], want_state[active]) < 1e-6
  np.testing.assert_array_equal(state[1], args['state'][1])
  assert not np.asarray(out[1]).any()


@pytest.mark.gpu
def test_decode_step_on_a_pool():
  """Rows find their states by number; padding and unused states stay."""
  args = decode_arguments(4, 6, 3, 128, 128)
  pool = jax.random.normal(jax.random.key(9), (9, 6, 128, 128))
  slots = jnp.asarray([7, -1, 0, 3], jnp.int32)
  poisoned = {
    n: args[n].at[1].set(jnp.nan) for n in ('q', 'k', 'v', 'gate', 'beta')
  }
  step = jax.jit(decode_step, static_argnames='implementation')
  args |= {'state': pool, 'slots': slots}
  out, new = step(**args | poisoned, implementation='mosaic_gpu')
  want_out, want_new = step(**args, implementation='xla')
  assert testing.relative_rms(out, want_out) < 4e-3  # two bfloat16 roundings
  assert testing.relative_rms(new, want_new) < 1e-6
  untouched = np.asarray([1, 2, 4, 5, 6, 8])
  np.testing.assert_array_equal(new[untouched], pool[untouched])
  assert not np.asarray(out[1]).any()


@pytest.mark.gpu
def test_decode_follows_the_chunks():
  """The state of a prefill, continued token by token."""
  args = arguments((1, 160, 2, 128, 128))
  names = ('q', 'k', 'v', 'gate', 'beta')
  start = {n: x[:, :128] if n in names else x for n, x in args.items()}
  state = run(**start)[1]
  step = jax.jit(mosaic_gpu.decode_mosaic_gpu)
  shared = {n: args[n] for n in ('a_log', 'dt_bias')}
  outs = []
  for t in range(128, 160):
    token = {n: args[n][:, t] for n in names}
    out, state = step(**token, **shared, state=state)
    outs.append(out)
  want_out, want_state = expected(args)
  out = np.stack(outs, 1).astype(np.float64)
  testing.assert_close(out, want_out[:, 128:], 'kda', 'out', 'bfloat16')
  testing.assert_close(state, want_state, 'kda', 'final_state', 'bfloat16')
