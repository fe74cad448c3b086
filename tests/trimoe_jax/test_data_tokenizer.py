"""Tokenizers: round trips, special ids, byte counts and error messages."""

import numpy as np
import pytest
import tokenizers

from trimoe_jax.data.tokenizer import (
  ByteTokenizer,
  HuggingFaceTokenizer,
  load_tokenizer,
)

TEXT = 'def naïve(x):\n  return "日本 🙂" + x\n'


def write_tokenizer(folder, specials=('<pad>', '<s>', '</s>')):
  """A byte-level BPE tokenizer trained on a few lines."""
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300,
    special_tokens=list(specials),
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator([TEXT * 20, 'return the return 1234'], trainer)
  path = str(folder / 'tokenizer.json')
  tokenizer.save(path)
  return path


def test_bytes_round_trip():
  tokenizer = load_tokenizer('bytes')
  ids = tokenizer.encode(TEXT)
  assert ids.dtype == np.int32
  assert len(ids) == len(TEXT.encode())
  assert tokenizer.decode(ids) == TEXT
  framed = np.concatenate([[tokenizer.bos_id], ids, [tokenizer.eos_id]])
  assert tokenizer.decode(framed) == TEXT
  assert tokenizer.encode('').shape == (0,)


def test_bytes_special_ids_are_never_text():
  tokenizer = ByteTokenizer()
  special = {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id}
  special.add(tokenizer.media_id)
  assert len(special) == 4
  assert min(special) == 256
  assert max(special) < tokenizer.vocab_size == 264
  assert tokenizer.encode('<pad><bos><eos>').max() < 256
  assert tokenizer.token_bytes.sum() == 256


def test_bytes_take_broken_text():
  tokenizer = ByteTokenizer()
  assert tokenizer.decode(tokenizer.encode('a\ud800b')) == 'a?b'
  assert tokenizer.decode([0x61, 0xFF]) == 'a\ufffd'


@pytest.mark.parametrize('as_folder', [False, True])
def test_hugging_face_round_trip(tmp_path, as_folder):
  path = write_tokenizer(tmp_path)
  tokenizer = load_tokenizer(str(tmp_path) if as_folder else path)
  ids = tokenizer.encode(TEXT)
  assert ids.dtype == np.int32
  assert len(ids) < len(TEXT.encode())
  framed = np.concatenate([[tokenizer.bos_id], ids, [tokenizer.eos_id]])
  assert tokenizer.decode(framed) == TEXT
  both = tokenizer.encode_batch([TEXT, 'x'])
  np.testing.assert_array_equal(both[0], ids)
  np.testing.assert_array_equal(both[1], tokenizer.encode('x'))


def test_hugging_face_roles_and_bytes(tmp_path):
  tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path))
  assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
  assert tokenizer.vocab_size <= 300
  assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)
  assert tokenizer.token_bytes[:3].sum() == 0
  ids = tokenizer.encode(TEXT)
  assert tokenizer.token_bytes[ids].sum() == len(TEXT.encode())


def test_hugging_face_eos_stands_in_for_missing_roles(tmp_path):
  path = write_tokenizer(tmp_path, specials=('<|endoftext|>',))
  tokenizer = HuggingFaceTokenizer(path)
  assert tokenizer.bos_id == tokenizer.eos_id == tokenizer.pad_id == 0


def test_hugging_face_unusual_names(tmp_path):
  path = write_tokenizer(tmp_path, specials=('[open]', '[close]'))
  with pytest.raises(ValueError, match='has no eos token'):
    HuggingFaceTokenizer(path)
  tokenizer = HuggingFaceTokenizer(path, eos='[close]', bos='[open]')
  assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
  with pytest.raises(ValueError, match="no bos token among .'<start>'"):
    HuggingFaceTokenizer(path, eos='[close]', bos='<start>')


def test_load_errors(tmp_path):
  with pytest.raises(ValueError, match="did you mean 'bytes'"):
    load_tokenizer('byte')
  with pytest.raises(ValueError, match="there is no file '/nowhere/t.json'"):
    load_tokenizer('/nowhere/t.json')
  with pytest.raises(TypeError, match='is a NoneType'):
    load_tokenizer(None)
  broken = tmp_path / 'broken.json'
  broken.write_text('{}')
  with pytest.raises(ValueError, match='broken.json.*not a tokenizer.json'):
    load_tokenizer(str(broken))
