"""Blockwise attention against a dense float64 form, and its isolation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels.testing import relative_rms
from trimoe_jax.model.attention import causal_attention

HEADS, KEY, VALUE, SCALE = 2, 6, 4, 0.4
BLOCK = 8
# Time 21 makes three blocks of seven; 37 makes five with padding at the end.
PACKED = np.array(
  [
    [1] * 9 + [2] * 2 + [3] * 17 + [0] * 9,
    [0] * 3 + [1] * 20 + [0] * 2 + [1] * 5 + [2] * 7,
  ],
  np.int32,
)


def sample(time, dtype='float32', batch=2, seed=0):
  """(q, k, v, cotangent of the output)."""
  rng = np.random.default_rng(seed)
  widths = KEY, KEY, VALUE, VALUE
  arrays = [rng.standard_normal((batch, time, HEADS, w)) for w in widths]
  q, k, v, do = (jnp.asarray(x, dtype) for x in arrays)
  return q, k, v, do.astype(jnp.promote_types(dtype, 'float32'))


def dense(q_bthk, k_bshk, v_bshv, segment_ids, block_size):
  """One softmax over all pairs of times."""
  del block_size
  time = np.arange(q_bthk.shape[1])
  visible = np.broadcast_to(time[:, None] >= time, (2, 1, time.size, time.size))
  if segment_ids is not None:
    ids = np.asarray(segment_ids)[:, None]
    same = ids[..., None] == ids[..., None, :]
    visible = visible & same & (ids != 0)[..., None]
  logits_bhts = SCALE * jnp.einsum('bthk,bshk->bhts', q_bthk, k_bshk)
  logits_bhts = jnp.where(visible, logits_bhts, -1e30)
  p_bhts = jnp.where(visible, jax.nn.softmax(logits_bhts, axis=-1), 0)
  return jnp.einsum('bhts,bshv->bthv', p_bhts, v_bshv)


def blockwise(q_bthk, k_bshk, v_bshv, segment_ids, block_size):
  return causal_attention(
    q_bthk,
    k_bshk,
    v_bshv,
    scale=SCALE,
    segment_ids=segment_ids,
    block_size=block_size,
  )


@functools.partial(jax.jit, static_argnames='block_size')
def outputs_and_gradients(arrays, segment_ids=None, block_size=BLOCK):
  """(out, gradients of q, k and v) of the blockwise form."""
  return pulled(blockwise, arrays, segment_ids, block_size)


def pulled(function, arrays, segment_ids, block_size):
  *arrays, cotangent = arrays
  run = lambda *a: function(*a, segment_ids, block_size)
  out, pull = jax.vjp(run, *arrays)
  return out, pull(cotangent)


def oracle(arrays, segment_ids=None):
  with jax.enable_x64(True):
    exact = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
    return jax.jit(lambda a: pulled(dense, a, segment_ids, None))(exact)


class OracleTest(parameterized.TestCase):
  def assert_close(self, got, want, tolerance):
    self.assertLess(relative_rms(got[0], want[0]), tolerance)
    for one, other in zip(got[1], want[1]):
      self.assertLess(relative_rms(one, other), tolerance)

  @parameterized.parameters((1, BLOCK), (21, BLOCK), (37, BLOCK), (21, 64))
  def test_one_document(self, time, block_size):
    arrays = sample(time)
    got = outputs_and_gradients(arrays, block_size=block_size)
    self.assertEqual(got[0].dtype, jnp.float32)
    self.assertEqual(got[0].shape, (2, time, HEADS, VALUE))
    self.assert_close(got, oracle(arrays), 1e-6)

  @parameterized.parameters(BLOCK, 3, 64)
  def test_packed_documents(self, block_size):
    arrays = sample(37)
    got = outputs_and_gradients(arrays, PACKED, block_size=block_size)
    # The oracle compares ids, and the last row's 1s are one document there too.
    self.assert_close(got, oracle(arrays, PACKED), 1e-6)
    for x in (got[0], *got[1]):
      np.testing.assert_array_equal(x[PACKED == 0], 0)

  def test_bfloat16_operands_give_a_float32_output(self):
    arrays = sample(37, 'bfloat16')
    out, gradients = outputs_and_gradients(arrays, PACKED)
    want, want_gradients = oracle(arrays, PACKED)
    self.assertEqual(out.dtype, jnp.float32)
    self.assertLess(relative_rms(out, want), 4e-3)
    # Not merely a rounded result in a wider dtype.
    self.assertTrue(bool(jnp.any(out != out.astype(jnp.bfloat16))))
    for one, other in zip(gradients, want_gradients):
      self.assertEqual(one.dtype, jnp.bfloat16)
      self.assertLess(relative_rms(one, other), 8e-3)

  def test_float64(self):
    with jax.enable_x64(True):
      arrays = sample(21, 'float64')
      got = outputs_and_gradients(arrays)
    self.assertEqual(got[0].dtype, np.float64)
    self.assert_close(got, oracle(arrays), 1e-13)

  def test_large_scores_stay_finite(self):
    q, k, v, do = sample(21)
    got = outputs_and_gradients((100 * q, 100 * k, v, do))
    for x in jax.tree.leaves(got):
      self.assertTrue(bool(jnp.all(jnp.isfinite(x))))


class IsolationTest(parameterized.TestCase):
  def test_the_future_changes_nothing(self):
    q, k, v, do = sample(37)
    first = outputs_and_gradients((q, k, v, do))[0]
    for t in (6, 20):
      changed = [x.at[:, t:].add(1.0) for x in (q, k, v)]
      second = outputs_and_gradients((*changed, do))[0]
      np.testing.assert_array_equal(second[:, :t], first[:, :t])
      self.assertFalse(bool(jnp.any(jnp.all(second == first, axis=-1)[:, t:])))

  @parameterized.parameters(BLOCK, 64)
  def test_documents_do_not_see_each_other(self, block_size):
    arrays = sample(37)
    run = functools.partial(
      outputs_and_gradients, segment_ids=PACKED, block_size=block_size
    )
    first = run(arrays)
    second_document = (PACKED == 2)[..., None, None]
    changed = [jnp.where(second_document, x + 3, x) for x in arrays]
    second = run(changed)
    kept = PACKED != 2
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second)):
      np.testing.assert_array_equal(one[kept], other[kept])

  @parameterized.parameters(BLOCK, 64)
  def test_padding_may_hold_anything(self, block_size):
    arrays = sample(37)
    run = functools.partial(
      outputs_and_gradients, segment_ids=PACKED, block_size=block_size
    )
    padding = (PACKED == 0)[..., None, None]
    clean = run(arrays)
    for poison in (jnp.nan, jnp.inf):
      dirty = run([jnp.where(padding, poison, x) for x in arrays])
      jax.tree.map(np.testing.assert_array_equal, dirty, clean)

  def test_a_document_equals_itself_alone(self):
    arrays = sample(37)
    packed = outputs_and_gradients(arrays, PACKED)
    alone = [x[:1, 11:28] for x in arrays]  # row 0, document 3
    want = outputs_and_gradients(alone)
    for one, other in zip(jax.tree.leaves(packed), jax.tree.leaves(want)):
      self.assertLess(relative_rms(one[:1, 11:28], other), 1e-6)

  def test_an_id_that_returns_is_a_new_document(self):
    arrays = sample(21)
    fresh = np.repeat([[1, 2, 3]], 7, axis=1).repeat(2, axis=0)
    reused = np.where(fresh == 3, 1, fresh)
    got = outputs_and_gradients(arrays, reused.astype(np.int32))
    want = outputs_and_gradients(arrays, fresh.astype(np.int32))
    jax.tree.map(np.testing.assert_array_equal, got, want)

  def test_only_padding(self):
    got = outputs_and_gradients(sample(21), np.zeros((2, 21), np.int32))
    for x in jax.tree.leaves(got):
      np.testing.assert_array_equal(x, 0)


class CostTest(absltest.TestCase):
  def test_no_array_of_time_squared(self):
    time = 4096
    shape = lambda w: jax.ShapeDtypeStruct((1, time, 1, w), jnp.float32)
    arrays = shape(16), shape(16), shape(8), shape(8)
    ids = jax.ShapeDtypeStruct((1, time), jnp.int32)
    lowered = outputs_and_gradients.lower(arrays, ids, block_size=256)
    temporary = lowered.compile().memory_analysis().temp_size_in_bytes
    self.assertLess(temporary, time * time * 4 / 16)

  def test_remat_gives_the_same_bits(self):
    q, k, v, _ = sample(21)
    loss = lambda q: jnp.sum(jnp.sin(blockwise(q, k, v, None, BLOCK)))
    plain, remat = jax.grad(loss), jax.grad(jax.checkpoint(loss))
    np.testing.assert_array_equal(jax.jit(plain)(q), jax.jit(remat)(q))


class MistakeTest(parameterized.TestCase):
  @parameterized.parameters(
    ({'k': (2, 5, 1, 6)}, 'repeat keys'),
    ({'v': (2, 4, 2, 4)}, 'batch, time and heads'),
    ({'ids': (2, 4)}, 'one id for each row'),
  )
  def test_shapes(self, changed, message):
    shapes = {
      'q': (2, 5, 2, 6),
      'k': (2, 5, 2, 6),
      'v': (2, 5, 2, 4),
      'ids': (2, 5),
    } | changed
    arrays = [jnp.ones(shapes[n]) for n in ('q', 'k', 'v')]
    ids = jnp.ones(shapes['ids'], jnp.int32)
    with self.assertRaisesRegex(ValueError, message):
      blockwise(*arrays, ids, BLOCK)

  def test_other_mistakes(self):
    q, k, v, _ = sample(5)
    with self.assertRaisesRegex(TypeError, 'integers'):
      blockwise(q, k, v, jnp.ones((2, 5)), BLOCK)
    with self.assertRaisesRegex(ValueError, 'block_size=0'):
      blockwise(q, k, v, None, 0)
    with self.assertRaisesRegex(ValueError, 'implementation'):
      causal_attention(q, k, v, scale=1.0, implementation='flash')
    for name, reason in (('splash', 'a TPU kernel'), ('cudnn', 'for GPUs')):
      with self.assertRaisesRegex(NotImplementedError, reason):
        causal_attention(q, k, v, scale=1.0, implementation=name)

  def test_no_time(self):
    q, k, v, _ = sample(0)
    self.assertEqual(blockwise(q, k, v, None, BLOCK).shape, (2, 0, HEADS, 4))


if __name__ == '__main__':
  absltest.main()
