"""The released config.json to and from ModelConfig."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from trimoe_jax.config import ModelConfig, from_dict
from trimoe_jax.interop import hf_vision

FILE = 'config.json'
_PACKED = {
  'quant_method': 'compressed-tensors',
  'format': 'mxfp4-pack-quantized',
}

# Released key of text_config -> field of ModelConfig.
_FIELDS = {
  'vocab_size': 'vocab_size',
  'hidden_size': 'width',
  'num_hidden_layers': 'layers',
  'first_k_dense_replace': 'dense_layers',
  'intermediate_size': 'dense_hidden',
  'attn_res_block_size': 'residual_block',
  'rms_norm_eps': 'norm_eps',
  'activation_situ_beta': 'situ_beta',
  'activation_situ_linear_beta': 'situ_linear_beta',
  'num_attention_heads': 'mla.heads',
  'q_lora_rank': 'mla.query_rank',
  'kv_lora_rank': 'mla.kv_rank',
  'qk_nope_head_dim': 'mla.nope_dim',
  'qk_rope_head_dim': 'mla.shared_dim',
  'v_head_dim': 'mla.value_dim',
  'num_experts': 'moe.experts',
  'num_experts_per_token': 'moe.top_k',
  'num_shared_experts': 'moe.shared_experts',
  'moe_intermediate_size': 'moe.hidden',
  'routed_expert_hidden_size': 'moe.latent',
  'routed_scaling_factor': 'moe.weight_scale',
}
# The same for linear_attn_config.
_LINEAR_FIELDS = {
  'num_heads': 'kda.heads',
  'head_dim': 'kda.key_dim',
  'short_conv_kernel_size': 'kda.conv_width',
  'gate_lower_bound': 'kda.lower_bound',
}
# Keys that a file may leave out.
_OPTIONAL = {'initializer_range': 'init_std', 'dtype': 'dtype'}
# Structure that this code has no other form of.
_FIXED = {
  'model_type': 'kimi_linear',
  'hidden_act': 'situ',
  'mla_use_nope': True,
  'mla_use_output_gate': True,
  'moe_layer_freq': 1,
  'moe_renormalize': True,
  'moe_router_activation_func': 'sigmoid',
  'latent_moe_use_norm': True,
  'use_grouped_topk': True,
  'num_expert_group': 1,
  'topk_group': 1,
  'topk_method': 'noaux_tc',
  'num_nextn_predict_layers': 0,
  'tie_word_embeddings': False,
}


def read(directory: pathlib.Path) -> ModelConfig:
  """The ModelConfig of a released config.json.

  Keys without a counterpart (token ids, max_position_embeddings,
  vision_config) are ignored; fields without a key keep their defaults.

  Raises:
    FileNotFoundError: there is no config.json.
    ValueError: a key is missing, or asks for a structure this code lacks.
  """
  path = pathlib.Path(directory) / FILE
  if not path.is_file():
    raise FileNotFoundError(
      f'{path} does not exist; name a folder that holds a checkpoint in the '
      'released layout (config.json, an index and its safetensors shards).'
    )
  return from_released(json.loads(path.read_text()))


def from_released(released: Mapping[str, Any]) -> ModelConfig:
  """The ModelConfig of the parsed config.json."""
  text = released.get('text_config', {})
  linear = text.get('linear_attn_config', {})
  keys = [k for k in _FIELDS if k not in text]
  keys += [f'linear_attn_config.{k}' for k in _LINEAR_FIELDS if k not in linear]
  if 'full_attn_layers' not in linear:
    keys.append('linear_attn_config.full_attn_layers')
  if keys:
    raise ValueError(
      f'config.json lacks {keys} in text_config; is it a Kimi K3 checkpoint?'
    )
  _refuse_other_structure(released, text, linear)
  nested: dict[str, Any] = {
    'mla_layers': linear['full_attn_layers'],
    'kda': {'value_dim': linear['head_dim'], 'gate_rank': linear['head_dim']},
  }
  for source, fields in (
    (text, _FIELDS),
    (linear, _LINEAR_FIELDS),
    (text, _OPTIONAL),
  ):
    for key, field in fields.items():
      if key in source:
        *group, name = field.split('.')
        part = nested.setdefault(group[0], {}) if group else nested
        part[name] = source[key]
  config = from_dict(ModelConfig, nested)
  vision = hf_vision.from_released(released)
  return dataclasses.replace(config, vision=vision)


def _refuse_other_structure(released, text, linear):
  """Raises ValueError for anything but K3's structure."""
  wrong = [
    f'text_config.{key}={text[key]!r} (supported: {value!r})'
    for key, value in _FIXED.items()
    if text.get(key, value) != value
  ]
  heads = text['num_attention_heads']
  if text.get('num_key_value_heads', heads) != heads:
    wrong.append(
      f'text_config.num_key_value_heads={text["num_key_value_heads"]} '
      f'(supported: num_attention_heads, {heads})'
    )
  if not linear.get('use_full_rank_gate', True):
    wrong.append('linear_attn_config.use_full_rank_gate=false')
  full = linear['full_attn_layers']
  rest = [i + 1 for i in range(text['num_hidden_layers']) if i + 1 not in full]
  if linear.get('kda_layers', rest) != rest:
    wrong.append(
      'linear_attn_config.kda_layers is not every layer outside '
      'full_attn_layers (both count from 1)'
    )
  quantized = released.get('quantization_config')
  if quantized and quantized.get('format') != _PACKED['format']:
    wrong.append(
      f'quantization_config.format={quantized.get("format")!r} (supported: '
      f'{_PACKED["format"]!r})'
    )
  if wrong:
    raise ValueError(
      'config.json describes a model this code does not implement: '
      + '; '.join(wrong)
    )


