"""Which optimizer a parameter gets, read off its path in the tree.

A path ends in `part/name` (`kda/query`) or in `name` (`embedding`); whatever
comes before it names layers and stacks. Stacked layers add leading axes, so
every rule describes the trailing axes only. A parameter without a rule is an
error: a matrix that silently falls to AdamW trains, only worse.

Muon takes the matrices of the layers, each head of the query, key and value
projections as a matrix of its own (Kimi K3 technical report, Per-Head Muon);
of MLA these are the up-projections. AdamW takes
  embedding, head: one row or column a token, of which few get a gradient;
  router: one column an expert, a classifier like the head;
  convolutions: a few taps a channel, no matrix;
  patch, position of the vision tower: what an embedding is to text;
  gains, depth queries, a_log, dt_bias: vectors.
Weight decay falls on everything that multiplies activations, and not on
  positions of patches: they are added and multiply nothing;
  gains: they are centred on 1, decay would pull them to 0;
  depth queries: 0 means the uniform mix, decay would be a prior on it;
  a_log, dt_bias: they set time scales, for which 0 is no neutral value.
The router's balance bias is state, not a parameter, and never comes here.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax

Group = Literal['muon', 'adamw']

# One letter a trailing axis: b one matrix for each index (head, expert), r
# reduction, o output. Several axes of one kind are flattened into one.
_MUON = {
  'kda/query': 'rbo',
  'kda/key': 'rbo',
  'kda/value': 'rbo',
  'kda/decay_down': 'ro',
  'kda/decay_up': 'roo',
  'kda/beta': 'ro',
  'kda/gate': 'roo',
  'kda/out': 'rro',
  'mla/query_down': 'ro',
  'mla/query_up': 'rbo',
  'mla/kv_down': 'ro',
  'mla/kv_up': 'rbo',
  'mla/gate': 'roo',
  'mla/out': 'rro',
  'mlp/gate': 'ro',
  'mlp/up': 'ro',
  'mlp/down': 'ro',
  'moe/down': 'ro',
  'moe/up': 'ro',
  'experts/gate': 'bro',
  'experts/up': 'bro',
  'experts/down': 'bro',
  'shared/gate': 'ro',
  'shared/up': 'ro',
  'shared/down': 'ro',
  'attention/qkv': 'rbbo',
  'attention/out': 'rro',
  'projector/up': 'ro',
  'projector/down': 'ro',
}
_ADAMW_DECAYED = frozenset(
  {
    'embedding',
    'head',
    'moe/router',
    'kda/query_conv',
    'kda/key_conv',
    'kda/value_conv',
    'vision/patch',
  }
)
_ADAMW_PLAIN = frozenset(
  {
    'attention_norm',
    'ffn_norm',
    'final_norm',
    'attention_mix/query',
    'attention_mix/gain',
    'ffn_mix/query',
    'ffn_mix/gain',
    'output_mix/query',
    'output_mix/gain',
    'kda/a_log',
    'kda/dt_bias',
    'kda/out_norm',
    'mla/query_norm',
    'mla/kv_norm',
    'moe/norm',
    'vision/position',
    'projector/norm',
  }
)
KNOWN = frozenset(_MUON) | _ADAMW_DECAYED | _ADAMW_PLAIN

Path = Sequence[Any]  # of a tree: keys of jax.tree_util, or plain strings


class MatrixAxes(NamedTuple):
  """Axes of one parameter, as Muon sees it; indices into its full shape."""

  batch: tuple[int, ...]
  reduction: tuple[int, ...]
  output: tuple[int, ...]


def parameter_name(path: Path) -> str:
  """The known end of `path`, such as 'kda/query' or 'embedding'.

  Raises:
    ValueError: no rule covers the parameter.
  """
  names = [_name(key) for key in path]
  for name in ('/'.join(names[-2:]), names[-1] if names else ''):
    if name in KNOWN:
      return name
  full = '/'.join(names)
  near = difflib.get_close_matches('/'.join(names[-2:]), sorted(KNOWN), n=1)
  hint = f' The nearest known name is {near[0]!r}.' if near else ''
  raise ValueError(
    f'parameter {full!r} has no optimizer group.{hint} Give it a rule in '
    'trimoe_jax/optim/groups.py, so that it is not trained by accident.'
  )


def label(path: Path) -> Group:
  """'muon' or 'adamw' for the parameter at `path`."""
  return 'muon' if parameter_name(path) in _MUON else 'adamw'


def decays(path: Path) -> bool:
  """Whether weight decay falls on the parameter at `path`."""
  return parameter_name(path) not in _ADAMW_PLAIN


def matrix_axes(path: Path, ndim: int) -> MatrixAxes:
  """The batch, reduction and output axes of a Muon parameter.

  Args:
    path: the parameter's path.
    ndim: its number of axes; those before the rule's are stacked layers and
      count as batch.

  Raises:
    ValueError: the parameter is not Muon's, or has too few axes.
  """
  name = parameter_name(path)
  if name not in _MUON:
    raise ValueError(f'parameter {name!r} belongs to AdamW, not to Muon.')
  roles = _MUON[name]
  if ndim < len(roles):
    raise ValueError(
      f'parameter {name!r} has {ndim} axes; its matrices need the '
      f'{len(roles)} trailing axes {roles!r} (b batch, r reduction, o output).'
    )
  roles = 'b' * (ndim - len(roles)) + roles
  axes = {kind: [] for kind in 'bro'}
  for axis, kind in enumerate(roles):
    axes[kind].append(axis)
  return MatrixAxes(tuple(axes['b']), tuple(axes['r']), tuple(axes['o']))


def label_tree(params: Any) -> Any:
  """A tree like `params` with every parameter's group."""
  return jax.tree_util.tree_map_with_path(lambda path, _: label(path), params)


def decay_tree(params: Any) -> Any:
  """A tree like `params`, True where weight decay falls."""
  return jax.tree_util.tree_map_with_path(lambda path, _: decays(path), params)


def check(params: Any) -> None:
  """Raises ValueError where a parameter has no group or lacks matrix axes."""
  for path, x in jax.tree_util.tree_leaves_with_path(params):
    if label(path) == 'muon':
      matrix_axes(path, len(x.shape))


def _name(key: Any) -> str:
  for field in ('key', 'name', 'idx'):
    if hasattr(key, field):
      return str(getattr(key, field))
  return str(key)
