"""Media packed into rows: where patches lie, and where their tokens go.

A row's media lie one after the other, each medium's patches in raster order
over (frame, row, column). Square groups of 2 x 2 patches, averaged over frames,
become one token of the text. Everything here is integer arithmetic on grids
that are values, not shapes: one compiled program serves all sizes.

Suffixes: b batch, p patches, j tokens made of patches, m media, t time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from trimoe_jax.model.vision_attention import Bounds
from trimoe_jax.model.vision_config import MERGE


class Media(struct.PyTreeNode):
  """The media of a batch's rows.

  Attributes:
    patches: [B, P, 3, y, x]; uint8 pixels, or floats that are normalized
      already. Patches after the last medium may hold anything.
    grids: [B, M, 3] int32, (frames, rows, columns) of each medium in patches,
      rows and columns even; zeros where there is no medium, which may only be
      after the last.
  """

  patches: jax.Array
  grids: jax.Array


def images_of(batch: Mapping[str, jax.Array]) -> Media | None:
  """The images of a batch's rows; None where it has none."""
  if 'patches' not in batch:
    return None
  return Media(batch['patches'], batch['grids'])


class Places(NamedTuple):
  """Each patch's place in its medium, [B, P] int32; `real` is bool."""

  real: jax.Array
  frame: jax.Array
  row: jax.Array
  column: jax.Array
  frames: jax.Array
  rows: jax.Array
  columns: jax.Array
  bounds: Bounds


def patch_counts(grids_bm: jax.Array) -> jax.Array:
  """Patches of each medium, [B, M]."""
  return grids_bm[..., 0] * grids_bm[..., 1] * grids_bm[..., 2]


def token_counts(grids_bm: jax.Array) -> jax.Array:
  """Tokens of each medium in the text, [B, M]; frames share theirs."""
  some = grids_bm[..., 0] > 0
  return some * grids_bm[..., 1] * grids_bm[..., 2] // MERGE**2


def places(grids_bm: jax.Array, patches: int) -> Places:
  """Where each of a row's `patches` lies; padding has zeros everywhere.

  Args:
    grids_bm: [B, M, 3] int32.
    patches: P.
  """
  owner = _owners(patch_counts(grids_bm), patches)
  frames, rows, columns = (_pick(grids_bm[..., i], owner) for i in range(3))
  offset = owner.offset
  in_frame = jnp.maximum(rows * columns, 1)
  place = Places(
    real=owner.real.astype(jnp.int32),
    frame=offset // in_frame,
    row=offset % in_frame // jnp.maximum(columns, 1),
    column=offset % jnp.maximum(columns, 1),
    frames=frames,
    rows=rows,
    columns=columns,
    bounds=Bounds(owner.start, owner.start + frames * rows * columns),
  )
  place = jax.tree.map(lambda x: jnp.where(owner.real, x, 0), place)
  return place._replace(real=owner.real)


class Sources(NamedTuple):
  """Which patches make a token.

  `first` [B, J, 4] int32: the patches of the first frame, in the order (0, 0),
  (0, 1), (1, 0), (1, 1); `stride` [B, J]: patches of a frame, and `frames`
  [B, J], 0 where there is no token.
  """

  first: jax.Array
  stride: jax.Array
  frames: jax.Array


def token_sources(grids_bm: jax.Array, tokens: int) -> Sources:
  """The patches of each of a row's `tokens`, in the order of the media."""
  owner = _owners(token_counts(grids_bm), tokens)
  frames, rows, columns = (_pick(grids_bm[..., i], owner) for i in range(3))
  sizes_bm = patch_counts(grids_bm)
  start = _pick(jnp.cumsum(sizes_bm, axis=1) - sizes_bm, owner)
  across = jnp.maximum(columns // MERGE, 1)
  row, column = owner.offset // across, owner.offset % across
  corner = start + MERGE * (row * columns + column)
  inside = [y * columns + x for y in range(MERGE) for x in range(MERGE)]
  first = corner[..., None] + jnp.stack(inside, axis=-1)
  real = owner.real
  return Sources(
    first=jnp.where(real[..., None], first, 0),
    stride=jnp.where(real, rows * columns, 0),
    frames=jnp.where(real, frames, 0),
  )


class Expansion(NamedTuple):
  """Where each place of a long stream [B, T] comes from in the short one.

  `real` is False for places that are left over.
  """

  source: jax.Array
  real: jax.Array


def expansion(
  tokens_bt: jax.Array, grids_bm: jax.Array, placeholder: int, length: int
) -> Expansion:
  """The places of a stream whose placeholders stand for whole media.

  The n-th placeholder of a row becomes as many places as its n-th medium has
  tokens (h w / 4), every other token stays one.

  Args:
    tokens_bt: [B, S] int32, one placeholder a medium.
    grids_bm: [B, M, 3] int32; a placeholder without a medium vanishes.
    placeholder: its token id.
    length: T; what does not fit is cut off.
  """
  is_medium = tokens_bt == placeholder
  number = jnp.cumsum(is_medium, axis=1) - 1
  counts_bm = token_counts(grids_bm)
  known = number < counts_bm.shape[1]
  count = jnp.take_along_axis(
    counts_bm, jnp.clip(number, 0, counts_bm.shape[1] - 1), axis=1
  )
  sizes = jnp.where(is_medium, jnp.where(known, count, 0), 1)
  owner = _owners(sizes, length)
  return Expansion(owner.owner, owner.real)


def feature_rows(
  tokens_bt: jax.Array, placeholder: int, first: jax.Array | None = None
) -> jax.Array:
  """Which of a row's features each token takes, [B, T] int32; -1: none.

  The n-th placeholder takes the n-th feature.

  Args:
    tokens_bt: placeholders repeated for every feature.
    placeholder: its token id.
    first: [B] int32, features that earlier tokens took; None: 0.
  """
  is_medium = tokens_bt == placeholder
  number = jnp.cumsum(is_medium.astype(jnp.int32), axis=1) - 1
  if first is not None:
    number += first[:, None]
  return jnp.where(is_medium, number, -1)


class _Owners(NamedTuple):
  """For each place: which of the packed things holds it, and where in it."""

  owner: jax.Array
  start: jax.Array
  offset: jax.Array
  real: jax.Array


def _owners(sizes_bm: jax.Array, places: int) -> _Owners:
  """Things of these sizes, one after the other, over [B, places]."""
  ends_bm = jnp.cumsum(sizes_bm, axis=1)
  at = jnp.arange(places, dtype=ends_bm.dtype)
  search = jax.vmap(lambda ends: jnp.searchsorted(ends, at, side='right'))
  owner = search(ends_bm).astype(jnp.int32)
  real = owner < sizes_bm.shape[1]
  owner = jnp.where(real, owner, 0)
  start = jnp.take_along_axis(ends_bm - sizes_bm, owner, axis=1)
  offset = jnp.where(real, at - start, 0)
  return _Owners(owner, start, offset, real)


def _pick(x_bm: jax.Array, owner: _Owners) -> jax.Array:
  """The owner's value at every place."""
  return jnp.take_along_axis(x_bm, owner.owner, axis=1)
