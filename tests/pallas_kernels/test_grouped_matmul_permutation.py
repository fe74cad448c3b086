"""Sorting rows by expert, dispatch and combine, alone and around experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels.grouped_matmul import (
  combine,
  dispatch,
  grouped_matmul,
  sort_rows,
)
from pallas_kernels.testing import assert_close, relative_rms

EXPERTS, WIDTH = 6, 8


def choices(tokens, top_k, experts=EXPERTS, seed=0):
  """int32 [tokens, top_k], every token's experts distinct."""
  scores = np.random.default_rng(seed).random((tokens, experts))
  return jnp.asarray(np.argsort(scores, axis=1)[:, :top_k], jnp.int32)


def sample(tokens, top_k, dtype=jnp.float32, seed=1):
  """(x, expert weights, mixing weights, cotangent)."""
  rng = np.random.default_rng(seed)
  return (
    jnp.asarray(rng.standard_normal((tokens, WIDTH)), dtype),
    jnp.asarray(rng.standard_normal((EXPERTS, WIDTH, WIDTH)), dtype),
    jnp.asarray(rng.random((tokens, top_k)), jnp.float32),
    jnp.asarray(rng.standard_normal((tokens, WIDTH)), dtype),
  )


def through_experts(x_td, experts, weights_tj, routes):
  """Dispatch, a linear layer and a nonlinearity an expert, combine."""
  indices_tj, mask_t = routes
  rows = sort_rows(indices_tj, EXPERTS, mask_t)
  y_gd = grouped_matmul(dispatch(x_td, rows), experts, rows.group_sizes)
  return combine(jnp.tanh(y_gd), weights_tj, rows)


def dense(x_td, experts, weights_tj, routes):
  """The same by running every expert on every token."""
  indices_tj, mask_t = routes
  x_td = jnp.where(mask_t[:, None], x_td, 0)
  y_etd = jnp.tanh(jnp.einsum('td,edf->etf', x_td, experts))
  chosen_tje = (indices_tj[..., None] == jnp.arange(EXPERTS)) & mask_t[
    :, None, None
  ]
  share_te = jnp.sum(jnp.where(chosen_tje, weights_tj[..., None], 0), axis=1)
  return jnp.einsum('te,etf->tf', share_te, y_etd)


@functools.partial(jax.jit, static_argnums=0)
def outputs_and_gradients(function, arrays, routes):
  *arrays, cotangent = arrays
  out, pull = jax.vjp(lambda *a: function(*a, routes), *arrays)
  return out, pull(cotangent.astype(out.dtype))


def oracle(arrays, routes):
  with jax.enable_x64(True):
    exact = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
    return outputs_and_gradients(dense, exact, routes)


class SortTest(parameterized.TestCase):
  @parameterized.parameters((1, 1), (5, 1), (13, 3), (32, 6))
  def test_stable_sort_and_its_inverse(self, tokens, top_k):
    indices = choices(tokens, top_k)
    rows = sort_rows(indices, EXPERTS)
    flat = np.asarray(indices).reshape(-1)
    np.testing.assert_array_equal(rows.order, np.argsort(flat, kind='stable'))
    np.testing.assert_array_equal(
      rows.group_sizes, np.bincount(flat, minlength=EXPERTS)
    )
    np.testing.assert_array_equal(
      np.asarray(rows.order)[np.asarray(rows.inverse).reshape(-1)],
      np.arange(flat.size),
    )
    self.assertEqual(rows.inverse.shape, indices.shape)
    for x in rows:
      self.assertEqual(x.dtype, jnp.int32)

  def test_masked_tokens_and_foreign_experts_come_last(self):
    indices = jnp.array([[0, 5], [3, -1], [6, 2], [1, 4]], jnp.int32)
    mask = jnp.array([True, True, True, False])
    rows = sort_rows(indices, EXPERTS, mask)
    np.testing.assert_array_equal(rows.group_sizes, [1, 0, 1, 1, 0, 1])
    np.testing.assert_array_equal(rows.order[:4], [0, 5, 2, 1])
    self.assertCountEqual(np.asarray(rows.order[4:]).tolist(), [3, 4, 6, 7])
    x = jnp.arange(1.0, 5.0)[:, None]
    sent = dispatch(x, rows)
    np.testing.assert_array_equal(sent[:, 0], [1, 3, 2, 1, 0, 0, 0, 0])
    out = combine(jnp.ones((8, 1)), jnp.full((4, 2), 0.5), rows)
    np.testing.assert_array_equal(out[:, 0], [1, 0.5, 0.5, 0])

  @parameterized.parameters(255, 256, 65535, 65536)
  def test_as_many_experts_as_narrow_integers_hold(self, experts):
    # The last of them, and ids that belong to nobody, which come last.
    indices = jnp.array([[experts, experts - 1], [0, experts + 9], [1, -1]])
    rows = sort_rows(indices, experts)
    np.testing.assert_array_equal(rows.order, [2, 4, 1, 0, 3, 5])
    sizes = np.bincount([0, 1, experts - 1], minlength=experts)
    np.testing.assert_array_equal(rows.group_sizes, sizes)

  def test_no_tokens(self):
    rows = sort_rows(jnp.zeros((0, 2), jnp.int32), EXPERTS)
    np.testing.assert_array_equal(rows.group_sizes, 0)
    x, experts, weights, _ = sample(0, 2)
    routes = jnp.zeros((0, 2), jnp.int32), jnp.ones(0, bool)
    out = through_experts(x, experts, weights, routes)
    self.assertEqual(out.shape, (0, WIDTH))

  def test_mistakes(self):
    with self.assertRaisesRegex(ValueError, r'\[T, J\]'):
      sort_rows(jnp.zeros(3, jnp.int32), EXPERTS)
    with self.assertRaisesRegex(TypeError, 'integers'):
      sort_rows(jnp.zeros((3, 2)), EXPERTS)
    with self.assertRaisesRegex(ValueError, 'one entry for each token'):
      sort_rows(jnp.zeros((3, 2), jnp.int32), EXPERTS, jnp.ones(2, bool))


