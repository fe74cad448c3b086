"""Time of the grouped matmul, against its floor and `jax.lax.ragged_dot`.

The floor is the larger of the traffic that cannot be avoided over the bandwidth
of a large copy and the operations over the rate of one large matmul in the same
dtype, both measured in the same process. The gradient counts three matmuls.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.grouped_matmul.arg_specs import ArgSpec, tagged
from pallas_kernels.timing import copy_bandwidth, median_seconds

COLUMNS = ('spec', 'pass', 'ms', 'floor_ms', 'times_floor', 'peer_ratio')


def run(
  specs: Iterable[ArgSpec] | None = None,
  *,
  implementation: str | None = None,
  repeats: int = 10,
) -> list[dict[str, float | str]]:
  """Two rows a spec, printed and returned; `peer_ratio` above 1 is faster.

  Args:
    specs: None takes those tagged 'bench'.
    implementation: as for `grouped_matmul`.
    repeats: timed calls, of which the median is reported.
  """
  specs = tagged('bench') if specs is None else tuple(specs)
  bandwidth = copy_bandwidth(repeats)
  rates = {dtype: matmul_rate(dtype) for dtype in {s.dtype for s in specs}}
  ours = lambda *arguments: grouped_matmul(
    *arguments, implementation=implementation
  )
  print(' '.join(f'{name:>12}' for name in COLUMNS))
  rows = []
  for spec in specs:
    for kind, passes in (('forward', 1), ('gradient', 3)):
      floor = max(
        passes * traffic(spec) / bandwidth,
        passes * operations(spec) / rates[spec.dtype],
      )
      seconds = _seconds(ours, spec, kind, repeats)
      peer = _seconds(jax.lax.ragged_dot, spec, kind, repeats)
      values = seconds * 1e3, floor * 1e3, seconds / floor, peer / seconds
      rows.append(dict(zip(COLUMNS, (spec.name, kind, *values))))
      cells = ' '.join(f'{value:12.3f}' for value in values)
      print(f'{spec.name:>12} {kind:>12} {cells}')
  return rows


def traffic(spec: ArgSpec) -> int:
  """Bytes of the rows, the weights of groups in use and the output."""
  used = int((spec.group_sizes() > 0).sum())
  elements = spec.rows * (spec.width + spec.out_width)
  elements += used * spec.width * spec.out_width
  return elements * jnp.dtype(spec.dtype).itemsize


def operations(spec: ArgSpec) -> int:
  """Multiplications and additions of the rows in use."""
  return 2 * int(spec.group_sizes().sum()) * spec.width * spec.out_width


def matmul_rate(dtype: str, size: int = 1024) -> float:
  """Operations a second of one square matmul here."""
  x = jnp.ones((size, size), dtype)
  return 2 * size**3 / median_seconds(jax.jit(jnp.matmul), x, x, repeats=5)


def _seconds(function, spec, kind, repeats):
  lhs, rhs, group_sizes = spec.arguments()

  def gradient(lhs, rhs, group_sizes):
    out, pull = jax.vjp(lambda x, w: function(x, w, group_sizes), lhs, rhs)
    return out, pull(jnp.ones_like(out))

  timed = jax.jit(function if kind == 'forward' else gradient)
  return median_seconds(timed, lhs, rhs, group_sizes, repeats=repeats)
