"""What a training step compiled for eight devices holds and sends."""

import dataclasses

import pytest
from small_model import FAST_COMPILE

from trimoe_jax import compile_report, hlo, sharding, topology

pytestmark = pytest.mark.slow  # a training step to compile
# Numbers that nothing else has: tokens of a sequence, of a device and of a
# fragment; experts of the layer and of a device.
TIME, ROWS = 368, 4
TIMES = {TIME, TIME // 2, TIME // 4}
EXPERTS, TOP_K = 38, 3
LAYERS, MOE_LAYERS = 3, 2


@pytest.fixture(scope='module')
def program(small_config):
  """The step over data, context and expert, two ranks each."""
  config = small_config(
    stages=[dict(context=TIME, batch=ROWS, steps=4)],
    mesh=dict(data=2, context=2, expert=2),
  )
  model = config.model
  config = dataclasses.replace(
    config,
    model=dataclasses.replace(
      model,
      layers=LAYERS,
      moe=dataclasses.replace(model.moe, experts=EXPERTS, top_k=TOP_K),
      mla=dataclasses.replace(model.mla, block_size=46),
    ),
  )
  mesh = sharding.make_mesh(config.mesh.sizes())
  where = topology.Topology('8 host devices', topology.CHIPS['v6e'], mesh)
  lowered, _ = compile_report.lower(config, where)
  return hlo.Program(lowered.compile(FAST_COMPILE).as_text(), mesh.size)


def test_nothing_has_the_size_of_time_squared(program):
  assert any(TIME in a.dims for a in program.largest(10**6))
  for array in program.largest(10**6):
    assert sum(n in TIMES for n in array.dims) < 2, array


def test_no_rows_of_every_expert(program):
  """Rows lie sorted by expert once, not once for each of them."""
  tokens = ROWS // 4 * TIME // 2
  rows = {tokens * n for n in (1, TOP_K, 2, 2 * TOP_K)}
  for array in program.largest(10**6):
    dims = [n for n in array.dims if n > 1]
    if rows & set(dims) and {EXPERTS, EXPERTS // 2} & set(dims):
      assert len(dims) == 2, array  # scores and counts


def test_one_integer_all_reduce_for_the_router(program):
  integers = [
    (instruction, times)
    for instruction, times in program.instructions()
    if instruction.collective == 'all-reduce' and 's32' in instruction.shape
  ]
  ((instruction, times),) = integers
  assert f's32[{MOE_LAYERS},{EXPERTS},' in instruction.shape
  assert times == 1  # not in the loop over layers


def test_newton_schulz_gathers_nothing(program):
  inside = [
    i.collective
    for i, _ in program.instructions()
    if i.collective and 'newton_schulz' in i.text
  ]
  assert inside and set(inside) == {'all-to-all'}


def test_census(program):
  """Collectives by kind; a kind more would be a partitioner's surprise."""
  found = program.collectives()
  print({kind: tuple(traffic) for kind, traffic in found.items()})
  assert set(found) == {
    'all-gather',
    'all-reduce',
    'all-to-all',
    'collective-permute',
    'reduce-scatter',
  }
