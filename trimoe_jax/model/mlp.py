"""SiTU-GLU, and the dense MLP of the first layer and of the shared experts.

Legend: b batch, t time, d model width, f hidden width.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from trimoe_jax import sharding
from trimoe_jax.config import ModelConfig
from trimoe_jax.model.parameters import Parameter, Table, declare, normal


# Only what goes in is kept for the gradient, not tanh and sigmoid in float32.
@functools.partial(jax.checkpoint, static_argnums=2)
def situ_glu(gate: jax.Array, up: jax.Array, config: ModelConfig) -> jax.Array:
  """b1 tanh(gate/b1) sigmoid(gate) * b2 tanh(up/b2), in gate's dtype.

  The smooth caps bound the product by b1*b2 and keep gradients alive where a
  clamp would not; both are computed in float32. Kimi K3 report, Eq. 12, with
  b1 = `situ_beta` (4) and b2 = `situ_linear_beta` (25).
  """
  dtype = gate.dtype
  wide = jnp.promote_types(dtype, jnp.float32)
  gate, up = gate.astype(wide), up.astype(wide)
  b1, b2 = config.situ_beta, config.situ_linear_beta
  capped = b1 * jnp.tanh(gate / b1) * jax.nn.sigmoid(gate)
  return (capped * (b2 * jnp.tanh(up / b2))).astype(dtype)


def mlp_parameters(config: ModelConfig, hidden: int) -> Table:
  init = normal(config.init_std)
  into = Parameter((config.width, hidden), ('embed', 'hidden'), init)
  out = Parameter((hidden, config.width), ('hidden', 'embed'), init)
  return {'gate': into, 'up': into, 'down': out}


def mlp(params: Table, x_btd: jax.Array, config: ModelConfig) -> jax.Array:
  """down(SiTU-GLU(gate(x), up(x))): [B, T, d] to [B, T, d]."""
  dtype = x_btd.dtype
  gate_df = sharding.use(params['gate'], dtype, 'embed', 'hidden')
  up_df = sharding.use(params['up'], dtype, 'embed', 'hidden')
  down_fd = sharding.use(params['down'], dtype, 'hidden', 'embed')
  wide = ('batch', 'seq', 'hidden')
  h_btf = situ_glu(
    sharding.einsum('btd,df->btf', x_btd, gate_df, out=wide),
    sharding.einsum('btd,df->btf', x_btd, up_df, out=wide),
    config,
  )
  return sharding.einsum(
    'btf,fd->btd', h_btf, down_fd, out=('batch', 'seq', None)
  )


class Mlp(nn.Module):
  """`mlp` with its own parameters, of hidden width `dense_hidden`."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x_btd: jax.Array) -> jax.Array:
    table = mlp_parameters(self.config, self.config.dense_hidden)
    return mlp(declare(self, table), x_btd, self.config)
