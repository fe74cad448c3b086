"""Times and the measured bandwidth that every benchmark's floor rests on."""

from __future__ import annotations

import statistics as stats
import time

import jax
import jax.numpy as jnp


def copy_bandwidth(repeats: int = 10) -> float:
  """Bytes a second that a 256 MiB negation reads and writes here."""
  x = jnp.ones(2**26, jnp.float32)
  return (
    2 * x.nbytes / median_seconds(jax.jit(jnp.negative), x, repeats=repeats)
  )


def median_seconds(function, *arguments, repeats: int) -> float:
  """Median wall time of a call after one that compiles."""
  jax.block_until_ready(function(*arguments))
  seconds = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    seconds.append(time.perf_counter() - start)
  return stats.median(seconds)
