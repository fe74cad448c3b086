"""A corpus in memory: tokenised train and held-out documents."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence

import numpy as np

from trimoe_jax.data.packing import (
  Batch,
  Documents,
  Plan,
  Room,
  gather_rows,
  plan_rows,
  refuse_images,
)
from trimoe_jax.data.pictures import read_pictures
from trimoe_jax.data.sources import (
  DataConfig,
  Document,
  read_documents,
  split_documents,
)
from trimoe_jax.data.tokenizer import (
  Tokenizer,
  encode_with_images,
  load_tokenizer,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
  """Train and held-out documents, each `bos, text, eos`, with a tokenizer."""

  tokenizer: Tokenizer
  train: Documents
  heldout: Documents

  @functools.cached_property
  def fingerprint(self) -> str:
    """A hash of paths, tokens and pixels, to notice data that changed."""
    digest = hashlib.sha256()
    for side in (self.train, self.heldout):
      digest.update('\0'.join(side.paths).encode(errors='surrogateescape'))
      digest.update(side.offsets.tobytes())
      digest.update(side.tokens.tobytes())
      for image in (image for own in side.images for image in own):
        digest.update(np.array(image.grid).tobytes() + image.patches.tobytes())
    return digest.hexdigest()[:16]

  def heldout_batches(
    self, context: int, count: int, batch: int = 1, room: Room | None = None
  ) -> list[Batch]:
    """The first `count` held-out batches of `batch` rows; always the same ones.

    Rows with the longest unbroken text come first, so that late positions of a
    long context are measured on documents that reach them. Among rows that tie
    every document gives one before any gives a second, in a fixed random
    order. Documents longer than a row are cut. When the held-out split has
    fewer rows there are fewer batches, at least one, and the last one is
    filled up with padding rows. `room` for images as in `gather_rows`.

    Raises:
      ValueError: `context`, `count` or `batch` below 1.
    """
    for name, value in (
      ('context', context),
      ('count', count),
      ('batch', batch),
    ):
      if value < 1:
        raise ValueError(f'heldout_batches: {name}={value}; use 1 or more.')
    refuse_images(self.heldout, context, room or Room(), 'the evaluation')
    plan = plan_rows(
      self.heldout.positions, context, needs=self.heldout.needs, room=room
    )
    order = _heldout_order(plan)[: count * batch]
    pad_id = self.tokenizer.pad_id
    batches = []
    for first in range(0, len(order), batch):
      rows = gather_rows(
        self.heldout, plan, order[first : first + batch], pad_id, room
      )
      batches.append(_fill_up(rows, batch, pad_id))
    return batches


def load_corpus(config: DataConfig) -> Corpus:
  """Reads, splits and tokenises what `config` names.

  Raises:
    ValueError: see `read_documents`, `split_documents` and `load_tokenizer`;
      and when one side of the split has no document of at least
      `config.min_document_tokens` tokens.
  """
  tokenizer = load_tokenizer(config.tokenizer)
  if config.source == 'pictures':
    documents = read_pictures(config.heldout_fraction, config.seed)
  else:
    documents = read_documents(config.source)
  train, heldout = split_documents(documents, config.heldout_fraction)
  minimum = config.min_document_tokens
  return Corpus(
    tokenizer,
    tokenise('train', train, tokenizer, minimum),
    tokenise('held-out', heldout, tokenizer, minimum),
  )


def tokenise(
  split: str,
  documents: Sequence[Document],
  tokenizer: Tokenizer,
  min_tokens: int,
) -> Documents:
  """Documents as `bos, text, eos`, uint16 where the vocabulary allows it.

  Raises:
    ValueError: every document has fewer than `min_tokens` tokens of text.
  """
  dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
  pictures = [bool(document.images) for document in documents]
  plain = [d.text for d, has in zip(documents, pictures) if not has]
  plain = iter(tokenizer.encode_batch(plain))
  paths, images, framed = [], [], []
  for document, has in zip(documents, pictures):
    text_ids = (
      encode_with_images(tokenizer, document.text) if has else next(plain)
    )
    if len(text_ids) >= min_tokens or has:
      paths.append(document.path)
      images.append(document.images)
      framed.append(
        np.concatenate(
          [[tokenizer.bos_id], text_ids, [tokenizer.eos_id]]
        ).astype(dtype)
      )
  if not framed:
    raise ValueError(
      f'the {split} split is empty: each of its {len(documents)} documents has '
      f'fewer than data.min_document_tokens={min_tokens} tokens; lower it or '
      'add longer documents.'
    )
  if not any(pictures):
    return Documents(paths, framed)
  return Documents(paths, framed, images, tokenizer.media_id)


def shuffled_rows(key: tuple[int, ...], rows: int) -> np.ndarray:
  """A permutation of range(rows) that depends on `key` and `rows` alone.

  Sorts the raw stream of a bit generator: numpy promises that the stream stays
  the same between versions, which it does not for `Generator.permutation`.
  """
  return np.argsort(np.random.PCG64(key).random_raw(rows), kind='stable')


def _heldout_order(plan: Plan) -> np.ndarray:
  """Rows by longest piece, each document's first row before its second."""
  rows = shuffled_rows((0,), plan.rows)
  longest = plan.longest_piece()[rows]
  document = plan.document[plan.row_starts[rows]]
  by_document = np.argsort(document, kind='stable')
  _, counts = np.unique(document, return_counts=True)
  turn = np.zeros(len(rows), np.int64)
  turn[by_document] = np.arange(len(rows)) - np.repeat(
    np.cumsum(counts) - counts, counts
  )
  return rows[np.lexsort((turn, -longest))]


def _fill_up(rows: Batch, batch: int, pad_id: int) -> Batch:
  """Adds padding rows until there are `batch`."""
  missing = batch - len(rows['tokens'])
  fill = {'tokens': pad_id, 'targets': pad_id}
  return {
    name: np.pad(
      array,
      ((0, missing), *([(0, 0)] * (array.ndim - 1))),
      constant_values=fill.get(name, 0),
    )
    for name, array in rows.items()
  }
