"""Selection and histogram as the definitions read; the oracle of the tests.

Suffixes: t tokens, e experts, n bins.
"""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.quantile_router import statistics as stat


def select_and_count(scores_te, bias_e, valid_t, *, top_k, cutoff, statistics):
  """Same contract as `xla.select_and_count`, by a full stable sort.

  Memory is tokens * experts * bins: small inputs only.
  """
  biased_te = scores_te + bias_e.astype(scores_te.dtype)
  order_te = jnp.argsort(-biased_te, axis=1, stable=True)
  ranked_te = jnp.take_along_axis(biased_te, order_te, axis=1)
  cutoff_t = ranked_te[:, top_k]
  if cutoff == 'midpoint':
    cutoff_t = (ranked_te[:, top_k - 1] + cutoff_t) / 2
  indices = order_te[:, :top_k].astype(jnp.int32)
  if statistics is None:
    return indices, cutoff_t, None
  margins_te = cutoff_t[:, None] - scores_te
  if statistics.estimator == 'uniform':
    bins_te = stat.uniform_bins(margins_te, statistics)
  else:
    edges_ei = stat.log_edges(
      bias_e, statistics.lo, statistics.hi, statistics.num_bins
    )
    bins_te = jnp.sum(margins_te[:, :, None] > edges_ei, axis=-1)
  member_ten = bins_te[:, :, None] == jnp.arange(statistics.num_bins)
  counted_ten = member_ten & valid_t[:, None, None]
  return indices, cutoff_t, jnp.sum(counted_ten, axis=0, dtype=jnp.int32)
