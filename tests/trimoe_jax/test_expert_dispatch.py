"""Dispatch to the experts of 1 to 8 devices against all experts on one."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P
from small_model import FAST_COMPILE

from pallas_kernels.grouped_matmul import grouped_matmul
from trimoe_jax import sharding
from trimoe_jax.parallel import expert
from trimoe_jax.parallel.expert import Routes, run_experts

EXPERTS, SLOTS, WIDTH, HIDDEN = 16, 3, 8, 12
TOKENS = 8 * 13  # 13 on each of eight devices, a multiple of nothing
STRATEGIES = ('replicated', 'ring', 'all_to_all')


def run_rows(experts, z_gl, group_sizes_e):
  h_gf = jnp.tanh(grouped_matmul(z_gl, experts['up'], group_sizes_e))
  return grouped_matmul(h_gf, experts['down'], group_sizes_e)


@functools.cache
def program(strategy, ranks, slots=SLOTS, capacity=None, tensor=1):
  """The compiled layer of `compiled`, and how its arguments are laid out."""
  mesh = sharding.make_mesh({'expert': ranks, 'tensor': tensor})

  def local(weights_tj, z_tl, experts, indices_tj, mask_t):
    u_tl, dropped = run_experts(
      run_rows,
      experts,
      z_tl,
      Routes(indices_tj, weights_tj, mask_t),
      axis='expert',
      shared='tensor',
      strategy=strategy,
      capacity=capacity,
    )
    return u_tl, dropped[None]

  spread = jax.shard_map(
    local, in_specs=P('expert'), out_specs=P('expert'), check_vma=False
  )

  def run(weights_tj, z_tl, experts, indices_tj, mask_t, du_tl):
    u_tl, pull, dropped = jax.vjp(
      lambda *args: spread(*args, indices_tj, mask_t),
      *(weights_tj, z_tl, experts),
      has_aux=True,
    )
    return u_tl, dropped, pull(du_tl)

  split = jax.NamedSharding(mesh, P('expert'))
  with jax.set_mesh(mesh):
    shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split),
      arguments(random_routes(slots=slots)),
    )
    return jax.jit(run).lower(*shapes).compile(FAST_COMPILE), split


def compiled(*args, **kwargs):
  """(u, dropped of each rank, gradients of weights, tokens and experts)."""
  function, split = program(*args, **kwargs)
  return lambda *args: jax.tree.map(
    np.asarray, function(*jax.device_put(args, split))
  )


@jax.jit
def want(weights_tj, z_tl, experts, indices_tj, mask_t, du_tl):
  """The same of all experts on every token."""

  def dense(weights_tj, z_tl, experts):
    h_tef = jnp.tanh(jnp.einsum('tl,elf->tef', z_tl, experts['up']))
    y_tel = jnp.einsum('tef,efl->tel', h_tef, experts['down'])
    y_tjl = jnp.take_along_axis(y_tel, indices_tj[..., None], axis=1)
    return jnp.einsum('tj,tjl->tl', weights_tj * mask_t[:, None], y_tjl)

  u_tl, pull = jax.vjp(dense, weights_tj, z_tl, experts)
  return u_tl, pull(du_tl)


def random_routes(experts=EXPERTS, slots=SLOTS, seed=0):
  """Distinct experts of every token, the first `experts` of all."""
  rng = np.random.default_rng(seed)
  noise = rng.standard_normal((TOKENS, experts))
  return np.argsort(noise, axis=1)[:, :slots].astype(np.int32)


def arguments(indices_tj):
  rng = np.random.default_rng(1)
  draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  mask_t = rng.random(TOKENS) > 0.1
  experts = {
    'up': draw(EXPERTS, WIDTH, HIDDEN),
    'down': draw(EXPERTS, HIDDEN, WIDTH),
  }
  weights_tj = rng.random(indices_tj.shape).astype(np.float32)
  z_tl, du_tl = draw(TOKENS, WIDTH), draw(TOKENS, WIDTH)
  return weights_tj, z_tl, experts, indices_tj, mask_t, du_tl


def assert_close(got, wanted):
  def check(a, b):
    scale = np.abs(b).max()
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * scale)

  jax.tree.map(check, got, jax.tree.map(np.asarray, wanted))


@absltest.skipIf(jax.device_count() < 8, 'tests/conftest.py fakes 8 devices')
class DispatchTest(parameterized.TestCase):
  @parameterized.product(strategy=STRATEGIES, ranks=(1, 2, 4, 8))
  def test_values_and_all_gradients(self, strategy, ranks):
    cases = {
      'random': random_routes(),
      'one expert': np.tile(np.int32([9, 2, 3]), (TOKENS, 1)),
      'first experts only': random_routes(experts=5),
    }
    for name, indices_tj in cases.items():
      with self.subTest(name):
        args = arguments(indices_tj)
        u_tl, dropped, gradients = compiled(strategy, ranks)(*args)
        assert_close((u_tl, gradients), want(*args))
        np.testing.assert_array_equal(dropped, np.zeros(ranks))
        idle = np.setdiff1d(np.arange(EXPERTS), indices_tj)
        for leaf in jax.tree.leaves(gradients[2]):
          np.testing.assert_array_equal(leaf[idle], 0)
        self.assertFalse(u_tl[~args[4]].any())

  @parameterized.parameters(*STRATEGIES)
  def test_devices_with_the_same_tokens_share_them(self, strategy):
    args = arguments(random_routes())
    u_tl, dropped, gradients = compiled(strategy, 2, tensor=2)(*args)
    assert_close((u_tl, gradients), want(*args))
    np.testing.assert_array_equal(dropped, np.zeros(2))
    # Each has rows for its part of the tokens only.
    size = lambda **sizes: program(strategy, 2, **sizes)[0].memory_analysis()
    alone, both = size().temp_size_in_bytes, size(tensor=2).temp_size_in_bytes
    self.assertLess(both, 0.8 * alone)

  @parameterized.parameters('ring', 'all_to_all')
  def test_one_slot(self, strategy):
    """All tokens to one expert, whose rank then has every row of all."""
    args = arguments(np.full((TOKENS, 1), 6, np.int32))
    u_tl, _, gradients = compiled(strategy, 4, slots=1)(*args)
    assert_close((u_tl, gradients), want(*args))

  @parameterized.parameters('random', 'one rank')
  def test_capacity(self, routes):
    """Late copies of a rank are dropped: counted, zero, zero gradients."""
    ranks, capacity = 4, 1.0
    indices_tj = random_routes()
    if routes == 'one rank':
      indices_tj = np.tile(np.int32([4, 7, 6]), (TOKENS, 1))
    args = arguments(indices_tj)
    kept_tj, lost = kept_copies(indices_tj, args[4], ranks, capacity)
    got = compiled('all_to_all', ranks, capacity=capacity)(*args)
    u_tl, dropped, (dweights_tj, dz_tl, dexperts) = got
    np.testing.assert_array_equal(dropped, lost)
    self.assertGreater(dropped.sum(), 0)
    u, (dweights, dz, dexpert) = want(args[0] * kept_tj, *args[1:])
    wanted = u, dweights * kept_tj, dz, dexpert
    assert_close((u_tl, dweights_tj, dz_tl, dexperts), wanted)
    np.testing.assert_array_equal(dweights_tj[~kept_tj], 0)
    gone_t = ~kept_tj.any(axis=1)
    np.testing.assert_array_equal(u_tl[gone_t], 0)
    np.testing.assert_array_equal(dz_tl[gone_t], 0)
    if routes == 'one rank':
      self.assertGreater(gone_t.sum(), TOKENS // 2)

  @parameterized.parameters(*STRATEGIES)
  def test_no_array_of_groups_by_rows(self, strategy):
    """No array is larger than the rows that a device may have to hold."""
    function, _ = program(strategy, 2)
    rows = TOKENS * SLOTS
    shapes = re.findall(r'\b[a-z]\d+\[([\d,]+)\]', function.as_text())
    sizes = [math.prod(map(int, shape.split(','))) for shape in shapes]
    self.assertLessEqual(max(sizes), rows * HIDDEN)
    one_dense = EXPERTS // 2 * rows * HIDDEN * 4
    temporaries = function.memory_analysis().temp_size_in_bytes
    self.assertLess(temporaries, one_dense)

  def test_unknown_strategy(self):
    with self.assertRaisesRegex(ValueError, "choose 'auto', 'replicated'"):
      compiled('broadcast', 1)

  def test_auto(self):
    chosen = [expert.choose('auto', ranks) for ranks in (1, 2, 16, 32)]
    self.assertEqual(chosen, ['replicated', 'ring', 'ring', 'all_to_all'])
    self.assertEqual(expert.choose('ring', 64), 'ring')


def kept_copies(indices_tj, mask_t, ranks, capacity):
  """Which copies find room when a rank's buffer fills in token order."""
  tokens = TOKENS // ranks
  room = int(np.ceil(capacity * tokens * SLOTS / ranks))
  kept_tj = np.zeros(indices_tj.shape, bool)
  lost = []
  for shard in np.split(np.arange(TOKENS), ranks):
    count = np.zeros(ranks, int)
    for t in shard[mask_t[shard]]:
      for j in range(SLOTS):
        rank = indices_tj[t, j] // (EXPERTS // ranks)
        kept_tj[t, j] = count[rank] < room
        count[rank] += 1
    lost.append(np.maximum(0, count - room).sum())
  return kept_tj, lost


if __name__ == '__main__':
  absltest.main()
