"""All-to-all of nothing but copies, with `ragged_all_to_all` acted out.

CPUs have no such collective, so its definition is spelled out by an all-gather.
"""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_expert_dispatch as dispatch_test
from absl.testing import absltest, parameterized

from pallas_kernels import tpu_schedule
from pallas_kernels.grouped_matmul import grouped_matmul
from trimoe_jax.parallel import expert


def acted_out(operand, output, start, sent, landing, received, *, axis_name):
  """`jax.lax.ragged_all_to_all` by its documentation."""
  del received
  everyone = jax.lax.all_gather((operand, start, sent, landing), axis_name)
  me = jax.lax.axis_index(axis_name)
  row = jnp.arange(output.shape[0])
  for source in range(jax.lax.axis_size(axis_name)):
    rows, start, sent, landing = (x[source] for x in everyone)
    here = row - landing[me]
    inside = (here >= 0) & (here < sent[me])
    got = rows.at[start[me] + here].get(mode='clip')
    inside = inside.reshape(-1, *(1,) * (output.ndim - 1))
    output = jnp.where(inside, got, output)
  return output


def compiled(ranks, **kwargs):
  """`dispatch_test.compiled` of 'all_to_all' with the ragged collective."""
  with (
    mock.patch.object(expert, '_has_ragged', lambda: True),
    mock.patch.object(jax.lax, 'ragged_all_to_all', acted_out),
  ):
    function, split = dispatch_test.program.__wrapped__(
      'all_to_all', ranks, **kwargs
    )
  return lambda *args: jax.tree.map(
    np.asarray, function(*jax.device_put(args, split))
  )


@absltest.skipIf(jax.device_count() < 8, 'tests/conftest.py fakes 8 devices')
class RaggedTest(parameterized.TestCase):
  def test_values_and_all_gradients(self):
    self.check(8)

  @parameterized.parameters(1, 2, 4)
  @pytest.mark.slow
  def test_fewer_ranks(self, ranks):
    self.check(ranks)

  def check(self, ranks):
    run = compiled(ranks)
    cases = {
      'random': dispatch_test.random_routes(),
      'one expert': np.tile(np.int32([9, 2, 3]), (dispatch_test.TOKENS, 1)),
      'first experts only': dispatch_test.random_routes(experts=5),
    }
    for name, indices_tj in cases.items():
      with self.subTest(name):
        args = dispatch_test.arguments(indices_tj)
        u_tl, dropped, gradients = run(*args)
        wanted = dispatch_test.want(*args)
        dispatch_test.assert_close((u_tl, gradients), wanted)
        np.testing.assert_array_equal(dropped, np.zeros(ranks))
        self.assertFalse(u_tl[~args[4]].any())

  def test_capacity_drops_the_same_copies_as_padded_buffers(self):
    indices_tj = dispatch_test.random_routes(experts=6)
    args = dispatch_test.arguments(indices_tj)
    got = compiled(4, capacity=1.0)(*args)
    padded = dispatch_test.compiled('all_to_all', 4, capacity=1.0)(*args)
    self.assertGreater(got[1].sum(), 0)
    jax.tree.map(np.testing.assert_array_equal, got[1], padded[1])
    dispatch_test.assert_close(got, padded)


@pytest.mark.tpu_compile
def test_libtpu_sends_ragged_copies():
  devices = np.array(tpu_schedule.devices('v6e', dump=False))
  mesh = jax.sharding.Mesh(devices, 'expert')
  split = jax.NamedSharding(mesh, jax.P('expert'))
  tokens, experts, width = 64 * devices.size, 8 * devices.size, 128

  def local(z_tl, weights_elf, indices_tj, weights_tj, mask_t):
    return expert.run_experts(
      lambda w, z, sizes: grouped_matmul(z, w, sizes),
      weights_elf,
      z_tl,
      expert.Routes(indices_tj, weights_tj, mask_t),
      axis='expert',
      strategy='all_to_all',
    )[0]

  layer = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=jax.P('expert'),
    out_specs=jax.P('expert'),
    check_vma=False,
  )
  shape = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(
    shape, dtype, sharding=split
  )
  with jax.set_mesh(mesh):
    lowered = jax.jit(layer).lower(
      shape(tokens, width),
      shape(experts, width, width),
      shape(tokens, 2, dtype=jnp.int32),
      shape(tokens, 2, dtype=jnp.float32),
      shape(tokens, dtype=bool),
    )
  text = lowered.compile().as_text()
  assert 'ragged-all-to-all(' in text
  assert ' all-to-all(' not in text


if __name__ == '__main__':
  absltest.main()
