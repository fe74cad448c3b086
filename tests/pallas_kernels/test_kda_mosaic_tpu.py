"""The TPU kernels of KDA on a CPU: numbers, isolation, saving policies."""

import dataclasses
import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import testing
from pallas_kernels.kda import affine_summary, arg_specs, kda, mosaic_tpu
from pallas_kernels.kda import inputs as kda_inputs

# One shape of heads of one width; one with packed documents and padding, a
# partial last chunk, grouped value heads, and widths that are no lane tile.
PLAIN = arg_specs.ArgSpec('plain', 1, 128, 2, 2, 128, 128)
PACKED = arg_specs.ArgSpec('packed', 1, 150, 1, 2, 64, 128, 4)
WIDE = arg_specs.ArgSpec('wide', 1, 100, 1, 1, 64, 256, 3)
TALL = arg_specs.ArgSpec('tall', 1, 100, 2, 2, 256, 64, 3)
LONE = arg_specs.ArgSpec('lone', 2, 17, 1, 3, 128, 128)
SQUARE = arg_specs.ArgSpec('square', 1, 100, 1, 2, 256, 256, 3)
NARROW = arg_specs.ArgSpec('narrow', 1, 100, 4, 4, 64, 64, 3)
LONG = arg_specs.ArgSpec('long', 1, 8192, 2, 2, 128, 128, 16)


@dataclasses.dataclass(frozen=True)
class Edges(arg_specs.ArgSpec):
  """Documents of one token, and such as begin and end where chunks do."""

  def segment_ids(self, rng):
    starts = np.array([1, 2, 63, 64, 65, 127, 128])
    ids = 1 + (np.arange(self.length)[:, None] >= starts).sum(1)
    return jnp.broadcast_to(jnp.asarray(ids, jnp.int32), (self.batch, len(ids)))


EDGES = Edges('edges', *dataclasses.astuple(PACKED)[1:])


@functools.partial(
  jax.jit, static_argnames=('chunk_size', 'save', 'active', 'interpret')
)
def evaluate(
  arguments,
  cotangents,
  chunk_size=64,
  save='inputs',
  active=True,
  interpret=True,
):
  """As `arg_specs.outputs_and_gradients`, by the interpreted TPU kernels."""
  arguments = dict(arguments)
  ids = arguments.pop('segment_ids', None)

  def run(x):
    x = dict(x)
    state = x.pop('initial_state')
    raw = kda_inputs.Raw(**{'a_log': None, 'dt_bias': None} | x)
    settings = kda_inputs.Settings(
      -5.0, raw.q.shape[3] ** -0.5, active, active, active, chunk_size, save
    )
    return mosaic_tpu.chunked(raw, state, ids, settings, interpret)

  (out, state), pull = jax.vjp(run, arguments)
  gradients = pull((cotangents[0].astype(out.dtype), cotangents[1]))[0]
  return {'out': out, 'final_state': state} | gradients


recurrence = jax.jit(
  functools.partial(arg_specs.outputs_and_gradients, implementation='reference')
)


@functools.cache
def reference(spec, gates):
  """Float64 outputs and gradients on the same bfloat16 inputs."""
  wide = lambda x: (
    x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
  )
  with jax.enable_x64(True):
    given = jax.tree.map(wide, (spec.arguments(gates), spec.cotangents()))
    return jax.tree.map(np.asarray, recurrence(*given))


# As for the chunked form: keys alike, beta near 1, hardly any decay.
CORNER = dict.fromkeys(('q', 'k', 'v', 'initial_state'), 1.2e-2)
CORNER |= {'beta': 2e-2}


def check(spec, gates, chunk_size=64, save='inputs'):
  arguments = spec.arguments(gates)
  got = evaluate(arguments, spec.cotangents(), chunk_size, save)
  want = reference(spec, gates)
  z = np.asarray(arguments['gate'], np.float64) + arguments['dt_bias']
  scale = np.abs(want['gate'] * z).sum((0, 1, 3))
  a_log = np.abs(np.asarray(got['a_log']) - want['a_log'])
  assert (a_log <= 1e-2 * np.abs(want['a_log']) + 1e-3 * scale).all()
  corner = CORNER if gates == 'correlated' else {}
  for name in set(got) - {'a_log'}:
    limit = corner.get(name, testing.TOLERANCES['kda', name, 'bfloat16'])
    error = testing.relative_rms(got[name], want[name])
    assert error <= limit, f'{name}: {error:.2e}, allowed {limit:.1e}'


