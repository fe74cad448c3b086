"""What KDA must satisfy whatever its numbers: causality, isolation, limits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import testing
from pallas_kernels.kda import affine_summary, arg_specs, decode_step, kda

SPEC = arg_specs.ArgSpec('base', 2, 80, 2, 2, 16, 24, 4, 'float32')
DENSE = arg_specs.ArgSpec('dense', 2, 80, 2, 2, 16, 24, 0, 'float32')
forward = jax.jit(
  lambda x, **static: kda(**x, chunk_size=32, **static),
  static_argnames=('implementation', 'lower_bound', 'save'),
)
evaluate = jax.jit(
  functools.partial(
    arg_specs.outputs_and_gradients,
    implementation='xla',
    chunk_size=32,
    save='state',
  )
)


def recurrence(arguments, lower_bound=-5.0):
  """Outputs [T, V] and all states [T, K, V] of one sequence and head."""
  x = {n: np.asarray(a, np.float64) for n, a in arguments.items()}
  sigmoid = lambda y: 1 / (1 + np.exp(-y))
  unit = lambda y: y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6)
  q, k, v = unit(x['q'][0, :, 0]), unit(x['k'][0, :, 0]), x['v'][0, :, 0]
  a = np.exp(x['a_log'][0])
  z = x['gate'][0, :, 0] + x['dt_bias'][0]
  if lower_bound is None:
    decay = np.exp(-a * np.log1p(np.exp(z)))
  else:
    decay = np.exp(lower_bound * sigmoid(a * z))
  beta = sigmoid(x['beta'][0, :, 0])
  state, outputs, states = x['initial_state'][0, 0], [], []
  for t in range(len(q)):
    state = decay[t][:, None] * state
    state = state + beta[t] * np.outer(k[t], v[t] - k[t] @ state)
    outputs.append(q[t] @ state * len(q[t]) ** -0.5)
    states.append(state)
  return np.array(outputs), np.array(states)


LONG = arg_specs.ArgSpec('long', 1, 1000, 1, 1, 60, 24, 0, 'float32')


@pytest.mark.parametrize('length', [1, 15, 16, 17, 63, 64, 65, 1000])
def test_lengths(length):
  """Also a key width, 60, that no tile size divides."""
  arguments = LONG.arguments()
  want, states = recurrence(arguments)
  for name in ('q', 'k', 'v', 'gate', 'beta'):
    arguments[name] = arguments[name][:, :length]
  out, state = forward(arguments, implementation='xla')
  assert testing.relative_rms(out[0, :, 0], want[:length]) < 1e-5
  assert testing.relative_rms(state[0, 0], states[length - 1]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize('length', [1, 15, 16, 17, 63, 64, 65, 1000])
def test_gradients_of_lengths(length):
  spec = arg_specs.ArgSpec('any', 1, length, 1, 1, 60, 24, 0, 'float32')
  arguments, cotangents = spec.arguments(), spec.cotangents()
  got = evaluate(arguments, cotangents)
  want = arg_specs.outputs_and_gradients(
    arguments, cotangents, implementation='reference'
  )
  for name in want:
    assert testing.relative_rms(got[name], want[name]) < 1e-4, name


def test_unbounded_gate_is_exact():
  """Log decays far below -5 a token, where dense tiles would overflow."""
  spec = arg_specs.ArgSpec('unbounded', 1, 70, 1, 1, 16, 24, 0, 'float32')
  arguments = spec.arguments()
  arguments['gate'] = arguments['gate'] * 8
  want, states = recurrence(arguments, lower_bound=None)
  out, state = forward(arguments, lower_bound=None)
  assert testing.relative_rms(out[0, :, 0], want) < 1e-5
  assert testing.relative_rms(state[0, 0], states[-1]) < 1e-5


@pytest.mark.parametrize(
  'bound', [-1.0, pytest.param(-3.0, marks=pytest.mark.slow)]
)
def test_other_bounds(bound):
  spec = arg_specs.ArgSpec('short', 1, 32, 1, 1, 16, 24, 0, 'float32')
  arguments, cotangents = spec.arguments('saturated'), spec.cotangents()
  run = jax.jit(
    functools.partial(
      arg_specs.outputs_and_gradients, lower_bound=bound, chunk_size=16
    ),
    static_argnames='implementation',
  )
  got, want = (
    run(arguments, cotangents, implementation=name)
    for name in ('xla', 'reference')
  )
  for name in want:
    assert testing.relative_rms(got[name], want[name]) < 1e-4, name


def test_a_batch_in_slices():
  """More rows than are prepared together, with a state and documents each."""
  spec = arg_specs.ArgSpec('large', 45, 40, 1, 2, 16, 24, 3, 'float32')
  arguments, cotangents = spec.arguments(), spec.cotangents()
  got = evaluate(arguments, cotangents)
  want = jax.jit(
    functools.partial(
      arg_specs.outputs_and_gradients, implementation='reference'
    )
  )(arguments, cotangents)
  for name in want:
    assert testing.relative_rms(got[name], want[name]) < 1e-5, name


@pytest.mark.parametrize('last', [0, 14, 15, 16, 31, 32, 50])
def test_later_tokens_change_nothing_before(last):
  arguments = DENSE.arguments()
  base, _ = forward(arguments, implementation='xla')
  for name in ('q', 'k', 'v', 'gate', 'beta'):
    noise = 3 * np.random.default_rng(last).standard_normal(
      arguments[name].shape
    )
    later = np.arange(noise.shape[1]) > last
    later = later.reshape(1, -1, *[1] * (noise.ndim - 2))
    arguments[name] = jnp.where(later, noise, arguments[name])
  changed, _ = forward(arguments, implementation='xla')
  np.testing.assert_array_equal(changed[:, : last + 1], base[:, : last + 1])
  assert (changed[:, last + 1 :] != base[:, last + 1 :]).any()


def test_padding_may_hold_anything():
  """NaN in padding, gradients of padding included, reaches nothing."""
  arguments, cotangents = SPEC.arguments(), SPEC.cotangents()
  padding = np.asarray(arguments['segment_ids']) == 0
  spoilt = dict(arguments)
  for name in ('q', 'k', 'v', 'gate', 'beta'):
    rows = padding.reshape(*padding.shape, *[1] * (arguments[name].ndim - 2))
    spoilt[name] = jnp.where(rows, jnp.nan, arguments[name])
  d_out = jnp.where(padding[..., None, None], jnp.nan, cotangents[0])
  got = evaluate(spoilt, (d_out, cotangents[1]))
  want = evaluate(arguments, cotangents)
  for name in want:
    np.testing.assert_array_equal(got[name], want[name], name)
  for name in ('out', 'q', 'k', 'v', 'gate', 'beta'):
    assert not np.asarray(want[name])[padding].any(), name
    assert np.asarray(want[name])[~padding].any(), name


def test_documents_are_isolated():
  """A packed document gives what it gives alone, wherever it starts."""
  arguments = SPEC.arguments()
  ids = jnp.asarray(np.repeat([1, 2, 3], [17, 31, 32])[None].repeat(2, 0))
  out, _ = forward(arguments | {'segment_ids': ids}, implementation='xla')
  rows = {n: arguments[n] for n in ('q', 'k', 'v', 'gate', 'beta')}
  alone = {n: jnp.roll(x, -17, 1) for n, x in rows.items()}
  moved = jnp.asarray(np.repeat([9, 0], [31, 49])[None].repeat(2, 0))
  zeros = jnp.zeros_like(arguments['initial_state'])
  parameters = {n: arguments[n] for n in ('a_log', 'dt_bias')}
  want, _ = forward(
    alone | parameters | {'segment_ids': moved, 'initial_state': zeros},
    implementation='xla',
  )
  assert testing.relative_rms(out[:, 17:48], want[:, :31]) < 1e-6


@pytest.mark.parametrize('document', [1, 2, 3, 4, 5])
def test_other_documents_are_untouched_bitwise(document):
  """Whatever one document holds, the others keep every bit."""
  arguments, cotangents = SPEC.arguments(), SPEC.cotangents()
  ids = np.repeat([1, 2, 0, 3, 4, 0, 5], [17, 4, 2, 6, 40, 2, 9])[None]
  arguments['segment_ids'] = jnp.asarray(ids.repeat(2, 0), jnp.int32)
  other, rng = dict(arguments), np.random.default_rng(document)
  own = np.asarray(arguments['segment_ids']) == document

  def changed(x):
    rows = own.reshape(*own.shape, *[1] * (x.ndim - 2))
    return jnp.where(rows, 3 * rng.standard_normal(x.shape), x)

  for name in ('q', 'k', 'v', 'gate', 'beta'):
    other[name] = changed(arguments[name])
  got = evaluate(other, (changed(cotangents[0]), cotangents[1]))
  want = evaluate(arguments, cotangents)
  for name in ('out', 'q', 'k', 'v', 'gate', 'beta'):
    x, y = np.asarray(got[name]), np.asarray(want[name])
    np.testing.assert_array_equal(x[~own], y[~own], name)
    assert (x[own] != y[own]).any(), name
  # The initial state enters the first document, the final one leaves the last.
  for name, owner in (('initial_state', 1), ('final_state', 5)):
    same = np.array_equal(got[name], want[name])
    assert same == (document != owner), name


def test_a_poisoned_sequence_harms_no_other():
  arguments = DENSE.arguments()
  base = forward(arguments, implementation='xla')
  for name in ('q', 'k', 'v', 'gate', 'beta'):
    arguments[name] = arguments[name].at[0].set(jnp.nan)
  out, state = forward(arguments, implementation='xla')
  assert np.isnan(out[0]).all()
  np.testing.assert_array_equal(out[1], base[0][1])
  np.testing.assert_array_equal(state[1], base[1][1])


def test_padding_alone_passes_the_state_bitwise():
  arguments = SPEC.arguments()
  arguments['segment_ids'] = jnp.zeros_like(arguments['segment_ids'])
  out, state = forward(arguments, implementation='xla')
  np.testing.assert_array_equal(state, arguments['initial_state'])
  assert not out.any()


@pytest.mark.parametrize('implementation', ['xla', 'reference'])
def test_no_tokens(implementation):
  arguments = DENSE.arguments()
  for name in ('q', 'k', 'v', 'gate', 'beta'):
    arguments[name] = arguments[name][:, :0]
  out, state = kda(**arguments, implementation=implementation)
  assert out.shape == (2, 0, 2, 24)
  np.testing.assert_array_equal(state, arguments['initial_state'])


def test_repeated_runs_are_bitwise_equal():
  arguments, cotangents = SPEC.arguments(), SPEC.cotangents()
  first = evaluate(arguments, cotangents)
  for _ in range(3):
    again = evaluate(arguments, cotangents)
    for name in first:
      np.testing.assert_array_equal(again[name], first[name], name)


def test_split_prefill_equals_one_call():
  arguments = DENSE.arguments()
  want = forward(arguments, implementation='xla')
  halves, state = [], arguments['initial_state']
  for rows in (slice(0, 40), slice(40, 80)):
    part = {
      n: x[:, rows] if n in ('q', 'k', 'v', 'gate', 'beta') else x
      for n, x in arguments.items()
    }
    out, state = forward(part | {'initial_state': state}, implementation='xla')
    halves.append(out)
  assert testing.relative_rms(jnp.concatenate(halves, 1), want[0]) < 1e-6
  assert testing.relative_rms(state, want[1]) < 1e-6


def test_ranges_compose_by_their_affine_summaries():
  arguments = DENSE.arguments()
  _, want = forward(arguments, implementation='xla')
  state = arguments['initial_state']
  summary = jax.jit(affine_summary)
  for rows in (slice(0, 40), slice(40, 80)):
    tokens = (arguments[n][:, rows] for n in ('k', 'v', 'gate', 'beta'))
    transition, offset = summary(
      *tokens, a_log=arguments['a_log'], dt_bias=arguments['dt_bias']
    )
    state = jnp.einsum('bhkj,bhjv->bhkv', transition, state) + offset
  assert testing.relative_rms(state, want) < 1e-5


def test_extreme_gates_have_finite_gradients():
  """64k tokens at the bound, and logits of +-100 whose slope vanishes."""
  spec = arg_specs.ArgSpec('extreme', 1, 65536, 1, 1, 16, 16, 0, 'float32')
  arguments, cotangents = spec.arguments('saturated'), spec.cotangents()
  sign = jnp.where(arguments['gate'] > 8, 100.0, -100.0)
  time = jnp.arange(65536)[:, None, None]
  arguments['gate'] = jnp.where(time < 32768, 100.0, sign)
  run = jax.jit(
    functools.partial(arg_specs.outputs_and_gradients, save='state')
  )
  for name, x in run(arguments, cotangents).items():
    assert jnp.isfinite(x).all(), name


def test_grouped_heads_equal_repeated_ones():
  spec = arg_specs.ArgSpec('grouped', 1, 20, 2, 8, 16, 24, 0, 'float32')
  arguments = spec.arguments()
  repeated = dict(arguments)
  for name in ('q', 'k'):
    repeated[name] = jnp.repeat(arguments[name], 4, axis=2)

  @jax.jit
  def gradients(x):
    loss = lambda x: sum(
      (y * y).sum() for y in kda(**x, implementation='reference')
    )
    return jax.grad(loss)(x)

  got, want = gradients(arguments), gradients(repeated)
  for name in ('q', 'k'):
    want[name] = want[name].reshape(1, 20, 2, 4, 16).sum(3)
  for name in want:
    assert testing.relative_rms(got[name], want[name]) < 1e-5, name


def test_no_decay_is_the_delta_rule():
  """With g = 0 the state is that of DeltaNet: no decay, one rank-1 update."""
  arguments = LONG.arguments()
  arguments = {n: arguments[n][:, :65] for n in ('q', 'k', 'v', 'beta')}
  gate = jnp.zeros_like(arguments['q'])
  out, _ = kda(
    **arguments, gate=gate, activate_gate=False, implementation='xla'
  )
  q, k, v, beta = (
    np.asarray(x, np.float64)[0, :, 0] for x in arguments.values()
  )
  unit = lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
  q, k, beta = unit(q), unit(k), 1 / (1 + np.exp(-beta))
  state, want = np.zeros((60, 24)), []
  for t in range(65):
    state += beta[t] * np.outer(k[t], v[t] - k[t] @ state)
    want.append(q[t] @ state * 60**-0.5)
  assert testing.relative_rms(out[0, :, 0], want) < 1e-5


def test_strided_arguments():
  """Views of transposed and sliced buffers are read as what they show."""
  arguments = {n: np.asarray(x) for n, x in DENSE.arguments().items()}
  views = dict(arguments)
  for name in ('q', 'k', 'v', 'gate'):
    views[name] = np.asfortranarray(arguments[name])
    doubled = np.repeat(views[name], 2, axis=1)
    views[name] = doubled[:, ::2]
  want = forward(arguments, implementation='xla')
  got = forward(views, implementation='xla')
  np.testing.assert_array_equal(got[0], want[0])
  np.testing.assert_array_equal(got[1], want[1])


def test_decode_over_thousands_of_tokens():
  spec = arg_specs.ArgSpec('decode', 1, 4096, 1, 2, 16, 24, 0, 'bfloat16')
  arguments = spec.arguments('slow')
  want, final = forward(arguments, implementation='reference')
  weights = {n: arguments.pop(n) for n in ('a_log', 'dt_bias')}
  state = arguments.pop('initial_state')

  def step(state, token):
    out, state = decode_step(**token, state=state, **weights)
    return state, out

  tokens = {n: jnp.moveaxis(x, 1, 0) for n, x in arguments.items()}
  state, out = jax.jit(lambda *x: jax.lax.scan(step, *x))(state, tokens)
  assert testing.relative_rms(jnp.moveaxis(out, 0, 1), want) < 5e-3
  assert testing.relative_rms(state, final) < 1e-5


def test_decode_leaves_inactive_rows_alone():
  arguments = DENSE.arguments()
  token = {n: arguments[n][:, 0] for n in ('q', 'k', 'v', 'gate', 'beta')}
  token = {n: x.at[1].set(jnp.nan) for n, x in token.items()}
  state = arguments['initial_state']
  out, new = decode_step(**token, state=state, active=jnp.array([True, False]))
  np.testing.assert_array_equal(new[1], state[1])
  assert not out[1].any() and out[0].any() and jnp.isfinite(new).all()
