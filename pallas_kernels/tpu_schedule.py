"""Static schedule of what a computation compiles to for a TPU; no TPU needed.

libtpu compiles on any host and can write down the instruction bundles of every
program it emits, with the units each bundle uses. Bundles times iterations, at
one bundle a cycle, is a time without stalls: memory traffic that a kernel does
not hide, and waits for a result, come on top. It ranks variants of a kernel; it
does not replace a measurement.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import glob
import os
import pathlib
import re
import shutil
import tempfile

import jax
from jax.experimental import topologies

_ENVIRONMENT = {'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1'}
_UTILIZATION = 'final_hlo-static-per-bundle-utilization.txt'
# Passes whose text is read; that of all of them takes as long as compiling.
_PASSES = '(original|final_bundles|final_hlo-static-per-bundle-utilization)'
# A grid loop, always the outermost, runs two steps more than its grid: one to
# fetch, one to write.
_PIPELINE_STEPS = 2
# Set-up of a program as a whole, not work of a computation.
_OVERHEAD = ('<late-', 'TLP')


@dataclasses.dataclass(frozen=True)
class Chip:
  """A topology to compile for, and a clock for predictions.

  The clocks are not published; these follow from peak rates and unit counts.
  """

  topology: str
  clock_ghz: float


CHIPS = {
  'v5e': Chip('v5e:2x2', 1.5),
  'v5p': Chip('v5p:2x2x1', 1.75),
  'v6e': Chip('v6e:2x2', 1.75),
  'tpu7x': Chip('tpu7x:2x2x1', 2.2),
}


@dataclasses.dataclass(frozen=True)
class Program:
  """One kernel or fusion.

  Attributes:
    name: of the instruction it implements.
    bundles: of its code, loops counted once.
    executed: bundles times their iterations, as far as counts are constants.
    units: operations per unit, e.g. {'MATMUL': 532, 'VALU': 2201}.
    slots: of each unit in a bundle.
    vmem_bytes: its windows and scratch; registers spilled to VMEM excluded.
  """

  name: str
  bundles: int
  executed: int
  units: dict[str, int]
  slots: dict[str, int]
  vmem_bytes: int

  def utilization(self) -> dict[str, float]:
    """Used share of each unit's slots, loops counted once."""
    return {
      unit: count / (self.slots[unit] * max(self.bundles, 1))
      for unit, count in self.units.items()
    }


@dataclasses.dataclass(frozen=True)
class Schedule:
  """All programs of a compiled computation, and its temporaries in HBM."""

  chip: str
  programs: tuple[Program, ...]
  temporary_bytes: int

  @property
  def executed(self) -> int:
    return sum(program.executed for program in self.programs)

  @property
  def seconds(self) -> float:
    """Executed bundles at the chip's clock, without stalls."""
    return self.executed / (CHIPS[self.chip].clock_ghz * 1e9)

  def program(self, name: str) -> Program:
    """The only program whose name contains `name`.

    Raises:
      KeyError: there is none, or more than one.
    """
    found = [p for p in self.programs if name in p.name]
    if len(found) != 1:
      names = [p.name for p in self.programs]
      raise KeyError(f'{len(found)} programs contain {name!r}: {names}.')
    return found[0]


@functools.cache
def dump_directory() -> pathlib.Path:
  """Where libtpu writes schedules; it reads this setting when it is loaded.

  Call it first where something else may load libtpu before `devices` does.
  """
  directory = pathlib.Path(tempfile.mkdtemp(prefix='tpu_schedule_'))
  atexit.register(shutil.rmtree, directory, ignore_errors=True)
  flags = (
    f'--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true '
    f'--xla_jf_dump_llo_pass_label_regex={_PASSES}'
  )
  given = os.environ.get('LIBTPU_INIT_ARGS', '')
  os.environ['LIBTPU_INIT_ARGS'] = f'{given} {flags}'.strip()
  return directory


def devices(chip: str, dump: bool = True) -> list:
  """Devices of the chip's topology, to compile for.

  Args:
    chip: a key of CHIPS.
    dump: have schedules written from now on; decided once a process, when
      libtpu is loaded. A whole model writes gigabytes.

  Raises:
    ValueError: a chip that is not in CHIPS.
    RuntimeError: libtpu is not installed.
  """
  if chip not in CHIPS:
    raise ValueError(f'chip={chip!r} is unknown; choose one of {list(CHIPS)}.')
  for name, value in _ENVIRONMENT.items():
    os.environ.setdefault(name, value)
  if dump:
    dump_directory()
  try:
    topology = topologies.get_topology_desc(
      platform='tpu', topology_name=CHIPS[chip].topology
    )
  except (RuntimeError, NotImplementedError) as error:
    raise RuntimeError(
      f'libtpu cannot describe {CHIPS[chip].topology}; install it with '
      '`pip install libtpu==0.0.52`.'
    ) from error
  return topology.devices


