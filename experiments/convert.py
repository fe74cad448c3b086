"""Converts between runs and the layout in which Kimi K3 is released.

    python -m experiments.convert --from=runs/tiny --to=DIR
    python -m experiments.convert --from=DIR --to=runs/new \\
        --config=experiments/configs/tiny.py

The first writes a run's model as a released checkpoint. The second makes a run
that starts from one: train it with the same configuration and --workdir. From
one released folder to another it packs or unpacks the experts.
"""

import pathlib
import sys

from absl import app, flags, logging
from ml_collections import config_flags

from experiments.configs import as_dict
from trimoe_jax.config import TrainConfig, from_dict
from trimoe_jax.interop import hf, runs, shards
from trimoe_jax.run import prepare

FROM = flags.DEFINE_string('from', None, 'A run or a released checkpoint.')
TO = flags.DEFINE_string('to', None, 'The folder to write.')
CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'With it, --to becomes a run with this configuration.'
)
STEP = flags.DEFINE_integer(
  'step', None, 'Of the run; the latest if not given.'
)
PACK_EXPERTS = flags.DEFINE_boolean(
  'pack_experts', False, 'Round routed experts to MXFP4, as released.'
)
DTYPE = flags.DEFINE_enum(
  'dtype',
  'bfloat16',
  ['bfloat16', 'float32'],
  'Of written weights; float32 loses nothing of a trained model.',
)


def convert():
  source = pathlib.Path(FROM.value)
  released = (source / shards.INDEX).exists()
  checkpoint = hf.load(source) if released else runs.load(source, STEP.value)
  if CONFIG.value is not None:
    config = from_dict(TrainConfig, as_dict(CONFIG.value))
    runs.save(prepare(config, TO.value), checkpoint)
    return
  hf.save(
    TO.value,
    checkpoint,
    pack_experts=PACK_EXPERTS.value,
    dtype=DTYPE.value,
  )


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments {argv[1:]}.')
  try:
    convert()
  except (ValueError, TypeError, OSError) as error:
    sys.exit(f'error: {error}')
  print(f'{FROM.value} -> {TO.value}')


if __name__ == '__main__':
  flags.mark_flags_as_required(['from', 'to'])
  logging.set_verbosity(logging.ERROR)
  app.run(main)
