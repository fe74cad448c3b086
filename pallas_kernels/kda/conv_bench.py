"""Time of short convolutions side by side, against their floor and XLA.

The floor is the traffic that cannot be avoided over the bandwidth of a large
copy, measured in the same process: forward reads x and writes the output; the
gradient reads x and the output's cotangent and writes x's, on top of the
forward pass. The peer is XLA's form with its automatic derivative.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pallas_kernels.kda.short_conv import short_convolutions
from pallas_kernels.timing import copy_bandwidth, median_seconds

COLUMNS = ('shape', 'pass', 'ms', 'floor_ms', 'times_floor', 'peer_ratio')


def run(
  *,
  shapes: str = '4x8192x3x16x128',
  width: int = 4,
  implementation: str | None = None,
  repeats: int = 10,
) -> list[dict[str, float | str]]:
  """Two rows a shape, printed and returned; `peer_ratio` above 1 is faster.

  Args:
    shapes: B x T x inputs x H x K, several by commas; bfloat16.
    width: taps.
    implementation: as for `short_convolution`.
    repeats: timed calls, of which the median is reported.
  """
  bandwidth = copy_bandwidth(repeats)
  print(' '.join(f'{name:>14}' for name in COLUMNS))
  rows = []
  for name in shapes.split(','):
    shape = tuple(map(int, name.split('x')))
    for kind, moved in (('forward', 2), ('gradient', 5)):
      ours = _seconds(shape, width, (kind, implementation, repeats))
      peer = _seconds(shape, width, (kind, 'xla', repeats))
      floor = moved * 2 * math.prod(shape) / bandwidth
      values = ours * 1e3, floor * 1e3, ours / floor, peer / ours
      rows.append(dict(zip(COLUMNS, (name, kind, *values))))
      cells = ' '.join(f'{value:14.3f}' for value in values)
      print(f'{name:>14} {kind:>14} {cells}')
  return rows


def _seconds(shape, width: int, how) -> float:
  kind, implementation, repeats = how
  keys = jax.random.split(jax.random.key(0), 3)
  x, cotangents = (jax.random.normal(k, shape, jnp.bfloat16) for k in keys[:2])
  cotangents = tuple(cotangents[:, :, i] for i in range(shape[2]))
  taps = jax.random.normal(keys[2], (*shape[2:], width))

  def forward(x, taps):
    return short_convolutions(x, taps, implementation=implementation)

  def gradient(x, taps, cotangents):
    out, pull = jax.vjp(forward, x, taps)
    return out, pull(cotangents)

  if kind == 'forward':
    return median_seconds(jax.jit(forward), x, taps, repeats=repeats)
  timed = jax.jit(gradient)
  return median_seconds(timed, x, taps, cotangents, repeats=repeats)
