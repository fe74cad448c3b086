"""Reading libtpu's schedules: the parser on small texts, and a real program."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import tpu_schedule

TABLE = """== CAPACITY:
MATMUL, VALU, VSTORE:SPILL
    2     4     2
== UTILIZATION:
 1 3 0
 0 4 1
not a row
 2 0 0
"""

# Two loops after one another, the first around a third; the pipeline runs two
# steps more than the grid has. An empty bundle carries no mark of its loop, and
# the outer loop's test waits for the end of the inner one.
BUNDLES = """
LB: loop body
     0   :  { %s1 = smov 0 }
   0x1 LB: > { %s2 = vadd }
   0x2   : >  { %s2 = vadd }
   0x3   :  {}
   0x4 LB: > > { %s3 = vmul }
   0x5   : > > { %p1 = scmp.ge.s32.totalorder %s3, 5 /* loop exit test */ }
9: 0x6 : > { %p2 = scmp.ge.s32.totalorder (%p1), %s4, 12 /* loop exit test */ }
   0x7 LB: > { %p3 = scmp.ge.s32.totalorder %s5, %s6 /* loop exit test */ }
   0x8   :  { %s7 = halt }
"""


def test_utilization_table():
  bundles, units, slots = tpu_schedule._utilization(TABLE)
  assert bundles == 3
  assert units == {'MATMUL': 3, 'VALU': 7, 'VSTORE:SPILL': 1}
  assert slots == {'MATMUL': 2, 'VALU': 4, 'VSTORE:SPILL': 2}
  program = tpu_schedule.Program('f', bundles, bundles, units, slots, 0)
  assert program.utilization()['MATMUL'] == pytest.approx(0.5)


def test_bundles_times_iterations():
  # Outer: 4 bundles and 5 * 2 of the inner, 10 times; the second loop's count
  # is no constant.
  assert tpu_schedule._executed(BUNDLES) == 2 + 10 * (4 + 5 * 2) + 1


def test_which_loop_a_test_belongs_to():
  """A loop's test may stand in the loop inside it or after that."""
  inside = (
    '0x4 : >>> { %p1 = scmp.ge.s32.totalorder %s1, 5 /* loop exit test */'
  )
  of_rows = '%p2 = scmp.ge.s32.totalorder (%p1), %s2, 4 /* loop exit test */ }'
  start = 'LB: > { }\n0x2 LB: >> { %s2 = vadd }\n0x3 LB: >>> { %s3 = vmul }'
  start = '0x1 ' + start + '\n'
  end = '0x6 : > { %p3 = scmp.ge.s32.totalorder %s4, 12 /* loop exit test */ }'
  after = f'{start}{inside} }}\n0x5 : >> {{ {of_rows}\n{end}'
  assert tpu_schedule._executed(after) == 10 * (2 + 4 * (2 + 5 * 2))
  waiting = f'{start}{inside} ;; {of_rows}\n{end}'
  assert tpu_schedule._executed(waiting) == 10 * (2 + 4 * (1 + 5 * 2))


def test_unknown_chip():
  with pytest.raises(ValueError, match='v9 is unknown|is unknown; choose'):
    tpu_schedule.devices('v9')


@pytest.mark.tpu_compile
def test_schedule_of_a_product():
  shape = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
  schedule = tpu_schedule.compile_for('v6e', lambda a, b: a @ b, shape, shape)
  assert schedule.chip == 'v6e'
  units = [p.units['MATMUL'] for p in schedule.programs]
  assert max(units) > 0
  assert schedule.executed >= sum(p.bundles for p in schedule.programs)
  assert schedule.seconds == pytest.approx(schedule.executed / 1.75e9)
  with pytest.raises(KeyError, match='0 programs contain'):
    schedule.program('kda_forward')
