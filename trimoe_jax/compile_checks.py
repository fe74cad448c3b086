"""What a compiled training step must not hold or send, counted in its HLO."""

from __future__ import annotations

import math

from trimoe_jax import hlo
from trimoe_jax.config import TrainConfig

INTEGER_REDUCES = 'all-reduces of integers'
GATHERS = 'gathers in Newton-Schulz'
SQUARES = 'arrays of tokens by tokens'
ROWS = 'arrays of experts by rows by width'
# How many of each a step should have: the router's counts are summed once, and
# everything else is a mistake.
WANTED = {INTEGER_REDUCES: 1, GATHERS: 0, SQUARES: 0, ROWS: 0}


def count(
  program: hlo.Program, config: TrainConfig, mesh: dict[str, int]
) -> dict[str, int]:
  """How many of each of `WANTED` the first stage's step has.

  Args:
    program: compiled from the step.
    config: of the step.
    mesh: length of every axis.
  """
  found = dict.fromkeys(WANTED, 0)
  for instruction, times in program.instructions():
    kind = instruction.collective
    if kind == 'all-reduce' and 's32' in instruction.shape:
      found[INTEGER_REDUCES] += times
    if kind == 'all-gather' and 'newton_schulz' in instruction.text:
      found[GATHERS] += times
  square, rows = _squares(config, mesh), _rows(config, mesh)
  for array in program.largest(None):
    dims = [n for n in array.dims if n > 1]
    found[SQUARES] += square(dims)
    found[ROWS] += rows(dims)
  return found


def _squares(config: TrainConfig, mesh: dict[str, int]):
  """Whether two axes are a sequence's, a device's part or a fragment of it."""
  length = config.stages[0].context
  ranks = mesh.get('context', 1)
  lengths = {length, length // ranks, length // (2 * ranks)}
  return lambda dims: sum(n in lengths for n in dims) > 1


def _rows(config: TrainConfig, mesh: dict[str, int]):
  """Whether there is an axis of experts before one of tokens or copies."""
  stage, moe = config.stages[0], config.model.moe
  shards = math.prod(mesh.get(a, 1) for a in ('data', 'context', 'expert'))
  micro_batch = stage.batch // stage.micro_batches
  tokens = max(micro_batch * stage.context // shards, 1)
  rows = {tokens, tokens * moe.top_k}
  if moe.capacity is not None:
    rows.add(math.ceil(tokens * moe.top_k * moe.capacity))
  experts = {moe.experts, moe.experts // mesh.get('expert', 1)}

  def found(dims):
    # Widths may equal a count of experts; they come last.
    first = [i for i, n in enumerate(dims) if n in experts]
    last = [i for i, n in enumerate(dims) if n in rows]
    return len(dims) > 2 and bool(first and last) and first[0] < last[-1]

  return found
