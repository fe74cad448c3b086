"""Numbers of a run: records in a file, rates, and a line on the terminal."""

from __future__ import annotations

import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

import numpy as np
import tqdm


class JsonlWriter:
  """Appends one JSON object a line and flushes it at once.

  A run that resumes at step n repeats the steps after n, so their old records
  are dropped on opening; records without a step stay. A last line that was cut
  by a crash is dropped too.

  Args:
    path: the file; created with its folder when missing. None writes nowhere.
    resume_step: the number of finished steps from which the run continues;
      None keeps all records.
  """

  def __init__(
    self, path: str | pathlib.Path | None, *, resume_step: int | None = None
  ):
    if path is None:
      self._file = open(os.devnull, 'w')
      return
    self._path = pathlib.Path(path)
    self._path.parent.mkdir(parents=True, exist_ok=True)
    if self._path.exists():
      self._rewrite(resume_step)
    self._file = self._path.open('a', encoding='utf-8')

  def __enter__(self) -> JsonlWriter:
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def write(self, record: Mapping[str, Any]) -> None:
    """Appends `record`; arrays become lists, numbers not finite null."""
    line = json.dumps(_plain(record), allow_nan=False)
    self._file.write(line + '\n')
    self._file.flush()

  def close(self) -> None:
    self._file.close()

  def _rewrite(self, resume_step: int | None) -> None:
    kept = [
      r
      for r in read_jsonl(self._path)
      if resume_step is None or r.get('step', 0) <= resume_step
    ]
    # Through a second file: a crash here must not cost the records.
    fresh = self._path.with_name(self._path.name + '.new')
    fresh.write_text(''.join(json.dumps(r) + '\n' for r in kept), 'utf-8')
    os.replace(fresh, self._path)


def read_jsonl(path: str | pathlib.Path) -> list[dict[str, Any]]:
  """All records of a file; an unfinished last line is left out.

  Raises:
    ValueError: another line is not a JSON object; names the file and line.
  """
  lines = pathlib.Path(path).read_text('utf-8').split('\n')
  records = []
  for number, line in enumerate(lines, 1):
    if not line.strip():
      continue
    try:
      record = json.loads(line)
    except json.JSONDecodeError as error:
      if number == len(lines):
        break
      raise ValueError(f'{path}:{number}: not JSON: {error}') from error
    if not isinstance(record, dict):
      raise ValueError(f'{path}:{number}: not a JSON object: {line[:80]!r}.')
    records.append(record)
  return records


class Throughput:
  """Tokens a second over the time since the last `start`.

  Compilation is kept out by calling `start` after the first step of a stage.
  """

  def __init__(self, clock=time.perf_counter):
    self._clock = clock
    self.start()

  def start(self) -> None:
    """Forgets what was counted and starts the clock."""
    self._begin = self._clock()
    self._tokens = 0

  def add(self, tokens: int) -> None:
    """Counts finished tokens."""
    self._tokens += tokens

  @property
  def rate(self) -> float:
    """Tokens a second; NaN before any have been counted."""
    seconds = self._clock() - self._begin
    return self._tokens / seconds if self._tokens and seconds > 0 else math.nan


class NanGuard:
  """Stops a run whose loss is no number.

  Args:
    patience: so many steps in a row may have a loss that is not finite.
  """

  def __init__(self, patience: int = 0):
    self._patience = patience
    self._bad = 0

  def check(self, step: int, loss: float, **others: float) -> None:
    """Raises FloatingPointError when the patience is used up.

    Args:
      step: for the message.
      loss: of this step.
      **others: further numbers of the step for the message, such as the
        gradient norm.
    """
    if math.isfinite(loss):
      self._bad = 0
      return
    self._bad += 1
    if self._bad > self._patience:
      shown = ', '.join(f'{k}={v:.6g}' for k, v in others.items())
      raise FloatingPointError(
        f'step {step}: loss={loss}{", " + shown if shown else ""} for '
        f'{self._bad} step(s) in a row. Resume from an earlier checkpoint with '
        'a lower optim.lr, or look at the data of this step.'
      )


