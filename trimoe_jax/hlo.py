"""What a compiled program sends, reads and keeps, from its HLO text.

XLA's own cost analysis counts a loop's body once; here every instruction counts
as often as its loops run, where the compiler knows how often that is.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator

# Kinds of collectives, and the share of its larger side that a device sends or
# receives over `n` devices by the algorithm with the fewest bytes.
COLLECTIVES = {
  'all-gather': lambda n: (n - 1) / n,
  'all-reduce': lambda n: 2 * (n - 1) / n,
  'reduce-scatter': lambda n: (n - 1) / n,
  'all-to-all': lambda n: (n - 1) / n,
  'ragged-all-to-all': lambda n: (n - 1) / n,
  'collective-permute': lambda n: 1,
  'collective-broadcast': lambda n: 1,
}
# Instructions that name or order values and move nothing themselves.
_FREE = frozenset(
  'parameter constant tuple get-tuple-element bitcast while conditional call '
  'after-all partition-id replica-id optimization-barrier domain iota'.split()
)
_BITS = {'pred': 8, 's4': 4, 'u4': 4, 'token': 0, 'opaque': 0}
_ARRAY = re.compile(r'\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]')
_NAME = re.compile(r'%([\w.-]+)')
_LINE = re.compile(r'^\s+(?:ROOT )?%([\w.-]+) = (.*)$')
_HEADER = re.compile(r'^(ENTRY )?%?([\w.-]+) .*\{$')
_CALLED = re.compile(
  r'\b(?:body|condition|calls|to_apply|true_computation|false_computation)='
  r'%([\w.-]+)|\bbranch_computations=\{([^}]*)\}'
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r'\bcondition=%([\w.-]+)')
_CONSTANT = re.compile(r'\bconstant\((\d+)\)')
_GROUPS = re.compile(
  r'replica_groups=(?:\[\d+,(\d+)\]<=|\{\{([\d,]+)\}|\[(\d+)\]<=)'
)
# A Pallas kernel's own attributes may hold line breaks.
_CONTINUED = re.compile(r'\n(?="|\}[^\n])')
_MESH_GROUPS = re.compile(r'replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}')


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation.

  Attributes:
    name: of the result.
    opcode: such as 'fusion' or 'all-gather-start'.
    shape: the type of the result, as written.
    operands: names of what it takes.
    text: the whole line.
  """

  name: str
  opcode: str
  shape: str
  operands: tuple[str, ...]
  text: str

  @property
  def collective(self) -> str | None:
    """The kind of collective that begins here, or None."""
    kind = self.opcode.removesuffix('-start')
    return kind if kind in COLLECTIVES else None

  @property
  def called(self) -> list[str]:
    names = []
    for one, several in _CALLED.findall(self.text):
      names += [one] if one else _NAME.findall(several)
    return names

  def group_size(self, devices: int) -> int:
    """Devices that take part in one group of a collective."""
    found = _MESH_GROUPS.search(self.text)
    if found:
      lengths = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
      named = re.findall(r"'(\w+)'", found[2])
      return math.prod(int(lengths[name]) for name in named)
    found = _GROUPS.search(self.text)
    if not found:
      return devices
    size, members, whole = found.groups()
    return int(size or whole) if not members else members.count(',') + 1


@dataclasses.dataclass(frozen=True)
class Array:
  """One array type of a program."""

  dtype: str
  dims: tuple[int, ...]

  @property
  def bytes(self) -> int:
    bits = _BITS.get(self.dtype)
    if bits is None:
      bits = int(re.search(r'\d+', self.dtype)[0])
    return math.ceil(math.prod(self.dims) * bits / 8)


def arrays(shape: str) -> list[Array]:
  """The array types in a type, which may be a tuple."""
  return [
    Array(dtype, tuple(int(n) for n in dims.split(',') if n))
    for dtype, dims in _ARRAY.findall(shape)
  ]


class Traffic(collections.namedtuple('Traffic', 'count bytes')):
  """Executions of one kind of collective and what one device sends in them."""


