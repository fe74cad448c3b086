"""Packing, causality, expert order and rematerialisation of the whole model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import (
  FAST_COMPILE,
  VOCABULARY,
  random_tokens,
  random_weights,
  small_config,
)

from pallas_kernels.testing import relative_rms
from trimoe_jax.model import router
from trimoe_jax.model.model import Model

CONFIG = small_config(dtype='float32')
# One token after the other: nothing is shared between documents, not even the
# rounding of a running sum of decays.
STEPWISE = dataclasses.replace(
  CONFIG, kda=dataclasses.replace(CONFIG.kda, implementation='reference')
)
TIME = 40
# A packed row: documents of 9, 1, 17 and 8 tokens and 5 of padding.
ENDS = (0, 9, 10, 27, 35)
SEGMENTS = np.repeat([1, 2, 3, 4, 0], [9, 1, 17, 8, 5])[None].astype(np.int32)


@functools.partial(jax.jit, static_argnums=0)
def logits(config, params, state, ids, segment_ids):
  return Model(config).apply(
    {'params': params}, ids, router=state, segment_ids=segment_ids
  )


@functools.cache
def weights():
  return random_weights(CONFIG)


def run(ids, segment_ids=SEGMENTS, params=None, *, state=None, config=CONFIG):
  own, own_state = weights()
  return np.asarray(
    logits(config, params or own, state or own_state, ids, segment_ids)
  )


def test_a_document_in_a_packed_row_is_the_document_alone():
  ids = random_tokens((1, TIME))
  stepwise, chunked = run(ids, config=STEPWISE), run(ids)
  for number, (start, end) in enumerate(zip(ENDS, ENDS[1:]), 1):
    own = SEGMENTS == number
    alone = np.where(own, ids, 0), np.where(own, number, 0)
    got = run(*alone, config=STEPWISE)[:, start:end]
    np.testing.assert_array_equal(got, stepwise[:, start:end])
    got = run(*alone)[:, start:end]
    np.testing.assert_array_equal(got, chunked[:, start:end])


def test_a_document_may_start_anywhere():
  ids = random_tokens((1, TIME))
  packed = run(ids)
  start, end = ENDS[2:4]
  moved, segments = np.zeros((2, 1, TIME), np.int32)
  moved[:, : end - start], segments[:, : end - start] = ids[:, start:end], 1
  got = run(moved, segments)[:, : end - start]
  assert relative_rms(got, packed[:, start:end]) < 1e-5


@pytest.mark.parametrize('at', [0, 8, 9, 12, 26])
def test_a_changed_token_reaches_its_own_document_and_nothing_before(at):
  ids = random_tokens((1, TIME))
  changed = ids.copy()
  changed[0, at] = (ids[0, at] + 1) % VOCABULARY
  before, after = run(ids), run(changed)
  np.testing.assert_array_equal(after[:, :at], before[:, :at])
  before, after = (run(x, config=STEPWISE) for x in (ids, changed))
  own = (SEGMENTS == SEGMENTS[0, at]) & (np.arange(TIME) >= at)
  np.testing.assert_array_equal(after[~own], before[~own])
  assert (after[own] != before[own]).any(axis=-1).all()


def test_what_padding_holds_changes_no_bit():
  params, _ = weights()
  ids = random_tokens((1, TIME)) % (VOCABULARY - 1)
  ids[SEGMENTS == 0] = VOCABULARY - 1
  nothing = params['embedding'].at[VOCABULARY - 1].set(jnp.nan)
  got = run(ids, params=params | {'embedding': nothing})
  real = SEGMENTS > 0
  np.testing.assert_array_equal(got[real], run(ids)[real])


def test_the_order_of_experts_does_not_matter():
  params, state = weights()
  ids = random_tokens((1, TIME))
  order = np.array([3, 5, 0, 1, 4, 2])

  def permuted(path, x):
    keys = [entry.key for entry in path]
    if 'experts' in keys:
      return x[order]
    return x[:, order] if keys[-1] == 'router' else x

  got = run(
    ids,
    params=jax.tree_util.tree_map_with_path(permuted, params),
    state=router.from_bias(state.bias[:, order], CONFIG.router),
  )
  real = SEGMENTS > 0
  assert relative_rms(got[real], run(ids)[real]) < 1e-6


def test_images_are_refused():
  params, state = weights()
  with pytest.raises(ValueError, match='no vision tower'):
    Model(CONFIG).apply(
      {'params': params}, random_tokens((1, 4)), state, images=np.ones(3)
    )


def gradients(remat):
  """Loss, routed loads and gradients of three equal residual blocks."""
  config = small_config(
    layers=3, mla_layers=(1, 2, 3), dense_layers=0, remat=remat
  )
  params, state = random_weights(config)
  ids = random_tokens((2, 12))
  segments = np.repeat([[1, 2, 0]], [5, 6, 1], axis=1).repeat(2, 0)

  def loss(params):
    h, aux = Model(config).apply(
      {'params': params}, ids, state, segments, observe=True, method='hidden'
    )
    total = jnp.sum(jnp.sin(h) * (segments > 0)[..., None])
    return total, aux.router.load

  grad = jax.value_and_grad(loss, has_aux=True)
  return jax.jit(grad, compiler_options=FAST_COMPILE)(params)


def test_rematerialisation_changes_neither_loss_nor_gradients():
  with jax.enable_x64(True):
    (loss, load), want = gradients('none')
    want.pop('head')  # hidden states do not see it
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(want))
    for remat in ('block', 'full'):
      (other_loss, other_load), got = gradients(remat)
      got.pop('head')
      np.testing.assert_allclose(other_loss, loss, rtol=1e-12)
      np.testing.assert_array_equal(other_load, load)
      errors = jax.tree.map(relative_rms, got, want)
      assert max(jax.tree.leaves(errors)) < 1e-11
