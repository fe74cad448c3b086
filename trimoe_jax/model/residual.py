"""Block attention residuals: the state they carry and the mix they read.

Instead of adding to one stream, every sublayer reads a softmax mixture over
depth: the sums of the finished blocks (the embedding is the first) and the
running sum of its own block. Attention Residuals, arXiv 2603.15031, Eq. 5-6.

A pass that continues a cache reads in two phases (Algorithm 1 there): once a
block, all its sublayers against the finished blocks; then each sublayer merges
its own unfinished mixture with the running sum.

Legend: m finished blocks, l sublayers of a block, b batch, t time, d model
width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels import attention_residual
from trimoe_jax import sharding
from trimoe_jax.config import ModelConfig
from trimoe_jax.model.norm import rms_norm
from trimoe_jax.model.parameters import Parameter, Table, ones, zeros

STREAM = ('batch', 'seq', None)
SOURCES = (None, *STREAM)


class Residual(struct.PyTreeNode):
  """(blocks, partial): what one residual block carries through its layers.

  `blocks` [M, B, T, d] has room for M finished blocks, of which the first
  `filled` are real; `partial` [B, T, d] is the sum of the open block, which is
  a source only once `is_open`. With `phases`, unfinished mixtures (o [L, B, T,
  d], m and l [L, B, T]) of the block's sublayers, of which `at` have run.
  """

  blocks: jax.Array
  partial: jax.Array
  filled: jax.Array
  is_open: jax.Array
  phases: tuple[jax.Array, ...] | None = None
  at: jax.Array | None = None

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
    return self.replace(
      partial=self.partial + x_btd,
      is_open=jnp.asarray(True),
      at=None if self.at is None else self.at + 1,
    )

  def in_two_phases(self, mixes: Table, config: ModelConfig) -> Residual:
    """The state with phase one done for queries and gains [L, d] of `mixes`."""

    def unfinished(blocks_mbtd, queries_ld, gains_ld, mask_m):
      return attention_residual.phase_one(
        blocks_mbtd, queries_ld, gains_ld, mask=mask_m, eps=config.norm_eps
      )

    unfinished = sharding.local(
      unfinished,
      inputs=(SOURCES, (), (), ()),
      outputs=(SOURCES, SOURCES[:-1], SOURCES[:-1]),
    )
    is_filled_m = jnp.arange(self.blocks.shape[0]) < self.filled
    phases = unfinished(self.blocks, mixes['query'], mixes['gain'], is_filled_m)
    return self.replace(phases=phases, at=jnp.int32(0))


def mix_parameters(config: ModelConfig) -> Table:
  """Query zero, so that training starts from the plain mean of the sources."""
  return {
    'query': Parameter((config.width,), (None,), zeros),
    'gain': Parameter((config.width,), (None,), ones),
  }


def read(
  params: Table, residual: Residual, config: ModelConfig, norm_gain=None
) -> tuple[jax.Array, jax.Array | None]:
  """The mixture [B, T, d] a sublayer reads, and its weights [M + 1, B, T].

  In two phases there are no weights: None. With the gain of an RMSNorm the
  mixture is normalized.
  """
  if residual.phases is not None:
    h_btd = _merged(params, residual, config)
    if norm_gain is not None:
      h_btd = rms_norm(h_btd, norm_gain, config.norm_eps)
    return h_btd, None
  slots = residual.blocks.shape[0]
  mask_m = jnp.append(jnp.arange(slots) < residual.filled, residual.is_open)

  def mix(blocks_mbtd, partial_btd, query_d, gain_d, norm_gain_d, mask_m):
    return attention_residual.mix(
      blocks_mbtd,
      query_d,
      gain_d,
      partial=partial_btd,
      mask=mask_m,
      norm_gain=norm_gain_d,
      eps=config.norm_eps,
      return_weights=True,
    )

  mix = sharding.local(
    mix,
    inputs=(SOURCES, STREAM, (), (), (), ()),
    outputs=(STREAM, SOURCES[:-1]),
  )
  return mix(
    residual.blocks,
    residual.partial,
    params['query'],
    params['gain'],
    norm_gain,
    mask_m,
  )


def _merged(params, residual, config):
  """Phase two: the next sublayer's mixture with the running sum."""
  phase = jax.tree.map(
    lambda x: jax.lax.dynamic_index_in_dim(x, residual.at, keepdims=False),
    residual.phases,
  )

  def merge(phase, partial_btd, query_d, gain_d, is_open):
    at_first = attention_residual.merge(phase, None, query_d, gain_d)
    later = attention_residual.merge(
      phase, partial_btd, query_d, gain_d, eps=config.norm_eps
    )
    return jnp.where(is_open, later, at_first.astype(later.dtype))

  merge = sharding.local(
    merge,
    inputs=((STREAM, STREAM[:-1], STREAM[:-1]), STREAM, (), (), ()),
    outputs=STREAM,
  )
  return merge(
    phase, residual.partial, params['query'], params['gain'], residual.is_open
  )


def read_all(
  params: Table, blocks_mbtd: jax.Array, config: ModelConfig, norm_gain=None
) -> tuple[jax.Array, jax.Array]:
  """The output mix over every block: [B, T, d] and its weights [M, B, T]."""

  def mix(blocks_mbtd, query_d, gain_d, norm_gain_d):
    return attention_residual.mix(
      blocks_mbtd,
      query_d,
      gain_d,
      norm_gain=norm_gain_d,
      eps=config.norm_eps,
      return_weights=True,
    )

  mix = sharding.local(
    mix, inputs=(SOURCES, (), (), ()), outputs=(STREAM, SOURCES[:-1])
  )
  return mix(blocks_mbtd, params['query'], params['gain'], norm_gain)
