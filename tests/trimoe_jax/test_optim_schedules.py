"""The learning-rate curves, and what their settings refuse."""

import jax
import numpy as np
import pytest

from trimoe_jax.optim import OptimConfig, Stage, make_schedule

STAGES = (Stage(60, 10), Stage(20, 20))  # 1000 tokens


def values(schedule, steps):
  return np.asarray(jax.vmap(schedule)(np.arange(steps)))


def test_cosine_warms_up_and_ends_at_the_floor():
  config = OptimConfig(warmup_fraction=0.1, floor=0.2)
  curve = values(make_schedule(config, STAGES), 85)
  np.testing.assert_allclose(curve[:10], np.arange(1, 11) / 10, rtol=1e-5)
  # Step 59 ends at token 600 of 1000: progress 5/9 through the cosine.
  want = 0.2 + 0.8 * 0.5 * (1 + np.cos(np.pi * 5 / 9))
  np.testing.assert_allclose(curve[59], want, rtol=1e-5)
  np.testing.assert_allclose(curve[79:], 0.2, rtol=1e-5)
  assert np.all(np.diff(curve[9:80]) < 0)


def test_wsd_is_flat_in_between():
  config = OptimConfig(
    schedule='wsd', warmup_fraction=0.1, decay_fraction=0.4, floor=0.0
  )
  curve = values(make_schedule(config, STAGES), 80)
  np.testing.assert_allclose(curve[9:60], 1.0, rtol=1e-5)
  np.testing.assert_allclose(curve[69], 0.5, rtol=1e-5)
  np.testing.assert_allclose(curve[79], 0.0, atol=1e-6)


def test_stage_peaks_multiply():
  config = OptimConfig(warmup_fraction=0.0)
  plain = values(make_schedule(config, STAGES), 80)
  peaks = (Stage(60, 10), Stage(20, 20, peak=0.5))
  halved = values(make_schedule(config, peaks), 80)
  np.testing.assert_allclose(halved[:60], plain[:60])
  np.testing.assert_allclose(halved[60:], plain[60:] / 2)


@pytest.mark.parametrize('schedule', ['cosine', 'wsd'])
@pytest.mark.parametrize('warmup, decay', [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0)])
def test_extreme_fractions_are_finite(schedule, warmup, decay):
  config = OptimConfig(
    schedule=schedule, warmup_fraction=warmup, decay_fraction=decay
  )
  curve = values(make_schedule(config, [Stage(7)]), 9)
  assert np.all(np.isfinite(curve)) and np.all(curve > 0)
  assert curve.max() <= 1.0


def test_a_long_run_keeps_its_resolution():
  stages = [Stage(1_000_000, 67_000_000), Stage(10_000, 67_000_000)]
  schedule = make_schedule(OptimConfig(warmup_fraction=0.01), stages)
  np.testing.assert_allclose(schedule(0), 1 / 10_100, rtol=1e-4)
  np.testing.assert_allclose(schedule(1_009_999), 0.1, rtol=1e-5)


@pytest.mark.parametrize(
  'settings, message',
  [
    ({'lr': 0.0}, 'optim.lr=0.0 must be positive'),
    ({'clip_norm': -1.0}, 'optim.clip_norm=-1.0'),
    ({'b2': 1.0}, r'optim.b2=1.0 is outside \[0, 1\)'),
    ({'weight_decay': -0.1}, 'negative'),
    ({'schedule': 'linear'}, 'choose cosine or wsd'),
    ({'floor': 1.5}, 'optim.floor=1.5'),
    ({'muon_dtype': 'float16'}, 'choose float32 or bfloat16'),
    (
      {'schedule': 'wsd', 'warmup_fraction': 0.6, 'decay_fraction': 0.6},
      'overlap',
    ),
  ],
)
def test_wrong_settings_are_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    OptimConfig(**settings)


def test_wrong_stages_are_refused():
  with pytest.raises(ValueError, match='no stages'):
    make_schedule(OptimConfig(), [])
  with pytest.raises(ValueError, match='steps=0'):
    Stage(0)
  with pytest.raises(ValueError, match='peak=0.0'):
    Stage(1, peak=0.0)
