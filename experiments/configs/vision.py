"""Images from the first step: a small K3 learns to count and name digits.

A tower of three blocks and the text model of the demo, both from scratch, on
pictures made of scikit-learn's digits and sample photographs, with questions,
and on scikit-learn's descriptions of its data sets; minutes on two CPU cores.
"""

from experiments.configs import as_config_dict, refuse_variant
from trimoe_jax.config import (
  DataConfig,
  EvalConfig,
  KdaConfig,
  MlaConfig,
  ModelConfig,
  MoeConfig,
  OptimConfig,
  StageConfig,
  TrainConfig,
  VisionConfig,
)
from trimoe_jax.data import ByteTokenizer


def get_config(variant: str = ''):
  refuse_variant(variant)
  heads = dict(heads=2, value_dim=32)
  return as_config_dict(
    TrainConfig(
      name='vision',
      model=ModelConfig(
        vocab_size=264,
        width=96,
        layers=3,
        mla_layers=(3,),
        dense_hidden=384,
        residual_block=1,
        init_std=0.06,
        dtype='float32',
        kda=KdaConfig(key_dim=32, gate_rank=32, chunk_size=16, **heads),
        mla=MlaConfig(
          query_rank=32, kv_rank=16, nope_dim=32, shared_dim=16, **heads
        ),
        moe=MoeConfig(experts=16, top_k=2, hidden=64, latent=48),
        vision=VisionConfig(
          width=96,
          layers=3,
          heads=4,
          head_dim=24,
          hidden=256,
          rows=8,
          columns=8,
          placeholder=ByteTokenizer.media_id,
        ),
      ),
      data=DataConfig(source='pictures'),
      stages=(
        StageConfig(context=128, batch=32, steps=300, patches=64, images=4),
      ),
      optim=OptimConfig(lr=1e-2, adam_lr=5e-3),
      eval=EvalConfig(batches=8, batch_tokens=4096, sample_prompt='The '),
    )
  )
