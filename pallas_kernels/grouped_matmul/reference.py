"""Grouped matmul by masks: every row times every weight. The tests' oracle.

It makes a [groups, rows, width] array: keep it away from real sizes.

Suffixes: g rows sorted by group, e groups, k input width, n output width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def grouped_matmul(lhs_gk, rhs_ekn, group_sizes_e):
  """`api.grouped_matmul` with gradients by automatic differentiation."""
  wide = jnp.promote_types(lhs_gk.dtype, jnp.float32)
  row_g = jnp.arange(lhs_gk.shape[0])
  end_e = jnp.cumsum(group_sizes_e)
  start_e = end_e - group_sizes_e
  member_eg = (row_g >= start_e[:, None]) & (row_g < end_e[:, None])
  used_gk = jnp.where(jnp.any(member_eg, axis=0)[:, None], lhs_gk, 0)
  product_egn = jnp.einsum(
    'gk,ekn->egn',
    used_gk.astype(wide),
    rhs_ekn.astype(lhs_gk.dtype).astype(wide),
    precision=jax.lax.Precision.HIGHEST,
  )
  out_gn = jnp.sum(jnp.where(member_eg[..., None], product_egn, 0), axis=0)
  return out_gn.astype(lhs_gk.dtype)
