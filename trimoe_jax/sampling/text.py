"""Prompts as a person writes them, and text as it is made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np

from trimoe_jax.data import images
from trimoe_jax.data.images import Medium
from trimoe_jax.data.tokenizer import (
  PLACEHOLDER,
  Tokenizer,
  encode_with_images,
)
from trimoe_jax.model.vision_config import VisionConfig
from trimoe_jax.sampling.prompt import Prompts, pack


def read_prompts(
  texts: Sequence[str],
  media: Sequence[Medium],
  *,
  tokenizer: Tokenizer,
  vision: VisionConfig | None,
) -> Prompts:
  """The batch of prompts, a BOS token before each, with their images.

  Args:
    texts: `<|media_pad|>` stands for the next image; a single text without it
      has all images in front.
    media: the images of all texts in order.
    tokenizer: the model's.
    vision: of the model's configuration.

  Raises:
    ValueError: images for a model without a vision tower, or another number of
      them than the texts have placeholders.
  """
  if media and vision is None:
    raise ValueError('--image: this model has no vision tower.')
  rest, rows, own = list(media), [], []
  for text in texts:
    wanted = text.count(PLACEHOLDER)
    if not wanted and len(texts) == 1:
      wanted, text = len(media), PLACEHOLDER * len(media) + text
    if wanted > len(rest):
      raise ValueError(
        f'the prompts have more placeholders than the {len(media)} --image '
        'flags; give one file for each.'
      )
    taken, rest = rest[:wanted], rest[wanted:]
    if _has_markup(tokenizer):
      parts = text.split(PLACEHOLDER)
      between = map(images.markup, taken)
      text = parts[0] + ''.join(map(''.join, zip(between, parts[1:])))
    own.append(taken)
    ids = encode_with_images(tokenizer, text)
    rows.append(np.concatenate([[tokenizer.bos_id], ids]))
  if rest:
    raise ValueError(
      f'{len(rest)} of {len(media)} --image flags have no placeholder; write '
      f'{PLACEHOLDER} in a prompt for each.'
    )
  return pack(rows, own, placeholder=vision and vision.placeholder)


def _has_markup(tokenizer: Tokenizer) -> bool:
  """Whether images have the released tokens around their placeholder."""
  return len(tokenizer.encode('<|media_begin|>')) == 1


def text_of(pieces: Iterable[jax.Array], tokenizer: Tokenizer) -> Iterator[str]:
  """What the tokens [1, n] of `stream` add to the text, whole characters."""
  ids, shown = [], ''
  for tokens in pieces:
    ids.extend(np.asarray(tokens)[0].tolist())
    text = tokenizer.decode(ids).rstrip('\N{REPLACEMENT CHARACTER}')
    yield text[len(shown) :]
    shown = text
