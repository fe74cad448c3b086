"""How the layers are grouped for scanning: blocks, groups and runs.

K3's 93 layers are not uniform: layer 0 is dense, attention is MLA at layers 3,
7, ..., 91 and 92, and a residual block is 12 layers. Equal neighbours are
folded into `Repeat`, whose parameters are stacked and which runs as one
`lax.scan`; folding is repeated with longer periods, so that a block of K3
becomes Repeat(3, (Repeat(3, kda+moe), mla+moe)). Equal consecutive blocks are
folded too. What remains different is written out.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from trimoe_jax.config import Ffn, Mixer, ModelConfig


@dataclasses.dataclass(frozen=True)
class Unrolled(ModelConfig):
  """A model whose layers are all written out; nothing is stacked.

  A scan cuts each layer's weights out of a stack. Where one token is computed
  at a time that reads and writes them once more; in training it is nothing
  beside the products, and the program stays small.
  """

  @classmethod
  def of(cls, config: ModelConfig) -> Unrolled:
    names = [field.name for field in dataclasses.fields(config)]
    return cls(**{name: getattr(config, name) for name in names})

  @property
  def scans_layers(self) -> bool:
    return False


@dataclasses.dataclass(frozen=True)
class Layer:
  """One decoder layer: a token mixer and a feed-forward part."""

  mixer: Mixer
  ffn: Ffn

  @property
  def moe_layers(self) -> int:
    return int(self.ffn == 'moe')

  @property
  def layers(self) -> int:
    return 1


@dataclasses.dataclass(frozen=True)
class Repeat:
  """`count` copies of `body`, one after the other."""

  count: int
  body: tuple[Node, ...]

  @property
  def moe_layers(self) -> int:
    return self.count * moe_layers(self.body)

  @property
  def layers(self) -> int:
    return self.count * sum(node.layers for node in self.body)


Node = Layer | Repeat


@dataclasses.dataclass(frozen=True)
class BlockRun:
  """`count` equal residual blocks in a row; the first has number `first`."""

  name: str
  first: int
  count: int
  body: tuple[Node, ...]

  @property
  def moe_layers(self) -> int:
    return self.count * moe_layers(self.body)


def moe_layers(body: Sequence[Node]) -> int:
  return sum(node.moe_layers for node in body)


def child_name(position: int, node: Node) -> str:
  """The parameter name of a node at `position` of its body."""
  return f'{"layer" if isinstance(node, Layer) else "repeat"}_{position}'


def fold(nodes: Sequence[Node]) -> tuple[Node, ...]:
  """`nodes` with equal consecutive stretches folded into Repeat."""
  folded = tuple(nodes)
  period = 1
  while period <= len(folded) // 2:
    folded = _fold_period(folded, period)
    period += 1
  return folded


def _fold_period(nodes: tuple[Node, ...], period: int) -> tuple[Node, ...]:
  out, i = [], 0
  while i < len(nodes):
    window, count = nodes[i : i + period], 1
    while nodes[i + count * period : i + (count + 1) * period] == window:
      count += 1
    if count > 1 and len(window) == period:
      out.append(Repeat(count, window))
      i += count * period
    else:
      out.append(nodes[i])
      i += 1
  return tuple(out)


def block_runs(config: ModelConfig) -> tuple[BlockRun, ...]:
  """The whole network as runs of equal residual blocks."""
  kinds = [Layer(config.mixer(i), config.ffn(i)) for i in range(config.layers)]
  size = config.residual_block
  group = fold if config.scans_layers else tuple
  blocks = [group(kinds[i : i + size]) for i in range(0, config.layers, size)]
  runs, i = [], 0
  while i < len(blocks):
    same = itertools.takewhile(
      functools.partial(operator.eq, blocks[i]), blocks[i:]
    )
    count = len(list(same)) if config.scans_layers else 1
    runs.append(BlockRun(f'blocks_{len(runs)}', i, count, blocks[i]))
    i += count
  return tuple(runs)


def layer_addresses(
  config: ModelConfig,
) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
  """For each layer in order: its path in the parameters and its stack index.

  The parameters of layer i are the leaves under `path`, indexed by `index`.
  """
  found = []
  for run in block_runs(config):
    for copy in range(run.count):
      stacked = (copy,) if run.count > 1 else ()
      found.extend(_addresses(run.body, (run.name,), stacked))
  return found


def _addresses(
  body: Sequence[Node], path: tuple[str, ...], index: tuple[int, ...]
) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
  for position, node in enumerate(body):
    here = (*path, child_name(position, node))
    if isinstance(node, Layer):
      yield here, index
    else:
      for copy in range(node.count):
        yield from _addresses(node.body, here, (*index, copy))


def unroll(params: Any, config: ModelConfig) -> Any:
  """The parameters of `Unrolled.of(config)`, whatever a layer consists of."""
  runs = {run.name for run in block_runs(config)}
  out = {name: x for name, x in params.items() if name not in runs}
  into = layer_addresses(Unrolled.of(config))
  for (path, index), (to, _) in zip(layer_addresses(config), into):
    layer = functools.reduce(lambda tree, name: tree[name], path, params)
    block = out.setdefault(to[0], {})
    block[to[1]] = jax.tree.map(lambda x, i=index: x[i] if i else x, layer)
  return out
