"""Documents with images: files, packing, masks, and pictures made up."""

import json

import numpy as np
import pytest
from PIL import Image

from trimoe_jax.data import StageConfig, StagedBatches, images, pictures
from trimoe_jax.data.corpus import Corpus, load_corpus, tokenise
from trimoe_jax.data.packing import (
  Documents,
  Room,
  gather_rows,
  plan_rows,
  refuse_images,
)
from trimoe_jax.data.sources import DataConfig, Document, read_documents
from trimoe_jax.data.tokenizer import (
  PLACEHOLDER,
  ByteTokenizer,
  encode_with_images,
)
from trimoe_jax.evals.questions import answers, examples, row_images, score

TOKENIZER = ByteTokenizer()
MEDIA = TOKENIZER.media_id


def medium(seed, width=56, height=28):
  rng = np.random.default_rng(seed)
  return images.from_array(rng.integers(0, 256, (height, width, 3), np.uint8))


def make_documents(count=40, seed=0):
  """Documents of some letters and zero to two images each."""
  rng = np.random.default_rng(seed)
  documents = []
  for n in range(count):
    own = [
      medium(10 * n + i, *(28 * rng.integers(1, 4, 2)))
      for i in range(rng.integers(0, 3))
    ]
    parts = ['abcdefghij'[: rng.integers(1, 9)] for _ in range(len(own) + 1)]
    documents.append(Document(f'{n}', PLACEHOLDER.join(parts), tuple(own)))
  return tokenise('train', documents, TOKENIZER, 1)


ROOM = Room(patches=96, images=3)


def packed(documents, context=48, room=ROOM):
  plan = plan_rows(
    documents.positions, context, needs=documents.needs, room=room
  )
  return plan, gather_rows(documents, plan, range(plan.rows), 256, room)


def test_streams_repeat_placeholders():
  documents = Documents(
    ['x'],
    [np.array([1, MEDIA, 2, MEDIA, 3])],
    [[medium(0), medium(1, 28, 28)]],
    MEDIA,
  )
  np.testing.assert_array_equal(
    documents.stream(0), [1, MEDIA, MEDIA, 2, MEDIA, 3]
  )
  assert documents.positions.tolist() == [5]
  assert documents.needs.tolist() == [[12, 2]]


def test_every_image_lies_beside_its_placeholders():
  documents = make_documents()
  plan, batch = packed(documents)
  seen = set()
  for row in range(plan.rows):
    pieces = plan.document[plan.row_starts[row] : plan.row_starts[row + 1]]
    at = 0
    own = []
    for document in pieces:
      seen.add(int(document))
      stream = documents.stream(document)
      span = slice(at, at + len(stream) - 1)
      np.testing.assert_array_equal(batch['tokens'][row, span], stream[:-1])
      np.testing.assert_array_equal(batch['targets'][row, span], stream[1:])
      at += len(stream) - 1
      own += documents.images[document]
    assert not batch['segment_ids'][row, at:].any()
    grids = batch['grids'][row]
    assert [tuple(g) for g in grids[: len(own)].tolist()] == [
      x.grid for x in own
    ]
    assert not grids[len(own) :].any()
    held = np.concatenate([x.patches for x in own]) if own else []
    np.testing.assert_array_equal(batch['patches'][row, : len(held)], held)
    tokens = (batch['tokens'][row] == MEDIA).sum()
    assert tokens == sum(x.tokens for x in own)
  assert seen == set(range(len(documents)))


def test_the_loss_leaves_images_out_and_nothing_else():
  documents = make_documents()
  _, batch = packed(documents)
  counted = batch['loss_mask'] & (batch['targets'] != MEDIA)
  np.testing.assert_array_equal(counted, batch['loss_mask'])
  text = sum(
    len(d) - 1 - len(own) for d, own in zip(documents, documents.images)
  )
  assert batch['loss_mask'].sum() == text
  # The token after an image is predicted from the image's last row.
  after = (batch['tokens'] == MEDIA) & batch['loss_mask']
  assert after.sum() == sum(map(len, documents.images))


