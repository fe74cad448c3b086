"""The states that enter the pieces of a chain, on Hopper.

A range of chunks maps its entering state S to M S + b (Kimi Linear, arXiv
2510.26692, by chunks: M = M_N ... M_1 with M_n = diag(gamma_n) - W_n^T k~_n).
`maps` multiplies M from the last chunk backwards and stops at the chunk where
the product so far has vanished, which with real decay is soon: from there on M
is zero, and what came before changes b no more. A scan from zero, from that
chunk on, gives b, and `fold` takes a state through the pieces.

Where M does not vanish every chunk is read, at the cost of two more scans.

The cotangent that leaves a range maps to M^T dS + c, the one that enters it.
There `maps` multiplies from the first chunk on: where it stops, nothing that
comes later reaches the start of the range. Pieces then count from the last one.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels.kda import mosaic_gpu_chain as chain
from pallas_kernels.kda import mosaic_gpu_scan as scan_kernel
from pallas_kernels.kda import mosaic_gpu_warp as warp
from pallas_kernels.kda.mosaic_gpu_chain import PER_COLUMN, ROWS, STAGES, TILE
from pallas_kernels.kda.mosaic_gpu_place import CHUNK, WIDTH

_GROUPS = WIDTH // ROWS
_SCALAR = plgpu.Layout.WG_SPLAT(())
# A map all of whose entries are smaller is zero: states enter with 2^-24.
VANISHED = 2.0**-40
_BARRIER = 8  # a hardware barrier that nothing else here uses


def _identity(rows) -> jax.Array:
  """Rows of the identity, from 64 * `rows` on."""
  index = [
    plgpu.broadcasted_iota(jnp.int32, (ROWS, WIDTH), i, layout=TILE)
    for i in range(2)
  ]
  return jnp.where(index[0] + rows * ROWS == index[1], 1.0, 0.0)


def _largest_bits(array: mgpu.FragmentedArray) -> ir.Value:
  """Bits of a thread's largest magnitude, NaN above all; they sort alike."""
  largest = warp.word(0)
  for pair in array.registers.flat:
    for i in range(2):
      x = vector.extract(pair, dynamic_position=[], static_position=[i])
      bits = arith.bitcast(ir.IntegerType.get_signless(32), x)
      largest = arith.maxsi(largest, warp.bit_and(bits, 0x7FFFFFFF))
  return largest


def _all_small(x: jax.Array, shared) -> jax.Array:
  """1 if the rows of both warpgroups have vanished, else 0; also stored."""
  scalar = plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)

  @plgpu.inline_mgpu(arg_types=(TILE, plgpu.RefType()), return_type=scalar)
  def decide(ctx, x, shared):
    del ctx
    limit = jnp.float32(VANISHED).view(jnp.int32).item()
    large = warp.compare(_largest_bits(x), 'sge', limit)
    small = warp.where(large, warp.word(0), warp.word(1))
    # A barrier of 256 threads that also combines what they say.
    small = utils.inline_ptx(
      '{ .reg .pred p, q; setp.ne.s32 q, $1, 0; '
      f'barrier.cta.red.and.pred p, {_BARRIER}, {_GROUPS * 128}, q; '
      'selp.s32 $0, 1, 0, p; }',
      small,
      result_types=small.type,
      has_side_effects=True,
      convergent=True,
    )
    warp.store(warp.shared_address(shared), 0, [small])
    return mgpu.FragmentedArray.splat(small, (), is_signed=True)

  return decide(x, shared)


def _stored(shared) -> jax.Array:
  """What `_all_small` stored last."""
  scalar = plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=scalar)
  def load(ctx, shared):
    del ctx
    (small,) = warp.load(warp.shared_address(shared), 0, 1)
    return mgpu.FragmentedArray.splat(small, (), is_signed=True)

  return load(shared)


