"""Public implementations of KDA for GPUs, timed beside ours if installed.

Every peer does the work of `kda` at K = V = 128 in bfloat16: the bounded gate
with lower bound -5, the sigmoid of beta and the L2 norm of queries and keys are
inside what is timed, no initial state, gradients of every input.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

# A peer's distribution and module.
PEERS = {
  'fla': ('flash-linear-attention', 'fla'),
  'jla': ('jax-linear-attention', 'jla'),
}
# FlashKDA's forward over fla's, from one run on an H200 at 1 x 8192 x 96.
FLASHKDA_OVER_FLA = 0.556
BOUND = -5.0


def missing(name: str) -> str | None:
  """Why a peer cannot be timed here, or None.

  Raises:
    ValueError: there is no such peer.
  """
  if name not in PEERS:
    raise ValueError(f'{name!r} is no peer; choose among {sorted(PEERS)}.')
  distribution, module = PEERS[name]
  if importlib.util.find_spec(module) is None:
    return f'{name} is not installed; `pip install {distribution}` first.'
  if jax.default_backend() != 'gpu':
    return f'{name} needs a GPU; this is {jax.default_backend()}.'
  return None


def version(name: str) -> str:
  return importlib.metadata.version(PEERS[name][0])


def batched_seconds(
  call: Callable, argument_sets, wait: Callable, *, batches: int = 7
) -> float:
  """Median time of a call in batches that are waited for once.

  Args:
    call: starts the work on one set of arguments and returns its results.
    argument_sets: rotate, so that none is still in a cache when it comes again.
    wait: waits for results.
    batches: timed, after each set was used twice.
  """
  for _ in range(2):
    for arguments in argument_sets:
      wait(call(arguments))
  launches = _launches(call, argument_sets[0], wait)
  seconds = []
  for _ in range(batches):
    start = time.perf_counter()
    for i in range(launches):
      results = call(argument_sets[i % len(argument_sets)])
    wait(results)
    seconds.append((time.perf_counter() - start) / launches)
  return statistics.median(seconds)


def _launches(call, arguments, wait) -> int:
  """Enough for 20 ms or so, which hides the start and the end of a batch."""
  start = time.perf_counter()
  wait(call(arguments))
  return max(4, min(40, round(0.02 / (time.perf_counter() - start))))


def inputs(batch: int, length: int, heads: int, seed: int = 0) -> dict:
  """Raw arguments by name, and the cotangent of the output."""
  keys = jax.random.split(jax.random.key(seed), 6)
  wide = batch, length, heads, 128
  names = 'q', 'k', 'v', 'gate', 'cotangent'
  arrays = {
    name: jax.random.normal(key, wide, jnp.bfloat16)
    for name, key in zip(names, keys)
  }
  arrays['beta'] = jax.random.normal(keys[5], wide[:3], jnp.bfloat16)
  arrays['a_log'] = jnp.zeros((heads,))
  arrays['dt_bias'] = jnp.full((heads, 128), -3.0)
  return arrays


def segment_ids(documents) -> jax.Array:
  """[1, T]: documents of these lengths, one behind the other."""
  numbers = jnp.arange(1, len(documents) + 1, dtype=jnp.int32)
  return jnp.repeat(numbers, jnp.asarray(documents))[None]


def time_jax(function, sets, kind: str) -> tuple[float, int]:
  """Seconds, and bytes beyond the arguments.

  Args:
    function: of the dictionary that `inputs` makes; returns the output.
    sets: several such dictionaries.
    kind: 'forward', or 'gradient' for both passes.
  """

  def both(arrays):
    arrays = dict(arrays)
    cotangent = arrays.pop('cotangent')
    out, pull = jax.vjp(function, arrays)
    # Without the output the forward pass might not run at all.
    return out, pull(cotangent.astype(out.dtype))[0]

  def forward(arrays):
    return function({n: x for n, x in arrays.items() if n != 'cotangent'})

  timed = jax.jit(forward if kind == 'forward' else both)
  compiled = timed.lower(sets[0]).compile()
  memory = compiled.memory_analysis()
  seconds = batched_seconds(compiled, sets, jax.block_until_ready)
  return seconds, memory.temp_size_in_bytes + memory.output_size_in_bytes


def _jla(arrays: dict, ids=None) -> jax.Array:
  from jla.ops import linear_attention

  logits = arrays['gate'].astype(jnp.float32) + arrays['dt_bias']
  rate = jnp.exp(arrays['a_log'])[:, None]
  options = {} if ids is None else {'segment_ids': ids}
  return linear_attention(
    'kda',
    *(arrays[name] for name in 'qkv'),
    g=BOUND * jax.nn.sigmoid(rate * logits),
    beta=jax.nn.sigmoid(arrays['beta'].astype(jnp.float32)),
    scale=128**-0.5,
    use_qk_l2norm=True,
    **options,
  )[0]


class _Fla:
  """fla's `chunk_kda` on torch copies of the same inputs."""

  def __init__(self, sets, documents):
    os.environ.setdefault('FLA_FLASH_KDA', '0')  # its own Triton kernels
    import torch

    self._torch, self._more = torch, {}
    if documents is not None:
      ends = torch.tensor([0, *documents], device='cuda').cumsum(0)
      self._more['cu_seqlens'] = ends
    jax.block_until_ready(sets)
    self._sets = [jax.tree.map(torch.from_dlpack, s) for s in sets]
    for arrays in self._sets:
      arrays['dt_bias'] = arrays['dt_bias'].reshape(-1)

  def _run(self, arrays):
    from fla.ops.kda import chunk_kda

    return chunk_kda(
      *(arrays[name] for name in ('q', 'k', 'v', 'gate', 'beta')),
      A_log=arrays['a_log'],
      dt_bias=arrays['dt_bias'],
      scale=128**-0.5,
      use_gate_in_kernel=True,
      use_qk_l2norm_in_kernel=True,
      use_beta_sigmoid_in_kernel=True,
      safe_gate=True,
      lower_bound=BOUND,
      **self._more,
    )[0]

  def _both(self, arrays):
    names = [name for name in arrays if name != 'cotangent']
    leaves = {name: arrays[name].requires_grad_() for name in names}
    out = self._run(leaves)
    leaves = list(leaves.values())
    return self._torch.autograd.grad(out, leaves, arrays['cotangent'])

  def seconds(self, kind: str) -> tuple[float, int]:
    torch = self._torch
    call = self._run if kind == 'forward' else self._both
    wait = lambda results: torch.cuda.synchronize()
    with torch.inference_mode(kind == 'forward'):
      wait(call(self._sets[0]))  # autotunes
      torch.cuda.reset_peak_memory_stats()
      before = torch.cuda.memory_allocated()
      wait(call(self._sets[0]))
      used = torch.cuda.max_memory_allocated() - before
      return batched_seconds(call, self._sets, wait), used


def measure(
  name: str, sets, kinds, documents=None
) -> Iterator[tuple[str, float, int]]:
  """For each kind: (kind, seconds, bytes beyond the arguments).

  Args:
    name: of a peer that is not `missing`.
    sets: several dictionaries as `inputs` makes them.
    kinds: 'forward', 'gradient'.
    documents: lengths of packed documents, or None.
  """
  if name == 'fla':
    fla = _Fla(sets, documents)
    for kind in kinds:
      yield kind, *fla.seconds(kind)
    return
  ids = None if documents is None else segment_ids(documents)
  for kind in kinds:
    yield kind, *time_jax(functools.partial(_jla, ids=ids), sets, kind)
