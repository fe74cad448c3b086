"""Counts read from compiled programs, against programs with known counts."""

import jax
import jax.numpy as jnp
import pytest

from trimoe_jax import hlo, sharding

LOOPS = 5


def program(function, sizes, *args):
  mesh = sharding.make_mesh(sizes)
  with jax.set_mesh(mesh):
    compiled = jax.jit(function).lower(*args).compile()
  return hlo.Program(compiled.as_text(), mesh.size)


def looped(collective, names):
  """A scan whose body runs one collective on a device's rows."""

  def run(x):
    def step(carry, _):
      return jnp.cos(collective(carry)), None

    return jax.lax.scan(step, x, None, length=LOOPS)[0]

  # The mesh is in context only when this is called.
  return lambda x: sharding.local(run, inputs=(names,), outputs=names)(x)


def rows(count):
  return jnp.ones((count, 128), jnp.float32)


def test_a_collective_counts_as_often_as_its_loop_runs():
  psum = looped(lambda x: jax.lax.psum(x, 'context'), ('seq', None))
  found = program(psum, {'data': 2, 'context': 4}, rows(8)).collectives()
  assert list(found) == ['all-reduce']
  count, sent = found['all-reduce']
  assert count == LOOPS
  assert sent == LOOPS * 2 * 3 / 4 * (2 * 128 * 4)  # groups of four, two rows


def test_a_permutation_sends_what_it_holds():
  around = [(i, (i + 1) % 4) for i in range(4)]
  shift = looped(
    lambda x: jax.lax.ppermute(x, 'context', around), ('seq', None)
  )
  found = program(shift, {'context': 4}, rows(8)).collectives()
  assert found == {'collective-permute': (LOOPS, LOOPS * 2 * 128 * 4)}


def test_memory_traffic_counts_loops_and_not_the_inside_of_fusions():
  def run(x):
    step = lambda c, _: (jnp.cos(c) @ jnp.sin(c), None)
    return jax.lax.scan(step, x, None, length=LOOPS)[0]

  moved = program(run, {}, jnp.ones((256, 256))).memory_traffic()
  array = 256 * 256 * 4
  # At least the product and its operands each time, at most every value twice.
  assert LOOPS * 3 * array <= moved <= LOOPS * 10 * array


TPU = """HloModule jit_f

%condition (p: (s32[], f32[8,128])) -> pred[] {
  %limit = s32[]{:T(128)} constant(7), metadata={op_name="x"}
  %p = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%body (p.1: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %p.1 = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%p.1), index=1
  %s = f32[16,128]{1,0:T(8,128)S(1)} all-gather(%x), channel_id=1, replica_groups=mesh['data'=4,'context'=2] {'context'}, dimensions={0}
  %k = f32[8,128]{1,0:T(8,128)} custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="kernel"}
  %p.2 = f32[8,128]{1,0:T(8,128)} collective-permute(%k), channel_id=2, source_target_pairs={{0,1},{1,0}}
  ROOT %t = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%i.2, %y)
}

ENTRY %main (a: f32[8,128]) -> f32[8,128] {
  %a = f32[8,128]{1,0:T(8,128)} parameter(0)
  %w = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) while(%t.0), condition=%condition, body=%body
  ROOT %r = f32[8,128]{1,0:T(8,128)} get-tuple-element(%w), index=1
}
"""  # noqa: E501


def test_text_of_the_tpu_compiler():
  found = hlo.Program(TPU, 8)
  assert found.executions['body'] == 7
  size = 16 * 128 * 4
  assert found.collectives() == {
    'all-gather': (7, 7 * size // 2),
    'collective-permute': (7, 7 * size // 2),
  }
  kernel = next(i for i, _ in found.instructions() if i.name == 'k')
  assert kernel.text.endswith('op_name="kernel"}')
  assert found.largest(1)[0].dims == (16, 128)


@pytest.mark.parametrize(
  'shape, sizes',
  [
    ('bf16[2,3]{1,0}', [12]),
    ('(s32[], pred[7]{0}, s4[3]{0})', [4, 7, 2]),
    ('f8e4m3fn[16]{0}', [16]),
  ],
)
def test_sizes_of_arrays(shape, sizes):
  assert [a.bytes for a in hlo.arrays(shape)] == sizes