class ExpertsTest(parameterized.TestCase):
  def routes_for(self, load, tokens, top_k):
    if load == 'one':
      return jnp.full((tokens, 1), 2, jnp.int32)
    if load == 'empty':  # only the last three experts are used
      return choices(tokens, top_k, 3) + 3
    return choices(tokens, top_k)

  @parameterized.named_parameters(
    ('uniform', 'uniform', 24, 3),
    ('odd', 'uniform', 37, 2),
    ('all_to_one', 'one', 40, 1),
    ('empty_experts', 'empty', 19, 3),
    ('single_slot', 'uniform', 21, 1),
  )
  def test_equals_the_dense_form(self, load, tokens, top_k):
    arrays = sample(tokens, top_k)
    routes = self.routes_for(load, tokens, top_k), jnp.arange(tokens) % 5 != 3
    got = outputs_and_gradients(through_experts, arrays, routes)
    want = oracle(arrays, routes)
    assert_close(got[0], want[0], 'grouped_matmul', 'out', 'float32')
    for one, other in zip(got[1], want[1]):
      assert_close(one, other, 'grouped_matmul', 'gradient', 'float32')
    used = np.unique(np.asarray(routes[0])[np.asarray(routes[1])])
    unused = np.setdiff1d(np.arange(EXPERTS), used)
    np.testing.assert_array_equal(got[1][1][unused], 0)
    np.testing.assert_array_equal(got[0][~routes[1]], 0)
    np.testing.assert_array_equal(got[1][0][~routes[1]], 0)
    np.testing.assert_array_equal(got[1][2][~routes[1]], 0)

  def test_masked_tokens_may_hold_anything(self):
    x, experts, weights, cotangent = sample(24, 3)
    mask = jnp.arange(24) % 5 != 3
    routes = choices(24, 3), mask
    clean = outputs_and_gradients(
      through_experts, (x, experts, weights, cotangent), routes
    )
    poison = lambda y: jnp.where(mask[:, None], y, jnp.nan)
    dirty = outputs_and_gradients(
      through_experts,
      (poison(x), experts, poison(weights), poison(cotangent)),
      routes,
    )
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)

  def test_bfloat16_sums_in_float32(self):
    tokens, top_k = 64, 4
    rows = sort_rows(choices(tokens, top_k), EXPERTS)
    rng = np.random.default_rng(4)
    y_gd = jnp.asarray(
      rng.standard_normal((tokens * top_k, WIDTH)), jnp.bfloat16
    )
    weights = jnp.asarray(rng.random((tokens, top_k)), jnp.float32)
    run = lambda y, w: combine(y, w, rows)
    out, pull = jax.vjp(run, y_gd, weights)
    dy, dweights = pull(out)
    self.assertEqual([out.dtype, dy.dtype], [jnp.bfloat16] * 2)
    self.assertEqual(dweights.dtype, jnp.float32)
    exact = np.asarray(y_gd, np.float64)[np.asarray(rows.inverse)]
    want = np.einsum('tj,tjd->td', np.asarray(weights, np.float64), exact)
    assert_close(out, want, 'grouped_matmul', 'out', 'bfloat16')
    # One rounding at the end, not one a slot.
    np.testing.assert_array_equal(out, jnp.asarray(want, jnp.bfloat16))
    want = np.einsum('td,tjd->tj', np.asarray(out, np.float64), exact)
    self.assertLess(relative_rms(dweights, want), 1e-6)

  def test_gradients_gather_and_never_scatter(self):
    arrays = sample(24, 3)
    routes = choices(24, 3), jnp.ones(24, bool)
    rows = sort_rows(routes[0], EXPERTS)

    def gradients(x_td, y_gd, weights_tj, rows):
      sent, pull_dispatch = jax.vjp(lambda x: dispatch(x, rows), x_td)
      out, pull_combine = jax.vjp(
        lambda y, w: combine(y, w, rows), y_gd, weights_tj
      )
      return pull_dispatch(sent), pull_combine(out)

    arguments = arrays[0], dispatch(arrays[0], rows), arrays[2], rows
    text = jax.jit(gradients).lower(*arguments).as_text()
    self.assertIn('gather', text)
    self.assertNotIn('scatter', text)

  def test_repeats_are_bitwise_equal(self):
    arrays = sample(24, 3)
    routes = choices(24, 3), jnp.arange(24) % 5 != 3
    first = outputs_and_gradients(through_experts, arrays, routes)
    again = outputs_and_gradients(through_experts, arrays, routes)
    jax.tree.map(np.testing.assert_array_equal, first, again)

  def test_relabelled_experts_change_nothing(self):
    x, experts, weights, cotangent = sample(24, 3)
    indices, mask = choices(24, 3), jnp.ones(24, bool)
    label = jnp.array([3, 5, 0, 1, 4, 2], jnp.int32)
    moved = jnp.zeros_like(experts).at[label].set(experts)
    got = outputs_and_gradients(
      through_experts, (x, moved, weights, cotangent), (label[indices], mask)
    )
    want = outputs_and_gradients(
      through_experts, (x, experts, weights, cotangent), (indices, mask)
    )
    self.assertLess(relative_rms(got[0], want[0]), 1e-6)
    self.assertLess(relative_rms(got[1][0], want[1][0]), 1e-6)
    self.assertLess(relative_rms(got[1][1][label], want[1][1]), 1e-6)


if __name__ == '__main__':
  absltest.main()
