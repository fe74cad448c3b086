"""Compiles a configuration's training step for a topology that is not here.

    python -m experiments.compile --config=experiments/configs/mini.py \\
        --topology=v6e:2x2 --config.mesh.expert=2 --batch=8 --out=reports

Prints and saves what the compiler says: memory against the chip's, collectives,
and a roofline of the step. The data axis takes the devices that are left over.
"""

import dataclasses
import json
import os
import pathlib
import sys

# What is compiled for is not here; looking for it takes seconds or fails.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

from absl import app, flags, logging  # noqa: E402
from ml_collections import config_flags  # noqa: E402

from experiments.command_line import parse_flags  # noqa: E402
from experiments.configs import as_dict  # noqa: E402
from trimoe_jax import compile_report, topology  # noqa: E402
from trimoe_jax.config import TrainConfig, from_dict  # noqa: E402

CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'File whose get_config() gives the configuration.'
)
TOPOLOGY = flags.DEFINE_string(
  'topology', None, 'Chip and arrangement: v5p:8x16x16, v6e:2x2, h200:64.'
)
STAGE = flags.DEFINE_integer('stage', 1, 'Which stage, from 1.')
OVERRIDES = {
  'context': flags.DEFINE_integer('context', None, "Instead of the stage's."),
  'batch': flags.DEFINE_integer('batch', None, "Instead of the stage's."),
  'micro_batches': flags.DEFINE_integer(
    'micro_batches', None, "Instead of the stage's."
  ),
}
OUT = flags.DEFINE_string('out', 'reports', 'Folder of the report.')
OPTIMIZATION = flags.DEFINE_enum(
  'optimization',
  None,
  ['O0', 'O1', 'O2', 'O3'],
  "XLA's effort; O0 compiles in less than half of the time.",
)
KEEP = flags.DEFINE_boolean('keep_hlo', False, 'Save the compiled program too.')


def prepare() -> tuple[TrainConfig, topology.Topology]:
  """The configuration, of one stage, on the mesh that the flags ask for."""
  values = as_dict(CONFIG.value)
  number, stages = STAGE.value, values['stages']
  if not 1 <= number <= len(stages):
    raise ValueError(f'--stage={number}; {values["name"]} has {len(stages)}.')
  given = {k: f.value for k, f in OVERRIDES.items() if f.value is not None}
  where = topology.describe(TOPOLOGY.value, values['mesh'])
  values['stages'] = [stages[number - 1] | given]
  values['mesh'] = dict(where.mesh.shape)
  return from_dict(TrainConfig, values), where


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments {argv[1:]}.')
  try:
    config, where = prepare()
  except (ValueError, TypeError, RuntimeError) as error:
    sys.exit(f'error: {error}')
  context = config.stages[0].context
  stem = f'{config.name}-{where.name.replace(":", "-")}-{context}'
  folder = pathlib.Path(OUT.value)
  folder.mkdir(parents=True, exist_ok=True)
  print(f'compiling {config.name} for {where.devices:,} devices …', flush=True)
  report = compile_report.build(
    config.name,
    config,
    where,
    optimization=OPTIMIZATION.value,
    keep=folder / f'{stem}.hlo.txt' if KEEP.value else None,
  )
  page = compile_report.markdown(report, where.chip.flops)
  (folder / f'{stem}.md').write_text(page)
  facts = json.dumps(dataclasses.asdict(report), indent=2)
  (folder / f'{stem}.json').write_text(facts + '\n')
  print(page)
  print(f'report: {folder / stem}.md')


if __name__ == '__main__':
  flags.mark_flags_as_required(['config', 'topology'])
  logging.set_verbosity(logging.WARNING)
  app.run(main, flags_parser=parse_flags)
