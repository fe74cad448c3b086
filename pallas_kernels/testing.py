"""One tolerance table for every operation, and the error measure it is for.

The measure is the relative root mean square against float64,
||got - want|| / ||want||. A tolerance is never loosened in the change that
breaks it.
"""

from __future__ import annotations

import numpy as np

# (operation, output, dtype of the inputs) -> relative RMS that passes.
TOLERANCES: dict[tuple[str, str, str], float] = {
  ('kda', 'out', 'float32'): 1e-5,
  ('kda', 'final_state', 'float32'): 1e-5,
  ('kda', 'gradient', 'float32'): 1e-4,
  ('kda', 'out', 'bfloat16'): 5e-3,
  ('kda', 'final_state', 'bfloat16'): 5e-3,
  ('kda', 'q', 'bfloat16'): 6e-3,
  ('kda', 'k', 'bfloat16'): 6e-3,
  ('kda', 'v', 'bfloat16'): 6e-3,
  ('kda', 'initial_state', 'bfloat16'): 6e-3,
  ('kda', 'gate', 'bfloat16'): 6e-3,
  ('kda', 'beta', 'bfloat16'): 6e-3,
  ('kda', 'dt_bias', 'bfloat16'): 8e-3,
  ('kda', 'a_log', 'bfloat16'): 1e-2,
  ('attention_residual', 'out', 'float32'): 1e-5,
  ('attention_residual', 'gradient', 'float32'): 1e-5,
  ('attention_residual', 'out', 'bfloat16'): 4e-3,
  ('attention_residual', 'gradient', 'bfloat16'): 8e-3,
  ('grouped_matmul', 'out', 'float32'): 1e-5,
  ('grouped_matmul', 'gradient', 'float32'): 1e-5,
  ('grouped_matmul', 'out', 'bfloat16'): 4e-3,
  ('grouped_matmul', 'gradient', 'bfloat16'): 8e-3,
}


def relative_rms(got, want) -> float:
  """||got - want|| / ||want|| in float64; the norm of `got` if `want` is 0."""
  got = np.asarray(got, np.float64)
  want = np.asarray(want, np.float64)
  if got.shape != want.shape:
    raise ValueError(f'shapes differ: got {got.shape}, want {want.shape}.')
  scale = np.linalg.norm(want)
  return float(np.linalg.norm(got - want) / (scale if scale > 0 else 1.0))


def assert_close(got, want, operation: str, output: str, dtype: str):
  """Raises AssertionError when `got` is outside the table's tolerance."""
  allowed = TOLERANCES[operation, output, dtype]
  error = relative_rms(got, want)
  if not error <= allowed:  # also catches NaN
    raise AssertionError(
      f'{operation} {output} ({dtype}): relative RMS {error:.2e}, allowed '
      f'{allowed:.0e}.'
    )
