"""Routing with balanced experts: select, observe, solve.

`route` is the one selection function of training and inference. Under
observation it also returns additive integer statistics of the tokens it saw; a
training step adds those of its micro-batches with `combine`, those of its
token shards with `reduce`, and calls `solve` once per optimizer step. The bias
is state, not a parameter: no gradient, no weight decay, no average over
checkpoints ever touches it, and evaluation never observes.

Time order: the state of step n routes batch n; batch n yields the state of
step n + 1. A bias solved on the batch it routes would let a token see later
tokens. `timing='in_batch'` does exactly that, for study: not causal, and over
the tokens of one call (a device's own, inside a `shard_map`). The state then is
the bias of inference; `ema` averages it over steps.

Source: Kimi K3 technical report, section 2.3.3; Quantile balancing,
kexue.fm/archives/11619; the sign rule: arXiv 2408.15664.

Suffixes: l layers, e experts, n bins, t tokens, j top-k slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

from pallas_kernels import quantile_router
from trimoe_jax import sharding
from trimoe_jax.config import MoeConfig, RouterConfig

# Bins of the 'log_edges' estimator: 16 edges on either side of the bias.
LOG_BINS = 33

# Shares of the experts at which `metrics` tells the load.
LOAD_BANDS = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)

# Largest distance of a required bias from the biases: sigmoid scores lie in
# (0, 1), so nothing is clamped. Logits are unbounded; rows whose logits spread
# further land in the outermost bins and are reached over several steps.
_REACH = {'sigmoid': 1.0, 'logit': 16.0}


@flax.struct.dataclass
class RouterState:
  """Selection bias of every layer; leading axis [L], or none for one layer.

  Attributes:
    bias: float32 [L, E], mean zero over experts under quantile balancing.
    lo: float32 [L], lower end of the histogram, fixed during a step.
    hi: float32 [L], upper end.
  """

  bias: jax.Array
  lo: jax.Array
  hi: jax.Array


@flax.struct.dataclass
class RouterStats:
  """What a step observed; every field adds up over micro-batches.

  `route` returns one layer's, the leading axes '...' being none. The model
  stacks them to [L, S, ...] over layers and token shards, `reduce` sums S.

  Attributes:
    load: int32 [..., E], counted tokens routed to each expert.
    valid: int32 [...], counted tokens: neither padding nor non-finite.
    nonfinite: int32 [...], tokens left out because a logit was not finite.
    counts: int32 [..., E, B], histogram of required biases, or None.
    margins: float32 [..., E, T], the required biases themselves for the
      'exact' estimator (+inf where not counted), or None. They are
      concatenated, not added, so a scan cannot carry them.
    score_sum: float32 [..., E], sum of normalised scores for the auxiliary
      loss, or None. The one field with a gradient.
    dropped: int32 [...], routed copies that found no room, or None where
      expert dispatch has no capacity; `route` does not know and leaves None.
    top_k: experts a token selects (static).
  """

  load: jax.Array
  valid: jax.Array
  nonfinite: jax.Array
  counts: jax.Array | None = None
  margins: jax.Array | None = None
  score_sum: jax.Array | None = None
  dropped: jax.Array | None = None
  top_k: int = flax.struct.field(pytree_node=False, default=1)


def init_state(
  num_layers: int, config: RouterConfig, moe: MoeConfig
) -> RouterState:
  """Zero bias and the range that follows from it."""
  bias_le = jnp.zeros((num_layers, moe.experts), jnp.float32)
  return from_bias(bias_le, config)


def from_bias(bias_e: jax.Array, config: RouterConfig) -> RouterState:
  """The state with this float32 bias [..., E], and the range around it."""
  reach = _REACH[config.space]
  lo = jnp.min(bias_e, axis=-1) - reach
  return RouterState(bias_e, lo, jnp.max(bias_e, axis=-1) + reach)


def freeze(config: RouterConfig) -> RouterConfig:
  """The configuration under which `solve` keeps the bias.

  For fine-tuning on small batches and for reinforcement learning: routing
  still adds the bias, loads are still counted, nothing moves.
  """
  return dataclasses.replace(config, balance='none')


def route(
  logits,
  state: RouterState,
  moe: MoeConfig,
  config: RouterConfig,
  *,
  mask=None,
  observe: bool = False,
):
  """Experts and weights of every token, and what was observed.

  Sees the tokens it is given: where they are sharded, call it on each device's
  own inside a `shard_map` (selection under automatic partitioning gathers all
  scores), return the statistics as one entry a shard and `reduce` them later.

  Args:
    logits: [..., E], float32 with a matmul precision of HIGHEST.
    state: of this layer, bias [E], lo and hi scalars.
    moe: experts, top_k, weight_scale.
    config: estimator, cutoff, timing, space, balance.
    mask: bool [...], False for padding; None counts every token.
    observe: True in training forwards only.

  Returns:
    (indices int32 [..., top_k], weights float32 [..., top_k], RouterStats or
    None without `observe`). Only weights and `score_sum` carry a gradient.

  Raises:
    TypeError: the bias is not float32.
    ValueError: sizes do not fit.
  """
  in_batch = config.balance == 'quantile' and config.timing == 'in_batch'
  first = _select(
    logits,
    state.bias,
    mask,
    moe=moe,
    config=config,
    statistics=_statistics(state, config) if observe else None,
  )
  if not observe:
    return first.indices, first.weights, None
  used = first
  if in_batch:
    stats = _observe(logits, first, first, mask=mask, moe=moe, config=config)
    bias_e = jax.lax.stop_gradient(_quantile(state, stats, config))
    bias_e = jnp.where(stats.valid > 0, bias_e, state.bias)
    used = _select(logits, bias_e, mask, moe=moe, config=config)
  stats = _observe(logits, first, used, mask=mask, moe=moe, config=config)
  return used.indices, used.weights, stats


def combine(first: RouterStats, second: RouterStats) -> RouterStats:
  """Statistics of two micro-batches together: sums; margins side by side."""
  margins = first.margins
  if margins is not None:
    margins = jnp.concatenate([margins, second.margins], axis=-1)
  added = jax.tree.map(
    jnp.add, first.replace(margins=None), second.replace(margins=None)
  )
  return added.replace(margins=margins)


def reduce(stats: RouterStats) -> RouterStats:
  """Statistics [L, ...] of a whole step from those of S token shards.

  The only communication of the router: on a mesh one all-reduce of integers.
  Call it once a step, outside the layer scan and the micro-batch loop. The
  integer sum makes the next bias independent of how tokens were sharded.

  Args:
    stats: [L, S, ...], a token on exactly one of the S shards.
  """
  margins = stats.margins
  if margins is not None:
    margins = sharding.constrain(margins, *(None,) * margins.ndim)
    layers, shards, experts, tokens = margins.shape
    margins = jnp.swapaxes(margins, 1, 2)
    margins = margins.reshape(layers, experts, shards * tokens)
  added = jax.tree.map(
    lambda x: jnp.sum(x, axis=1), stats.replace(margins=None)
  )
  return added.replace(margins=margins)


def solve(
  state: RouterState, stats: RouterStats, config: RouterConfig
) -> RouterState:
  """The state that routes the next step; call it once per optimizer step.

      b_j = (top_k / E)-quantile of the required biases of expert j
      b  <- ema * old + (1 - ema) * b;  b <- b - mean b
      lo = min b - reach, hi = max b + reach   (reach: 1, in logit space 16)

  A layer keeps its state when it counted no token or its new bias would not be
  finite. A skipped optimizer step drops its statistics and does not call this.
  The result depends on the arguments only; without `ema` solving twice from
  the same statistics is harmless.

  Args:
    state: [L, ...], the state all of `stats` was observed under.
    stats: [L, ...], summed over the micro-batches and shards of the step.
    config: balance 'quantile'; 'sign' moves each bias by sign_rate towards the
      mean load; 'aux_loss' and 'none' keep the state.

  Raises:
    ValueError: `stats` are not one entry a layer.
  """
  if stats.load.shape != state.bias.shape:
    raise ValueError(
      f'load has shape {stats.load.shape} and the bias {state.bias.shape}; '
      'stack the layers, and sum the token shards with `reduce`.'
    )
  if config.balance not in ('quantile', 'sign'):
    return state
  if config.balance == 'sign':
    bias_e = state.bias + config.sign_rate * _deficit(stats)
  else:
    bias_e = _quantile(state, stats, config)
    if config.ema:
      bias_e = config.ema * state.bias + (1.0 - config.ema) * bias_e
    bias_e = bias_e - jnp.mean(bias_e, axis=-1, keepdims=True)
  sound = (stats.valid > 0) & jnp.all(jnp.isfinite(bias_e), axis=-1)
  solved = from_bias(bias_e, config)
  return jax.tree.map(
    lambda new, old: jnp.where(
      sound.reshape(sound.shape + (1,) * (new.ndim - sound.ndim)), new, old
    ),
    solved,
    state,
  )


def warm_start(
  state: RouterState,
  observe: Callable[[RouterState], RouterStats],
  config: RouterConfig,
  *,
  steps: int = 4,
) -> RouterState:
  """The state after `steps` forward-only solves, before the first update.

  A cold start overloads experts tenfold and more; the first solve brings that
  to about 0.2 of the mean load, four to the noise.

  Args:
    state: usually `init_state`'s.
    observe: statistics of one step under a state, reduced, by a forward pass
      without gradient; jit it. It may draw a new batch at every call.
    config: as in training, but for `ema`: an average would hold on to the
      cold bias.
    steps: number of solves.
  """
  config = dataclasses.replace(config, ema=0.0)
  solve_once = jax.jit(solve, static_argnums=2)
  for _ in range(steps):
    state = solve_once(state, observe(state), config)
  return state


def aux_loss(stats: RouterStats) -> jax.Array:
  """Load-balancing loss summed over layers; 1 a layer at perfect balance.

      E * sum_j f_j P_j,  f_j = load_j / (valid * top_k),
      P_j = mean over tokens of s_j / sum_e s_e

  The gradient flows through P. Multiply by `config.aux_weight` and add it to
  the training loss under balance='aux_loss'; it is over the batch, so padding
  is left out and sequences are not balanced one by one.
  """
  if stats.score_sum is None:
    raise ValueError(
      'these statistics carry no scores; observe with '
      "router.balance='aux_loss' to get an auxiliary loss."
    )
  valid = jnp.maximum(stats.valid, 1).astype(jnp.float32)[..., None]
  fraction_e = stats.load.astype(jnp.float32) / (valid * stats.top_k)
  experts = stats.load.shape[-1]
  return experts * jnp.sum(fraction_e * stats.score_sum / valid)


def metrics(stats: RouterStats) -> dict[str, jax.Array]:
  """Balance of each layer, float32 [L] unless noted.

  max_vio = max load / mean load - 1; min_vio = 1 - min load / mean load;
  cv = standard deviation / mean; dead = experts without a token (int32);
  nonfinite = tokens left out (int32). With a capacity also dropped, the share
  of the routed copies that found no room. With a histogram also crossing_mass,
  the largest share of the tokens in the bin where an expert's quantile lies,
  and unresolved (int32), the experts for which that bin holds more than their
  whole target load: the bins are too wide for these scores, use more of them,
  log_edges or the logit space. load_bands float32 [L, bands] is the load in
  units of the mean at which LOAD_BANDS of the experts have less or as much.
  """
  load_e = stats.load.astype(jnp.float32)
  mean = jnp.maximum(jnp.mean(load_e, axis=-1), 1e-9)
  found = {
    'max_vio': jnp.max(load_e, axis=-1) / mean - 1.0,
    'min_vio': 1.0 - jnp.min(load_e, axis=-1) / mean,
    'cv': jnp.std(load_e, axis=-1) / mean,
    'dead': jnp.sum(stats.load == 0, axis=-1, dtype=jnp.int32),
    'nonfinite': stats.nonfinite,
    'load_bands': _bands(load_e) / mean[..., None],
  }
  if stats.dropped is not None:
    copies = jnp.maximum(stats.valid * stats.top_k, 1).astype(jnp.float32)
    found['dropped'] = stats.dropped.astype(jnp.float32) / copies
  if stats.counts is not None:
    _, _, inside_e = quantile_router.crossing(
      stats.counts, stats.valid, stats.top_k
    )
    valid = jnp.maximum(stats.valid, 1).astype(jnp.float32)
    found['crossing_mass'] = jnp.max(inside_e, axis=-1) / valid
    wide = inside_e / valid[..., None] > stats.top_k / stats.load.shape[-1]
    found['unresolved'] = jnp.sum(wide, axis=-1, dtype=jnp.int32)
  return found


def _bands(load_e: jax.Array) -> jax.Array:
  """Loads [..., bands] of the experts at LOAD_BANDS, the nearest ranks."""
  last = load_e.shape[-1] - 1
  ordered_e = jnp.sort(load_e, axis=-1)
  return jnp.stack([ordered_e[..., round(b * last)] for b in LOAD_BANDS], -1)


def _statistics(state: RouterState, config: RouterConfig):
  """The histogram to fill, or None when the rule needs none."""
  if config.balance != 'quantile' or config.estimator == 'exact':
    return None
  num_bins = LOG_BINS if config.estimator == 'log_edges' else config.num_bins
  return quantile_router.Statistics(
    state.lo, state.hi, num_bins, config.estimator
  )


def _select(logits, bias_e, mask, *, moe, config, statistics=None):
  return quantile_router.route(
    logits,
    bias_e,
    top_k=moe.top_k,
    mask=mask,
    statistics=statistics,
    cutoff=config.cutoff,
    space=config.space,
    weight_scale=moe.weight_scale,
  )


def _observe(logits, counted, used, *, mask, moe, config) -> RouterStats:
  """Statistics of one layer: margins of `counted`, loads of `used`."""
  valid = counted.valid
  total = jnp.sum(valid, dtype=jnp.int32)
  real = valid.size if mask is None else jnp.sum(mask, dtype=jnp.int32)
  routes = jnp.broadcast_to(valid[..., None], used.indices.shape)
  load = jnp.zeros(moe.experts, jnp.int32)
  load = load.at[used.indices.reshape(-1)].add(
    routes.reshape(-1).astype(jnp.int32)
  )
  exact = config.balance == 'quantile' and config.estimator == 'exact'
  return RouterStats(
    load=load,
    valid=total,
    nonfinite=jnp.asarray(real, jnp.int32) - total,
    counts=counted.counts,
    margins=_margins(logits, counted, config) if exact else None,
    score_sum=_score_sum(logits, valid)
    if config.balance == 'aux_loss'
    else None,
    top_k=moe.top_k,
  )


def _margins(logits, routing, config):
  """Required biases [E, tokens], +inf where the token is not counted."""
  scores = jax.lax.stop_gradient(logits).astype(routing.cutoff.dtype)
  if config.space == 'sigmoid':
    scores = jax.nn.sigmoid(scores)
  margins = jnp.where(
    routing.valid[..., None], routing.cutoff[..., None] - scores, jnp.inf
  )
  return margins.reshape(-1, logits.shape[-1]).T


def _score_sum(logits, valid):
  logits = jnp.where(valid[..., None], logits.astype(jnp.float32), 0.0)
  score = jax.nn.sigmoid(logits)
  share = score / jnp.sum(score, axis=-1, keepdims=True)
  share = jnp.where(valid[..., None], share, 0.0)
  return jnp.sum(share.reshape(-1, logits.shape[-1]), axis=0)


def _quantile(state: RouterState, stats: RouterStats, config: RouterConfig):
  """Required bias of the target load, float32 [..., E], not centred."""
  if config.estimator == 'exact':
    bias_e = quantile_router.quantile_of_margins(
      stats.margins, stats.valid, stats.top_k
    )
    return bias_e.astype(jnp.float32)
  return quantile_router.quantile_of_counts(
    stats.counts,
    state.bias,
    stats.valid,
    statistics=_statistics(state, config),
    top_k=stats.top_k,
  )


def _deficit(stats: RouterStats):
  """sign(mean load - load), exact in integers."""
  floor, remainder = quantile_router.target(
    stats.valid[..., None], stats.load.shape[-1], stats.top_k
  )
  # Below the fractional mean means at most its floor.
  return jnp.sign(2 * (floor - stats.load) + (remainder > 0)).astype(
    jnp.float32
  )
