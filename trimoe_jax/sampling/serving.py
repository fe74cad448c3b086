"""A model prepared for generation: the same values, laid out for one token.

A step reads every weight for a few tokens only, so what training does not feel
matters here: casting from float32, and cutting layers out of stacks.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from trimoe_jax import sharding
from trimoe_jax.model import layout
from trimoe_jax.model.model import Model, model_parameters
from trimoe_jax.model.parameters import Parameter

# A program with all layers written out takes longer to compile.
MOST_LAYERS = 32


def served(model: Model, params: Any) -> tuple[Model, Any]:
  """The model and its parameters as generation uses them best.

  Weight matrices are cast to the model's dtype; up to `MOST_LAYERS` layers are
  written out (`layout.Unrolled`). Tokens are those of the given model.
  """
  config = model.config
  if config.scans_layers and config.layers <= MOST_LAYERS:
    config = layout.Unrolled.of(config)
  return Model(config), _laid_out(model.config, config, params)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _laid_out(given, config, params):
  if config.scans_layers != given.scans_layers:
    params = layout.unroll(params, given)
  return serving_params(params, Model(config))


def serving_params(params: Any, model: Model) -> Any:
  """Parameters with weight matrices in the model's dtype, as layers use them.

  What the layers use in float32 stays: the router, gains, gates of the decay.
  """
  dtype = jnp.dtype(model.config.dtype)

  def cast(path, parameter, x):
    is_matrix = set(parameter.axes) & set(sharding.FULLY_SHARDED)
    keep = not is_matrix or path[-1].key == 'router'
    return x if keep or path[0].key == 'vision' else x.astype(dtype)

  return jax.tree_util.tree_map_with_path(
    cast,
    model_parameters(model.config),
    params,
    is_leaf=lambda x: isinstance(x, Parameter),
  )