def test_rows_keep_to_their_room():
  documents = make_documents(200)
  for room in (Room(36, 1 + 1), Room(72, 2), Room(400, 30)):
    fits = (documents.needs <= np.array(room)).all(1)
    kept = [i for i in range(len(documents)) if fits[i]]
    plan = plan_rows(
      documents.positions[kept], 64, needs=documents.needs[kept], room=room
    )
    for row in range(plan.rows):
      pieces = plan.document[plan.row_starts[row] : plan.row_starts[row + 1]]
      used = documents.needs[kept][pieces].sum(0)
      assert (used <= np.array(room)).all()
      assert documents.positions[kept][pieces].sum() <= 64
    assert sorted(plan.document.tolist()) == list(range(len(kept)))


def test_text_is_packed_as_before():
  lengths = np.random.default_rng(0).integers(1, 200, 300)
  plain = plan_rows(lengths, 128)
  aware = plan_rows(
    lengths, 128, needs=np.zeros((300, 2), int), room=Room(8, 1)
  )
  for name in ('row_starts', 'document', 'start', 'length'):
    np.testing.assert_array_equal(getattr(plain, name), getattr(aware, name))


def test_what_does_not_fit_is_refused_with_what_would():
  documents = make_documents()
  message = r'patches=\d+, images=2 and context=\d+ are needed'
  for context, room in ((64, Room()), (8, ROOM), (64, Room(96, 1))):
    with pytest.raises(ValueError, match=message):
      refuse_images(documents, context, room, 'stage 1')
  corpus = Corpus(TOKENIZER, documents, documents)
  with pytest.raises(ValueError, match='stage 1 has room for patches=0'):
    StagedBatches(corpus, [StageConfig(context=64, batch=2, steps=1)])
  with pytest.raises(ValueError, match='1 placeholders and 0 images'):
    Documents(['x'], [np.array([1, MEDIA])], [[]], MEDIA)


@pytest.mark.parametrize(
  'fields, message',
  [
    (dict(patches=6, images=1), 'a multiple of 4'),
    (dict(patches=8), 'must both be given'),
    (dict(images=-1), 'use 0 for text alone'),
  ],
)
def test_stages_refuse_room_that_is_none(fields, message):
  with pytest.raises(ValueError, match=message):
    StageConfig(context=8, batch=1, steps=1, **fields)


def test_batches_are_the_same_on_every_host_and_after_resuming():
  documents = make_documents(100)
  stage = StageConfig(context=48, batch=4, steps=20, patches=96, images=3)
  batches = StagedBatches(Corpus(TOKENIZER, documents, documents), [stage])
  whole = batches.batch_at(17)
  assert whole['patches'].shape == (4, 96, 3, 14, 14)
  for host in range(2):
    part = batches.batch_at(17, host, 2)
    for name, x in part.items():
      np.testing.assert_array_equal(x, whole[name][2 * host : 2 * host + 2])


def write_lines(tmp_path, *records):
  lines = '\n'.join(map(json.dumps, records))
  (tmp_path / 'data.jsonl').write_text(lines)
  return str(tmp_path / 'data.jsonl')


def test_files_named_in_jsonl_are_read(tmp_path):
  (tmp_path / 'img').mkdir()
  Image.new('RGB', (40, 20), 'red').save(tmp_path / 'img' / 'a.png')
  path = write_lines(
    tmp_path,
    {'text': f'see {PLACEHOLDER} here', 'images': ['img/a.png']},
    {'text': 'plain text'},
  )
  first, second = read_documents(path)
  assert first.images[0].grid == (1, 2, 4) and second.images == ()
  ids = encode_with_images(TOKENIZER, first.text)
  assert (ids == MEDIA).sum() == 1 and len(ids) == len('see  here') + 1


