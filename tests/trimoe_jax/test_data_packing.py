"""Packing: nothing lost, nothing twice, no target from another document."""

import numpy as np
import pytest

from trimoe_jax.data.corpus import Corpus, load_corpus, tokenise
from trimoe_jax.data.packing import (
  Documents,
  gather_rows,
  plan_rows,
  refuse_long,
)
from trimoe_jax.data.sources import DataConfig, Document
from trimoe_jax.data.tokenizer import ByteTokenizer

PAD = 0


def make_documents(lengths):
  """Documents whose tokens are all different, so that each names its place."""
  first = 1
  documents = []
  for length in lengths:
    documents.append(np.arange(first, first + length, dtype=np.int32))
    first += length
  return Documents([f'{n}.txt' for n in range(len(lengths))], documents)


def random_documents(seed=0, count=60, longest=90):
  rng = np.random.default_rng(seed)
  return make_documents(rng.integers(2, longest, count))


def whole_epoch(documents, context, **options):
  plan = plan_rows(documents.positions, context, **options)
  return plan, gather_rows(documents, plan, range(plan.rows), PAD)


def test_documents_are_a_sequence():
  documents = make_documents([3, 2, 5])
  assert [len(document) for document in documents] == [3, 2, 5]
  np.testing.assert_array_equal(documents[1], [4, 5])
  np.testing.assert_array_equal(documents[-1], documents[2])
  np.testing.assert_array_equal(documents.positions, [2, 1, 4])
  with pytest.raises(IndexError):
    documents[3]


@pytest.mark.parametrize('context', [1, 7, 16, 88, 200, 10_000])
def test_every_token_is_an_input_and_a_target_once(context):
  documents = random_documents()
  _, batch = whole_epoch(documents, context)
  mask = batch['loss_mask']
  starts = set(documents.offsets[:-1] + 1)
  ends = set(documents.offsets[1:])
  everything = set(range(1, len(documents.tokens) + 1))
  inputs, targets = batch['tokens'][mask], batch['targets'][mask]
  assert len(set(inputs)) == len(inputs)
  assert set(inputs) == everything - ends
  assert len(set(targets)) == len(targets)
  assert set(targets) == everything - starts


@pytest.mark.parametrize('context', [7, 33])
def test_segments_are_contiguous_pieces_of_one_document(context):
  documents = random_documents(1)
  _, batch = whole_epoch(documents, context)
  document_of = np.repeat(np.arange(len(documents)), np.diff(documents.offsets))
  for tokens, targets, segments in zip(
    batch['tokens'], batch['targets'], batch['segment_ids']
  ):
    used = segments > 0
    assert not used[np.argmin(used) :].any() or used.all()
    assert set(segments[used]) == set(range(1, segments.max() + 1))
    assert (np.diff(segments[used]) >= 0).all()
    for segment in range(1, segments.max() + 1):
      piece = tokens[segments == segment]
      np.testing.assert_array_equal(np.diff(piece), 1)
      np.testing.assert_array_equal(targets[segments == segment], piece + 1)
      assert len(set(document_of[piece - 1])) == 1
      # Targets stay in the document: the last one is not the next one's first.
      assert document_of[piece[-1]] == document_of[piece[0] - 1]
    assert (tokens[~used] == PAD).all() and (targets[~used] == PAD).all()


def test_batch_types():
  _, batch = whole_epoch(random_documents(), 32)
  for name in ('tokens', 'targets', 'segment_ids'):
    assert batch[name].dtype == np.int32
  assert batch['loss_mask'].dtype == bool
  np.testing.assert_array_equal(batch['loss_mask'], batch['segment_ids'] > 0)


