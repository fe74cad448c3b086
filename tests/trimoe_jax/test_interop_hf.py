"""The released layout: names, sizes, packing, round trips and refusals."""

import dataclasses
import json
import math
import pathlib
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from experiments.configs import as_dict, k3
from trimoe_jax import config as config_module
from trimoe_jax.config import (
  KdaConfig,
  MlaConfig,
  ModelConfig,
  MoeConfig,
  TrainConfig,
  from_dict,
)
from trimoe_jax.interop import hf, hf_config, hf_names, mxfp4, shards
from trimoe_jax.model.model import model_parameters
from trimoe_jax.model.parameters import map_table
from trimoe_jax.model.vision_config import VisionConfig

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'tiny_checkpoint'
LAYER = 'language_model.model.layers.'

# The released config.json knows the model, not how it is rematerialised.
# Without what says how to run the model, which no released file holds.
_K3 = from_dict(TrainConfig, as_dict(k3.get_config())).model
K3 = dataclasses.replace(
  _K3,
  remat='none',
  moe=dataclasses.replace(_K3.moe, dispatch='auto', capacity=None),
)


@pytest.fixture(scope='module')
def loaded():
  return hf.load(GOLDEN)


@pytest.fixture(scope='module')
def raw():
  tensors = {}
  for path in sorted(GOLDEN.glob('*.safetensors')):
    tensors.update(load_file(path))
  return tensors


def write_copy(directory, tensors, *, config=None):
  """A folder with these tensors in one shard and the golden config.json."""
  save_file(tensors, directory / 'model-00001-of-00001.safetensors')
  index = dict.fromkeys(tensors, 'model-00001-of-00001.safetensors')
  (directory / shards.INDEX).write_text(json.dumps({'weight_map': index}))
  config = config or json.loads((GOLDEN / 'config.json').read_text())
  (directory / 'config.json').write_text(json.dumps(config))
  return directory


def assert_same(got, want):
  """Bitwise equality of two checkpoints, dtypes included."""
  assert got.config == want.config
  same = jax.tree.map(
    lambda a, b: (
      np.asarray(a).dtype == np.asarray(b).dtype
      and np.asarray(a).tobytes() == np.asarray(b).tobytes()
    ),
    (got.params, got.router),
    (want.params, want.router),
  )
  assert all(jax.tree.leaves(same)), same


# Names and sizes


def test_k3_names_and_bytes_are_those_of_the_released_index():
  tensors = list(hf_names.tensors(K3))
  names = sum(1 + x.is_expert for x in tensors)
  size = 0
  for tensor in tensors:
    count = math.prod(tensor.stored)
    packed = count // 2 + count // 32
    plain = count * (4 if tensor.wide else 2)
    size += packed if tensor.is_expert else plain
  assert names == 497_220
  assert size == 1_560_860_324_864


def test_every_parameter_has_exactly_one_home():
  config = hf_config.read(GOLDEN)
  table = map_table(lambda p: np.zeros(p.shape, int), model_parameters(config))
  counted = {'params': table, 'router': {'bias': np.zeros((7, 12), int)}}
  for tensor in hf_names.tensors(config):
    leaf = counted
    for key in tensor.path:
      leaf = leaf[key]
    assert leaf[tensor.index].shape == tensor.local
    leaf[tensor.index] += 1
  assert all((leaf == 1).all() for leaf in jax.tree.leaves(counted))


def test_golden_config_is_read():
  config = hf_config.read(GOLDEN)
  assert config == ModelConfig(
    vocab_size=101,
    width=48,
    layers=8,
    mla_layers=(4, 8),
    dense_hidden=72,
    residual_block=3,
    kda=KdaConfig(heads=4, key_dim=16, value_dim=16, gate_rank=16),
    mla=MlaConfig(
      heads=4,
      query_rank=20,
      kv_rank=16,
      nope_dim=16,
      shared_dim=8,
      value_dim=16,
    ),
    moe=MoeConfig(experts=12, top_k=3, shared_experts=2, hidden=32, latent=32),
    vision=VisionConfig(
      width=32,
      layers=3,
      heads=3,
      head_dim=16,
      hidden=64,
      rows=6,
      columns=6,
      placeholder=99,
    ),
  )


def test_k3_config_survives_the_round_trip():
  released = json.loads(json.dumps(hf_config.to_released(K3, packed=True)))
  assert hf_config.from_released(released) == K3
  linear = released['text_config']['linear_attn_config']
  assert linear['full_attn_layers'][-2:] == [92, 93]
  assert len(linear['kda_layers']) == 69


