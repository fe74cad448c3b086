"""States of generation kept: forked in memory, saved to a file and read again.

A file is safetensors: one tensor an entry, under the path in the state, and the
structure of the model's configuration in its metadata.

Legend: b batch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  NumPy learns bfloat16 from it
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from trimoe_jax.config import ModelConfig
from trimoe_jax.model.model import init_cache
from trimoe_jax.sampling.decode import State, row_keys


def fork(
  state: State,
  rows: Sequence[int] | None = None,
  *,
  key: jax.Array | None = None,
) -> State:
  """A state that goes its own way: it shares no buffer with the first.

  Args:
    state: stays usable, and is unchanged by what becomes of its forks.
    rows: which sequences, each as often as wanted; None takes all once.
    key: new keys for the draws. None keeps those of the rows, so that copies
      of a row draw the same tokens.
  """
  rows = np.arange(len(state.last)) if rows is None else np.asarray(rows)
  if rows.ndim != 1 or not rows.size:
    raise ValueError(
      f'rows has shape {rows.shape}; give a list of row numbers.'
    )
  if rows.min() < 0 or rows.max() >= len(state.last):
    raise ValueError(
      f'rows={rows.tolist()} must lie in [0, {len(state.last)}), the batch of '
      'the state.'
    )
  forked = _taken(state, jnp.asarray(rows, jnp.int32))
  if key is None:
    return forked
  return forked.replace(keys=row_keys(key, len(rows)))


@jax.jit
def _taken(state: State, row_b) -> State:
  take = lambda x: jnp.take(x, row_b, axis=0)
  return State(
    cache=state.cache.rows(row_b),
    logits=take(state.logits),
    last=take(state.last),
    stopped=take(state.stopped),
    keys=state.keys[row_b],
    step=state.step + 0,
  )


def save(path: str | os.PathLike, state: State, config: ModelConfig):
  """Writes a state to one file; a save that was interrupted leaves none."""
  path = pathlib.Path(path)
  tensors = {
    name: np.array(jax.device_get(x), order='C')
    for name, x in _named(_without_keys(state)).items()
  }
  keys = {'implementation': str(jax.random.key_impl(state.keys))}
  metadata = {'config': _as_json(config), 'keys': json.dumps(keys)}
  unfinished = path.with_name(path.name + '.tmp')
  save_file(tensors, unfinished, metadata=metadata)
  os.replace(unfinished, path)


def load(path: str | os.PathLike, config: ModelConfig) -> State:
  """The state that `save` wrote, on the default device.

  It continues bit by bit as the saved one would have, on the same kind of
  device.

  Raises:
    FileNotFoundError: no such file.
    ValueError: it is no snapshot, is damaged, or is another model's.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise FileNotFoundError(f'{path} does not exist; save a snapshot first.')
  try:
    with safe_open(path, framework='numpy') as file:
      metadata = file.metadata() or {}
      tensors = {name: file.get_tensor(name) for name in file.keys()}
  except SafetensorError as error:
    raise ValueError(f'{path} cannot be read: {error}') from error
  _check_config(path, metadata, config)
  if 'cache/valid' not in tensors:
    raise ValueError(f'{path} holds no state of generation.')
  batch, room = tensors['cache/valid'].shape
  shapes = _shapes(config, batch, room)
  wanted = _named(shapes)
  if set(wanted) != set(tensors):
    raise ValueError(
      f'{path} has other entries than a state of this model: '
      f'{sorted(set(wanted) ^ set(tensors))}.'
    )
  state = jax.tree.unflatten(
    jax.tree.structure(shapes), [jnp.asarray(tensors[name]) for name in wanted]
  )
  name = json.loads(metadata['keys'])['implementation']
  return state.replace(keys=jax.random.wrap_key_data(state.keys, impl=name))


def _shapes(config, batch, room):
  """A state's structure, with the keys as the numbers they are made of."""

  def empty():
    return State(
      cache=init_cache(config, batch, room),
      logits=jnp.zeros(()),
      last=jnp.zeros(()),
      stopped=jnp.zeros(()),
      keys=jnp.zeros(()),
      step=jnp.zeros(()),
    )

  return jax.eval_shape(empty)


def _without_keys(state: State) -> State:
  return state.replace(keys=jax.random.key_data(state.keys))


def _named(state: State) -> dict[str, jax.Array]:
  """Leaves by their path, such as cache/layers/blocks_0/layer_1/latent."""
  leaves = jax.tree_util.tree_leaves_with_path(state)
  return {_name(path): x for path, x in leaves}


def _name(path) -> str:
  return '/'.join(str(getattr(k, 'key', getattr(k, 'name', k))) for k in path)


def _as_json(config: ModelConfig) -> str:
  return json.dumps(dataclasses.asdict(config), sort_keys=True)


def _check_config(path, metadata, config: ModelConfig):
  """Raises ValueError naming the fields that differ."""
  if 'config' not in metadata or 'keys' not in metadata:
    raise ValueError(f'{path} is no snapshot; it names no configuration.')
  have, want = json.loads(metadata['config']), json.loads(_as_json(config))
  differ = sorted(
    name
    for name in set(have) | set(want)
    if have.get(name) != want.get(name) and name != 'remat'
  )
  if differ:
    raise ValueError(
      f'{path} belongs to another model: {differ} differ; load it with the '
      'model it was saved from.'
    )
