"""Every tensor of the released layout and the parameter it belongs to.

The released files keep PyTorch's [out, in] matrices with heads flattened into
one axis, a file entry for each expert, and layers numbered from 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from trimoe_jax.config import ModelConfig
from trimoe_jax.interop import hf_vision
from trimoe_jax.interop.hf_tensor import Form, Tensor
from trimoe_jax.model import layout
from trimoe_jax.model.block import layer_parameters
from trimoe_jax.model.model import model_parameters

TEXT = 'language_model.'

# Name -> (parameter, form). Names of layers are relative to `layers.L.`.
_TOP: dict[str, tuple[str, Form]] = {
  'model.embed_tokens.weight': ('embedding', 'same'),
  'model.output_attn_res_norm.weight': ('output_mix.gain', 'flat'),
  'model.output_attn_res_proj.weight': ('output_mix.query', 'row'),
  'model.norm.weight': ('final_norm', 'flat'),
  'lm_head.weight': ('head', 'in_1'),
}
_EVERY_LAYER: dict[str, tuple[str, Form]] = {
  'input_layernorm.weight': ('attention_norm', 'flat'),
  'post_attention_layernorm.weight': ('ffn_norm', 'flat'),
  'self_attention_res_norm.weight': ('attention_mix.gain', 'flat'),
  'self_attention_res_proj.weight': ('attention_mix.query', 'row'),
  'mlp_res_norm.weight': ('ffn_mix.gain', 'flat'),
  'mlp_res_proj.weight': ('ffn_mix.query', 'row'),
}
_KDA: dict[str, tuple[str, Form]] = {
  'self_attn.q_proj.weight': ('kda.query', 'in_1'),
  'self_attn.k_proj.weight': ('kda.key', 'in_1'),
  'self_attn.v_proj.weight': ('kda.value', 'in_1'),
  'self_attn.q_conv1d.weight': ('kda.query_conv', 'conv'),
  'self_attn.k_conv1d.weight': ('kda.key_conv', 'conv'),
  'self_attn.v_conv1d.weight': ('kda.value_conv', 'conv'),
  'self_attn.f_a_proj.weight': ('kda.decay_down', 'in_1'),
  'self_attn.f_b_proj.weight': ('kda.decay_up', 'in_1'),
  'self_attn.A_log': ('kda.a_log', 'padded'),
  'self_attn.dt_bias': ('kda.dt_bias', 'flat'),
  'self_attn.b_proj.weight': ('kda.beta', 'in_1'),
  'self_attn.g_proj.weight': ('kda.gate', 'in_1'),
  'self_attn.o_norm.weight': ('kda.out_norm', 'flat'),
  'self_attn.o_proj.weight': ('kda.out', 'in_2'),
}
_MLA: dict[str, tuple[str, Form]] = {
  'self_attn.q_a_proj.weight': ('mla.query_down', 'in_1'),
  'self_attn.q_a_layernorm.weight': ('mla.query_norm', 'flat'),
  'self_attn.q_b_proj.weight': ('mla.query_up', 'in_1'),
  'self_attn.kv_a_proj_with_mqa.weight': ('mla.kv_down', 'in_1'),
  'self_attn.kv_a_layernorm.weight': ('mla.kv_norm', 'flat'),
  'self_attn.kv_b_proj.weight': ('mla.kv_up', 'in_1'),
  'self_attn.g_proj.weight': ('mla.gate', 'in_1'),
  'self_attn.o_proj.weight': ('mla.out', 'in_2'),
}
_DENSE: dict[str, tuple[str, Form]] = {
  f'mlp.{name}_proj.weight': (f'mlp.{name}', 'in_1')
  for name in ('gate', 'up', 'down')
}
_MOE: dict[str, tuple[str, Form]] = {
  'block_sparse_moe.gate.weight': ('moe.router', 'in_1'),
  'block_sparse_moe.routed_expert_down_proj.weight': ('moe.down', 'in_1'),
  'block_sparse_moe.routed_expert_up_proj.weight': ('moe.up', 'in_1'),
  'block_sparse_moe.routed_expert_norm.weight': ('moe.norm', 'flat'),
}
_SHARED: dict[str, tuple[str, Form]] = {
  f'block_sparse_moe.shared_experts.{name}_proj.weight': (
    f'moe.shared.{name}',
    'in_1',
  )
  for name in ('gate', 'up', 'down')
}
_EXPERTS = {'w1': 'gate', 'w3': 'up', 'w2': 'down'}
_BIAS = 'block_sparse_moe.gate.e_score_correction_bias'
WIDE = ('query_conv', 'key_conv', 'value_conv', 'out_norm', 'a_log', 'dt_bias')


def tensors(config: ModelConfig) -> Iterator[Tensor]:
  """Every tensor of a checkpoint with this configuration, in file order.

  Layer 0's attention mix is among them although nothing reads it: there is one
  source to mix.
  """
  table = model_parameters(config)
  for name, (parameter, form) in _TOP.items():
    path = ('params', *parameter.split('.'))
    shape = _leaf(table, path[1:]).shape
    yield _tensor(config, TEXT + name, path, (), shape, form)
  moe_layer = 0
  for i, (path, index) in enumerate(layout.layer_addresses(config)):
    node = layout.Layer(config.mixer(i), config.ffn(i))
    prefix = f'{TEXT}model.layers.{i}.'
    yield from _layer(config, node, prefix, ('params', *path), index)
    if node.ffn == 'moe':
      shape = (config.moe.experts,)
      yield Tensor(
        name=prefix + _BIAS,
        path=('router', 'bias'),
        index=(moe_layer,),
        local=shape,
        stored=shape,
        form='same',
        wide=True,
      )
      moe_layer += 1
  yield from hf_vision.tensors(config)


def _layer(config, node, prefix, path, index) -> Iterator[Tensor]:
  """The parameters of one layer."""
  table = layer_parameters(config, node)
  names = _EVERY_LAYER | (_KDA if node.mixer == 'kda' else _MLA)
  names |= _MOE if node.ffn == 'moe' else _DENSE
  if node.ffn == 'moe' and config.moe.shared_experts:
    names |= _SHARED
  for name, (parameter, form) in names.items():
    keys = parameter.split('.')
    shape = _leaf(table, keys).shape
    yield _tensor(config, prefix + name, (*path, *keys), index, shape, form)
  if node.ffn == 'moe':
    for expert in range(config.moe.experts):
      for name, parameter in _EXPERTS.items():
        yield _tensor(
          config,
          f'{prefix}block_sparse_moe.experts.{expert}.{name}.weight',
          (*path, 'moe', 'experts', parameter),
          (*index, expert),
          table['moe']['experts'][parameter].shape[1:],
          'in_1',
        )


def _tensor(config, name, path, index, local, form) -> Tensor:
  stored = {
    'in_1': (math.prod(local[1:]), local[0]),
    'in_2': (math.prod(local[2:]), math.prod(local[:2])),
    'flat': (math.prod(local),),
    'row': (1, *local),
    'conv': (math.prod(local[:-1]), 1, local[-1]),
    'same': local,
    'padded': (max(*local, config.kda.key_dim),),
  }[form]
  return Tensor(name, path, index, local, stored, form, path[-1] in WIDE)


def _leaf(table, keys):
  for key in keys:
    table = table[key]
  return table
