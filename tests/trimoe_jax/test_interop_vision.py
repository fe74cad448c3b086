"""The vision part of the released config.json and its tensors' names."""

import json
import math
import pathlib

import pytest

from trimoe_jax.config import ModelConfig, VisionConfig
from trimoe_jax.interop import hf_vision

FOLDER = pathlib.Path(__file__).parents[1] / 'golden' / 'tiny_checkpoint'
K3 = ModelConfig(width=7168, vision=VisionConfig())


@pytest.fixture
def released():
  return json.loads((FOLDER / 'config.json').read_text())


def test_k3_has_168_tensors_of_the_reported_size():
  tensors = list(hf_vision.tensors(K3))
  assert len(tensors) == 168
  names = [x.name for x in tensors]
  assert len(set(names)) == 168
  size = lambda prefix: sum(
    math.prod(x.stored) for x in tensors if x.name.startswith(prefix)
  )
  assert size('vision_tower.') == 401_214_464
  assert size('mm_projector.') == 46_144_512
  stored = {x.name: x.stored for x in tensors}
  blocks = 'vision_tower.encoder.blocks.26.'
  assert stored[f'{blocks}wqkv.weight'] == (4608, 1024)
  assert stored[f'{blocks}wo.weight'] == (1024, 1536)
  assert stored[f'{blocks}mlp.fc0.weight'] == (4096, 1024)
  assert stored['vision_tower.patch_embed.proj.weight'] == (1024, 3, 14, 14)
  assert stored['mm_projector.proj.2.weight'] == (7168, 4096)


def test_text_models_have_none():
  assert not list(hf_vision.tensors(ModelConfig()))
  assert hf_vision.to_released(ModelConfig()) == {}
  assert hf_vision.from_released({'text_config': {}}) is None


def test_k3_config_survives_the_round_trip():
  text = {'text_config': {'hidden_size': 7168}}
  written = json.loads(json.dumps(hf_vision.to_released(K3)))
  assert written['vision_config']['qkv_hidden_size'] == 1536
  assert written['media_placeholder_token_id'] == 163_605
  assert hf_vision.from_released(written | text) == VisionConfig()


@pytest.mark.parametrize(
  'key, value',
  [
    ('merge_kernel_size', [1, 1]),
    ('projector_hidden_act', 'silu'),
    ('attn_bias', True),
    ('patch_size', 16),
    ('mm_hidden_size', 64),
    ('text_hidden_size', 64),
    ('qkv_hidden_size', 50),
  ],
)
def test_another_structure_is_refused(released, key, value):
  released['vision_config'][key] = value
  with pytest.raises(ValueError, match=f'vision_config.{key}=.* \\(supported'):
    hf_vision.from_released(released)


def test_missing_keys_are_all_named(released):
  del released['vision_config']['vt_hidden_size']
  del released['media_placeholder_token_id']
  message = r'vt_hidden_size.*media_placeholder_token_id \(beside'
  with pytest.raises(ValueError, match=message):
    hf_vision.from_released(released)
