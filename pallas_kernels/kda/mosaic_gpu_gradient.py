"""Gradients of the inputs of Kimi Delta Attention by chunks, on Hopper.

What is left of the backward pass once the scans have found, for each chunk,
the state S that enters it, the gradient dS of the state that leaves it and the
gradient dV of its values (Kimi Linear, arXiv 2510.26692, section 3,
differentiated by hand). G is the running decay of the chunk, s a sub-block's
reference, a power of two, c = 8 |lower_bound|, and q stands for scale q / |q|:

    qL, kL, kR   q exp(G - s + c), k exp(G - s + c), k exp(s - G - c), rounded
    E = V - k~ S                    U = T diag(beta) E
    dP = tril(dO U^T)               dM = -stril(dV U^T)
    dbeta = diag(dV U^T) / beta^2
    YQ = exp(s - c) dO S^T + dP kR  YK = -exp(s - c) dV S^T + dM kR
    ZA = dP^T qL + dM^T kL          ZD = exp(G_end - s + c) U dS^T

where kR, qL and kL are moved to the reference of the row's sub-block, which is
exact as references are powers of two. Then with L and R the unrounded scales

    dq = L YQ                       dk = L YK + R (ZA + ZD)
    dG = qL YQ + kL YK - kR (ZA + ZD)
    dG_last += sum_t kR ZD + exp(G_end) rowsum(S dS)

and dg is the sum of dG over later tokens. What pairs of tokens add to dG in the
row of one and in the column of the other is the same product of the same
rounded numbers, so they cancel in sums of dG as they should, and no product
needs more than bfloat16 operands. Norms, the gate and its parameters follow.

A block works through chunks, two warpgroups on each, who own what
`mosaic_gpu_gradient_place` says. Products with 64 rows of one operand are
wgmma, those inside the chunk `mma.sync` in a warp. The tiles of the next chunk
arrive while the rows of this one are finished.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import vector

from pallas_kernels.kda import mosaic_gpu_gradient_pairs as pairs
from pallas_kernels.kda import mosaic_gpu_gradient_place as at
from pallas_kernels.kda import mosaic_gpu_gradient_rows as rows
from pallas_kernels.kda import mosaic_gpu_warp as warp
from pallas_kernels.kda.mosaic_gpu_place import CHUNK, WIDTH
from pallas_kernels.kda.mosaic_gpu_prep import PROCESSORS, Options, Work

_TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_TILE = plgpu.Layout.WGMMA
_PER_ROW = plgpu.Layout.WGMMA.reduce(1)
_LANES = plgpu.Layout.WG_STRIDED((CHUNK, 64), vec_size=1)
_LOADED = dict(q=at.QUERY, k=at.KEY, gate=at.GATE)
_REST = dict(values=at.VALUES, d_out=at.D_OUT, d_values=at.D_VALUES)


def _block_barrier():
  @plgpu.inline_mgpu()
  def wait(ctx):
    del ctx
    at.block_barrier()

  wait()


def _shared(options: Options, tiles, vectors) -> at.Shared:
  addresses = map(warp.shared_address, (tiles, vectors))
  return at.Shared(*addresses, masked=options.masked)


def _affine(seat: at.Seat, ref):
  """-a log2(e) of this head and its product with the bias, for exp2."""
  start = warp.global_address(ref)
  (slope, _) = warp.load_global(start, 0, 2)
  address = warp.advance(start, warp.shift_left(seat.channel, 2))
  return slope, warp.load_global(address, 4 * WIDTH, 2)


def _pairs_of(values):
  return [values[2 * j : 2 * j + 2] for j in range(16)]


def _accumulator(array) -> list[list[warp.Real]]:
  """A [64, 64] product as [8][4] registers of `mosaic_gpu_warp`'s blocks."""
  values = [
    warp.Real(vector.extract(r, dynamic_position=[], static_position=[i]))
    for r in array.registers.flat
    for i in range(2)
  ]
  return [values[4 * n : 4 * n + 4] for n in range(8)]


def _prepare(options: Options, own, affine) -> jax.Array:
  """Norms, decays and scaled rows; the result only carries registers."""
  refs = plgpu.RefType(_TRANSFORMS), plgpu.RefType(), plgpu.RefType()

  @plgpu.inline_mgpu(
    arg_types=refs,
    return_type=plgpu.ShapeDtypeStruct((CHUNK, 64), jnp.float32, layout=_LANES),
  )
  def prepare(ctx, tiles, vectors, affine):
    del ctx
    seat, shared = at.Seat(), _shared(options, tiles, vectors)
    gate = _affine(seat, affine) if options.activate_gate else None
    rows.store_norms(seat, shared, options)
    decay = rows.running_decay(seat, shared, gate, options)
    at.block_barrier()
    decay = rows.scale_rows(seat, shared, decay, options)
    return warp.carry([x for row in decay for x in row], (CHUNK, 64))

  return prepare(own['tiles'], own['vectors'], affine)


