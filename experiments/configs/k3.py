"""Kimi K3 as released: 2.78T parameters, 104B active, 1M tokens of context.

The model is the released config.json, its vision tower included. Rates, batches
and token budgets are not public: those below only give the stages their
proportions, and no images.
"""

from experiments.configs import as_config_dict, refuse_variant
from trimoe_jax.config import (
  KdaConfig,
  MlaConfig,
  ModelConfig,
  MoeConfig,
  OptimConfig,
  StageConfig,
  TrainConfig,
  VisionConfig,
)


def get_config(variant: str = ''):
  refuse_variant(variant)
  return as_config_dict(
    TrainConfig(
      name='k3',
      model=ModelConfig(
        vocab_size=163_840,
        width=7168,
        layers=93,
        mla_layers=(*range(4, 93, 4), 93),
        dense_hidden=33_792,
        residual_block=12,
        remat='full',
        kda=KdaConfig(heads=96, key_dim=128, value_dim=128, gate_rank=128),
        mla=MlaConfig(
          heads=96,
          query_rank=1536,
          kv_rank=512,
          nope_dim=128,
          shared_dim=64,
          value_dim=128,
        ),
        moe=MoeConfig(
          experts=896,
          top_k=16,
          shared_experts=2,
          hidden=3072,
          latent=3584,
          # Without a limit a device of 64 ranks has room for 56 times its rows.
          dispatch='all_to_all',
          capacity=1.25,
        ),
        vision=VisionConfig(),
      ),
      stages=(
        StageConfig(context=8192, batch=8192, tokens=10**13),
        StageConfig(context=65_536, batch=1024, tokens=2 * 10**12),
        StageConfig(context=262_144, batch=256, tokens=4 * 10**11),
        StageConfig(context=1_048_576, batch=64, tokens=10**11, long_repeats=2),
      ),
      optim=OptimConfig(lr=2e-4),
    )
  )
