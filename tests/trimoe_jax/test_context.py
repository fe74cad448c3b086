"""Sequences over the context axis equal sequences in one piece, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import (
  FAST_COMPILE,
  random_tokens,
  random_weights,
  small_config,
)

from trimoe_jax import sharding
from trimoe_jax.model.kda import kda_cache, kda_layer, kda_parameters
from trimoe_jax.model.mla import mla_layer, mla_parameters
from trimoe_jax.model.model import Model
from trimoe_jax.model.parameters import map_table
from trimoe_jax.parallel import context

TIME = 96
CONFIG = small_config()
# Cuts anywhere: a document of one token, one over several fragments, padding in
# the middle of one, a fragment of nothing but padding, and ids that come again.
PACKED = np.stack(
  [
    np.repeat([1, 2, 3, 0, 3, 1], [5, 1, 42, 3, 20, 25]),
    np.repeat([0, 4, 0, 4, 5], [7, 20, 30, 9, 30]),
  ]
).astype(np.int32)
DOCUMENTS = [
  pytest.param(None, id='dense', marks=pytest.mark.slow),
  pytest.param(PACKED, id='packed'),
]


@pytest.fixture(autouse=True)
def _float64():
  with jax.enable_x64(True):
    yield


def draw(table, seed=0):
  rng = np.random.default_rng(seed)
  one = lambda p: jnp.asarray(0.5 * rng.standard_normal(p.shape))
  return map_table(one, table)


def sample(*shape, seed=1):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def compiled(function, *args):
  return jax.jit(function).lower(*args).compile(FAST_COMPILE)(*args)


def on_mesh(sizes, function, *args):
  with jax.set_mesh(sharding.make_mesh(sizes)):
    return compiled(function, *args)


def assert_equal(got, want, tolerance=1e-12):
  got, want = jax.tree.leaves(got), jax.tree.leaves(want)
  assert len(got) == len(want)
  for one, other in zip(got, want):
    scale = max(1e-30, float(np.abs(other).max()))
    np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * scale)


def layer_and_gradients(layer, params, x_btd, segment_ids, cache=None):
  """Outputs, final cache, and gradients through random cotangents."""

  def loss(params, x_btd, cache, split):
    names = ('batch', 'seq', None)
    if split:
      x_btd = context.balance(x_btd, *names)
      ids = segment_ids
      if ids is not None:
        ids = context.balance(jnp.asarray(ids), *names[:2])
      options = {'split': True}
    else:
      ids, options = segment_ids, {}
    if cache is not None:
      options['cache'] = cache
    y_btd, after = layer(params, x_btd, CONFIG, segment_ids=ids, **options)
    if split:
      y_btd = context.restore(y_btd, *names)
    total = jnp.sum(y_btd * sample(*y_btd.shape, seed=2))
    if cache is not None:
      total += jnp.sum(after['state'] * sample(*after['state'].shape, seed=3))
    else:
      after = None
    return total, (y_btd, after)

  grad = jax.grad(loss, (0, 1, 2), has_aux=True)
  return lambda split: lambda p, x, c: grad(p, x, c, split)


@pytest.mark.parametrize('length', [16, 96])
@pytest.mark.parametrize('ranks', [2, 8])
def test_balance_gives_every_rank_an_early_and_a_late_fragment(ranks, length):
  x_bt = jnp.arange(2 * length).reshape(2, length)
  names = ('batch', 'seq')
  with jax.set_mesh(sharding.make_mesh({'context': ranks})):
    balanced = context.balance(x_bt, *names)
    back = context.restore(balanced, *names)
  np.testing.assert_array_equal(back, x_bt)
  x_bt, balanced = np.asarray(x_bt), np.asarray(balanced)
  size = length // (2 * ranks)
  for rank in range(ranks):
    own = balanced[:, 2 * rank * size : 2 * (rank + 1) * size]
    late = 2 * ranks - 1 - rank
    want = np.concatenate(
      [x_bt[:, n * size : (n + 1) * size] for n in (rank, late)], axis=1
    )
    np.testing.assert_array_equal(own, want)


@pytest.mark.parametrize('ids', DOCUMENTS)
@pytest.mark.parametrize(
  'ranks, gathered', [(2, 16), (8, 16), (8, 1)], ids=['2', '8', '8-scan']
)
def test_kda_layer(monkeypatch, ranks, gathered, ids):
  monkeypatch.setattr(context, '_GATHERED', gathered)
  params = draw(kda_parameters(CONFIG))
  cache = map_tree(lambda x: sample(*x.shape, seed=4), kda_cache(CONFIG, 2))
  x_btd = sample(2, TIME, CONFIG.width)
  run = layer_and_gradients(kda_layer, params, x_btd, ids, cache)
  want = compiled(run(False), params, x_btd, cache)
  got = on_mesh({'context': ranks}, run(True), params, x_btd, cache)
  assert_equal(got, want)


def map_tree(function, tree):
  return jax.tree.map(function, tree)


@pytest.mark.parametrize('ids', DOCUMENTS)
@pytest.mark.parametrize('ranks', [2, 8])
def test_mla_layer(ranks, ids):
  params = draw(mla_parameters(CONFIG))
  x_btd = sample(2, TIME, CONFIG.width)
  run = layer_and_gradients(mla_layer, params, x_btd, ids)
  want = compiled(run(False), params, x_btd, None)
  got = on_mesh({'context': ranks}, run(True), params, x_btd, None)
  assert_equal(got, want)


def test_model_over_data_context_and_expert():
  params, router = random_weights(CONFIG)
  tokens = random_tokens((4, TIME))
  ids = np.concatenate([PACKED, PACKED[::-1]])

  def loss(params):
    h_btd, _ = Model(CONFIG).apply(
      {'params': params}, tokens, router, ids, method='hidden'
    )
    h_btd = jnp.where((ids > 0)[..., None], h_btd, 0)
    return jnp.sum(h_btd * sample(*h_btd.shape, seed=2)), h_btd

  run = jax.grad(loss, has_aux=True)
  want = compiled(run, params)
  sizes = {'data': 2, 'context': 2, 'expert': 2}
  assert_equal(on_mesh(sizes, run, params), want, 1e-11)


def test_lengths_that_cannot_be_cut_stay_whole():
  assert not context.is_split(TIME)
  with jax.set_mesh(sharding.make_mesh({'context': 4})):
    assert context.is_split(TIME, reach=3)
    assert not context.is_split(TIME - 1)
    assert not context.is_split(16, reach=3)  # fragments of two tokens
