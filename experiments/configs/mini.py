"""mini: 962.9M parameters, 194.6M active; heads of 128 as in K3."""

from experiments.configs import as_config_dict, refuse_variant
from experiments.configs.scaled import scaled_model
from trimoe_jax.config import MoeConfig, OptimConfig, StageConfig, TrainConfig


def get_config(variant: str = ''):
  refuse_variant(variant)
  return as_config_dict(
    TrainConfig(
      name='mini',
      model=scaled_model(
        width=768,
        layers=17,
        heads=10,
        head_dim=128,
        moe=MoeConfig(
          experts=128, top_k=8, shared_experts=2, hidden=336, latent=384
        ),
        dense_hidden=3584,
        ranks=(160, 64),
        vocab_size=32768,
        residual_block=4,
      ),
      stages=(
        StageConfig(context=4096, batch=256, tokens=8_000_000_000),
        StageConfig(context=32768, batch=32, tokens=1_600_000_000),
        StageConfig(
          context=131072, batch=8, tokens=400_000_000, long_repeats=2
        ),
      ),
      optim=OptimConfig(lr=1.5e-3),
    )
  )
