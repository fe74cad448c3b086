"""Compiling a run's programs, the next stage's while this stage trains.

A stage has two programs: its training step and, at its context, the evaluation.
One thread compiles them in the order in which they are needed, so that only the
first stage has to wait. XLA compiles without Python's lock.
"""

from __future__ import annotations

import concurrent.futures
import time
from typing import Any, NamedTuple

import jax

from trimoe_jax import train_state
from trimoe_jax.evals.heldout import Evaluator
from trimoe_jax.run import Run
from trimoe_jax.train_state import TrainState
from trimoe_jax.train_step import abstract_batch, make_train_step


class Compilation(NamedTuple):
  """A stage's step, the seconds it took and those that the run waited."""

  step: Any
  seconds: float
  waited: float


class Compiler:
  """The compiled training steps of a run's stages."""

  def __init__(self, run: Run, evaluator: Evaluator):
    self._run, self._evaluator = run, evaluator
    self._state = train_state.abstract(run.config, run.optimizer, run.mesh)
    self._pool = concurrent.futures.ThreadPoolExecutor(1)
    self._jobs: dict[int, concurrent.futures.Future] = {}

  def __enter__(self) -> Compiler:
    return self

  def __exit__(self, *_: Any) -> None:
    self._pool.shutdown(cancel_futures=True)

  def wait(self, stage: int) -> Compilation:
    """The step of `stage`; the stage after it starts to compile."""
    self.start(stage)
    start = time.perf_counter()
    step, seconds = self._jobs[stage].result()
    waited = time.perf_counter() - start
    if stage + 1 < len(self._run.config.stages):
      self.start(stage + 1)
    return Compilation(step, seconds, waited)

  def start(self, stage: int):
    """Lets the programs of `stage` compile, unless they do already."""
    if stage in self._jobs:
      return
    state = self._state
    self._jobs[stage] = self._pool.submit(compile_step, self._run, state, stage)
    context = self._run.config.stages[stage].context
    self._pool.submit(
      self._evaluator.compile, state.params, state.router, context
    )


def compile_step(run: Run, state: TrainState, stage: int) -> tuple[Any, float]:
  """The training step compiled for a stage's batches, and the seconds.

  Args:
    run: whose step it is.
    state: shapes and shardings (`train_state.abstract`).
    stage: its number.
  """
  start = time.perf_counter()
  batch = abstract_batch(run.config.stages[stage], run.mesh)
  step = make_train_step(run.config, run.optimizer, run.schedule)
  with jax.set_mesh(run.mesh):
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
  return compiled, time.perf_counter() - start
