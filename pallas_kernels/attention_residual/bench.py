"""Time of the depth mix, against its floor and other implementations.

The floor is the traffic that cannot be avoided over the bandwidth of a large
copy, measured in the same process: the forward pass reads every source and
writes the output; the backward pass reads the sources and the output's
cotangent and writes the sources' cotangents. Inputs of a GPU's default specs
are larger than its caches.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.attention_residual.api import mix
from pallas_kernels.attention_residual.arg_specs import ArgSpec, tagged
from pallas_kernels.timing import copy_bandwidth, median_seconds

COLUMNS = ('spec', 'pass', 'by', 'ms', 'floor_ms', 'times_floor', 'peer_ratio')
PASSES = ('forward', 'backward', 'gradient')
_LAUNCHES = 8  # of a GPU, waited for once


def run(
  specs: Iterable[ArgSpec] | None = None,
  *,
  implementation: str | None = None,
  repeats: int = 10,
  bandwidth: float | None = None,
) -> list[dict[str, float | str]]:
  """Rows for each spec, pass and implementation, printed and returned.

  `gradient` is both passes in one program. `peer_ratio` is the time of a row
  over ours: above 1 ours is faster. The peers are XLA, or the reference where
  ours is XLA, and on a GPU fla's fused operation if it is installed.

  Args:
    specs: None takes those tagged 'device' on a GPU, else 'bench'.
    implementation: of ours, as for `mix`.
    repeats: timed calls, of which the median is reported.
    bandwidth: bytes a second for the floor; None measures it.
  """
  on_gpu = dispatch.device_kind() == 'gpu'
  if bandwidth is None:
    bandwidth = _copy_bandwidth(repeats) if on_gpu else copy_bandwidth(repeats)
  peers = {'xla': _Jax('xla')} if on_gpu else {'reference': _Jax('reference')}
  if on_gpu and importlib.util.find_spec('fla') is None:
    print('fla is not installed; `pip install flash-linear-attention` first.')
  elif on_gpu:
    peers['fla'] = _Fla()
  print(' '.join(f'{name:>12}' for name in COLUMNS))
  rows = []
  for spec in (
    tagged('device' if on_gpu else 'bench') if specs is None else specs
  ):
    arrays = inputs(spec)
    for kind in PASSES:
      floor = traffic(spec, kind) / bandwidth
      ours = None
      for name, peer in ({'ours': _Jax(implementation)} | peers).items():
        if name == 'fla' and (spec.masked or not spec.partial):
          continue
        seconds = _seconds(peer.prepare(arrays, kind), peer.wait, repeats)
        ours = ours or seconds
        values = seconds * 1e3, floor * 1e3, seconds / floor, seconds / ours
        rows.append(dict(zip(COLUMNS, (spec.name, kind, name, *values))))
        cells = ' '.join(f'{value:12.3f}' for value in values)
        print(f'{spec.name:>12} {kind:>12} {name:>12} {cells}', flush=True)
  return rows


def traffic(spec: ArgSpec, kind: str) -> int:
  """Bytes that a pass, or both, have to move once."""
  row = math.prod(spec.tokens) * spec.width * jnp.dtype(spec.dtype).itemsize
  forward, backward = (spec.count + 1) * row, (2 * spec.count + 1) * row
  moved = {'forward': forward, 'backward': backward}
  return moved.get(kind, forward + backward)


def inputs(spec: ArgSpec) -> dict[str, jax.Array]:
  """Arguments of `mix` by name, and the cotangent of its output."""
  keys = jax.random.split(jax.random.key(0), 5)
  shape = (*spec.tokens, spec.width)
  normal = functools.partial(jax.random.normal, dtype=jnp.dtype(spec.dtype))
  arrays = dict(
    sources=normal(keys[0], (spec.sources, *shape)),
    query=jax.random.normal(keys[1], shape[-1:]) / spec.width**0.5,
    gain=1 + 0.3 * jax.random.normal(keys[2], shape[-1:]),
    cotangent=normal(keys[3], shape),
  )
  if spec.partial:
    arrays['partial'] = normal(keys[4], shape)
  if spec.normalized:
    arrays['norm_gain'] = arrays['gain']
  if spec.masked:
    places = jnp.arange(spec.count)
    arrays['mask'] = ~jnp.isin(places, jnp.asarray(spec.masked))
  return arrays


def _copy_bandwidth(repeats: int) -> float:
  """Bytes a second that negations of a gigabyte read and write."""
  x = jnp.ones(2**28, jnp.float32)
  call = functools.partial(jax.jit(jnp.negative), x)
  return 2 * x.nbytes / _seconds(call, jax.block_until_ready, repeats)


def _seconds(call: Callable, wait: Callable, repeats: int) -> float:
  """Median time; on a GPU of several calls that are waited for once."""
  launches = _LAUNCHES if dispatch.device_kind() == 'gpu' else 1

  def several():
    for _ in range(launches):
      results = call()
    wait(results)

  return median_seconds(several, repeats=repeats) / launches


class _Jax:
  """`mix` by one implementation."""

  wait = staticmethod(jax.block_until_ready)

  def __init__(self, implementation: str | None):
    self._implementation = implementation

  def prepare(self, arrays, kind: str) -> Callable:
    """A function without arguments that starts the work."""
    arrays = dict(arrays)
    do, mask = arrays.pop('cotangent'), arrays.pop('mask', None)

    def forward(arrays, mask):
      return mix(**arrays, mask=mask, implementation=self._implementation)

    def pulling(arrays, mask):
      return jax.vjp(lambda arrays: forward(arrays, mask), arrays)

    def gradient(arrays, mask, do):
      out, pull = pulling(arrays, mask)
      return out, pull(do)

    if kind == 'forward':
      return functools.partial(jax.jit(forward), arrays, mask)
    if kind == 'gradient':
      return functools.partial(jax.jit(gradient), arrays, mask, do)
    _, pull = jax.jit(pulling)(arrays, mask)
    return functools.partial(jax.jit(lambda pull, do: pull(do)), pull, do)


class _Fla:
  """fla's `fused_attnres` on torch copies of the same inputs."""

  def prepare(self, arrays, kind: str) -> Callable:
    """A function without arguments that starts the work."""
    import torch
    from fla.ops.attnres import fused_attnres

    jax.block_until_ready(arrays)
    given = {name: torch.from_dlpack(x) for name, x in arrays.items()}
    do = given.pop('cotangent')
    sources = [*given['sources'].unbind(0), given['partial']]
    leaves = [x.detach() for x in (given['query'], given['gain'], *sources)]
    norm = [given['norm_gain'].detach()] if 'norm_gain' in given else []
    leaves, count = leaves + norm, len(sources)

    def forward():
      query, gain, *sources = leaves[: 2 + count]
      norm_gain = leaves[2 + count] if norm else None
      return fused_attnres(query, sources, gain, norm_gain, rms_eps=1e-5)

    if kind == 'forward':
      return torch.inference_mode()(forward)
    leaves = [x.requires_grad_() for x in leaves]
    if kind == 'gradient':
      return lambda: torch.autograd.grad(forward(), leaves, do)
    out = forward()
    return lambda: torch.autograd.grad(out, leaves, do, retain_graph=True)

  @staticmethod
  def wait(results):
    import torch

    torch.cuda.synchronize()
