"""What nano, micro and mini share: K3's ratios at a smaller width.

    heads * dim / d = 1.71    F0 / d = 4.71    latent / d = 0.5
    hidden / latent = 0.857   r_q / d = 0.214  r_kv / d = 0.071

The last layer is MLA, as every fourth is.
"""

from trimoe_jax.config import KdaConfig, MlaConfig, ModelConfig, MoeConfig


def scaled_model(
  *,
  width: int,
  layers: int,
  heads: int,
  head_dim: int,
  moe: MoeConfig,
  dense_hidden: int,
  ranks: tuple[int, int],
  vocab_size: int,
  residual_block: int,
) -> ModelConfig:
  """A K3-shaped model; `ranks` are MLA's query and key-value ranks."""
  mla_layers = {*range(4, layers + 1, 4), layers}
  return ModelConfig(
    vocab_size=vocab_size,
    width=width,
    layers=layers,
    mla_layers=tuple(sorted(mla_layers)),
    dense_hidden=dense_hidden,
    residual_block=residual_block,
    remat='block',
    kda=KdaConfig(
      heads=heads, key_dim=head_dim, value_dim=head_dim, gate_rank=head_dim
    ),
    mla=MlaConfig(
      heads=heads,
      query_rank=ranks[0],
      kv_rank=ranks[1],
      nope_dim=head_dim,
      shared_dim=head_dim // 2,
      value_dim=head_dim,
    ),
    moe=moe,
  )
