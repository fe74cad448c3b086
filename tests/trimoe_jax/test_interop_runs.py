"""Runs to checkpoints and back, and the verbs that do it."""

import dataclasses
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from trimoe_jax import train_state
from trimoe_jax.interop import hf, runs
from trimoe_jax.model import router
from trimoe_jax.run import prepare


@pytest.fixture
def config(small_config):
  """The gate's rank is the head dimension, as the released layout has it."""
  base = small_config()
  kda = dataclasses.replace(base.model.kda, gate_rank=base.model.kda.key_dim)
  return dataclasses.replace(
    base, model=dataclasses.replace(base.model, kda=kda)
  )


@pytest.fixture
def trained(config, tmp_path):
  """A run with a checkpoint at step 3, and that state."""
  run = prepare(config, tmp_path / 'run')
  with run.checkpointer() as checkpointer, jax.set_mesh(run.mesh):
    state = train_state.create(config, run.optimizer, run.mesh)
    bias = 0.1 * np.arange(state.router.bias.size, dtype=np.float32)
    biases = bias.reshape(state.router.bias.shape)
    state = state.replace(
      router=router.from_bias(jax.numpy.asarray(biases), config.model.router)
    )
    checkpointer.save(3, state, data_position={'next_step': 3})
  return run, state


def assert_same(got, want):
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)),
    got,
    want,
  )


def test_a_run_round_trips_through_the_released_layout(
  trained, config, tmp_path
):
  run, state = trained
  loaded = runs.load(run.workdir)
  assert loaded.config == config.model
  assert_same((loaded.params, loaded.router), (state.params, state.router))

  hf.save(tmp_path / 'released', loaded, dtype='float32')
  released = hf.load(tmp_path / 'released')
  assert_same(released.params, state.params)

  start = prepare(config, tmp_path / 'start')
  runs.save(start, released)
  with start.checkpointer() as checkpointer:
    again = start.restore_or_create(checkpointer)
  assert int(again.step) == 0
  assert_same((again.params, again.router), (state.params, state.router))
  with pytest.raises(ValueError, match='has checkpoints already'):
    runs.save(start, released)


def test_another_model_is_refused(trained, config, tmp_path):
  run, _ = trained
  model = dataclasses.replace(config.model, width=32, residual_block=3)
  other = prepare(dataclasses.replace(config, model=model), tmp_path / 'other')
  with pytest.raises(ValueError) as error:
    runs.save(other, runs.load(run.workdir))
  assert 'hidden_size is 24 in the checkpoint and 32' in str(error.value)
  assert 'attn_res_block_size is 2' in str(error.value)


def test_missing_runs_and_steps_are_named(trained, tmp_path):
  with pytest.raises(FileNotFoundError, match='holds no run'):
    runs.load(tmp_path)
  with pytest.raises(FileNotFoundError, match=r'step 4; it has \[3\]'):
    runs.load(trained[0].workdir, 4)


def verb(name, *arguments):
  return subprocess.run(
    [sys.executable, '-m', f'experiments.{name}', *arguments],
    env=os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''},
    capture_output=True,
    text=True,
    check=False,
  )


def test_the_verbs_convert_and_sample(trained, tmp_path):
  source, target = str(trained[0].workdir), str(tmp_path / 'released')
  done = verb('convert', f'--from={source}', f'--to={target}')
  assert done.returncode == 0, done.stderr
  assert hf.load(target).config.width == 24
  sampled = verb(
    'sample',
    f'--workdir={source}',
    '--prompt=1 times ',
    '--prompt=12 times 3 is ',
    '--max_tokens=8',
    '--temperature=0',
  )
  assert sampled.returncode == 0, sampled.stderr
  assert sampled.stdout.startswith('1 times ')
  assert '\n12 times 3 is ' in sampled.stdout
