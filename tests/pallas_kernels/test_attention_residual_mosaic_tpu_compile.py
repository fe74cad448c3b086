"""The TPU depth mix by the TPU compiler: chips, budgets and meshes."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels import tpu_schedule
from pallas_kernels.attention_residual import mix, tpu_bench

# Bundles of (forward, backward) with their iterations, a register of the 9
# sources of width 7168. A kernel may grow by 5 % of these; lower a number when
# the kernel gets faster.
BUDGETS = {
  ('v6e', None): (2.66, 3.95),
  ('v6e', 'masked'): (2.75, 4.34),
  ('v6e', 'normalized'): (2.93, 5.93),
  ('v5e', None): (2.69, 3.96),
  ('v5p', None): (1.36, 2.03),
  ('tpu7x', None): (2.67, 3.97),
}
TOKENS = 512


@pytest.mark.tpu_compile
@pytest.mark.parametrize('case', BUDGETS, ids=lambda c: f'{c[0]}-{c[1]}')
def test_bundles_stay_within_the_budget(case):
  chip, feature = case
  features = {feature: True} if feature else {}
  rows, schedule = tpu_bench.measure(chip, tokens=TOKENS, **features)
  for row, budget in zip(rows, BUDGETS[case]):
    message = f'{row["pass"]}: {row["bundles"]:.2f} bundles, budget {budget}'
    assert row['bundles'] <= 1.05 * budget, message
    assert row['vmem_mb'] < 24
  # Saved scalars, cotangents of the weights and two cores' shares of the
  # gradients of vectors; no array like a source.
  assert schedule.temporary_bytes < TOKENS * 7168 * 2 / 4


@pytest.mark.tpu_compile
def test_kernel_and_gradient_in_a_sharded_region():
  """Varying axes are checked; float32 sources and ragged blocks compile."""
  mesh = jax.sharding.Mesh(tpu_schedule.devices('v6e'), ('data',))
  rows, whole = PartitionSpec(None, 'data'), PartitionSpec()

  @functools.partial(
    jax.shard_map, mesh=mesh, in_specs=(rows, whole), out_specs=rows
  )
  def local(sources, query):
    query = jax.lax.pcast(query, 'data', to='varying')
    loss = lambda x: jnp.sum(mix(x, query, query) ** 2)
    return jax.grad(loss)(sources)

  def shape(size, spec):
    where = jax.sharding.NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(size, jnp.float32, sharding=where)

  device = mesh.devices.flat[0]
  # A trace is for the device of the abstract mesh in scope.
  abstract = tpu_schedule.abstract_mesh(device, (4,), ('data',))
  with jax.sharding.use_abstract_mesh(abstract):
    lowered = jax.jit(local).lower(
      shape((3, 4 * 37, 256), rows), shape((256,), whole)
    )
  assert 'depth_mix_gradient' in lowered.compile().as_text()
