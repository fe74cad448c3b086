"""The table of interleaved 1F1B: order, completeness, memory, bubble."""

import numpy as np
import pytest

from trimoe_jax.parallel import pipeline_schedule
from trimoe_jax.parallel.pipeline_schedule import IDLE, interleaved

SIZES = [(1, 1, 3), (2, 1, 4), (2, 2, 4), (4, 2, 8), (4, 3, 8), (8, 3, 16)]
RAGGED = [(2, 2, 3), (4, 1, 2), (4, 2, 6), (3, 2, 7)]


def operations(schedule):
  """{(chunk, micro-batch): (tick of its F, tick of its B)}, each found once."""
  found = []
  for table in (schedule.forward, schedule.backward):
    ticks = {}
    for tick, p in np.argwhere(table[..., 0] != IDLE):
      chunk, micro_batch = map(int, table[tick, p])
      assert chunk % schedule.stages == p
      assert (chunk, micro_batch) not in ticks
      ticks[chunk, micro_batch] = int(tick)
    found.append(ticks)
  assert found[0].keys() == found[1].keys()
  return {key: (found[0][key], found[1][key]) for key in found[0]}


@pytest.mark.parametrize('sizes', SIZES + RAGGED)
def test_every_chunk_meets_every_micro_batch_in_order(sizes):
  stages, chunks, micro_batches = sizes
  ticks = operations(interleaved(*sizes))
  assert len(ticks) == stages * chunks * micro_batches
  for (chunk, micro_batch), (forward, backward) in ticks.items():
    after = ticks.get((chunk + 1, micro_batch))
    if after is None:
      assert chunk == stages * chunks - 1 and backward == forward
    else:  # every hop takes one tick
      assert after == (forward + 1, backward - 1)


@pytest.mark.parametrize('sizes', SIZES)
def test_bubble_is_that_of_interleaved_1f1b(sizes):
  stages, chunks, micro_batches = sizes
  schedule = interleaved(*sizes)
  want = (stages - 1) / (micro_batches * chunks + stages - 1)
  for costs in [(1.0, 1.0), (1.0, 2.0), (1.0, 3.5)]:
    np.testing.assert_allclose(schedule.bubble(*costs), want, atol=1e-12)
  alone, both, after = schedule.phases()
  assert len(alone) == len(after) == stages * chunks - 1
  assert alone.stop == both.start and both.stop == after.start


@pytest.mark.parametrize('sizes', SIZES + RAGGED)
def test_inputs_in_flight_are_those_of_interleaved_1f1b(sizes):
  stages, chunks, _ = sizes
  schedule = interleaved(*sizes)
  for p in range(stages):
    held, most = 0, 0
    for tick in range(schedule.ticks):
      held += schedule.forward[tick, p, 0] != IDLE
      most = max(most, held)
      held -= schedule.backward[tick, p, 0] != IDLE
    assert most <= 2 * (stages - p - 1) + (chunks - 1) * stages + 1
  most = 2 * (stages - 1) + (chunks - 1) * stages + 1
  assert pipeline_schedule.input_slots(schedule).count <= most


@pytest.mark.parametrize('sizes', SIZES + RAGGED)
@pytest.mark.parametrize('kind', ['input', 'cache', 'deposit'])
def test_places_are_not_shared(sizes, kind):
  schedule = interleaved(*sizes)
  slots = getattr(pipeline_schedule, f'{kind}_slots')(schedule)
  for p in range(schedule.stages):
    owner, closed = {}, set()
    for tick in range(schedule.ticks):
      for table, places in (
        (schedule.forward, slots.forward),
        (schedule.backward, slots.backward),
      ):
        chunk, micro_batch = map(int, table[tick, p])
        if chunk == IDLE or (kind == 'deposit' and table is schedule.forward):
          continue
        key = (chunk, micro_batch) if kind == 'input' else micro_batch
        place = int(places[tick, p])
        assert place < slots.count and key not in closed
        if owner.get(place, key) != key:
          closed.add(owner[place])
        owner[place] = key


def test_caches_do_not_grow_with_the_micro_batches():
  few, many = (interleaved(4, 2, m) for m in (16, 64))
  for slots in ('input_slots', 'cache_slots', 'deposit_slots'):
    count = getattr(pipeline_schedule, slots)
    assert count(few).count == count(many).count
