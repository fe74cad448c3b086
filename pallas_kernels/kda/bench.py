"""Time of Kimi Delta Attention, against its floor and its recurrence.

The floor is the larger of two times: the bytes that every chunked form has to
move once, over the bandwidth of a large copy; and the operations of its matrix
products, over the rate of one large product in the same dtype. Both rates are
measured in the same process. The peer is the reference, token after token.

  python -m experiments.bench kda --specs=small,k3_head
  python -m experiments.bench kda --shapes=1x8192x96,1300+547x96 --peers=fla,jla

The second form is for GPUs: see `device_bench`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.bench import matmul_rate
from pallas_kernels.kda import arg_specs, device_bench
from pallas_kernels.kda.api import kda
from pallas_kernels.timing import copy_bandwidth, median_seconds

COLUMNS = ('spec', 'pass', 'ms', 'floor_ms', 'times_floor', 'peer_ratio')


def run(
  specs: Iterable[arg_specs.ArgSpec] | None = None,
  *,
  shapes: str | None = None,
  peers: str = '',
  passes: str = 'forward,gradient',
  implementation: str | None = None,
  chunk_size: int = 64,
  save: str = 'inputs',
  repeats: int = 5,
  peer: str | None = 'reference',
) -> list[dict[str, float | str]]:
  """Two rows a spec, printed and returned; `peer_ratio` above 1 is faster.

  Args:
    specs: None takes those tagged 'bench'.
    shapes: instead of specs, BxTxH by commas, K = V = 128, bfloat16; packed
      documents as their lengths, 1300+547x96.
    peers: 'fla', 'jla' by commas, public implementations beside those shapes;
      fla@1x8192x96 only at that one.
    passes: 'forward', 'gradient' (both passes) by commas, for shapes.
    implementation, chunk_size, save: as for `kda`.
    repeats: timed calls, of which the median is reported.
    peer: the implementation to compare with; None leaves the ratio out (nan).
  """
  options = {'chunk_size': chunk_size, 'save': save}
  if shapes is not None:
    return device_bench.run(
      shapes,
      [name for name in peers.split(',') if name],
      passes.split(','),
      floor_of=traffic,
      operations_of=functools.partial(operations, chunk_size=chunk_size),
      implementation=implementation,
      **options,
    )
  specs = arg_specs.tagged('bench') if specs is None else tuple(specs)
  bandwidth = copy_bandwidth(repeats)
  rates = {dtype: matmul_rate(dtype) for dtype in {s.dtype for s in specs}}
  print(' '.join(f'{name:>12}' for name in COLUMNS))
  rows = []
  for spec in specs:
    for kind in ('forward', 'gradient'):
      floor = max(
        traffic(spec, kind) / bandwidth,
        operations(spec, kind, chunk_size) / rates[spec.dtype],
      )
      time = functools.partial(_seconds, spec, kind, repeats, options)
      ours = time(implementation)
      other = float('nan') if peer is None else time(peer)
      values = ours * 1e3, floor * 1e3, ours / floor, other / ours
      rows.append(dict(zip(COLUMNS, (spec.name, kind, *values))))
      cells = ' '.join(f'{value:12.3f}' for value in values)
      print(f'{spec.name:>12} {kind:>12} {cells}')
  return rows


def traffic(spec: arg_specs.ArgSpec, kind: str) -> int:
  """Bytes of the arguments and results of one pass, or of both passes.

  Forward reads q, k, v, gate, beta and writes the output. The gradient reads
  those and the output's cotangent, and writes five gradients.
  """
  size = jnp.dtype(spec.dtype).itemsize
  tokens = spec.batch * spec.length
  keys = 2 * spec.heads * spec.key_dim
  gates = spec.value_heads * (spec.key_dim + 1)
  values = spec.value_heads * spec.value_dim
  forward = keys + gates + 2 * values
  both = forward + 2 * (keys + gates) + 3 * values
  return tokens * size * (forward if kind == 'forward' else both)


def operations(spec: arg_specs.ArgSpec, kind: str, chunk_size: int) -> int:
  """Multiplications and additions of the chunked form's matrix products.

  Forward 4 C K + 4 C V + 6 K V a token and head; the gradient adds
  14 K V + 10 C V + 12 C K with the states kept and P, M, E, U computed again.
  """
  k, v, c = spec.key_dim, spec.value_dim, min(chunk_size, spec.length)
  forward = 4 * c * k + 4 * c * v + 6 * k * v
  both = forward + 14 * k * v + 10 * c * v + 12 * c * k
  cells = spec.batch * spec.length * spec.value_heads
  return cells * (forward if kind == 'forward' else both)


def _seconds(spec, kind, repeats, options, implementation):
  arguments, cotangents = spec.arguments(), spec.cotangents()
  options = options | {'implementation': implementation}

  def forward(arguments, cotangents):
    return kda(**arguments, **options)

  def gradient(arguments, cotangents):
    return arg_specs.outputs_and_gradients(arguments, cotangents, **options)

  timed = jax.jit(forward if kind == 'forward' else gradient)
  return median_seconds(timed, arguments, cotangents, repeats=repeats)