@pytest.mark.parametrize('gates', arg_specs.GATES)
def test_numbers(gates):
  check(PLAIN, gates)


@pytest.mark.parametrize('spec', [PACKED, EDGES], ids=lambda s: s.name)
def test_packed_numbers(spec):
  check(spec, 'mixed')


SLOW = [
  (spec, gates, chunk_size, save)
  for spec in (PACKED, EDGES, WIDE, TALL, LONE, SQUARE, NARROW)
  for gates in ('mixed', 'slow', 'saturated')
  for chunk_size, save in ((64, 'state'), (128, 'state_and_t'))
]
SLOW += [(PLAIN, gates, 128, 'inputs') for gates in arg_specs.GATES[:3]]


@pytest.mark.slow
@pytest.mark.parametrize('spec,gates,chunk_size,save', SLOW)
def test_more_numbers(spec, gates, chunk_size, save):
  check(spec, gates, chunk_size, save)


@pytest.mark.slow
@pytest.mark.parametrize('gates', arg_specs.GATES[:3])
def test_numbers_of_a_long_sequence(gates):
  """Errors do not grow over 128 chunks, unless keys are alike and last."""
  check(LONG, gates, save='state_and_t')


@pytest.mark.parametrize('exponent', [-13, -30])
def test_gradients_scale_with_the_loss(exponent):
  """Small upstream gradients are not flushed to zero by saturated gates."""
  arguments, cotangents = PLAIN.arguments('saturated'), PLAIN.cotangents()
  want = evaluate(arguments, cotangents)
  low = jax.tree.map(lambda x: x * 2.0**exponent, cotangents)
  got = evaluate(arguments, low)
  for name in set(want) - {'out', 'final_state'}:
    rescaled = np.asarray(got[name], np.float64) * 2.0**-exponent
    assert testing.relative_rms(rescaled, want[name]) <= 1e-3, name


def changed_after(arguments, time):
  """Every token from `time` on is another one."""
  other = PACKED.arguments('slow', seed=5)
  tokens = ('q', 'k', 'v', 'gate', 'beta')
  keep = lambda x, y: jnp.concatenate([x[:, :time], y[:, time:]], 1)
  return arguments | {n: keep(arguments[n], other[n]) for n in tokens}


def test_causality_is_bitwise():
  arguments, cotangents = PACKED.arguments(), PACKED.cotangents()
  want = np.asarray(evaluate(arguments, cotangents)['out'], np.float32)
  again = np.asarray(evaluate(arguments, cotangents)['out'], np.float32)
  np.testing.assert_array_equal(again, want)
  for time in (1, 70, 129):
    got = evaluate(changed_after(arguments, time), cotangents)['out']
    got = np.asarray(got, np.float32)
    np.testing.assert_array_equal(got[:, :time], want[:, :time])
    assert not np.array_equal(got[:, time:], want[:, time:])


def test_padding_may_hold_anything():
  """NaN in padding reaches no output, no state and no gradient, bitwise."""
  arguments, cotangents = PACKED.arguments(), PACKED.cotangents()
  padding = arguments['segment_ids'] == 0
  assert padding.any()

  def poisoned(x):
    return jnp.where(
      padding.reshape(padding.shape + (1,) * (x.ndim - 2)), jnp.nan, x
    )

  bad = arguments | {
    n: poisoned(arguments[n]) for n in ('q', 'k', 'v', 'gate', 'beta')
  }
  want = evaluate(arguments, cotangents)
  got = evaluate(bad, (poisoned(cotangents[0]), cotangents[1]))
  for name in want:
    x, y = np.asarray(got[name]), np.asarray(want[name])
    np.testing.assert_array_equal(x, y, err_msg=name)
    if name in ('out', 'q', 'k', 'v', 'gate', 'beta'):
      assert not x[np.asarray(padding)].any(), name


def test_documents_are_isolated():
  """Other tokens in the second document leave the first and third alone."""
  arguments, cotangents = PACKED.arguments(), PACKED.cotangents()
  ids = jnp.asarray(np.repeat([1, 2, 3], [70, 30, 50])[None], jnp.int32)
  arguments['segment_ids'] = ids
  want = evaluate(arguments, cotangents)
  start = changed_after(arguments, 70)
  middle = lambda x, y: jnp.concatenate([x[:, :100], y[:, 100:]], 1)
  tokens = ('q', 'k', 'v', 'gate', 'beta')
  other = arguments | {n: middle(start[n], arguments[n]) for n in tokens}
  got = evaluate(other, cotangents)
  rest = np.asarray(ids[0] != 2)
  for name in ('out', 'q', 'k', 'v', 'gate', 'beta'):
    x, y = np.asarray(got[name])[:, rest], np.asarray(want[name])[:, rest]
    np.testing.assert_array_equal(x, y, err_msg=name)
  np.testing.assert_array_equal(got['final_state'], want['final_state'])
  np.testing.assert_array_equal(got['initial_state'], want['initial_state'])


