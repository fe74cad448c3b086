"""The TPU kernels of KDA by the TPU compiler: chips and bundle budgets."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import tpu_schedule
from pallas_kernels.kda import arg_specs, kda, tpu_bench

# Bundles per head and 64 tokens (to decode: per head). A kernel may grow by 5 %
# of these; lower a number when a kernel gets faster. Steps of few heads compile
# sooner; they show that a chip is supported, not how fast it is.
LARGE = tpu_bench.Shape(length=512, heads=16)
SMALL = tpu_bench.Shape(length=512, heads=2)
BUDGETS = {
  ('v6e', 'forward_saving', LARGE): 290,
  ('v6e', 'backward', LARGE): 495,
  ('v6e', 'backward_state', LARGE): 567,
  ('v6e', 'affine', SMALL): 608,
  ('v6e', 'decode', LARGE): 123,
  ('v5e', 'forward_saving', SMALL): 751,
  ('v5e', 'backward_state', SMALL): 1295,
  ('v5e', 'decode', SMALL): 257,
  ('v5p', 'forward_saving', SMALL): 830,
  ('v5p', 'backward_state', SMALL): 1352,
  ('v5p', 'decode', SMALL): 396,
  ('tpu7x', 'forward_saving', SMALL): 553,
  ('tpu7x', 'backward_state', SMALL): 989,
  ('tpu7x', 'decode', SMALL): 270,
}


@pytest.mark.tpu_compile
@pytest.mark.parametrize('case', BUDGETS, ids=lambda c: f'{c[0]}-{c[1]}')
def test_bundles_stay_within_the_budget(case):
  chip, name, shape = case
  bundles, program, schedule = tpu_bench.kernel_bundles(name, chip, shape)
  budget = BUDGETS[case]
  assert bundles <= 1.05 * budget, f'{bundles:.0f} bundles, budget {budget}'
  vmem = {'tpu7x': 64, 'v5p': 64}.get(chip, 128) * 2**20
  assert program.vmem_bytes < vmem / 2
  # Everything is in the kernel: no temporary as large as one of the arrays.
  array = 2 * shape.length * shape.heads * 128
  assert schedule.temporary_bytes < array or shape == SMALL


def shapes(key_dim, value_dim, heads=1, value_heads=1):
  """Two packed documents of a chunk and a half, for one core."""
  return arg_specs.ArgSpec(
    'shapes', 1, 96, heads, value_heads, key_dim, value_dim, 2
  )


# Widths that are no register or two, grouped heads, an odd count of heads.
SHAPES = [
  (shapes(256, 256, 1, 2), 128, 'inputs'),
  (shapes(64, 256), 64, 'state'),
  (shapes(256, 64, 1, 3), 64, 'state_and_t'),
  (shapes(64, 64, 3, 3), 64, 'inputs'),
]


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
  'spec,chunk_size,save',
  [SHAPES[0], *(pytest.param(*x, marks=pytest.mark.slow) for x in SHAPES[1:])],
  ids=lambda x: f'{x.key_dim}-{x.value_dim}' if hasattr(x, 'name') else str(x),
)
def test_every_shape_compiles(spec, chunk_size, save):
  arguments = jax.eval_shape(spec.arguments)
  ids = arguments.pop('segment_ids')
  options = dict(chunk_size=chunk_size, save=save)
  loss = lambda x, ids: sum(
    y.sum() for y in kda(**x, segment_ids=ids, **options)
  )
  schedule = tpu_schedule.compile_for('v6e', jax.grad(loss), arguments, ids)
  assert schedule.program('kda_forward').vmem_bytes < 64 * 2**20
  assert schedule.program('kda_backward').vmem_bytes < 64 * 2**20


@pytest.mark.tpu_compile
def test_checkpoints_in_checkpoints_trace():
  """A block of layers that are rematerialized, itself rematerialized."""
  devices = tpu_schedule.devices('v6e', dump=False)[:1]
  mesh = jax.sharding.Mesh(devices, ('x',))
  where = jax.NamedSharding(mesh, jax.P())
  x = jax.ShapeDtypeStruct((1, 128, 2, 128), jnp.bfloat16, sharding=where)

  def layer(x):
    arrays = (x, 2 * x, 3 * x, 4 * x, x[..., 0])
    bias = dict(a_log=jnp.zeros(2), dt_bias=jnp.zeros((2, 128)))
    return kda(*arrays, **bias, save='state_and_t')[0]

  @jax.checkpoint
  def block(x):
    return jnp.sin(jax.checkpoint(layer)(jnp.sin(x)))

  loss = lambda x: block(block(x)).astype(jnp.float32).sum()
  with jax.set_mesh(mesh):
    traced = jax.jit(jax.grad(loss)).trace(x)
  assert 'kda_backward' in str(traced.jaxpr)