def abstract_mesh(
  device, sizes=(1,), names=('x',)
) -> jax.sharding.AbstractMesh:
  """A mesh of such devices: a trace in its scope is for that TPU."""
  abstract_device = jax.sharding.AbstractDevice(
    device_kind=device.device_kind, num_cores=device.num_cores, platform='tpu'
  )
  types = (jax.sharding.AxisType.Auto,) * len(sizes)
  return jax.sharding.AbstractMesh(
    sizes, names, axis_types=types, abstract_device=abstract_device
  )


def compile_for(chip: str, function, *arguments) -> Schedule:
  """Compiles `function` for one device of a chip and reads its schedule.

  Args:
    chip: a key of CHIPS.
    arguments: arrays or their shapes and dtypes, in any tree.

  Raises:
    ValueError, RuntimeError: as `devices`; also RuntimeError if libtpu was
      loaded by something else before, so that it writes no schedule.
  """
  device = devices(chip)[0]
  sharding = jax.sharding.SingleDeviceSharding(device)
  place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
  directory = dump_directory()
  for path in directory.iterdir():
    path.unlink()
  with jax.sharding.use_abstract_mesh(abstract_mesh(device)):
    lowered = jax.jit(function).lower(*jax.tree.map(place, arguments))
  compiled = lowered.compile()
  programs = tuple(_programs(directory))
  if not programs:
    raise RuntimeError(
      'libtpu wrote no schedule, because it was loaded before tpu_schedule '
      'could ask for one; call tpu_schedule.devices before anything else '
      'compiles for a TPU, or start a new process.'
    )
  return Schedule(chip, programs, compiled.memory_analysis().temp_size_in_bytes)


def _programs(directory: pathlib.Path):
  for path in sorted(directory.glob(f'*-{_UTILIZATION}')):
    # <timestamp>-<name>-<number of the pass>-<pass>
    match = re.fullmatch(
      rf'(\d+)-(.+)-\d+-{re.escape(_UTILIZATION)}', path.name
    )
    stamp, name = match.groups()
    if name.startswith(_OVERHEAD):
      continue
    bundles, units, slots = _utilization(path.read_text())
    others = lambda kind, start=f'{stamp}-{name}': sorted(
      directory.glob(f'{glob.escape(start)}-[0-9]*-{kind}.txt')
    )
    text = ''.join(p.read_text() for p in others('final_bundles'))
    vmem = sum(_vmem_bytes(p.read_text()) for p in others('original'))
    executed = max(_executed(text), bundles)
    yield Program(name, bundles, executed, units, slots, vmem)


def _utilization(text: str) -> tuple[int, dict[str, int], dict[str, int]]:
  """Bundles, operations per unit and slots per unit of a utilization table."""
  lines = text.splitlines()
  names = [name.strip() for name in lines[1].split(',')]
  slots = dict(zip(names, map(int, lines[2].split())))
  rows = [
    [int(n) for n in line.split()]
    for line in lines[3:]
    if re.fullmatch(r'\s*\d+(\s+\d+)+\s*', line)
  ]
  totals = [sum(column) for column in zip(*rows)] or [0] * len(names)
  return len(rows), dict(zip(names, totals)), slots


def _vmem_bytes(text: str) -> int:
  sizes = re.findall(r'#allocation.*space=vmem, size = 0x([0-9a-f]+)', text)
  return sum(int(size, 16) for size in sizes)


_BUNDLE = re.compile(
  r'^\s*(?:\d+:)?\s*(?:0x[0-9a-f]+|0)\s*([A-Z]{2})?\s*:((?:\s*>)*)'
)
# The test of a loop whose last work is another loop may wait in that one for
# its end, which is then the test's predicate.
_EXIT = re.compile(
  r'(\S+) = scmp\.ge\.s32\.totalorder (?:\((\S+)\), )?\S+ (\d+) '
  r'/\* loop exit test'
)


def _executed(text: str) -> int:
  """Bundles with every loop as often as its exit test says, if a constant."""
  total, open_loops = 0, []  # each loop: [bundles, iterations, its test]

  def close():
    nonlocal total
    bundles, iterations, _ = open_loops.pop()
    if open_loops:
      open_loops[-1][0] += bundles * iterations
    else:
      total += bundles * iterations

  for line in text.splitlines():
    match = _BUNDLE.match(line)
    if not match:
      continue
    depth = match[2].count('>')
    empty = '{}' in line or '{' not in line
    while not empty and len(open_loops) > depth:
      close()
    if match[1] == 'LB' or (not empty and len(open_loops) < depth):
      if len(open_loops) == depth:  # one loop follows another directly
        close()
      open_loops.append([0, 1, None])
    if open_loops:
      open_loops[-1][0] += 1
      for test, waits, count in _EXIT.findall(line):
        inside_another = bool(waits) and open_loops[-1][2] == waits
        loop = max(len(open_loops) - 1 - inside_another, 0)
        extra = _PIPELINE_STEPS if loop == 0 else 0
        open_loops[loop][1:] = [max(int(count) - extra, 1), test]
    else:
      total += 1
  while open_loops:
    close()
  return total
