"""The chunked loss against float64, its memory, and its mesh behaviour."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from trimoe_jax import losses

B, T, D, A = 2, 26, 8, 33


@pytest.fixture(scope='module')
def batch():
  rng = np.random.default_rng(0)
  return (
    jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32),
    jnp.asarray(rng.normal(size=(D, A)), jnp.float32),
    jnp.asarray(rng.integers(0, A, size=(B, T)), jnp.int32),
    jnp.asarray(rng.random((B, T)) < 0.7),
  )


def dense(hidden_btd, head_da, targets_bt, mask_bt, *, z_loss=0.0):
  """The same sums from all logits at once."""
  logits_bta = hidden_btd @ head_da
  lse_bt = jax.nn.logsumexp(logits_bta, axis=-1)
  hit_bt = jnp.take_along_axis(logits_bta, targets_bt[..., None], -1)[..., 0]
  loss = jnp.sum(mask_bt * (lse_bt - hit_bt))
  return loss, z_loss * jnp.sum(mask_bt * lse_bt**2)


@functools.partial(jax.jit, static_argnames=('chunk', 'z_loss'))
def objective_and_gradients(hidden, head, targets, mask, *, chunk, z_loss):
  def objective(hidden, head):
    sums = losses.cross_entropy(
      hidden, head, targets, mask, chunk=chunk, z_loss=z_loss
    )
    return sums.loss + sums.z, sums

  return jax.value_and_grad(objective, (0, 1), has_aux=True)(hidden, head)


def oracle(batch, z_loss):
  with jax.enable_x64(True):
    hidden, head, targets, mask = (np.asarray(x) for x in batch)
    wide = [jnp.asarray(x, jnp.float64) for x in (hidden, head)]
    value = lambda *x: sum(dense(*x, targets, mask, z_loss=z_loss))
    grads = jax.grad(value, (0, 1))(*wide)
    out = dense(*wide, targets, mask, z_loss=z_loss), grads
    return jax.tree.map(np.asarray, out)


@pytest.mark.parametrize('chunk', [1, 14, 24, 10_000])
def test_values_and_gradients_match_float64(batch, chunk):
  (loss, z), grads = oracle(batch, 1e-2)
  (_, sums), got = objective_and_gradients(*batch, chunk=chunk, z_loss=1e-2)
  np.testing.assert_allclose(sums.loss, loss, rtol=2e-6)
  np.testing.assert_allclose(sums.z, z, rtol=2e-6)
  assert float(sums.tokens) == float(batch[3].sum())
  for g, want in zip(got, grads):
    assert np.linalg.norm(g - want) / np.linalg.norm(want) < 1e-6


def test_float64_passes_through(batch):
  (loss, _), grads = oracle(batch, 0.0)
  with jax.enable_x64(True):
    hidden, head, targets, mask = (np.asarray(x) for x in batch)
    (_, sums), got = objective_and_gradients(
      jnp.asarray(hidden, jnp.float64),
      jnp.asarray(head, jnp.float64),
      targets,
      mask,
      chunk=14,
      z_loss=0.0,
    )
    np.testing.assert_allclose(sums.loss, loss, rtol=1e-13)
    np.testing.assert_allclose(got[1], grads[1], rtol=1e-11, atol=1e-13)


def test_bfloat16_has_float32_logits(batch):
  hidden, head, targets, mask = batch
  hidden = hidden.astype(jnp.bfloat16)
  rounded = head.astype(jnp.bfloat16).astype(jnp.float32)
  want, _ = dense(hidden.astype(jnp.float32), rounded, targets, mask)
  (_, sums), got = objective_and_gradients(
    hidden, head, targets, mask, chunk=14, z_loss=0.0
  )
  # The inputs are rounded, the products are not: float32 accuracy remains.
  np.testing.assert_allclose(sums.loss, want, rtol=2e-6)
  assert [g.dtype for g in got] == [jnp.bfloat16, jnp.float32]


def test_masked_tokens_count_for_nothing(batch):
  hidden, head, targets, mask = batch
  poisoned = jnp.where(mask[..., None], hidden, jnp.nan)
  wild = jnp.where(mask, targets, -1)
  want = objective_and_gradients(*batch, chunk=14, z_loss=1e-2)
  got = objective_and_gradients(
    poisoned, head, wild, mask, chunk=14, z_loss=1e-2
  )
  chex.assert_trees_all_equal(got, want)
  assert not jnp.any(got[1][0][~mask])


def test_weights_scale_and_an_empty_mask_is_zero(batch):
  hidden, head, targets, mask = batch
  half = objective_and_gradients(
    hidden, head, targets, mask * 0.5, chunk=14, z_loss=1e-2
  )
  whole = objective_and_gradients(*batch, chunk=14, z_loss=1e-2)
  chex.assert_trees_all_close(
    half, jax.tree.map(lambda x: x / 2, whole), rtol=1e-6
  )
  empty = objective_and_gradients(
    hidden, head, targets, mask * 0.0, chunk=14, z_loss=1e-2
  )
  assert not any(jnp.any(x) for x in jax.tree.leaves(empty))


def test_token_losses_and_predictions(batch):
  hidden, head, targets, mask = batch
  nll_bt = losses.token_losses(hidden, head, targets, chunk=14)
  chex.assert_shape(nll_bt, (B, T))
  loss, _ = dense(hidden, head, targets, mask)
  np.testing.assert_allclose(jnp.sum(nll_bt * mask), loss, rtol=1e-5)
  predicted = losses.token_predictions(hidden, head, chunk=14)
  chex.assert_trees_all_equal(
    predicted, jnp.argmax(hidden @ head, -1).astype(jnp.int32)
  )
  ties = losses.token_predictions(hidden, jnp.zeros_like(head))
  assert not jnp.any(ties)


def test_the_logits_of_a_long_sequence_never_exist():
  time, width, vocabulary = 4096, 16, 2048
  shapes = (
    jax.ShapeDtypeStruct((1, time, width), jnp.float32),
    jax.ShapeDtypeStruct((width, vocabulary), jnp.float32),
    jax.ShapeDtypeStruct((1, time), jnp.int32),
    jax.ShapeDtypeStruct((1, time), jnp.bool_),
  )
  lowered = objective_and_gradients.lower(*shapes, chunk=128, z_loss=1e-4)
  used = lowered.compile().memory_analysis().temp_size_in_bytes
  all_logits = time * vocabulary * 4
  assert used < all_logits / 6, used


def test_explicit_mesh_gives_the_same(batch):
  names = ('data', 'context', 'tensor')
  mesh = jax.make_mesh((2, 2, 2), names, axis_types=(AxisType.Explicit,) * 3)
  hidden, head, targets, mask = batch
  hidden, targets, mask = (x[:, :24] for x in (hidden, targets, mask))
  head = head[:, :32]
  targets = targets % 32
  want = objective_and_gradients(
    hidden, head, targets, mask, chunk=12, z_loss=1e-2
  )
  with jax.set_mesh(mesh):
    tokens = NamedSharding(mesh, PartitionSpec('data', 'context'))
    columns = NamedSharding(mesh, PartitionSpec('data', 'tensor'))
    inputs = jax.device_put(
      (hidden, head, targets, mask), (tokens, columns, tokens, tokens)
    )
    got = objective_and_gradients(*inputs, chunk=12, z_loss=1e-2)
    predicted = jax.jit(losses.token_predictions)(*inputs[:2])
  assert got[1][1].sharding.spec == PartitionSpec('data', 'tensor')
  got = jax.tree.map(np.asarray, got)
  chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-5)
  np.testing.assert_array_equal(
    predicted, losses.token_predictions(hidden, head)
  )


def test_a_chunk_has_at_least_one_token(batch):
  with pytest.raises(ValueError, match='chunk=0'):
    losses.cross_entropy(*batch, chunk=0)
