"""Documents of any length in rows of one length, without mixing them.

A document of n + 1 tokens gives n positions: an input token and the token that
follows it. Positions are cut into pieces of at most one row and the pieces are
packed; every piece is a segment of its own (1, 2, ... from the left, 0 is
padding), so a state, a convolution window or attention never reaches into
another piece. Every position of a document lies in exactly one piece: no token
is lost or seen twice, and the last target of a piece is the first input of the
next. What else shares a row has no effect on a piece.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

Batch = dict[str, np.ndarray]


class Documents(Sequence[np.ndarray]):
  """Tokenised documents in one flat array.

  Indexing gives one document's tokens, bos and eos included. `positions`
  [documents] counts its (token, next token) pairs, one fewer than its tokens.
  """

  def __init__(self, paths: Sequence[str], documents: Sequence[np.ndarray]):
    """Takes the relative paths and, for each, ids of one common dtype."""
    self.paths = tuple(paths)
    lengths = [len(document) for document in documents]
    self.offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    self.tokens = np.concatenate(documents)
    self.positions = np.diff(self.offsets) - 1

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
  positions: np.ndarray, context: int, *, long_repeats: int = 1
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
  """
  document = np.arange(len(positions))
  longest = document[positions >= context]
  document = np.concatenate([document] + [longest] * (long_repeats - 1))
  whole, rest = np.divmod(positions[document], context)
  has_rest = rest > 0
  number = np.arange(whole.sum()) - np.repeat(np.cumsum(whole) - whole, whole)
  row = np.concatenate(
    [np.arange(whole.sum()), whole.sum() + _best_fit(rest[has_rest], context)]
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
  documents: Documents, plan: Plan, rows: Sequence[int], pad_id: int
) -> Batch:
  """The batch made of the given rows of a plan, in their order.

  Returns:
    tokens, targets, segment_ids: int32 [rows, context]; the target is the next
      token of the same document. loss_mask: bool [rows, context], true where
      there is a target. Padding has segment 0 and `pad_id` in both tokens and
      targets.
  """
  shape = (len(rows), plan.context)
  tokens_bt = np.full(shape, pad_id, np.int32)
  targets_bt = np.full(shape, pad_id, np.int32)
  segment_ids_bt = np.zeros(shape, np.int32)
  for b, row in enumerate(rows):
    t = 0
    pieces = range(plan.row_starts[row], plan.row_starts[row + 1])
    for segment, piece in enumerate(pieces, start=1):
      length = int(plan.length[piece])
      first = documents.offsets[plan.document[piece]] + plan.start[piece]
      text = documents.tokens[first : first + length + 1]
      tokens_bt[b, t : t + length] = text[:-1]
      targets_bt[b, t : t + length] = text[1:]
      segment_ids_bt[b, t : t + length] = segment
      t += length
  return {
    'tokens': tokens_bt,
    'targets': targets_bt,
    'segment_ids': segment_ids_bt,
    'loss_mask': segment_ids_bt > 0,
  }


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


def _best_fit(lengths: np.ndarray, context: int) -> np.ndarray:
  """The row of every piece, [pieces], opening rows as they are needed."""
  rows = np.zeros(len(lengths), np.int64)
  rows_with: dict[int, list[int]] = {}  # keyed by the space they have left
  spaces: list[int] = []  # the keys, sorted: at most `context` of them
  opened = 0
  for piece in np.argsort(-lengths, kind='stable').tolist():
    length = int(lengths[piece])
    at = bisect.bisect_left(spaces, length)
    if at == len(spaces):
      row, space = opened, context
      opened += 1
    else:
      space = spaces[at]
      row = rows_with[space].pop()
      if not rows_with[space]:
        del rows_with[space], spaces[at]
    rows[piece] = row
    left = space - length
    if left and left not in rows_with:
      bisect.insort(spaces, left)
      rows_with[left] = []
    if left:
      rows_with[left].append(row)
  return rows