@pytest.mark.parametrize(
  'record, message',
  [
    (dict(text='x', images=['a.png']), 'has 0 .* and "images" names 1'),
    (dict(text=PLACEHOLDER, images='a.png'), 'must be a list of file names'),
    (dict(text=PLACEHOLDER, images=['no.png']), r"no\.png' cannot be read"),
  ],
)
def test_bad_lines_name_their_place(tmp_path, record, message):
  path = write_lines(tmp_path, {'text': 'fine'}, record)
  with pytest.raises(ValueError, match=rf'data\.jsonl:2: .*{message}'):
    read_documents(path)


def test_a_tokenizer_without_a_placeholder_is_refused():
  class Plain(ByteTokenizer):
    media_id = None

  with pytest.raises(ValueError, match='the tokenizer has no token'):
    encode_with_images(Plain(), PLACEHOLDER)
  assert len(encode_with_images(Plain(), 'text')) == 4


def test_the_fingerprint_sees_pixels():
  def fingerprint(seed):
    documents = Documents(
      ['x'], [np.array([1, MEDIA])], [[medium(seed)]], MEDIA
    )
    return Corpus(TOKENIZER, documents, documents).fingerprint

  assert fingerprint(0) == fingerprint(0) != fingerprint(1)


@pytest.fixture(scope='module')
def material():
  return pictures.load_material()


def test_pictures_are_reproducible_and_split_by_scan(material, monkeypatch):
  monkeypatch.setattr(pictures, 'load_material', lambda: material)
  documents = pictures.read_pictures(0.2, seed=1, count=30)
  again = pictures.read_pictures(0.2, seed=1, count=30)
  assert [d.text for d in documents] == [d.text for d in again]
  drawn = [d for d in documents if d.images]
  assert len(drawn) == 30 and len(documents) > 40
  assert {d.images[0].grid for d in drawn} == {(1, 4, 4)}
  held = pictures.heldout_scans(len(material.labels))
  assert 0.15 < held.mean() < 0.25
  # Scans that the other side may show are never drawn.
  marked = material._replace(labels=np.where(held, 7, 1))
  for heldout in (False, True):
    rng = np.random.default_rng(0)
    texts = [pictures.draw_digits(rng, marked, heldout)[1] for _ in range(20)]
    said = set(''.join(t.split('>')[1].split('.')[0] for t in texts)) - {'-'}
    assert said == {'7' if heldout else '1'}


def test_the_configuration_reads_pictures(material, monkeypatch):
  monkeypatch.setattr(pictures, 'load_material', lambda: material)
  monkeypatch.setattr(pictures, 'COUNT', 40)
  corpus = load_corpus(DataConfig(source='pictures', heldout_fraction=0.3))
  assert corpus.train.has_images and corpus.heldout.has_images
  room = Room(64, 4)
  batches = corpus.heldout_batches(128, 50, 4, room)
  batch = {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}
  found = list(answers(batch, batch['targets'], TOKENIZER))
  assert found and all(x.right and x.got == x.want for x in found)
  assert {x.question for x in found} == {'What is it', 'How many digits'}
  result = score(found)
  assert result.keys() == {
    'What is it? In digits',
    'What is it? In a word',
    'How many digits? In digits',
  }
  assert all(r['right'] == 1 == r['characters'] for r in result.values())
  assert all(0 < r['chance'] < 1 for r in result.values())
  assert len(found) == 2 * int((batch['grids'][..., 0] > 0).sum())
  wrong = [x for x in answers(batch, 0 * batch['targets'], TOKENIZER)]
  assert score(wrong)['What is it? In digits']['right'] == 0
  shown = examples([found[:4], found[4:]], 3)
  assert [x['place'][0] for x in shown] == [0, 1, 1]
  assert [len(x['answers']) for x in shown] == [2, 2, 2]
  _, row, number = shown[0]['place']
  assert list(row_images(batch, row))[number].shape == (56, 56, 3)


def test_without_scikit_learn_there_is_one_error(monkeypatch):
  monkeypatch.setitem(__import__('sys').modules, 'sklearn', None)
  with pytest.raises(ValueError, match='needs scikit-learn; install it'):
    pictures.read_pictures(0.1, 0)
