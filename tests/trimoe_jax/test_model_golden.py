"""The model against the released code's numbers and against a plain network."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import (
  FAST_COMPILE,
  random_tokens,
  random_weights,
  small_config,
)
from text_tower import Tower, weights

from experiments.configs import as_dict, k3
from pallas_kernels.testing import relative_rms
from trimoe_jax.config import TrainConfig, from_dict
from trimoe_jax.interop import hf
from trimoe_jax.model import layout
from trimoe_jax.model.kda import kda_layer
from trimoe_jax.model.latent_moe import moe_layer
from trimoe_jax.model.mla import mla_layer
from trimoe_jax.model.mlp import mlp
from trimoe_jax.model.model import Model, count_parameters
from trimoe_jax.model.norm import rms_norm

FOLDER = pathlib.Path(__file__).parents[1] / 'golden' / 'tiny_checkpoint'
MODULE_TOLERANCE = 1e-5
LOGITS_TOLERANCE = 1e-3


@pytest.fixture(scope='module')
def golden():
  return dict(np.load(FOLDER / 'golden.npz'))


@pytest.fixture(scope='module')
def checkpoint():
  loaded = hf.load(FOLDER)
  config = dataclasses.replace(loaded.config, dtype='float32')
  return loaded._replace(
    config=config, params=jax.tree.map(jnp.asarray, loaded.params)
  )


@pytest.fixture(scope='module')
def forward(checkpoint, golden):
  """Logits of the golden tokens, and what the layers report."""
  config, params, state = checkpoint
  model = Model(config)

  @jax.jit
  def run(params, state, ids):
    hidden, aux = model.apply(
      {'params': params}, ids, state, observe=True, method='hidden'
    )
    return model.apply({'params': params}, hidden, method='logits'), aux

  return run(params, state, golden['input_ids'])


def layer(params, config, number):
  """The parameters of one layer, unstacked."""
  path, index = layout.layer_addresses(config)[number]
  for key in path:
    params = params[key]
  return jax.tree.map(lambda x: x[index], params)


def module_error(checkpoint, golden, name, config=None):
  """Relative error of a module's output for the golden input."""
  config, state = config or checkpoint.config, checkpoint.router
  functions = {
    'kda_layer0': lambda p, x: kda_layer(p['kda'], x, config)[0],
    'mla_layer3': lambda p, x: mla_layer(p['mla'], x, config)[0],
    'dense_layer0': lambda p, x: mlp(p['mlp'], x, config),
    'moe_layer1': lambda p, x: moe_layer(
      p['moe'], x, config, state=jax.tree.map(lambda s: s[0], state)
    )[0],
  }
  params = layer(checkpoint.params, config, int(name[-1]))
  got = jax.jit(functions[name])(params, golden[f'{name}_in'])
  return relative_rms(got, golden[f'{name}_out'])


@pytest.mark.parametrize(
  'name', ['kda_layer0', 'mla_layer3', 'dense_layer0', 'moe_layer1']
)
def test_every_module_is_the_released_one(checkpoint, golden, name):
  assert module_error(checkpoint, golden, name) < MODULE_TOLERANCE


def test_the_latent_norms_keep_their_own_epsilon(checkpoint, golden):
  config = checkpoint.config
  right, wrong = (
    module_error(
      checkpoint,
      golden,
      'mla_layer3',
      dataclasses.replace(config, latent_norm_eps=eps),
    )
    for eps in (config.latent_norm_eps, config.norm_eps)
  )
  assert wrong > 10 * right


def test_logits_and_loss_are_the_released_ones(forward, golden):
  logits = np.asarray(forward[0], np.float64)
  assert relative_rms(logits, golden['logits']) < LOGITS_TOLERANCE
  shifted = logits - logits.max(-1, keepdims=True)
  logp = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
  targets = golden['input_ids'][:, 1:, None]
  loss = -np.take_along_axis(logp[:, :-1], targets, -1).mean()
  np.testing.assert_allclose(loss, golden['loss'], rtol=1e-5)


def test_tokens_reach_the_same_experts(forward, golden):
  tower = Tower()
  tower.logits(golden['input_ids'], weights())
  load = np.asarray(forward[1].router.load.sum(1))
  np.testing.assert_array_equal(load, [tower.load[i] for i in range(1, 8)])


def test_k3_has_the_reported_parameters():
  config = from_dict(TrainConfig, as_dict(k3.get_config())).model
  count = count_parameters(config)
  assert count.total == 2_779_484_476_000
  assert count.active == 104_189_612_640
  assert count.vision == 401_214_464 + 46_144_512
  assert config.sources == 9


def plain_logits(params, state, ids, config):
  """A pre-norm residual network of the same sublayers, without any mixing."""
  x, moe_number = params['embedding'][ids], 0
  for i in range(config.layers):
    p = layer(params, config, i)
    h = rms_norm(x, p['attention_norm'], config.norm_eps)
    if config.mixer(i) == 'kda':
      x = x + kda_layer(p['kda'], h, config)[0]
    else:
      x = x + mla_layer(p['mla'], h, config)[0]
    h = rms_norm(x, p['ffn_norm'], config.norm_eps)
    if config.ffn(i) == 'dense':
      x = x + mlp(p['mlp'], h, config)
    else:
      own = jax.tree.map(lambda s, n=moe_number: s[n], state)
      x = x + moe_layer(p['moe'], h, config, state=own)[0]
      moe_number += 1
  return rms_norm(x, params['final_norm'], config.norm_eps) @ params['head']


def test_zero_depth_queries_make_a_plain_residual_network():
  # A mean differs from a sum by the norm's epsilon only, so it is tiny here.
  config = small_config(norm_eps=1e-12)
  with jax.enable_x64(True):
    params, state = random_weights(config)
    ids = random_tokens((2, 9))
    params = jax.tree_util.tree_map_with_path(
      lambda path, x: 0 * x if is_depth_query(path) else x, params
    )
    run = jax.jit(
      lambda params: (
        Model(config).apply({'params': params}, ids, router=state),
        plain_logits(params, state, ids, config),
      ),
      compiler_options=FAST_COMPILE,
    )
    got, want = run(params)
    assert relative_rms(got, want) < 1e-9


def is_depth_query(path) -> bool:
  keys = [getattr(entry, 'key', None) for entry in path]
  return keys[-1] == 'query' and keys[-2].endswith('_mix')
