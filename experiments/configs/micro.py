"""micro: 191.4M parameters, 59.1M active."""

from experiments.configs import as_config_dict, refuse_variant
from experiments.configs.scaled import scaled_model
from trimoe_jax.config import MoeConfig, OptimConfig, StageConfig, TrainConfig


def get_config(variant: str = ''):
  refuse_variant(variant)
  return as_config_dict(
    TrainConfig(
      name='micro',
      model=scaled_model(
        width=512,
        layers=13,
        heads=14,
        head_dim=64,
        moe=MoeConfig(
          experts=64, top_k=4, shared_experts=2, hidden=224, latent=256
        ),
        dense_hidden=2432,
        ranks=(128, 64),
        vocab_size=16384,
        residual_block=2,
      ),
      stages=(
        StageConfig(context=2048, batch=128, tokens=1_000_000_000),
        StageConfig(context=16384, batch=16, tokens=200_000_000),
        StageConfig(context=65536, batch=4, tokens=80_000_000, long_repeats=2),
      ),
      optim=OptimConfig(lr=2e-3),
    )
  )
