"""Gradients of a step on a mesh and on one device, and how they compare."""

import contextlib

import jax
import numpy as np
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


def make(mesh, chunks=1, micro_batches=4, **model):
  """The configuration of a small model on a mesh."""
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


def dense_batch(micro_batches):
  """`packed_batch` with one document a row."""
  batch = packed_batch(micro_batches)
  ones = np.ones_like(batch['segment_ids'])
  return batch | {'segment_ids': ones, 'loss_mask': ones > 0}


def place(params, batch, config):
  """Parameters as a training state holds them, and the batch, on the mesh."""
  mesh = jax.sharding.get_mesh()
  table = model_parameters(config.model)
  where = map_table(lambda p: sharding.named(p.axes, p.shape, mesh), table)
  tokens = jax.NamedSharding(mesh, sharding.spec(BATCH_AXES))
  return jax.device_put(params, where), jax.device_put(batch, tokens)


class Step:
  """`accumulate` of one configuration, compiled for its mesh.

  Without `on_mesh` it runs on one device, whatever mesh is configured.
  """

  def __init__(self, config, on_mesh=True):
    self._config, self._mesh = config, None
    if on_mesh:
      self._mesh = sharding.make_mesh(config.mesh.sizes())
    params, self._router = random_weights(config.model)
    batch = packed_batch(config.stages[0].micro_batches)
    self.params, batch = self._place(params, batch)
    with self._context():
      step = jax.jit(self._accumulate).lower(self.params, batch)
      self._run = step.compile(FAST_COMPILE)

  def _accumulate(self, params, batch):
    return accumulate(params, batch, self._router, self._config)

  def _context(self):
    mesh = self._mesh
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)

  def _place(self, params, batch):
    if self._mesh is None:
      return params, batch
    with self._context():
      return place(params, batch, self._config)

  def __call__(self, batch):
    """(gradients, sums, statistics) of a batch."""
    with self._context():
      return self._run(*self._place(self.params, batch))

  @property
  def text(self):
    return self._run.as_text()


def assert_close(got, want, tolerance):
  """Every leaf, relative to its largest number."""
  got, want = jax.tree.leaves(got), jax.tree.leaves(want)
  assert len(got) == len(want)
  for one, other in zip(got, want):
    scale = max(1e-30, float(np.abs(other).max()))
    np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * scale)
