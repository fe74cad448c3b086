"""Tokens as vectors, and images among them.

The released text has one placeholder for each image, which becomes as many rows
as the image has tokens. `expand` does that to a stream of token ids; `embed`
then puts the vision tower's rows where the repeated placeholders are.

Legend: b batch, t time, d model width, a vocabulary, j tokens made of images.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trimoe_jax import sharding
from trimoe_jax.config import ModelConfig
from trimoe_jax.model import media, residual
from trimoe_jax.model.media import Media
from trimoe_jax.model.vision_config import MERGE, VisionConfig


def expand(
  tokens: jax.Array,
  images: Media,
  segment_ids: jax.Array | None,
  *,
  vision: VisionConfig,
  length: int | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Tokens and segment ids [B, T] with every placeholder repeated.

  Args:
    tokens: [B, S] int32, one placeholder for each medium.
    images: the media of every row, in the order of their placeholders.
    segment_ids: [B, S]; None: one document.
    vision: says which token is the placeholder.
    length: T; None: room for a whole row of patches. What does not fit is cut
      off; places left over have segment 0.
  """
  if length is None:
    length = tokens.shape[1] - 1 + images.patches.shape[1] // MERGE**2
  if segment_ids is None:
    segment_ids = jnp.ones_like(tokens)

  def spread(tokens, segment_ids, grids):
    place = media.expansion(tokens, grids, vision.placeholder, length)
    pick = lambda x: jnp.take_along_axis(x, place.source, axis=1)
    return pick(tokens), jnp.where(place.real, pick(segment_ids), 0)

  rows = ('batch', None)
  run = sharding.local(spread, inputs=(rows, rows, (*rows, None)), outputs=rows)
  return run(tokens, segment_ids, images.grids)


class Inserts(NamedTuple):
  """Rows that replace embeddings: `row` [B, T] of `features` [B, J, d]; -1:
  none."""

  features: jax.Array
  row: jax.Array


def insert_features(
  tokens: jax.Array,
  features_bjd: jax.Array,
  config: ModelConfig,
  first: jax.Array | None = None,
) -> Inserts:
  """The n-th placeholder of a row takes its n-th feature.

  Args:
    tokens: [B, T] int32, placeholders repeated for every feature.
    features_bjd: from `Model.image_features`.
    config: the model's.
    first: [B] int32, features that earlier tokens of the row took.
  """
  tokens = sharding.constrain(tokens, 'batch', None)
  row = media.feature_rows(tokens, config.vision.placeholder, first)
  return Inserts(features_bjd, sharding.constrain(row, 'batch', 'seq'))


def embed(
  embedding_ad: jax.Array,
  tokens: jax.Array,
  config: ModelConfig,
  inserts: Inserts | None = None,
) -> jax.Array:
  """The rows of `tokens` [B, T] in the model's dtype: the first source.

  Args:
    embedding_ad: one row for each token of the vocabulary.
    tokens: [B, T] int32.
    config: the model's.
    inserts: what takes the place of some of them.
  """
  embedding_ad = sharding.use(
    embedding_ad, jnp.dtype(config.dtype), None, 'embed'
  )
  if sharding.mesh_is_set():
    where = sharding.spec(residual.STREAM)
    x_btd = embedding_ad.at[tokens].get(out_sharding=where)
  else:
    x_btd = embedding_ad[tokens]
  if inserts is None:
    return x_btd
  insert = sharding.local(
    _insert,
    inputs=(residual.STREAM, ('batch', None, None), ('batch', 'seq')),
    outputs=residual.STREAM,
  )
  return insert(x_btd, *inserts)


def _insert(x_btd, features_bjd, row_bt):
  """`x_btd` with the features in place of the rows that have one."""
  last = features_bjd.shape[1] - 1
  at = jnp.clip(row_bt, 0, last)[..., None]
  taken_btd = jnp.take_along_axis(features_bjd, at, axis=1)
  return jnp.where(row_bt[..., None] >= 0, taken_btd.astype(x_btd.dtype), x_btd)
