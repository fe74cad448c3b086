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

import dataclasses
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
_CARRIED = (2, 128)  # two registers of every thread
_LANES = plgpu.Layout.WG_STRIDED(_CARRIED, vec_size=1)
_COMPUTING, _COPYING = 232, 40  # registers of a thread
_LOADED = dict(q=at.QUERY, k=at.KEY, gate=at.GATE)
_REST = dict(values=at.VALUES, d_out=at.D_OUT, d_values=at.D_VALUES)


def _block_barrier():
  @plgpu.inline_mgpu()
  def wait(ctx):
    del ctx
    at.block_barrier()

  wait()


@dataclasses.dataclass(frozen=True)
class Owned:
  """Shared memory of a block, while it is at one chunk.

  Attributes:
    tiles, vectors: see `mosaic_gpu_gradient_place`.
    slot: 0 or 1, how the two regions of tiles lie.
  """

  tiles: Any
  vectors: Any
  slot: Any

  def tile(self, index, *, last: bool = False):
    """A tile by its number, dynamic ones told by `last` to be of the rest."""
    shift = at.REGION * self.slot
    if last or (isinstance(index, int) and index >= at.REST):
      return self.tiles.at[index - shift]
    if isinstance(index, int) and index < at.FIRST:
      return self.tiles.at[index]
    return self.tiles.at[index + shift]

  def tokens(self, offset: int = 0, size: int = 4 * CHUNK):
    """The words of tokens, or some of them."""
    start = at.OF_TOKENS + 4 * CHUNK * self.slot + offset
    return self.vectors.at[pl.ds(start, size)]

  def refs(self) -> tuple:
    """What `_shared` takes."""
    tiles = self.tile(0), self.tile(at.FIRST), self.tile(at.REST)
    return *tiles, self.vectors, self.tokens()


_REFS = (plgpu.RefType(_TRANSFORMS),) * 3 + (plgpu.RefType(),) * 2


def _shared(options: Options, refs) -> at.Shared:
  """Addresses of `Owned.refs`."""
  return at.Shared(*map(warp.shared_address, refs), masked=options.masked)


def _affine(seat: at.Seat, ref):
  """-a log2(e) of this head and its product with the bias, for exp2."""
  start = warp.global_address(ref)
  (slope, _) = warp.load_global(start, 0, 2)
  address = warp.advance(start, warp.shift_left(seat.channel, 2))
  return slope, warp.load_global(address, 4 * WIDTH, 2)


def _accumulator(array) -> list[list[warp.Real]]:
  """A [64, 64] product as [8][4] registers of `mosaic_gpu_warp`'s blocks."""
  values = [
    warp.Real(vector.extract(r, dynamic_position=[], static_position=[i]))
    for r in array.registers.flat
    for i in range(2)
  ]
  return [values[4 * n : 4 * n + 4] for n in range(8)]


def _prepare(options: Options, own, affine) -> jax.Array:
  """Norms and scaled rows; the result carries `scale_rows`'s registers."""

  @plgpu.inline_mgpu(
    arg_types=(_REFS, plgpu.RefType()),
    return_type=plgpu.ShapeDtypeStruct(_CARRIED, jnp.float32, layout=_LANES),
  )
  def prepare(ctx, refs, affine):
    del ctx
    seat, shared = at.Seat(), _shared(options, refs)
    gate = _affine(seat, affine) if options.activate_gate else None
    rows.store_norms(seat, shared, options)
    decay = rows.running_decay(seat, shared, gate, options)
    at.block_barrier()
    shift = rows.scale_rows(seat, shared, decay, options)
    return warp.carry(shift, _CARRIED)

  return prepare(own.refs(), affine)


def _mask(options: Options, own: Owned):
  """Zeros in rows of values and dO that are no tokens."""

  @plgpu.inline_mgpu(arg_types=(_REFS,))
  def mask(ctx, refs):
    del ctx
    rows.mask_rows(at.Seat(), _shared(options, refs))

  mask(own.refs())


def _zeros() -> jax.Array:
  return plgpu.layout_cast(jnp.zeros((CHUNK, 64), jnp.float32), _TILE)


def _products(*sums, meanwhile=lambda: None):
  """For each (start, (left, right), ...): start + sum of left @ right.

  `meanwhile` is called while the products are under way.
  """

  def body(accumulators):
    for acc, (_, *terms) in zip(accumulators, sums):
      for left, right in terms:
        plgpu.wgmma(acc, left, right)
    meanwhile()

  starts = tuple(plgpu.ACC.init(start) for start, *_ in sums)
  return lax.optimization_barrier(pl.run_state(body)(starts))


def _share_through(options: Options, own: Owned):
  """Stores what the chunk's decay as a whole adds to the gate's gradient."""

  @plgpu.inline_mgpu(arg_types=(_REFS,))
  def through(ctx, refs):
    del ctx
    pairs.store_through(at.Seat(), _shared(options, refs))

  through(own.refs())


