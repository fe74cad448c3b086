"""What one training run is made of, and its working directory.

config.json   the whole configuration      env.json      versions, devices
metrics.jsonl one record a line            checkpoints/  one folder a step
figures/      the report's pictures        report.md     the report
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import pathlib
import platform
from typing import Any

import jax
import optax

from trimoe_jax import hosts, sharding, train_state
from trimoe_jax.checkpoint import Checkpointer, check_config
from trimoe_jax.config import TrainConfig, from_dict
from trimoe_jax.data import Corpus, StagedBatches, load_corpus
from trimoe_jax.train_state import TrainState

# Fields that may differ when a run continues: none of them changes its numbers.
FREE = (
  'name',
  'eval',
  'checkpoint',
  'log_every',
  'profile_steps',
  'mesh',
  'pipeline',
)
PACKAGES = (
  'jax',
  'jaxlib',
  'flax',
  'optax',
  'orbax-checkpoint',
  'numpy',
)


@dataclasses.dataclass(frozen=True)
class Run:
  """The parts of a run, checked against each other."""

  config: TrainConfig
  workdir: pathlib.Path
  corpus: Corpus
  batches: StagedBatches
  mesh: jax.sharding.Mesh
  optimizer: optax.GradientTransformation
  schedule: optax.Schedule

  @property
  def metrics_path(self) -> pathlib.Path:
    return self.workdir / 'metrics.jsonl'

  @property
  def report_path(self) -> pathlib.Path:
    return self.workdir / 'report.md'

  @property
  def contexts(self) -> list[int]:
    """The context length of every stage."""
    return [stage.context for stage in self.config.stages]

  def checkpointer(self) -> Checkpointer:
    every = self.config.checkpoint
    return Checkpointer(
      self.workdir / 'checkpoints',
      config=fixed_fields(self.config, self.corpus),
      max_to_keep=every.keep,
      keep_steps=self.batches.first_steps[1:],
    )

  def restore_or_create(self, checkpointer: Checkpointer) -> TrainState:
    """The latest checkpoint's state, or a fresh one when there is none."""
    if checkpointer.latest_step() is None:
      return train_state.create(self.config, self.optimizer, self.mesh)
    abstract = train_state.abstract(self.config, self.optimizer, self.mesh)
    return checkpointer.restore(abstract).state


def prepare(config: TrainConfig, workdir: str | pathlib.Path) -> Run:
  """A run ready to train; reads the data, compiles nothing.

  Raises:
    ValueError: the data cannot be read or does not fit the model, the mesh
      does not fit the devices, or `workdir` holds another run.
  """
  workdir = pathlib.Path(workdir)
  corpus = load_corpus(config.data)
  if config.model.vocab_size < corpus.tokenizer.vocab_size:
    raise ValueError(
      f'model.vocab_size={config.model.vocab_size} is smaller than the '
      f'tokenizer {config.data.tokenizer!r} needs '
      f'({corpus.tokenizer.vocab_size}); set it to at least that.'
    )
  batches = StagedBatches(
    corpus,
    config.stages,
    seed=config.seed,
    long_documents=config.data.long_documents,
  )
  optimizer, schedule = train_state.optimizer_of(config)
  run = Run(
    config=config,
    workdir=workdir,
    corpus=corpus,
    batches=batches,
    mesh=sharding.make_mesh(config.mesh.sizes()),
    optimizer=optimizer,
    schedule=schedule,
  )
  if hosts.is_main():
    _claim(workdir, config, corpus)
  hosts.wait('working directory')
  return run


def read_config(workdir: str | pathlib.Path) -> TrainConfig:
  """The configuration a run was started with.

  Raises:
    FileNotFoundError: `workdir` holds no run.
  """
  path = pathlib.Path(workdir) / 'config.json'
  if not path.exists():
    raise FileNotFoundError(
      f'{path} does not exist, so {workdir} holds no run; check --workdir.'
    )
  return from_dict(TrainConfig, json.loads(path.read_text())['config'])


def fixed_fields(config: TrainConfig, corpus: Corpus) -> dict[str, Any]:
  """What must be the same when a run continues."""
  fields = dataclasses.asdict(config)
  kept = {name: value for name, value in fields.items() if name not in FREE}
  return kept | {'corpus': corpus.fingerprint}


def _claim(workdir: pathlib.Path, config: TrainConfig, corpus: Corpus):
  """Writes config.json and env.json, or checks that this run owns them."""
  path = workdir / 'config.json'
  if path.exists():
    saved = from_dict(TrainConfig, json.loads(path.read_text())['config'])
    check_config(
      json.loads(json.dumps(fixed_fields(saved, corpus))),
      fixed_fields(config, corpus),
    )
  elif workdir.is_dir() and any(workdir.iterdir()):
    raise ValueError(
      f'workdir={workdir} is not empty and holds no run; choose an empty or '
      'new folder, or one with a config.json to continue that run.'
    )
  workdir.mkdir(parents=True, exist_ok=True)
  _write_json(path, {'config': dataclasses.asdict(config)})
  _write_json(workdir / 'env.json', environment())


def environment() -> dict[str, Any]:
  """Versions and devices, for env.json."""
  return {
    'python': platform.python_version(),
    'platform': platform.platform(),
    'packages': {name: importlib.metadata.version(name) for name in PACKAGES},
    'backend': jax.default_backend(),
    'devices': [device.device_kind for device in jax.devices()],
    'processes': jax.process_count(),
  }


def _write_json(path: pathlib.Path, value: Any):
  fresh = path.with_suffix('.new')
  fresh.write_text(json.dumps(value, indent=2) + '\n')
  fresh.replace(path)
