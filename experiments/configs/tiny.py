"""The demo: a small K3 on the standard library's source, 128 to 16,384 tokens.

Four context lengths in the proportions 1 : 8 : 32 : 128 of K3's 8K, 64K, 256K
and 1M, in one run of a few minutes on two CPU cores.
"""

from experiments.configs import as_config_dict, refuse_variant
from trimoe_jax.config import (
  EvalConfig,
  KdaConfig,
  MlaConfig,
  ModelConfig,
  MoeConfig,
  OptimConfig,
  StageConfig,
  TrainConfig,
)


def get_config(variant: str = ''):
  refuse_variant(variant)
  heads = dict(heads=2, value_dim=32)
  return as_config_dict(
    TrainConfig(
      name='tiny',
      model=ModelConfig(
        vocab_size=264,
        width=96,
        layers=4,
        mla_layers=(4,),
        dense_hidden=384,
        residual_block=1,
        init_std=0.06,
        dtype='float32',
        kda=KdaConfig(key_dim=32, gate_rank=32, chunk_size=16, **heads),
        mla=MlaConfig(
          query_rank=32, kv_rank=16, nope_dim=32, shared_dim=16, **heads
        ),
        moe=MoeConfig(experts=16, top_k=2, hidden=64, latent=48),
      ),
      stages=(
        StageConfig(context=128, batch=64, tokens=700_000, micro_batches=8),
        StageConfig(context=1024, batch=8, tokens=250_000, micro_batches=8),
        StageConfig(context=4096, batch=2, tokens=165_000, micro_batches=2),
        StageConfig(context=16384, batch=1, tokens=196_608, long_repeats=2),
      ),
      optim=OptimConfig(lr=1e-2, adam_lr=5e-3),
      eval=EvalConfig(batches=4, batch_tokens=16384, needles=10),
    )
  )
