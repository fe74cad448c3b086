"""Two processes on this machine train one run, lose one, and continue."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from trimoe_jax import hosts
from trimoe_jax.metrics import read_jsonl

CONFIG = """
from experiments.configs import as_config_dict
from trimoe_jax.config import TrainConfig, from_dict

def get_config(variant=''):
  return as_config_dict(from_dict(TrainConfig, {values}))
"""


def free_port() -> int:
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return s.getsockname()[1]


class Cluster:
  """`experiments.train` in processes of two devices each."""

  def __init__(self, folder, config, processes=2):
    self.workdir = folder / 'run'
    port, path = free_port(), folder / 'config.py'
    path.write_text(CONFIG.format(values=config))
    self.logs = [folder / f'{port}-{i}.log' for i in range(processes)]
    flags = ['--xla_force_host_platform_device_count=2']
    environment = os.environ | {'XLA_FLAGS': ' '.join(flags)}
    command = [sys.executable, '-m', 'experiments.train', f'--config={path}']
    command += [f'--workdir={self.workdir}', '--distributed']
    command += [f'--coordinator=127.0.0.1:{port}', f'--processes={processes}']
    self.processes = [
      subprocess.Popen(
        [*command, f'--process={i}'],
        env=environment,
        stdout=log.open('w'),
        stderr=subprocess.STDOUT,
      )
      for i, log in enumerate(self.logs)
    ]

  def __enter__(self):
    return self

  def __exit__(self, *_):
    for process in self.processes:
      process.kill()

  def steps(self):
    path = self.workdir / 'metrics.jsonl'
    records = read_jsonl(path) if path.exists() else []
    return [r for r in records if r['kind'] == 'step']

  def wait_for_step(self, step, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
      if any(r['step'] >= step for r in self.steps()):
        return
      assert all(p.poll() is None for p in self.processes), self.text()
      time.sleep(0.2)
    raise TimeoutError(self.text())

  def wait(self, seconds):
    return [p.wait(seconds) for p in self.processes]

  def text(self):
    return '\n'.join(log.read_text()[-3000:] for log in self.logs)


@pytest.mark.slow
def test_lost_process_is_reported_and_the_run_continues(text_folder, tmp_path):
  config = small(text_folder)
  with Cluster(tmp_path, config) as first:
    first.wait_for_step(4, 900)
    first.processes[1].send_signal(signal.SIGKILL)
    # By its broken connections or, at the latest, by the missing heartbeat.
    codes = first.wait(hosts.HEARTBEAT_SECONDS + 60)
  assert codes[0] != 0 and codes[1] == -signal.SIGKILL

  with Cluster(tmp_path, config) as again:
    assert again.wait(900) == [0, 0], again.text()
  assert 'continuing after step' in again.logs[0].read_text()
  assert 'held-out' not in again.logs[1].read_text()  # one process speaks
  assert [r['step'] for r in again.steps()] == list(range(1, 13))
  assert (again.workdir / 'report.md').exists()


def small(folder):
  head = dict(heads=2, value_dim=8)
  return dict(
    model=dict(
      vocab_size=264,
      width=24,
      layers=2,
      mla_layers=[2],
      dense_hidden=32,
      residual_block=2,
      dtype='float32',
      kda=dict(key_dim=8, gate_rank=4, chunk_size=16, **head),
      mla=dict(query_rank=8, kv_rank=8, nope_dim=8, shared_dim=4, **head),
      moe=dict(experts=4, top_k=1, hidden=8, latent=16),
      router=dict(warm_start=0),
    ),
    data=dict(source=str(folder), heldout_fraction=0.2),
    stages=[dict(context=64, batch=4, steps=12)],
    eval=dict(batches=1, batch_tokens=256, needles=4, sample_tokens=8),
    checkpoint=dict(every_steps=2),
    mesh=dict(data=2, expert=2),
  )


@pytest.mark.parametrize(
  'arguments, message',
  [
    (('a:1', 2, None), 'give all three'),
    (('a:1', 2, 2), r'must be in \[0, 2\)'),
  ],
)
def test_refuses_incomplete_descriptions(arguments, message):
  with pytest.raises(ValueError, match=message):
    hosts.initialize(*arguments)
