"""A pipeline gives the gradients of one device, in float64."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from small_model import (
  FAST_COMPILE,
  random_tokens,
  random_weights,
  small_config,
)

from trimoe_jax import sharding
from trimoe_jax.config import MeshConfig, PipelineConfig, TrainConfig
from trimoe_jax.data import StageConfig
from trimoe_jax.model.model import model_parameters
from trimoe_jax.model.parameters import map_table
from trimoe_jax.train_step import BATCH_AXES, accumulate

ROWS, TIME = 4, 32
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


def make(mesh, chunks=1, micro_batches=4, **model):
  return TrainConfig(
    model=small_config(**model),
    stages=(
      StageConfig(
        context=TIME,
        batch=ROWS * micro_batches,
        steps=4,
        micro_batches=micro_batches,
      ),
    ),
    mesh=MeshConfig(**mesh),
    pipeline=PipelineConfig(chunks),
  )


def packed_batch(micro_batches):
  """Documents that end anywhere, and padding that the loss leaves out."""
  shape = (micro_batches, ROWS, TIME)
  segments = np.ones(shape, np.int32)
  segments[:, :, 20:] = 2
  segments[0, 0, 28:] = 0
  segments[-1, 1, :5] = 0
  # The same tokens again after four, under other targets: among more, some
  # move gradients by 2e-11 when the parameters move by one unit of rounding.
  tokens = random_tokens((4, ROWS, TIME))[np.arange(micro_batches) % 4]
  return {
    'tokens': tokens.astype(np.int32),
    'targets': random_tokens(shape, 5).astype(np.int32),
    'segment_ids': segments,
    'loss_mask': segments > 0,
  }


def place(params, batch, config):
  """Parameters as a training state holds them, and the batch, on the mesh."""
  mesh = jax.sharding.get_mesh()
  table = model_parameters(config.model)
  where = map_table(lambda p: sharding.named(p.axes, p.shape, mesh), table)
  tokens = jax.NamedSharding(mesh, sharding.spec(BATCH_AXES))
  return jax.device_put(params, where), jax.device_put(batch, tokens)


def run_both(config):
  """(gradients, sums, statistics) of the pipeline and of one device, text."""
  params, state = random_weights(config.model)
  batch = packed_batch(config.stages[0].micro_batches)
  run = jax.jit(lambda params, batch: accumulate(params, batch, state, config))
  want = run.lower(params, batch).compile(FAST_COMPILE)(params, batch)
  with jax.set_mesh(sharding.make_mesh(config.mesh.sizes())):
    placed = place(params, batch, config)
    program = run.lower(*placed).compile(FAST_COMPILE)
    got = program(*placed)
  return got, want, program.as_text(), placed


def assert_close(got, want, tolerance):
  got, want = jax.tree.leaves(got), jax.tree.leaves(want)
  assert len(got) == len(want)
  for one, other in zip(got, want):
    scale = max(1e-30, float(np.abs(other).max()))
    np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * scale)


def assert_same_step(config, tolerance=1e-11):
  got, want, text, (params, _) = run_both(config)
  grads, sums, stats = got
  assert jax.tree.structure(grads) == jax.tree.structure(params)
  for grad, param in zip(jax.tree.leaves(grads), jax.tree.leaves(params)):
    assert grad.sharding.is_equivalent_to(param.sharding, param.ndim)
  assert_close(grads, want[0], tolerance)
  assert_close(sums, want[1], 1e-12)
  summed = lambda x: np.asarray(x).sum(1)  # over token shards
  for one, other in zip(jax.tree.leaves(stats), jax.tree.leaves(want[2])):
    if one.dtype == np.int32:
      np.testing.assert_array_equal(summed(one), summed(other))
    else:
      assert_close(summed(one), summed(other), 1e-5)
  assert_hops(text, config)


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
