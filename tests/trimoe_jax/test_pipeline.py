"""A pipeline gives the gradients of one device, in float64."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from mesh_step import ROWS, TIME, Step, assert_close, make, packed_batch
from small_model import small_config

# One kind of layer, chunks of 2, 2, 2 and none, a block that begins within one.
SIMPLE = dict(
  layers=6, mla_layers=(1, 2, 3, 4, 5, 6), dense_layers=0, residual_block=3
)
# The first chunk has the dense layer, and no two chunks have the same kinds.
# Not deeper: with two more layers rounding grows to 4e-11 by 'data' alone.
MIXED = dict(layers=5, mla_layers=(3, 5), residual_block=2)


@pytest.fixture(autouse=True)
def _float64():
  with jax.enable_x64(True):
    yield


def assert_same_step(config, tolerance=1e-11):
  batch = packed_batch(config.stages[0].micro_batches)
  piped = Step(config)
  want = Step(config, on_mesh=False)(batch)
  grads, sums, stats = piped(batch)
  assert jax.tree.structure(grads) == jax.tree.structure(piped.params)
  params = jax.tree.leaves(piped.params)
  for grad, param in zip(jax.tree.leaves(grads), params):
    assert grad.sharding.is_equivalent_to(param.sharding, param.ndim)
  assert_close(grads, want[0], tolerance)
  assert_close(sums, want[1], 1e-12)
  summed = lambda x: np.asarray(x).sum(1)  # over token shards
  for one, other in zip(jax.tree.leaves(stats), jax.tree.leaves(want[2])):
    if one.dtype == np.int32:
      np.testing.assert_array_equal(summed(one), summed(other))
    else:
      assert_close(summed(one), summed(other), 1e-5)
  assert_hops(piped.text, config)


def assert_hops(text, config):
  """One message each way: 1 + W streams, W = ceil((P - 1) Lc / S)."""
  model, mesh = config.model, config.mesh
  chunks = mesh.pipe * config.pipeline.chunks
  layers = -(-model.layers // chunks)
  window = -(-(mesh.pipe - 1) * layers // model.residual_block)
  window = min(window, model.sources - 1)
  rows = ROWS // (mesh.data * mesh.expert)
  shape = f'{1 + window},{rows},{TIME // mesh.context},{model.width}'
  devices = np.arange(np.prod(list(mesh.sizes().values()))).reshape(
    mesh.pipe, -1
  )
  hops = []
  for line in re.findall(r'.* collective-permute(?:-start)?\(.*', text):
    pairs = re.search(r'source_target_pairs=\{(.*?)\}\}', line).group(1)
    pairs = np.array(re.findall(r'\d+', pairs), int).reshape(-1, 2)
    stage = np.searchsorted(devices[:, 0], pairs, 'right')
    if (stage[:, 0] != stage[:, 1]).any():
      hops.append(re.search(r'f64\[([\d,]*)\]', line).group(1))
  assert hops == [shape, shape]


def test_two_stages_of_two_chunks():
  assert_same_step(make({'pipe': 2}, chunks=2, **SIMPLE))


@pytest.mark.slow
@pytest.mark.parametrize(
  'mesh, chunks, micro_batches',
  [
    ({'pipe': 2}, 2, 3),  # a last group of one
    ({'pipe': 4}, 1, 4),
    ({'pipe': 2, 'data': 2, 'context': 2}, 2, 4),
    ({'pipe': 2, 'expert': 2, 'tensor': 2}, 1, 2),
    ({'pipe': 4, 'data': 2}, 1, 6),
  ],
)
def test_meshes(mesh, chunks, micro_batches):
  assert_same_step(make(mesh, chunks, micro_batches, **MIXED))


@pytest.mark.slow
@pytest.mark.parametrize('remat', ['block', 'full'])
def test_rematerialization(remat):
  assert_same_step(make({'pipe': 2}, **SIMPLE, remat=remat))


@pytest.mark.slow
def test_auxiliary_loss():
  router = small_config(**SIMPLE).router
  router = dataclasses.replace(router, balance='aux_loss', aux_weight=1.0)
  # The scores that it sums are float32.
  assert_same_step(make({'pipe': 2}, **SIMPLE, router=router), 1e-6)
