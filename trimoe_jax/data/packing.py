"""Documents of any length in rows of one length, without mixing them.

A document of n + 1 tokens gives n positions: an input token and the token that
follows it. Positions are cut into pieces of at most one row and the pieces are
packed; every piece is a segment of its own (1, 2, ... from the left, 0 is
padding), so a state, a convolution window or attention never reaches into
another piece. Every position of a document lies in exactly one piece: no token
is lost or seen twice, and the last target of a piece is the first input of the
next. What else shares a row has no effect on a piece.

A document may have images: its tokens hold one placeholder for each, which
takes as many positions as the image has tokens and is no target of the loss. A
document with images is never cut, and a row has room for so many patches.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from trimoe_jax.data.images import Medium
from trimoe_jax.model.vision_config import PATCH

Batch = dict[str, np.ndarray]
# Rows that are tried for a piece with images before a new one is opened.
_TRIES = 64


class Room(NamedTuple):
  """What a row holds besides its tokens."""

  patches: int = 0
  images: int = 0


class Documents(Sequence[np.ndarray]):
  """Tokenised documents in one flat array.

  Indexing gives one document's tokens, bos and eos included. `positions`
  [documents] counts its (token, next token) pairs, one fewer than its tokens
  when every image counts with all of its own; `needs` [documents, 2] its
  patches and images.
  """

  def __init__(
    self,
    paths: Sequence[str],
    documents: Sequence[np.ndarray],
    images: Sequence[Sequence[Medium]] | None = None,
    placeholder: int | None = None,
  ):
    """Takes the relative paths and, for each, ids of one common dtype.

    Args:
      paths: one for each document.
      documents: their ids.
      images: of each document, in the order of its placeholders; None: no
        document has any.
      placeholder: the id that stands for an image.

    Raises:
      ValueError: another number of placeholders than of images.
    """
    self.paths = tuple(paths)
    self.images = tuple(map(tuple, images or [()] * len(documents)))
    self.placeholder = placeholder
    for path, ids, own in zip(paths, documents, self.images):
      held = 0 if placeholder is None else int((ids == placeholder).sum())
      if held != len(own):
        raise ValueError(
          f'document {path!r} has {held} placeholders and {len(own)} images; '
          'give one for each.'
        )
    lengths = [len(document) for document in documents]
    self.offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    self.tokens = np.concatenate(documents)
    extra = [sum(x.tokens - 1 for x in own) for own in self.images]
    self.positions = np.diff(self.offsets) - 1 + np.array(extra, np.int64)
    self.needs = np.array(
      [[sum(len(x.patches) for x in own), len(own)] for own in self.images],
      np.int64,
    ).reshape(-1, 2)

  @property
  def has_images(self) -> bool:
    return bool(self.needs.any())

  def stream(self, index: int) -> np.ndarray:
    """One document's tokens, placeholders repeated for all their tokens."""
    ids = self[index]
    if not self.images[index]:
      return ids
    counts = np.ones(len(ids), np.int64)
    counts[ids == self.placeholder] = [x.tokens for x in self.images[index]]
    return np.repeat(ids, counts)

  def __len__(self) -> int:
    return len(self.paths)

  def __getitem__(self, index: int) -> np.ndarray:
    if not -len(self) <= index < len(self):
      raise IndexError(f'document {index} of {len(self)}.')
    index %= len(self)
    return self.tokens[self.offsets[index] : self.offsets[index + 1]]

  def __iter__(self) -> Iterator[np.ndarray]:
    return (self[index] for index in range(len(self)))


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
  """Which piece of which document lies in which row.

  Row r holds pieces `row_starts[r]` to `row_starts[r + 1]`; piece i covers
  positions `start[i]` to `start[i] + length[i]` of document `document[i]`.
  """

  context: int
  row_starts: np.ndarray  # [rows + 1]
  document: np.ndarray  # [pieces]
  start: np.ndarray  # [pieces]
  length: np.ndarray  # [pieces]

  @property
  def rows(self) -> int:
    return len(self.row_starts) - 1

  @property
  def padding(self) -> float:
    """The share of positions that hold no token."""
    return 1.0 - float(self.length.sum()) / (self.rows * self.context)

  def longest_piece(self) -> np.ndarray:
    """The length of every row's first piece, which is its longest, [rows]."""
    return self.length[self.row_starts[:-1]]


