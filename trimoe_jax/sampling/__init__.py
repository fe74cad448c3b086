"""Generation with the recurrent cache."""

from trimoe_jax.sampling.decode import decode
from trimoe_jax.sampling.prefill import prefill
from trimoe_jax.sampling.sample import choose, generate

__all__ = ['choose', 'decode', 'generate', 'prefill']
