"""Checkpoints of a run: state, data position and configuration, by Orbax.

A checkpoint restores bitwise, onto the shardings that the caller asks for,
which need not be those it was saved with. Saving continues in the background;
`wait` and `close` return when everything is on disk. A save that was
interrupted is never taken for a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from absl import logging

_policies = ocp.checkpoint_managers
_UNFINISHED = '*.orbax-checkpoint-tmp*'
_UNREADABLE = 'unreadable-'


class Restored(NamedTuple):
  """What `Checkpointer.restore` returns."""

  step: int
  state: Any
  data_position: Any
  metadata: dict[str, Any]


class Checkpointer:
  """The checkpoints in one directory.

  Args:
    directory: one subdirectory a step. Created when missing, unless
      `read_only`.
    config: what must be the same when a run continues, as nested mappings
      that JSON can hold; saved with every checkpoint and compared on restore.
      None compares nothing.
    max_to_keep: the latest so many are kept; None keeps all.
    keep_steps: steps that are kept besides, such as the ends of stages.
    read_only: for readers beside a run: nothing is created or cleaned up.

  Raises:
    FileNotFoundError: `read_only`, and the directory does not exist.
  """

  def __init__(
    self,
    directory: str | pathlib.Path,
    *,
    config: Mapping[str, Any] | None = None,
    max_to_keep: int | None = 3,
    keep_steps: Collection[int] = (),
    read_only: bool = False,
  ):
    self._directory = pathlib.Path(directory).absolute()
    self._config = None if config is None else _as_json(config)
    self._read_only = read_only
    if read_only and not self._directory.is_dir():
      raise FileNotFoundError(
        f'{self._directory} does not exist, so there is no checkpoint to '
        'restore; check the path, or train first.'
      )
    for path in self._directory.glob(_UNFINISHED):
      logging.warning('%s: ignoring a save that was interrupted.', path)
    keep = [_policies.LatestN(max_to_keep)]
    if keep_steps:
      keep.append(_policies.CustomSteps(sorted(keep_steps)))
    self._manager = ocp.CheckpointManager(
      self._directory,
      options=ocp.CheckpointManagerOptions(
        create=not read_only,
        read_only=read_only,
        cleanup_tmp_directories=not read_only,
        preservation_policy=_policies.AnyPreservationPolicy(keep),
      ),
      item_handlers={
        'state': ocp.StandardCheckpointHandler(),
        'metadata': ocp.JsonCheckpointHandler(),
      },
    )

  def __enter__(self) -> Checkpointer:
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def steps(self) -> list[int]:
    """Steps of all finished checkpoints, in order."""
    return sorted(self._manager.all_steps())

  def latest_step(self) -> int | None:
    """The last finished step, or None."""
    return max(self.steps(), default=None)

  def save(
    self,
    step: int,
    state: Any,
    *,
    data_position: Any,
    metadata: Mapping[str, Any] | None = None,
  ) -> bool:
    """Starts saving; False when `step` is saved already.

    Args:
      step: the number of finished training steps.
      state: a tree of arrays; typed random keys are allowed. It may be donated
        as soon as this returns.
      data_position: where the data continues; anything JSON can hold.
      metadata: further facts; anything JSON can hold.
    """
    if step in self._manager.all_steps():
      return False
    record = {
      'config': self._config,
      'data_position': data_position,
      'metadata': dict(metadata or {}),
    }
    return self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        metadata=ocp.args.JsonSave(record),
      ),
      force=True,
    )

  def restore(self, abstract_state: Any, step: int | None = None) -> Restored:
    """The state saved at `step`, placed like `abstract_state`.

    Args:
      abstract_state: a tree of `jax.ShapeDtypeStruct` with shardings
        (`abstract`); its shapes and dtypes must be those saved.
      step: None takes the latest checkpoint that can be read; unreadable ones
        are reported, set aside under another name and skipped.

    Raises:
      FileNotFoundError: there is no checkpoint, or none for `step`.
      ValueError: the configuration or the state differs from what was saved;
        the message names the first difference.
      OSError: the checkpoint, or with None every checkpoint, is damaged.
    """
    steps = self.steps()
    if not steps or (step is not None and step not in steps):
      raise FileNotFoundError(
        f'{self._directory} has no finished checkpoint'
        + (f' for step {step}; it has {steps}.' if steps else '.')
      )
    damaged = {}
    for candidate in [step] if step is not None else reversed(steps):
      try:
        restored = self._restore_step(candidate, abstract_state)
      except _Damaged as error:
        damaged[candidate] = str(error)
        continue
      # Only now: had nothing been readable, the fault may not be the files'.
      for other, reason in damaged.items():
        self._set_aside(other, reason)
      return restored
    raise OSError(
      f'no checkpoint in {self._directory} can be read: '
      + '; '.join(f'step {other}: {why}' for other, why in damaged.items())
    )

  def wait(self) -> None:
    """Returns when all saves are on disk."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits for all saves and releases the directory."""
    self.wait()
    self._manager.close()

  def _restore_step(self, step: int, abstract_state: Any) -> Restored:
    with _reading():
      record = self._manager.restore(
        step, args=ocp.args.Composite(metadata=ocp.args.JsonRestore())
      ).metadata
      saved = self._manager.item_metadata(step)['state'].tree
      config, position = record['config'], record['data_position']
    if self._config is not None and config is not None:
      check_config(config, self._config)
    _check_state(saved, abstract_state)
    with _reading():
      state = self._manager.restore(
        step,
        args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state)),
      ).state
    return Restored(step, state, position, record['metadata'])

  def _set_aside(self, step: int, reason: str) -> None:
    logging.error(
      '%s: step %d cannot be read and is skipped: %s',
      self._directory,
      step,
      reason,
    )
    if self._read_only or jax.process_index() != 0:
      return
    path = self._directory / str(step)
    path.rename(self._directory / f'{_UNREADABLE}{step}')
    self._manager.reload()


