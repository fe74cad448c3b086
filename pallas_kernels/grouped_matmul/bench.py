"""Time of the grouped matmul, against its floor and another implementation.

The floor is the larger of the traffic that cannot be avoided over the bandwidth
of a large copy and the operations over the rate of one large matmul in the same
dtype, both measured in the same process. The gradient counts three matmuls.
Accelerators get several calls at a time, and calls too short for the host three
in a program, so that they never wait for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.grouped_matmul.arg_specs import ArgSpec, tagged
from pallas_kernels.timing import copy_bandwidth, median_seconds

SHORT = 2e-4  # seconds of a call; the host takes up to a quarter to start one
COLUMNS = ('spec', 'pass', 'ms', 'floor_ms', 'times_floor', 'peer_ratio')
# Matmuls of each pass: of the output, the rows' gradient, the weights' one.
PASSES = {'forward': 1, 'gradient': 3, 'rows': 1, 'weights': 1}


def run(
  specs: Iterable[ArgSpec] | None = None,
  *,
  implementation: str | None = None,
  passes: str = 'forward,gradient',
  peer: str | None = 'ragged_dot',
  repeats: int = 10,
) -> list[dict[str, float | str]]:
  """A row for each spec and pass, printed and returned.

  Args:
    specs: None takes those tagged 'bench'.
    implementation: as for `grouped_matmul`.
    passes: 'forward', 'gradient' (with the forward pass), 'rows' or 'weights'
      (one gradient alone), by commas.
    peer: 'ragged_dot' for `jax.lax.ragged_dot`, dense on GPUs, or another
      implementation, or None; `peer_ratio` above 1 means it is slower, NaN
      that it cannot run.
    repeats: timed calls, of which the median is reported.

  Raises:
    ValueError: an unknown pass.
  """
  unknown = set(passes.split(',')) - set(PASSES)
  if unknown:
    raise ValueError(f'passes={passes!r}; choose from {sorted(PASSES)}.')
  specs = tagged('bench') if specs is None else tuple(specs)
  bandwidth = copy_rate()
  rates = {dtype: matmul_rate(dtype) for dtype in {s.dtype for s in specs}}
  print(' '.join(f'{name:>12}' for name in COLUMNS))
  rows = []
  for spec in specs:
    arrays = _arrays(spec)
    for kind in passes.split(','):
      work = operations(spec) / rates[spec.dtype], traffic(spec) / bandwidth
      floor = PASSES[kind] * max(work)
      timed = functools.partial(
        _seconds, arrays=arrays, kind=kind, floor=floor, repeats=repeats
      )
      seconds = timed(_named(implementation))
      ratio = _of_peer(timed, peer) / seconds
      values = seconds * 1e3, floor * 1e3, seconds / floor, ratio
      rows.append(dict(zip(COLUMNS, (spec.name, kind, *values))))
      cells = ' '.join(f'{value:12.3f}' for value in values)
      print(f'{spec.name:>12} {kind:>12} {cells}', flush=True)
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


def copy_rate() -> float:
  """Bytes a second that a large negation reads and writes here."""
  if dispatch.device_kind() == 'cpu':
    return copy_bandwidth(5)
  x = jnp.ones(2**27, jnp.float32)
  once = jax.jit(jnp.negative)
  return 2 * x.nbytes / _queued_seconds(once, x, seconds=5e-4, repeats=5)


def matmul_rate(dtype: str) -> float:
  """Operations a second of one square matmul here."""
  size = 1024 if dispatch.device_kind() == 'cpu' else 8192
  x = jax.random.normal(jax.random.key(0), (size, size), jnp.dtype(dtype))
  once = jax.jit(jnp.matmul)
  return 2 * size**3 / _queued_seconds(once, x, x, seconds=2e-3, repeats=5)


def _named(implementation: str | None) -> Callable:
  return functools.partial(grouped_matmul, implementation=implementation)


def _of_peer(timed: Callable, name: str | None) -> float:
  """Seconds of the peer; NaN without one and where it cannot run."""
  if name is None:
    return float('nan')
  try:
    peer = jax.lax.ragged_dot if name == 'ragged_dot' else _named(name)
    return timed(peer)
  except NotImplementedError as refusal:
    print(f'no peer: {refusal}')
    return float('nan')


def _arrays(spec: ArgSpec):
  lhs, rhs, sizes = spec.arguments()
  shape = spec.rows, spec.out_width
  return lhs, rhs, sizes, jax.random.normal(jax.random.key(1), shape, lhs.dtype)


def _pass(function, kind, lhs, rhs, sizes, cotangent):
  if kind == 'forward':
    return function(lhs, rhs, sizes)
  out, pull = jax.vjp(lambda x, w: function(x, w, sizes), lhs, rhs)
  dlhs, drhs = pull(cotangent)
  return {'rows': dlhs, 'weights': drhs, 'gradient': (out, dlhs, drhs)}[kind]


def _seconds(function, *, arrays, kind, floor, repeats):
  calls = 3 if floor < SHORT and dispatch.device_kind() != 'cpu' else 1
  several = jax.jit(
    lambda *arrays: _in_turn(function, kind, arrays, calls=calls)
  )
  seconds = _queued_seconds(
    several, *arrays, seconds=calls * floor, repeats=repeats
  )
  return seconds / calls


def _in_turn(function, kind, arrays, *, calls: int) -> list:
  """Results of equal calls of which each waits for the one before."""
  lhs, rhs, sizes, cotangent = arrays
  results = []
  for _ in range(calls):
    result = _pass(function, kind, lhs, rhs, sizes, cotangent)
    sizes, result = jax.lax.optimization_barrier((sizes, result))
    results.append(result)
  return results


def _queued_seconds(once, *arrays, seconds, repeats):
  """Median of a call that takes `seconds` or more."""
  queued = 1
  if dispatch.device_kind() != 'cpu':
    queued = max(2, min(100, int(1e-2 / seconds)))

  def burst(*arrays):
    for _ in range(queued):
      out = once(*arrays)
    return out

  return median_seconds(burst, *arrays, repeats=repeats) / queued