def test_only_where_documents_change_matters():
  """Ids that skip numbers and chunks of nothing but padding change no bit."""
  arguments, cotangents = PACKED.arguments(), PACKED.cotangents()
  time = np.arange(PACKED.length)
  ids = np.where(time < 50, 1, 2) * (time < 86)
  late = np.where(time < 64, time, time - 64)  # the second chunk is empty
  late_ids = np.where((time < 64) | (time >= 128), ids[late], 0)
  tokens = ('q', 'k', 'v', 'gate', 'beta')

  def run(at, ids):
    moved = arguments | {n: arguments[n][:, at] for n in tokens}
    moved['segment_ids'] = jnp.asarray(ids[None], jnp.int32)
    return evaluate(moved, (cotangents[0][:, at], cotangents[1]))

  want = run(time, ids)
  for at, other in ((time, 7 * ids), (late, late_ids)):
    got = run(at, other)
    for name in want:
      x, y = np.asarray(got[name]), np.asarray(want[name])
      if name in ('out', *tokens):
        x, y = x[:, other > 0], y[:, ids > 0]
      np.testing.assert_array_equal(x, y, err_msg=name)


def test_a_sequence_of_padding_passes_the_state_on():
  arguments, cotangents = PACKED.arguments(), PACKED.cotangents()
  arguments['segment_ids'] = jnp.zeros_like(arguments['segment_ids'])
  got = evaluate(arguments, cotangents)
  np.testing.assert_array_equal(got['final_state'], arguments['initial_state'])
  np.testing.assert_array_equal(got['initial_state'], cotangents[1])
  assert not np.asarray(got['out'], np.float32).any()


@pytest.mark.slow
def test_strict_memory():
  """No byte is read that nobody wrote, and no two copies collide."""
  arguments, cotangents = PACKED.arguments(), PACKED.cotangents()
  strict = pltpu.InterpretParams(uninitialized_memory='nan', detect_races=True)
  want = evaluate(arguments, cotangents)
  got = evaluate(arguments, cotangents, interpret=strict)
  for name in want:
    np.testing.assert_array_equal(got[name], want[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize('spec', [PLAIN, PACKED])
def test_saving_policies_agree_bitwise(spec):
  """P, T and U computed again are those of the forward kernel."""
  arguments, cotangents = spec.arguments(), spec.cotangents()
  want = evaluate(arguments, cotangents, save='state_and_t')
  for save in ('inputs', 'state'):
    got = evaluate(arguments, cotangents, save=save)
    for name in want:
      np.testing.assert_array_equal(got[name], want[name], err_msg=name)


@pytest.mark.slow
def test_activated_inputs():
  """Log decays of -5 everywhere, and no activation at all."""
  arguments, cotangents = PLAIN.arguments(), PLAIN.cotangents()
  unit = lambda x: kda_inputs.l2_normalize(x.astype(jnp.float32))
  arguments = {
    'q': unit(arguments['q']).astype(jnp.bfloat16),
    'k': unit(arguments['k']).astype(jnp.bfloat16),
    'v': arguments['v'],
    'gate': jnp.full_like(arguments['gate'], -5.0),
    'beta': jax.nn.sigmoid(arguments['beta']),
    'initial_state': arguments['initial_state'],
  }
  got = evaluate(arguments, cotangents, active=False)
  with jax.enable_x64(True):
    wide = jax.tree.map(
      lambda x: x.astype(jnp.float64), (arguments, cotangents)
    )
    off = dict(normalize_qk=False, activate_gate=False, activate_beta=False)
    want = arg_specs.outputs_and_gradients(
      *wide, implementation='reference', **off
    )
  for name in want:
    assert testing.relative_rms(got[name], want[name]) <= 5e-3, name


def test_affine_summary_folds_into_the_final_state():
  arguments = PACKED.arguments('slow')
  del arguments['segment_ids']
  state = arguments.pop('initial_state')
  raw = kda_inputs.Raw(**arguments)
  settings = kda_inputs.Settings(-5.0, 1.0, True, True, True)
  transition, offset = jax.jit(
    lambda raw: mosaic_tpu.affine_summary(raw, None, settings, interpret=True)
  )(raw._replace(q=raw.k))
  folded = offset + jnp.einsum('bhkl,bhlv->bhkv', transition, state)
  _, want = kda(
    **arguments, initial_state=state, chunk_size=64, implementation='xla'
  )
  assert testing.relative_rms(folded, want) <= 5e-3


@pytest.mark.slow
def test_affine_summary_has_the_gradients_of_the_recurrence():
  arguments = dict(PACKED.arguments('mixed'))
  for name in ('segment_ids', 'initial_state'):
    del arguments[name]
  rng = np.random.default_rng(2)
  weights = [
    jnp.asarray(rng.standard_normal((1, 2, 64, n)), jnp.float32)
    for n in (64, 128)
  ]

  def gradients(arguments, summary):
    loss = lambda x: sum((w * y).sum() for w, y in zip(weights, summary(x)))
    return jax.jit(jax.grad(loss))(arguments)

  settings = kda_inputs.Settings(-5.0, 1.0, True, True, True)
  got = gradients(
    arguments,
    lambda x: mosaic_tpu.affine_summary(
      kda_inputs.Raw(**x | {'q': x['k']}), None, settings, interpret=True
    ),
  )
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), arguments)
    want = gradients(
      wide,
      lambda x: affine_summary(
        **{n: x[n] for n in x if n != 'q'}, implementation='reference'
      ),
    )
  for name in set(want) - {'q', 'a_log'}:
    limit = testing.TOLERANCES['kda', name, 'bfloat16']
    error = testing.relative_rms(got[name], want[name])
    assert error <= limit, f'{name}: {error:.2e}, allowed {limit:.1e}'