def _solve(options: Options, own: Owned, role):
  """Leaves this role's half of the values of U where V was."""
  values = own.tile(at.VALUES + role, last=True)
  v_cv = plgpu.load(values, layout=_TILE, optimized=False).astype(jnp.float32)
  terms = [
    (own.tile(at.MINUS_KEY + half), own.tile(at.STATE + 2 * role + half).T)
    for half in range(2)
  ]
  meanwhile = lambda: _share_through(options, own)
  (e_cv,) = _products((v_cv, *terms), meanwhile=meanwhile)
  beta = plgpu.load(
    own.tokens(at.BETA, CHUNK), layout=_PER_ROW, optimized=False
  )
  r_cv = e_cv * lax.broadcast_in_dim(beta, e_cv.shape, [0])
  values[...] = r_cv.astype(jnp.bfloat16)
  plgpu.commit_smem()
  (u_cv,) = _products((_zeros(), (own.tile(at.SOLVE), values)))
  plgpu.commit_smem()  # every warp's product has read its operands
  values[...] = u_cv.astype(jnp.bfloat16)
  plgpu.commit_smem()


def _state_products(own: Owned, role):
  """dO U^T or dV U^T; and this role's channels of dO S, dV S and U dS."""
  halves = range(2)
  left = lambda index, half: own.tile(index + half, last=True)
  weights = [
    (left(at.D_OUT + 2 * role, half), left(at.VALUES, half).T)
    for half in halves
  ]
  named = (
    (at.D_OUT, at.STATE, False),
    (at.D_VALUES, at.STATE, False),
    (at.VALUES, at.D_STATE, True),
  )
  sums = [(_zeros(), *weights)]
  for first, second, last in named:
    right = lambda half, second=second, last=last: own.tile(
      second + 2 * half + role, last=last
    )
    sums.append((_zeros(), *[(left(first, h), right(h)) for h in halves]))
  return _products(*sums)


def _weights(options: Options, own: Owned, product, d_beta):
  """Stores dP and dM, and the gradient of beta."""

  @plgpu.inline_mgpu(arg_types=(_REFS, _TILE, plgpu.RefType()))
  def weights(ctx, refs, product, d_beta):
    del ctx
    seat, shared = at.Seat(), _shared(options, refs)
    product = _accumulator(product)
    pairs.store_pairs(seat, shared, product)
    pairs.write_beta_gradient(seat, shared, product, d_beta)
    at.block_barrier()

  weights(own.refs(), product, d_beta)


def _emit(options: Options, seat, shared, shift, products, outputs):
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
  terms, written, slopes = rows.input_gradients(
    seat, shared, shift, products, (options, affine, d_query, d_key)
  )
  sums = rows.later_sums(seat, shared, terms)
  rows.share_sums(seat, shared, sums[0], written)
  at.utils.warpgroup_barrier()
  carry = rows.carried_sums(seat, shared)
  totals = rows.gate_gradients(
    seat, shared, sums, carry, (options, affine, slopes, d_gate)
  )
  if options.activate_gate:
    rows.write_partials(seat, partial, *totals)


def _finish(options: Options, own: Owned, shift, products, written):
  """Calls `_emit`.

  `written`: the head's affine gate, and this chunk's dq, dk, dgate and sums.
  """
  references = (plgpu.RefType(),) * 5

  @plgpu.inline_mgpu(arg_types=(_REFS, _LANES, (_TILE,) * 3, references))
  def finish(ctx, refs, shift, products, written):
    del ctx
    seat, shared = at.Seat(), _shared(options, refs)
    affine, *gradients, partial = written
    gate = _affine(seat, affine) if options.activate_gate else None
    gradients = [rows.Output(seat, ref) for ref in gradients]
    shift = warp.carried(shift)
    products = [_accumulator(p) for p in products]
    outputs = gate, *gradients, partial
    _emit(options, seat, shared, shift, products, outputs)

  finish(own.refs(), shift, tuple(products), tuple(written))


@dataclasses.dataclass(frozen=True)
class Barriers:
  """What a block's warpgroups wait for.

  Attributes:
    rows, state, rest: queries, keys, gates, betas and flags; the state; all
      else of a chunk has arrived.
    freed: first the rest's and then the first tiles' region is free.
  """

  rows: Any
  state: Any
  rest: Any
  freed: Any