def _mask(options: Options, own):
  """Zeros in rows of values and dO that are no tokens."""

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(_TRANSFORMS), plgpu.RefType()))
  def mask(ctx, tiles, vectors):
    del ctx
    rows.mask_rows(at.Seat(), _shared(options, tiles, vectors))

  mask(own['tiles'], own['vectors'])


def _zeros() -> jax.Array:
  return plgpu.layout_cast(jnp.zeros((CHUNK, 64), jnp.float32), _TILE)


def _products(*sums):
  """For each (start, (left, right), ...): start + sum of left @ right."""

  def body(accumulators):
    for acc, (_, *terms) in zip(accumulators, sums):
      for left, right in terms:
        plgpu.wgmma(acc, left, right)

  starts = tuple(plgpu.ACC.init(start) for start, *_ in sums)
  return lax.optimization_barrier(pl.run_state(body)(starts))


def _solve(own, role):
  """Leaves this role's half of the values of U where V was."""
  tiles, values = own['tiles'], own['tiles'].at[at.VALUES + role]
  tile = lambda index: tiles.at[index]
  v_cv = plgpu.load(values, layout=_TILE, optimized=False).astype(jnp.float32)
  terms = [
    (tile(at.MINUS_KEY + half), tile(at.STATE + 2 * role + half).T)
    for half in range(2)
  ]
  (e_cv,) = _products((v_cv, *terms))
  beta = own['vectors'].at[pl.ds(at.BETA, CHUNK)]
  beta = plgpu.load(beta, layout=_PER_ROW, optimized=False)
  r_cv = e_cv * lax.broadcast_in_dim(beta, e_cv.shape, [0])
  values[...] = r_cv.astype(jnp.bfloat16)
  plgpu.commit_smem()
  (u_cv,) = _products((_zeros(), (tile(at.SOLVE), values)))
  plgpu.commit_smem()  # every warp's product has read its operands
  values[...] = u_cv.astype(jnp.bfloat16)
  plgpu.commit_smem()


def _state_products(own, role):
  """dO U^T or dV U^T; and this role's channels of dO S, dV S and U dS."""
  tile = lambda index: own['tiles'].at[index]
  halves = range(2)
  weights = [
    (tile(at.D_OUT + 2 * role + half), tile(at.VALUES + half).T)
    for half in halves
  ]
  named = (
    (at.D_OUT, at.STATE),
    (at.D_VALUES, at.STATE),
    (at.VALUES, at.D_STATE),
  )
  sums = [(_zeros(), *weights)]
  for left, right in named:
    terms = [
      (tile(left + half), tile(right + 2 * half + role)) for half in halves
    ]
    sums.append((_zeros(), *terms))
  return _products(*sums)


def _weights(options: Options, own, product, d_beta):
  """Stores dP and dM, and all that needs the states or U once more."""
  refs = plgpu.RefType(_TRANSFORMS), plgpu.RefType()

  @plgpu.inline_mgpu(arg_types=(*refs, _TILE, plgpu.RefType()))
  def weights(ctx, tiles, vectors, product, d_beta):
    del ctx
    seat, shared = at.Seat(), _shared(options, tiles, vectors)
    product = _accumulator(product)
    pairs.store_pairs(seat, shared, product)
    pairs.write_beta_gradient(seat, shared, product, d_beta)
    pairs.store_through(seat, shared)
    at.block_barrier()

  weights(own['tiles'], own['vectors'], product, d_beta)


def _emit(options: Options, seat, shared, decay, products, outputs):
  """From products with the states to gradients; `outputs`: see `_finish`."""
  affine, d_query, d_key, d_gate, partial = outputs
  y_q, y_k, far = pairs.scale_products(seat, shared, products)
  y_q, y_k = pairs.add_rows(seat, shared, [y_q, y_k])
  near = pairs.column_sums(seat, shared)
  products = y_q, y_k, near, far
  if options.normalize_qk:
    pairs.store_dots(seat, shared, products)
  products = [pairs.to_rows(seat, shared, p) for p in products]
  at.block_barrier()
  terms, written = rows.input_gradients(
    seat, shared, decay, products, (options, d_query, d_key)
  )
  sums = rows.later_sums(seat, shared, terms)
  rows.share_sums(seat, shared, sums[0], written)
  at.utils.warpgroup_barrier()
  carry = rows.carried_sums(seat, shared)
  totals = rows.gate_gradients(
    seat, shared, sums, carry, (options, affine, d_gate)
  )
  if options.activate_gate:
    rows.write_partials(seat, partial, *totals)


