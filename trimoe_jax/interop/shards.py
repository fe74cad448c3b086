"""Sharded safetensors folders: an index and the files it names."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import ml_dtypes  # noqa: F401  NumPy learns bfloat16 from it
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

INDEX = 'model.safetensors.index.json'
Shape = tuple[int, ...]


class Reader:
  """Reads single tensors of a folder; at most two files are open at once.

  Files are memory-mapped, so an open one costs no memory by itself.
  """

  def __init__(self, directory: pathlib.Path):
    """Reads the index.

    Raises:
      FileNotFoundError: the index, or files it names, are not there.
    """
    self._directory = pathlib.Path(directory)
    index = self._directory / INDEX
    if not index.is_file():
      raise FileNotFoundError(
        f'{index} does not exist; a checkpoint in the released layout has this '
        'index beside its safetensors shards.'
      )
    self.files: dict[str, str] = json.loads(index.read_text())['weight_map']
    missing = [
      name
      for name in sorted(set(self.files.values()))
      if not (self._directory / name).is_file()
    ]
    if missing:
      raise FileNotFoundError(
        f'{index} names shards that are not in {self._directory}: '
        f'{", ".join(missing)}; download them again.'
      )
    self._open: dict[str, safe_open] = {}

  def read(self, name: str) -> np.ndarray:
    """The tensor called `name`, bfloat16 as ml_dtypes.bfloat16."""
    return self._file(self.files[name]).get_tensor(name)

  def headers(self) -> Iterator[tuple[str, Shape | None, str]]:
    """(name, shape, problem) of every tensor, without reading its data.

    The shape is None when there is a problem: its shard cannot be opened, or
    does not hold it.
    """
    for file in sorted(set(self.files.values())):
      names = [n for n, f in self.files.items() if f == file]
      try:
        opened = self._file(file)
      except SafetensorError as error:
        yield file, None, f'{file} is not a readable shard ({error})'
        continue
      held = set(opened.keys())
      for name in names:
        if name in held:
          yield name, tuple(opened.get_slice(name).get_shape()), ''
        else:
          yield name, None, f'{name} is not in {file}, where the index puts it'

  def _file(self, name: str):
    if name not in self._open:
      if len(self._open) == 2:
        del self._open[next(iter(self._open))]
      self._open[name] = safe_open(self._directory / name, framework='np')
    return self._open[name]


def split(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
  """Names in order, in groups of at most `limit` bytes (a larger one alone)."""
  groups: list[list[str]] = []
  room = 0
  for name, size in sizes.items():
    if not groups or size > room:
      groups.append([])
      room = limit
    groups[-1].append(name)
    room -= size
  return groups


def write(
  directory: pathlib.Path,
  shards: Sequence[Sequence[str]],
  tensors: Iterable[tuple[str, np.ndarray]],
):
  """Writes shards and then the index, which makes the folder loadable.

  Args:
    directory: an existing folder.
    shards: the names in each file.
    tensors: (name, value) of every name, in the same order; consumed one file
      at a time.
  """
  directory, tensors = pathlib.Path(directory), iter(tensors)
  weight_map, total = {}, 0
  for number, names in enumerate(shards):
    file = f'model-{number + 1:05d}-of-{len(shards):05d}.safetensors'
    values = dict(next(tensors) for _ in names)
    save_file(values, directory / file)
    total += sum(value.nbytes for value in values.values())
    weight_map.update(dict.fromkeys(values, file))
  index = {'metadata': {'total_size': total}, 'weight_map': weight_map}
  (directory / INDEX).write_text(json.dumps(index, indent=1) + '\n')