class Program:
  """The computations of a compiled program.

  Args:
    text: `compiled.as_text()`.
    devices: that it runs on.
  """

  def __init__(self, text: str, devices: int):
    self._devices = devices
    self._entry, self.computations = _parse(text)

  def trips(self, instruction: Instruction) -> int:
    """How often a loop runs; 1 where that is unknown, or for no loop.

    A loop whose condition compares with a constant is taken to count from 0,
    as those of `scan` do.
    """
    if instruction.opcode != 'while':
      return 1
    known = _TRIPS.search(instruction.text)
    if known:
      return int(known[1])
    condition = self.computations[_CONDITION.search(instruction.text)[1]]
    limits = [_CONSTANT.search(i.text) for i in condition]
    limits = [int(found[1]) for found in limits if found]
    ends = 'compare' in condition[-1].opcode and 'LT' in condition[-1].text
    return limits[0] if len(limits) == 1 and ends else 1

  @functools.cached_property
  def executions(self) -> dict[str, int]:
    """How often each computation runs, loops and callers multiplied.

    Both branches of a conditional count.
    """
    counts: dict[str, int] = collections.Counter()

    def visit(name: str, times: int):
      counts[name] += times
      for instruction in self.computations.get(name, ()):
        for called in instruction.called:
          visit(called, times * self.trips(instruction))

    visit(self._entry, 1)
    return dict(counts)

  def instructions(self) -> Iterator[tuple[Instruction, int]]:
    """Every instruction that runs, and how often; insides of fusions too."""
    for name, times in self.executions.items():
      for instruction in self.computations.get(name, ()):
        yield instruction, times

  def collectives(self) -> dict[str, Traffic]:
    """Traffic by kind of collective.

    Bytes are those of the result or the operands, whichever is more, times the
    share that leaves a device.
    """
    found: dict[str, list[float]] = {}
    for instruction, times in self.instructions():
      kind = instruction.collective
      if kind is None:
        continue
      size = self._collective_bytes(instruction)
      share = COLLECTIVES[kind](instruction.group_size(self._devices))
      total = found.setdefault(kind, [0, 0.0])
      total[0] += times
      total[1] += times * size * share
    return {k: Traffic(n, int(b)) for k, (n, b) in sorted(found.items())}

  def _collective_bytes(self, instruction: Instruction) -> int:
    result = sum(a.bytes for a in arrays(instruction.shape))
    operands = sum(self._bytes_of(instruction.operands))
    if instruction.opcode.endswith('-start'):
      # The result of a start is a tuple of the operands and the results.
      result = max(result - operands, 0)
    return max(result, operands)

  @functools.cached_property
  def _shapes(self) -> dict[str, str]:
    return {
      i.name: i.shape for lines in self.computations.values() for i in lines
    }

  def _bytes_of(self, names) -> Iterator[int]:
    for name in names:
      yield sum(a.bytes for a in arrays(self._shapes.get(name, '')))

  def memory_traffic(self) -> int:
    """Bytes that instructions outside fusions read and write, loops counted.

    An upper bound of what leaves the fast memories: an operand counts whole
    even where only a slice of it is read, unless a slice is all that is read.
    """
    inside = {
      called
      for lines in self.computations.values()
      for i in lines
      if i.opcode in ('fusion', 'reduce', 'sort', 'scatter', 'map')
      for called in i.called
    }
    total = 0
    for name, times in self.executions.items():
      if name in inside:
        continue
      for instruction in self.computations.get(name, ()):
        total += times * self._moved(instruction)
    return total

  def _moved(self, instruction: Instruction) -> int:
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith('-done'):
      return 0
    result = sum(a.bytes for a in arrays(instruction.shape))
    if 'dynamic-slice' in opcode or 'slice' == opcode or 'gather' == opcode:
      return 2 * result
    sizes = list(self._bytes_of(instruction.operands))
    if 'dynamic-update-slice' in opcode:
      return 2 * (sum(sizes) - max(sizes, default=0))
    # A stack of layers is read or written one layer at a time.
    return sum(min(size, 4 * max(result, 1)) for size in sizes) + result

  def largest(self, count: int | None = 10) -> list[Array]:
    """The largest different arrays of the program; None: all of them."""
    seen = {
      a
      for lines in self.computations.values()
      for i in lines
      for a in arrays(i.shape)
    }
    return sorted(seen, key=lambda a: -a.bytes)[:count]


def _parse(text: str) -> tuple[str, dict[str, list[Instruction]]]:
  """The entry's name, and the instructions of each computation."""
  computations: dict[str, list[Instruction]] = {}
  entry, current = '', None
  for line in _CONTINUED.sub(' ', text).splitlines():
    if line and not line[0].isspace():
      found = _HEADER.match(line)
      current = computations.setdefault(found[2], []) if found else None
      if found and found[1]:
        entry = found[2]
    elif current is not None:
      found = _LINE.match(line)
      if found:
        current.append(_instruction(*found.groups()))
  return entry, computations


def _instruction(name: str, rest: str) -> Instruction:
  end = _closing(rest, 0) + 1 if rest.startswith('(') else rest.index(' ')
  shape, rest = rest[:end], rest[end:].lstrip()
  opcode, _, tail = rest.partition('(')
  operands = tail[: _closing('(' + tail, 0) - 1]
  return Instruction(
    name, opcode, shape, tuple(_NAME.findall(operands)), shape + ' ' + rest
  )


def _closing(text: str, start: int) -> int:
  """The position of the bracket that closes the one at `start`."""
  depth = 0
  for i in range(start, len(text)):
    depth += {'(': 1, ')': -1}.get(text[i], 0)
    if depth == 0:
      return i
  return len(text)
