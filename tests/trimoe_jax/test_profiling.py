"""The memory report's numbers, and a trace window that opens once."""

import jax
import jax.numpy as jnp
import pytest

from trimoe_jax import profiling


def test_memory_report_has_the_compiled_sizes():
  step = jax.jit(lambda x: x + x @ x, donate_argnums=0)
  compiled = step.lower(jnp.ones((256, 256))).compile()
  text = profiling.memory_report(
    compiled, micro_batches=2, remat='block', loss_chunk=2048
  )
  sizes = dict(
    line.split(maxsplit=1) for line in text.splitlines() if line.endswith('B')
  )
  assert sizes['arguments'] == '256.0 KiB'
  assert sizes['outputs'] == '0 B'  # donated
  assert sizes['total'] == '512.0 KiB' and 'peak' in sizes
  for knob in ('remat=block', 'micro_batches=2', 'loss_chunk=2048'):
    assert knob in text


def test_trace_window_opens_once(tmp_path, monkeypatch):
  calls = []
  monkeypatch.setattr(
    jax.profiler, 'start_trace', lambda path: calls.append('start')
  )
  monkeypatch.setattr(jax.profiler, 'stop_trace', lambda: calls.append('stop'))

  def run(first, steps):
    calls.clear()
    with profiling.TraceWindow(tmp_path, 3, 4) as window:
      for step in range(first, first + steps):
        window.before(step)
        calls.append(step)
        window.after(step, jnp.zeros(1))
    return calls

  assert run(1, 6) == [1, 2, 'start', 3, 4, 'stop', 5, 6]
  assert run(4, 2) == ['start', 4, 'stop', 5]
  assert run(2, 2) == [2, 'start', 3, 'stop']  # the run ends inside
  assert run(5, 1) == [5]
  with pytest.raises(ValueError, match='steps 4 to 3'):
    profiling.TraceWindow(tmp_path, 4, 3)


def test_a_trace_is_written(tmp_path):
  with profiling.TraceWindow(tmp_path, 1, 1) as window:
    window.before(1)
    window.after(1, jnp.ones(8) * 2)
  assert list(tmp_path.rglob('*.xplane.pb'))
