"""Compilations for devices that are not here, and what is said of them."""

import dataclasses

import jax
import pytest

from trimoe_jax import compile_report, flops, topology
from trimoe_jax.config import MeshConfig
from trimoe_jax.model.model import count_parameters


@pytest.fixture
def build(small_config):
  """A report for a GPU mesh, which is lowered and not compiled."""

  def run(name, sizes):
    config = small_config(stages=[dict(context=64, batch=4, steps=4)])
    where = topology.describe(name, sizes)
    mesh = MeshConfig(**where.mesh.shape)
    config = dataclasses.replace(config, mesh=mesh)
    return compile_report.build('small', config, where), config

  return run


def test_report_of_a_gpu_mesh(build):
  report, config = build('h200:4', {'expert': 2})
  assert report.mesh == {'data': 2, 'expert': 2}
  assert report.parameters == count_parameters(config.model).total
  assert report.peak is None and report.fits is None
  # Parameters and two moments in float32, of which most are split.
  assert 12 * report.parameters / 4 < report.arguments
  assert report.arguments < 12 * report.parameters
  page = compile_report.markdown(report, 989e12)
  assert '| mesh | data 2 x expert 2 (4 devices) |' in page
  assert 'not compiled' in page


def test_flops_of_a_token_follow_the_context(small_config):
  model = small_config().model
  short, long = flops.per_token(model, 64), flops.per_token(model, 128)
  assert short.projections == 2 * count_parameters(model).active
  assert long.softmax_attention == 2 * short.softmax_attention
  assert long.delta_attention == short.delta_attention
  assert short.training == 3 * short.forward


@pytest.mark.parametrize(
  'name, sizes, message',
  [
    ('v9:2x2', {}, 'is unknown; write a chip of'),
    ('v6e', {}, 'is unknown; write a chip of'),
    ('h200:4', {'expert': 3}, 'a multiple of 3 devices and the topology has 4'),
    pytest.param(
      'v6e:3x3', {}, 'does not exist', marks=pytest.mark.tpu_compile
    ),
  ],
)
def test_refuses_what_does_not_exist(name, sizes, message):
  with pytest.raises(ValueError, match=message):
    topology.describe(name, sizes)


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
  'name, sizes, devices',
  [
    ('v5p:8x16x16', {'expert': 64}, 2048),
    ('tpu7x:8x16x16', {'context': 64, 'expert': 64}, 4096),
    ('v6e:2x2', {'context': 2}, 4),
  ],
)
def test_meshes_of_pods(name, sizes, devices):
  where = topology.describe(name, sizes)
  assert where.devices == devices
  assert isinstance(where.mesh, jax.sharding.Mesh)
  used = 1
  for size in sizes.values():
    used *= size
  assert where.mesh.shape['data'] == devices // used
