"""The arithmetic of the Hopper depth mix, emulated on a CPU.

The kernels are written against the few instructions of two modules. Here these
run on arrays of all consuming lanes of a block in lockstep. The ring is a list
of the rows that the producing lane asked for; each is handed over only where
the consumers expect it, and only if its slot was released.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_quantile_router_mosaic_gpu_emulated import (
  Machine,
  Real,
  instructions,
  like,
  plain,
)

from pallas_kernels.attention_residual import mix, mosaic_gpu
from pallas_kernels.attention_residual import mosaic_gpu_kernel as kernel
from pallas_kernels.attention_residual import mosaic_gpu_ring as ring_code
from pallas_kernels.attention_residual.arg_specs import ArgSpec
from pallas_kernels.attention_residual.mosaic_gpu_ring import Place
from pallas_kernels.kda import mosaic_gpu_warp as warp
from pallas_kernels.testing import assert_close

np_int, np_real = np.int32, np.float32
EPS = 1e-5


def bits(x):
  return np.ascontiguousarray(x).view(np_int)


def unpack(x):
  x = np.asarray(x, np_int)
  low, high = np.left_shift(x, np_int(16)), x & np_int(-65536)
  return Real(low.view(np_real)), Real(high.view(np_real))


def pack(low, high):
  half = lambda x: bits(np.asarray(jnp.bfloat16(x.value), np_real))
  upper = half(high) & np_int(-65536)
  return upper | ((half(low) >> np_int(16)) & np_int(0xFFFF))


def patched_warp(machine) -> dict:
  unary = lambda operation: lambda x: Real(operation(x.value))
  given = instructions(machine)

  def aligned(load):
    def checked(address, offset, count):
      assert not np.any((np.asarray(address) + offset) % (4 * count))
      return load(address, offset, count)

    return checked

  loads = ('load', 'load_real', 'load_global', 'load_global_words')
  given |= {name: aligned(given[name]) for name in loads}
  return given | dict(
    unpack=unpack,
    pack=pack,
    shift_right=lambda a, n: a >> np_int(n),
    quotient=lambda a, b: a // np_int(b),
    exp2=unary(np.exp2),
    rsqrt=unary(lambda x: 1 / np.sqrt(x)),
    reciprocal=unary(lambda x: 1 / x),
  )


def patched_ring(machine, number: int) -> dict:
  m = machine

  def iterate(start, count, values, body):
    for i in range(int(np.max(start)), int(np.max(count))):
      values = body(np_int(i), list(values))
    return list(values)

  def from_lane(x, lane):
    first = np.arange(m.lanes) // 32 * 32
    return like(x, m.wide(plain(x))[first + m.wide(lane)])

  return dict(
    iterate=iterate,
    from_lane=from_lane,
    word_from_lane=from_lane,
    maximum=lambda a, b: Real(np.maximum(a.value, b.value)),
    as_real=lambda x: Real(m.wide(x).view(np_real)),
    as_word=lambda x: bits(m.wide(x.value)),
    wait_for_readers=lambda threads: None,
    block=lambda: np_int(number),
    row_address=lambda base, row, size: base + np.int64(row) * size,
    store_once=lambda a, offset, words: m.store(m.memory, a, words, None),
  )


class Ring:
  """Stands in for `mosaic_gpu_ring.Ring`."""

  def __init__(self, plan, machine):
    self.plan, self.machine = plan, machine
    self.asked, self.taken = [], 0
    self.free = [True] * plan.slots

  def after(self, place):
    wraps = place.slot + 1 == self.plan.slots
    return Place(
      np_int(0 if wraps else place.slot + 1), np_int(place.parity ^ wraps)
    )

  def row(self, place):
    return np_int(place.slot * self.plan.row_bytes)

  def fetch(self, place, source):
    self.asked.append((place, int(np.max(source))))

  def wait(self, place):
    asked, source = self.asked[self.taken]
    self.taken += 1
    assert asked == place and self.free[place.slot]
    self.free[place.slot] = False
    words = self.plan.row_bytes // 4
    to, of = int(self.row(place)) // 4, source // 4
    self.machine.shared[to : to + words] = self.machine.memory[of : of + words]

  def release(self, place, lane):
    del lane
    assert not self.free[place.slot]
    self.free[place.slot] = True
    start = int(self.row(place)) // 4
    self.machine.shared[start : start + self.plan.row_bytes // 4] = -1


def emulate(monkeypatch, plan, arrays, consume):
  """Global memory after `consume(block, addresses)` of every block."""
  scratch = plan.slots * plan.row_bytes
  words = scratch // 4 + plan.scratch_words
  machine = Machine(plan.threads, words, arrays)
  machine.shared[:] = -1  # NaN
  for name, function in patched_warp(machine).items():
    monkeypatch.setattr(warp, name, function)
  monkeypatch.setattr(kernel, 'Real', Real)
  at = machine.pointers
  rows = kernel.Arrays(at['sources'], at.get('partial'))
  lanes = np.arange(plan.threads, dtype=np_int)
  live, order = arrays['live'][0], arrays['order']
  held = np.pad(order, (0, 32 - plan.count))
  for number in range(plan.blocks):
    for name, function in patched_ring(machine, number).items():
      monkeypatch.setattr(ring_code, name, function)
    block = kernel.Block(
      plan,
      Ring(plan, machine),
      np_int(scratch),
      lanes,
      lanes % 32,
      lanes // 32,
      np_int(live),
      held[lanes % 32],
    )
    extra = [at['do']] if 'do' in at else []
    kernel.produce(block, at['order'], rows, extra)
    consume(block, at)
    assert block.ring.taken == len(block.ring.asked)
    assert all(block.ring.free)
  return machine


def inputs_of(spec):
  """Arrays of the kernels, and those of the reference in float64."""
  positional, keywords = spec.arguments()
  mask = keywords.get('mask')
  arrays = [positional[0], keywords.get('partial'), *positional[1:]]
  arrays.append(keywords.get('norm_gain'))
  read = mosaic_gpu._inputs(arrays, mask)
  exact = [x if x is None else np.asarray(x, np.float64) for x in arrays]
  return {n: np.asarray(x) for n, x in read.items()}, exact, mask


def reference_gradients(exact, mask, cotangents):
  """Outputs, gradients (sources, partial, query, gain, norm_gain)."""

  def run(sources, partial, query, gain, norm_gain):
    return mix(
      sources,
      query,
      gain,
      partial=partial,
      mask=mask,
      norm_gain=norm_gain,
      return_weights=True,
      implementation='reference',
    )

  with jax.enable_x64(True):
    outputs, pull = jax.vjp(run, *exact)
    return outputs, pull(cotangents)


SPECS = (
  ArgSpec('plain', 3, (3,), 512, partial=False),
  ArgSpec('masked', 3, (3,), 768, masked=(1, 3)),
  ArgSpec('nothing', 1, (2,), 256, masked=(0, 1)),
  ArgSpec('float32', 2, (3,), 256, dtype='float32', normalized=True),
)


@pytest.mark.parametrize(
  'spec, resident',
  [*((spec, True) for spec in SPECS), (SPECS[1], False), (SPECS[3], False)],
  ids=lambda x: getattr(x, 'name', f'resident={x}'),
)
def test_both_passes(spec, resident, monkeypatch):
  read, exact, mask = inputs_of(spec)
  rng = np.random.default_rng(1)
  shape = (spec.count, *spec.tokens)
  do = jnp.asarray(rng.standard_normal((*spec.tokens, spec.width)), spec.dtype)
  d_weights = rng.standard_normal(shape).astype(np_real)
  wide = np.asarray(do, np.float64), d_weights.astype(np.float64)
  (out, weights), wanted = reference_gradients(exact, mask, wide)

  def plan_for(extra):
    plan = mosaic_gpu.plan_of(
      read['sources'].shape,
      spec.dtype,
      spec.partial,
      eps=EPS,
      extra=extra,
      passes=2 + (extra and spec.normalized),
    )
    slots = spec.count + extra + 3 if resident else spec.count + extra + 2
    return plan._replace(blocks=2, slots=slots)

  def close(got, want, output):
    assert_close(got, want, 'attention_residual', output, spec.dtype)

  poison = lambda shape, dtype: np.full(shape, np.nan, dtype)
  tokens = spec.tokens[0]
  written = {n: poison(shape, np_real) for n in ('rstd', 'logits', 'weights')}
  written['out'] = poison((tokens, spec.width), do.dtype)
  if spec.normalized:
    written['scale'] = poison((tokens,), np_real)
  machine = emulate(
    monkeypatch,
    plan_for(0),
    read | written,
    lambda block, at: kernel.forward(block, at, at),
  )
  got = {n: machine.array(n, x.shape, x.dtype) for n, x in written.items()}
  close(got['out'], out, 'out')
  close(got['weights'], weights, 'out')

  read |= {n: x for n, x in got.items() if n != 'out'}
  read |= dict(do=np.asarray(do), d_weights=d_weights)
  written = {'d_sources': poison(read['sources'].shape, do.dtype)}
  if spec.partial:
    written['d_partial'] = poison(do.shape, do.dtype)
  plan = plan_for(1)
  written['d_w'] = poison((plan.blocks, spec.width), np_real)
  if spec.normalized:
    written['d_norm_gain'] = written['d_w'].copy()

  def consume(block, at):
    d_rows = kernel.Arrays(at['d_sources'], at.get('d_partial'))
    kernel.backward(block, at, d_rows, at)

  machine = emulate(monkeypatch, plan, read | written, consume)
  got = {n: machine.array(n, x.shape, x.dtype) for n, x in written.items()}
  close(got['d_sources'], wanted[0], 'gradient')
  if spec.partial:
    close(got['d_partial'], wanted[1], 'gradient')
  dw_d = got['d_w'].astype(np.float64).sum(0)
  close(dw_d * exact[3], wanted[2], 'gradient')
  close(dw_d * exact[2], wanted[3], 'gradient')
  if spec.normalized:
    close(got['d_norm_gain'].sum(0), wanted[4], 'gradient')
