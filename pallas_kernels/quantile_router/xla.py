"""Selection and histogram in pure JAX, for any device.

Nothing of size tokens * experts * bins is formed: uniform bins are one integer
scatter-add, log edges one pass of compares an edge.

Suffixes: t tokens, e experts, i edges, n bins.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.quantile_router import statistics as stat


def select_and_count(scores_te, bias_e, valid_t, *, top_k, cutoff, statistics):
  """Selected experts, cutoff and histogram of [tokens, E] scores.

  Args:
    scores_te: float [T, E], finite.
    bias_e: float32 [E].
    valid_t: bool [T], rows that are counted.
    top_k: experts a token selects.
    cutoff: 'kplus1' or 'midpoint', see `api.route`.
    statistics: `Statistics` or None.

  Returns:
    (indices int32 [T, top_k], cutoff [T], counts int32 [E, bins] or None).
  """
  biased_te = scores_te + bias_e.astype(scores_te.dtype)
  values, indices = jax.lax.top_k(biased_te, top_k + 1)
  # The barriers keep the slices below out of the selection: merged into it they
  # turn the partial sort into a full one (CPU, E = 896: 7 times slower). One an
  # array: a barrier on the pair aborts XLA's partitioner.
  values = jax.lax.optimization_barrier(values)
  indices = jax.lax.optimization_barrier(indices)
  cutoff_t = values[:, top_k]
  if cutoff == 'midpoint':
    cutoff_t = (values[:, top_k - 1] + cutoff_t) / 2
  indices = indices[:, :top_k].astype(jnp.int32)
  if statistics is None:
    return indices, cutoff_t, None
  margins_te = cutoff_t[:, None] - scores_te
  if statistics.estimator == 'uniform':
    counts_en = _scatter_counts(margins_te, valid_t, statistics)
  else:
    counts_en = _threshold_counts(margins_te, bias_e, valid_t, statistics)
  return indices, cutoff_t, counts_en


def _scatter_counts(margins_te, valid_t, statistics):
  experts, num_bins = margins_te.shape[1], statistics.num_bins
  bins_te = stat.uniform_bins(margins_te, statistics)
  cell_te = bins_te + num_bins * jnp.arange(experts, dtype=jnp.int32)
  added = jnp.broadcast_to(valid_t[:, None], cell_te.shape).astype(jnp.int32)
  counts = jnp.zeros(experts * num_bins, jnp.int32)
  counts = counts.at[cell_te.reshape(-1)].add(added.reshape(-1))
  return counts.reshape(experts, num_bins)


def _threshold_counts(margins_te, bias_e, valid_t, statistics):
  edges_ei = stat.log_edges(
    bias_e, statistics.lo, statistics.hi, statistics.num_bins
  )
  # Uncounted rows lie above every edge.
  margins_te = jnp.where(valid_t[:, None], margins_te, jnp.inf)

  def below(edge_e):
    return jnp.sum(margins_te <= edge_e, axis=0, dtype=jnp.int32)

  below_ie = jax.lax.map(below, edges_ei.T)
  total = jnp.sum(valid_t, dtype=jnp.int32)
  last = jnp.broadcast_to(total, (1, below_ie.shape[1]))
  return jnp.diff(jnp.concatenate([below_ie, last]), axis=0, prepend=0).T
