"""Reading the residual in two phases equals reading it directly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import small_config

from pallas_kernels.testing import relative_rms
from trimoe_jax.model import layout, residual
from trimoe_jax.model.block import body_mixes, body_parameters
from trimoe_jax.model.parameters import map_table

CONFIG = small_config(dtype='float32', width=64)


def draw(shape, seed):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def read_both(sublayers, slots, filled):
  """Each sublayer's mixture: [direct, in two phases], stacked."""
  blocks = jnp.asarray(draw((slots, 2, 3, 64), 1))
  mixes = {
    'query': jnp.asarray(draw((sublayers, 64), 2)),
    'gain': jnp.asarray(draw((sublayers, 64), 3)),
  }
  direct = residual.Residual.start(blocks, filled)
  phased = direct.in_two_phases(mixes, CONFIG)
  out = []
  for i in range(sublayers):
    own = jax.tree.map(lambda x, i=i: x[i], mixes)
    pair = [residual.read(own, r, CONFIG)[0] for r in (direct, phased)]
    out.append(np.stack(pair))
    x = jnp.asarray(draw((2, 3, 64), 4 + i))
    direct, phased = direct.add(x), phased.add(x)
  return np.stack(out, 1)


@pytest.mark.parametrize('filled', [1, 2, 5])
def test_two_phases_equal_the_direct_form(filled):
  direct, phased = read_both(sublayers=5, slots=5, filled=filled)
  assert relative_rms(phased, direct) < 1e-6


def test_a_slot_that_is_not_filled_is_never_read():
  blocks = jnp.asarray(draw((3, 1, 2, 64), 1)).at[1:].set(jnp.nan)
  mixes = {'query': jnp.ones((1, 64)), 'gain': jnp.ones((1, 64))}
  stream = residual.Residual.start(blocks, 1).in_two_phases(mixes, CONFIG)
  own = jax.tree.map(lambda x: x[0], mixes)
  got, _ = residual.read(own, stream, CONFIG)
  np.testing.assert_allclose(got, blocks[0], rtol=1e-6)


def test_mixes_are_collected_in_the_order_of_layers():
  kda, mla = layout.Layer('kda', 'moe'), layout.Layer('mla', 'moe')
  body = layout.fold((kda, kda, mla) * 2)
  assert isinstance(body[0], layout.Repeat), 'the test means nested repeats'
  count = iter(range(100))
  params = map_table(
    lambda p: jnp.full(p.shape, 0.0) + next(count),
    body_parameters(CONFIG, body),
  )
  # Number the layers: outer repeat, then the inner one.
  repeat = params['repeat_0']
  inner, last = repeat['repeat_0']['layer_0'], repeat['layer_1']
  number = jnp.array([[0.0, 1.0], [3.0, 4.0]])[..., None] * jnp.ones(64)
  inner['attention_mix']['query'], inner['ffn_mix']['query'] = number, -number
  number = jnp.array([2.0, 5.0])[..., None] * jnp.ones(64)
  last['attention_mix']['query'], last['ffn_mix']['query'] = number, -number
  got = body_mixes(body, params)['query'][:, 0]
  want = np.repeat(np.arange(6.0), 2) * np.tile([1.0, -1.0], 6)
  np.testing.assert_array_equal(got, want)
