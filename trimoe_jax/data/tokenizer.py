"""Text to token ids and back: bytes by default, or a Hugging Face tokenizer.

A document becomes `bos, its text, eos`; both ids come from the tokenizer, and
`encode` itself never adds them.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np

PLACEHOLDER = '<|media_pad|>'  # stands for one image in a text
_BYTE_SPECIALS = (
  '<pad>',
  '<bos>',
  '<eos>',
  '<media>',
  '<reserved_0>',
  '<reserved_1>',
  '<reserved_2>',
  '<reserved_3>',
)
# A tokenizer.json lists special tokens without saying what each is for, so the
# role is read off the name. Order is preference.
_ROLE_NAMES = {
  'pad': ('<pad>', '[PAD]', '<|pad|>', '<|finetune_right_pad_id|>'),
  'bos': ('<bos>', '<s>', '[BOS]', '<|begin_of_text|>', '<|startoftext|>'),
  'eos': ('<eos>', '</s>', '[EOS]', '<|end_of_text|>', '<|endoftext|>'),
}


class Tokenizer(Protocol):
  """What the data pipeline asks of a tokenizer.

  `token_bytes` [vocab_size] holds the bytes of text each token stands for (0
  for special tokens), or None when tokens are not made of bytes; bits per byte
  can only be reported where it is known. `media_id` stands for an image; None
  where the vocabulary has no such token.
  """

  vocab_size: int
  pad_id: int
  bos_id: int
  eos_id: int
  media_id: int | None
  token_bytes: np.ndarray | None

  def encode(self, text: str) -> np.ndarray:
    """The ids of `text`, int32 [tokens], without bos and eos."""
    ...

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """`encode` of every text; a tokenizer may use several cores."""
    ...

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """The text of `ids`; special tokens are left out."""
    ...


class ByteTokenizer:
  """UTF-8 bytes 0 to 255, then eight special tokens: 264 ids in all.

  256 pad, 257 bos, 258 eos, 259 the media placeholder, 260 to 263 reserved.
  Any text round-trips; bytes that are not UTF-8 decode to U+FFFD.
  """

  vocab_size = 256 + len(_BYTE_SPECIALS)
  pad_id = 256 + _BYTE_SPECIALS.index('<pad>')
  bos_id = 256 + _BYTE_SPECIALS.index('<bos>')
  eos_id = 256 + _BYTE_SPECIALS.index('<eos>')
  media_id = 256 + _BYTE_SPECIALS.index('<media>')
  token_bytes = (np.arange(vocab_size) < 256).astype(np.int32)

  def encode(self, text: str) -> np.ndarray:
    """The bytes of `text`, int32 [bytes]; lone surrogates become '?'."""
    data = text.encode('utf-8', errors='replace')
    return np.frombuffer(data, np.uint8).astype(np.int32)

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    return [self.encode(text) for text in texts]

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    ids = np.asarray(ids)
    data = ids[(ids >= 0) & (ids < 256)].astype(np.uint8).tobytes()
    return data.decode('utf-8', errors='replace')


class HuggingFaceTokenizer:
  """A `tokenizer.json` file, run by the `tokenizers` package.

  The end-of-document token is found by its usual names (or given); without a
  bos token eos also opens a document, as in GPT-2, and without a pad token eos
  fills rows, where the segment ids mask it anyway.

  Args:
    path: the tokenizer.json file, or a folder that contains one.
    eos: the end-of-document token's text, where its name is unusual.
    bos: the same for the token that opens a document.

  Raises:
    ValueError: no such file, not a tokenizer, or no end-of-document token.
  """

  def __init__(self, path: str, eos: str | None = None, bos: str | None = None):
    import tokenizers  # costs start-up time that a byte-level run need not pay

    if os.path.isdir(path):
      path = os.path.join(path, 'tokenizer.json')
    if not os.path.isfile(path):
      raise ValueError(
        f'data.tokenizer: there is no file {path!r}; give the path of a '
        "Hugging Face tokenizer.json, or 'bytes'."
      )
    try:
      self._tokenizer = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the package raises bare Exception
      raise ValueError(
        f'data.tokenizer: {path!r} is not a tokenizer.json that the '
        f'tokenizers package can read: {error}'
      ) from error
    self._vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
    # Ids may have gaps, and an embedding must cover the largest.
    self.vocab_size = max(self._vocabulary.values()) + 1
    self.eos_id = self._find('eos', eos, path)
    self.bos_id = self._find('bos', bos, path, default=self.eos_id)
    self.pad_id = self._find('pad', None, path, default=self.eos_id)
    self.media_id = self._vocabulary.get(PLACEHOLDER)
    self.token_bytes = self._token_bytes()

  def encode(self, text: str) -> np.ndarray:
    encoding = self._tokenizer.encode(text, add_special_tokens=False)
    return np.asarray(encoding.ids, np.int32)

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    encodings = self._tokenizer.encode_batch(
      list(texts), add_special_tokens=False
    )
    return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    return self._tokenizer.decode(
      np.asarray(ids).tolist(), skip_special_tokens=True
    )

  def _find(
    self, role: str, name: str | None, path: str, *, default: int | None = None
  ) -> int:
    names = (name,) if name is not None else _ROLE_NAMES[role]
    found = [self._vocabulary[n] for n in names if n in self._vocabulary]
    if found:
      return found[0]
    if default is None or name is not None:
      raise ValueError(
        f'data.tokenizer: {path!r} has no {role} token among {list(names)}; '
        f'name the one it has with HuggingFaceTokenizer(path, {role}=...).'
      )
    return default

  def _token_bytes(self) -> np.ndarray | None:
    """Bytes of each token, known where every character stands for one byte."""
    description = json.loads(self._tokenizer.to_str())
    if (description.get('decoder') or {}).get('type') != 'ByteLevel':
      return None
    special = {token['id'] for token in description['added_tokens']}
    lengths = np.zeros(self.vocab_size, np.int32)
    for text, index in self._vocabulary.items():
      lengths[index] = 0 if index in special else len(text)
    return lengths


def encode_with_images(tokenizer: Tokenizer, text: str) -> np.ndarray:
  """The ids of a text, every `<|media_pad|>` the id of an image.

  Raises:
    ValueError: there is one, and the tokenizer has no id for it.
  """
  parts = text.split(PLACEHOLDER)
  if len(parts) > 1 and tokenizer.media_id is None:
    raise ValueError(
      f'the text has images, but the tokenizer has no token {PLACEHOLDER!r}; '
      'use one that has, such as that of Kimi K3, or bytes.'
    )
  ids = [tokenizer.encode(parts[0])]
  for part in parts[1:]:
    ids += [np.array([tokenizer.media_id], np.int32), tokenizer.encode(part)]
  return np.concatenate(ids)


def load_tokenizer(name_or_path: str) -> Tokenizer:
  """The tokenizer called 'bytes', or the one in a tokenizer.json.

  Raises:
    TypeError: not a string.
    ValueError: neither 'bytes' nor a readable tokenizer.json.
  """
  if not isinstance(name_or_path, str):
    raise TypeError(
      f'data.tokenizer={name_or_path!r} is a {type(name_or_path).__name__}; '
      "give 'bytes' or the path of a tokenizer.json."
    )
  if name_or_path == 'bytes':
    return ByteTokenizer()
  if not os.path.exists(name_or_path) and not name_or_path.endswith('.json'):
    close = difflib.get_close_matches(name_or_path, ['bytes'])
    hint = f'; did you mean {close[0]!r}?' if close else '.'
    raise ValueError(
      f'data.tokenizer={name_or_path!r} is neither a name nor a file{hint} '
      "Give 'bytes' or the path of a Hugging Face tokenizer.json."
    )
  return HuggingFaceTokenizer(name_or_path)
