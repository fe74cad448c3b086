"""Generation with the recurrent cache."""

from trimoe_jax.sampling.choose import Drawing, choose
from trimoe_jax.sampling.decode import State, advance
from trimoe_jax.sampling.prefill import prefill
from trimoe_jax.sampling.prompt import Prompts, pack
from trimoe_jax.sampling.sample import (
  generate,
  proceed,
  read,
  start,
  stream,
)
from trimoe_jax.sampling.serving import served, serving_params
from trimoe_jax.sampling.snapshot import fork, load, save

__all__ = [
  'Drawing',
  'Prompts',
  'State',
  'advance',
  'choose',
  'fork',
  'generate',
  'load',
  'pack',
  'prefill',
  'proceed',
  'read',
  'save',
  'served',
  'serving_params',
  'start',
  'stream',
]
