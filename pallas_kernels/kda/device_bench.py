"""Times of KDA at the sizes of a model, beside public implementations.

Calls are started in batches and waited for once, inputs rotate past the cache,
and the floor is the larger of the least traffic over the bandwidth of a large
copy and the chunk form's operations over the rate of a large product, both
measured in the same process.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.kda import arg_specs, peers
from pallas_kernels.kda.api import kda

COLUMNS = (
  *('shape', 'pass', 'by', 'ms'),
  *('floor_ms', 'times_floor', 'times_ours', 'MiB'),
)
_STATED = 'FlashKDA*'
_SETS = 3  # of inputs that rotate


@dataclasses.dataclass(frozen=True)
class Shape:
  """`text` is BxTxH, or the lengths of packed documents, as in 70+58x96."""

  text: str
  batch: int
  length: int
  heads: int
  documents: tuple[int, ...] | None = None

  @property
  def spec(self) -> arg_specs.ArgSpec:
    size = self.batch, self.length, self.heads, self.heads, 128, 128
    return arg_specs.ArgSpec(self.text, *size)


def parse(text: str) -> Shape:
  """A shape from its text.

  Raises:
    ValueError: the text is neither form.
  """
  try:
    *rows, heads = text.split('x')
    if len(rows) == 1 and '+' in rows[0]:
      documents = tuple(map(int, rows[0].split('+')))
      return Shape(text, 1, sum(documents), int(heads), documents)
    batch, length = map(int, rows)
    return Shape(text, batch, length, int(heads))
  except ValueError:
    raise ValueError(
      f'{text!r} is no shape; write BxTxH, as in 1x8192x96, or the lengths of '
      'packed documents and the heads, as in 5000+3192x96.'
    ) from None


def copy_bandwidth() -> float:
  """Bytes a second that the negation of 1 GiB reads and writes."""
  sets = [(jnp.ones(2**28, jnp.float32),) for _ in range(2)]
  negate = jax.jit(jnp.negative)
  call = lambda arguments: negate(*arguments)
  seconds = peers.batched_seconds(call, sets, jax.block_until_ready)
  return 2 * sets[0][0].nbytes / seconds


def matmul_rate(size: int = 8192) -> float:
  """Operations a second of a square product in bfloat16."""
  key = jax.random.key(0)
  x = jax.random.normal(key, (size, size), jnp.bfloat16)
  product = jax.jit(jnp.matmul)
  call = lambda arguments: product(*arguments)
  seconds = peers.batched_seconds(call, [(x, x)], jax.block_until_ready)
  return 2 * size**3 / seconds


def _ours(shape: Shape, options: dict):
  ids = None if shape.documents is None else peers.segment_ids(shape.documents)
  return lambda arrays: kda(**arrays, segment_ids=ids, **options)[0]


class Table:
  """Rows, printed as they come."""

  def __init__(self, floors: dict[tuple[str, str], float]):
    self.rows, self._floors, self._ours = [], floors, {}
    self._print(COLUMNS)

  def _print(self, cells):
    first, *rest = cells
    print(f'{first:>32}', *[f'{cell:>11}' for cell in rest], flush=True)

  def add(self, shape: Shape, kind: str, by: str, seconds: float, used=None):
    case = shape.text, kind
    if by == 'ours':
      self._ours[case] = seconds
    ours = self._ours.get(case, float('nan'))
    floor = self._floors[case]
    values = seconds * 1e3, floor * 1e3, seconds / floor, seconds / ours
    memory = float('nan') if used is None else used / 2**20
    row = dict(zip(COLUMNS, (*case, by, *values, memory)))
    self.rows.append(row)
    cells = [f'{x:.3f}' if isinstance(x, float) else x for x in row.values()]
    self._print(cells)


def run(
  shapes: str,
  names: list[str],
  kinds: list[str],
  *,
  floor_of,
  operations_of,
  **options,
) -> list[dict[str, float | str]]:
  """Rows for every shape and pass, ours before its peers; see `bench.run`.

  Args:
    shapes: texts that `parse` takes, by commas.
    names: peers, perhaps with the only shape to time them at, as in
      fla@1x8192x96; one that cannot run here is named with the reason.
    kinds: 'forward', 'gradient' (both passes).
    floor_of, operations_of: bytes, operations of a spec and kind.
    **options: of `kda`.
  """
  shapes = [parse(text) for text in shapes.split(',')]
  wanted = [_peer(entry, shapes) for entry in names]
  bandwidth, rate = copy_bandwidth(), matmul_rate()
  print(
    f'{jax.devices()[0].device_kind}, jax {jax.__version__}, copy '
    f'{bandwidth / 1e12:.2f} TB/s, product {rate / 1e12:.0f} TFLOP/s'
  )
  floors = {
    (s.text, kind): max(
      floor_of(s.spec, kind) / bandwidth, operations_of(s.spec, kind) / rate
    )
    for s in shapes
    for kind in kinds
  }
  table = Table(floors)
  for shape in shapes:
    sets = _input_sets(shape)
    for kind in kinds:
      measured = peers.time_jax(_ours(shape, options), sets, kind)
      table.add(shape, kind, 'ours', *measured)
  for name, only in wanted:
    reason = peers.missing(name)
    if reason is None:
      _add_peer(table, name, only, kinds)
    else:
      print(reason, flush=True)
  return table.rows


def _peer(entry: str, shapes) -> tuple[str, list[Shape]]:
  """A peer and the shapes to time it at, from 'name' or 'name@shape'.

  Raises:
    ValueError: there is no such peer, or the shape is none of those given.
  """
  name, _, only = entry.partition('@')
  peers.missing(name)
  taken = [shape for shape in shapes if only in ('', shape.text)]
  if not taken:
    raise ValueError(
      f'{entry!r} names a shape that is not timed; choose one of '
      f'{[shape.text for shape in shapes]}.'
    )
  return name, taken


def _input_sets(shape: Shape):
  size = shape.batch, shape.length, shape.heads
  return [peers.inputs(*size, seed=seed) for seed in range(_SETS)]


def _add_peer(table: Table, name: str, shapes, kinds):
  print(f'{name} is {peers.PEERS[name][0]} {peers.version(name)}')
  if name == 'fla':
    print(
      f'{_STATED} is not run: {peers.FLASHKDA_OVER_FLA} of the forward of fla, '
      'the ratio of one run at 1x8192x96'
    )
  for shape in shapes:
    sets = _input_sets(shape)
    try:
      for measured in peers.measure(name, sets, kinds, shape.documents):
        kind, seconds, used = measured
        table.add(shape, kind, name, seconds, used)
        if name == 'fla' and kind == 'forward':
          seconds *= peers.FLASHKDA_OVER_FLA
          table.add(shape, kind, _STATED, seconds)
    except Exception as error:  # a peer's failure is a result, not ours
      print(f'{name} failed at {shape.text}: {error!r:.300}', flush=True)
