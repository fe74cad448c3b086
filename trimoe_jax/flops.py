"""Floating-point operations of the model, for MFU.

A multiply-add is two operations. Projections follow the active parameters;
attention adds what grows with the context. A training step takes three forward
passes' worth; what rematerialization repeats is no model FLOP and is counted
apart.
"""

from __future__ import annotations

from typing import NamedTuple

from trimoe_jax.config import ModelConfig
from trimoe_jax.model.model import count_parameters


class TokenFlops(NamedTuple):
  """Forward operations of one token, by part."""

  projections: float
  softmax_attention: float
  delta_attention: float

  @property
  def forward(self) -> float:
    return sum(self)

  @property
  def training(self) -> float:
    """Of the forward and the backward pass."""
    return 3 * self.forward


def per_token(config: ModelConfig, context: int) -> TokenFlops:
  """Forward operations of a token in a document as long as the context.

  MLA: a query meets half of the context on average, with keys n + e wide and
  values v. KDA: three products with the K x V state (read twice, written once)
  and, within a chunk of C, two Gram rows, their inverse's row applied to V and
  the output's, each C/2 long on average.

  Args:
    config: the model's.
    context: tokens.
  """
  mla, kda = config.mla, config.kda
  mla_layers = len(config.mla_layers)
  widths = mla.query_dim + mla.value_dim
  softmax = 2 * mla.heads * widths * context / 2 * mla_layers
  k, v = kda.key_dim, kda.value_dim
  within = kda.chunk_size / 2 * (2 * k + 2 * v)
  delta = 2 * kda.state_heads * (3 * k * v + within)
  delta *= config.layers - mla_layers
  active = count_parameters(config).active
  return TokenFlops(2.0 * active, softmax, delta)


def repeated(config: ModelConfig) -> float:
  """Forward passes that rematerialization adds to a step's three."""
  return 0.0 if config.remat == 'none' else 1.0