# Values


def test_values_are_transposed_split_and_cut(loaded, raw):
  first = loaded.params['blocks_0']['layer_0']['kda']
  query = raw[f'{LAYER}0.self_attn.q_proj.weight'].astype(np.float32)
  np.testing.assert_array_equal(first['query'].reshape(48, 64), query.T)
  out = raw[f'{LAYER}0.self_attn.o_proj.weight'].astype(np.float32)
  np.testing.assert_array_equal(first['out'][2, 5], out[:, 2 * 16 + 5])
  conv = raw[f'{LAYER}0.self_attn.k_conv1d.weight']
  np.testing.assert_array_equal(first['key_conv'][3, 1], conv[3 * 16 + 1, 0])
  a_log = raw[f'{LAYER}0.self_attn.A_log']
  assert a_log.shape == (16,)
  np.testing.assert_array_equal(first['a_log'], a_log[:4])
  bias = raw[f'{LAYER}7.block_sparse_moe.gate.e_score_correction_bias']
  np.testing.assert_array_equal(loaded.router.bias[6], bias)
  np.testing.assert_allclose(loaded.router.lo[6], bias.min() - 1)
  np.testing.assert_allclose(loaded.router.hi[6], bias.max() + 1)


def test_packed_experts_follow_the_formula(loaded, raw):
  name = f'{LAYER}3.block_sparse_moe.experts.5.w2.weight'
  packed, scale = raw[name + '_packed'], raw[name + '_scale']
  values = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
  want = np.zeros((32, 32))
  for row in range(32):
    for column in range(32):
      code = packed[row, column // 2] >> (4 if column % 2 else 0) & 15
      sign = -1 if code & 8 else 1
      exponent = int(scale[row, column // 32]) - 127
      want[row, column] = sign * values[code & 7] * 2.0**exponent
  experts = loaded.params['blocks_1']['layer_0']['moe']['experts']
  np.testing.assert_array_equal(experts['down'][5], want.T)


def test_bfloat16_in_memory_keeps_the_float32_list(loaded):
  small = hf.load(GOLDEN, dtype='bfloat16')
  kda = small.params['blocks_0']['layer_0']['kda']
  for name in hf_names.WIDE:
    assert kda[name].dtype == np.float32
  assert kda['query'].dtype == jnp.bfloat16
  wide = jax.tree.map(lambda x: x.astype(np.float32), small.params)
  assert_same(small._replace(params=wide), loaded)


def test_loading_holds_little_beside_the_result(loaded):
  result = sum(x.nbytes for x in jax.tree.leaves(loaded.params))
  shard = max(path.stat().st_size for path in GOLDEN.glob('*.safetensors'))
  hf.load(GOLDEN)
  tracemalloc.start()
  hf.load(GOLDEN)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert peak < result + shard


# Round trips


@pytest.mark.parametrize('pack', [True, False])
def test_round_trip_is_bitwise(loaded, raw, tmp_path, pack):
  hf.save(tmp_path, loaded, pack_experts=pack, shard_bytes=200_000)
  assert_same(hf.load(tmp_path), loaded)
  files = sorted(tmp_path.glob('*.safetensors'))
  assert len(files) > 3
  written, total = {}, 0
  for path in files:
    shard = load_file(path)
    size = sum(value.nbytes for value in shard.values())
    assert size <= 200_000
    total += size
    written.update(shard)
  index = json.loads((tmp_path / shards.INDEX).read_text())
  assert index['metadata']['total_size'] == total
  assert index['weight_map'].keys() == written.keys()
  if pack:
    assert written.keys() == raw.keys()
  for name in written.keys() & raw.keys():
    if not name.endswith(('_packed', '_scale')):
      assert written[name].dtype == raw[name].dtype
      assert written[name].tobytes() == raw[name].tobytes(), name


def test_written_config_agrees_with_the_released_one(loaded, tmp_path):
  hf.save(tmp_path, loaded, pack_experts=True)
  ours = json.loads((tmp_path / 'config.json').read_text())
  theirs = json.loads((GOLDEN / 'config.json').read_text())
  text, released = ours['text_config'], theirs['text_config']
  assert released.keys() - text.keys() == {'max_position_embeddings'}
  assert {k: text[k] for k in released.keys() & text.keys()} == {
    k: v for k, v in released.items() if k in text
  }
  assert ours['quantization_config'] == theirs['quantization_config']


def test_float32_saves_a_trained_model_exactly(loaded, tmp_path):
  rng = np.random.default_rng(0)
  noise = lambda x: x + 1e-3 * rng.standard_normal(x.shape, np.float32)
  noisy = jax.tree.map(noise, loaded.params)
  trained = loaded._replace(params=noisy)
  hf.save(tmp_path, trained, dtype='float32')
  assert_same(hf.load(tmp_path), trained)


# MXFP4


def test_every_byte_and_scale_round_trips():
  rng = np.random.default_rng(0)
  packed = rng.integers(0, 256, (255, 16)).astype(np.uint8)
  scale = np.arange(255, dtype=np.uint8)[:, None]
  packed[:, 0] = 0x87  # a 6 fixes the scale; beside it a negative zero
  scale[253:] = 252  # 6 * 2^126 is the largest finite product
  values = mxfp4.unpack(packed, scale)
  again, scales = mxfp4.pack(values)
  np.testing.assert_array_equal(scales, scale)
  np.testing.assert_array_equal(again, packed)


def test_blocks_without_large_codes_keep_their_values():
  codes = np.arange(256, dtype=np.uint8).reshape(16, 16) & 0x33
  values = mxfp4.unpack(codes, np.full((16, 1), 130, np.uint8))
  again = mxfp4.unpack(*mxfp4.pack(values))
  assert again.tobytes() == values.tobytes()


def test_packing_takes_the_nearest_code_and_ties_go_to_even():
  grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
  rng = np.random.default_rng(1)
  ties = (grid[1:] + grid[:-1]) / 2
  block = np.concatenate([ties, -ties, [6.0], rng.uniform(-6, 6, 17)])
  rows = np.stack([block, block * 2.0**-9, block[::-1] * 2.0**20])
  got = mxfp4.unpack(*mxfp4.pack(rows.astype(np.float32)))
  for row, values in zip(got / [[1], [2.0**-9], [2.0**20]], (block, block)):
    distance = np.abs(np.abs(values)[:, None] - grid)
    best = np.argsort(distance + 1e-9 * (np.arange(8) % 2), axis=1)[:, 0]
    np.testing.assert_array_equal(np.abs(row), grid[best])
    np.testing.assert_array_equal(np.signbit(row), np.signbit(values))


def test_scale_is_the_smallest_that_does_not_saturate():
  peaks = np.array([6.0, 6.001, 3.0, 3.001, 12.0, 7.9, 0.0, 1e-45], np.float32)
  blocks = np.zeros((8, 32), np.float32)
  blocks[:, 7] = peaks
  packed, scale = mxfp4.pack(blocks)
  np.testing.assert_array_equal(
    scale[:, 0], [127, 128, 126, 127, 128, 128, 127, 0]
  )
  np.testing.assert_array_less(
    np.abs(mxfp4.unpack(packed, scale)).max(1), 2.0 * peaks + 1e-30
  )


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    (lambda: mxfp4.pack(np.ones((2, 33))), 'multiple of 32'),
    (lambda: mxfp4.pack(np.full((2, 32), np.nan)), 'not finite'),
    (
      lambda: mxfp4.unpack(np.zeros((2, 16), np.uint8), np.zeros((2, 2))),
      'one scale for each 16',
    ),
    (
      lambda: mxfp4.unpack(
        np.zeros((2, 16), np.uint8), np.full((2, 1), 255, np.uint8)
      ),
      'NaN',
    ),
  ],
)
def test_mxfp4_refusals(call, message):
  with pytest.raises(ValueError, match=message):
    call()


# Refusals


def test_missing_files_are_named(tmp_path):
  with pytest.raises(FileNotFoundError, match='config.json does not exist'):
    hf.load(tmp_path)
  (tmp_path / 'config.json').write_text((GOLDEN / 'config.json').read_text())
  with pytest.raises(FileNotFoundError, match='index.json does not exist'):
    hf.load(tmp_path)
  index = (GOLDEN / shards.INDEX).read_text()
  (tmp_path / shards.INDEX).write_text(index)
  with pytest.raises(FileNotFoundError, match='model-00002-of-00002'):
    hf.load(tmp_path)


def test_misfits_are_all_listed_at_once(raw, tmp_path):
  tensors = dict(raw)
  del tensors[f'{LAYER}3.self_attn.q_b_proj.weight']
  del tensors[f'{LAYER}1.block_sparse_moe.experts.7.w3.weight_scale']
  tensors[f'{LAYER}8.input_layernorm.weight'] = np.ones(48, np.float32)
  norm = f'{LAYER}2.self_attn.o_norm.weight'
  tensors[norm] = np.ones(17, np.float32)
  with pytest.raises(ValueError) as error:
    hf.load(write_copy(tmp_path, tensors))
  message = str(error.value)
  assert '4 problems' in message
  assert (
    '3.self_attn.q_b_proj.weight is missing (shape (96, 20), for parameter '
    'params/blocks_1/layer_0/mla/query_up[])'
  ) in message
  assert 'experts.7.w3.weight is missing' in message
  assert 'layers.8.input_layernorm.weight has no place' in message
  assert 'o_norm.weight has shape (17,), expected (16,)' in message


def test_truncated_and_mislabelled_shards_are_named(tmp_path):
  for path in GOLDEN.iterdir():
    if path.name != 'golden.npz':
      (tmp_path / path.name).write_bytes(path.read_bytes())
  name = 'model-00002-of-00002.safetensors'
  data = (tmp_path / name).read_bytes()
  (tmp_path / name).write_bytes(data[: len(data) // 2])
  with pytest.raises(ValueError, match=f'{name} is not a readable shard'):
    hf.load(tmp_path)
  save_file({'x': np.ones(2)}, tmp_path / name)
  with pytest.raises(ValueError, match='where the index puts it'):
    hf.load(tmp_path)


@pytest.mark.parametrize(
  ('where', 'key', 'value', 'message'),
  [
    ('text', 'tie_word_embeddings', True, 'tie_word_embeddings=True'),
    ('text', 'hidden_act', 'silu', "hidden_act='silu'"),
    ('text', 'num_expert_group', 8, 'num_expert_group=8'),
    ('text', 'num_key_value_heads', 2, 'num_key_value_heads=2'),
    ('text', 'mla_use_nope', False, 'mla_use_nope=False'),
    ('text', 'num_experts', None, "lacks ['num_experts']"),
    ('linear', 'full_attn_layers', [3, 7], 'count from 1'),
    ('linear', 'use_full_rank_gate', False, 'use_full_rank_gate'),
    ('linear', 'gate_lower_bound', None, 'linear_attn_config.gate_lower'),
    ('top', 'quantization_config', {'format': 'int4'}, "format='int4'"),
  ],
)
def test_other_structures_are_refused(where, key, value, message):
  released = json.loads((GOLDEN / 'config.json').read_text())
  text = released['text_config']
  part = {
    'top': released,
    'text': text,
    'linear': text['linear_attn_config'],
  }[where]
  part[key] = value
  if value is None:
    del part[key]
  with pytest.raises(ValueError) as error:
    hf_config.from_released(released)
  assert message in str(error.value)


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('kda', KdaConfig(heads=4, key_dim=16, value_dim=32, gate_rank=16)),
    ('kda', KdaConfig(heads=4, key_dim=16, value_dim=16, gate_rank=8)),
    ('latent_norm_eps', 1e-5),
    ('router', config_module.RouterConfig(space='logit')),
  ],
)
def test_inexpressible_configurations_are_refused(
  loaded, tmp_path, field, value
):
  config = dataclasses.replace(loaded.config, **{field: value})
  with pytest.raises(ValueError, match='cannot express'):
    hf.save(tmp_path, loaded._replace(config=config))
  assert not list(tmp_path.iterdir())


def test_save_refuses_what_it_cannot_write(loaded, tmp_path):
  moe = dataclasses.replace(loaded.config.moe, hidden=48)
  odd = loaded._replace(config=dataclasses.replace(loaded.config, moe=moe))
  with pytest.raises(ValueError, match='moe.hidden=48 must be multiples of 32'):
    hf.save(tmp_path, odd, pack_experts=True)
  with pytest.raises(ValueError, match='parameters are not those'):
    hf.save(tmp_path, odd)
  assert not list(tmp_path.iterdir())
  (tmp_path / shards.INDEX).write_text('{}')
  with pytest.raises(FileExistsError, match='already holds a checkpoint'):
    hf.save(tmp_path, loaded)


def test_unpacked_checkpoint_has_plain_expert_tensors(loaded, tmp_path):
  hf.save(tmp_path, loaded)
  (file,) = tmp_path.glob('*.safetensors')
  with safe_open(file, framework='np') as opened:
    name = f'{LAYER}1.block_sparse_moe.experts.0.w1.weight'
    assert opened.get_slice(name).get_shape() == [32, 32]
  released = json.loads((tmp_path / 'config.json').read_text())
  assert 'quantization_config' not in released
