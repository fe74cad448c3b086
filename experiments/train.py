"""Trains a model from a configuration: stages of growing context in one run.

    python -m experiments.train --config=experiments/configs/tiny.py \\
        --workdir=runs/tiny --config.optim.lr=5e-3

Started again on the same workdir it continues; a finished run shows its report.
"""

import signal
import sys

from absl import app, flags, logging
from ml_collections import config_flags

from experiments.command_line import parse_flags
from experiments.configs import as_dict
from trimoe_jax import hosts, loop, report
from trimoe_jax.config import TrainConfig, from_dict
from trimoe_jax.run import prepare

CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'File whose get_config() gives the configuration.'
)
WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Where the run lives: metrics, checkpoints, report.'
)
DISTRIBUTED = flags.DEFINE_boolean(
  'distributed', False, 'Whether several hosts train together.'
)
COORDINATOR = flags.DEFINE_string(
  'coordinator', None, "Process 0's host:port, where no cluster tells it."
)
PROCESSES = flags.DEFINE_integer('processes', None, 'With --coordinator.')
PROCESS = flags.DEFINE_integer('process', None, 'With --coordinator.')


class StopOnSignal:
  """True once SIGTERM or the first interrupt came; a second one kills."""

  def __init__(self):
    self._name = None
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, self._note)

  def _note(self, number, frame):
    del frame
    self._name = signal.Signals(number).name
    print(f'{self._name}: finishing this step, then saving …', file=sys.stderr)
    signal.signal(signal.SIGINT, signal.default_int_handler)

  def __call__(self) -> bool:
    return self._name is not None


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments {argv[1:]}.')
  try:
    if DISTRIBUTED.value:
      hosts.initialize(COORDINATOR.value, PROCESSES.value, PROCESS.value)
    config = from_dict(TrainConfig, as_dict(CONFIG.value))
    run = prepare(config, WORKDIR.value)
  except (ValueError, TypeError, OSError, RuntimeError) as error:
    sys.exit(f'error: {error}')
  if report.is_finished(run):
    print(f'{run.workdir} holds a finished run.')
  else:
    told = hosts.StopTogether() if DISTRIBUTED.value else StopOnSignal()
    state = loop.train(run, should_stop=told)
    if state is None:
      return
    report.write(run, state)
  if hosts.is_main():
    print(run.report_path.read_text())
    print(f'report: {run.report_path}')


if __name__ == '__main__':
  flags.mark_flags_as_required(['config', 'workdir'])
  logging.set_verbosity(logging.WARNING)
  app.run(main, flags_parser=parse_flags)
