"""Stable LatentMoE: routed experts in a narrow latent, beside shared experts.

Legend: b batch, t time (or tokens), d model width, l latent width, e experts,
j top-k slot, g rows after dispatch, f expert hidden width. Equations: Kimi K3
report, Eq. 11-13.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import grouped_matmul
from trimoe_jax import sharding
from trimoe_jax.config import ModelConfig
from trimoe_jax.model import router
from trimoe_jax.model.mlp import mlp, mlp_parameters, situ_glu
from trimoe_jax.model.norm import rms_norm
from trimoe_jax.model.parameters import (
  Parameter,
  Table,
  declare,
  normal,
  ones,
  uniform,
)
from trimoe_jax.parallel.expert import Routes, run_experts

TOKENS = ('batch', 'seq', None)


def moe_parameters(config: ModelConfig) -> Table:
  c, d = config.moe, config.width
  init = normal(config.init_std)
  into = Parameter((c.experts, c.latent, c.hidden), EXPERT, init)
  out = Parameter((c.experts, c.hidden, c.latent), EXPERT, init)
  table = {
    'router': Parameter((d, c.experts), ('embed', None), uniform(d**-0.5)),
    'down': Parameter((d, c.latent), ('embed', None), init),
    'up': Parameter((c.latent, d), (None, 'embed'), init),
    'norm': Parameter((c.latent,), (None,), ones),
    'experts': {'gate': into, 'up': into, 'down': out},
  }
  if c.shared_experts:
    table['shared'] = mlp_parameters(config, c.shared_experts * c.hidden)
  return table


EXPERT = ('experts', 'latent', None)
# Bytes of experts that a few tokens may copy instead of being sorted by them.
LITTLE = 2**24


def moe_layer(
  params: Table,
  x_btd: jax.Array,
  config: ModelConfig,
  *,
  state: router.RouterState,
  mask: jax.Array | None = None,
  observe: bool = False,
) -> tuple[jax.Array, router.RouterStats]:
  """W_up RMSNorm(sum_j p_j E_j(W_down x)) + Shared(x), and the statistics.

  The router reads the full-width x in float32; experts are chosen by biased
  scores and weighted by unbiased ones; the norm comes after the weighted sum.

  Args:
    params: `moe_parameters`.
    x_btd: normalized input [B, T, d].
    config: the model's.
    state: this layer's router state (no layer axis); never a parameter.
    mask: [B, T] bool, False for padding, which no expert sees.
    observe: whether to count the statistics that training solves for.

  Returns:
    [B, T, d], and RouterStats whose leading axis counts token shards.
  """
  dtype = x_btd.dtype
  wide = jnp.promote_types(dtype, jnp.float32)
  router_de = sharding.use(params['router'], wide, 'embed', None)
  logits_bte = sharding.einsum(
    'btd,de->bte',
    x_btd.astype(wide),
    router_de,
    out=TOKENS,
    precision=jax.lax.Precision.HIGHEST,
  )
  down_dl = sharding.use(params['down'], dtype, 'embed', None)
  z_btl = sharding.einsum('btd,dl->btl', x_btd, down_dl, out=TOKENS)
  experts = {
    name: sharding.use(w, dtype, 'experts', 'latent', None)
    for name, w in params['experts'].items()
  }
  if mask is None:
    mask = sharding.constrain(jnp.ones(x_btd.shape[:2], bool), *TOKENS[:2])
  routed = sharding.local(
    lambda *args: _route_and_run(*args, config=config, observe=observe),
    inputs=(TOKENS, TOKENS, TOKENS[:2], ('experts', None, None), ()),
    outputs=(TOKENS, ('shards',)),
  )
  u_btl, stats = routed(logits_bte, z_btl, mask, experts, state)
  u_btl = rms_norm(u_btl, params['norm'], config.norm_eps)
  up_ld = sharding.use(params['up'], dtype, None, 'embed')
  y_btd = sharding.einsum('btl,ld->btd', u_btl, up_ld, out=TOKENS)
  if 'shared' in params:
    y_btd += mlp(params['shared'], x_btd, config)
  return y_btd, stats


def _route_and_run(
  logits_bte: jax.Array,
  z_btl: jax.Array,
  mask_bt: jax.Array,
  experts: dict[str, jax.Array],
  state: router.RouterState,
  *,
  config: ModelConfig,
  observe: bool,
) -> tuple[jax.Array, Any]:
  """Routing of one device's tokens, by whatever device has their experts."""
  shape, moe = z_btl.shape, config.moe
  logits_te = logits_bte.reshape(-1, logits_bte.shape[-1])
  mask_t = mask_bt.reshape(-1)
  indices_tj, weights_tj, stats = router.route(
    logits_te, state, moe, config.router, mask=mask_t, observe=observe
  )
  if not observe and _is_little(experts, indices_tj):
    z_tl = z_btl.reshape(-1, shape[-1])
    u_tl = _chosen_experts(experts, z_tl, indices_tj, weights_tj, config)
    u_tl = jnp.where(mask_t[:, None], u_tl, 0)
    return u_tl.reshape(shape), jax.tree.map(lambda s: s[None], stats)
  # Only training may drop tokens: there they are counted, and what a model
  # says must not depend on how many tokens it is shown at once.
  capacity = moe.capacity if observe else None
  u_tl, dropped = run_experts(
    lambda *args: _expert_mlps(*args, config=config),
    experts,
    z_btl.reshape(-1, shape[-1]),
    Routes(indices_tj, weights_tj, mask_t),
    axis='expert' if sharding.mesh_is_set() else None,
    shared='tensor' if sharding.mesh_is_set() else None,
    strategy=moe.dispatch,
    capacity=capacity,
  )
  if capacity is not None:
    stats = stats.replace(dropped=dropped)
  stats = jax.tree.map(lambda s: s[None], stats)  # one entry a token shard
  return u_tl.reshape(shape), stats


