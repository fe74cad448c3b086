"""Time of the depth mix, against its floor and automatic differentiation.

The floor is the traffic that cannot be avoided over the bandwidth of a large
copy, measured in the same process: forward reads every source and writes the
output; the gradient reads the sources and the output's cotangent and writes the
sources' cotangents, on top of the forward pass. The peer is the reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from pallas_kernels.attention_residual.api import mix
from pallas_kernels.attention_residual.arg_specs import ArgSpec, tagged
from pallas_kernels.timing import copy_bandwidth, median_seconds

COLUMNS = ('spec', 'pass', 'ms', 'floor_ms', 'times_floor', 'peer_ratio')


def run(
  specs: Iterable[ArgSpec] | None = None,
  *,
  implementation: str | None = None,
  repeats: int = 10,
  bandwidth: float | None = None,
) -> list[dict[str, float | str]]:
  """Two rows a spec, printed and returned; `peer_ratio` above 1 is faster.

  Args:
    specs: None takes those tagged 'bench'.
    implementation: as for `mix`.
    repeats: timed calls, of which the median is reported.
    bandwidth: bytes a second for the floor; None measures it.
  """
  if bandwidth is None:
    bandwidth = copy_bandwidth(repeats)
  print(' '.join(f'{name:>12}' for name in COLUMNS))
  rows = []
  for spec in tagged('bench') if specs is None else specs:
    for kind in ('forward', 'gradient'):
      ours = _seconds(spec, kind, implementation, repeats)
      peer = _seconds(spec, kind, 'reference', repeats)
      floor = traffic(spec, kind) / bandwidth
      values = ours * 1e3, floor * 1e3, ours / floor, peer / ours
      rows.append(dict(zip(COLUMNS, (spec.name, kind, *values))))
      cells = ' '.join(f'{value:12.3f}' for value in values)
      print(f'{spec.name:>12} {kind:>12} {cells}')
  return rows


def traffic(spec: ArgSpec, kind: str) -> int:
  """Bytes that a forward pass, or both passes, have to move once."""
  row = math.prod(spec.tokens) * spec.width * jnp.dtype(spec.dtype).itemsize
  forward = (spec.count + 1) * row
  return forward if kind == 'forward' else forward + (2 * spec.count + 1) * row


def _seconds(spec, kind, implementation, repeats):
  arguments, keywords = spec.arguments()

  def forward(arguments, keywords):
    return mix(*arguments, **keywords, implementation=implementation)

  def gradient(arguments, keywords):
    mask = {'mask': keywords['mask']} if 'mask' in keywords else {}
    of = {name: x for name, x in keywords.items() if name != 'mask'}
    run_mix = lambda arguments, of: forward(arguments, of | mask)
    out, pull = jax.vjp(run_mix, arguments, of)
    return out, pull(jnp.ones_like(out))

  function = jax.jit(forward if kind == 'forward' else gradient)
  return median_seconds(function, arguments, keywords, repeats=repeats)
