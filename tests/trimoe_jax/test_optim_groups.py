"""Every parameter has one group, found from its path alone."""

import jax
import pytest

from trimoe_jax import config
from trimoe_jax.model import parameters
from trimoe_jax.model.model import model_parameters
from trimoe_jax.optim import groups

# The whole layer, with the group and the axes each name must get.
MUON = {
  'kda/query': 'rbo',
  'kda/key': 'rbo',
  'kda/value': 'rbo',
  'kda/decay_down': 'ro',
  'kda/decay_up': 'roo',
  'kda/beta': 'ro',
  'kda/gate': 'roo',
  'kda/out': 'rro',
  'mla/query_up': 'rbo',
  'mla/kv_up': 'rbo',
  'mla/query_down': 'ro',
  'mla/kv_down': 'ro',
  'mla/gate': 'roo',
  'mla/out': 'rro',
  'mlp/gate': 'ro',
  'moe/down': 'ro',
  'moe/experts/down': 'bro',
  'moe/shared/up': 'ro',
}
DECAYED = ('embedding', 'head', 'moe/router', 'kda/key_conv')
PLAIN = (
  'final_norm',
  'output_mix/query',
  'attention_mix/gain',
  'ffn_norm',
  'kda/a_log',
  'kda/dt_bias',
  'kda/out_norm',
  'mla/kv_norm',
  'moe/norm',
)


def split(name):
  return tuple(name.split('/'))


@pytest.mark.parametrize('stack', [(), ('layers',), ('groups', '0')])
def test_matrices_go_to_muon(stack):
  for name, roles in MUON.items():
    path = (*stack, *split(name))
    assert groups.label(path) == 'muon', name
    assert groups.decays(path), name
    lead = 2  # leading axes of stacked layers are batch
    axes = groups.matrix_axes(path, lead + len(roles))
    got = {i: 'b' for i in axes.batch}
    got |= {i: 'r' for i in axes.reduction} | {i: 'o' for i in axes.output}
    assert ''.join(got[i] for i in sorted(got)) == 'bb' + roles, name


def test_others_go_to_adamw():
  for name in DECAYED + PLAIN:
    assert groups.label(('layers', *split(name))) == 'adamw', name
    assert groups.decays(split(name)) == (name in DECAYED), name


def test_keys_of_a_tree_are_read():
  tree = {'layers': [{'kda': {'query': 0, 'a_log': 0}}], 'head': 0}
  assert groups.label_tree(tree) == {
    'layers': [{'kda': {'query': 'muon', 'a_log': 'adamw'}}],
    'head': 'adamw',
  }
  assert groups.decay_tree(tree)['layers'][0]['kda']['a_log'] is False


def test_every_parameter_of_the_model_has_a_group():
  whole = config.ModelConfig(vision=config.VisionConfig())
  params = parameters.abstract(model_parameters(whole))
  groups.check(params)
  named = jax.tree_util.tree_leaves_with_path(params)
  found = {groups.parameter_name(path) for path, _ in named}
  # And every rule has a parameter: none is left over from a renaming.
  assert found == groups.KNOWN


def test_unknown_parameter_is_an_error():
  with pytest.raises(ValueError, match="kda/quary'.*'kda/query'"):
    groups.label(('layers', 'kda', 'quary'))
  with pytest.raises(ValueError, match='no optimizer group'):
    groups.label(('bias',))
  # A known name under the wrong parent is unknown.
  with pytest.raises(ValueError, match='no optimizer group'):
    groups.label(('vision', 'query'))


def test_wrong_rank_is_an_error():
  with pytest.raises(ValueError, match="'kda/query' has 2 axes"):
    groups.matrix_axes(('kda', 'query'), 2)
  with pytest.raises(ValueError, match='belongs to AdamW'):
    groups.matrix_axes(('head',), 2)
  flat = {'kda': {'query': jax.ShapeDtypeStruct((8, 8), 'float32')}}
  with pytest.raises(ValueError, match='needs? the 3 trailing axes'):
    groups.check(flat)