def _is_little(experts: dict[str, jax.Array], indices_tj: jax.Array) -> bool:
  """Whether copying the chosen experts costs less than sorting rows."""
  if sharding.axis_size('expert') > 1:
    return False
  sizes = [w.size * w.dtype.itemsize / w.shape[0] for w in experts.values()]
  return indices_tj.size * sum(sizes) <= LITTLE


def _chosen_experts(experts, z_tl, indices_tj, weights_tj, config):
  """The weighted sum of each token's experts, whose weights are copied."""
  dtype, wide = z_tl.dtype, weights_tj.dtype
  # An expert that does not exist, in a row of padding, is some other.
  chosen = lambda name: jnp.take(
    experts[name], indices_tj, axis=0, mode='clip'
  ).astype(dtype)

  def project(subscripts, x, w):
    out = jnp.einsum(
      subscripts, x, w, preferred_element_type=jnp.promote_types(dtype, wide)
    )
    return out.astype(dtype)

  gate_tjf = project('tl,tjlf->tjf', z_tl, chosen('gate'))
  up_tjf = project('tl,tjlf->tjf', z_tl, chosen('up'))
  h_tjf = situ_glu(gate_tjf, up_tjf, config)
  y_tjl = project('tjf,tjfl->tjl', h_tjf, chosen('down'))
  return jnp.sum(weights_tj[..., None] * y_tjl, axis=1).astype(dtype)


def _expert_mlps(
  experts: dict[str, jax.Array],
  z_gl: jax.Array,
  group_sizes_e: jax.Array,
  *,
  config: ModelConfig,
) -> jax.Array:
  """SiTU-GLU of every row by its expert."""
  run = lambda x, name: grouped_matmul(x, experts[name], group_sizes_e)
  h_gf = situ_glu(run(z_gl, 'gate'), run(z_gl, 'up'), config)
  return run(h_gf, 'down')


class LatentMoe(nn.Module):
  """`moe_layer` with its own parameters."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x_btd, *, state, mask=None, observe=False):
    return moe_layer(
      declare(self, moe_parameters(self.config)),
      x_btd,
      self.config,
      state=state,
      mask=mask,
      observe=observe,
    )
