"""Time of a whole KDA layer on one device, beside fla's in PyTorch.

  python -m experiments.bench kda_layer --shape=4x8192x16 --peers=fla

Projections, convolutions, recurrence, gated norm and output. The forward pass
returns the output, the gradient pass also the gradients of x and of every
parameter. Calls are started in batches and waited for once. The floor is the
larger of two times: the operations over the rate of one large product, and the
least traffic of the recurrence over the bandwidth of a large copy, both
measured here.

The peer is `fla.layers.kda.KimiDeltaAttention` with the bounded gate and an
output gate of full rank, as ours has, on the same parameters, cast to bfloat16.
Its column `differs` is the relative rms distance of its output from ours.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda import bench, device_bench
from pallas_kernels.kda import peers as kda_peers
from pallas_kernels.testing import relative_rms
from trimoe_jax.config import KdaConfig, ModelConfig
from trimoe_jax.model.kda import kda_layer, kda_parameters
from trimoe_jax.model.parameters import initialize

COLUMNS = (
  *('by', 'pass', 'ms', 'floor_ms', 'times_floor'),
  *('times_ours', 'MiB', 'differs'),
)
PASSES = ('forward', 'gradient')
PEERS = ('fla', 'fla_compiled')


def run(
  *,
  shape: str = '4x8192x16',
  width: int = 2048,
  head_dim: int = 128,
  remat: str = 'full',
  implementation: str | None = None,
  peers: str = '',
) -> list[dict[str, float | str]]:
  """Two rows for each layer, printed and returned.

  Args:
    shape: B x T x H.
    width: of the model.
    head_dim: of keys and values, and the rank of the decay's projection.
    remat: the model's; it says what the recurrence keeps for its gradient,
      everything with 'full', states with 'block'.
    implementation: of the recurrence.
    peers: 'fla', 'fla_compiled' (by torch.compile), by commas.

  Raises:
    ValueError: a shape of another form, an unknown peer, or one that is not
      installed or cannot run here.
  """
  others = [name for name in peers.split(',') if name]
  _check_peers(others)
  shape = device_bench.parse(shape)
  case = Case(_config(shape, width, head_dim, remat, implementation), shape)
  rates = device_bench.matmul_rate(), device_bench.copy_bandwidth()
  table = _Table([case.floor(kind, *rates) for kind in PASSES])
  for row in case.measure():
    table.add('ours', *row)
  for name in others:
    for row in FlaLayer(case, name == 'fla_compiled').measure():
      table.add(name, *row)
  return table.rows


def _check_peers(names):
  for name in names:
    if name not in PEERS:
      raise ValueError(f'{name!r} is no peer; choose among {PEERS}.')
    reason = kda_peers.missing('fla')
    if reason is not None:
      raise ValueError(reason)


def _config(shape, width, head_dim, remat, implementation) -> ModelConfig:
  kda = KdaConfig(
    heads=shape.heads,
    key_dim=head_dim,
    value_dim=head_dim,
    gate_rank=head_dim,
    implementation=implementation,
  )
  return ModelConfig(width=width, kda=kda, remat=remat)


@dataclasses.dataclass(frozen=True)
class Case:
  """One layer with its parameters and inputs."""

  config: ModelConfig
  shape: device_bench.Shape

  @property
  def params(self):
    return initialize(kda_parameters(self.config), jax.random.key(0))

  @property
  def tokens(self) -> tuple[jax.Array, jax.Array]:
    """(x, the output's cotangent), [B, T, d] bfloat16."""
    size = self.shape.batch, self.shape.length, self.config.width
    keys = jax.random.split(jax.random.key(1))
    return tuple(jax.random.normal(key, size, jnp.bfloat16) for key in keys)

  def forward(self, params, x_btd):
    return kda_layer(params, x_btd, self.config)[0]

  def gradient(self, params, x_btd, dy_btd):
    y_btd, pull = jax.vjp(self.forward, params, x_btd)
    return y_btd, pull(dy_btd)

  def measure(self):
    """(pass, seconds, bytes beyond arguments, distance from itself)."""
    params, (x_btd, dy_btd) = self.params, self.tokens
    for kind, arguments in zip(PASSES, ((x_btd,), (x_btd, dy_btd))):
      timed = jax.jit(getattr(self, kind)).lower(params, *arguments).compile()
      call = lambda arguments, timed=timed: timed(params, *arguments)
      wait = jax.block_until_ready
      seconds = kda_peers.batched_seconds(call, [arguments], wait)
      memory = timed.memory_analysis()
      used = memory.temp_size_in_bytes + memory.output_size_in_bytes
      yield kind, seconds, used, 0.0

  def floor(self, kind: str, rate: float, bandwidth: float) -> float:
    """Seconds that a pass takes at least."""
    spec = self.shape.spec
    products = 2 * spec.batch * spec.length * self.matrix_size
    products *= 1 if kind == 'forward' else 3
    products += bench.operations(spec, kind, 64)
    return max(products / rate, bench.traffic(spec, kind) / bandwidth)

  @property
  def matrix_size(self) -> int:
    """Numbers in the matrices that tokens are multiplied with."""
    table = kda_parameters(self.config)
    small = ('a_log', 'dt_bias', 'out_norm')
    names = [n for n in table if n not in small and not n.endswith('_conv')]
    return sum(math.prod(table[name].shape) for name in names)


class FlaLayer:
  """fla's layer with the parameters of a case."""

  def __init__(self, case: Case, compiled: bool):
    import torch

    self._torch, self._case = torch, case
    module = self._module(case.config)
    with torch.no_grad():
      for name, value in _fla_parameters(case.params).items():
        parameter = module.get_parameter(name)
        parameter.copy_(self._tensor(value).reshape(parameter.shape))
    self._module = module
    self._call = torch.compile(module) if compiled else module
    self._x, self._dy = map(self._tensor, case.tokens)
    self._x.requires_grad_()

  def _tensor(self, x: jax.Array):
    torch = self._torch
    wide = torch.from_numpy(np.array(x.astype(jnp.float32)))
    kind = torch.bfloat16 if x.dtype == jnp.bfloat16 else torch.float32
    return wide.to('cuda', kind)

  def _module(self, config: ModelConfig):
    from fla.layers.kda import KimiDeltaAttention

    torch, c = self._torch, config.kda
    module = KimiDeltaAttention(
      hidden_size=config.width,
      head_dim=c.key_dim,
      num_heads=c.heads,
      safe_gate=True,
      lower_bound=c.lower_bound,
      norm_eps=config.norm_eps,
      layer_idx=0,
    )
    values = c.heads * c.value_dim
    module.g_proj = torch.nn.Linear(config.width, values, bias=False)
    module = module.cuda().bfloat16().train()
    for parameter in (module.A_log, module.dt_bias):
      parameter.data = parameter.data.float()
    return module

  def _forward(self, _):
    with self._torch.no_grad():
      return self._call(self._x)[0]

  def _gradient(self, _):
    self._call(self._x)[0].backward(self._dy)
    self._module.zero_grad(set_to_none=True)
    self._x.grad = None

  def measure(self):
    """(pass, seconds, bytes beyond arguments, distance of the output)."""
    torch, case = self._torch, self._case
    ours = jax.jit(case.forward)(case.params, case.tokens[0])
    theirs = self._forward(None).float().cpu().numpy()
    differs = relative_rms(theirs, np.asarray(ours, np.float32))
    wait = lambda results: torch.cuda.synchronize()
    for kind, call in zip(PASSES, (self._forward, self._gradient)):
      wait(call(None))
      torch.cuda.reset_peak_memory_stats()
      before = torch.cuda.memory_allocated()
      wait(call(None))
      used = torch.cuda.max_memory_allocated() - before
      seconds = kda_peers.batched_seconds(call, [None], wait)
      yield kind, seconds, used, differs


def _fla_parameters(params) -> dict[str, jax.Array]:
  """Ours by the names that fla gives them; its matrices are transposed."""
  matrix = lambda name: params[name].reshape(params[name].shape[0], -1).T
  names = {'q': 'query', 'k': 'key', 'v': 'value', 'g': 'gate', 'b': 'beta'}
  found = {f'{f}_proj.weight': matrix(ours) for f, ours in names.items()}
  for f, ours in list(names.items())[:3]:
    found[f'{f}_conv1d.weight'] = params[f'{ours}_conv']
  d = params['out'].shape[2]
  return found | {
    'f_proj.0.weight': matrix('decay_down'),
    'f_proj.1.weight': matrix('decay_up'),
    'A_log': params['a_log'],
    'dt_bias': params['dt_bias'],
    'o_norm.weight': params['out_norm'],
    'o_proj.weight': params['out'].reshape(-1, d).T,
  }


class _Table:
  """Rows of the benchmark, printed as they come."""

  def __init__(self, floors):
    self.rows, self._floors = [], dict(zip(PASSES, floors))
    self._ours: dict[str, float] = {}
    print(' '.join(f'{name:>12}' for name in COLUMNS))

  def add(self, by: str, kind: str, seconds: float, used: int, differs: float):
    ours, floor = self._ours.setdefault(kind, seconds), self._floors[kind]
    times = seconds * 1e3, floor * 1e3, seconds / floor, seconds / ours
    values = *times, used / 2**20, differs
    self.rows.append(dict(zip(COLUMNS, (by, kind, *values))))
    cells = ' '.join(f'{value:12.3f}' for value in values[:-1])
    print(f'{by:>12} {kind:>12} {cells} {differs:12.1e}', flush=True)