def plan_rows(
  positions: np.ndarray,
  context: int,
  *,
  long_repeats: int = 1,
  needs: np.ndarray | None = None,
  room: Room | None = None,
) -> Plan:
  """The rows of one epoch.

  A document that fills whole rows gets them; what remains of it, and every
  shorter document, goes longest first into the fullest row with room for it
  (best fit, decreasing), so short documents are never cut. The plan depends on
  its arguments alone; an epoch visits its rows in a shuffled order.

  Args:
    positions: [documents] (token, next token) pairs of every document, >= 1.
    context: positions in a row.
    long_repeats: how often a document of at least `context` positions is used
      in one epoch, so that short ones do not swamp a long context. Shorter
      documents are always used once.
    needs: [documents, 2] patches and images of every document; those that have
      any must fit into a row (`refuse_images`).
    room: for them in a row; with it, needs are heeded.
  """
  document = np.arange(len(positions))
  longest = document[positions >= context]
  document = np.concatenate([document] + [longest] * (long_repeats - 1))
  whole, rest = np.divmod(positions[document], context)
  has_rest = rest > 0
  limits = _Limits(context, None, room)
  if needs is not None and room is not None:
    limits = limits._replace(needs=needs[document][has_rest])
  number = np.arange(whole.sum()) - np.repeat(np.cumsum(whole) - whole, whole)
  row = np.concatenate(
    [np.arange(whole.sum()), whole.sum() + _best_fit(rest[has_rest], limits)]
  )
  pieces = np.stack(
    [
      np.concatenate([np.repeat(document, whole), document[has_rest]]),
      np.concatenate([number * context, (whole * context)[has_rest]]),
      np.concatenate([np.full(len(number), context), rest[has_rest]]),
    ]
  )
  order = np.lexsort((-pieces[-1], row))  # longest piece first in each row
  pieces = pieces[:, order]
  row_starts = np.searchsorted(row[order], np.arange(row.max() + 2))
  return Plan(context, row_starts, *pieces)


def gather_rows(
  documents: Documents,
  plan: Plan,
  rows: Sequence[int],
  pad_id: int,
  room: Room | None = None,
) -> Batch:
  """The batch made of the given rows of a plan, in their order.

  Returns:
    tokens, targets, segment_ids: int32 [rows, context]; the target is the next
      token of the same document. loss_mask: bool [rows, context], true where
      there is a target that is no image. Padding has segment 0 and `pad_id` in
      both tokens and targets. With `room` for images also patches uint8 [rows,
      P, 3, 14, 14] and grids int32 [rows, images, 3]; see `model/media.py`.
  """
  shape = (len(rows), plan.context)
  tokens_bt = np.full(shape, pad_id, np.int32)
  targets_bt = np.full(shape, pad_id, np.int32)
  segment_ids_bt = np.zeros(shape, np.int32)
  for b, row in enumerate(rows):
    t = 0
    pieces = range(plan.row_starts[row], plan.row_starts[row + 1])
    for segment, piece in enumerate(pieces, start=1):
      length, first = int(plan.length[piece]), int(plan.start[piece])
      text = documents.stream(plan.document[piece])[first : first + length + 1]
      tokens_bt[b, t : t + length] = text[:-1]
      targets_bt[b, t : t + length] = text[1:]
      segment_ids_bt[b, t : t + length] = segment
      t += length
  batch = {
    'tokens': tokens_bt,
    'targets': targets_bt,
    'segment_ids': segment_ids_bt,
    'loss_mask': segment_ids_bt > 0,
  }
  if documents.placeholder is not None:
    batch['loss_mask'] &= targets_bt != documents.placeholder
  return batch | _gather_images(documents, plan, rows, room)


