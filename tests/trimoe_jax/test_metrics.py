"""Records, rates, the guard and the progress line."""

import io
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from trimoe_jax import metrics


class Clock:
  """A clock that tests move by hand."""

  def __init__(self):
    self.now = 0.0

  def __call__(self):
    return self.now


class Terminal(io.StringIO):
  def isatty(self):
    return True


def test_records_are_json_one_a_line(tmp_path):
  path = tmp_path / 'run' / 'metrics.jsonl'
  with metrics.JsonlWriter(path) as writer:
    writer.write(
      {
        'step': np.int32(1),
        'loss': jnp.float32(0.5),
        'half': jnp.bfloat16(1.5),
        'norm': math.inf,
        'max_violation': jnp.array([1.0, jnp.nan]),
        'stage': 'one',
        'nested': {'ok': True, 'none': None},
      }
    )
    # Readable before the writer closes: a killed run keeps its records.
    (record,) = metrics.read_jsonl(path)
  assert record == {
    'step': 1,
    'loss': 0.5,
    'half': 1.5,
    'norm': None,
    'max_violation': [1.0, None],
    'stage': 'one',
    'nested': {'ok': True, 'none': None},
  }
  with pytest.raises(TypeError, match='a record holds object'):
    metrics.JsonlWriter(path).write({'x': object()})


def test_resume_drops_what_will_be_repeated(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  with metrics.JsonlWriter(path) as writer:
    writer.write({'event': 'start'})
    for step in range(1, 6):
      writer.write({'step': step})
  with path.open('a') as file:
    file.write('{"step": 6, "lo')
  with metrics.JsonlWriter(path, resume_step=3) as writer:
    writer.write({'step': 4, 'again': True})
  records = metrics.read_jsonl(path)
  assert [r.get('step') for r in records] == [None, 1, 2, 3, 4]
  assert records[-1]['again']
  # Without a step to resume from, only the cut line goes.
  with path.open('a') as file:
    file.write('{"st')
  metrics.JsonlWriter(path).close()
  assert metrics.read_jsonl(path) == records
  assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_broken_line_is_named(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"step": 1}\nnot json\n{"step": 2}\n')
  with pytest.raises(ValueError, match=r'metrics.jsonl:2: not JSON'):
    metrics.read_jsonl(path)
  path.write_text('[1]\n')
  with pytest.raises(ValueError, match=r':1: not a JSON object'):
    metrics.read_jsonl(path)


def test_throughput_counts_from_the_last_start():
  clock = Clock()
  meter = metrics.Throughput(clock)
  assert math.isnan(meter.rate)
  meter.add(100)
  clock.now = 50.0  # compiling
  meter.start()
  meter.add(200)
  clock.now = 52.0
  meter.add(200)
  assert meter.rate == 200.0


def test_guard_stops_after_its_patience():
  guard = metrics.NanGuard(patience=1)
  guard.check(1, math.nan)
  guard.check(2, 1.0)
  guard.check(3, math.inf)
  with pytest.raises(FloatingPointError, match=r'step 4.*grad_norm=3'):
    guard.check(4, math.nan, grad_norm=3.0)
  with pytest.raises(FloatingPointError, match='step 1: loss=nan'):
    metrics.NanGuard().check(1, math.nan)


def test_plain_progress_prints_now_and_then():
  clock, stream = Clock(), io.StringIO()
  with metrics.Progress(
    5, initial=1, stream=stream, interval=10.0, clock=clock
  ) as progress:
    progress.message('compiling stage 1')
    clock.now = 100.0
    progress.pause()
    for _ in range(4):
      clock.now += 6.0
      progress.update(stage='1/4', loss=2.5, rate=12_345.0)
  lines = stream.getvalue().splitlines()
  assert lines == [
    'compiling stage 1',
    'stage 1/4, step 2/5: loss 2.5000, 12.3k tokens/s, 0:18 left',
    'stage 1/4, step 4/5: loss 2.5000, 12.3k tokens/s, 0:06 left',
    'stage 1/4, step 5/5: loss 2.5000, 12.3k tokens/s, 0:00 left',
  ]


def test_a_terminal_gets_a_bar():
  stream = Terminal()
  with metrics.Progress(3, stream=stream) as progress:
    progress.message('compiling stage 1')
    for _ in range(3):
      progress.update(stage='1/4', loss=2.5, rate=950.0, left=3700.0)
  text = stream.getvalue()
  assert 'compiling stage 1' in text
  assert 'stage 1/4' in text and '3/3' in text
  assert 'loss 2.5000, 950 tokens/s, 1:01:40 left' in text
