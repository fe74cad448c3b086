"""The training loop: fetch, step, log, save, stop.

Step n is dispatched before the metrics of step n - 1 are read. Checkpoints and
evaluations happen at step boundaries only. A stage's step is compiled for its
shapes while the stage before it trains (`compilation.py`), so a step can never
trace again unnoticed.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from trimoe_jax import hosts, profiling, sharding
from trimoe_jax.compilation import Compiler
from trimoe_jax.evals.heldout import Evaluator
from trimoe_jax.metrics import JsonlWriter, NanGuard, Progress, Throughput
from trimoe_jax.model import router
from trimoe_jax.run import Run
from trimoe_jax.train_state import TrainState
from trimoe_jax.train_step import batch_axes, batch_shape, observe

# Steps in a row whose loss may be no number before the run gives up.
PATIENCE = 10


def train(run: Run, *, should_stop: Callable[[], bool]) -> TrainState | None:
  """Trains to the end and returns the last state; None when told to stop.

  The order below is the loop: a checkpoint holds everything up to its step and
  nothing after, the metrics file the same.

  Args:
    run: what to train; continues from its latest checkpoint.
    should_stop: asked after every step; True saves and returns.
  """
  config, ends = run.config, run.batches.first_steps[1:]
  with run.checkpointer() as checkpointer, jax.set_mesh(run.mesh):
    state = run.restore_or_create(checkpointer)
    first = int(state.step)
    logger = Logger(run, first)
    evaluator = Evaluator(config, run.corpus, run.mesh, logger.say)
    with _profiler(run) as profiler, Compiler(run, evaluator) as compiler:
      if first == 0:
        compiler.start(0)  # while the router warms up
        state, record = warm_start(run, state)
        logger.warm_start(record)
      for step in range(first, run.batches.total_steps):
        if step == first or step in ends:
          compiled = logger.compilation(step, compiler)
        if step in run.batches.first_steps:  # what the stage starts from
          logger.evaluation(step, evaluate(run, evaluator, state, step))
        profiler.before(step + 1)
        state, metrics = compiled(state, fetch(run, step))
        profiler.after(step + 1, metrics)
        logger.step(step, metrics)
        done, stopping = step + 1, should_stop()
        at_end = done in ends
        if at_end or _due(done, config.eval.every_steps):
          logger.flush()
          record = evaluate(run, evaluator, state, step, recall=True)
          logger.evaluation(done, record)
        if stopping or at_end or _due(done, config.checkpoint.every_steps):
          logger.flush()
          checkpointer.save(done, state, data_position={'next_step': done})
        if stopping and done < run.batches.total_steps:
          logger.say(f'stopped after step {done}; the same command continues.')
          logger.close()
          return None
    logger.close()
    return state


def fetch(run: Run, step: int) -> dict[str, jax.Array]:
  """The batch of `step` on the devices, [micro-batches, B, T]."""
  stage = run.config.stages[run.batches.locate(step).stage]
  batch = run.batches.batch_at(step)
  micro_batches, rows, _ = batch_shape(stage)

  def place(name, x):
    where = jax.NamedSharding(run.mesh, sharding.spec(batch_axes(name)))
    return hosts.place(x.reshape(micro_batches, rows, *x.shape[1:]), where)

  return {name: place(name, x) for name, x in batch.items()}


def warm_start(run: Run, state: TrainState) -> tuple[TrainState, dict | None]:
  """A fresh state whose router is balanced, and how it came to that.

  `router.warm_start` forward passes see the batches of the steps after the
  first, so that no token of the first step is routed by a bias that knows it.
  Nothing but the router changes. The record holds each pass's balance under
  the bias before it; None where the configuration wants no warm start.
  """
  config, stage = run.config, run.config.stages[0]
  passes = config.model.router.warm_start
  if not passes or config.model.router.balance != 'quantile':
    return state, None
  later = range(1, stage.num_steps) or range(1)
  steps = (later[i % len(later)] for i in range(passes))
  forward = jax.jit(lambda *args: observe(*args, config))
  found, start = [], time.perf_counter()

  def statistics(router_state):
    stats, balance = forward(
      state.params, fetch(run, next(steps)), router_state
    )
    found.append(hosts.fetch(balance))
    return stats

  warm = router.warm_start(
    state.router, statistics, config.model.router, steps=passes
  )
  record = jax.tree.map(lambda *x: np.stack(x), *found)
  seconds = time.perf_counter() - start
  return state.replace(router=warm), {'seconds': seconds, **record}


def evaluate(
  run: Run,
  evaluator: Evaluator,
  state: TrainState,
  step: int,
  *,
  recall: bool = False,
) -> dict[str, Any]:
  """The evaluation record of a state in the stage that `step` lies in.

  With `recall`, also needle recall at every context trained so far.
  """
  stage = run.batches.locate(step).stage
  contexts = sorted(set(run.contexts[: stage + 1])) if recall else ()
  start = time.perf_counter()
  record = evaluator.measure(
    state.params, state.router, run.contexts[stage], contexts
  )
  return {'stage': stage, 'seconds': time.perf_counter() - start, **record}


def _profiler(run: Run) -> profiling.TraceWindow:
  """The run's profiling window; one past the end where none is wanted."""
  after = run.batches.total_steps + 1
  first, last = run.config.profile_steps or (after, after)
  return profiling.TraceWindow(run.workdir / 'profile', first, last)


