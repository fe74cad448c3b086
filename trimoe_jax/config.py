"""Configuration of the library: frozen dataclasses and one strict conversion.

Every size, count and 1-based layer list of the model comes from here; nothing
else in the library reads flags. `from_dict` turns nested dictionaries (an
`ml_collections.ConfigDict`'s `to_dict()`, or JSON) into these classes and
names the nearest valid field when one is unknown.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Remat = Literal['none', 'block', 'full']
Balance = Literal['quantile', 'sign', 'aux_loss', 'none']
Mixer = Literal['kda', 'mla']
Ffn = Literal['dense', 'moe']


@dataclasses.dataclass(frozen=True)
class KdaConfig:
  """Kimi Delta Attention. `value_heads` may be a multiple of `heads`."""

  heads: int = 4
  key_dim: int = 32
  value_dim: int = 32
  value_heads: int | None = None  # None: as many as `heads`
  conv_width: int = 4
  gate_rank: int = 32
  lower_bound: float = -5.0
  chunk_size: int = 64
  implementation: str | None = None  # None: chosen for the device

  @property
  def state_heads(self) -> int:
    return self.value_heads or self.heads

  def __post_init__(self):
    if self.state_heads % self.heads:
      raise ValueError(
        f'kda.value_heads={self.value_heads} is not a multiple of '
        f'kda.heads={self.heads}; choose a multiple, or None for {self.heads}.'
      )
    if not -5.0 <= self.lower_bound < 0.0:
      raise ValueError(
        f'kda.lower_bound={self.lower_bound} is outside [-5, 0); the dense '
        'intra-chunk tiles need a bounded log-decay. Use -5.0.'
      )
    if self.chunk_size % 16 or self.chunk_size < 16:
      raise ValueError(
        f'kda.chunk_size={self.chunk_size} is not a positive multiple of 16; '
        'use 64 or 128.'
      )


@dataclasses.dataclass(frozen=True)
class MlaConfig:
  """Gated multi-head latent attention without position encoding."""

  heads: int = 4
  query_rank: int = 32
  kv_rank: int = 16
  nope_dim: int = 32
  shared_dim: int = 16  # the 64-wide slice of K3 that is never rotated
  value_dim: int = 32
  block_size: int = 512  # tokens in one block of the blockwise softmax

  @property
  def query_dim(self) -> int:
    return self.nope_dim + self.shared_dim


@dataclasses.dataclass(frozen=True)
class MoeConfig:
  """Stable LatentMoE: routed experts work in a latent of width `latent`."""

  experts: int = 16
  top_k: int = 2
  shared_experts: int = 1
  hidden: int = 32
  latent: int = 32
  weight_scale: float = 1.0

  def __post_init__(self):
    if not 0 < self.top_k < self.experts:
      raise ValueError(
        f'moe.top_k={self.top_k} must be at least 1 and smaller than '
        f'moe.experts={self.experts}: the cutoff is the (top_k+1)-th score.'
      )


@dataclasses.dataclass(frozen=True)
class RouterConfig:
  """How expert load is balanced; the default is quantile balancing as in K3."""

  balance: Balance = 'quantile'
  estimator: Literal['uniform', 'exact', 'log_edges'] = 'uniform'
  cutoff: Literal['kplus1', 'midpoint'] = 'kplus1'
  timing: Literal['lagged', 'in_batch'] = 'lagged'
  space: Literal['sigmoid', 'logit'] = 'sigmoid'
  num_bins: int = 1000
  ema: float = 0.0
  sign_rate: float = 1e-3
  aux_weight: float = 1e-2

  def __post_init__(self):
    if self.num_bins < 2:
      raise ValueError(
        f'router.num_bins={self.num_bins}; a quantile needs at least 2 bins.'
      )
    if not 0.0 <= self.ema < 1.0:
      raise ValueError(f'router.ema={self.ema} is outside [0, 1).')


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The text model. Layer numbers in `mla_layers` are 1-based, as released."""

  vocab_size: int = 512
  width: int = 128
  layers: int = 8
  mla_layers: tuple[int, ...] = (4, 8)
  dense_layers: int = 1  # the first layers carry a dense MLP instead of experts
  dense_hidden: int = 512
  residual_block: int = 4  # decoder layers in one block of attention residuals
  norm_eps: float = 1e-5
  latent_norm_eps: float = 1e-6  # MLA's query and key-value latent norms
  situ_beta: float = 4.0
  situ_linear_beta: float = 25.0
  init_std: float = 0.02
  dtype: str = 'bfloat16'
  remat: Remat = 'none'
  kda: KdaConfig = dataclasses.field(default_factory=KdaConfig)
  mla: MlaConfig = dataclasses.field(default_factory=MlaConfig)
  moe: MoeConfig = dataclasses.field(default_factory=MoeConfig)
  router: RouterConfig = dataclasses.field(default_factory=RouterConfig)

  def __post_init__(self):
    wrong = [i for i in self.mla_layers if not 1 <= i <= self.layers]
    if wrong:
      raise ValueError(
        f'mla_layers={self.mla_layers} names layers {wrong}, but layers are '
        f'numbered 1 to {self.layers}.'
      )
    if not 0 <= self.dense_layers < self.layers:
      raise ValueError(
        f'dense_layers={self.dense_layers} must lie in [0, {self.layers - 1}]: '
        'at least one layer has experts.'
      )
    if self.residual_block < 1:
      raise ValueError(
        f'residual_block={self.residual_block}; a block has at least 1 layer.'
      )
    if self.dtype not in ('bfloat16', 'float32', 'float64'):
      raise ValueError(
        f'dtype={self.dtype!r}; use bfloat16, float32 or float64.'
      )

  def mixer(self, layer: int) -> Mixer:
    """The mixer of 0-based `layer`."""
    return 'mla' if layer + 1 in self.mla_layers else 'kda'

  def ffn(self, layer: int) -> Ffn:
    """The feed-forward part of 0-based `layer`."""
    return 'dense' if layer < self.dense_layers else 'moe'

  @property
  def moe_layers(self) -> int:
    return self.layers - self.dense_layers

  @property
  def sources(self) -> int:
    """Sources of the output mix: every block sum and the embedding."""
    return -(-self.layers // self.residual_block) + 1