def _gather_images(documents, plan, rows, room) -> Batch:
  """Patches and grids of the rows; nothing without room for any."""
  if room is None or not room.patches:
    return {}
  patches = np.zeros((len(rows), room.patches, 3, PATCH, PATCH), np.uint8)
  grids = np.zeros((len(rows), room.images, 3), np.int32)
  for b, row in enumerate(rows):
    pieces = plan.document[plan.row_starts[row] : plan.row_starts[row + 1]]
    own = [image for piece in pieces for image in documents.images[piece]]
    at = 0
    for number, image in enumerate(own):
      grids[b, number] = image.grid
      patches[b, at : at + len(image.patches)] = image.patches
      at += len(image.patches)
  return {'patches': patches, 'grids': grids}


def refuse_images(documents: Documents, context: int, room: Room, stage: str):
  """Raises ValueError when a document's images do not fit into a row."""
  if not documents.has_images:
    return
  with_images = documents.needs[:, 1] > 0
  too_long = with_images & (documents.positions > context)
  too_much = (documents.needs > np.array(room)).any(axis=1)
  if not (too_long | too_much).any():
    return
  worst = int(np.flatnonzero(too_long | too_much)[0])
  patches, images = documents.needs[worst].tolist()
  most = documents.needs.max(axis=0).tolist()
  longest = int(documents.positions[with_images].max())
  raise ValueError(
    f'document {documents.paths[worst]!r} has {images} images of {patches} '
    f'patches and {documents.positions[worst]} positions; {stage} has room for '
    f'patches={room.patches}, images={room.images} and context={context} in a '
    f'row, and documents with images are not cut. At least patches={most[0]}, '
    f'images={most[1]} and context={longest} are needed.'
  )


def refuse_long(documents: Documents, context: int, stage: str):
  """Raises ValueError when a document does not fit into one row of a stage."""
  longest = int(np.argmax(documents.positions))
  length = int(documents.positions[longest])
  if length > context:
    count = int((documents.positions > context).sum())
    raise ValueError(
      f'document {documents.paths[longest]!r} has {length} positions, longer '
      f'than {stage}, whose context is {context} ({count} of {len(documents)} '
      "documents are); set data.long_documents='split' to cut them into "
      'pieces, or raise the context.'
    )


class _Limits(NamedTuple):
  """A row's positions and room; what the pieces need of that, [pieces, 2]."""

  context: int
  needs: np.ndarray | None
  room: Room | None


def _best_fit(lengths: np.ndarray, limits: _Limits) -> np.ndarray:
  """The row of every piece, [pieces], opening rows as they are needed."""
  rows = np.zeros(len(lengths), np.int64)
  rows_with: dict[int, list[int]] = {}  # keyed by the space they have left
  spaces: list[int] = []  # the keys, sorted: at most `context` of them
  rest: list[tuple[int, int]] = []  # patches and images left, by row
  for piece in np.argsort(-lengths, kind='stable').tolist():
    length, need = int(lengths[piece]), (0, 0)
    if limits.needs is not None:
      need = tuple(limits.needs[piece].tolist())
    fits = lambda row, need=need: all(map(int.__le__, need, rest[row]))
    fits = fits if any(need) else None
    found = _row_with_room(rows_with, spaces, length, fits)
    if found is None:
      row, space = len(rest), limits.context
      rest.append(limits.room or Room())
    else:
      place, space = found
      row = rows_with[space].pop(place)
      if not rows_with[space]:
        del rows_with[space], spaces[bisect.bisect_left(spaces, space)]
    rows[piece] = row
    rest[row] = tuple(map(int.__sub__, rest[row], need))
    left = space - length
    if left and left not in rows_with:
      bisect.insort(spaces, left)
      rows_with[left] = []
    if left:
      rows_with[left].append(row)
  return rows


def _row_with_room(rows_with, spaces, length, fits):
  """(place in rows_with[space], space) of the fullest row; None: a new one."""
  at = bisect.bisect_left(spaces, length)
  candidates = (
    (place, spaces[i])
    for i in range(at, len(spaces))
    for place in reversed(range(len(rows_with[spaces[i]])))
  )
  if fits is None:
    return next(candidates, None)
  for place, space in itertools.islice(candidates, _TRIES):
    if fits(rows_with[space][place]):
      return place, space
  return None
