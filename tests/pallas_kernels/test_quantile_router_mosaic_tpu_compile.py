"""The TPU routing kernel by the TPU compiler: chips, budgets and meshes."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels import tpu_schedule
from pallas_kernels.quantile_router import Statistics, route, tpu_bench

# Bundles of the kernel's code, loops once; 896 experts, top 16. A kernel may
# grow by 5 % of these; lower a number when the kernel gets faster.
BUDGETS = {
  ('v6e', None): 2569,
  ('v6e', 'log_edges'): 3858,
  ('v6e', 'uniform'): 3681,
  ('v5e', 'log_edges'): 4495,
  ('v5p', 'log_edges'): 4666,
  ('tpu7x', 'log_edges'): 3898,
}
TOKENS = 2048


@pytest.mark.tpu_compile
@pytest.mark.parametrize('case', BUDGETS, ids=lambda c: f'{c[0]}-{c[1]}')
def test_bundles_stay_within_the_budget(case):
  chip, estimator = case
  row, schedule = tpu_bench.measure(chip, estimator, tokens=TOKENS)
  bundles = schedule.program('quantile_router').bundles
  budget = BUDGETS[case]
  assert bundles <= 1.05 * budget, f'{bundles} bundles, budget {budget}'
  assert row['vmem_mb'] < 16
  # The counts of two cores before they are added, and little else: no array
  # of the size of the logits.
  assert schedule.temporary_bytes < TOKENS * 896 * 4 / 2


@pytest.mark.tpu_compile
def test_kernel_and_gradient_in_a_sharded_region():
  """Counts of shards are summed outside; varying axes are checked."""
  mesh = jax.sharding.Mesh(tpu_schedule.devices('v6e'), ('data',))
  rows, whole = PartitionSpec('data'), PartitionSpec()

  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(rows, whole, whole),
    out_specs=(rows, rows),
  )
  def local(logits, bias, ends):
    stats = Statistics(ends[0], ends[1], 33, 'log_edges')

    def loss(x):
      routing = route(x, bias, top_k=4, statistics=stats)
      return jnp.sum(routing.weights**2), routing.counts

    gradient, counts = jax.grad(loss, has_aux=True)(logits)
    return gradient, counts[None]

  def shape(size, spec):
    where = jax.sharding.NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(size, jnp.float32, sharding=where)

  given = shape((1024, 200), rows), shape((200,), whole), shape((2,), whole)
  device = mesh.devices.flat[0]
  # A trace is for the device of the abstract mesh in scope.
  abstract = tpu_schedule.abstract_mesh(device, (4,), ('data',))
  with jax.sharding.use_abstract_mesh(abstract):
    lowered = jax.jit(local).lower(*given)
  assert 'quantile_router' in lowered.compile().as_text()