def _finish(options: Options, own, decay, products, written, stride: int):
  """Calls `_emit`.

  `written`: the head's affine gate, and this chunk's dq, dk, dgate and sums;
  stride: bytes of a token of a gradient.
  """
  refs = plgpu.RefType(_TRANSFORMS), plgpu.RefType()

  @plgpu.inline_mgpu(
    arg_types=(*refs, _LANES, (_TILE,) * 3, (plgpu.RefType(),) * 5)
  )
  def finish(ctx, tiles, vectors, decay, products, written):
    del ctx
    seat, shared = at.Seat(), _shared(options, tiles, vectors)
    affine, *gradients, partial = written
    gate = _affine(seat, affine) if options.activate_gate else None
    gradients = [rows.Output(seat, ref, stride) for ref in gradients]
    decay = _pairs_of(warp.carried(decay))
    products = [_accumulator(p) for p in products]
    outputs = gate, *gradients, partial
    _emit(options, seat, shared, decay, products, outputs)

  finish(own['tiles'], own['vectors'], decay, tuple(products), tuple(written))


def _copy_rows(options: Options, outer, own, place):
  """Starts the copies of queries, keys, gates, betas and flags."""
  b, head, key_head, n = place
  tokens = pl.ds(n * CHUNK, CHUNK)
  for name, first in _LOADED.items():
    source_head = head if name == 'gate' else key_head
    for half in range(2):
      source = outer[name].at[b, tokens, source_head, pl.ds(64 * half, 64)]
      dest = own['tiles'].at[first + half]
      plgpu.copy_gmem_to_smem(source, dest, own['rows_arrived'])
  dest = own['vectors'].at[pl.ds(at.BETA, CHUNK)]
  source = outer['beta'].at[b, head, tokens]
  plgpu.copy_gmem_to_smem(source, dest, own['rows_arrived'])
  if options.masked:
    dest = own['vectors'].at[pl.ds(at.FLAGS, CHUNK)]
    source = outer['flags'].at[b, tokens]
    plgpu.copy_gmem_to_smem(source, dest, own['rows_arrived'])


