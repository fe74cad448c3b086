"""Mesh axes, logical axis names, one RULES table and its users.

A parameter or activation names its axes ('batch', 'heads', 'embed', ...); this
file alone says where they live on the mesh. All five mesh axes are always
present (length 1 allowed) and have explicit types, so that `jax.eval_shape` on
an abstract mesh checks every sharding of a configuration without hardware.
Without a mesh in context every function here is the identity, and the model is
ordinary single-device JAX.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

AXES = ('pipe', 'data', 'context', 'expert', 'tensor')

# Logical axis -> mesh axes. A name in FULLY_SHARDED may fall back to fewer mesh
# axes when its size is not divisible (small ranks); every other name must fit.
RULES: dict[str | None, tuple[str, ...]] = {
  None: (),
  # activations
  'batch': ('data', 'expert'),
  'seq': ('context',),
  'shards': ('data', 'expert', 'context'),  # one entry for each token shard
  # activations and parameters
  'heads': ('tensor',),
  'hidden': ('tensor',),
  'vocab': ('tensor',),
  'experts': ('expert',),
  'tower_heads': ('tensor',),
  # parameters, fully sharded (ZeRO-3); context ranks are data-parallel here,
  # and stages of a pipeline exchange for a step what they hold between steps
  'embed': ('data', 'context', 'pipe'),
  'latent': ('data', 'context', 'pipe'),
  'rank': ('data', 'context', 'pipe'),
  # stacked layers; parallel/pipeline_layout.py gives each stage its own
  'layers': (),
}
FULLY_SHARDED = ('embed', 'latent', 'rank')
# The vision tower's heads are few (12 in K3): every rank of a tensor axis that
# does not divide them has them all.
OPTIONAL = ('tower_heads',)
Names = Sequence[str | None]


def make_mesh(sizes: dict[str, int], devices=None) -> jax.sharding.Mesh:
  """The mesh of the five AXES; axes that `sizes` leaves out have length 1.

  A mesh smaller than the machine takes its first devices and says so.

  Raises:
    ValueError: an unknown axis, a length below 1, more devices than there are
      (the message names the nearest mesh that fits), or fewer than all on
      several hosts.
  """
  devices = jax.devices() if devices is None else devices
  unknown = sorted(set(sizes) - set(AXES))
  if unknown:
    raise ValueError(f'mesh has no axis {unknown}; its axes are {AXES}.')
  shape = tuple(sizes.get(axis, 1) for axis in AXES)
  count = math.prod(shape)
  if min(shape) < 1 or count > len(devices):
    raise ValueError(_too_large(shape, len(devices)))
  if count < len(devices):
    if jax.process_count() > 1:
      raise ValueError(
        f'mesh {dict(zip(AXES, shape))} uses {count} of {len(devices)} '
        'devices; with several hosts it must use all.'
      )
    logging.warning(
      'the mesh uses %d of %d devices; set mesh.data=%d to use more.',
      count,
      len(devices),
      shape[AXES.index('data')] * (len(devices) // count),
    )
  # An axis may be part of a physical one: 64 of a torus of 8 x 16 x 16.
  placed = mesh_utils.create_device_mesh(
    shape, devices[:count], allow_split_physical_axes=True
  )
  types = (AxisType.Explicit,) * len(AXES)
  return jax.sharding.Mesh(placed, AXES, axis_types=types)


def _too_large(shape: tuple[int, ...], available: int) -> str:
  """Why a mesh does not fit, and the nearest that does."""
  nearest = [max(1, n) for n in shape]
  while math.prod(nearest) > available:
    largest = nearest.index(max(nearest))
    nearest[largest] -= 1
  return (
    f'mesh {dict(zip(AXES, shape))} needs {math.prod(shape)} devices and '
    f'there are {available}; the nearest that fits is '
    f'{dict(zip(AXES, nearest))}.'
  )


def mesh_is_set() -> bool:
  """Whether a mesh is in context (`jax.set_mesh` or an abstract one)."""
  return not jax.sharding.get_abstract_mesh().empty


def axis_size(axis: str) -> int:
  """Devices along one axis of the mesh in context; 1 without a mesh."""
  return jax.sharding.get_abstract_mesh().shape[axis] if mesh_is_set() else 1


def axis_ways(name: str) -> int:
  """How many ways a logical axis is split on the mesh in context."""
  return math.prod(axis_size(axis) for axis in RULES[name])


def token_shards() -> int:
  """How many pieces the tokens of a batch are split into."""
  return axis_ways('shards')


def spec(names: Names, shape: Sequence[int] | None = None) -> PartitionSpec:
  """The PartitionSpec of an array whose axes are called `names`.

  Args:
    names: a logical name, or None, for each axis.
    shape: with it, names in FULLY_SHARDED or OPTIONAL drop mesh axes that do
      not divide, and any other indivisible axis raises ValueError.
  """
  mesh = jax.sharding.get_abstract_mesh()
  parts = []
  for i, name in enumerate(names):
    axes = RULES[name]
    if shape is not None and not mesh.empty:
      axes = _fitting(name, axes, shape[i], mesh)
    parts.append(axes if len(axes) > 1 else axes[0] if axes else None)
  return PartitionSpec(*parts)


def _fitting(name, axes, size, mesh):
  """The longest prefix of `axes` that divides `size`."""
  full = axes
  while axes and size % math.prod(mesh.shape[a] for a in axes):
    axes = axes[:-1]
  if axes != full and name not in (*FULLY_SHARDED, *OPTIONAL):
    ways = math.prod(mesh.shape[a] for a in full)
    raise ValueError(
      f'{name}={size} is not divisible by the mesh axes {full} ({ways}); '
      f'choose a multiple of {ways} or a smaller mesh.{full[-1]}.'
    )
  return axes


def named(names: Names, shape: Sequence[int], mesh) -> NamedSharding:
  """The NamedSharding of a parameter of `shape` on `mesh`."""
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    return NamedSharding(mesh, spec(names, shape))


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
  """`x` laid out by `names`."""
  if not mesh_is_set():
    return x
  return jax.sharding.reshard(x, spec(names, x.shape))


def merge_leading(x: jax.Array) -> jax.Array:
  """[m, n, ...] as [m * n, ...]; the other axes keep their layout.

  Said explicitly, because a reshape that also sees axes of length 1 cannot
  tell which of them is which.
  """
  shape = (x.shape[0] * x.shape[1], *x.shape[2:])
  if not mesh_is_set():
    return x.reshape(shape)
  kept = jax.typeof(x).sharding.spec[2:]
  return jax.lax.reshape(x, shape, out_sharding=PartitionSpec(None, *kept))


def zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
  """Zeros of a traced shape, laid out like it."""
  x = jnp.zeros(like.shape, like.dtype)
  if not mesh_is_set() or like.sharding is None:
    return x
  return jax.sharding.reshard(x, like.sharding.spec)


def use(weight: jax.Array, dtype, *names: str | None) -> jax.Array:
  """A parameter made ready for one use: cast, then gathered over ZeRO axes.

  The cast comes first so that the all-gather moves the compute dtype. Its
  transpose is the reduce-scatter of the gradient.
  """
  weight = weight.astype(dtype)
  if not mesh_is_set():
    return weight
  kept = tuple(None if name in FULLY_SHARDED else name for name in names)
  return jax.sharding.reshard(weight, spec(kept, weight.shape))


def einsum(subscripts: str, *operands, out: Names, **kwargs) -> jax.Array:
  """`jnp.einsum` whose result is laid out by the logical names `out`.

  Explicit axes refuse to guess when a contracted axis is sharded (heads in an
  output projection), so every projection says what it returns.
  """
  if mesh_is_set():
    kwargs['out_sharding'] = spec(out)
  return jnp.einsum(subscripts, *operands, **kwargs)


def local(
  function: Callable[..., Any], *, inputs: Any, outputs: Any
) -> Callable[..., Any]:
  """`function` run on every device's own shard (a `shard_map`).

  For what explicit axes cannot express: sorts, scatters, scans over tokens and
  custom derivatives. `inputs` and `outputs` are pytrees (prefixes) of tuples of
  logical names. Arrays whose names map to nothing are replicated, and their
  gradients are summed over the mesh.
  """
  if not mesh_is_set():
    return function
  specs = lambda tree: jax.tree.map(spec, tree, is_leaf=_is_names)
  # Every output names the axes it varies over, so the replication check adds
  # nothing; Pallas calls and hand-written VJPs do not pass it.
  run = jax.shard_map(
    function, in_specs=specs(inputs), out_specs=specs(outputs), check_vma=False
  )

  def place(names, tree):
    return jax.tree.map(lambda x: jax.sharding.reshard(x, spec(names)), tree)

  def placed_and_run(*args):
    return run(*jax.tree.map(place, inputs, args, is_leaf=_is_names))

  return placed_and_run


def _is_names(x: Any) -> bool:
  return isinstance(x, tuple) and all(
    n is None or isinstance(n, str) for n in x
  )
