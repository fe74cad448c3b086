"""nano: 31.9M parameters, 10.2M active; the smallest with K3's ratios."""

from experiments.configs import as_config_dict, refuse_variant
from experiments.configs.scaled import scaled_model
from trimoe_jax.config import MoeConfig, OptimConfig, StageConfig, TrainConfig


def get_config(variant: str = ''):
  refuse_variant(variant)
  return as_config_dict(
    TrainConfig(
      name='nano',
      model=scaled_model(
        width=256,
        layers=9,
        heads=7,
        head_dim=64,
        moe=MoeConfig(
          experts=64, top_k=4, shared_experts=2, hidden=112, latent=128
        ),
        dense_hidden=1216,
        ranks=(64, 32),
        vocab_size=4096,
        residual_block=2,
      ),
      stages=(
        StageConfig(context=1024, batch=64, tokens=160_000_000),
        StageConfig(context=8192, batch=8, tokens=40_000_000),
        StageConfig(context=32768, batch=2, tokens=16_000_000, long_repeats=2),
      ),
      optim=OptimConfig(lr=4e-3),
    )
  )