def _copy_state(outer, own, place, name: str, at_tile: int, arrived):
  """Starts the copies of a [128, 128] state, by halves of both widths."""
  b, head, _, n = place
  for i in range(4):
    values, keys = pl.ds(i // 2 * 64, 64), pl.ds(i % 2 * 64, 64)
    source = outer[name].at[b, head, n, values, keys]
    plgpu.copy_gmem_to_smem(source, own['tiles'].at[at_tile + i], arrived)


def _copy_rest(outer, own, place):
  """Starts the copies of what only products need, but for the state."""
  b, head, _, n = place
  arrived, tokens = own['rest_arrived'], pl.ds(n * CHUNK, CHUNK)
  for name, first in _REST.items():
    for half in range(2):
      source = outer[name].at[b, tokens, head, pl.ds(64 * half, 64)]
      plgpu.copy_gmem_to_smem(source, own['tiles'].at[first + half], arrived)
  source = outer['inverse'].at[b, head, tokens]
  plgpu.copy_gmem_to_smem(source, own['tiles'].at[at.SOLVE], arrived)
  _copy_state(outer, own, place, 'dstate', at.D_STATE, arrived)


def _one_chunk(options: Options, place, refs, following):
  """One chunk; `following` starts the next one's copies to where U was."""
  outer, own, role = refs
  b, head, _, n = place
  tokens = pl.ds(n * CHUNK, CHUNK)
  plgpu.barrier_wait(own['rows_arrived'])
  affine = outer['affine'].at[head]
  decay = _prepare(options, own, affine)
  plgpu.barrier_wait(own['rest_arrived'])
  if options.masked:
    _mask(options, own)
  plgpu.commit_smem()
  _block_barrier()
  plgpu.barrier_wait(own['state_arrived'])
  _solve(own, role)
  _block_barrier()
  weights, *products = _state_products(own, role)
  _weights(options, own, weights, outer['dbeta'].at[b, head, tokens])
  following()
  written = [outer[o].at[b, tokens, head] for o in ('dq', 'dk', 'dgate')]
  written = affine, *written, outer['partial'].at[b, head, n]
  stride = outer['dq'].shape[2] * WIDTH * 2
  _finish(options, own, decay, products, written, stride)


def _body(options: Options, work: Work, names, *refs):
  """One thread block: its two warpgroups work through chunks."""
  outer, scratch = dict(zip(names, refs)), refs[len(names) :]
  role = lax.axis_index('role')
  block, blocks = lax.axis_index('block'), lax.axis_size('block')
  labels = 'tiles', 'vectors', 'rows_arrived', 'rest_arrived', 'state_arrived'

  def owned(zero) -> dict[str, Any]:
    return dict(zip(labels, [ref.at[zero] for ref in scratch]))

  def start(index, own, what):
    @pl.when((role == 0) & (index < work.total))
    def _():
      what(own, work.locate(index))

  def copy_first(own, place):
    _copy_rows(options, outer, own, place)
    arrived = own['state_arrived']
    _copy_state(outer, own, place, 'state', at.STATE, arrived)

  copy_rest = lambda own, place: _copy_rest(outer, own, place)
  start(block, owned(0), copy_first)
  start(block, owned(0), copy_rest)

  @pl.loop(0, lax.div(work.total - block + blocks - 1, blocks))
  def _(i):
    index = block + i * blocks
    # A zero that the compiler cannot see: addresses computed before the loop
    # would have to wait in local memory, which is slower than computing them.
    own = owned(lax.shift_right_logical(i, 30))
    following = lambda: start(index + blocks, own, copy_rest)
    _one_chunk(options, work.locate(index), (outer, own, role), following)
    plgpu.commit_smem()
    _block_barrier()
    start(index + blocks, own, copy_first)


def _inputs(arrays: dict[str, jax.Array], options: Options) -> dict:
  """What the kernel reads, by name."""
  names = [*_LOADED, *_REST, 'beta', 'affine', 'state', 'dstate', 'inverse']
  read = {name: arrays[name] for name in names}
  if options.masked:
    # One buffer holds all vectors, so the flags travel as float32 words.
    flags = arrays['flags']
    read['flags'] = lax.bitcast_convert_type(flags, jnp.float32)
  return read


def _outputs(work: Work) -> dict[str, jax.ShapeDtypeStruct]:
  """What the kernel writes, by name."""
  padded = work.chunks * CHUNK
  wide = jax.ShapeDtypeStruct(
    (work.batch, padded, work.heads, WIDTH), jnp.bfloat16
  )
  lead = (work.batch, work.heads)
  beta = jax.ShapeDtypeStruct((*lead, padded), jnp.float32)
  partial = jax.ShapeDtypeStruct((*lead, work.chunks, 4, 2, WIDTH), jnp.float32)
  return dict(dq=wide, dk=wide, dgate=wide, dbeta=beta, partial=partial)


def _scratch(options: Options) -> list:
  """Shared memory and barriers of a thread block."""
  copies = 7 + options.masked, 11, 4
  return [
    plgpu.SMEM((1, at.TILES, CHUNK, 64), jnp.bfloat16, transforms=_TRANSFORMS),
    plgpu.SMEM((1, at.WORDS), jnp.float32),
    *[plgpu.Barrier(num_arrivals=n, num_barriers=1) for n in copies],
  ]


def gradient(
  arrays: dict[str, jax.Array], work: Work, options: Options
) -> dict[str, jax.Array]:
  """Gradients of the raw inputs and of the gate's parameters.

  Args:
    arrays: q, k [B, T, H, 128], gate [B, T, HV, 128], beta [B, HV, N * 64],
      affine [HV, 2, 128] and, if options.masked, flags [B, N * 64] as for
      `mosaic_gpu_prep.prepare`; values, d_out, d_values [B, T, HV, 128]
      bfloat16: V and the gradients of the output and of V, the last zero on
      padding; state, dstate [B, HV, N, 128, 128] bfloat16, values first: the
      state that enters each chunk and the gradient of the one that leaves it;
      inverse [B, HV, N * 64, 64] bfloat16, T.
    work: see `Work`.
    options: see `Options`; save_inverse has no meaning here.

  Returns:
    dq, dk, dgate [B, N * 64, HV, 128] bfloat16, by value heads; dbeta
    [B, HV, N * 64] float32, of the activated beta, 0 where that is 0; and with
    options.activate_gate dt_bias [HV, 128] and a_log [HV] float32.
  """
  read, written = _inputs(arrays, options), _outputs(work)
  names = (*read, *written)
  kernel = plgpu.kernel(
    lambda *refs: _body(options, work, names, *refs),
    out_type=tuple(written.values()),
    grid=(min(PROCESSORS, work.total),),
    grid_names=('block',),
    num_threads=2,
    thread_name='role',
    kernel_name='kda_gradient',
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane,
      reduction_scratch_bytes=0,
      unsafe_no_auto_barriers=True,
    ),
    scratch_types=_scratch(options),
  )
  results = dict(zip(written, kernel(*read.values())))
  partial = results.pop('partial')
  if options.activate_gate:
    bias_hk, weighted_hk = jnp.moveaxis(partial.sum((0, 2, 3)), 1, 0)
    results['dt_bias'] = bias_hk
    slope_h = arrays['affine'][:, 0, 0]
    results['a_log'] = weighted_hk.sum(-1) / slope_h
  return results
