"""Prompts with images: packed, read in pieces, and the released logits."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.testing import relative_rms
from trimoe_jax import sampling
from trimoe_jax.data.images import Medium, from_array
from trimoe_jax.interop import hf
from trimoe_jax.model.model import Model
from trimoe_jax.sampling import sample

FOLDER = pathlib.Path(__file__).parents[1] / 'golden' / 'tiny_checkpoint'
PLACEHOLDER = 99


def medium(height, width, seed=0):
  shape = (height, width, 3)
  pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
  return from_array(pixels)


def test_placeholders_become_as_many_tokens_as_their_images():
  rows = [np.array([1, 99, 2, 99]), np.array([3])]
  first, second = medium(28, 56), medium(28, 28)
  got = sampling.pack(rows, [[first, second], []], placeholder=PLACEHOLDER)
  np.testing.assert_array_equal(
    got.tokens, [[1, 99, 99, 2, 99], [0, 0, 0, 0, 3]]
  )
  np.testing.assert_array_equal(got.valid, got.tokens > 0)
  count = len(first.patches)
  np.testing.assert_array_equal(got.images.patches[0, :count], first.patches)
  np.testing.assert_array_equal(
    got.images.patches[0, count : count + 4], second.patches
  )
  assert got.images.grids.tolist() == [
    [list(first.grid), list(second.grid)],
    [[0, 0, 0]] * 2,
  ]


def test_images_that_do_not_fit_are_refused():
  with pytest.raises(ValueError, match='prompt 0 has 1 placeholders and 0'):
    sampling.pack([np.array([99])], [[]], placeholder=PLACEHOLDER)
  with pytest.raises(ValueError, match='no tokens'):
    sampling.pack([np.array([], int)])


@pytest.mark.slow
def test_the_golden_checkpoint_reads_its_image(monkeypatch):
  golden = np.load(FOLDER / 'golden.npz')
  loaded = hf.load(FOLDER)
  config = dataclasses.replace(loaded.config, dtype='float32')
  model = Model(config)
  grid = tuple(map(int, golden['grids_thw'][0]))
  patches = golden['pixel_patches'][: np.prod(grid)]
  prompts = sampling.pack(
    golden['mm_input_ids'],
    [[Medium(patches, grid, (0, 0))]],
    placeholder=PLACEHOLDER,
  )
  weights = jax.tree.map(jnp.asarray, loaded.params), loaded.router
  monkeypatch.setattr(sample, 'PIECE', 16)  # the image crosses a boundary
  assert prompts.tokens.shape == (1, 31)
  state = sampling.start(
    model,
    weights,
    prompts.tokens,
    valid=prompts.valid,
    images=prompts.images,
    key=jax.random.key(0),
    max_tokens=8,
  )
  assert relative_rms(state.logits, golden['mm_logits'][:, -1]) < 1e-3
