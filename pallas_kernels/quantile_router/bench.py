"""Time of routing with statistics, against its floor and a sorting peer.

The floor is the traffic that cannot be avoided (logits in; indices, weights,
cutoff and counts out) over the bandwidth of a large copy, measured in the same
process. The peer gets the same bias naively: it keeps every required bias and
sorts each expert's column over the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from pallas_kernels.quantile_router.api import route
from pallas_kernels.quantile_router.arg_specs import ArgSpec, tagged
from pallas_kernels.quantile_router.statistics import (
  quantile_of_counts,
  quantile_of_margins,
)
from pallas_kernels.timing import copy_bandwidth, median_seconds

COLUMNS = ('spec', 'ms', 'floor_ms', 'times_floor', 'peer_ms', 'peer_ratio')


def run(
  specs: Iterable[ArgSpec] | None = None,
  *,
  implementation: str | None = None,
  repeats: int = 10,
  bandwidth: float | None = None,
) -> list[dict[str, float | str]]:
  """One row a spec, printed and returned; `peer_ratio` above 1 is faster.

  Args:
    specs: None takes those tagged 'bench'.
    implementation: as for `route`.
    repeats: timed calls, of which the median is reported.
    bandwidth: bytes a second for the floor; None measures it.
  """
  if bandwidth is None:
    bandwidth = copy_bandwidth(repeats)
  print(' '.join(f'{name:>12}' for name in COLUMNS))
  rows = []
  for spec in tagged('bench') if specs is None else specs:
    row = _row(spec, bandwidth, implementation, repeats)
    rows.append(row)
    cells = (row[name] for name in COLUMNS)
    print(
      ' '.join(
        f'{c:>12}' if isinstance(c, str) else f'{c:12.3f}' for c in cells
      )
    )
  return rows


def traffic(spec: ArgSpec) -> int:
  """Bytes that routing has to read and write once."""
  read = spec.tokens * spec.experts * 4
  written = spec.tokens * (spec.top_k * 8 + 4)
  return read + written + spec.experts * spec.num_bins * 4


def _row(spec, bandwidth, implementation, repeats):
  logits, bias, statistics = spec.arguments()

  @jax.jit
  def routed(logits, bias, statistics):
    routing = route(
      logits,
      bias,
      top_k=spec.top_k,
      statistics=statistics,
      implementation=implementation,
    )
    valid = jnp.sum(routing.valid, dtype=jnp.int32)
    solved = quantile_of_counts(
      routing.counts, bias, valid, statistics=statistics, top_k=spec.top_k
    )
    return routing, solved

  @jax.jit
  def peer(logits, bias):
    routing = route(logits, bias, top_k=spec.top_k)
    margins_et = (routing.cutoff[:, None] - jax.nn.sigmoid(logits)).T
    valid = jnp.sum(routing.valid, dtype=jnp.int32)
    return routing, quantile_of_margins(margins_et, valid, spec.top_k)

  ours = median_seconds(routed, logits, bias, statistics, repeats=repeats)
  theirs = median_seconds(peer, logits, bias, repeats=repeats)
  floor = traffic(spec) / bandwidth
  values = (ours * 1e3, floor * 1e3, ours / floor, theirs * 1e3, theirs / ours)
  return dict(zip(COLUMNS, (spec.name, *values)))