def test_refusals_say_why():
  arguments = PLAIN.arguments()
  with pytest.raises(NotImplementedError, match='cannot run on cpu.*a TPU'):
    kda(**arguments, implementation='mosaic_tpu')


def on_a_tpu():
  """A trace in this scope is for a TPU."""
  device = jax.sharding.AbstractDevice(
    device_kind='TPU v6 lite', num_cores=1, platform='tpu'
  )
  auto = jax.sharding.AxisType.Auto
  return jax.sharding.use_abstract_mesh(
    jax.sharding.AbstractMesh(
      (1,), ('x',), axis_types=(auto,), abstract_device=device
    )
  )


def test_a_trace_for_a_tpu_takes_both_kernels():
  arguments = jax.eval_shape(PACKED.arguments)
  loss = lambda x, ids: kda(**x, segment_ids=ids)[0].sum()
  ids = arguments.pop('segment_ids')
  with on_a_tpu():
    program = str(jax.make_jaxpr(jax.grad(loss))(arguments, ids))
  assert 'kda_forward' in program and 'kda_backward' in program


def test_a_rematerialized_forward_pass_saves_nothing():
  """States are written where a gradient reads them, not the first time."""
  arguments = jax.eval_shape(PLAIN.arguments)
  layer = jax.checkpoint(lambda x: jnp.sin(kda(**x, save='state')[0]))
  with on_a_tpu():
    program = jax.make_jaxpr(jax.grad(lambda x: layer(x).sum()))(arguments)
  results = [
    len(call.outvars)
    for call in kernels(program.jaxpr)
    if call.params['name'] == 'kda_forward'
  ]
  assert results == [2, 3]  # output and final state; and states


def kernels(jaxpr):
  """The Pallas calls of a program and of those inside it."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'pallas_call':
      yield equation
    else:
      for inner in jax.extend.core.jaxprs_in_params(equation.params):
        yield from kernels(inner)


@pytest.mark.parametrize(
  'change,message',
  [
    ({'dtype': 'float32'}, 'take bfloat16, q is float32'),
    ({'key_dim': 320}, 'widths up to 256, not K=320, V=128'),
    ({'chunk_size': 32}, r'take chunk_size \(64, 128\), not 32'),
    ({'lower_bound': None}, r'need a bounded gate \(lower_bound=-5.0\)'),
  ],
)
def test_refusals_on_a_tpu(change, message):
  options = {n: change[n] for n in change if n in ('chunk_size', 'lower_bound')}
  spec = {n: change[n] for n in change if n not in options}
  arguments = jax.eval_shape(dataclasses.replace(PLAIN, **spec).arguments)
  run = functools.partial(kda, implementation='mosaic_tpu', **options)
  with on_a_tpu(), pytest.raises(NotImplementedError, match=message):
    jax.eval_shape(lambda x: run(**x), arguments)
