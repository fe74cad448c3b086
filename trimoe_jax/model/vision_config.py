"""Settings of the vision tower and its projector; the defaults are K3's."""

from __future__ import annotations

import dataclasses

PATCH = 14  # pixels along each side of a patch
MERGE = 2  # patches along each side of the square that becomes one token


@dataclasses.dataclass(frozen=True)
class VisionConfig:
  """MoonViT-V2 as released with Kimi K3: 401M parameters.

  Its RMSNorms are built without an epsilon, which PyTorch takes as float32's
  machine epsilon; the value of the original training is not public.
  """

  width: int = 1024
  layers: int = 27
  heads: int = 12
  head_dim: int = 128  # heads * head_dim need not be the width
  hidden: int = 4096
  rows: int = 64  # of the learned table of positions
  columns: int = 64
  frames: int = 4  # of one medium at most
  norm_eps: float = 1.1920928955078125e-07
  projector_eps: float = 1e-5
  placeholder: int = 163_605  # the token that stands for one medium
  block_size: int = 512  # patches in one block of the blockwise softmax

  def __post_init__(self):
    if self.head_dim % 4:
      raise ValueError(
        f'vision.head_dim={self.head_dim} is not a multiple of 4: adjacent '
        'pairs of channels turn by the column and by the row in turn.'
      )
    if self.width % 2:
      raise ValueError(
        f'vision.width={self.width} is odd; half of it holds the sines of the '
        'frame number and half the cosines.'
      )
    for name in ('layers', 'heads', 'hidden', 'rows', 'columns'):
      if getattr(self, name) < 1:
        raise ValueError(f'vision.{name}={getattr(self, name)}; use 1 or more.')
    if self.frames < 1 or self.block_size < 1 or self.placeholder < 0:
      raise ValueError(
        f'vision.frames={self.frames} and vision.block_size='
        f'{self.block_size} must be positive, and vision.placeholder='
        f'{self.placeholder} a token id.'
      )

  @property
  def merged(self) -> int:
    """Numbers that the projector reads for one token."""
    return MERGE * MERGE * self.width
