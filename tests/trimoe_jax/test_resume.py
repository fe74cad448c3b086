"""A run that was killed and resumed equals the one that was not, bitwise."""

import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from trimoe_jax import loop, report, train_state
from trimoe_jax.metrics import read_jsonl
from trimoe_jax.run import prepare, read_config


def finish(run, should_stop=lambda: False):
  return loop.train(run, should_stop=should_stop)


def stop_after(steps):
  left = iter(range(steps - 1))
  return lambda: next(left, None) is None


@pytest.fixture
def whole(small_config, tmp_path):
  run = prepare(small_config(), tmp_path / 'whole')
  return run, finish(run)


class Killed(Exception):
  """What a crash looks like from inside."""


def kill_after(steps):
  left = iter(range(steps - 1))

  def check():
    if next(left, None) is None:
      raise Killed

  return check


def assert_bitwise(a, b):
  def same(x, y):
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
      x, y = jax.random.key_data(x), jax.random.key_data(y)
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))

  jax.tree.map(same, a, b)


def records(run, kind):
  times = ('seconds', 'rate')
  return [
    {k: v for k, v in r.items() if k not in times}
    for r in read_jsonl(run.metrics_path)
    if r['kind'] == kind
  ]


def test_killed_in_stage_two_and_stopped_again(whole, small_config, tmp_path):
  run, state = whole
  other = prepare(small_config(), tmp_path / 'killed')
  with pytest.raises(Killed):
    finish(other, kill_after(8))  # two steps past the checkpoint at step 6
  again = prepare(small_config(), tmp_path / 'killed')
  assert finish(again, stop_after(1)) is None  # SIGTERM: saves and returns
  resumed = finish(prepare(small_config(), tmp_path / 'killed'))
  assert_bitwise(state, resumed)
  assert records(run, 'step') == records(again, 'step')
  assert records(run, 'eval') == records(again, 'eval')
  assert records(run, 'warm_start') == records(again, 'warm_start')
  (warm,) = records(run, 'warm_start')
  assert np.shape(warm['max_vio']) == (4, 2)
  first = records(run, 'step')[0]
  assert np.shape(first['load_bands']) == (2, 7)
  assert max(first['max_vio']) < max(warm['max_vio'][0])

  # The report is made once; a finished run is recognised by it.
  assert not report.is_finished(again)
  report.write(again, resumed)
  assert report.is_finished(again)
  text = again.report_path.read_text()
  assert text.count('| 64 |') == 1 and text.count('| 128 |') == 1
  balance = text[text.index('## Balance') : text.index('## Figures')]
  assert '| layer | MaxVio: cold | MaxVio: step 1 | end |' in balance
  assert balance.count('\n| 2 |') == balance.count('\n| 3 |') == 1
  pictures = {p.name for p in (again.workdir / 'figures').iterdir()}
  assert pictures == {
    'loss.png',
    'max_vio.png',
    'loads.png',
    'depth_mix.png',
    'loss_by_position.png',
  }
  for name in ('config.json', 'env.json', 'metrics.jsonl', 'checkpoints'):
    assert (again.workdir / name).exists()
  assert read_config(again.workdir) == small_config()

  # Every stage's end is kept, and starts the next stage.
  with again.checkpointer() as checkpointer:
    assert {4, 10} <= set(checkpointer.steps())
    abstract = train_state.abstract(again.config, again.optimizer, again.mesh)
    kept = checkpointer.restore(abstract, 10).state
  assert_bitwise(kept, resumed)


def test_workdir_of_another_run_is_refused(small_config, tmp_path):
  prepare(small_config(), tmp_path / 'run')
  with pytest.raises(ValueError, match='seed'):
    prepare(small_config(seed=1), tmp_path / 'run')
  prepare(small_config(log_every=2), tmp_path / 'run')  # changes no number
  (tmp_path / 'mine').mkdir()
  (tmp_path / 'mine' / 'thesis.tex').write_text('x')
  with pytest.raises(ValueError, match='not empty'):
    prepare(small_config(), tmp_path / 'mine')


@pytest.mark.slow
def test_sigterm_saves_and_says_so(tmp_path):
  workdir = tmp_path / 'run'
  command = [
    sys.executable,
    '-m',
    'experiments.train',
    '--config=experiments/configs/tiny.py',
    f'--workdir={workdir}',
  ]
  process = subprocess.Popen(
    command, stderr=subprocess.PIPE, text=True, env=os.environ
  )
  for line in process.stderr:
    if ', step ' in line:
      process.send_signal(signal.SIGTERM)
      break
  rest = process.stderr.read()
  assert process.wait() == 0
  assert 'SIGTERM' in rest and 'the same command continues' in rest
  assert any((workdir / 'checkpoints').iterdir())
