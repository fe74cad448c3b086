"""Images inside the model: order, isolation, causality, gradients, meshes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import FAST_COMPILE, random_weights, small_config

from pallas_kernels.testing import relative_rms
from trimoe_jax import sharding
from trimoe_jax.config import VisionConfig
from trimoe_jax.model.media import Media, feature_rows
from trimoe_jax.model.model import Model
from trimoe_jax.model.vision import image_features
from trimoe_jax.optim import groups

MEDIA = 39
VISION = VisionConfig(
  width=16,
  layers=2,
  heads=2,
  head_dim=8,
  hidden=24,
  rows=5,
  columns=3,
  placeholder=MEDIA,
  block_size=8,
)
CONFIG = small_config(vision=VISION)
GRIDS = [(1, 2, 4), (2, 2, 2), (1, 4, 2), (1, 2, 2)]


@pytest.fixture(autouse=True)
def _float64():
  with jax.enable_x64(True):
    yield


def patches(number):
  rng = np.random.default_rng(number)
  count = int(np.prod(GRIDS[number]))
  return rng.standard_normal((count, 3, 14, 14))


def media(rows, room=32, slots=3):
  """Media packed into rows, given by their numbers."""
  pixels = np.full((len(rows), room, 3, 14, 14), 7.0)
  grids = np.zeros((len(rows), slots, 3), np.int32)
  for b, row in enumerate(rows):
    own = np.concatenate([patches(n) for n in row]) if row else np.zeros((0,))
    pixels[b, : len(own)] = own.reshape(-1, 3, 14, 14)
    grids[b, : len(row)] = [GRIDS[n] for n in row]
  return Media(jnp.asarray(pixels), jnp.asarray(grids))


def stream(*parts):
  """Ids of a document: ints are tokens, strings media by number."""
  ids = []
  for part in parts:
    if isinstance(part, str):
      ids += [MEDIA] * (GRIDS[int(part)][1] * GRIDS[int(part)][2] // 4)
    else:
      ids.append(part)
  return ids


FIRST = stream(3, 4, '0', 5, 6, '1', 7)
SECOND = stream(8, '2', 9, 10)
THIRD = stream(11, 12, 13, '3', 14)


def packed(*documents, length=32):
  """One row of documents, and its segment ids."""
  ids, segments = np.zeros((2, 1, length), np.int32)
  at = 0
  for number, document in enumerate(documents, start=1):
    ids[0, at : at + len(document)] = document
    segments[0, at : at + len(document)] = number
    at += len(document)
  return ids, segments


def run(function, *args):
  return jax.jit(function, compiler_options=FAST_COMPILE)(*args)


def hidden(params, state, ids, segments, images):
  return Model(CONFIG).apply(
    {'params': params}, ids, state, segments, images=images, method='hidden'
  )[0]


@pytest.fixture(scope='module')
def weights():
  with jax.enable_x64(True):
    return random_weights(CONFIG)


def test_what_shares_a_row_changes_nothing(weights):
  whole = run(hidden, *weights, *packed(FIRST, SECOND), media([[0, 1, 2]]))
  first = run(hidden, *weights, *packed(FIRST), media([[0, 1]]))
  second = run(hidden, *weights, *packed(SECOND), media([[2]]))
  n, m = len(FIRST), len(SECOND)
  assert relative_rms(whole[:, :n], first[:, :n]) < 1e-12
  assert relative_rms(whole[:, n : n + m], second[:, :m]) < 1e-12


@pytest.mark.slow
def test_one_placeholder_and_repeated_ones_are_the_same(weights):
  params, state = weights
  ids, segments = packed(FIRST, SECOND)
  h_btd = run(hidden, params, state, ids, segments, media([[0, 1, 2]]))
  short = np.array([[3, 4, MEDIA, 5, 6, MEDIA, 7, 8, MEDIA, 9, 10, 0, 0]])
  short_segments = np.array([[1] * 7 + [2] * 4 + [0] * 2], np.int32)
  call = lambda params, ids, segments, images, head: (
    Model(CONFIG).apply(
      {'params': params},
      ids,
      state,
      images=images,
      segment_ids=segments,
      length=32,
    ),
    head @ params['head'],
  )
  got, want = run(
    call,
    params,
    short.astype(np.int32),
    short_segments,
    media([[0, 1, 2]]),
    h_btd,
  )
  real = segments[0] > 0
  assert relative_rms(got[:, real], want[:, real]) < 1e-12


def test_an_image_is_seen_from_its_place_on_and_by_its_document_alone(weights):
  ids, segments = packed(FIRST, SECOND)
  images = media([[0, 1, 2]])
  changed = images.replace(patches=images.patches.at[0, 10, 0, 3, 3].add(1.0))
  before = run(hidden, *weights, ids, segments, images)
  after = run(hidden, *weights, ids, segments, changed)
  differs = np.asarray(jnp.any(before != after, axis=-1))[0]
  place = FIRST.index(MEDIA, 5)  # the second image of the first document
  assert not differs[:place].any() and differs[place : len(FIRST)].all()
  assert not differs[len(FIRST) :].any()


@pytest.mark.parametrize(
  'through_text', [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_every_parameter_of_the_tower_learns(weights, through_text):
  params, state = weights
  ids, segments = packed(FIRST, SECOND)
  weight = np.random.default_rng(1).standard_normal((1, 32, CONFIG.width))
  images = media([[0, 1, 2]])

  def loss(vision):
    if not through_text:
      features_bjd = image_features(vision, images, CONFIG)
      return jnp.sum(weight[:, : features_bjd.shape[1]] * features_bjd)
    h_btd = hidden(params | {'vision': vision}, state, ids, segments, images)
    return jnp.sum(weight * h_btd)

  grads = run(jax.grad(loss), params['vision'])
  groups.check({'vision': grads})
  for path, grad in jax.tree_util.tree_leaves_with_path(grads):
    assert np.isfinite(grad).all() and jnp.any(grad != 0), path
  # Finite differences along a random direction.
  rng = np.random.default_rng(2)
  direction = jax.tree.map(
    lambda x: jnp.asarray(rng.standard_normal(x.shape)), grads
  )
  move = lambda t: jax.tree.map(
    lambda p, d: p + t * d, params['vision'], direction
  )
  at = jax.jit(lambda t: loss(move(t)), compiler_options=FAST_COMPILE)
  slope = (at(1e-5) - at(-1e-5)) / 2e-5
  inner = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, grads, direction)))
  np.testing.assert_allclose(slope, inner, rtol=1e-6)


def assert_same(got, want):
  for (path, x), y in zip(
    jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want)
  ):
    assert relative_rms(x, y) < 1e-11, path


# 3 heads: the tensor axis does not divide them.
@pytest.mark.parametrize('heads', [3, pytest.param(2, marks=pytest.mark.slow)])
def test_the_tower_is_the_same_on_a_mesh(heads):
  vision = dataclasses.replace(VISION, layers=1, heads=heads)
  config = small_config(vision=vision, remat='block')
  params = random_weights(config)[0]['vision']
  images = media([[0, 1, 2], [3, 3]])
  weight = np.random.default_rng(1).standard_normal((2, 8, config.width))

  def loss(params, images):
    features_bjd = image_features(params, images, config)
    return jnp.sum(
      sharding.constrain(weight, 'batch', None, None) * features_bjd
    )

  step = jax.value_and_grad(loss)
  want = run(step, params, images)
  with jax.set_mesh(sharding.make_mesh({'data': 2, 'context': 2, 'tensor': 2})):
    assert_same(run(step, params, images), want)


@pytest.mark.slow
@pytest.mark.parametrize(
  'sizes', [{'context': 2, 'expert': 2}, {'data': 2, 'context': 2, 'tensor': 2}]
)
def test_a_model_with_images_is_the_same_on_a_mesh(weights, sizes):
  params, state = weights
  rows = [packed(FIRST, SECOND), packed(THIRD, THIRD)]
  ids, segments = (np.concatenate(x) for x in zip(*rows))
  images = media([[0, 1, 2], [3, 3]])
  weight = np.random.default_rng(1).standard_normal((2, 32, CONFIG.width))

  def loss(params, ids, segments, images):
    h_btd = hidden(params, state, ids, segments, images)
    return jnp.sum(sharding.constrain(weight, 'batch', 'seq', None) * h_btd)

  step = jax.value_and_grad(loss)
  want = run(step, params, ids, segments, images)
  with jax.set_mesh(sharding.make_mesh(sizes)):
    assert_same(run(step, params, ids, segments, images), want)


def test_feature_rows_continue_after_earlier_tokens():
  tokens = jnp.array([[1, MEDIA, MEDIA, 2, MEDIA], [MEDIA, 3, 4, 5, MEDIA]])
  rows = feature_rows(tokens, MEDIA, jnp.array([0, 3]))
  np.testing.assert_array_equal(rows, [[-1, 0, 1, -1, 2], [3, -1, -1, -1, 4]])


def test_a_tower_that_cannot_be_is_refused():
  with pytest.raises(ValueError, match='head_dim=6 is not a multiple of 4'):
    VisionConfig(head_dim=6)
  with pytest.raises(ValueError, match='width=15 is odd'):
    VisionConfig(width=15)
  with pytest.raises(ValueError, match='vision.layers=0; use 1 or more'):
    VisionConfig(layers=0)
