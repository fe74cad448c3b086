"""Golden logits tell K3 from models that are wrong in one detail.

The oracle must agree with the golden logits, and every wrong variant of it must
miss them by more than ten times the tolerance of the golden tests.
"""

import pytest
from text_tower import Tower, golden, weights

from pallas_kernels.testing import relative_rms

TOLERANCE = 1e-3


def error_of(wrong):
  tower = Tower(wrong)
  return relative_rms(
    tower.logits(golden()['input_ids'], weights()), golden()['logits']
  )


def test_the_oracle_agrees_with_the_released_code():
  assert error_of(None) < 1e-4


@pytest.mark.parametrize(
  'wrong',
  [
    'softplus-clamp gate',
    'exp(A) outside the sigmoid',
    'A_log per channel',
    'swish gate',
    'undecayed delta',
    'MLA scale',
    'shared slice dropped',
    'biased router weights',
    'no latent norm',
    'no up-cap',
    'prefix not reset',
    'gain dropped',
    'normalised values',
    'output mix skipped',
  ],
)
def test_a_wrong_detail_is_caught(wrong):
  assert error_of(wrong) > 10 * TOLERANCE