def _copy_first(options: Options, place, outer, own: Owned, barriers):
  """Starts the copies of a chunk's first tiles."""
  b, head, key_head, n = place
  tokens = pl.ds(n * CHUNK, CHUNK)
  for name, first in _LOADED.items():
    source_head = head if name == 'gate' else key_head
    for half in range(2):
      source = outer[name].at[b, tokens, source_head, pl.ds(64 * half, 64)]
      plgpu.copy_gmem_to_smem(source, own.tile(first + half), barriers.rows)
  vectors = [(outer['beta'].at[b, head, tokens], at.BETA)]
  if options.masked:
    vectors.append((outer['flags'].at[b, tokens], at.FLAGS))
  for source, offset in vectors:
    dest = own.tokens(offset, CHUNK)
    plgpu.copy_gmem_to_smem(source, dest, barriers.rows)
  source = outer['state'].at[b, head, n]
  _copy_state(source, own, at.STATE, barriers.state)


def _copy_state(state, own: Owned, first: int, arrived):
  """Starts the copies of a [128, 128] state, by halves of both widths."""
  for i in range(4):
    values, keys = pl.ds(i // 2 * 64, 64), pl.ds(i % 2 * 64, 64)
    source, dest = state.at[values, keys], own.tile(first + i)
    plgpu.copy_gmem_to_smem(source, dest, arrived)


def _copy_rest(place, outer, own: Owned, barriers: Barriers):
  """Starts the copies of the rest of a chunk's tiles."""
  b, head, _, n = place
  tokens = pl.ds(n * CHUNK, CHUNK)
  for name, first in _REST.items():
    for half in range(2):
      source = outer[name].at[b, tokens, head, pl.ds(64 * half, 64)]
      plgpu.copy_gmem_to_smem(source, own.tile(first + half), barriers.rest)
  source = outer['inverse'].at[b, head, tokens]
  plgpu.copy_gmem_to_smem(source, own.tile(at.SOLVE), barriers.rest)
  _copy_state(outer['dstate'].at[b, head, n], own, at.D_STATE, barriers.rest)


def _one_chunk(options: Options, place, refs):
  """One chunk of a warpgroup that computes."""
  outer, own, barriers, role = refs
  b, head, _, n = place
  tokens = pl.ds(n * CHUNK, CHUNK)
  plgpu.barrier_wait(barriers.rows)
  affine = outer['affine'].at[head]
  shift = _prepare(options, own, affine)
  if options.masked:
    plgpu.barrier_wait(barriers.rest)
    _mask(options, own)
  plgpu.commit_smem()
  _block_barrier()
  plgpu.barrier_wait(barriers.state)
  if not options.masked:
    plgpu.barrier_wait(barriers.rest)
  _solve(options, own, role)
  _block_barrier()
  weights, *products = _state_products(own, role)
  _weights(options, own, weights, outer['dbeta'].at[b, head, tokens])
  plgpu.barrier_arrive(barriers.freed)
  written = [outer[o].at[b, tokens, head] for o in ('dq', 'dk', 'dgate')]
  written = affine, *written, outer['partial'].at[b, head, n]
  _finish(options, own, shift, products, written)
  plgpu.barrier_arrive(barriers.freed)


def _body(options: Options, work: Work, names, *refs):
  """One thread block: two warpgroups work through chunks, one brings them."""
  outer = dict(zip(names, refs))
  tiles, vectors, *barriers = refs[len(names) :]
  barriers = Barriers(*barriers)
  role = lax.axis_index('role')
  block, blocks = lax.axis_index('block'), lax.axis_size('block')
  count = lax.div(work.total - block + blocks - 1, blocks)

  def chunk(i):
    """Chunk i of this block, and its shared memory."""
    # A zero that the compiler cannot see: addresses computed before the loop
    # would have to wait in local memory, which is slower than computing them.
    zero = lax.shift_right_logical(i, 30)
    own = Owned(tiles.at[zero], vectors.at[zero], lax.rem(i, 2))
    return work.locate(block + i * blocks), own

  @pl.when(role < 2)
  def _():
    plgpu.set_max_registers(_COMPUTING, action='increase')

    @pl.loop(0, count)
    def _(i):
      place, own = chunk(i)
      _one_chunk(options, place, (outer, own, barriers, role))

  @pl.when(role == 2)
  def _():
    plgpu.set_max_registers(_COPYING, action='decrease')

    @pl.loop(0, count)
    def _(i):
      place, own = chunk(i)
      wait = lambda: pl.when(i > 0)(lambda: plgpu.barrier_wait(barriers.freed))
      wait()
      _copy_first(options, place, outer, own, barriers)
      wait()
      _copy_rest(place, outer, own, barriers)


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
  arrivals = 7 + options.masked, 4, 11, 2  # as in `Barriers`
  return [
    plgpu.SMEM((1, at.TILES, CHUNK, 64), jnp.bfloat16, transforms=_TRANSFORMS),
    plgpu.SMEM((1, at.WORDS), jnp.float32),
    *[plgpu.Barrier(num_arrivals=n) for n in arrivals],
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
    num_threads=3,
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
