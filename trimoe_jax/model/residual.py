"""Block attention residuals: the state they carry and the mix they read.

Instead of adding to one stream, every sublayer reads a softmax mixture over
depth: the sums of the finished blocks (the embedding is the first) and the
running sum of its own block. Attention Residuals, arXiv 2603.15031, Eq. 5-6.

Legend: m finished blocks, b batch, t time, d model width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels import attention_residual
from trimoe_jax import sharding
from trimoe_jax.config import ModelConfig
from trimoe_jax.model.parameters import Parameter, Table, ones, zeros

STREAM = ('batch', 'seq', None)
SOURCES = (None, *STREAM)


class Residual(struct.PyTreeNode):
  """(blocks, partial): what one residual block carries through its layers.

  `blocks` [M, B, T, d] has room for M finished blocks, of which the first
  `filled` are real; `partial` [B, T, d] is the sum of the open block, which is
  a source only once `is_open`.
  """

  blocks: jax.Array
  partial: jax.Array
  filled: jax.Array
  is_open: jax.Array

  @classmethod
  def start(cls, blocks_mbtd: jax.Array, filled) -> Residual:
    """The state at the first sublayer of a block: nothing added yet."""
    return cls(
      blocks=blocks_mbtd,
      partial=jnp.zeros_like(blocks_mbtd[0]),
      filled=jnp.asarray(filled, jnp.int32),
      is_open=jnp.asarray(False),
    )

  def add(self, x_btd: jax.Array) -> Residual:
    """The state after a sublayer that returned `x_btd`."""
    return self.replace(partial=self.partial + x_btd, is_open=jnp.asarray(True))


def mix_parameters(config: ModelConfig) -> Table:
  """Query zero, so that training starts from the plain mean of the sources."""
  return {
    'query': Parameter((config.width,), (None,), zeros),
    'gain': Parameter((config.width,), (None,), ones),
  }


def read(
  params: Table, residual: Residual, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
  """The mixture [B, T, d] a sublayer reads, and its weights [M + 1, B, T]."""
  slots = residual.blocks.shape[0]
  mask_m = jnp.append(jnp.arange(slots) < residual.filled, residual.is_open)

  def mix(blocks_mbtd, partial_btd, query_d, gain_d, mask_m):
    return attention_residual.mix(
      blocks_mbtd,
      query_d,
      gain_d,
      partial=partial_btd,
      mask=mask_m,
      eps=config.norm_eps,
      return_weights=True,
    )

  mix = sharding.local(
    mix,
    inputs=(SOURCES, STREAM, (), (), ()),
    outputs=(STREAM, SOURCES[:-1]),
  )
  return mix(
    residual.blocks, residual.partial, params['query'], params['gain'], mask_m
  )


def read_all(
  params: Table, blocks_mbtd: jax.Array, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
  """The output mix over every block: [B, T, d] and its weights [M, B, T]."""

  def mix(blocks_mbtd, query_d, gain_d):
    return attention_residual.mix(
      blocks_mbtd, query_d, gain_d, eps=config.norm_eps, return_weights=True
    )

  mix = sharding.local(
    mix, inputs=(SOURCES, (), ()), outputs=(STREAM, SOURCES[:-1])
  )
  return mix(blocks_mbtd, params['query'], params['gain'])
