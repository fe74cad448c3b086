"""What a step must not hold or send is found where it is."""

import json
import os
import subprocess
import sys

import pytest

from trimoe_jax import compile_checks, compile_report, hlo

# A loop of three over an array of tokens by tokens, with a gather inside.
BAD = """HloModule step

%add (a: s32[], b: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %sum = s32[] add(%a, %b)
}

%body (x: f32[64,64]) -> f32[64,64] {
  %x = f32[64,64]{1,0} parameter(0)
  %n = s32[3,4]{1,0} constant({...})
  %r = s32[3,4]{1,0} all-reduce(%n), replica_groups={{0,1}}, to_apply=%add
  ROOT %g = f32[64,64]{1,0} all-gather(%x), replica_groups={{0,1}}, \
metadata={op_name="jit(step)/newton_schulz/all_gather"}
}

%more (x: f32[64,64]) -> pred[] {
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (x: f32[64,64]) -> f32[64,64] {
  %x = f32[64,64]{1,0} parameter(0)
  %y = f32[4,128,16]{2,1,0} constant({...})
  ROOT %loop = f32[64,64]{1,0} while(%x), condition=%more, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_counts_follow_loops_and_shapes(small_config):
  config = small_config(stages=[dict(context=64, batch=4, steps=4)])
  program = hlo.Program(BAD, 2)
  assert compile_checks.count(program, config, {'data': 2}) == {
    compile_checks.INTEGER_REDUCES: 3,
    compile_checks.GATHERS: 3,
    compile_checks.SQUARES: 1,
    compile_checks.ROWS: 1,
  }


@pytest.fixture(scope='module')
def mini(tmp_path_factory):
  """mini on four chips of v6e, a row of its first stage on each.

  In a process of its own: the tests' asks libtpu for schedules, which takes as
  long again.
  """
  out = tmp_path_factory.mktemp('reports')
  flags = (
    '--config=experiments/configs/mini.py --topology=v6e:2x2 --batch=4 '
    f'--config.mesh.expert=2 --optimization=O0 --out={out}'
  )
  environment = {k: v for k, v in os.environ.items() if 'LIBTPU' not in k}
  subprocess.run(
    [sys.executable, '-m', 'experiments.compile', *flags.split()],
    check=True,
    env=environment | {'JAX_PLATFORMS': 'cpu'},
  )
  facts = json.loads((out / 'mini-v6e-2x2-4096.json').read_text())
  return compile_report.Report(**facts)


@pytest.mark.tpu_compile
@pytest.mark.slow
def test_mini_fits_four_chips(mini):
  assert mini.fits
  assert mini.checks == compile_checks.WANTED
  # Parameters and moments in float32, split over all chips where they can be.
  assert mini.arguments < 0.5 * 12 * mini.parameters
  assert mini.temporaries < 20 * 2**30
  kinds = {'all-gather', 'all-reduce', 'all-to-all', 'reduce-scatter'}
  assert set(mini.collectives) <= kinds | {'collective-permute'}
