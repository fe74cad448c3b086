"""Sources: what is read, in which order, how it is split, what is refused."""

import json
import os

import pytest

from trimoe_jax.data.sources import (
  DataConfig,
  Document,
  is_heldout,
  read_documents,
  split_documents,
)


def write(folder, files):
  for name, content in files.items():
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(data)
  return str(folder)


def texts(source):
  """(path, text) of documents, which have no images."""
  documents = read_documents(source)
  assert not any(document.images for document in documents)
  return [(document.path, document.text) for document in documents]


def test_standard_library():
  documents = read_documents()
  paths = [document.path for document in documents]
  assert paths == sorted(paths)
  assert len(set(paths)) == len(paths)
  assert 'argparse.py' in paths
  assert all(path.endswith('.py') for path in paths)
  assert not any('site-packages' in path for path in paths)
  assert sum(len(document.text) > 100_000 for document in documents) >= 5
  assert documents == read_documents('stdlib')


def test_folder_is_recursive_sorted_and_selective(tmp_path):
  root = write(
    tmp_path,
    {
      'b.txt': 'bee',
      'a/c.md': 'sea',
      'a/d.py': 'dee',
      'a/e.rst': 'no',
      '.git/f.txt': 'no',
      '__pycache__/g.py': 'no',
      'z.jsonl': '{"text": "one"}\n\n{"text": "three", "id": 3}\n',
    },
  )
  assert texts(root) == [
    ('a/c.md', 'sea'),
    ('a/d.py', 'dee'),
    ('b.txt', 'bee'),
    ('z.jsonl:1', 'one'),
    ('z.jsonl:3', 'three'),
  ]


def test_glob_and_single_file(tmp_path):
  root = write(tmp_path, {'a/x.txt': '1', 'a/b/y.txt': '2', 'a/z.md': '3'})
  found = texts(os.path.join(root, 'a', '**', '*.txt'))
  assert found == [('b/y.txt', '2'), ('x.txt', '1')]
  assert texts(os.path.join(root, 'a', 'z.md')) == [('z.md', '3')]


def test_undecodable_bytes_are_replaced(tmp_path):
  root = write(tmp_path, {'a.txt': b'\xef\xbb\xbfcaf\xe9'})
  assert texts(root) == [('a.txt', 'caf\ufffd')]


def test_jsonl_keeps_unusual_line_separators(tmp_path):
  line = json.dumps({'text': 'a\u2028b\x85c'}, ensure_ascii=False)
  root = write(tmp_path, {'a.jsonl': line})
  assert texts(root) == [('a.jsonl:1', 'a\u2028b\x85c')]


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    ('{"text": ', 'not valid JSON'),
    ('["text"]', 'string field "text"'),
    ('{"body": "x"}', 'string field "text"'),
    ('{"text": 3}', 'string field "text"'),
  ],
)
def test_malformed_jsonl_names_file_and_line(tmp_path, line, message):
  root = write(tmp_path, {'a.jsonl': '{"text": "fine"}\n' + line + '\n'})
  with pytest.raises(ValueError, match=f'a.jsonl:2: .*{message}'):
    read_documents(root)


def test_missing_empty_and_unknown_sources(tmp_path):
  with pytest.raises(ValueError, match="source='/nowhere' does not exist"):
    read_documents('/nowhere')
  with pytest.raises(ValueError, match='matches no file'):
    read_documents(str(tmp_path))
  with pytest.raises(ValueError, match='matches no file'):
    read_documents(str(tmp_path / '*.txt'))
  write(tmp_path, {'a.txt': ' \n', 'b.csv': '1,2'})
  with pytest.raises(ValueError, match='1 files but no text'):
    read_documents(str(tmp_path))
  with pytest.raises(ValueError, match='unknown kind'):
    read_documents(str(tmp_path / 'b.csv'))


def test_unreadable_folder_and_file(tmp_path, monkeypatch):
  root = write(tmp_path, {'a.txt': 'text'})

  def refuse(path, *args, **kwargs):
    raise PermissionError(13, 'Permission denied', path)

  # Permissions do not bind the root user, who may run the tests.
  with monkeypatch.context() as patch:
    patch.setattr(os, 'scandir', refuse)
    with pytest.raises(ValueError, match='folder .* cannot be read'):
      read_documents(root)
  with monkeypatch.context() as patch:
    patch.setattr('builtins.open', refuse)
    with pytest.raises(ValueError, match=r'a.txt.* cannot be read'):
      read_documents(root)


def test_split_is_stable():
  # Written down once: a change of the hash would mix old held-out documents
  # into the training data of resumed runs.
  paths = [f'folder/file_{n}.py' for n in range(100)]
  heldout = [n for n, path in enumerate(paths) if is_heldout(path, 0.05)]
  assert heldout == [10, 60, 71, 81]
  wider = {n for n, path in enumerate(paths) if is_heldout(path, 0.2)}
  assert wider.issuperset(heldout)


def test_split_keeps_every_document_once():
  documents = [Document(f'{n}.txt', str(n)) for n in range(2000)]
  train, heldout = split_documents(documents, 0.1)
  assert sorted(train + heldout) == sorted(documents)
  assert 150 < len(heldout) < 250
  assert split_documents(documents[::2], 0.1)[1] == [
    document for document in heldout if int(document.text) % 2 == 0
  ]


def test_empty_splits_are_refused():
  documents = [Document(f'{n}.txt', 'text') for n in range(3)]
  with pytest.raises(ValueError, match='held-out split is empty: .* raise'):
    split_documents(documents, 1e-9)
  with pytest.raises(ValueError, match='train split is empty: .* lower'):
    split_documents(documents, 1 - 1e-9)


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('heldout_fraction', 0.0),
    ('heldout_fraction', 1.0),
    ('seed', -1),
    ('long_documents', 'cut'),
    ('min_document_tokens', 0),
  ],
)
def test_config_mistakes(field, value):
  with pytest.raises(ValueError, match=f'data.{field}={value!r}'):
    DataConfig(**{field: value})
