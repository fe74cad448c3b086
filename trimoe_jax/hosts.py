"""One run on several hosts: who writes, what each holds, when all stop.

Every process runs the same program on the same configuration; `jax.distributed`
makes their devices one mesh. The working directory is shared by all, and
process 0 alone writes to it, but for checkpoints, whose shards each writes.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

# A process that dies is noticed by its broken connections or, at the latest,
# after so many seconds without a sign of life; the others then end with an
# error and the run continues from its last checkpoint.
HEARTBEAT_SECONDS = 30
START_SECONDS = 300


def initialize(
  coordinator: str | None = None,
  processes: int | None = None,
  process: int | None = None,
):
  """Joins the processes of one run; call before JAX looks for devices.

  Args:
    coordinator: host:port of process 0. None, here and below, asks the
      environment: TPU pods, Slurm, Kubernetes and Open MPI know all three.
    processes: how many there are.
    process: this one's number, from 0.

  Raises:
    ValueError: only some of the three are given, or a number does not fit.
    RuntimeError: the others did not come in time.
  """
  given = (coordinator, processes, process)
  if any(x is None for x in given) and any(x is not None for x in given):
    raise ValueError(
      f'coordinator={coordinator}, processes={processes}, process={process}: '
      'give all three, or none where the cluster knows them.'
    )
  if process is not None and not 0 <= process < processes:
    raise ValueError(
      f'process={process} of processes={processes}; it must be in '
      f'[0, {processes}).'
    )
  jax.distributed.initialize(
    coordinator,
    processes,
    process,
    initialization_timeout=START_SECONDS,
    heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
  )


def is_main() -> bool:
  """Whether this process is the one that writes."""
  return jax.process_index() == 0


def wait(name: str):
  """Returns when every process is here; `name` must be the same in all."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def place(value: np.ndarray, where: jax.sharding.Sharding) -> jax.Array:
  """`value`, the same in every process, laid out as `where`."""
  if jax.process_count() == 1:
    return jax.device_put(value, where)
  return jax.make_array_from_callback(
    value.shape, where, lambda index: value[index]
  )


def fetch(tree: Any) -> Any:
  """NumPy arrays of whole arrays; every process must ask for the same."""

  def one(x):
    if x.is_fully_addressable or x.is_fully_replicated:
      return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))

  return jax.tree.map(one, tree)


class StopTogether:
  """True in every process at the same step once one was told to stop.

  JAX's coordination service takes SIGTERM and agrees on a step that none has
  passed yet.
  """

  def __init__(self):
    self._step = 0

  def __call__(self) -> bool:
    self._step += 1
    return multihost_utils.reached_preemption_sync_point(self._step)
