"""Static TPU schedules of routing with statistics, beside a selection bound.

Bundles are counted per 8 x 128 logits, one register. The bound is what rounds
over all the logits need: top_k + 1 rounds of a maximum, the lowest index that
attains it (compare, select, minimum) and a mask, on the vector slots of a
bundle. It counts neither scores nor statistics. See `tpu_schedule` for what a
schedule says and what it leaves out.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import tpu_schedule
from pallas_kernels.quantile_router import mosaic_tpu, xla
from pallas_kernels.quantile_router import statistics as stat

COLUMNS = ('computation', 'kernel', 'all', 'bound', 'ratio', 'vpu')
COLUMNS += ('xlu', 'vmem_mb', 'temp_mb')
_OPERATIONS_A_ROUND = 5
# num_bins of each; None counts nothing.
COMPUTATIONS = {None: 0, 'log_edges': 33, 'uniform': 1000}


def arguments(tokens: int, experts: int):
  """Shapes of logits, bias, mask and the ends of the range."""
  shape = jax.ShapeDtypeStruct
  ends = shape((), jnp.float32), shape((), jnp.float32)
  return (
    shape((tokens, experts), jnp.float32),
    shape((experts,), jnp.float32),
    shape((tokens,), jnp.bool_),
    *ends,
  )


def _statistics(estimator, lo, hi):
  if estimator is None:
    return None
  return stat.Statistics(lo, hi, COMPUTATIONS[estimator], estimator)


def kernel(estimator, top_k: int):
  """A function of `arguments`: the kernel and what surrounds it."""

  def run(logits, bias, mask, lo, hi):
    return mosaic_tpu.route(
      logits,
      bias,
      mask,
      statistics=_statistics(estimator, lo, hi),
      top_k=top_k,
      cutoff='kplus1',
      space='sigmoid',
    )

  return run


def selection_bound(top_k: int, slots: int) -> float:
  """Bundles per register of logits."""
  return (top_k + 1) * _OPERATIONS_A_ROUND / slots


def measure(
  chip: str, estimator, *, experts: int = 896, top_k: int = 16, tokens: int
) -> tuple[dict[str, float | str], tpu_schedule.Schedule]:
  """A row of `run`, and the schedule it is of.

  Args:
    estimator: a key of COMPUTATIONS.
    tokens: a multiple of a grid step's.
  """
  schedule = tpu_schedule.compile_for(
    chip, kernel(estimator, top_k), *arguments(tokens, experts)
  )
  program = schedule.program('quantile_router')
  registers = tokens * experts / 1024
  bound = selection_bound(top_k, program.slots['VALU'])
  use = program.utilization()
  own = program.executed / registers
  values = (
    str(estimator),
    own,
    schedule.executed / registers,
    bound,
    own / bound,
    use['VALU'],
    use['XLU'],
    program.vmem_bytes / 2**20,
    schedule.temporary_bytes / 1e6,
  )
  return dict(zip(COLUMNS, values)), schedule


def run(
  chip: str = 'v6e',
  *,
  experts: int = 896,
  top_k: int = 16,
  tokens: int = 8192,
  peer: bool = True,
) -> list[dict[str, float | str]]:
  """A row for each computation, printed and returned.

  kernel: bundles of the kernel with its iterations, a register of logits; all:
  those of every program; bound: of `selection_bound`; ratio: kernel to bound;
  vpu and xlu: used share of the slots; vmem_mb and temp_mb: memory.

  Args:
    chip: a key of tpu_schedule.CHIPS.
    peer: also XLA's sort, by the same compiler, which only selects.
  """
  print(f'{chip}: {tokens} tokens, {experts} experts, top {top_k}')
  print(' '.join(f'{name:>11}' for name in COLUMNS))
  rows = []
  for estimator in COMPUTATIONS:
    row, _ = measure(
      chip, estimator, experts=experts, top_k=top_k, tokens=tokens
    )
    rows.append(row)
    print(
      ' '.join(
        f'{x:>11}' if isinstance(x, str) else f'{x:11.2f}' for x in row.values()
      )
    )
  if peer:
    _print_peer(chip, experts, top_k, tokens)
  return rows


def _print_peer(chip: str, experts: int, top_k: int, tokens: int):
  def select(scores, bias, mask, lo, hi):
    return xla.select_and_count(
      scores, bias, mask, top_k=top_k, cutoff='kplus1', statistics=None
    )

  schedule = tpu_schedule.compile_for(chip, select, *arguments(tokens, experts))
  bundles = schedule.executed / (tokens * experts / 1024)
  print(f'XLA, selection alone: {bundles:.1f} bundles in all')
