"""Checkpoints in the layout in which Kimi K3 is released, both ways.

A folder holds config.json, safetensors shards and their index. Text tensors
carry the prefix `language_model.` and PyTorch's [out, in] convention; routed
experts may be packed as MXFP4; `A_log` is padded to the head dimension; short
convolutions, the KDA output norm, A_log, dt_bias and the routers' correction
bias are float32 and the rest bfloat16. Images' tensors have the prefixes
`vision_tower.` and `mm_projector.`.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trimoe_jax.config import ModelConfig
from trimoe_jax.interop import hf_config, hf_names, mxfp4, shards
from trimoe_jax.model import router
from trimoe_jax.model.model import model_parameters
from trimoe_jax.model.parameters import Parameter
from trimoe_jax.model.router import RouterState

SHARD_BYTES = 5 * 2**30
_PARTS = ('_packed', '_scale')
_SHOWN = 20  # problems listed in one message


class Checkpoint(NamedTuple):
  """A model.

  Attributes:
    config: what the released config.json says; fields about how to compute
      (remat, chunk sizes, the balancing rule) are at their defaults.
    params: `model_parameters(config)` as NumPy arrays on the host.
    router: selection biases, [layers with experts, experts].
  """

  config: ModelConfig
  params: Any
  router: RouterState


def load(
  directory: str | pathlib.Path, *, dtype: str = 'float32'
) -> Checkpoint:
  """The model of a folder in the released layout.

  Every shape is checked before any data is read. Tensors are then read one at
  a time into their place in the stacked parameters, so that beside the result
  only one tensor is held.

  Args:
    directory: holds config.json, the index and the shards.
    dtype: of the parameters in memory; those that the layout keeps in float32
      stay float32. bfloat16 loses nothing of a released file, for packed
      experts either.

  Raises:
    FileNotFoundError: config.json, the index or a shard is missing.
    ValueError: unsupported structure; or tensors that are missing, unknown,
      unreadable or of the wrong shape, all listed in one message.
  """
  directory = pathlib.Path(directory)
  config = hf_config.read(directory)
  reader = shards.Reader(directory)
  expected = {x.name: x for x in hf_names.tensors(config)}
  _check(directory, reader, expected)
  wide = {x.path for x in expected.values() if x.wide}
  bias_le = np.empty((config.moe_layers, config.moe.experts), np.float32)
  into = {
    'params': _allocate(config, jnp.dtype(dtype), wide),
    'router': {'bias': bias_le},
  }
  first = lambda x: reader.files.get(x.name) or reader.files[x.name + _PARTS[0]]
  for tensor in sorted(expected.values(), key=first):
    place = _leaf(into, tensor.path)
    place[tensor.index] = tensor.to_parameter(_read(reader, tensor))
  state = router.from_bias(jnp.asarray(bias_le), config.router)
  return Checkpoint(config, into['params'], state)


def save(
  directory: str | pathlib.Path,
  checkpoint: Checkpoint,
  *,
  pack_experts: bool = False,
  dtype: str = 'bfloat16',
  shard_bytes: int = SHARD_BYTES,
):
  """Writes a folder in the released layout; the index comes last.

  Args:
    directory: made if need be; must not hold a checkpoint yet.
    checkpoint: parameters may be NumPy or JAX arrays. One shard is held beside
      them.
    pack_experts: store routed experts as MXFP4, as released. This rounds to
      the nearest 4-bit code (see `mxfp4.pack`) and loses nothing for experts
      that were loaded from packed tensors; trained float weights lose.
    dtype: of tensors that the layout does not keep in float32. As released,
      bfloat16; 'float32' loses nothing of a trained model.
    shard_bytes: size at which a new shard is begun.

  Raises:
    FileExistsError: the folder already has an index.
    ValueError: the layout cannot express the configuration, a parameter has
      the wrong shape, or an expert cannot be packed.
  """
  directory = pathlib.Path(directory)
  config, params, state = checkpoint
  if (directory / shards.INDEX).exists():
    raise FileExistsError(
      f'{directory} already holds a checkpoint; name another folder.'
    )
  released = hf_config.to_released(config, packed=pack_experts)
  inputs = config.moe.latent, config.moe.hidden
  if pack_experts and any(n % mxfp4.BLOCK for n in inputs):
    raise ValueError(
      f'moe.latent={inputs[0]} and moe.hidden={inputs[1]} must be multiples of '
      f'{mxfp4.BLOCK} to pack experts; save with pack_experts=False.'
    )
  _check_parameters(config, params)
  values = {'params': params, 'router': {'bias': state.bias}}
  values = jax.tree.map(np.asarray, values)
  tensors = list(hf_names.tensors(config))
  kind = jnp.dtype(dtype)
  sizes = {}
  for tensor in tensors:
    sizes.update(_sizes(tensor, kind, pack_experts))
  directory.mkdir(parents=True, exist_ok=True)
  hf_config.write(directory, released)
  shards.write(
    directory,
    shards.split(sizes, shard_bytes),
    (
      stored
      for tensor in tensors
      for stored in _stored(tensor, values, kind, pack_experts)
    ),
  )


def _allocate(config: ModelConfig, dtype: np.dtype, wide: set) -> Any:
  """Uninitialized parameters; leaves at a path in `wide` are float32."""

  def empty(table, path):
    if isinstance(table, Parameter):
      return np.empty(table.shape, np.float32 if path in wide else dtype)
    return {key: empty(part, (*path, key)) for key, part in table.items()}

  return empty(model_parameters(config), ('params',))


def _read(reader, tensor: hf_names.Tensor) -> np.ndarray:
  """One tensor as stored, unpacked if need be."""
  if tensor.name in reader.files:
    return reader.read(tensor.name)
  packed, scale = (reader.read(tensor.name + part) for part in _PARTS)
  try:
    return mxfp4.unpack(packed, scale)
  except ValueError as error:
    raise ValueError(f'{tensor.name}: {error}') from error


def _stored(tensor, values, dtype, pack) -> Iterator[tuple[str, np.ndarray]]:
  """(name, value) of the one or two file entries of a tensor."""
  local = _leaf(values, tensor.path)[tensor.index]
  stored = tensor.to_stored(np.asarray(local))
  if not (pack and tensor.is_expert):
    kind = np.float32 if tensor.wide else dtype
    yield tensor.name, np.ascontiguousarray(stored.astype(kind))
    return
  try:
    parts = mxfp4.pack(stored)
  except ValueError as error:
    raise ValueError(f'{tensor.name}: {error}') from error
  yield from zip((tensor.name + part for part in _PARTS), parts)


def _sizes(tensor, dtype, pack) -> dict[str, int]:
  """Bytes of the file entries that `_stored` makes."""
  count = math.prod(tensor.stored)
  if pack and tensor.is_expert:
    inputs = (2, mxfp4.BLOCK)
    return {tensor.name + p: count // n for p, n in zip(_PARTS, inputs)}
  return {tensor.name: count * (4 if tensor.wide else dtype.itemsize)}


def _leaf(tree: Any, path: tuple[str, ...]) -> Any:
  for key in path:
    tree = tree[key]
  return tree


def _check(directory, reader, expected):
  """Raises ValueError naming every tensor that does not fit."""
  problems = []
  for name, shape, problem in reader.headers():
    if problem:
      problems.append(problem)
    else:
      wanted = _wanted_shape(name, expected)
      if wanted is None:
        problems.append(f'{name} has no place in this model')
      elif shape != wanted:
        problems.append(f'{name} has shape {shape}, expected {wanted}')
  for tensor in expected.values():
    packed = {tensor.name + part for part in _PARTS}
    if tensor.name in reader.files or (
      tensor.is_expert and packed <= reader.files.keys()
    ):
      continue
    problems.append(
      f'{tensor.name} is missing (shape {tensor.stored}, for parameter '
      f'{"/".join(tensor.path)}{list(tensor.index)})'
    )
  if problems:
    more = len(problems) - _SHOWN
    tail = [f'and {more} more'] if more > 0 else []
    raise ValueError(
      f'{directory} does not fit its config.json ({len(problems)} problems):'
      + ''.join(f'\n  {line}' for line in problems[:_SHOWN] + tail)
    )


def _wanted_shape(name, expected) -> tuple[int, ...] | None:
  """The shape of a tensor, plain or one part of a packed expert."""
  if name in expected:
    return expected[name].stored
  for part, inputs in zip(_PARTS, (2, mxfp4.BLOCK)):
    tensor = expected.get(name.removesuffix(part))
    if name.endswith(part) and tensor is not None and tensor.is_expert:
      return (tensor.stored[0], tensor.stored[1] // inputs)
  return None


def _check_parameters(config: ModelConfig, params: Any):
  """Raises ValueError for parameters that are not this configuration's."""
  want = {k: p.shape for k, p in _leaves(model_parameters(config)).items()}
  have = {k: tuple(np.shape(x)) for k, x in _leaves(params).items()}
  wrong = [
    f'{"/".join(k)} is {have.get(k)}, expected {want.get(k)}'
    for k in sorted(want.keys() | have.keys())
    if have.get(k) != want.get(k)
  ]
  if wrong:
    raise ValueError(
      'the parameters are not those of the configuration: '
      + '; '.join(wrong[:_SHOWN])
    )


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple, Any]:
  """The leaves of nested dictionaries by path."""
  if not isinstance(tree, Mapping):
    return {path: tree}
  found = {}
  for key, part in tree.items():
    found.update(_leaves(part, (*path, key)))
  return found
