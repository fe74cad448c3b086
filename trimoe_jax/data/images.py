"""Images as the vision tower reads them: patches of 14 x 14 pixels.

The released processor's rules: an image is never enlarged; one with more than
about 65,536 patches, or with more than 512 along a side, is scaled down
(bicubic); then black pixels are added on the right and at the bottom up to
a multiple of 28, and a token is made of 28 x 28 pixels.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

from trimoe_jax.data.tokenizer import PLACEHOLDER
from trimoe_jax.model.vision_config import MERGE, PATCH

TILE = PATCH * MERGE  # pixels along each side of what becomes one token
MAX_PATCHES = 65_536
MAX_SIDE = 512  # patches
_BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)
_WIDE = ('I', 'I;16', 'I;16B', 'I;16L', 'I;16N')  # 16 bits a pixel


class Medium(NamedTuple):
  """One image, or a few frames of one size.

  Attributes:
    patches: uint8 [frames * rows * columns, 3, 14, 14] in raster order.
    grid: (frames, rows, columns) in patches.
    size: (width, height) in pixels as it came, which the text may name.
  """

  patches: np.ndarray
  grid: tuple[int, int, int]
  size: tuple[int, int]

  @property
  def tokens(self) -> int:
    """Rows in the text that it becomes."""
    return self.grid[1] * self.grid[2] // MERGE**2


def markup(medium: Medium) -> str:
  """The released text of one image: its size and one placeholder."""
  width, height = medium.size
  return (
    f'<|media_begin|>image {width}x{height}<|media_content|>{PLACEHOLDER}'
    '<|media_end|>'
  )


def resized(
  size: tuple[int, int],
  *,
  max_patches: int = MAX_PATCHES,
  max_side: int = MAX_SIDE,
) -> tuple[int, int]:
  """(width, height) in pixels after scaling, before padding.

    scale = min(1, sqrt(max_patches / ((W // 14) (H // 14))),
                14 max_side / W, 14 max_side / H)

  Sizes are rounded down, and no side becomes less than a pixel. Padding may
  then add a row and a column of tokens to what `max_patches` allows.
  """
  patches = [max(1, side // PATCH) for side in size]
  scale = min(
    1.0,
    math.sqrt(max_patches / (patches[0] * patches[1])),
    *(max_side * PATCH / side for side in size),
  )
  width, height = (
    min(max(1, int(side * scale)), max_side * PATCH) for side in size
  )
  return width, height


def load(path: str | os.PathLike, *, max_patches: int = MAX_PATCHES) -> Medium:
  """The image in a file of any kind that Pillow reads, such as PNG or JPEG.

  It is turned as its EXIF orientation says. Grayscale, 16-bit and palette
  images become 8-bit RGB (16 bits lose their lower 8), and transparent pixels
  are laid over white: the released code for this is not public, and this is
  what vLLM does when it serves the model. Of an animation the first frame is
  taken.

  Args:
    path: of the file.
    max_patches: see `resized`.

  Raises:
    ValueError: no file, not an image, truncated or too large; the message
      names the file.
  """
  path = os.fspath(path)
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('error', Image.DecompressionBombWarning)
      with Image.open(path) as image:
        image.load()
        image = _rgb(ImageOps.exif_transpose(image))
  except _BOMBS as error:
    raise ValueError(
      f'image {path!r} has too many pixels ({error}); scale it down first.'
    ) from error
  except (OSError, ValueError, SyntaxError, EOFError) as error:
    raise ValueError(
      f'image {path!r} cannot be read ({error}); give a whole PNG, JPEG or '
      'other file that Pillow opens.'
    ) from error
  return _medium([image], max_patches)


def from_array(pixels: np.ndarray, *, max_patches: int = MAX_PATCHES) -> Medium:
  """An image, or frames of one, from an array.

  Args:
    pixels: [H, W], [H, W, 1], [H, W, 3], [H, W, 4] (alpha), or with a leading
      axis [frames, H, W, 3]; uint8, uint16, or floats in [0, 1].
    max_patches: of one frame; see `resized`.

  Raises:
    ValueError: another shape, an empty image, or floats out of range.
    TypeError: another dtype.
  """
  pixels = np.asarray(pixels)
  if pixels.ndim == 3 and pixels.shape[-1] == 1:
    pixels = pixels[..., 0]
  frames = pixels if pixels.ndim == 4 else pixels[None]
  channels = frames.shape[3] if frames.ndim == 4 else 3
  if not (frames.ndim in (3, 4) and channels in (3, 4)) or 0 in frames.shape:
    raise ValueError(
      f'an image of shape {pixels.shape}; give [height, width], [height, '
      'width, 3 or 4] or [frames, height, width, 3], none of them empty.'
    )
  frames = _eight_bits(frames)
  images = [_rgb(Image.fromarray(frame)) for frame in frames]
  return _medium(images, max_patches)


def _eight_bits(pixels: np.ndarray) -> np.ndarray:
  if pixels.dtype == np.uint8:
    return pixels
  if pixels.dtype == np.uint16:
    return (pixels >> 8).astype(np.uint8)
  if not np.issubdtype(pixels.dtype, np.floating):
    raise TypeError(
      f'an image of dtype {pixels.dtype}; give uint8, uint16, or floats in '
      '[0, 1].'
    )
  if not (pixels.min() >= 0 and pixels.max() <= 1):
    raise ValueError(
      f'an image of floats from {pixels.min()} to {pixels.max()}; floats must '
      'be in [0, 1].'
    )
  return np.round(pixels * 255).astype(np.uint8)


def _rgb(image: Image.Image) -> Image.Image:
  """8-bit RGB, transparent pixels over white."""
  if image.mode in _WIDE:
    wide = np.clip(np.asarray(image), 0, 2**16 - 1).astype(np.uint16)
    image = Image.fromarray(_eight_bits(wide))
  elif image.mode == 'F':
    raise ValueError('its pixels are 32-bit floats without a known range')
  if image.has_transparency_data:
    image = image.convert('RGBA')
    white = Image.new('RGBA', image.size, 'white')
    image = Image.alpha_composite(white, image)
  return image.convert('RGB')


def _medium(images: Sequence[Image.Image], max_patches: int) -> Medium:
  """Images of one size as the frames of one medium."""
  size = images[0].size
  smaller = resized(size, max_patches=max_patches)
  if smaller != size:
    images = [x.resize(smaller, Image.Resampling.BICUBIC) for x in images]
  columns, rows = (-(-side // TILE) * MERGE for side in smaller)
  canvas = np.zeros((len(images), rows * PATCH, columns * PATCH, 3), np.uint8)
  for frame, image in zip(canvas, images):
    frame[: smaller[1], : smaller[0]] = np.asarray(image)
  patches = canvas.reshape(len(images), rows, PATCH, columns, PATCH, 3)
  patches = patches.transpose(0, 1, 3, 5, 2, 4)
  return Medium(
    np.ascontiguousarray(patches).reshape(-1, 3, PATCH, PATCH),
    (len(images), rows, columns),
    size,
  )
