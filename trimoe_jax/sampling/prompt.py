"""Prompts of different lengths, with images, as arrays of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trimoe_jax.data.images import Medium
from trimoe_jax.model.media import Media

_PATCHES = 256  # the row's room is a power of two of at least this


class Prompts(NamedTuple):
  """What `stream` and `start` take.

  Attributes:
    tokens: int32 [B, T], padded on the left; the placeholder of an image is
      repeated for every token that it becomes.
    valid: bool [B, T], False for padding.
    images: the media of every row, or None when no row has any.
  """

  tokens: np.ndarray
  valid: np.ndarray
  images: Media | None


def pack(
  rows: Sequence[np.ndarray],
  media: Sequence[Sequence[Medium]] | None = None,
  *,
  placeholder: int | None = None,
) -> Prompts:
  """The batch of `rows`, token ids with one placeholder for each image.

  Args:
    rows: token ids of each prompt, at least one.
    media: the images of each prompt, in the order of their placeholders.
    placeholder: their token id; required with `media`.

  Raises:
    ValueError: an empty prompt, or images that do not fit the placeholders.
  """
  media = media or [()] * len(rows)
  rows = [
    _expanded(np.asarray(row), own, placeholder, number)
    for number, (row, own) in enumerate(zip(rows, media, strict=True))
  ]
  if not rows or not all(map(len, rows)):
    raise ValueError(
      'a prompt has no tokens; give at least one, such as a BOS token.'
    )
  width = max(map(len, rows))
  tokens = np.zeros((len(rows), width), np.int32)
  valid = np.zeros(tokens.shape, bool)
  for b, row in enumerate(rows):
    tokens[b, width - len(row) :] = row
    valid[b, width - len(row) :] = True
  return Prompts(tokens, valid, _packed(media) if any(media) else None)


def _expanded(row, media, placeholder, number: int):
  """`row` with its placeholders repeated for every token of their images."""
  if not media and placeholder is None:
    return row
  is_image = row == placeholder
  if is_image.sum() != len(media):
    raise ValueError(
      f'prompt {number} has {is_image.sum()} placeholders and {len(media)} '
      'images; give one image for each.'
    )
  count = np.ones(len(row), int)
  count[is_image] = [medium.tokens for medium in media]
  return np.repeat(row, count)


def _packed(media) -> Media:
  """Every row's patches side by side, padded to few different sizes."""
  most = max(sum(len(m.patches) for m in own) for own in media)
  room = max(_PATCHES, 1 << (most - 1).bit_length())
  first = next(m for own in media for m in own)
  shape = (len(media), room, *first.patches.shape[1:])
  patches = np.zeros(shape, first.patches.dtype)
  grids = np.zeros((len(media), max(map(len, media)), 3), np.int32)
  for b, own in enumerate(media):
    at = 0
    for i, medium in enumerate(own):
      patches[b, at : at + len(medium.patches)] = medium.patches
      grids[b, i] = medium.grid
      at += len(medium.patches)
  return Media(patches, grids)
