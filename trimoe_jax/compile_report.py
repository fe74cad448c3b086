"""A training step compiled for a topology, and what that predicts.

The step is the real one: every mixer and kernel, the router, depth mixing,
Muon, rematerialization and the chunked loss. Nothing is run. Times are a
roofline: the slowest of three resources if all overlap, their sum if none do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import pathlib
import time

import jax

from trimoe_jax import compile_checks, flops, hlo, topology, train_state
from trimoe_jax.config import TrainConfig
from trimoe_jax.model.model import count_parameters
from trimoe_jax.train_step import abstract_batch, make_train_step


@dataclasses.dataclass(frozen=True)
class Report:
  """What one compilation showed; sizes in bytes, of one device.

  `arguments`, `temporaries` and `peak` are the compiler's; None where nothing
  can be compiled without a device. `memory_traffic` is an upper bound.
  """

  config: str
  topology: str
  mesh: dict[str, int]
  devices: int
  parameters: int
  active: int
  rows: int
  context: int
  micro_batches: int
  arguments: int
  temporaries: int | None
  peak: int | None
  capacity: float
  model_flops: float
  step_flops: float
  collectives: dict[str, tuple[int, int]]
  memory_traffic: int | None
  checks: dict[str, int]
  largest: list[tuple[str, tuple[int, ...], int]]
  compute_seconds: float
  memory_seconds: float | None
  network_seconds: float | None
  lowering_seconds: float
  compile_seconds: float | None
  optimization: str
  versions: dict[str, str]

  @property
  def fits(self) -> bool | None:
    return None if self.peak is None else self.peak <= self.capacity

  @property
  def seconds(self) -> tuple[float, float]:
    """Of a step: if the three resources overlap, and if they do not."""
    known = (self.compute_seconds, self.memory_seconds, self.network_seconds)
    known = [s for s in known if s is not None]
    return max(known), sum(known)

  def mfu(self, seconds: float, peak_flops: float) -> float:
    return self.model_flops / (seconds * peak_flops)


def lower(config: TrainConfig, where: topology.Topology):
  """The training step of the first stage lowered, and its arguments."""
  optimizer, schedule = train_state.optimizer_of(config)
  state = train_state.abstract(config, optimizer, where.mesh)
  batch = abstract_batch(config.stages[0], where.mesh)
  step = jax.jit(make_train_step(config, optimizer, schedule), donate_argnums=0)
  if isinstance(where.mesh, jax.sharding.Mesh):
    with jax.set_mesh(where.mesh):
      return step.trace(state, batch).lower(), (state, batch)
  with jax.sharding.use_abstract_mesh(where.mesh):
    traced = step.trace(state, batch)
    return traced.lower(lowering_platforms=('cuda',)), (state, batch)


def build(
  name: str,
  config: TrainConfig,
  where: topology.Topology,
  *,
  optimization: str | None = None,
  keep: pathlib.Path | None = None,
) -> Report:
  """Lowers and compiles the step of the first stage, and reads the result.

  Args:
    name: of the configuration, for the report.
    config, where: what is compiled, for what.
    optimization: 'O0' to 'O3', XLA's effort; None is its own choice. 'O0' takes
      less than half of the time, and its memory is somewhat larger.
    keep: a path for the compiled program's text, or None.
  """
  start = time.perf_counter()
  lowered, arguments = lower(config, where)
  lowering = time.perf_counter() - start
  compiled = program = None
  if isinstance(where.mesh, jax.sharding.Mesh):
    start = time.perf_counter()
    options = {'optimization_level': optimization} if optimization else {}
    compiled = lowered.compile(options)
  compiling = time.perf_counter() - start
  if compiled is not None:
    text = compiled.as_text()
    program = hlo.Program(text, where.devices)
    if keep is not None:
      keep.write_text(text)
  what, seconds = (name, config, where, optimization), (lowering, compiling)
  return _report(what, arguments, compiled, program, seconds)


def _report(what, arguments, compiled, program, seconds) -> Report:
  name, config, where, optimization = what
  stage = config.stages[0]
  count = count_parameters(config.model)
  tokens = stage.batch * stage.context
  token = flops.per_token(config.model, stage.context)
  model_flops = token.training * tokens / where.devices
  repeats = 1 + flops.repeated(config.model) / 3
  memory = compiled and compiled.memory_analysis()
  traffic = program and program.memory_traffic()
  sent = program.collectives() if program else {}
  chip = where.chip
  return Report(
    config=name,
    topology=where.name,
    mesh={a: n for a, n in where.mesh.shape.items() if n > 1},
    devices=where.devices,
    parameters=count.total,
    active=count.active,
    rows=stage.batch,
    context=stage.context,
    micro_batches=stage.micro_batches,
    arguments=(
      memory.argument_size_in_bytes if memory else _bytes_held(arguments)
    ),
    temporaries=memory and memory.temp_size_in_bytes,
    peak=memory and memory.peak_memory_in_bytes,
    capacity=chip.hbm_bytes,
    model_flops=model_flops,
    step_flops=model_flops * repeats,
    collectives={k: tuple(t) for k, t in sent.items()},
    memory_traffic=traffic,
    checks=compile_checks.count(program, config, where.mesh.shape)
    if program
    else {},
    largest=[
      (a.dtype, a.dims, a.bytes) for a in (program.largest() if program else ())
    ],
    compute_seconds=model_flops * repeats / chip.flops,
    memory_seconds=program and traffic / chip.hbm_rate,
    network_seconds=program
    and sum(t.bytes for t in sent.values()) / chip.link_rate,
    lowering_seconds=seconds[0],
    compile_seconds=seconds[1] if compiled else None,
    optimization=optimization or 'default',
    versions=_versions(),
  )


def _bytes_held(tree) -> int:
  """Bytes of one device's shards of `tree`."""

  def one(x):
    count = 1
    for n in x.sharding.shard_shape(x.shape):
      count *= n
    return count * x.dtype.itemsize

  return sum(map(one, jax.tree.leaves(tree)))