def _due(done: int, every: int | None) -> bool:
  return every is not None and done % every == 0


class Logger:
  """Writes records and shows progress; holds back the newest step's metrics."""

  def __init__(self, run: Run, first: int):
    self._run = run
    path, stream = run.metrics_path, None
    if not hosts.is_main():
      path, stream = None, io.StringIO()
    self._writer = JsonlWriter(path, resume_step=first)
    self._progress = Progress(
      run.batches.total_steps, initial=first, stream=stream
    )
    self._guard = NanGuard(PATIENCE)
    self._rate = Throughput()
    self._held: tuple[int, dict[str, Any]] | None = None
    self._fresh = True
    if first:
      self.say(f'continuing after step {first}.')

  def say(self, text: str):
    self._progress.message(text)

  def compilation(self, step: int, compiler: Compiler) -> Callable[..., Any]:
    """The compiled step of the stage that `step` lies in; waits for it."""
    self.flush()
    run = self._run
    number = run.batches.locate(step).stage
    stage = run.config.stages[number]
    where = f'stage {number + 1} of {len(run.config.stages)}'
    self.say(f'compiling {where}: {stage.batch} x {stage.context} tokens …')
    done = compiler.wait(number)
    self.say(
      f'compiled {where} in {done.seconds:.1f} s, of which the run waited '
      f'{done.waited:.1f} s'
    )
    report = profiling.memory_report(
      done.step,
      micro_batches=stage.micro_batches,
      remat=run.config.model.remat,
      loss_chunk=run.config.loss.chunk,
    )
    self.say(report)
    times = {'seconds': done.seconds, 'waited': done.waited}
    self._write('compile', step, {'stage': number, **times})
    self._fresh = True
    self._progress.pause()
    return done.step

  def warm_start(self, record: dict[str, Any] | None):
    """Logs the balance before and during the warm start, if there was one."""
    if record is None:
      return
    self._write('warm_start', 0, record)
    worst = record['max_vio'].max(axis=1)
    self.say(
      f'warm start of the router: largest load violation {worst[0]:.2f} in '
      f'the first of {len(worst)} forward passes, {worst[-1]:.2f} in the last '
      f'({record["seconds"]:.1f} s)'
    )

  def step(self, step: int, metrics: dict[str, Any]):
    """Takes the metrics of `step` and logs those of the step before."""
    self.flush()
    self._held = (step, metrics)

  def flush(self):
    """Logs the metrics held back, if any; waits for them."""
    if self._held is None:
      return
    (step, metrics), self._held = self._held, None
    metrics = hosts.fetch(metrics)
    self._guard.check(
      step, float(metrics['loss']), grad_norm=float(metrics['grad_norm'])
    )
    run = self._run
    number = run.batches.locate(step).stage
    stage = run.config.stages[number]
    if self._fresh:  # the first step of a stage would count its warm-up
      self._rate.start()
      self._fresh = False
    else:
      self._rate.add(stage.step_tokens)
    if (step + 1) % run.config.log_every == 0:
      trained = run.batches.tokens_before(step + 1)
      extra = {'stage': number, 'trained': trained, 'rate': self._rate.rate}
      self._write('step', step + 1, extra | metrics)
    left = run.batches.tokens_before(run.batches.total_steps)
    left -= run.batches.tokens_before(step + 1)
    self._progress.update(
      stage=f'{number + 1}/{len(run.config.stages)}, {stage.context} tokens',
      loss=float(metrics['loss']),
      rate=self._rate.rate,
      left=left / self._rate.rate,
    )

  def evaluation(self, done: int, record: dict[str, Any]):
    """Logs an evaluation of the state after `done` steps."""
    trained = self._run.batches.tokens_before(done)
    extra = {'trained': trained, 'rate': self._rate.rate}
    self._write('eval', done, extra | record)
    recall = ', '.join(
      f'{n}: {r["token_accuracy"]:.0%}' for n, r in record['recall'].items()
    )
    self.say(
      f'held-out loss {record["heldout_loss"]:.3f} at {record["context"]} '
      f'tokens' + (f'; needle recall {recall}' if recall else '')
    )
    for question, r in record.get('questions', {}).items():
      self.say(
        f'  {question}: {r["right"]:.0%} of {r["count"]} right (chance '
        f'{r["chance"]:.0%})'
      )
    self._progress.pause()

  def close(self):
    self.flush()
    self._writer.close()
    self._progress.close()

  def _write(self, kind: str, step: int, record: dict[str, Any]):
    self._writer.write({'kind': kind, 'step': step, **record})
