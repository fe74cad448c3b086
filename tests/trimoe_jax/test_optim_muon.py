"""Muon against a loop over heads, against optax, and under a mesh."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from trimoe_jax import hlo, optim
from trimoe_jax.optim import groups, muon

AXES = ('data', 'expert', 'tensor')


orthogonal_update = jax.jit(muon.orthogonal_update, static_argnums=1)
newton_schulz = jax.jit(muon.newton_schulz, static_argnames='dtype')


def normal(seed, *shape):
  # From numpy: jax would compile a generator for every shape.
  values = np.random.default_rng(seed).normal(size=shape)
  return jnp.asarray(values, jnp.float32)


def params():
  """Two stacked layers with a leaf of every kind, and the top level."""
  return {
    'embedding': normal(0, 16, 8),
    'layers': {
      'attention_norm': jnp.ones((2, 8)),
      'kda': {
        'query': normal(1, 2, 8, 4, 2),
        'gate': normal(2, 2, 8, 4, 2),
        'out': normal(3, 2, 4, 2, 8),
        'a_log': normal(4, 2, 4),
        'key_conv': normal(5, 2, 4, 2, 4),
      },
      'moe': {'experts': {'gate': normal(6, 2, 4, 8, 4)}},
    },
  }


SPECS = {
  'embedding': PartitionSpec(None, 'data'),
  'layers': {
    'attention_norm': PartitionSpec(None, None),
    'kda': {
      'query': PartitionSpec(None, 'data', 'tensor', None),
      'gate': PartitionSpec(None, 'data', 'tensor', None),
      'out': PartitionSpec(None, 'tensor', None, 'data'),
      'a_log': PartitionSpec(None, 'tensor'),
      'key_conv': PartitionSpec(None, 'tensor', None, None),
    },
    'moe': {
      'experts': {'gate': PartitionSpec(None, 'expert', 'data', 'tensor')}
    },
  },
}


def adamw_and_muon(**settings):
  config = optim.OptimConfig(**{'lr': 0.1, 'warmup_fraction': 0.0, **settings})
  return optim.make_optimizer(config, params(), lambda step: 1.0)


def test_newton_schulz_equals_optax():
  x_ro = normal(0, 3, 12, 8) * jnp.array([1.0, 1e-3, 1e3])[:, None, None]
  for x in (x_ro, x_ro.mT):
    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    peer = optax.contrib.scale_by_muon(
      beta=0.0, nesterov=False, weight_dimension_numbers={'w': axes}
    )
    want = peer.update({'w': x}, peer.init({'w': x}))[0]['w']
    np.testing.assert_allclose(newton_schulz(x), want, atol=2e-5)


def test_singular_values_are_near_one():
  u_ro = newton_schulz(normal(1, 64, 16))
  values = np.linalg.svd(u_ro, compute_uv=False)
  assert 0.6 < values.min() and values.max() < 1.3
  zero = newton_schulz(jnp.zeros((2, 4, 4)))
  chex.assert_trees_all_equal(zero, jnp.zeros((2, 4, 4)))


def test_bfloat16_products_stay_close():
  x_ro = normal(2, 32, 16)
  got = newton_schulz(x_ro, dtype=jnp.bfloat16)
  assert got.dtype == jnp.float32
  # Rounding X to 2^-9 at slope 3.4 a step moves directions by 2 to 3 %.
  want = newton_schulz(x_ro)
  assert jnp.linalg.norm(got - want) / jnp.linalg.norm(want) < 4e-2
  values = np.linalg.svd(got, compute_uv=False)
  assert 0.6 < values.min() and values.max() < 1.3


def test_a_head_is_a_matrix_of_its_own():
  x = normal(3, 2, 16, 4, 8) * jnp.array([1.0, 10.0, 0.1, 1.0])[:, None]
  path = ('kda', 'query')
  got = orthogonal_update(x, groups.matrix_axes(path, x.ndim))
  for layer in range(2):
    for head in range(4):
      want = newton_schulz(x[layer, :, head]) * 0.2 * 16**0.5
      np.testing.assert_allclose(got[layer, :, head], want, atol=1e-5)
  # A full-matrix update would leave a weak head weak.
  rms = jnp.sqrt(jnp.mean(got**2, axis=(0, 1, 3)))
  assert float(rms.max() / rms.min()) < 1.2


@pytest.mark.parametrize(
  'name, shape, flat',
  [('gate', (8, 4, 6), (8, 24)), ('out', (4, 6, 8), (24, 8))],
)
def test_gate_and_output_are_whole_matrices(name, shape, flat):
  x = normal(4, *shape)
  got = orthogonal_update(x, groups.matrix_axes(('kda', name), 3))
  want = newton_schulz(x.reshape(flat)) * 0.2 * 24**0.5
  np.testing.assert_allclose(got.reshape(flat), want, atol=1e-6)


def test_update_has_the_rms_of_adamw():
  x = normal(5, 64, 32)
  axes = groups.matrix_axes(('mlp', 'up'), 2)
  rms = float(jnp.sqrt(jnp.mean(orthogonal_update(x, axes) ** 2)))
  assert 0.15 < rms < 0.25


def test_momentum_and_nesterov():
  tx = muon.scale_by_muon(0.9)
  tree = {'mlp': {'up': normal(6, 8, 4)}}
  first, second = normal(7, 8, 4), normal(8, 8, 4)
  state = tx.init(tree)
  _, state = tx.update({'mlp': {'up': first}}, state)
  got, _ = tx.update({'mlp': {'up': second}}, state)
  ahead = second + 0.9 * (second + 0.9 * first)
  want = newton_schulz(ahead) * 0.2 * 8**0.5
  np.testing.assert_allclose(got['mlp']['up'], want, atol=1e-6)


def test_decay_and_rates_reach_their_groups():
  tx = adamw_and_muon(adam_lr=0.01, weight_decay=0.5)
  tree = params()
  del tree['layers']['moe'], tree['layers']['kda']['gate']
  grads = jax.tree.map(jnp.zeros_like, tree)
  updates, _ = jax.jit(tx.update)(grads, tx.init(tree), tree)
  kda, got = tree['layers']['kda'], updates['layers']['kda']
  np.testing.assert_allclose(got['query'], -0.1 * 0.5 * kda['query'], rtol=1e-6)
  np.testing.assert_allclose(
    got['key_conv'], -0.01 * 0.5 * kda['key_conv'], rtol=1e-6
  )
  assert not jnp.any(got['a_log'])
  assert not jnp.any(updates['layers']['attention_norm'])


def test_unknown_parameter_is_refused_at_once():
  tree = params() | {'mystery': jnp.zeros(3)}
  with pytest.raises(ValueError, match='mystery'):
    optim.make_optimizer(optim.OptimConfig(), tree, lambda step: 1.0)


def test_traces_on_an_abstract_mesh_and_keeps_shardings():
  mesh = jax.sharding.AbstractMesh(
    (2, 2, 2), AXES, axis_types=(AxisType.Explicit,) * 3
  )
  concrete = params()
  tx = adamw_and_muon()
  with jax.sharding.use_abstract_mesh(mesh):
    tree = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh, s)
      ),
      concrete,
      SPECS,
    )
    state = jax.eval_shape(tx.init, tree)
    updates, after = jax.eval_shape(tx.update, tree, state, tree)
  got = jax.tree.map(lambda x: x.sharding.spec, updates)
  assert got == SPECS
  trace = after.inner_states['muon'].inner_state[0][0].trace
  assert (
    trace['layers']['kda']['query'].sharding.spec
    == (SPECS['layers']['kda']['query'])
  )


@pytest.mark.parametrize(
  'name, shape, spec',
  [
    ('experts/gate', (2, 4, 8, 4), (None, 'expert', 'data', None)),
    # Stacks that the devices do not divide: three layers over two and four.
    ('kda/gate', (3, 8, 4, 2), (None, ('data', 'expert'), 'tensor', None)),
    ('mlp/up', (8, 4), (('data', 'expert'), 'tensor')),
  ],
)
def test_matrices_are_owned_not_gathered(name, shape, spec):
  mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(AxisType.Explicit,) * 3)
  x, spec = normal(9, *shape), PartitionSpec(*spec)
  axes = groups.matrix_axes(name.split('/'), x.ndim)
  with jax.set_mesh(mesh):
    sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
    compiled = orthogonal_update.lower(sharded, axes).compile()
    got = compiled(sharded)
  found = hlo.Program(compiled.as_text(), mesh.size).collectives()
  # There and back for every axis of a matrix that is cut.
  cut = sum(axis in axes.reduction + axes.output for axis in _cut(spec))
  assert {k: v.count for k, v in found.items()} == {'all-to-all': 2 * cut}
  assert got.sharding.spec == spec
  np.testing.assert_allclose(got, orthogonal_update(x, axes), atol=1e-6)


def _cut(spec):
  return [axis for axis, names in enumerate(spec) if names]


def test_clip_returns_the_norm():
  grads = {'a': jnp.array([3.0]), 'b': jnp.array([4.0])}
  clipped, norm = optim.clip_by_global_norm(grads, 1.0)
  assert float(norm) == 5.0
  np.testing.assert_allclose(clipped['b'], [0.8], rtol=1e-6)
  same, _ = optim.clip_by_global_norm(grads, 10.0)
  chex.assert_trees_all_equal(same, grads)
  same, norm = optim.clip_by_global_norm(grads, None)
  assert same is grads and float(norm) == 5.0
  zero, _ = optim.clip_by_global_norm({'a': jnp.zeros(2)}, 1.0)
  assert not jnp.any(zero['a'])


def test_query_key_clip_bounds_the_logits():
  r, h, n, e, v = 6, 2, 4, 3, 5
  mla = {
    'query_up': normal(10, r, h, n + e),
    'kv_up': normal(11, r, h, n + v),
    'gate': normal(12, 3),
  }
  latent_q, latent_k, shared = normal(13, r), normal(14, r), normal(15, e)

  @jax.jit
  def logits(mla):
    q = jnp.einsum('r,rhq->hq', latent_q, mla['query_up'])
    k = jnp.einsum('r,rhq->hq', latent_k, mla['kv_up'])[:, :n]
    return jnp.sum(q[:, :n] * k, -1) + q[:, n:] @ shared

  before = jnp.abs(logits(mla))
  clipped = optim.clip_query_key(
    mla, before, nope_dim=n, threshold=float(before.min()) + 1e-3
  )
  after = jnp.abs(logits(clipped))
  np.testing.assert_allclose(
    after, jnp.minimum(before, before.min() + 1e-3), rtol=1e-4
  )
  chex.assert_trees_all_equal(clipped['kv_up'][..., n:], mla['kv_up'][..., n:])