def _versions() -> dict[str, str]:
  found = {}
  for package in ('jax', 'jaxlib', 'libtpu'):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[package] = importlib.metadata.version(package)
  return found


def markdown(report: Report, peak_flops: float) -> str:
  """The report as a page of tables.

  Args:
    report: of `build`.
    peak_flops: of one device, for MFU.
  """
  overlapped, serial = report.seconds
  mesh = ' x '.join(f'{a} {n}' for a, n in report.mesh.items()) or 'one device'
  unknown = 'not compiled'
  size = lambda n: unknown if n is None else f'{n / _GIB:.2f} GiB'
  span = lambda s: unknown if s is None else f'{s:.3g} s'
  rows = [
    ('parameters', f'{report.parameters:,} ({report.active:,} active)'),
    ('mesh', f'{mesh} ({report.devices:,} devices)'),
    (
      'batch',
      f'{report.rows:,} x {report.context:,} tokens in '
      f'{report.micro_batches} micro-batches',
    ),
    ('arguments', size(report.arguments)),
    ('temporaries', size(report.temporaries)),
    ('peak', f'{size(report.peak)} of {size(report.capacity)}'),
    ('model FLOPs', f'{report.model_flops:.3g} a device and step'),
    ('compute', span(report.compute_seconds)),
    ('memory', span(report.memory_seconds)),
    ('network', span(report.network_seconds)),
    ('step, all overlapped', span(overlapped)),
    ('step, nothing overlapped', span(serial)),
    (
      'MFU',
      f'{report.mfu(overlapped, peak_flops):.0%} to '
      f'{report.mfu(serial, peak_flops):.0%}',
    ),
    ('lowering', span(report.lowering_seconds)),
    ('compilation', f'{span(report.compile_seconds)} ({report.optimization})'),
    ('versions', ', '.join(f'{k} {v}' for k, v in report.versions.items())),
  ]
  lines = [
    f'# {report.config} on {report.topology}',
    '',
    '| | |',
    '| --- | --- |',
  ]
  lines += [f'| {name} | {value} |' for name, value in rows]
  lines += ['', _ADVICE[report.fits].format(**dataclasses.asdict(report))]
  if report.collectives:
    lines += ['', '| collective | executions | bytes a device sends |']
    lines += ['| --- | ---: | ---: |']
    lines += [
      f'| {kind} | {count:,} | {_amount(sent)} |'
      for kind, (count, sent) in report.collectives.items()
    ]
  if report.checks:
    lines += ['', '| must not grow | found | wanted |', '| --- | ---: | ---: |']
    lines += [
      f'| {name} | {count} | {compile_checks.WANTED[name]} |'
      for name, count in report.checks.items()
    ]
  if report.largest:
    lines += ['', '| largest arrays | bytes |', '| --- | ---: |']
    lines += [
      f'| {dtype}{list(dims)} | {_amount(count)} |'
      for dtype, dims, count in report.largest
    ]
  return '\n'.join(lines) + '\n'


def _amount(count: float) -> str:
  return f'{count / 2**20:,.1f} MiB'


_GIB = 2**30
_ADVICE = {
  None: 'Lowered for a GPU, which nothing here compiles for without one: the '
  'arguments are known, temporaries are not.',
  True: 'It fits. Memory that is left over buys fewer micro-batches '
  '({micro_batches}) or less rematerialization.',
  False: 'It does not fit. In this order: --config.model.remat=full, more '
  'micro-batches (--micro_batches above {micro_batches}), a smaller '
  '--config.loss.chunk, a longer --config.mesh.context or mesh.expert, which '
  'leave fewer tokens and experts to a device.',
}
