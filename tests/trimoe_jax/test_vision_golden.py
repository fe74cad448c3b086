"""The vision tower against the released code's numbers."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import FAST_COMPILE

from pallas_kernels.testing import relative_rms
from trimoe_jax.interop import hf
from trimoe_jax.model import vision
from trimoe_jax.model.media import Media
from trimoe_jax.model.model import Model

FOLDER = pathlib.Path(__file__).parents[1] / 'golden' / 'tiny_checkpoint'
MODULE_TOLERANCE = 1e-5
LOGITS_TOLERANCE = 1e-3
TOKENS = 35  # of the three media


@pytest.fixture(scope='module')
def golden():
  return dict(np.load(FOLDER / 'golden.npz'))


@pytest.fixture(scope='module')
def checkpoint():
  loaded = hf.load(FOLDER)
  config = dataclasses.replace(loaded.config, dtype='float32')
  params = jax.tree.map(jnp.asarray, loaded.params)
  return loaded._replace(config=config, params=params)


def packed(golden) -> Media:
  """The three media in one row."""
  return Media(golden['pixel_patches'][None], golden['grids_thw'][None])


@functools.cache
def compiled(config, *shapes):
  """Compiled once for a configuration and shapes, not once a test."""
  del shapes
  run = functools.partial(vision.image_features, config=config)
  return jax.jit(run, compiler_options=FAST_COMPILE)


def features(checkpoint, media, **changes):
  config = checkpoint.config
  tower = dataclasses.replace(config.vision, **changes)
  config = dataclasses.replace(config, vision=tower)
  run = compiled(config, media.patches.shape, media.grids.shape)
  return np.asarray(run(checkpoint.params['vision'], media))


def error(checkpoint, golden, **changes):
  got = features(checkpoint, packed(golden), **changes)[0, :TOKENS]
  return relative_rms(got, golden['image_features'])


def test_the_checkpoint_says_what_the_tower_is(checkpoint):
  tower = checkpoint.config.vision
  assert (tower.width, tower.heads, tower.head_dim) == (32, 3, 16)
  assert tower.placeholder == 99


@pytest.mark.parametrize('block_size', [512, 37])
def test_features_are_the_released_ones(checkpoint, golden, block_size):
  assert error(checkpoint, golden, block_size=block_size) < MODULE_TOLERANCE


def test_media_do_not_see_each_other(checkpoint, golden):
  grids = golden['grids_thw']
  ends = np.cumsum(grids.prod(1))
  for number, end in enumerate(ends):
    start = end - grids[number].prod()
    size = end - start
    patches = np.zeros_like(golden['pixel_patches'])
    patches[:size] = golden['pixel_patches'][start:end]
    own = np.zeros_like(grids)
    own[0] = grids[number]
    alone = Media(patches[None], own[None])
    first = (grids[:number, 1] * grids[:number, 2]).sum() // 4
    count = grids[number, 1] * grids[number, 2] // 4
    got = features(checkpoint, alone)[0, :count]
    want = golden['image_features'][first : first + count]
    assert relative_rms(got, want) < MODULE_TOLERANCE


def test_one_placeholder_becomes_all_rows_of_its_medium(checkpoint, golden):
  config, params, state = checkpoint
  first = Media(
    golden['pixel_patches'][None, :80], golden['grids_thw'][None, :1]
  )
  run = jax.jit(
    lambda params, ids, media: Model(config).apply(
      {'params': params}, ids, state, images=media
    ),
    compiler_options=FAST_COMPILE,
  )
  got = run(params, golden['mm_input_ids'].astype(np.int32), first)
  assert got.shape == golden['mm_logits'].shape == (1, 31, 101)
  assert relative_rms(got, golden['mm_logits']) < LOGITS_TOLERANCE


def _first_frame(original, x, sources, frames):
  return original(x, sources._replace(frames=jnp.minimum(sources.frames, 1)), 1)


def _columns_of_squares(original, x, sources, frames):
  order = jnp.array([0, 2, 1, 3])
  return original(x, sources._replace(first=sources.first[..., order]), frames)


def _row_before_column(original, place, config):
  return original(place._replace(row=place.column, column=place.row), config)


def _halves(original, x, turn):
  pairs = jnp.stack(jnp.split(x, 2, axis=-1), axis=-1).reshape(x.shape)
  turned = original(pairs, turn)
  pairs = turned.reshape(*x.shape[:-1], -1, 2)
  return jnp.concatenate([pairs[..., 0], pairs[..., 1]], axis=-1)


def _corners(original, table, place):
  del original
  return table[place.row % table.shape[0], place.column % table.shape[1]]


def _cosine_first(original, place, width):
  return jnp.roll(original(place, width), width // 2, axis=-1)


def _each_frame_alone(original, q, k, v, bounds, **settings):
  one = 24  # patches of a frame of the second medium, which starts at 80
  at = jnp.arange(q.shape[1])
  frame = 80 + (at - 80) // one * one
  inside = (at >= 80) & (at < 152)
  start = jnp.where(inside, frame, bounds.start)
  end = jnp.where(inside, frame + one, bounds.end)
  return original(q, k, v, type(bounds)(start, end), **settings)


def _tanh(original, params, x, *, approximate):
  del approximate
  return original(params, x, approximate=True)


def _erf(original, params, x, *, approximate):
  del approximate
  return original(params, x, approximate=False)


@pytest.mark.parametrize(
  'name, wrong',
  [
    ('merge', _first_frame),
    ('merge', _columns_of_squares),
    ('rotation', _row_before_column),
    ('rotate', _halves),
    ('grid_position', _corners),
    ('time_position', _cosine_first),
    ('attend_within', _each_frame_alone),
    ('_gelu_mlp', _tanh),
    ('_gelu_mlp', _erf),
  ],
)
def test_a_wrong_detail_is_seen(checkpoint, golden, monkeypatch, name, wrong):
  compiled.cache_clear()
  original = getattr(vision, name)
  monkeypatch.setattr(vision, name, functools.partial(wrong, original))
  assert error(checkpoint, golden) > 3 * MODULE_TOLERANCE
  compiled.cache_clear()


@pytest.mark.parametrize('field', ['norm_eps', 'projector_eps'])
def test_the_norms_keep_their_own_epsilon(checkpoint, golden, field):
  other = {'norm_eps': 1e-5, 'projector_eps': 1e-6}[field]
  right, wrong = (
    error(checkpoint, golden),
    error(checkpoint, golden, **{field: other}),
  )
  assert wrong > 3 * right


def test_a_text_model_refuses_images(checkpoint, golden):
  config = dataclasses.replace(checkpoint.config, vision=None)
  with pytest.raises(ValueError, match='no vision tower; set model.vision'):
    jax.eval_shape(
      lambda ids: Model(config).apply(
        {'params': checkpoint.params}, ids, images=packed(golden)
      ),
      jnp.zeros((1, 4), jnp.int32),
    )
