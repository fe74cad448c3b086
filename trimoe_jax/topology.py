"""Accelerators that a program can be compiled for without having them.

Peak numbers are the vendors': Google Cloud's pages on TPU v5e, v5p, v6e and
TPU7x, NVIDIA's H200 data sheet (dense bfloat16). They are of one device as JAX
counts them: a TPU7x chip is two devices.
"""

from __future__ import annotations

import dataclasses
import os
import re

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from trimoe_jax import sharding

_ENVIRONMENT = {'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1'}
_FORM = re.compile(r'(\w+):(\d+(?:x\d+)*)')


@dataclasses.dataclass(frozen=True)
class Chip:
  """One device of a kind.

  Attributes:
    flops: bfloat16 operations a second.
    hbm_bytes: memory that holds a program's arrays.
    hbm_rate: bytes a second.
    link_rate: bytes a second that a device sends to others, all links together.
    devices: that one chip counts as.
  """

  flops: float
  hbm_bytes: float
  hbm_rate: float
  link_rate: float
  devices: int = 1


_GIB = 2**30
CHIPS = {
  'v5e': Chip(197e12, 16 * _GIB, 0.819e12, 200e9),
  'v5p': Chip(459e12, 95 * _GIB, 2.765e12, 600e9),
  'v6e': Chip(918e12, 32 * _GIB, 1.638e12, 400e9),
  'tpu7x': Chip(1153.5e12, 96 * _GIB, 3.69e12, 300e9, devices=2),
  'h200': Chip(989e12, 141e9, 4.8e12, 450e9),
}


@dataclasses.dataclass(frozen=True)
class Topology:
  """A kind of chip and how many devices of it.

  Attributes:
    name: as given.
    chip: of each device.
    mesh: the five axes over its devices; abstract for GPUs, which nothing here
      can compile for without one.
  """

  name: str
  chip: Chip
  mesh: Mesh | AbstractMesh

  @property
  def devices(self) -> int:
    return self.mesh.size


def describe(name: str, sizes: dict[str, int]) -> Topology:
  """The mesh `sizes` over the topology `name`.

  Args:
    name: chip and arrangement: 'v5p:8x16x16' (chips in a torus), 'h200:64'.
    sizes: of the mesh's axes; 'data' takes what the others leave over.

  Raises:
    ValueError: an unknown chip, another form, or sizes that do not divide.
    RuntimeError: libtpu is not installed.
  """
  found = _FORM.fullmatch(name)
  if not found or found[1] not in CHIPS:
    raise ValueError(
      f'topology={name!r} is unknown; write a chip of {sorted(CHIPS)} and its '
      "arrangement, such as 'v5p:8x16x16', 'v6e:2x2' or 'h200:64'."
    )
  chip = CHIPS[found[1]]
  if found[1] != 'h200':
    devices = _tpus(name)
    return Topology(
      name, chip, sharding.make_mesh(_whole(sizes, len(devices)), devices)
    )
  count = 1
  for n in found[2].split('x'):
    count *= int(n)
  whole = _whole(sizes, count)
  shape = tuple(whole.get(axis, 1) for axis in sharding.AXES)
  mesh = AbstractMesh(
    shape,
    sharding.AXES,
    axis_types=(AxisType.Explicit,) * len(shape),
    abstract_device=AbstractDevice('NVIDIA H200', None, 'gpu'),
  )
  return Topology(name, chip, mesh)


def _whole(sizes: dict[str, int], devices: int) -> dict[str, int]:
  """`sizes` with the data axis grown to use every device."""
  others = 1
  for axis, size in sizes.items():
    others *= size if axis != 'data' else 1
  if devices % others:
    raise ValueError(
      f'mesh {sizes} needs a multiple of {others} devices and the topology has '
      f'{devices}; choose axes whose product divides {devices}.'
    )
  return sizes | {'data': devices // others}


def _tpus(name: str) -> list:
  for variable, value in _ENVIRONMENT.items():
    os.environ.setdefault(variable, value)
  try:
    return topologies.get_topology_desc(
      platform='tpu', topology_name=name
    ).devices
  except jax.errors.JaxRuntimeError as error:
    raise ValueError(
      f'topology={name!r} does not exist: {str(error).splitlines()[0]}; '
      "arrangements are such as 'v6e:2x2', 'v5p:2x2x1', 'tpu7x:4x4x4'."
    ) from error
  except (RuntimeError, NotImplementedError) as error:
    raise RuntimeError(
      'libtpu cannot describe topologies here; install it with '
      '`pip install libtpu==0.0.52`.'
    ) from error
