"""Small pictures with questions, made of what scikit-learn ships.

A picture is 56 x 56 pixels, four tokens. Most hold one to four handwritten
digits (scikit-learn's 1,797 scans) in colour on a coloured ground; the others
are cuts from three photographs: scikit-learn's temple and flower and, from
matplotlib, the portrait of Grace Hopper. Each comes with two questions, the
first before it, and their answers: `What is it? <picture>4-17. How many digits?
3.`, cell by cell with a dash for an empty one, or `temple`. scikit-learn's
descriptions of its data sets are documents of text alone. Held-out pictures
show digits and parts of photographs that no picture for training shows.
"""

from __future__ import annotations

import importlib.resources
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from trimoe_jax.data import images
from trimoe_jax.data.sources import Document, is_heldout
from trimoe_jax.data.tokenizer import PLACEHOLDER

SIZE = 56  # pixels along each side of a picture
CELL = SIZE // 2  # each of the four cells has at most one digit
DIGIT = 24  # pixels along each side of a digit, three times the scan's
COUNT = 8_000  # pictures
PHOTO_SHARE = 0.2
SHARES = (0.4, 0.3, 0.2, 0.1)  # of pictures with one to four digits
HELDOUT_DIGITS = 5  # every fifth scan
# Of a photograph's width; pictures for training are cut from the left of it.
HELDOUT_FROM = 2 / 3


class Material(NamedTuple):
  """What pictures are made of.

  Attributes:
    digits: [scans, 24, 24] in [0, 1], the ink.
    labels: [scans].
    photos: name -> [H, W, 3] uint8.
    texts: name -> description.
  """

  digits: np.ndarray
  labels: np.ndarray
  photos: dict[str, np.ndarray]
  texts: dict[str, str]


def read_pictures(
  heldout_fraction: float, seed: int, count: int | None = None
) -> list[Document]:
  """The descriptions, and `count` pictures with their questions.

  Args:
    heldout_fraction: of `sources.is_heldout`, by which the paths fall on one
      side; a picture is made from that side's digits and parts of photographs.
    seed: with the number of a picture decides it.
    count: pictures; None: COUNT.

  Raises:
    ValueError: scikit-learn is not installed.
  """
  material = load_material()
  documents = [Document(name, text) for name, text in material.texts.items()]
  for number in range(COUNT if count is None else count):
    path = f'picture/{number}'
    heldout = is_heldout(path, heldout_fraction)
    rng = np.random.default_rng([seed, number])
    draw = draw_photo if rng.random() < PHOTO_SHARE else draw_digits
    pixels, text = draw(rng, material, heldout)
    medium = images.from_array(pixels)
    documents.append(Document(path, text, (medium,)))
  return documents


def load_material() -> Material:
  """Reads the packages' files.

  Raises:
    ValueError: scikit-learn is not installed.
  """
  try:
    from sklearn import datasets
  except ImportError as error:
    raise ValueError(
      "data.source='pictures' needs scikit-learn; install it with "
      "`pip install -e '.[images]'`."
    ) from error
  scans = datasets.load_digits()
  digits = [
    np.asarray(_resize(Image.fromarray(scan.astype(np.float32) / 16), DIGIT))
    for scan in scans.images
  ]
  descriptions = importlib.resources.files(datasets) / 'descr'
  return Material(
    digits=np.clip(np.stack(digits), 0, 1),
    labels=np.asarray(scans.target),
    photos={
      'temple': datasets.load_sample_image('china.jpg'),
      'flower': datasets.load_sample_image('flower.jpg'),
      'portrait': _portrait(),
    },
    texts={
      path.name: path.read_text(encoding='utf-8')
      for path in sorted(descriptions.iterdir(), key=lambda path: path.name)
      if path.name.endswith('.rst')
    },
  )


def _portrait() -> np.ndarray:
  import matplotlib

  path = f'{matplotlib.get_data_path()}/sample_data/grace_hopper.jpg'
  with Image.open(path) as image:
    return np.asarray(image.convert('RGB'))


def _resize(image: Any, size: int) -> Image.Image:
  return image.resize((size, size), Image.Resampling.BICUBIC)


def ask(answer: str, digits: int) -> str:
  """The text of one picture: what it shows, and how many digits."""
  return f'What is it? {PLACEHOLDER}{answer}. How many digits? {digits}.'


def heldout_scans(count: int) -> np.ndarray:
  """Which of the scans only held-out pictures show, bool [count]."""
  return np.arange(count) % HELDOUT_DIGITS == 0


def draw_digits(
  rng: np.random.Generator, material: Material, heldout: bool
) -> tuple[np.ndarray, str]:
  """A picture [56, 56, 3] of one to four digits, and its questions."""
  pool = np.flatnonzero(heldout_scans(len(material.labels)) == heldout)
  count = 1 + int(np.searchsorted(np.cumsum(SHARES), rng.random()))
  cells = np.sort(rng.permutation(4)[:count])
  chosen = rng.choice(pool, len(cells))
  ground = rng.integers(0, 90, 3)
  pixels = np.broadcast_to(ground, (SIZE, SIZE, 3)).astype(np.float64)
  for cell, scan in zip(cells, chosen):
    at = CELL * np.array(divmod(cell, 2)) + rng.integers(0, CELL - DIGIT + 1, 2)
    colour = rng.integers(140, 256, 3)
    ink = material.digits[scan][..., None]
    part = pixels[at[0] : at[0] + DIGIT, at[1] : at[1] + DIGIT]
    part += ink * (colour - part)
  read = dict(zip(cells.tolist(), material.labels[chosen].tolist()))
  digits = ''.join(str(read.get(cell, '-')) for cell in range(4))
  text = ask(digits, len(cells))
  return np.round(pixels).astype(np.uint8), text


def draw_photo(
  rng: np.random.Generator, material: Material, heldout: bool
) -> tuple[np.ndarray, str]:
  """A picture [56, 56, 3] cut from a photograph, and its questions."""
  names = sorted(material.photos)
  name = names[rng.integers(len(names))]
  photo = material.photos[name]
  border = int(photo.shape[1] * HELDOUT_FROM)
  part = photo[:, border:] if heldout else photo[:, :border]
  side = int(rng.integers(SIZE, min(part.shape[:2]) + 1))
  top, left = (int(rng.integers(0, n - side + 1)) for n in part.shape[:2])
  cut = Image.fromarray(part[top : top + side, left : left + side])
  text = ask(name, 0)
  return np.asarray(_resize(cut, SIZE)), text
