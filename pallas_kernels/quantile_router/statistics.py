"""What is counted while routing, and the quantile read from the counts.

Expert j is selected by token i exactly when its bias exceeds the required bias
r_ij = cutoff_i - score_ij, so the bias that gives expert j its share of the
tokens is the (top_k / experts)-quantile of its column. A histogram of the
columns holds that quantile to one bin, and histograms of micro-batches and
shards add up: they are integers, so the sum does not depend on the split.

Source: Kimi K3 technical report, section 2.3.3; Quantile balancing,
kexue.fm/archives/11619.

Suffixes: e experts, t tokens, i edges, n bins.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

Estimator = Literal['uniform', 'log_edges']

# The first edge beside the old bias, as a fraction of the outermost distance.
INNER = 1e-4


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=('lo', 'hi'),
  meta_fields=('num_bins', 'estimator'),
)
@dataclasses.dataclass(frozen=True)
class Statistics:
  """The histogram of required biases that `route` fills.

  Attributes:
    lo: float32 scalar, lower end of the range, fixed for the whole step.
    hi: float32 scalar, upper end.
    num_bins: bins of one expert's histogram.
    estimator: 'uniform' has bins of one width over [lo, hi] and puts what lies
      outside into the first or last bin. 'log_edges' has num_bins - 1 edges
      whose distance from the current bias grows geometrically, the outermost
      being lo and hi, so that bins are narrow where the quantile is expected;
      num_bins is then odd and at least 5.
  """

  lo: jax.Array
  hi: jax.Array
  num_bins: int = 1000
  estimator: Estimator = 'uniform'

  def __post_init__(self):
    if self.estimator not in ('uniform', 'log_edges'):
      raise ValueError(
        f'estimator={self.estimator!r} counts nothing; use uniform or '
        'log_edges.'
      )
    if self.num_bins < 2:
      raise ValueError(
        f'num_bins={self.num_bins}; a quantile needs at least 2 bins.'
      )
    if self.estimator == 'log_edges' and (
      self.num_bins < 5 or self.num_bins % 2 == 0
    ):
      raise ValueError(
        f'num_bins={self.num_bins} does not fit log_edges, which has as many '
        'edges on either side of the bias; use an odd number from 5, e.g. 33.'
      )


def uniform_bins(margins, statistics: Statistics):
  """int32 bin of every required bias; `margins` has any shape."""
  num_bins = statistics.num_bins
  scale = num_bins / (statistics.hi - statistics.lo)
  position = jnp.floor((margins - statistics.lo) * scale)
  return jnp.clip(position, 0, num_bins - 1).astype(jnp.int32)


def log_edges(bias_e, lo, hi, num_bins: int):
  """Edges [..., E, num_bins - 1], ascending, around each expert's bias.

  edge = clip(bias -/+ delta, lo, hi), delta geometric over four decades up to
  the distance hi - lo; the outermost two are exactly lo and hi. Bin i holds
  edge[i - 1] < r <= edge[i].
  """
  side = (num_bins - 1) // 2
  lo, hi = jnp.asarray(lo)[..., None, None], jnp.asarray(hi)[..., None, None]
  steps = jnp.linspace(0.0, 1.0, side, dtype=jnp.float32)
  delta = (hi - lo) * INNER ** (1.0 - steps)
  centre = bias_e[..., None]
  edges_ei = jnp.concatenate(
    [centre - jnp.flip(delta, -1), centre + delta], axis=-1
  )
  edges_ei = jnp.clip(edges_ei, lo, hi)
  return edges_ei.at[..., :1].set(lo).at[..., -1:].set(hi)


def target(valid, experts: int, top_k: int):
  """(floor, remainder) of valid * top_k / experts, the load of one expert.

  The product is never formed: valid * top_k leaves int32 at 134 million tokens
  for top_k = 16.

  Args:
    valid: int32, number of counted tokens.
    experts: number of experts E.
    top_k: experts a token selects.

  Returns:
    int32 pair; the real target is floor + remainder / experts.
  """
  rest = (valid % experts) * top_k
  return valid // experts * top_k + rest // experts, rest % experts


def crossing(counts_en, valid, top_k: int):
  """Where each expert's cumulative count crosses the target load.

  Args:
    counts_en: int32 [..., E, bins].
    valid: int32 [...], the number of tokens in every row of `counts_en`.
    top_k: experts a token selects.

  Returns:
    (bin int32 [..., E], fraction float32 [..., E] in [0, 1] of that bin,
    inside int32 [..., E] tokens in that bin). The bin is the first one whose
    cumulative count reaches ceil(target). Without tokens the fraction is 0.
  """
  experts = counts_en.shape[-2]
  floor, remainder = target(valid[..., None], experts, top_k)
  ceil = floor + (remainder > 0)
  cumulative = jnp.cumsum(counts_en, axis=-1)
  bin_e = jnp.argmax(cumulative >= ceil[..., None], axis=-1)
  take = lambda x: jnp.take_along_axis(x, bin_e[..., None], -1)[..., 0]
  inside_e = take(counts_en)
  needed = (floor - (take(cumulative) - inside_e)).astype(jnp.float32)
  fraction = (needed + remainder / experts) / jnp.maximum(inside_e, 1)
  return bin_e, jnp.clip(fraction, 0.0, 1.0).astype(jnp.float32), inside_e


def quantile_of_counts(counts_en, bias_e, valid, *, statistics, top_k: int):
  """Required bias that gives each expert its target load, from a histogram.

  b_j = left + fraction * (right - left) of the crossing bin. Batched over
  leading axes (layers), which `statistics.lo` and `.hi` then carry too.

  Args:
    counts_en: int32 [..., E, bins], every row summing to `valid`.
    bias_e: float32 [..., E], the bias that was in force while counting.
    valid: int32 [...].
    statistics: the `Statistics` that were counted.
    top_k: experts a token selects.

  Returns:
    float32 [..., E], not centred.
  """
  bin_e, fraction_e, _ = crossing(counts_en, valid, top_k)
  lo, hi = statistics.lo[..., None], statistics.hi[..., None]
  if statistics.estimator == 'uniform':
    return lo + (bin_e + fraction_e) * ((hi - lo) / statistics.num_bins)
  edges_ei = log_edges(
    bias_e, statistics.lo, statistics.hi, statistics.num_bins
  )
  padded = jnp.concatenate(
    [edges_ei[..., :1], edges_ei, edges_ei[..., -1:]], axis=-1
  )
  take = lambda x: jnp.take_along_axis(x, bin_e[..., None], -1)[..., 0]
  left, right = take(padded[..., :-1]), take(padded[..., 1:])
  return left + fraction_e * (right - left)


def quantile_of_margins(margins_et, valid, top_k: int):
  """Exact required bias: the (floor(target) + 1)-th smallest of each row.

  With it #{r < b} <= target <= #{r <= b}, the optimality condition of the
  balanced assignment.

  Args:
    margins_et: [..., E, T]; rows that do not count hold +inf.
    valid: int32 [...], counted tokens.
    top_k: experts a token selects.

  Returns:
    float32 [..., E]; +inf without tokens.
  """
  experts = margins_et.shape[-2]
  floor, _ = target(valid, experts, top_k)
  ordered = jnp.sort(margins_et, axis=-1)
  index = jnp.broadcast_to(floor[..., None, None], (*ordered.shape[:-1], 1))
  return jnp.take_along_axis(ordered, index, axis=-1)[..., 0]
