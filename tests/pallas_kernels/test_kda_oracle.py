"""Both forms of KDA against golden numbers and against float64."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import testing
from pallas_kernels.kda import arg_specs

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
PLAIN = dict(normalize_qk=False, activate_gate=False, activate_beta=False)
NAMES = {'q': 'q', 'k': 'k', 'v': 'v', 'gate': 'g', 'beta': 'beta'}
NAMES['initial_state'] = 'initial_state'
# One shape for all golden cases, so that they compile once.
SIZES = {'b': 2, 't': 130, 'h': 3, 'k': 128, 'v': 128}
AXES = {'q': 'bthk', 'k': 'bthk', 'v': 'bthv', 'gate': 'bthk', 'beta': 'bth'}
AXES |= {'initial_state': 'bhkv', 'out': 'bthv', 'final_state': 'bhkv'}

evaluate = jax.jit(
  arg_specs.outputs_and_gradients,
  static_argnames=('implementation', 'chunk_size', 'save', 'scale', *PLAIN),
)


def enlarged(name, x):
  """Zeros after the end of every axis, up to SIZES."""
  axes = AXES[name]
  return jnp.pad(
    jnp.asarray(x), [(0, SIZES[a] - n) for a, n in zip(axes, x.shape)]
  )


def cut(x, shape):
  return x[tuple(slice(n) for n in shape)]


def golden_documents(path):
  """(arguments, expected values) of every separate sequence in the file."""
  data = dict(np.load(path))
  lengths = data.pop('doc_lengths', [data['q'].shape[1]])
  start = 0
  for i, length in enumerate(lengths):
    rows = slice(start, start + length)
    start += length
    states = slice(i, i + 1) if len(lengths) > 1 else slice(None)
    yield {
      name: x[states] if 'state' in name else x[:, rows]
      for name, x in data.items()
    }


@pytest.mark.parametrize('implementation', ['reference', 'xla'])
@pytest.mark.parametrize(
  'name', sorted(p.stem for p in GOLDEN.glob('kda_*.npz'))
)
def test_golden(name, implementation):
  for data in golden_documents(GOLDEN / f'{name}.npz'):
    scale = data['q'].shape[-1] ** -0.5  # folded into q: one compilation
    arguments = {a: data[f] for a, f in NAMES.items()}
    arguments['q'] = arguments['q'] * scale
    arguments = {a: enlarged(a, x) for a, x in arguments.items()}
    ids = np.ones(data['q'].shape[:2], np.int32)
    arguments['segment_ids'] = jnp.pad(
      ids, [(0, SIZES['b'] - ids.shape[0]), (0, SIZES['t'] - ids.shape[1])]
    )
    got = evaluate(
      arguments,
      (
        enlarged('out', data['do']),
        enlarged('final_state', data['d_final_state']),
      ),
      implementation=implementation,
      scale=1.0,
      **PLAIN,
    )
    got['q'] = got['q'] * scale
    want = {a: data[f'd{f}'] for a, f in NAMES.items() if f'd{f}' in data}
    want['initial_state'] = data['d_initial_state']
    for output, x in want.items():
      testing.assert_close(
        cut(got[output], x.shape), x, 'kda', 'gradient', 'float32'
      )
    for output, x in (('out', data['o']), ('final_state', data['final_state'])):
      testing.assert_close(
        cut(got[output], x.shape), x, 'kda', output, 'float32'
      )


def widened(tree):
  """`tree` in float64, its values unchanged."""
  wide = lambda x: x.astype(jnp.float64)
  floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
  return jax.tree.map(lambda x: wide(x) if floating(x) else x, tree)


def test_golden_packed_documents_reset_to_zero():
  """The packed row with ids: the first state enters, later ones are zero."""
  data = np.load(GOLDEN / 'kda_packed.npz')
  arguments = {a: data[f] for a, f in NAMES.items()}
  arguments['initial_state'] = arguments['initial_state'][:1]
  arguments = {a: enlarged(a, x) for a, x in arguments.items()}
  ids = np.repeat(1 + np.arange(4, dtype=np.int32), data['doc_lengths'])
  arguments['segment_ids'] = jnp.zeros((2, 130), jnp.int32).at[0].set(ids)
  cotangents = (
    enlarged('out', data['do']),
    enlarged('final_state', data['d_final_state'][-1:]),
  )
  got, want = (
    evaluate(arguments, cotangents, implementation=name, scale=1.0, **PLAIN)
    for name in ('xla', 'reference')
  )
  for output in want:
    assert testing.relative_rms(got[output], want[output]) < 1e-5, output
  first = int(data['doc_lengths'][0])
  out = got['out'][:1, :first, :2, :16] * 16**-0.5
  assert testing.relative_rms(out, data['o'][:, :first]) < 1e-5


CASES = [(gates, 'inputs') for gates in arg_specs.GATES]
CASES += [('mixed', 'state_and_t')]


@pytest.mark.parametrize('gates,save', CASES)
def test_float64_chunks_equal_the_recurrence(gates, save):
  """Grouped heads, K != V, documents, padding, a last partial chunk."""
  with jax.enable_x64(True):
    spec = arg_specs.named('packed')
    arguments, cotangents = spec.arguments(gates), spec.cotangents()
    got = evaluate(
      arguments, cotangents, implementation='xla', chunk_size=48, save=save
    )
    want = evaluate(arguments, cotangents, implementation='reference')
    for output in want:
      assert testing.relative_rms(got[output], want[output]) < 1e-10, output


def gate_scale(arguments, d_gate):
  """Sum of |dz z|: what the cancelling sum of the a_log gradient is of."""
  z = np.asarray(arguments['gate'], np.float64) + np.asarray(
    arguments['dt_bias'], np.float64
  )
  return np.abs(np.asarray(d_gate, np.float64) * z).sum((0, 1, 3))


# Keys alike, beta near 1, hardly any decay: rounding is amplified where the
# updates of a chunk nearly cancel.
CORNER = {
  'q': 1.2e-2,
  'k': 1.2e-2,
  'v': 1.2e-2,
  'initial_state': 1.2e-2,
  'beta': 2e-2,
}


BFLOAT16 = [(gates, chunk) for gates in arg_specs.GATES for chunk in (64, 128)]


@pytest.mark.parametrize('gates,chunk_size', BFLOAT16)
def test_bfloat16_tolerances(gates, chunk_size):
  spec = arg_specs.named('wide_heads')
  arguments, cotangents = spec.arguments(gates), spec.cotangents()
  got = evaluate(
    arguments, cotangents, implementation='xla', chunk_size=chunk_size
  )
  with jax.enable_x64(True):
    want = evaluate(
      *widened((arguments, cotangents)), implementation='reference'
    )
  want = jax.tree.map(np.asarray, want)
  a_log = np.abs(np.asarray(got.pop('a_log')) - want['a_log'])
  allowed = 1e-2 * np.abs(want['a_log'])
  allowed += 1e-3 * gate_scale(arguments, want['gate'])
  assert (a_log <= allowed).all(), a_log / allowed
  corner = CORNER if gates == 'correlated' else {}
  for output, x in got.items():
    limit = corner.get(output, testing.TOLERANCES['kda', output, 'bfloat16'])
    error = testing.relative_rms(x, want[output])
    assert error <= limit, f'{output}: {error:.2e}, allowed {limit:.1e}'


@pytest.mark.parametrize('gates', arg_specs.GATES)
def test_float32_tolerances(gates):
  spec = arg_specs.named('wide_heads')
  arguments, cotangents = jax.tree.map(
    lambda x: x.astype(jnp.float32), (spec.arguments(gates), spec.cotangents())
  )
  got = evaluate(arguments, cotangents, implementation='xla', save='state')
  with jax.enable_x64(True):
    want = evaluate(
      *widened((arguments, cotangents)), implementation='reference'
    )
  for output, x in got.items():
    row = output if output in ('out', 'final_state') else 'gradient'
    testing.assert_close(x, want[output], 'kda', row, 'float32')


@pytest.mark.parametrize('exponent', [-13, -20, -30])
def test_gradients_scale_with_the_loss(exponent):
  """Saturated gates used to flush small gradients to zero."""
  spec = arg_specs.named('wide_heads')
  arguments, cotangents = spec.arguments('saturated'), spec.cotangents()
  run = lambda x: evaluate(arguments, x, implementation='xla', chunk_size=64)
  want, got = (
    run(cotangents),
    run(jax.tree.map(lambda x: x * 2.0**exponent, cotangents)),
  )
  for output in set(want) - {'out', 'final_state'}:
    rescaled = np.asarray(got[output], np.float64) * 2.0**-exponent
    assert testing.relative_rms(rescaled, want[output]) <= 1e-3, output


def test_saturated_decay_gradient():
  """g = -5 everywhere: the diagonal must not drown the gate's gradient."""
  spec = arg_specs.named('wide_heads')
  arguments, cotangents = spec.arguments(), spec.cotangents()
  arguments = {n: arguments[n] for n in ('q', 'k', 'v', 'gate', 'beta')}
  arguments['gate'] = jnp.full_like(arguments['gate'], -5.0)
  run = lambda x, name: evaluate(
    *x, implementation=name, activate_gate=False, save='state'
  )
  got = run((arguments, cotangents), 'xla')
  with jax.enable_x64(True):
    want = run(widened((arguments, cotangents)), 'reference')
  assert testing.relative_rms(got['gate'], want['gate']) <= 5e-3
