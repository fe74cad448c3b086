"""Files and arrays to patches: sizes, kinds of images, and bad files."""

import numpy as np
import pytest
from PIL import Image

from trimoe_jax.data import images

RED, GREEN = (200, 10, 20), (10, 180, 30)


def picture(medium):
  """The padded image back from its patches, [frames, H, W, 3]."""
  frames, rows, columns = medium.grid
  x = medium.patches.reshape(frames, rows, columns, 3, 14, 14)
  x = x.transpose(0, 1, 4, 2, 5, 3)
  return x.reshape(frames, rows * 14, columns * 14, 3)


def halves(width, height):
  """Left half red, right half green."""
  pixels = np.empty((height, width, 3), np.uint8)
  pixels[:, : width // 2], pixels[:, width // 2 :] = RED, GREEN
  return pixels


@pytest.mark.parametrize(
  'size, scaled, grid',
  [
    ((1, 1), (1, 1), (2, 2)),
    ((28, 28), (28, 28), (2, 2)),
    ((29, 28), (29, 28), (2, 4)),
    ((640, 427), (640, 427), (32, 46)),
    ((5000, 20), (5000, 20), (2, 358)),
    ((20_000, 20), (7168, 7), (2, 512)),
    ((3584, 3584), (3584, 3584), (256, 256)),
    ((7168, 7168), (3584, 3584), (256, 256)),
    ((4000, 6000), (2931, 4397), (316, 210)),
    ((10_000, 1), (7168, 1), (2, 512)),
  ],
)
def test_sizes_are_the_released_ones(size, scaled, grid):
  assert images.resized(size) == scaled
  columns, rows = (-(-side // 28) * 2 for side in scaled)
  assert (rows, columns) == grid


def test_no_image_is_much_larger_than_the_limit():
  rng = np.random.default_rng(0)
  for width, height in rng.integers(1, 12_000, (200, 2)):
    w, h = images.resized((int(width), int(height)))
    assert w <= width and h <= height
    # The rule rounds twice: a row or a column of patches may come on top.
    rows, columns = h // 14, w // 14
    assert rows * columns <= images.MAX_PATCHES + rows + columns
    assert max(w, h) <= images.MAX_SIDE * 14


def test_pixels_are_kept_and_padding_is_black(tmp_path):
  pixels = np.random.default_rng(0).integers(0, 256, (30, 45, 3), np.uint8)
  Image.fromarray(pixels).save(tmp_path / 'x.png')
  medium = images.load(tmp_path / 'x.png')
  assert medium.grid == (1, 4, 4) and medium.tokens == 4
  assert medium.size == (45, 30)
  whole = picture(medium)[0]
  np.testing.assert_array_equal(whole[:30, :45], pixels)
  assert not whole[30:].any() and not whole[:, 45:].any()
  np.testing.assert_array_equal(
    images.from_array(pixels).patches, medium.patches
  )


def test_a_large_image_is_scaled_down(tmp_path):
  Image.fromarray(halves(300, 100)).save(tmp_path / 'x.png')
  medium = images.load(tmp_path / 'x.png', max_patches=36)
  assert medium.grid == (1, 4, 12)
  whole = picture(medium)[0]
  assert tuple(whole[5, 5]) == RED and tuple(whole[5, 130]) == GREEN


def test_exif_orientation_is_followed(tmp_path):
  image = Image.fromarray(halves(40, 20))
  exif = image.getexif()
  exif[0x0112] = 6  # to be turned right by 90 degrees
  image.save(tmp_path / 'x.png', exif=exif)
  medium = images.load(tmp_path / 'x.png')
  assert medium.size == (20, 40)
  whole = picture(medium)[0]
  assert tuple(whole[5, 10]) == RED and tuple(whole[35, 10]) == GREEN


def test_jpeg_is_close(tmp_path):
  Image.fromarray(halves(64, 64)).save(tmp_path / 'x.jpg', quality=95)
  whole = picture(images.load(tmp_path / 'x.jpg'))[0].astype(int)
  assert np.abs(whole[30, 10] - RED).max() < 12


def test_other_kinds_become_rgb(tmp_path):
  gray = np.arange(28 * 28, dtype=np.uint16).reshape(28, 28) * 80
  cases = {
    'gray': Image.fromarray((gray >> 8).astype(np.uint8)),
    'wide': Image.fromarray(gray),
    'palette': Image.fromarray(halves(28, 28)).quantize(4),
    'one_bit': Image.fromarray(np.eye(28, dtype=bool)),
    'two': Image.merge('LA', [Image.new('L', (28, 28), n) for n in (90, 255)]),
  }
  whole = {}
  for name, image in cases.items():
    image.save(tmp_path / f'{name}.png')
    whole[name] = picture(images.load(tmp_path / f'{name}.png'))[0]
  want = np.repeat((gray >> 8)[..., None], 3, -1)
  np.testing.assert_array_equal(whole['gray'], want)
  np.testing.assert_array_equal(whole['wide'], want)
  assert np.abs(whole['palette'][3, 3].astype(int) - RED).max() < 8
  assert tuple(whole['one_bit'][3, 3]) == (255, 255, 255)
  assert tuple(whole['one_bit'][3, 4]) == (0, 0, 0)
  assert (whole['two'] == 90).all()
  np.testing.assert_array_equal(picture(images.from_array(gray))[0], want)


def test_transparent_pixels_are_white(tmp_path):
  pixels = np.zeros((28, 28, 4), np.uint8)
  pixels[..., :3] = RED
  pixels[:14, :, 3] = 255
  pixels[14, :, 3] = 128
  Image.fromarray(pixels).save(tmp_path / 'x.png')
  whole = picture(images.load(tmp_path / 'x.png'))[0]
  assert tuple(whole[0, 0]) == RED and tuple(whole[27, 0]) == (255, 255, 255)
  assert abs(int(whole[14, 0, 1]) - 132) <= 1
  palette = Image.fromarray(halves(28, 28)).quantize(4)
  clear = palette.getpixel((20, 20))
  palette.save(tmp_path / 'p.png', transparency=clear)
  whole = picture(images.load(tmp_path / 'p.png'))[0]
  assert tuple(whole[20, 20]) == (255, 255, 255)


def test_frames_become_one_medium():
  frames = np.stack([halves(56, 28), halves(56, 28)[:, ::-1]])
  medium = images.from_array(frames)
  assert medium.grid == (2, 2, 4) and medium.tokens == 2
  np.testing.assert_array_equal(picture(medium), frames)


def test_bad_files_are_one_error_with_their_name(tmp_path):
  Image.fromarray(halves(200, 200)).save(tmp_path / 'whole.png')
  Image.fromarray(halves(200, 200)).save(tmp_path / 'whole.jpg')
  for kind in ('png', 'jpg'):
    data = (tmp_path / f'whole.{kind}').read_bytes()
    (tmp_path / f'cut.{kind}').write_bytes(data[: len(data) // 2])
  (tmp_path / 'text.png').write_text('not an image')
  (tmp_path / 'empty.png').write_bytes(b'')
  Image.fromarray(np.zeros((4, 4), np.float32)).save(tmp_path / 'float.tiff')
  for name in (
    'cut.png',
    'cut.jpg',
    'text.png',
    'empty.png',
    'absent.png',
    'float.tiff',
  ):
    with pytest.raises(ValueError, match=rf"image '.*{name}' cannot be read"):
      images.load(tmp_path / name)


def test_a_decompression_bomb_is_refused(tmp_path, monkeypatch):
  Image.fromarray(halves(200, 200)).save(tmp_path / 'x.png')
  monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 30_000)
  with pytest.raises(ValueError, match=r"x\.png' has too many pixels"):
    images.load(tmp_path / 'x.png')


@pytest.mark.parametrize(
  'array, error, message',
  [
    (np.zeros((2, 2, 5), np.uint8), ValueError, r'shape \(2, 2, 5\)'),
    (np.zeros(4, np.uint8), ValueError, r'shape \(4,\)'),
    (np.zeros((0, 4), np.uint8), ValueError, 'none of them empty'),
    (np.zeros((4, 4), np.int64), TypeError, 'dtype int64'),
    (np.full((4, 4), 2.0), ValueError, r'floats must be in \[0, 1\]'),
    (np.full((4, 4), np.nan), ValueError, r'floats must be in \[0, 1\]'),
  ],
)
def test_bad_arrays_are_refused(array, error, message):
  with pytest.raises(error, match=message):
    images.from_array(array)


def test_markup_names_the_original_size():
  medium = images.from_array(halves(40, 20))
  assert images.markup(medium) == (
    '<|media_begin|>image 40x20<|media_content|><|media_pad|><|media_end|>'
  )
