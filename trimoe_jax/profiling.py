"""What a compiled step needs in memory, and a trace of some steps."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
from absl import logging


def memory_report(
  compiled: Any, *, micro_batches: int, remat: str, loss_chunk: int
) -> str:
  """A table of a compiled step's device memory, with what would change it.

  Args:
    compiled: `jax.jit(f).lower(...).compile()`.
    micro_batches: parts that a batch is worked through in, as configured.
    remat: rematerialisation policy, as configured.
    loss_chunk: tokens whose logits exist at once, as configured.

  Returns:
    Several lines, sizes for one device. Temporaries are mostly activations and
    gradients. The total is a bound; the peak is the backend's own number, and
    on a CPU it leaves out part of the temporaries.
  """
  stats = compiled.memory_analysis()
  if stats is None:
    return 'memory: this backend reports nothing about compiled programs.'
  rows = {
    'arguments': stats.argument_size_in_bytes,
    'outputs': stats.output_size_in_bytes - stats.alias_size_in_bytes,
    'temporaries': stats.temp_size_in_bytes,
  }
  rows['total'] = sum(rows.values())
  rows['peak'] = stats.peak_memory_in_bytes
  lines = ['memory of one compiled step, on each device:']
  lines += [f'  {name:<12}{_size(value):>12}' for name, value in rows.items()]
  limit = _device_limit()
  if limit:
    share = 100 * rows['total'] / limit
    lines.append(f'  {"device":<12}{_size(limit):>12}  (total: {share:.0f} %)')
  lines += [
    'less memory, in this order:',
    f'  remat={remat}: none > block > full; costs up to one more forward pass',
    f'  micro_batches={micro_batches}: more parts, smaller activations',
    f'  loss_chunk={loss_chunk}: fewer logits at once; slower when small',
  ]
  return '\n'.join(lines)


class TraceWindow:
  """Profiles steps `first` to `last` of a run, once.

  Args:
    directory: where the trace goes; view it with XProf or Perfetto.
    first: number of the first step in the trace, from 1.
    last: number of the last one.

  Raises:
    ValueError: the window is empty.
  """

  def __init__(self, directory: str | pathlib.Path, first: int, last: int):
    if not 1 <= first <= last:
      raise ValueError(
        f'the profile window is steps {first} to {last}; it needs '
        '1 <= first <= last.'
      )
    self._directory = pathlib.Path(directory)
    self._first, self._last = first, last
    self._running = False

  def __enter__(self) -> TraceWindow:
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def before(self, step: int) -> None:
    """Call before step `step` is dispatched; may start the trace.

    A run that resumes inside the window traces the rest of it.
    """
    if not self._running and self._first <= step <= self._last:
      jax.profiler.start_trace(self._directory)
      self._running = True

  def after(self, step: int, outputs: Any) -> None:
    """Call after step `step` was dispatched; may end the trace.

    Args:
      step: its number.
      outputs: arrays of the step; waited for, so that the trace holds it all.
    """
    if self._running and step >= self._last:
      jax.block_until_ready(outputs)
      self.close()

  def close(self) -> None:
    """Ends a trace that still runs."""
    if self._running:
      self._running = False
      jax.profiler.stop_trace()
      logging.info('the profile is in %s', self._directory)


def _device_limit() -> int | None:
  """Bytes that a program may use on one device, where the device says so."""
  stats = jax.local_devices()[0].memory_stats()
  return (stats or {}).get('bytes_limit')


def _size(count: int) -> str:
  value = float(count)
  for unit in ('B', 'KiB', 'MiB', 'GiB'):
    if value < 1024 or unit == 'GiB':
      break
    value /= 1024
  return f'{value:.1f} {unit}' if unit != 'B' else f'{count} B'
