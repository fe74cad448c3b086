"""Splash attention as it is called here, interpreted and compiled for a TPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel,
  splash_attention_mask,
)
from test_attention import dense

from pallas_kernels.testing import relative_rms
from trimoe_jax import hlo, topology
from trimoe_jax.model import attention, splash
from trimoe_jax.model.attention import causal_attention

KEY, VALUE, SCALE = 24, 16, 0.4


@pytest.mark.parametrize('time, block', [(512, 128), (768, 256)])
def test_tiles_are_those_that_the_library_finds(time, block):
  mask = splash_attention_mask.CausalMask((time, time))
  names = 'block_q block_kv block_q_dkv block_kv_dkv block_q_dq block_kv_dq'
  sizes = splash_attention_kernel.BlockSizes(
    **dict.fromkeys(names.split(), block)
  )
  want = splash_attention_kernel.make_splash_mha(
    splash_attention_mask.MultiHeadMask([mask]),
    block_sizes=sizes,
    head_shards=1,
    q_seq_shards=1,
  )
  by_query, by_key = splash._tiles(time, block)
  for name in ('data_next', 'block_mask', 'q_sequence'):
    for got, info in (
      (by_query, want.fwd_mask_info),
      (by_query, want.dq_mask_info),
      (by_key, want.dkv_mask_info),
    ):
      one, other = getattr(got, name), getattr(info, name)
      assert one.dtype == other.dtype
      np.testing.assert_array_equal(one, other)


# Documents that end anywhere, an id that returns, padding before, within and
# after them, and more rows than whole blocks have. In the second form equal
# numbers are one document.
PACKED = np.stack(
  [
    np.repeat([1, 2, 0, 2, 1, 0], [9, 70, 3, 50, 60, 8]),
    np.repeat([0, 1, 3], [5, 128, 67]),
  ]
).astype(np.int32)
NAMED = PACKED.copy()
NAMED[0, 132:192] = 3


def sample(dtype, *shape):
  rng = np.random.default_rng(0)
  widths = KEY, KEY, VALUE, VALUE
  arrays = [rng.standard_normal((*shape, width)) for width in widths]
  q, k, v, do = (jnp.asarray(x, dtype) for x in arrays)
  return q, k, v, do.astype(jnp.float32)


@pytest.mark.parametrize(
  'ids',
  [
    pytest.param(None, id='dense', marks=pytest.mark.slow),
    pytest.param(PACKED, id='packed'),
  ],
)
def test_values_and_gradients(monkeypatch, ids):
  monkeypatch.setattr(splash, '_BLOCK', 128)
  *arrays, cotangent = sample(jnp.bfloat16, 2, 200, 2)
  live = jnp.ones(()) if ids is None else (ids != 0)[..., None, None]
  cotangent *= live

  def run(*arrays):
    return attention._splash(arrays, ids, SCALE, interpret=True)

  @jax.jit
  def both(*arrays):
    out, pull = jax.vjp(run, *arrays)
    return out, *pull(cotangent)

  got = both(*arrays)
  with jax.enable_x64(True):
    exact = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
    named = None if ids is None else NAMED
    out, pull = jax.vjp(lambda *a: dense(*a, named, None), *exact)
    cotangent = np.asarray(cotangent, np.float64)
    want = [np.asarray(x) for x in (out, *pull(cotangent))]
  assert got[0].dtype == jnp.float32
  assert relative_rms(got[0] * live, want[0] * live) < 4e-3
  assert bool(jnp.any(got[0] != got[0].astype(jnp.bfloat16)))
  for one, other in zip(got[1:], want[1:]):
    assert one.dtype == jnp.bfloat16
    assert relative_rms(one, other) < 8e-3


@pytest.mark.tpu_compile
def test_compiled_for_a_tpu():
  """The kernel is in the program and nothing of T x T is."""
  time, heads = 2048, 2
  where = topology.describe('v6e:2x2', {})
  mesh = jax.sharding.Mesh(where.mesh.devices[:, :1], where.mesh.axis_names)
  shape = lambda width, dtype: jax.ShapeDtypeStruct(
    (1, time, heads, width), dtype
  )
  ids = jax.ShapeDtypeStruct((1, time), jnp.int32)

  def run(q, k, v, do, ids):
    attend = lambda *a: causal_attention(*a, scale=SCALE, segment_ids=ids)
    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(do)

  wide = shape(128, jnp.float32)
  narrow = [shape(width, jnp.bfloat16) for width in (192, 192, 128)]
  with jax.set_mesh(mesh):
    compiled = jax.jit(run).lower(*narrow, wide, ids).compile()
  program = hlo.Program(compiled.as_text(), 1)
  calls = [i for i, _ in program.instructions() if i.opcode == 'custom-call']
  kernels = [i for i in calls if 'tpu_custom_call' in i.text]
  assert len(kernels) == 3  # forward, keys and values, queries
  assert all(a.dims[-2:] != (time, time) for a in program.largest(10**6))
  temporary = compiled.memory_analysis().temp_size_in_bytes
  assert temporary < time * time * 4 / 2
