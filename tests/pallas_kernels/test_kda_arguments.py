"""Refusals of KDA's interface, and its types under sharding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels.kda import arg_specs, decode_step, kda

SPEC = arg_specs.ArgSpec('base', 2, 32, 2, 4, 16, 24, 2, 'float32')


def changed(**arrays):
  return SPEC.arguments() | arrays


@pytest.mark.parametrize(
  'name,shape,message',
  [
    ('gate', (2, 32, 4), r'gate has shape \(2, 32, 4\); it must be'),
    ('q', (2, 32, 16), 'q has shape .* 4 axes'),
    ('k', (2, 32, 2, 8), 'k has shape .* that of q'),
    ('v', (2, 32, 3, 24), 'v has 3 heads and q has 2'),
    ('beta', (2, 32, 4, 1), r'\[B, T, HV\]'),
    ('a_log', (2,), r'a_log has shape \(2,\)'),
    ('dt_bias', (4, 24), r'dt_bias .* \[HV, K\]'),
    ('initial_state', (2, 4, 24, 16), r'initial_state .* \[B, HV, K, V\]'),
    ('segment_ids', (2, 31), 'segment_ids has shape'),
  ],
)
def test_wrong_shapes(name, shape, message):
  dtype = jnp.int32 if name == 'segment_ids' else jnp.float32
  with pytest.raises(ValueError, match=message):
    kda(**changed(**{name: jnp.zeros(shape, dtype)}))


@pytest.mark.parametrize(
  'name,dtype,message',
  [
    ('q', 'bfloat16', 'one dtype'),
    ('gate', 'int32', 'floating point'),
    ('segment_ids', 'float32', 'int32'),
  ],
)
def test_wrong_dtypes(name, dtype, message):
  arguments = SPEC.arguments()
  arguments[name] = arguments[name].astype(dtype)
  with pytest.raises(TypeError, match=message):
    kda(**arguments)


def test_float16_is_refused():
  arguments = SPEC.arguments()
  for name in ('q', 'k', 'v'):
    arguments[name] = arguments[name].astype(jnp.float16)
  with pytest.raises(TypeError, match='float16'):
    kda(**arguments)


@pytest.mark.parametrize('bound', [-5.9, 0.0, 1.0, float('nan')])
def test_bounds_out_of_range(bound):
  with pytest.raises(ValueError, match=r'outside \[-5.0, 0\)'):
    kda(**SPEC.arguments(), lower_bound=bound)


@pytest.mark.parametrize(
  'options,message',
  [
    ({'chunk_size': 40}, 'multiple of 16'),
    ({'save': 'all'}, "'state_and_t'"),
    ({'activate_gate': False}, 'must then be None'),
    ({'implementation': 'fast'}, 'does not exist'),
  ],
)
def test_wrong_options(options, message):
  with pytest.raises(ValueError, match=message):
    kda(**SPEC.arguments(), **options)


def test_unbounded_gate_has_no_dense_form():
  with pytest.raises(NotImplementedError, match='unbounded'):
    kda(**SPEC.arguments(), lower_bound=None, implementation='xla')


def test_wrong_active_rows():
  arguments = SPEC.arguments()
  token = {n: arguments[n][:, 0] for n in ('q', 'k', 'v', 'gate', 'beta')}
  with pytest.raises(ValueError, match='one per row'):
    decode_step(
      **token, state=arguments['initial_state'], active=jnp.ones(3, bool)
    )


@pytest.mark.parametrize('implementation', ['xla', 'reference'])
def test_types_of_results(implementation):
  """bfloat16 states are taken as float32; outputs have the dtype of v."""
  arguments = SPEC.arguments()
  for name in ('q', 'k', 'v', 'initial_state', 'a_log'):
    arguments[name] = arguments[name].astype(jnp.bfloat16)
  cotangents = SPEC.cotangents()
  got = jax.eval_shape(
    lambda x: arg_specs.outputs_and_gradients(
      x, cotangents, implementation=implementation
    ),
    arguments,
  )
  assert got.pop('out').dtype == jnp.bfloat16
  assert got.pop('final_state').dtype == jnp.float32
  for name, x in got.items():
    assert (x.shape, x.dtype) == (arguments[name].shape, arguments[name].dtype)


AXES = {n: P('data', None, 'tensor', None) for n in ('q', 'k', 'v', 'gate')}
AXES |= {'beta': P('data', None, 'tensor'), 'segment_ids': P('data', None)}
AXES |= {'a_log': P('tensor'), 'dt_bias': P('tensor', None)}
AXES['initial_state'] = P('data', 'tensor', None, None)


@pytest.mark.parametrize(
  'batch,initial_state', [(2, True), (2, False), (64, True)]
)
def test_explicit_sharding(batch, initial_state):
  """Results and gradients keep the sharding, also of a batch in slices."""
  mesh = jax.sharding.AbstractMesh(
    (2, 2), ('data', 'tensor'), axis_types=(AxisType.Explicit,) * 2
  )
  spec = dataclasses.replace(SPEC, batch=batch)
  shapes = jax.eval_shape(spec.arguments)
  if not initial_state:
    shapes.pop('initial_state')
  with jax.sharding.use_abstract_mesh(mesh):
    placed = {
      n: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=jax.NamedSharding(mesh, AXES[n])
      )
      for n, x in shapes.items()
    }
    loss = lambda floats, ids: sum(
      (x * x).sum() for x in kda(**floats, segment_ids=ids)
    )
    ids = placed.pop('segment_ids')
    out = jax.eval_shape(lambda x, i: kda(**x, segment_ids=i)[0], placed, ids)
    gradients = jax.eval_shape(jax.grad(loss), placed, ids)
  assert out.sharding.spec == AXES['v']
  for name, x in gradients.items():
    assert x.sharding.spec == AXES[name], name


def test_inside_shard_map():
  """Weights that all devices share get their gradient summed once."""
  mesh = jax.make_mesh((2, 1), ('data', 'tensor'), (AxisType.Auto,) * 2)
  arguments = SPEC.arguments()
  ids = arguments.pop('segment_ids')
  arguments.pop('initial_state')

  def gradient(floats, ids, implementation='xla'):
    static = dict(chunk_size=16, implementation=implementation)
    loss = lambda x: kda(**x, segment_ids=ids, **static)[0].sum()
    return jax.grad(loss)(floats)

  specs = {n: AXES[n] for n in arguments}
  sharded = jax.shard_map(
    gradient,
    mesh=mesh,
    in_specs=(specs, AXES['segment_ids']),
    out_specs=specs,
  )
  compiled = jax.jit(sharded).lower(arguments, ids).compile()
  got = compiled(arguments, ids)
  whole = jax.jit(gradient, static_argnums=2)
  want = whole(arguments, ids, 'reference')
  for name in want:
    np.testing.assert_allclose(got[name], want[name], atol=2e-5)
  text = compiled.as_text()
  assert text.count(' all-reduce(') + text.count(' all-reduce-start(') <= 2
