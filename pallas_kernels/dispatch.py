"""Which implementation of an operation runs, and why others were refused.

Every operation lists its candidates in order of preference, each with the
reason why it cannot run here, or None. The first candidate without a reason is
taken and that choice is logged once per process; a named implementation must
be able to run or the call raises.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
from absl import logging

Candidate = tuple[str, str | None]


def device_kind() -> str:
  """'cpu', 'tpu' or 'gpu': what a trace is for.

  That is the device of the mesh in context, which may be one that is only
  compiled for, and without a mesh the default device.
  """
  meant = jax.sharding.get_abstract_mesh().abstract_device
  meant = meant or jax.config.jax_default_device
  platform = getattr(meant, 'platform', meant) or jax.default_backend()
  return 'gpu' if platform in ('cuda', 'rocm') else platform


def choose(
  operation: str, requested: str | None, candidates: Sequence[Candidate]
) -> str:
  """The name of the implementation to run.

  Args:
    operation: name for messages, e.g. 'kda'.
    requested: the caller's `implementation`; None chooses for the device.
    candidates: (name, reason it cannot run or None), in order of preference.

  Raises:
    ValueError: `requested` is not among the candidates.
    NotImplementedError: `requested` cannot run, or no candidate can.
  """
  reasons = dict(candidates)
  if requested is not None:
    if requested not in reasons:
      raise ValueError(
        f'{operation}: implementation={requested!r} does not exist; choose '
        f'one of {sorted(reasons)}, or None for the best on this device.'
      )
    if reasons[requested] is not None:
      raise NotImplementedError(
        f'{operation}: implementation={requested!r} cannot run on '
        f'{device_kind()}: {reasons[requested]}'
      )
    return requested
  for name, reason in candidates:
    if reason is None:
      refused = tuple(c for c in candidates if c[1] is not None)
      _log_once(operation, name, refused)
      return name
  raise NotImplementedError(
    f'{operation} has no implementation for {device_kind()}: '
    + '; '.join(f'{name}: {reason}' for name, reason in candidates)
  )


@functools.cache
def _log_once(operation: str, name: str, refused: tuple[Candidate, ...]):
  why = ''.join(f'; not {other}: {reason}' for other, reason in refused)
  logging.info('%s runs as %s%s', operation, name, why)
