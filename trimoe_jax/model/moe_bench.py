"""Time of a whole MoE layer on one device, as a training step runs it.

Random tokens, the quantile router's own choices after it has balanced them, and
its statistics. The forward pass returns the output, the gradient pass also the
gradients of the tokens and of every parameter. Operations are those of the
matmuls of the router, the latent projections, the shared experts and each
token's chosen experts, three times as many with the gradient. Accelerators get
several calls at a time, so that they never wait for the host.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.timing import median_seconds
from trimoe_jax.config import ModelConfig, MoeConfig
from trimoe_jax.model import router
from trimoe_jax.model.latent_moe import moe_layer, moe_parameters
from trimoe_jax.model.parameters import initialize

COLUMNS = ('shape', 'pass', 'tokens', 'ms', 'tokens/s', 'TFLOP/s')
PASSES = {'forward': 1, 'gradient': 3}  # matmuls for one of the forward pass
_CALLS = {'cpu': 1}
_MOST_CALLS = 10
# The MoE layers of experiments/configs, whose remaining settings do not matter.
SHAPES = {
  'tiny': ModelConfig(),
  'mini': ModelConfig(
    width=768,
    moe=MoeConfig(
      experts=128, top_k=8, shared_experts=2, hidden=336, latent=384
    ),
  ),
}


def run(
  shape: str = 'mini', *, tokens: int = 8192, repeats: int = 10
) -> list[dict[str, float | str]]:
  """Two rows, printed and returned.

  Args:
    shape: a key of SHAPES.
    tokens: in one batch; top_k times as many rows reach the experts.
    repeats: timed calls, of which the median is reported.

  Raises:
    ValueError: an unknown shape, or no tokens.
  """
  if shape not in SHAPES:
    raise ValueError(f'shape={shape!r} is unknown; choose {sorted(SHAPES)}.')
  if tokens < 1:
    raise ValueError(f'tokens={tokens} must be at least 1.')
  config = SHAPES[shape]
  passes = {
    kind: jax.jit(functools.partial(_pass, config=config, kind=kind))
    for kind in PASSES
  }
  arguments = _arguments(config, tokens, passes['forward'])
  print(' '.join(f'{name:>12}' for name in COLUMNS))
  rows = []
  for kind, timed in passes.items():
    seconds = _seconds(timed, *arguments, repeats=repeats)
    rate = PASSES[kind] * tokens * operations(config) / seconds / 1e12
    values = tokens, seconds * 1e3, tokens / seconds, rate
    rows.append(dict(zip(COLUMNS, (shape, kind, *values))))
    cells = ' '.join(f'{value:12.3f}' for value in values[1:])
    print(f'{shape:>12} {kind:>12} {tokens:>12} {cells}', flush=True)
  return rows


def _seconds(timed, *arguments, repeats: int) -> float:
  calls = _CALLS.get(dispatch.device_kind(), _MOST_CALLS)

  def several(*args):
    for _ in range(calls):
      result = timed(*args)
    return result

  return median_seconds(several, *arguments, repeats=repeats) / calls


def operations(config: ModelConfig) -> int:
  """Multiplications and additions of one token's forward pass."""
  d, c = config.width, config.moe
  routed = 3 * c.top_k * c.latent * c.hidden
  shared = 3 * c.shared_experts * d * c.hidden
  return 2 * (d * c.experts + 2 * d * c.latent + routed + shared)


def _arguments(config: ModelConfig, tokens: int, forward):
  """(parameters, tokens, cotangent, router state that balances them)."""
  keys = jax.random.split(jax.random.key(0), 3)
  params = initialize(moe_parameters(config), keys[0])
  shape, dtype = (1, tokens, config.width), jnp.dtype(config.dtype)
  x_btd, dy_btd = (jax.random.normal(key, shape, dtype) for key in keys[1:])
  layers = router.init_state(1, config.router, config.moe)
  solve = jax.jit(functools.partial(_solve, config=config))
  state = _first(layers)
  for _ in range(config.router.warm_start):
    _, stats = forward(params, x_btd, dy_btd, state)
    layers = solve(layers, stats)
    state = _first(layers)
  return params, x_btd, dy_btd, state


def _first(layers):
  """The only layer of a tree of stacked ones."""
  return jax.tree.map(lambda x: x[0], layers)


def _solve(layers, stats, *, config):
  """The state that routes these tokens' next pass."""
  stats = router.reduce(jax.tree.map(lambda s: s[None], stats))
  return router.solve(layers, stats, config.router)


def _pass(params, x_btd, dy_btd, state, *, config, kind):
  def layer(params, x_btd):
    return moe_layer(params, x_btd, config, state=state, observe=True)

  if kind == 'forward':
    return layer(params, x_btd)
  y_btd, pull, stats = jax.vjp(layer, params, x_btd, has_aux=True)
  return y_btd, pull(dy_btd), stats
