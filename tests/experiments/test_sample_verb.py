"""The sampling verb: prompts and images from flags, streams, mistakes."""

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from PIL import Image

from experiments import sample
from trimoe_jax.config import VisionConfig
from trimoe_jax.data import ByteTokenizer, images
from trimoe_jax.sampling import text

TOKENIZER = ByteTokenizer()
VISION = VisionConfig(placeholder=TOKENIZER.media_id)
PAD = '<|media_pad|>'


@pytest.fixture(autouse=True)
def parsed():
  if not flags.FLAGS.is_parsed():
    flags.FLAGS(['sample', '--prompt=unused'])


@pytest.fixture
def image(tmp_path):
  path = tmp_path / 'image.png'
  Image.fromarray(np.full((28, 56, 3), 200, np.uint8)).save(path)
  return str(path)


def read(prompts, files=(), vision=VISION):
  media = [images.load(path) for path in files]
  return text.read_prompts(prompts, media, tokenizer=TOKENIZER, vision=vision)


def test_prompts_are_padded_on_the_left():
  got = read(['ab', 'abcd'], vision=None)
  bos = TOKENIZER.bos_id
  np.testing.assert_array_equal(
    got.tokens, [[0, 0, bos, 97, 98], [bos, 97, 98, 99, 100]]
  )
  assert got.valid.sum(1).tolist() == [3, 5]
  assert got.images is None


def test_an_image_goes_to_its_placeholder_or_to_the_front(image):
  bos, media = TOKENIZER.bos_id, TOKENIZER.media_id
  got = read([f'a{PAD}b'], [image])
  assert got.tokens.tolist() == [[bos, 97, media, media, 98]]
  got = read(['ab'], [image])
  assert got.tokens.tolist() == [[bos, media, media, 97, 98]]
  assert got.images.grids.tolist() == [[[1, 2, 4]]]
  got = read(['a', f'{PAD}b'], [image])  # dealt out in order
  assert got.images.grids.tolist() == [[[0, 0, 0]], [[1, 2, 4]]]


def test_mistakes_about_images(image, tmp_path):
  with pytest.raises(ValueError, match='no vision tower'):
    read(['a'], [image], vision=None)
  with pytest.raises(ValueError, match='more placeholders than the 1'):
    read([PAD, PAD], [image])
  with pytest.raises(ValueError, match='1 of 1 --image flags have no'):
    read(['a', 'b'], [image])
  with pytest.raises(ValueError, match='cannot be read'):
    read(['a'], [str(tmp_path / 'nothing.png')])


def test_a_stream_brings_whole_characters():
  data = np.frombuffer('größe'.encode(), np.uint8).astype(np.int32)
  pieces = [data[None, :3], data[None, 3:4], data[None, 4:]]
  parts = list(text.text_of(pieces, TOKENIZER))
  assert ''.join(parts) == 'größe'
  assert len(parts) == 3


def test_mistakes_are_one_line(tmp_path):
  with flagsaver.flagsaver(prompt=['a'], workdir=None, checkpoint=None):
    with pytest.raises(SystemExit, match='error: give either --workdir or'):
      sample.main(['sample'])
  missing = str(tmp_path / 'none')
  with flagsaver.flagsaver(prompt=['a'], workdir=None, checkpoint=missing):
    with pytest.raises(SystemExit, match='error: '):
      sample.main(['sample'])
  with flagsaver.flagsaver(prompt=['a', 'b'], stream=True, workdir=missing):
    with pytest.raises(SystemExit, match='--stream prints one prompt'):
      sample.main(['sample'])