def to_released(config: ModelConfig, *, packed: bool) -> dict[str, Any]:
  """The parsed config.json of a ModelConfig.

  Holds what follows from ModelConfig. Token ids and max_position_embeddings
  belong to a tokenizer and a training run and are left out, but for the
  placeholder of images.

  Raises:
    ValueError: a field has a value that the released layout cannot express.
  """
  _refuse_inexpressible(config)
  value = lambda field: _get(config, field)
  every = range(1, config.layers + 1)
  linear = {key: value(field) for key, field in _LINEAR_FIELDS.items()} | {
    'full_attn_layers': sorted(config.mla_layers),
    'kda_layers': [i for i in every if i not in config.mla_layers],
    'use_full_rank_gate': True,
  }
  fields = _FIELDS | _OPTIONAL
  text = _FIXED | {key: value(field) for key, field in fields.items()}
  text['num_key_value_heads'] = config.mla.heads
  text['linear_attn_config'] = linear
  released = {
    'architectures': ['KimiK3ForConditionalGeneration'],
    'model_type': 'kimi_k3',
    'text_config': text,
    **hf_vision.to_released(config),
  }
  return released | ({'quantization_config': _PACKED} if packed else {})


def _get(config: ModelConfig, field: str) -> Any:
  value = config
  for name in field.split('.'):
    value = getattr(value, name)
  return value


def _refuse_inexpressible(config: ModelConfig):
  """Raises ValueError for fields that a released config.json has no key for."""
  kda = config.kda
  wanted = {
    'kda.value_dim': kda.key_dim,
    'kda.gate_rank': kda.key_dim,
    'kda.state_heads': kda.heads,
    'latent_norm_eps': ModelConfig.latent_norm_eps,
    'router.space': 'sigmoid',
  }
  wrong = [
    f'{field}={_get(config, field)!r} (expressible: {value!r})'
    for field, value in wanted.items()
    if _get(config, field) != value
  ]
  if wrong:
    raise ValueError(
      'the released layout cannot express this model: ' + '; '.join(wrong)
    )


def write(directory: pathlib.Path, released: Mapping[str, Any]):
  """Writes config.json into an existing folder."""
  text = json.dumps(released, indent=1) + '\n'
  (pathlib.Path(directory) / FILE).write_text(text)
