"""The vision tower and the projector in the released layout, both ways.

168 tensors of K3 under `vision_tower.` and `mm_projector.`; all bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from trimoe_jax.config import ModelConfig, from_dict
from trimoe_jax.interop.hf_tensor import Form, Tensor
from trimoe_jax.model.vision import vision_parameters
from trimoe_jax.model.vision_config import MERGE, PATCH, VisionConfig

_TOWER = 'vision_tower.'
_PROJECTOR = 'mm_projector.'
_PLACEHOLDER = 'media_placeholder_token_id'  # beside vision_config

# Name -> (parameter, form). Names of blocks are relative to `blocks.B.`.
_FIRST: dict[str, tuple[str, Form]] = {
  f'{_TOWER}patch_embed.proj.weight': ('patch', 'same'),
  f'{_TOWER}patch_embed.pos_emb.weight': ('position', 'same'),
}
_BLOCK: dict[str, tuple[str, Form]] = {
  'norm0.weight': ('attention_norm', 'flat'),
  'norm1.weight': ('ffn_norm', 'flat'),
  'wqkv.weight': ('attention.qkv', 'in_1'),
  'wo.weight': ('attention.out', 'in_2'),
  'mlp.fc0.weight': ('mlp.up', 'in_1'),
  'mlp.fc1.weight': ('mlp.down', 'in_1'),
}
_LAST: dict[str, tuple[str, Form]] = {
  f'{_TOWER}encoder.final_layernorm.weight': ('final_norm', 'flat'),
  f'{_PROJECTOR}proj.0.weight': ('projector.up', 'in_1'),
  f'{_PROJECTOR}proj.2.weight': ('projector.down', 'in_1'),
  f'{_PROJECTOR}post_norm.weight': ('projector.norm', 'flat'),
}
# Released key of vision_config -> field of VisionConfig; all are in the file.
_FIELDS = {
  'vt_hidden_size': 'width',
  'vt_num_hidden_layers': 'layers',
  'vt_num_attention_heads': 'heads',
  'vt_intermediate_size': 'hidden',
  'init_pos_emb_height': 'rows',
  'init_pos_emb_width': 'columns',
}
_OPTIONAL = {
  'init_pos_emb_time': 'frames',
  'projector_ln_eps': 'projector_eps',
}
# Structure that this code has no other form of.
_FIXED = {
  'activation_func': 'gelu_pytorch_tanh',
  'attn_bias': False,
  'linear_bias': False,
  'merge_kernel_size': [MERGE, MERGE],
  'merge_type': 'sd2_tpool',
  'mlp_type': 'mlp2',
  'mm_projector_type': 'patchmergerv2',
  'norm_type': 'rmsnorm',
  'patch_size': PATCH,
  'patch_embed_proj_bias': False,
  'pos_emb_interpolation_mode': 'bilinear',
  'pos_emb_type': 'divided_fixed',
  'projector_hidden_act': 'gelu',
}


def tensors(config: ModelConfig) -> Iterator[Tensor]:
  """Every tensor of the tower and the projector, in file order; none for text.

  They belong under params/vision.
  """
  if config.vision is None:
    return
  table = vision_parameters(config)
  for name, (parameter, form) in _FIRST.items():
    yield _tensor(table, name, parameter, form, ())
  for block in range(config.vision.layers):
    for name, (parameter, form) in _BLOCK.items():
      name = f'{_TOWER}encoder.blocks.{block}.{name}'
      yield _tensor(table, name, f'blocks.{parameter}', form, (block,))
  for name, (parameter, form) in _LAST.items():
    yield _tensor(table, name, parameter, form, ())


def _tensor(table, name, parameter, form, index) -> Tensor:
  keys = parameter.split('.')
  for key in keys:
    table = table[key]
  local = table.shape[len(index) :]
  stored = {
    'in_1': (math.prod(local[1:]), local[0]),
    'in_2': (math.prod(local[2:]), math.prod(local[:2])),
  }.get(form, local)
  return Tensor(name, ('params', 'vision', *keys), index, local, stored, form)


def from_released(released: Mapping[str, Any]) -> VisionConfig | None:
  """The VisionConfig of the parsed config.json; None where it has none.

  Raises:
    ValueError: a key is missing, or asks for a structure this code lacks.
  """
  vision = released.get('vision_config')
  if vision is None:
    return None
  required = (*_FIELDS, 'qkv_hidden_size')
  missing = [key for key in required if key not in vision]
  if _PLACEHOLDER not in released:
    missing.append(f'{_PLACEHOLDER} (beside vision_config)')
  if missing:
    raise ValueError(
      f'config.json lacks {missing} in vision_config; is it a Kimi K3 '
      'checkpoint?'
    )
  heads, width = vision['vt_num_attention_heads'], vision['vt_hidden_size']
  text = released.get('text_config', {}).get('hidden_size')
  fixed = _FIXED | {'mm_hidden_size': width, 'text_hidden_size': text}
  plain = lambda x: list(x) if isinstance(x, tuple) else x
  wrong = [
    f'vision_config.{key}={vision[key]!r} (supported: {value!r})'
    for key, value in fixed.items()
    if plain(vision.get(key, value)) != value
  ]
  if vision['qkv_hidden_size'] % heads:
    wrong.append(
      f'vision_config.qkv_hidden_size={vision["qkv_hidden_size"]} (supported: '
      f'multiples of vt_num_attention_heads, {heads})'
    )
  if wrong:
    raise ValueError(
      'config.json describes a vision tower this code does not implement: '
      + '; '.join(wrong)
    )
  fields = _FIELDS | {k: v for k, v in _OPTIONAL.items() if k in vision}
  values = {field: vision[key] for key, field in fields.items()}
  return from_dict(
    VisionConfig,
    values
    | {
      'head_dim': vision['qkv_hidden_size'] // heads,
      'placeholder': released[_PLACEHOLDER],
    },
    'vision.',
  )


def to_released(config: ModelConfig) -> dict[str, Any]:
  """What config.json says about images: nothing for a text model."""
  vision = config.vision
  if vision is None:
    return {}
  fields = _FIELDS | _OPTIONAL
  values = {key: getattr(vision, field) for key, field in fields.items()}
  values |= {
    'qkv_hidden_size': vision.heads * vision.head_dim,
    'mm_hidden_size': vision.width,
    'text_hidden_size': config.width,
  }
  return {
    _PLACEHOLDER: vision.placeholder,
    'vision_config': _FIXED | values,
  }