class Progress:
  """One line that shows stage, loss, tokens a second and the time left.

  On a terminal it is a tqdm bar. Elsewhere (a log file, a notebook's output
  to disk) it prints a plain line at most every `interval` seconds.

  Args:
    total: steps of the run.
    initial: steps that are done already.
    stream: where to write; None is stderr.
    interval: seconds between plain lines.
  """

  def __init__(
    self,
    total: int,
    *,
    initial: int = 0,
    stream: TextIO | None = None,
    interval: float = 10.0,
    clock=time.monotonic,
  ):
    self._stream = stream or sys.stderr
    self._total, self._done = total, initial
    self._interval, self._clock = interval, clock
    self._last = -math.inf
    self._timed_steps, self._timed_seconds = 0, 0.0
    self._previous = clock()
    self._bar = None
    if self._stream.isatty():
      self._bar = tqdm.tqdm(
        total=total,
        initial=initial,
        file=self._stream,
        dynamic_ncols=True,
        unit='step',
        bar_format='{desc} {percentage:3.0f}% |{bar}| {n}/{total} {postfix}',
      )

  def __enter__(self) -> Progress:
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def update(
    self, *, stage: str, loss: float, rate: float, left: float | None = None
  ) -> None:
    """Counts one finished step and shows it.

    Args:
      stage: for example '2/4, 1024 tokens'.
      loss: nats a token.
      rate: tokens a second.
      left: seconds to the end of the run, if the caller knows better: stages
        have steps of different cost. None takes the mean step so far.
    """
    now = self._clock()
    self._timed_seconds += now - self._previous
    self._previous = now
    self._timed_steps += 1
    self._done += 1
    if left is None:
      mean = self._timed_seconds / self._timed_steps
      left = mean * (self._total - self._done)
    text = f'loss {loss:.4f}, {_si(rate)} tokens/s, {_clock_text(left)} left'
    if self._bar is not None:
      self._bar.set_description_str(f'stage {stage}', refresh=False)
      self._bar.set_postfix_str(text, refresh=False)
      self._bar.update()
    elif now - self._last >= self._interval or self._done == self._total:
      self._last = now
      self.message(f'stage {stage}, step {self._done}/{self._total}: {text}')

  def pause(self) -> None:
    """Leaves the time since the last step (compiling, saving) uncounted."""
    self._previous = self._clock()

  def message(self, text: str) -> None:
    """Prints a line without breaking the bar."""
    if self._bar is not None:
      self._bar.write(text, file=self._stream)
    else:
      print(text, file=self._stream, flush=True)

  def close(self) -> None:
    if self._bar is not None:
      self._bar.close()


def _plain(value: Any) -> Any:
  """`value` of types that JSON has."""
  if isinstance(value, Mapping):
    return {str(k): _plain(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [_plain(v) for v in value]
  if value is None or isinstance(value, (str, bool, int)):
    return value
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  array = np.asarray(value)
  if array.dtype == object:
    raise TypeError(
      f'a record holds {type(value).__name__}; use numbers, strings, arrays, '
      'lists or mappings of them.'
    )
  # bfloat16 has no Python counterpart; float32 holds all of it.
  return _plain(
    (array.astype(np.float32) if array.dtype.kind == 'V' else array).tolist()
  )


def _si(value: float) -> str:
  if not math.isfinite(value):
    return '?'
  for size, suffix in ((1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
    if value >= size:
      return f'{value / size:.3g}{suffix}'
  return f'{value:.3g}'


def _clock_text(seconds: float) -> str:
  if not math.isfinite(seconds):
    return '?'
  minutes, seconds = divmod(int(seconds + 0.5), 60)
  hours, minutes = divmod(minutes, 60)
  return (
    f'{hours}:{minutes:02}:{seconds:02}' if hours else f'{minutes}:{seconds:02}'
  )
