"""RMSNorm with float32 statistics."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
  """x / sqrt(mean(x^2) + eps) * gain over the last axis, in x's dtype.

  As in the released code the normalized value is rounded to the dtype of `x`
  before the gain multiplies it.

  Args:
    x: [..., d], any float dtype; statistics are float32.
    gain: [d].
    eps: added to the mean square.
  """
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
  return (wide * scale).astype(x.dtype) * gain.astype(x.dtype)