def _multiply(place, refs, reverse: bool):
  """One warpgroup's rows of M, of M^T if reverse, and the chunks it took."""
  outer, stage, (full, empty) = refs
  b, head, piece, _, chunks = place
  rows = lax.axis_index('role')

  def step(carry):
    i, _, x_lk = carry
    slot = lax.rem(i, STAGES)
    plgpu.barrier_wait(full.at[slot])
    left = x_lk.astype(jnp.bfloat16)
    decay = chain.load(stage['gamma'].at[slot], PER_COLUMN)
    kept_lk = x_lk * lax.broadcast_in_dim(decay, x_lk.shape, [1])
    zero = chain.zeros((ROWS, CHUNK))
    names = reversed(_OPERANDS) if reverse else _OPERANDS
    second, first = (stage[name].at[slot] for name in names)
    (e_lc,) = chain.accumulate((zero, [(left, first.T)]))
    left = e_lc.astype(jnp.bfloat16)
    (x_lk,) = chain.accumulate((kept_lk, [(left, second)]))
    small = _all_small(x_lk, stage['small'])
    plgpu.barrier_arrive(empty.at[slot])
    return i + 1, small, x_lk

  going = lambda carry: (carry[0] < chunks) & (carry[1] == 0)
  start = jnp.int32(0), jnp.int32(0), _identity(rows)
  taken, small, x_lk = lax.while_loop(going, step, start)

  @pl.when(taken < chunks)
  def _():  # its copies must not arrive in shared memory of another block
    plgpu.barrier_wait(full.at[lax.rem(taken, STAGES)])

  x_lk = jnp.where(small != 0, 0.0, x_lk)
  own = pl.ds(rows * ROWS, ROWS)
  outer['map'].at[b, head, piece, own][...] = x_lk

  @pl.when(rows == 0)
  def _():
    first = lax.broadcast_in_dim(chunks - taken, (WIDTH,), [])
    outer['first'].at[b, head, piece][...] = first


def _produce(place, refs, reverse: bool):
  """Fetches chunks from the last, or the first, on until M has vanished."""
  outer, stage, (full, empty) = refs
  b, head, _, first, chunks = place

  def fetch(i):
    slot = lax.rem(i, STAGES)
    n = first + (i if reverse else chunks - 1 - i)
    tokens = pl.ds(n * CHUNK, CHUNK)
    copies = [(outer[x].at[b, head, tokens], x) for x in _OPERANDS]
    for source, name in [*copies, (outer['gamma'].at[b, head, n], 'gamma')]:
      plgpu.copy_gmem_to_smem(source, stage[name].at[slot], full.at[slot])

  pl.loop(0, jnp.minimum(chunks, STAGES))(fetch)

  def step(carry):
    i, _ = carry
    plgpu.barrier_wait(empty.at[lax.rem(i, STAGES)])
    small = _stored(stage['small'])
    pl.when(small == 0)(lambda: fetch(i))
    return i + 1, small

  going = lambda carry: (carry[0] < chunks) & (carry[1] == 0)
  lax.while_loop(going, step, (jnp.int32(STAGES), jnp.int32(0)))


_OPERANDS = ('minus_key', 'update')


def _maps_body(sizes, reverse: bool, outer, stage, barriers, done):
  """One thread block: one piece of one chain."""
  heads, chunks, pieces = sizes
  index = lax.axis_index('block')
  head, rest = lax.rem(index, heads), lax.div(index, heads)
  piece, b = lax.rem(rest, pieces - 1), lax.div(rest, pieces - 1)
  longest = pl.cdiv(chunks, pieces)
  first = (pieces - 1 - piece if reverse else piece) * longest
  count = jnp.minimum(longest, chunks - first)
  place, refs = (b, head, piece, first, count), (outer, stage, barriers)
  chain.run_roles(
    _GROUPS,
    lambda: _multiply(place, refs, reverse),
    lambda: _produce(place, refs, reverse),
    done,
  )


def maps(
  arrays: dict[str, jax.Array], pieces: int, *, reverse: bool = False
) -> dict[str, jax.Array]:
  """The linear maps of all pieces but the last, or in reverse but the first.

  Args:
    arrays: minus_key, update, gamma as in `mosaic_gpu_scan.scan`.
    pieces: at least 2, each of ceil(chunks / pieces) chunks but the last,
      which has at least one.
    reverse: pieces are those of cotangents, counted from the chain's end.

  Returns:
    map [B, HV, P - 1, 128, 128] float32, M, in reverse M^T; first
    [B, HV, P - 1, 128] int32, one number 128 times: the chunk of the piece, in
    the order of the scan, before which nothing matters.
  """
  batch, heads, padded, _ = arrays['minus_key'].shape
  lead = batch, heads, pieces - 1
  written = {
    'map': jax.ShapeDtypeStruct((*lead, WIDTH, WIDTH), jnp.float32),
    'first': jax.ShapeDtypeStruct((*lead, WIDTH), jnp.int32),
  }
  read = {name: arrays[name] for name in (*_OPERANDS, 'gamma')}
  sizes = heads, padded // CHUNK, pieces
  shared = {name: chain.tile(STAGES, CHUNK, WIDTH) for name in _OPERANDS}
  shared['gamma'] = plgpu.SMEM((STAGES, WIDTH), jnp.float32)
  shared['small'] = plgpu.SMEM((1,), jnp.int32)
  return chain.launch(
    'kda_maps',
    functools.partial(_maps_body, sizes, reverse),
    (read, written),
    math.prod(lead),
    chain.Block(_GROUPS, shared, len(_OPERANDS) + 1),
  )


