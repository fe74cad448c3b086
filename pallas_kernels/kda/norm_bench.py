"""Time of the gated norm behind KDA, against its floor and XLA.

The floor is the traffic that cannot be avoided over the bandwidth of a large
copy, measured in the same process: forward reads x and the gate and writes the
output; the gradient reads both and the output's cotangent and writes two
gradients, on top of the forward pass. The peer is XLA's form with its automatic
derivative.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pallas_kernels.kda.gated_norm import gated_norm
from pallas_kernels.timing import copy_bandwidth, median_seconds

COLUMNS = ('shape', 'pass', 'ms', 'floor_ms', 'times_floor', 'peer_ratio')


def run(
  *,
  shapes: str = '4x8192x16x128',
  implementation: str | None = None,
  repeats: int = 10,
) -> list[dict[str, float | str]]:
  """Two rows a shape, printed and returned; `peer_ratio` above 1 is faster.

  Args:
    shapes: B x T x H x V, several by commas; bfloat16.
    implementation: as for `gated_norm`.
    repeats: timed calls, of which the median is reported.
  """
  bandwidth = copy_bandwidth(repeats)
  print(' '.join(f'{name:>14}' for name in COLUMNS))
  rows = []
  for name in shapes.split(','):
    shape = tuple(map(int, name.split('x')))
    for kind, moved in (('forward', 3), ('gradient', 8)):
      ours = _seconds(shape, (kind, implementation, repeats))
      peer = _seconds(shape, (kind, 'xla', repeats))
      floor = moved * 2 * math.prod(shape) / bandwidth
      values = ours * 1e3, floor * 1e3, ours / floor, peer / ours
      rows.append(dict(zip(COLUMNS, (name, kind, *values))))
      cells = ' '.join(f'{value:14.3f}' for value in values)
      print(f'{name:>14} {kind:>14} {cells}')
  return rows


def _seconds(shape, how) -> float:
  kind, implementation, repeats = how
  keys = jax.random.split(jax.random.key(0), 3)
  x, gate, cotangent = (
    jax.random.normal(key, shape, jnp.bfloat16) for key in keys
  )
  gain = jnp.ones(shape[-1:])

  def forward(x, gate, gain):
    return gated_norm(x, gate, gain, eps=1e-5, implementation=implementation)

  def gradient(x, gate, gain, cotangent):
    out, pull = jax.vjp(forward, x, gate, gain)
    return out, pull(cotangent)

  if kind == 'forward':
    return median_seconds(jax.jit(forward), x, gate, gain, repeats=repeats)
  timed = jax.jit(gradient)
  return median_seconds(timed, x, gate, gain, cotangent, repeats=repeats)
