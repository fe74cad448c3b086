"""Few tokens take copies of their experts: the same numbers as sorted rows."""

import jax
import jax.numpy as jnp
import numpy as np
from small_model import random_weights, small_config

from trimoe_jax.model import latent_moe
from trimoe_jax.model.parameters import map_table


def test_copied_experts_equal_sorted_rows(monkeypatch):
  with jax.enable_x64(True):
    config = small_config()
    rng = np.random.default_rng(0)
    params = map_table(
      lambda p: jnp.asarray(0.3 * rng.standard_normal(p.shape)),
      latent_moe.moe_parameters(config),
    )
    params.pop('shared')  # NaN in padding goes through it, and no further
    state = jax.tree.map(lambda x: x[0], random_weights(config)[1])
    mask = np.array([[True, True, False], [True] * 3])
    x = jnp.asarray(rng.standard_normal((2, 3, config.width)))
    x = x.at[~mask].set(jnp.nan)
    run = lambda: latent_moe.moe_layer(
      params, x, config, state=state, mask=mask
    )[0]
    little = run()
    monkeypatch.setattr(latent_moe, 'LITTLE', -1)
    np.testing.assert_allclose(little, run(), rtol=1e-12, atol=1e-12)
    assert bool(jnp.all(little[0, 2] == 0))
