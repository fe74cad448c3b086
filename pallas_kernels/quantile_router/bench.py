"""Time of routing with statistics, against its floor and its peers.

The floor is the traffic that cannot be avoided (logits in; indices, weights,
cutoff and counts out) over the bandwidth of a large copy, measured in the same
process. Peers: the plain path; its selection alone, `lax.top_k` of the logits;
and what balances exactly, which keeps every required bias and sorts each
expert's column over the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.quantile_router.api import route
from pallas_kernels.quantile_router.arg_specs import ArgSpec, tagged
from pallas_kernels.quantile_router.statistics import quantile_of_margins
from pallas_kernels.timing import median_seconds

COLUMNS = (
  'spec',
  'ms',
  'floor_ms',
  'times_floor',
  'xla_ms',
  'top_k_ms',
  'sort_ms',
  'xla_ratio',
)
# Calls between two waits, so that what is timed is the device and not the call.
_CALLS = {'cpu': 1}
_MOST_CALLS = 20


def run(
  specs: Iterable[ArgSpec] | None = None,
  *,
  implementation: str | None = None,
  repeats: int = 10,
  bandwidth: float | None = None,
) -> list[dict[str, float | str]]:
  """One row a spec, printed and returned; `xla_ratio` above 1 is faster.

  Args:
    specs: None takes those tagged 'bench', and 'device' where there is one.
    implementation: as for `route`.
    repeats: timed calls, of which the median is reported.
    bandwidth: bytes a second for the floor; None measures it.
  """
  if bandwidth is None:
    x = jnp.ones(2**26, jnp.float32)
    seconds = _seconds(jax.jit(jnp.negative), x, repeats=repeats)
    bandwidth = 2 * x.nbytes / seconds
  if specs is None:
    specs = tagged('bench')
    if dispatch.device_kind() != 'cpu':
      specs += tagged('device')
  print(' '.join(f'{name:>12}' for name in COLUMNS))
  rows = []
  for spec in specs:
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


def _seconds(function, *arguments, repeats: int) -> float:
  calls = _CALLS.get(dispatch.device_kind(), _MOST_CALLS)

  def several(*args):
    for _ in range(calls):
      result = function(*args)
    return result

  return median_seconds(several, *arguments, repeats=repeats) / calls


def _row(spec, bandwidth, implementation, repeats):
  logits, bias, statistics = spec.arguments()

  def routed(name):
    return jax.jit(
      lambda logits, bias, statistics: route(
        logits,
        bias,
        top_k=spec.top_k,
        statistics=statistics,
        implementation=name,
      )
    )

  @jax.jit
  def by_sorting(logits, bias):
    routing = route(logits, bias, top_k=spec.top_k)
    margins_et = (routing.cutoff[:, None] - jax.nn.sigmoid(logits)).T
    valid = jnp.sum(routing.valid, dtype=jnp.int32)
    return routing, quantile_of_margins(margins_et, valid, spec.top_k)

  best = jax.jit(lambda logits: jax.lax.top_k(logits, spec.top_k + 1))
  given = logits, bias, statistics
  ours = _seconds(routed(implementation), *given, repeats=repeats)
  plain = _seconds(routed('xla'), *given, repeats=repeats)
  top_k = _seconds(best, logits, repeats=repeats)
  sort = median_seconds(by_sorting, logits, bias, repeats=repeats)
  floor = traffic(spec) / bandwidth
  times = [1e3 * x for x in (ours, floor, plain, top_k, sort)]
  values = (*times[:2], ours / floor, *times[2:], plain / ours)
  return dict(zip(COLUMNS, (spec.name, *values)))
