"""A model of two layers with one part of each kind, quick to compile."""

import jax.numpy as jnp
import numpy as np

from trimoe_jax.config import KdaConfig, MlaConfig, ModelConfig, MoeConfig
from trimoe_jax.model import router
from trimoe_jax.model.model import model_parameters
from trimoe_jax.model.parameters import map_table

VOCABULARY = 40
# For tests that compile much and run little.
FAST_COMPILE = {'xla_backend_optimization_level': 0}


def small_config(**changes) -> ModelConfig:
  """KDA with a dense MLP, then MLA with experts, each a residual block."""
  fields = {
    'vocab_size': VOCABULARY,
    'width': 24,
    'layers': 2,
    'mla_layers': (2,),
    'dense_hidden': 32,
    'residual_block': 1,
    'dtype': 'float64',
    'kda': KdaConfig(
      heads=2, key_dim=8, value_dim=8, gate_rank=8, chunk_size=16
    ),
    'mla': MlaConfig(
      heads=2, query_rank=8, kv_rank=8, nope_dim=8, shared_dim=4, value_dim=8
    ),
    'moe': MoeConfig(experts=6, top_k=2, hidden=16, latent=16),
  }
  return ModelConfig(**(fields | changes))


def random_weights(config: ModelConfig, seed: int = 0):
  """Parameters in the model's dtype, none at its initial value, and biases."""
  rng = np.random.default_rng(seed)

  def draw(parameter):
    scale = 0.3 if len(parameter.shape) > 1 else 1.0
    return jnp.asarray(
      scale * rng.standard_normal(parameter.shape), config.dtype
    )

  params = map_table(draw, model_parameters(config))
  biases = rng.normal(0, 0.1, (config.moe_layers, config.moe.experts))
  state = router.from_bias(jnp.asarray(biases, jnp.float32), config.router)
  return params, state


def random_tokens(shape, seed: int = 1) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, VOCABULARY, shape)
