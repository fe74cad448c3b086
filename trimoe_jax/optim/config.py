"""Settings of the optimizer."""

from __future__ import annotations

import dataclasses
from typing import Literal

Schedule = Literal['cosine', 'wsd']


@dataclasses.dataclass(frozen=True)
class OptimConfig:
  """Muon for the matrices, AdamW for the rest, one learning-rate curve.

  The Kimi K3 technical report gives cosine decay, 1 % linear warm-up, a fixed
  smallest rate and weight decay 0.1; it does not give the rates, the AdamW
  moments or the clip, whose defaults are those of earlier Kimi models.
  """

  lr: float = 2e-3  # of Muon; its updates have the RMS of AdamW's
  adam_lr: float | None = None  # None: the same as `lr`
  weight_decay: float = 0.1
  schedule: Schedule = 'cosine'
  warmup_fraction: float = 0.01  # of all tokens of the run
  decay_fraction: float = 0.2  # wsd only: the last part of the run
  floor: float = 0.1  # the smallest rate as a fraction of the peak
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  muon_momentum: float = 0.95
  nesterov: bool = True
  muon_dtype: Literal['float32', 'bfloat16'] = 'float32'
  clip_norm: float | None = 1.0  # None: gradients are not clipped

  def __post_init__(self):
    for field in ('lr', 'adam_lr', 'eps', 'clip_norm'):
      value = getattr(self, field)
      if value is not None and not value > 0:
        raise ValueError(f'optim.{field}={value} must be positive.')
    for field in ('b1', 'b2', 'muon_momentum'):
      value = getattr(self, field)
      if not 0 <= value < 1:
        raise ValueError(
          f'optim.{field}={value} is outside [0, 1): it is the share of the '
          'average that is kept each step.'
        )
    if self.weight_decay < 0:
      raise ValueError(
        f'optim.weight_decay={self.weight_decay} is negative; use 0.0 for none.'
      )
    self._check_curve()

  def _check_curve(self):
    if self.schedule not in ('cosine', 'wsd'):
      raise ValueError(
        f'optim.schedule={self.schedule!r}; choose cosine or wsd.'
      )
    if self.muon_dtype not in ('float32', 'bfloat16'):
      raise ValueError(
        f'optim.muon_dtype={self.muon_dtype!r}; choose float32 or bfloat16.'
      )
    for field in ('warmup_fraction', 'decay_fraction', 'floor'):
      value = getattr(self, field)
      if not 0 <= value <= 1:
        raise ValueError(
          f'optim.{field}={value} is outside [0, 1]: it is a fraction.'
        )
    if (
      self.schedule == 'wsd' and self.warmup_fraction + self.decay_fraction > 1
    ):
      raise ValueError(
        f'optim.warmup_fraction={self.warmup_fraction} and '
        f'optim.decay_fraction={self.decay_fraction} overlap; their sum may be '
        'at most 1.'
      )
