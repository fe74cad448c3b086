"""Static TPU schedules of the depth mix, beside the bound of HBM.

Bundles are counted per 8 x 128 numbers of the sources, one float32 register.
The bound is the cycles in which a chip's memory moves what a pass has to move:
forward every source and the output, backward the sources, the cotangent and the
sources' gradients. A ratio below 1 means that the kernel waits for memory. See
`tpu_schedule` for what a schedule says and what it leaves out.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import tpu_schedule
from pallas_kernels.attention_residual import api

COLUMNS = ('pass', 'bundles', 'bound', 'ratio', 'valu', 'vload', 'xlu')
COLUMNS += ('vmem_mb', 'temp_mb')
# Published bytes a second of the memory of a core. A v5p's is that of its two
# cores, as is the schedule: each runs half of the steps.
BANDWIDTH = {'v5e': 819e9, 'v5p': 2765e9, 'v6e': 1640e9, 'tpu7x': 3690e9}
KERNELS = {'forward': 'depth_mix_.', 'backward': 'depth_mix_gradient'}


def arguments(sources: int, tokens: int, width: int, masked: bool):
  """Shapes of sources, partial, query, gain, mask or None, and cotangents."""
  shape = jax.ShapeDtypeStruct
  row = shape((tokens, width), jnp.bfloat16)
  vector = shape((width,), jnp.float32)
  mask = shape((sources,), jnp.bool_) if masked else None
  return (
    shape((sources - 1, tokens, width), jnp.bfloat16),
    row,
    vector,
    vector,
    mask,
    (row, shape((sources, tokens), jnp.float32)),
  )


def both_passes(implementation: str, normalized: bool):
  """A function of `arguments`."""

  def run(sources, partial, query, gain, mask, cotangents):
    def forward(*arrays):
      return api.mix(
        *(arrays[i] for i in (0, 2, 3)),
        partial=arrays[1],
        mask=mask,
        norm_gain=gain if normalized else None,
        return_weights=True,
        implementation=implementation,
      )

    outputs, pull = jax.vjp(forward, sources, partial, query, gain)
    return outputs, pull(cotangents)

  return run


def measure(
  chip: str,
  *,
  sources: int = 9,
  tokens: int = 4096,
  width: int = 7168,
  masked: bool = False,
  normalized: bool = False,
) -> tuple[list[dict[str, float | str]], tpu_schedule.Schedule]:
  """The rows of `run`, and the schedule they are of."""
  schedule = tpu_schedule.compile_for(
    chip,
    both_passes('mosaic_tpu', normalized),
    *arguments(sources, tokens, width, masked),
  )
  cycles_a_byte = tpu_schedule.CHIPS[chip].clock_ghz * 1e9 / BANDWIDTH[chip]
  moved = {'forward': sources + 1, 'backward': 2 * sources + 1}
  rows = []
  for kind, name in KERNELS.items():
    program = schedule.program(name)
    bundles = program.executed / (sources * tokens * width / 1024)
    bound = moved[kind] / sources * 2048 * cycles_a_byte
    use = program.utilization()
    values = (
      kind,
      bundles,
      bound,
      bundles / bound,
      *(use[unit] for unit in ('VALU', 'VLOAD', 'XLU')),
      program.vmem_bytes / 2**20,
      schedule.temporary_bytes / 1e6,
    )
    rows.append(dict(zip(COLUMNS, values)))
  return rows, schedule


def run(
  chip: str = 'v6e',
  *,
  sources: int = 9,
  tokens: int = 4096,
  width: int = 7168,
  masked: bool = False,
  normalized: bool = False,
  peer: bool = True,
) -> list[dict[str, float | str]]:
  """A row for each pass, printed and returned.

  bundles: of the kernel with its iterations, a register of the sources; bound:
  of memory; ratio: bundles to bound; valu, vload, xlu: used share of the slots;
  vmem_mb and temp_mb: memory, the latter in HBM.

  Args:
    chip: a key of tpu_schedule.CHIPS.
    sources: with the running sum, bfloat16.
    masked: whether a mask is given.
    normalized: whether an RMSNorm follows.
    peer: also XLA's both passes by the same compiler.
  """
  rows, _ = measure(
    chip,
    sources=sources,
    tokens=tokens,
    width=width,
    masked=masked,
    normalized=normalized,
  )
  print(f'{chip}: {sources} sources, {tokens} tokens, width {width}')
  print(' '.join(f'{name:>9}' for name in COLUMNS))
  for row in rows:
    cells = (
      f'{x:>9}' if isinstance(x, str) else f'{x:9.2f}' for x in row.values()
    )
    print(' '.join(cells))
  if peer:
    _print_peer(chip, (sources, tokens, width, masked))
  return rows


def _print_peer(chip: str, size):
  schedule = tpu_schedule.compile_for(
    chip, both_passes('xla', False), *arguments(*size)
  )
  sources, tokens, width, _ = size
  bundles = schedule.executed / (sources * tokens * width / 1024)
  print(
    f'XLA, both passes: {bundles:.1f} bundles, '
    f'{schedule.temporary_bytes / 1e6:.0f} MB in HBM'
  )
