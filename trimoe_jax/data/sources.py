"""Documents from files on disk, and their split into train and held-out.

Sources are the Python standard library (on every machine, nothing to
download), pictures made of what scikit-learn ships (`pictures.py`), a folder,
one file, or a glob. The order of documents and the split
depend on paths relative to the source's root alone, so the same files give the
same data wherever they lie.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, get_args

from trimoe_jax.data import images
from trimoe_jax.data.images import Medium
from trimoe_jax.data.tokenizer import PLACEHOLDER

LongDocuments = Literal['split', 'refuse']

SUFFIXES = ('.txt', '.md', '.py', '.jsonl')
# Installed packages are not the standard library; its tests are missing from
# some distributions, which would make the corpus differ between machines; and
# generated tables are near-duplicates of each other, which would fall on both
# sides of the split and flatter the held-out loss.
_NOT_STDLIB = frozenset(
  {
    'site-packages',
    'dist-packages',
    'test',
    'tests',
    'idle_test',
    'encodings',
    'pydoc_data',
  }
)


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Where text comes from and how it becomes documents of tokens."""

  # None or 'stdlib', 'pictures', a folder, a file or a glob
  source: str | None = None
  tokenizer: str = 'bytes'  # or the path of a tokenizer.json
  heldout_fraction: float = 0.05
  seed: int = 0
  long_documents: LongDocuments = 'split'
  min_document_tokens: int = 16  # shorter documents are left out

  def __post_init__(self):
    if not 0.0 < self.heldout_fraction < 1.0:
      raise ValueError(
        f'data.heldout_fraction={self.heldout_fraction} is outside (0, 1); '
        '0.05 holds out one document in twenty.'
      )
    if self.seed < 0:
      raise ValueError(f'data.seed={self.seed} is negative; use 0 or more.')
    if self.long_documents not in get_args(LongDocuments):
      raise ValueError(
        f'data.long_documents={self.long_documents!r}; choose one of '
        f'{list(get_args(LongDocuments))}.'
      )
    if self.min_document_tokens < 1:
      raise ValueError(
        f'data.min_document_tokens={self.min_document_tokens}; an empty '
        'document teaches nothing. Use 1 or more.'
      )


class Document(NamedTuple):
  """A text and its path relative to the source (`name.jsonl:3` for line 3).

  The text has one `<|media_pad|>` for each of its images.
  """

  path: str
  text: str
  images: tuple[Medium, ...] = ()


def read_documents(source: str | None = None) -> list[Document]:
  """All documents of `source`, sorted by relative path.

  One .txt, .md or .py file is one document; a .jsonl file holds one a line, in
  its "text" field, and its blank lines are skipped. "images" there is a list of
  files, relative to the .jsonl file's folder, one for each `<|media_pad|>` of
  the text; all are read at once and kept as pixels. Bytes that are not UTF-8
  become U+FFFD. Folders are searched recursively, without hidden folders and
  without following links.

  Args:
    source: None or 'stdlib' for the standard library's .py files without its
      tests, generated tables and installed packages, else a folder, a file or
      a glob.

  Raises:
    ValueError: nothing there, unreadable, no file of a known kind, or a
      malformed .jsonl line or an unreadable image (the message names file and
      line).
  """
  if source is None or source == 'stdlib':
    root = sysconfig.get_path('stdlib')
    paths = list(_walk(root, ('.py',), _NOT_STDLIB))
  else:
    root, paths = _find(os.path.expanduser(source))
  if not paths:
    raise ValueError(
      f'data.source={source!r} matches no file; looked for '
      f'{", ".join(SUFFIXES)} under {root!r}.'
    )
  named = ((os.path.relpath(p, root).replace(os.sep, '/'), p) for p in paths)
  documents = []
  for name, path in sorted(named):
    documents.extend(_read(name, path))
  if not any(document.text.strip() for document in documents):
    raise ValueError(
      f'data.source={source!r} has {len(paths)} files but no text in them; '
      'choose a source with text.'
    )
  return documents


def is_heldout(path: str, fraction: float) -> bool:
  """Whether the document at relative `path` belongs to the held-out split.

  The first 64 bits of the path's SHA-256, as a number in [0, 1), are below
  `fraction`. Adding or removing files moves no other document, and a larger
  fraction only adds to the held-out split.
  """
  digest = hashlib.sha256(path.encode('utf-8', errors='surrogateescape'))
  return int.from_bytes(digest.digest()[:8], 'big') < fraction * 2**64