def _moved(s_vk: jax.Array, constant, matrix, parts) -> jax.Array:
  """S^T M^T + b^T, with both factors in two bfloat16 parts."""
  for half in range(WIDTH // ROWS):
    rows = pl.ds(half * ROWS, ROWS)
    x = chain.load(matrix.at[rows])
    leading = x.astype(jnp.bfloat16)
    parts[0].at[rows][...] = leading
    trailing = x - leading.astype(jnp.float32)
    parts[1].at[rows][...] = trailing.astype(jnp.bfloat16)
  plgpu.commit_smem()
  leading = s_vk.astype(jnp.bfloat16)
  trailing = (s_vk - leading.astype(jnp.float32)).astype(jnp.bfloat16)

  def products(acc):
    plgpu.wgmma(acc, trailing, parts[0].T)
    plgpu.wgmma(acc, leading, parts[1].T)
    plgpu.wgmma(acc, leading, parts[0].T)

  start = plgpu.ACC.init(constant)
  return lax.optimization_barrier(pl.run_state(products)(start))


def _fold_body(sizes, names, *refs):
  """One thread block: 64 columns of values of one chain."""
  heads, groups, pieces = sizes
  outer, parts = dict(zip(names, refs)), refs[len(names) :]
  index = lax.axis_index('block')
  rows, rest = lax.rem(index, groups), lax.div(index, groups)
  head, b = lax.rem(rest, heads), lax.div(rest, heads)
  own = pl.ds(rows * ROWS, ROWS)
  if 'initial' in outer:
    s_vk = chain.load(outer['initial'].at[b, head, 0, own])
  else:
    s_vk = chain.zeros((ROWS, WIDTH))
  outer['entering'].at[b, head, 0, own][...] = s_vk

  def step(p, s_vk):
    constant = chain.load(outer['constant'].at[b, head, p, own])
    matrix = outer['map'].at[b, head, p]
    s_vk = lax.cond(
      outer['first'][b, head, p, 0] > 0,
      lambda: constant,  # M is zero
      lambda: _moved(s_vk, constant, matrix, parts),
    )
    outer['entering'].at[b, head, p + 1, own][...] = s_vk
    return s_vk

  lax.fori_loop(0, pieces - 1, step, s_vk)


def fold(arrays: dict[str, jax.Array]) -> jax.Array:
  """The state [B, HV, P, V, 128] that enters each piece, float32.

  Args:
    arrays: map and first as `maps` returns them; constant [B, HV, P - 1, V,
      128] float32, b transposed; perhaps initial [B, HV, 1, V, 128] float32,
      the state that enters the chain, else zeros.
  """
  batch, heads, before, width, _ = arrays['constant'].shape
  shape = batch, heads, before + 1, width, WIDTH
  names = *arrays, 'entering'
  sizes = heads, width // ROWS, before + 1
  tile = chain.tile(WIDTH, WIDTH)
  kernel = plgpu.kernel(
    lambda *refs: _fold_body(sizes, names, *refs),
    out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
    grid=(batch * heads * sizes[1],),
    grid_names=('block',),
    kernel_name='kda_fold',
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
    ),
    scratch_types=[tile, tile],
  )
  return kernel(*arrays.values())


def entering(arrays: dict[str, jax.Array], initial, pieces: int, masked: bool):
  """The state [B, HV, P, V, 128] that enters each piece, transposed, float32.

  Args:
    arrays: the operands of `mosaic_gpu_scan.scan`.
    initial: [B, HV, 1, V, 128] float32 or None, transposed.
    pieces: as in `maps`.
    masked: as in `mosaic_gpu_scan.Plan`.
  """
  found = maps(arrays, pieces)
  zero = scan_kernel.Plan(
    pieces=pieces,
    masked=masked,
    initial=False,
    output=False,
    some=(0, pieces - 1),
    skipping=True,
  )
  scanned = scan_kernel.scan(arrays | {'first': found['first']}, zero)
  found['constant'] = scanned['final']
  if initial is not None:
    found['initial'] = initial
  return fold(found)