def test_short_documents_are_never_cut():
  documents = random_documents(2)
  plan, _ = whole_epoch(documents, 40)
  pieces = np.bincount(plan.document, minlength=len(documents))
  np.testing.assert_array_equal(pieces, -(-documents.positions // 40))


def test_long_document_fills_whole_rows_first():
  plan = plan_rows(np.array([25]), 10)
  np.testing.assert_array_equal(plan.length, [10, 10, 5])
  np.testing.assert_array_equal(plan.start, [0, 10, 20])
  assert plan.rows == 3
  assert plan.padding == pytest.approx(1 / 6)


def test_best_fit_leaves_little_padding():
  rng = np.random.default_rng(3)
  plan = plan_rows(rng.integers(1, 200, 2000), 512)
  assert plan.padding < 0.01
  np.testing.assert_array_equal(
    plan.longest_piece(),
    np.maximum.reduceat(plan.length, plan.row_starts[:-1]),
  )


def test_long_repeats_repeat_long_documents_only():
  positions = np.array([5, 10, 23, 9])
  plan = plan_rows(positions, 10, long_repeats=3)
  used = np.bincount(plan.document, weights=plan.length)
  np.testing.assert_array_equal(used, [5, 30, 69, 9])


def test_refusing_long_documents():
  documents = make_documents([11, 40, 12])
  refuse_long(documents, 39, 'stage 1')
  with pytest.raises(
    ValueError, match="'1.txt' has 39 positions, .*context is"
  ):
    refuse_long(documents, 38, 'stage 1')
  with pytest.raises(ValueError, match=r'than stage 2, .* is 10 \(2 of 3'):
    refuse_long(documents, 10, 'stage 2')


def test_documents_are_framed_and_short_ones_left_out():
  tokenizer = ByteTokenizer()
  texts = [Document('a', 'hello'), Document('b', ''), Document('c', 'hi')]
  documents = tokenise('train', texts, tokenizer, 2)
  assert documents.paths == ('a', 'c')
  assert documents.tokens.dtype == np.uint16
  assert documents[0][0] == tokenizer.bos_id
  assert documents[0][-1] == tokenizer.eos_id
  assert tokenizer.decode(documents[1]) == 'hi'
  with pytest.raises(
    ValueError, match='held-out split is empty: each of its 3'
  ):
    tokenise('held-out', texts, tokenizer, 6)


def make_corpus(heldout):
  return Corpus(ByteTokenizer(), make_documents([9]), heldout)


def test_heldout_prefers_long_documents_and_diversity():
  heldout = make_documents([5, 2001, 30, 52, 101, 9])
  rows = make_corpus(heldout).heldout_batches(50, 5)
  document = np.searchsorted(
    heldout.offsets, [row['tokens'][0, 0] for row in rows], side='left'
  )
  # 43 whole rows, 40 of them from one document, which gets one row of three
  # and one of the next two.
  assert set(document[:3] - 1) == {1, 3, 4}
  assert set(document[3:] - 1) == {1, 4}
  assert all(row['loss_mask'].all() for row in rows)


def test_heldout_is_deterministic_and_fills_up():
  heldout = random_documents(4, count=7, longest=30)
  corpus = make_corpus(heldout)
  batches = corpus.heldout_batches(32, 100, batch=4)
  again = make_corpus(heldout).heldout_batches(32, 100, batch=4)
  assert len(batches) == len(again)
  for one, other in zip(batches, again):
    assert one['tokens'].shape == (4, 32)
    for name in one:
      np.testing.assert_array_equal(one[name], other[name])
  masks = np.concatenate([batch['loss_mask'] for batch in batches])
  assert masks.sum() == heldout.positions.sum()
  assert (batches[-1]['tokens'][~batches[-1]['loss_mask']] == 256).all()
  first = corpus.heldout_batches(32, 1, batch=4)
  np.testing.assert_array_equal(first[0]['tokens'], batches[0]['tokens'])
  with pytest.raises(ValueError, match='count=0'):
    corpus.heldout_batches(32, 0)


def test_loading_a_folder(tmp_path):
  for n in range(60):
    (tmp_path / f'{n}.txt').write_text(f'document number {n} says {n * n}\n')
  config = DataConfig(source=str(tmp_path), heldout_fraction=0.2)
  corpus = load_corpus(config)
  assert len(corpus.train) + len(corpus.heldout) == 60
  assert not set(corpus.train.paths) & set(corpus.heldout.paths)
  assert corpus.fingerprint == load_corpus(config).fingerprint
  (tmp_path / '0.txt').write_text('something else altogether\n')
  assert corpus.fingerprint != load_corpus(config).fingerprint