def split_documents(
  documents: Sequence[Document], fraction: float
) -> tuple[list[Document], list[Document]]:
  """(train, held-out) documents, both in the given order.

  Raises:
    ValueError: one of the two would be empty.
  """
  train, heldout = [], []
  for document in documents:
    side = heldout if is_heldout(document.path, fraction) else train
    side.append(document)
  for name, side in (('train', train), ('held-out', heldout)):
    if not side:
      raise ValueError(
        f'the {name} split is empty: the corpus has {len(documents)} '
        f'documents and data.heldout_fraction={fraction}, which goes by a hash '
        'of their paths. Add documents (a .jsonl file holds one a line) or '
        f'{"lower" if name == "train" else "raise"} the fraction.'
      )
  return train, heldout


def _find(source: str) -> tuple[str, list[str]]:
  """The root that paths are relative to, and the files `source` names."""
  if os.path.isdir(source):
    return source, list(_walk(source, SUFFIXES, frozenset()))
  if os.path.isfile(source):
    if not source.endswith(SUFFIXES):
      raise ValueError(
        f'data.source={source!r} is a file of an unknown kind; use '
        f'{", ".join(SUFFIXES)}.'
      )
    return os.path.dirname(source) or '.', [source]
  if not glob.has_magic(source):
    raise ValueError(
      f"data.source={source!r} does not exist; give 'stdlib', a folder, a "
      "file or a glob such as 'texts/**/*.txt'."
    )
  matches = glob.glob(source, recursive=True)
  return _glob_root(source), [
    path for path in matches if path.endswith(SUFFIXES) and os.path.isfile(path)
  ]


def _glob_root(pattern: str) -> str:
  """The folder above the first wildcard of `pattern`."""
  root = pattern
  while glob.has_magic(root):
    root = os.path.dirname(root)
  return root or '.'


def _walk(
  root: str, suffixes: tuple[str, ...], excluded: frozenset[str]
) -> Iterator[str]:
  """Files under `root`, which os.walk would silently cut where unreadable."""

  def refuse(error: OSError):
    raise ValueError(
      f'data.source: folder {error.filename!r} cannot be read '
      f'({error.strerror}); change its permissions or choose another source.'
    ) from error

  for folder, subfolders, names in os.walk(root, onerror=refuse):
    subfolders[:] = [
      name
      for name in subfolders
      if name not in excluded and not name.startswith(('.', '__pycache__'))
    ]
    for name in names:
      if name.endswith(suffixes) and not name.startswith('.'):
        yield os.path.join(folder, name)


def _read(name: str, path: str) -> Iterator[Document]:
  try:
    with open(path, 'rb') as file:
      text = file.read().decode('utf-8-sig', errors='replace')
  except OSError as error:
    raise ValueError(
      f'data.source: file {path!r} cannot be read ({error.strerror}); change '
      'its permissions or leave it out.'
    ) from error
  if path.endswith('.jsonl'):
    yield from _read_lines(name, path, text)
  else:
    yield Document(name, text)


def _read_lines(name: str, path: str, text: str) -> Iterator[Document]:
  """One document for every line of a .jsonl file that is not blank."""
  # Not splitlines(): JSON strings may hold U+2028 and others it would split at.
  for number, line in enumerate(text.split('\n'), start=1):
    if not line.strip():
      continue
    try:
      record = json.loads(line)
    except json.JSONDecodeError as error:
      raise ValueError(
        f'{path}:{number}: not valid JSON ({error}); a .jsonl file holds one '
        'JSON object a line.'
      ) from error
    if not isinstance(record, dict) or not isinstance(record.get('text'), str):
      raise ValueError(
        f'{path}:{number}: expected an object with a string field "text", got '
        f'{line.strip()[:60]!r}.'
      )
    pictures = _read_images(f'{path}:{number}', os.path.dirname(path), record)
    yield Document(f'{name}:{number}', record['text'], pictures)


def _read_images(where: str, folder: str, record: dict) -> tuple[Medium, ...]:
  """The images of one line of a .jsonl file."""
  paths = record.get('images', [])
  if not isinstance(paths, list) or not all(isinstance(p, str) for p in paths):
    raise ValueError(
      f'{where}: "images" must be a list of file names, got {paths!r}.'
    )
  places = record['text'].count(PLACEHOLDER)
  if paths and len(paths) != places:
    raise ValueError(
      f'{where}: the text has {places} {PLACEHOLDER} and "images" names '
      f'{len(paths)} files; give one for each.'
    )
  try:
    return tuple(images.load(os.path.join(folder, p)) for p in paths)
  except ValueError as error:
    raise ValueError(f'{where}: {error}') from error
