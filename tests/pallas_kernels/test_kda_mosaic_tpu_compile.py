"""The TPU kernels of KDA by the TPU compiler: chips and bundle budgets."""

import pytest

from pallas_kernels.kda import tpu_bench

# Bundles per head and 64 tokens (to decode: per head). A kernel may grow by 5 %
# of these; lower a number when a kernel gets faster. Steps of few heads compile
# sooner; they show that a chip is supported, not how fast it is.
LARGE = tpu_bench.Shape(length=512, heads=16)
SMALL = tpu_bench.Shape(length=512, heads=2)
BUDGETS = {
  ('v6e', 'forward_saving', LARGE): 290,
  ('v6e', 'backward', LARGE): 495,
  ('v6e', 'backward_state', LARGE): 567,
  ('v6e', 'affine', SMALL): 608,
  ('v6e', 'decode', LARGE): 123,
  ('v5e', 'forward_saving', SMALL): 751,
  ('v5e', 'backward_state', SMALL): 1295,
  ('v5e', 'decode', SMALL): 257,
  ('v5p', 'forward_saving', SMALL): 830,
  ('v5p', 'backward_state', SMALL): 1352,
  ('v5p', 'decode', SMALL): 396,
  ('tpu7x', 'forward_saving', SMALL): 553,
  ('tpu7x', 'backward_state', SMALL): 989,
  ('tpu7x', 'decode', SMALL): 270,
}


@pytest.mark.tpu_compile
@pytest.mark.parametrize('case', BUDGETS, ids=lambda c: f'{c[0]}-{c[1]}')
def test_bundles_stay_within_the_budget(case):
  chip, name, shape = case
  bundles, program, schedule = tpu_bench.kernel_bundles(name, chip, shape)
  budget = BUDGETS[case]
  assert bundles <= 1.05 * budget, f'{bundles:.0f} bundles, budget {budget}'
  vmem = {'tpu7x': 64, 'v5p': 64}.get(chip, 128) * 2**20
  assert program.vmem_bytes < vmem / 2
  # Everything is in the kernel: no temporary as large as one of the arrays.
  array = 2 * shape.length * shape.heads * 128
  assert schedule.temporary_bytes < array or shape == SMALL
