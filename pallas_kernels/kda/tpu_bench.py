"""Static TPU schedules of Kimi Delta Attention, and of a public peer.

Bundles are counted per head and 64 tokens, so that heads in a grid step, chunk
sizes and whole computations compare. See `tpu_schedule` for what a schedule
says and what it leaves out.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import tpu_schedule
from pallas_kernels.kda import inputs as kda_inputs
from pallas_kernels.kda import mosaic_tpu, mosaic_tpu_decode
from pallas_kernels.kda.mosaic_tpu_forward import Outputs

_PEER = 'tokamax==0.0.17'
_WIDTH = 128
_DOCUMENTS = 16
COLUMNS = ('spec', 'kernel', 'all', 'ms', 'mxu', 'vpu', 'xlu', 'spill')
COLUMNS += ('vmem_mb', 'temp_mb')


class Shape(NamedTuple):
  """One sequence of `length` tokens, K = V = 128, bfloat16.

  Arrays come and go as [B, T, H D], as a projection writes and reads them; a
  parameter [B, T, H, D] of a program would be laid out anew first.
  """

  length: int = 8192
  heads: int = 24
  chunk: int = 64
  segmented: bool = True

  @property
  def cells(self) -> float:
    """Heads times 64 tokens."""
    return self.heads * self.length / 64

  def array(self, *shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)

  def raw(self, *rows: int) -> kda_inputs.Raw:
    """Shapes of the arguments with these leading axes, heads in one axis."""
    row = self.array(*rows, self.heads * _WIDTH)
    beta = self.array(*rows, self.heads)
    a_log = self.array(self.heads, dtype=jnp.float32)
    bias = self.array(self.heads, _WIDTH, dtype=jnp.float32)
    return kda_inputs.Raw(row, row, row, row, beta, a_log, bias)

  def by_head(self, x):
    return x.reshape(*x.shape[:-1], self.heads, _WIDTH)

  def split(self, raw: kda_inputs.Raw) -> kda_inputs.Raw:
    return kda_inputs.Raw(*map(self.by_head, raw[:4]), *raw[4:])

  def merge(self, raw: kda_inputs.Raw) -> kda_inputs.Raw:
    return kda_inputs.Raw(*map(_merged, raw[:4]), *raw[4:])

  def state(self, count: int = 1):
    return self.array(count, self.heads, _WIDTH, _WIDTH, dtype=jnp.float32)

  def ids(self):
    ids = self.array(1, self.length, dtype=jnp.int32)
    return ids if self.segmented else None

  def settings(self, save: str) -> kda_inputs.Settings:
    scale = _WIDTH**-0.5
    flags = (True, True, True)
    return kda_inputs.Settings(-5.0, scale, *flags, self.chunk, save)


def _merged(x):
  return x.reshape(*x.shape[:-2], -1)


def _forward(shape: Shape, save: str):
  settings = shape.settings(save)
  outputs = Outputs(states=save != 'inputs', inverse=save == 'state_and_t')

  def run(raw, state, ids):
    out, state, saved = mosaic_tpu.run_forward(
      (settings, False), shape.split(raw), state, ids, outputs
    )
    return _merged(out), state, saved

  return run, (shape.raw(1, shape.length), shape.state(), shape.ids())


def _backward(shape: Shape, save: str):
  """The gradient alone, from what the forward pass saved."""
  settings = shape.settings(save)
  _, _, saved = jax.eval_shape(*_flat(_forward(shape, save)))

  def run(raw, state, ids, saved, cotangents):
    residuals = shape.split(raw), state, ids, saved
    d_out, d_state = cotangents
    d_raw, d_initial, _ = mosaic_tpu.run_backward(
      (settings, False), residuals, (shape.by_head(d_out), d_state)
    )
    return shape.merge(d_raw), d_initial

  raw, state = shape.raw(1, shape.length), shape.state()
  return run, (raw, state, shape.ids(), saved, (raw.v, state))


def _flat(computation):
  run, arguments = computation
  return run, *arguments


def _affine(shape: Shape):
  settings = shape.settings('inputs')

  def run(raw, ids):
    return mosaic_tpu.affine_summary(shape.split(raw), ids, settings)

  return run, (shape.raw(1, shape.length), shape.ids())


def _decode(shape: Shape, rows: int = 64):
  settings = shape.settings('inputs')

  def run(raw, state, slots):
    return mosaic_tpu_decode.step(shape.split(raw), state, slots, settings)

  slots = shape.array(rows, dtype=jnp.int32)
  return run, (shape.raw(rows), shape.state(rows), slots)


# Computations by the kernel that each is about.
COMPUTATIONS = {
  'forward': lambda shape: _forward(shape, 'inputs'),
  'forward_saving': lambda shape: _forward(shape, 'state_and_t'),
  'backward': lambda shape: _backward(shape, 'state_and_t'),
  'backward_state': lambda shape: _backward(shape, 'state'),
  'affine': _affine,
  'decode': _decode,
}


def kernel_bundles(
  name: str, chip: str, shape: Shape
) -> tuple[float, tpu_schedule.Program, tpu_schedule.Schedule]:
  """Bundles of one grid step, per head and 64 tokens (per head to decode).

  Args:
    name: a key of COMPUTATIONS.
  """
  function, arguments = COMPUTATIONS[name](shape)
  schedule = tpu_schedule.compile_for(chip, function, *arguments)
  program = schedule.program('kda_')
  raw = jax.eval_shape(shape.split, arguments[0])
  if name == 'decode':
    heads = mosaic_tpu_decode.heads_of(shape.heads, 1, 4 * _WIDTH**2)
    return program.bundles / heads, program, schedule
  heads = mosaic_tpu.plan_of(raw, shape.settings('inputs'), True).heads
  return program.bundles / heads * 64 / shape.chunk, program, schedule


def run(
  chip: str = 'v6e', *, peer: bool = True, names=tuple(COMPUTATIONS), **shape
) -> list[dict[str, float | str]]:
  """A row for each computation, printed and returned.

  kernel: bundles of our kernel per head and 64 tokens; all: those of every
  program, with iterations; ms: all of them at the chip's stated clock; mxu,
  vpu, xlu: used share of the slots; spill: stores and loads of spilled
  registers per bundle; vmem_mb and temp_mb: memory. To decode, `kernel` is per
  head of a row and `all` per head of all rows.

  Args:
    chip: a key of tpu_schedule.CHIPS.
    peer: also tokamax, compiled by the same compiler, if installed.
    names: keys of COMPUTATIONS.
    **shape: fields of `Shape`.
  """
  shape = Shape(**shape)
  clock = tpu_schedule.CHIPS[chip].clock_ghz
  print(f'{chip} at {clock} GHz, {shape}')
  print(' '.join(f'{name:>14}' for name in COLUMNS))
  rows = []
  for name in names:
    bundles, program, schedule = kernel_bundles(name, chip, shape)
    cells = shape.heads if name == 'decode' else shape.cells
    rows.append(_row(name, bundles, (program,), (schedule, cells)))
  if peer:
    rows += _peer_rows(chip, shape)
  return rows


def _row(name: str, bundles: float, kernels, whole) -> dict[str, float | str]:
  schedule, cells = whole
  total = sum(p.bundles for p in kernels)
  share = lambda unit: (
    sum(p.units[unit] for p in kernels) / (kernels[0].slots[unit] * total)
  )
  spills = ('VSTORE:SPILL', 'VLOAD:FILL')
  values = (
    name,
    bundles,
    schedule.executed / cells,
    schedule.seconds * 1e3,
    max(share('MATMUL'), share('MATPUSH')),
    share('VALU'),
    share('XLU'),
    sum(p.units[unit] for p in kernels for unit in spills) / total,
    max(p.vmem_bytes for p in kernels) / 2**20,
    schedule.temporary_bytes / 1e6,
  )
  row = dict(zip(COLUMNS, values))
  print(' '.join([f'{name:>14}', *(f'{x:14.3f}' for x in values[1:])]))
  return row


def _peer_rows(chip: str, shape: Shape) -> list[dict[str, float | str]]:
  """tokamax's KDA forward, and its gradient with the forward it repeats."""
  try:
    from tokamax._src import config
    from tokamax._src.ops.kda import api
  except ImportError:
    print(
      f'The peer is not installed; `pip install {_PEER}` into a separate '
      'environment, it is no dependency of this project.'
    )
    return []
  options = dict(lower_bound=-5.0, use_qk_l2norm=True, use_gate_in_kernel=True)
  if shape.segmented:
    options['max_num_segments'] = _DOCUMENTS

  def forward(arrays, ids):
    q, k, v, gate, beta, a_log, bias = arrays
    return api.kimi_delta_attention(
      *(q, k, v, gate, beta),
      a_log=a_log,
      delta_time_bias=bias,
      segment_ids=ids,
      output_final_state=True,
      implementation='mosaic',
      **options,
    )

  def gradient(arrays, ids, d_out):
    return jax.vjp(lambda x: forward(x, ids)[0], arrays)[1](d_out)

  row = shape.array(shape.heads, 1, shape.length, _WIDTH)
  wide = functools.partial(shape.array, dtype=jnp.float32)
  arrays = (*[row] * 4, wide(*row.shape[:3]), wide(shape.heads))
  arrays += (wide(shape.heads * _WIDTH),)
  rows = []
  with config.cross_compile(True):
    for name, function, more in (
      ('peer forward', forward, ()),
      ('peer gradient', gradient, (row,)),
    ):
      arguments = arrays, shape.ids(), *more
      schedule = tpu_schedule.compile_for(chip, function, *arguments)
      kernels = [p for p in schedule.programs if p.units['MATMUL']]
      bundles = sum(p.executed for p in kernels) / shape.cells
      rows.append(_row(name, bundles, kernels, (schedule, shape.cells)))
  return rows