def abstract(state: Any) -> Any:
  """Shapes, dtypes and shardings of `state`, for `Checkpointer.restore`."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
  )


def check_config(saved: Any, current: Any) -> None:
  """Raises ValueError naming the first field in which two configs differ."""
  difference = next(_differences(saved, _as_json(current), ()), None)
  if difference is None:
    return
  path, was, now = difference
  raise ValueError(
    f'the checkpoint was saved with {path}={was}, but the run has {path}='
    f'{now}. Use the saved value, or start in another directory.'
  )


class _Damaged(Exception):
  """A checkpoint whose files cannot be read."""


@contextlib.contextmanager
def _reading() -> Iterator[None]:
  """Turns every error raised inside into `_Damaged`.

  What a broken file raises depends on the file and on the storage library, so
  nothing narrower can be named; mistakes of the caller are checked outside.
  """
  try:
    yield
  except Exception as error:
    kind = type(error).__name__
    first = (str(error).strip().splitlines() or ['no message'])[0]
    raise _Damaged(f'{kind}: {first[:200]}') from error


def _as_json(tree: Any) -> Any:
  """What `tree` reads back as: tuples are lists, keys are strings."""
  return json.loads(json.dumps(tree))


def _differences(
  was: Any, now: Any, path: tuple[str, ...]
) -> Iterator[tuple[str, str, str]]:
  if isinstance(was, dict) and isinstance(now, dict):
    for key in [*now, *(k for k in was if k not in now)]:
      yield from _differences(
        was.get(key, _ABSENT), now.get(key, _ABSENT), (*path, key)
      )
  elif was != now:
    yield '.'.join(path), _show(was), _show(now)


_ABSENT = object()


def _show(value: Any) -> str:
  return '(no such field)' if value is _ABSENT else repr(value)


def _check_state(saved: Any, abstract_state: Any) -> None:
  """Names the first leaf whose presence, shape or dtype differs.

  Orbax would cast a dtype silently, and abort midway on a shape.
  """
  was, now = _leaves(saved), _leaves(abstract_state)
  for name in [*now, *(n for n in was if n not in now)]:
    if was.get(name) != now.get(name):
      raise ValueError(
        f'state leaf {name!r} was saved as {was.get(name, "(absent)")}, but '
        f'the run has {now.get(name, "(absent)")}. Restore with the '
        'configuration and the code that saved it.'
      )


def _leaves(tree: Any) -> dict[str, str]:
  """Name -> dtype[shape]; keys count as their integers, as they are stored."""
  out = {}
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
      x = jax.eval_shape(jax.random.key_data, x)
    name = jax.tree_util.keystr(path, simple=True, separator='.')
    out[name] = f'{x.dtype}{list(x.shape)}'
  return out
