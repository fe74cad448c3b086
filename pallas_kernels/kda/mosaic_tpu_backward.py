"""Backward kernel of Kimi Delta Attention for TPUs, in Pallas Mosaic TPU.

Legend: b batch, t time, c row in the chunk, s column of a pack, x row in a
sub-block of 16, k key width, v value width; a suffix 1 is a broadcast axis.

One kernel walks the chunks in reverse and carries the gradient of the state in
VMEM. It computes every intermediate again from the inputs and the state that
entered the chunk, P, M and T from the functions of the forward kernel, and
ends with the gradients of the raw inputs and of the gate's parameters.

With dS the gradient of the state that leaves the chunk, and q times the scale:

  dU = P^T dO + (k exp(G_C - G)) dS;  dR = T^T dU;  dV = Diag(beta) dR
  dP = tril(dO U^T);  dA = -stril(dR U^T);  dM = Diag(beta) dA
  dS' = Diag(exp(G_C)) dS + (q exp(G))^T dO - (k exp(G))^T dV

Source: Kimi Linear (arXiv 2510.26692), section 3, differentiated by hand.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda import mosaic_tpu_forward as forward_kernel
from pallas_kernels.kda import mosaic_tpu_tiles as tiles_lib
from pallas_kernels.kda.mosaic_tpu_forward import (
  Inputs,
  Operands,
  Prepared,
  System,
)
from pallas_kernels.kda.mosaic_tpu_tiles import (
  LANES,
  SUB,
  Masks,
  Plan,
  bfloat16,
  dot,
  keep,
)


class Cotangents(NamedTuple):
  """Gradients of the forward results."""

  out: jax.Array  # [B, T, HV V]
  final_state: jax.Array  # [B, HV, V, K] float32


class Gradients(NamedTuple):
  """Results of the backward kernel, laid out as `Operands`."""

  q: jax.Array
  k: jax.Array
  v: jax.Array
  gate: jax.Array
  beta: jax.Array  # float32
  gate_sums: jax.Array  # [B, 2, HV K]: of dz and of dz z over time
  initial_state: jax.Array  # [B, HV, V, K] float32


class Solved(NamedTuple):
  """One head's triangular solve, and the gradient before it."""

  error_cv: jax.Array  # E
  update_cv: jax.Array  # U, bfloat16
  d_out_cv: jax.Array  # bfloat16
  d_r_cv: jax.Array


class Updates(NamedTuple):
  """Gradients of one head around its triangular solve."""

  d_v_cv: jax.Array
  d_beta_c1: jax.Array
  own_c1: jax.Array  # diagonal of dP
  d_read_ck: jax.Array  # of q exp(G)
  d_erase_ck: jax.Array  # of -k exp(G)
  d_write_ck: jax.Array  # of k exp(G_C - G)
  through_1k: jax.Array  # of G_C by way of the decay of the state


class Rows(NamedTuple):
  """Gradients of one head's activated inputs."""

  q_ck: jax.Array
  k_ck: jax.Array
  decay_ck: jax.Array


def _solve(systems: list[System], inverses, refs, static) -> dict[int, Solved]:
  """The triangular solve and its gradient, for every head of the systems.

  Each step is done for all heads before the next: the compiler then finds work
  of other heads for the time that a product takes.
  """
  inputs, states_ref, d_out_ref, d_state_ref = refs
  prepared, masks, plan = static
  c = plan.chunk
  columns = lambda ref, h: ref[0, :, plan.values(h)]
  errors, d_outs, updates, d_updates, solved = {}, {}, {}, {}, {}
  for h in (h for s in systems for h in s.heads):
    v_cv = keep(columns(inputs.v, h).astype(jnp.float32), masks.valid_c1)
    erase_ck = prepared[h].tiles.erase_ck
    errors[h] = v_cv + dot(erase_ck, states_ref[0, 0, h], (1, 1))
    d_outs[h] = columns(d_out_ref, h)
    if plan.segmented:
      wide = keep(d_outs[h].astype(jnp.float32), masks.valid_c1)
      d_outs[h] = bfloat16(wide)
  for s, inverse_cs in zip(systems, inverses):
    right = [bfloat16(prepared[h].beta_c1 * errors[h]) for h in s.heads]
    update = bfloat16(dot(inverse_cs, tiles_lib.block_diagonal(right, plan)))
    updates |= {h: update[:, plan.values(i)] for i, h in enumerate(s.heads)}
  own = lambda both, i: both[i * c : (i + 1) * c, plan.values(i)]
  for s in systems:
    right = jnp.concatenate([d_outs[h] for h in s.heads], 1)
    attended = dot(s.attend_cs, right, (0, 0))
    for i, h in enumerate(s.heads):
      write_ck = bfloat16(prepared[h].tiles.write_ck)
      written_cv = dot(write_ck, bfloat16(d_state_ref[h]), (1, 1))
      d_updates[h] = bfloat16(own(attended, i) + written_cv)
  for s, inverse_cs in zip(systems, inverses):
    right = jnp.concatenate([d_updates[h] for h in s.heads], 1)
    both = dot(inverse_cs, right, (0, 0))
    for i, h in enumerate(s.heads):
      solved[h] = Solved(errors[h], updates[h], d_outs[h], own(both, i))
  return solved


def _pair_gradients(system: System, solved: dict[int, Solved], static):
  """(dP, dM) in bfloat16 and -dA, all [C, 128].

  The diagonal of dP is left out: its decay is 1 whatever the gate, so it would
  only add rounding to the gate's gradient.
  """
  masks, plan = static
  c, heads = plan.chunk, system.heads
  left = []
  for h in heads:
    left += [solved[h].d_out_cv, bfloat16(solved[h].d_r_cv)]
  right = tiles_lib.stacked([solved[h].update_cv for h in heads], plan)
  products = dot(jnp.concatenate(left, 0), right, (1, 1))
  part = lambda j: tiles_lib.own_lanes(
    [products[(2 * i + j) * c :][:c] for i in range(len(heads))], plan
  )
  d_attend_cs, minus_d_a_cs = (keep(part(j), masks.strict_cs) for j in (0, 1))
  d_alike_cs = -system.beta_cs * minus_d_a_cs
  return (bfloat16(d_attend_cs), bfloat16(d_alike_cs)), minus_d_a_cs


def _state_gradients(p: Prepared, s: Solved, d_beta_cs, states) -> Updates:
  """One head's gradients by way of the states; updates dS in place.

  d_beta_cs: terms of the gradient of beta by way of A, negative.
  """
  state_vk, d_state_ref = states
  chunk = s.update_cv.shape[0]
  d_beta_cv = s.d_r_cv * s.error_cv
  total = lambda x: jnp.sum(x, 1, keepdims=True)
  if d_beta_cv.shape == d_beta_cs.shape:
    d_beta_c1 = total(d_beta_cv - d_beta_cs)
  else:
    d_beta_c1 = total(d_beta_cv) - total(d_beta_cs)
  d_v_cv = p.beta_c1 * s.d_r_cv
  wide = lambda x: x.astype(jnp.float32)
  own_c1 = total(wide(s.d_out_cv) * wide(s.update_cv))
  both = jnp.concatenate([s.d_out_cv, bfloat16(d_v_cv)], 0)
  d_states_ck = dot(both, state_vk)
  d_state_vk = d_state_ref[...]
  d_write_ck = dot(s.update_cv, bfloat16(d_state_vk))
  through_1k = p.tiles.gamma_1k * jnp.sum(
    wide(state_vk) * d_state_vk, 0, keepdims=True
  )
  seen = jnp.concatenate([p.tiles.read_ck, p.tiles.erase_ck], 0)
  d_state_ref[...] = p.tiles.gamma_1k * d_state_vk + dot(both, seen, (0, 0))
  return Updates(
    d_v_cv,
    d_beta_c1,
    own_c1,
    d_states_ck[:chunk],
    d_states_ck[chunk:],
    d_write_ck,
    through_1k,
  )


def _updates(
  system: System, solved, minus_d_a_cs, static
) -> dict[int, Updates]:
  """`Updates` of a pack's heads."""
  prepared, states_ref, d_state_ref, plan = static
  d_beta_cs = minus_d_a_cs * system.alike_cs
  lane = lax.broadcasted_iota(jnp.int32, d_beta_cs.shape, 1)
  return {
    h: _state_gradients(
      prepared[h],
      solved[h],
      jnp.where(lane // plan.chunk == i, d_beta_cs, 0.0),
      (states_ref[0, 0, h], d_state_ref.at[h]),
    )
    for i, h in enumerate(system.heads)
  }


def _pair_products(heads: list[Prepared], weights, plan: Plan):
  """Products of (dP, dM) with the decayed operands, per head and sub-block.

  Returns for each head: rows [2 SUB, K] for every sub-block of rows z, the
  weighted sums of k R; and columns[z][i] [SUB, K], the sums of q L and k L of
  sub-block z at the columns of sub-block i.
  """
  d_attend_cs, d_alike_cs = weights
  rows = [[] for _ in heads]
  pieces = []
  for z in range(plan.blocks):
    at = slice(z * SUB, (z + 1) * SUB)
    piece = jnp.concatenate([d_attend_cs[at], d_alike_cs[at]], 0)
    pieces.append(piece)
    right = [
      jnp.concatenate(
        [
          p.tiles.right[z],
          jnp.zeros((plan.chunk - (z + 1) * SUB, plan.key_dim), jnp.bfloat16),
        ],
        0,
      )
      if z < plan.blocks - 1
      else p.tiles.right[z]
      for p in heads
    ]
    product = dot(piece, tiles_lib.block_diagonal(right, plan))
    for i in range(len(heads)):
      rows[i].append(product[:, plan.keys(i)])
  turned = jnp.concatenate(pieces, 0).T  # [(head, column), (z, P or M, x)]
  columns = []
  for i, p in enumerate(heads):
    own = turned[i * plan.chunk : (i + 1) * plan.chunk]
    columns.append(_column_products(own, p, plan))
  return list(zip(rows, columns))


def _column_products(turned, p: Prepared, plan: Plan):
  """columns[z][i] of `_pair_products` for one head."""
  left = jnp.concatenate(p.tiles.left, 0)
  words = pltpu.bitcast(turned, jnp.int32)
  block = lax.broadcasted_iota(jnp.int32, (1, words.shape[1]), 1) // (2 * SUB)
  parts = []
  for z in range(plan.blocks):
    rows = words[: (z + 1) * SUB // 2]
    parts.append(rows & jnp.where(block == z, -1, 0))
  picked = pltpu.bitcast(jnp.concatenate(parts, 0), jnp.bfloat16)
  products = dot(picked, left)
  columns, start = [], 0
  for z in range(plan.blocks):
    at = lambda i, start=start: slice(start + i * SUB, start + (i + 1) * SUB)
    columns.append([products[at(i)] for i in range(z + 1)])
    start += (z + 1) * SUB
  return columns


def _row_gradients(p: Prepared, u: Updates, products, static) -> Rows:
  """Gradients of q, k and the log decay of one head.

  The gate's gradient at a token sums pairs on both sides of it. Pairs that lie
  wholly after it cancel between their row and their column, to accumulation
  accuracy only because both are built from the same rounded operands.
  """
  rows, columns = products
  masks, sums, plan = static
  t = p.tiles
  stack = lambda parts: jnp.concatenate(parts, 0)
  pair_q, pair_k, d_sums, scale = [], [], [], []
  for z in range(plan.blocks):
    weighted = t.left[z].astype(jnp.float32) * rows[z]
    d_sums.append(weighted[:SUB] + weighted[SUB:])
    pair_q.append(t.left_scale[z] * rows[z][:SUB])
    pair_k.append(t.left_scale[z] * rows[z][SUB:])
    scale.append(t.left_scale[z] * t.starts[z])
  column_k, d_column = _column_gradients(t, columns, plan)
  head_ck = keep(stack(scale), masks.entering_c1)
  read_ck, erase_ck = head_ck * u.d_read_ck, head_ck * u.d_erase_ck
  tail_ck = keep(stack(_tails(t, plan)), masks.leaving_c1)
  written_ck = tail_ck * u.d_write_ck
  d_sum_ck = stack(d_sums) - d_column + p.q_ck * read_ck - p.k_ck * erase_ck
  return Rows(
    stack(pair_q) + read_ck + u.own_c1 * p.k_ck,
    stack(pair_k) + column_k - erase_ck + written_ck + u.own_c1 * p.q_ck,
    _gate_sums(d_sum_ck, p.k_ck * written_ck, sums, plan) + u.through_1k,
  )


def _tails(t: tiles_lib.Tiles, plan: Plan) -> list[jax.Array]:
  """exp(G_C - G) of every sub-block."""
  tails, after_1k = [], 2.0**plan.offset
  for z in reversed(range(plan.blocks)):
    after_1k = t.decays[z] * after_1k
    tails.append(t.right_scale[z] * after_1k)
  return tails[::-1]


def _column_gradients(t: tiles_lib.Tiles, columns, plan: Plan):
  """Gradients of k and of the running decay as columns of the pairs, [C, K].

  Later sub-blocks are first summed at the end of sub-block i, then scaled by
  exp(G_end - G) <= 1: through its start they could underflow.
  """
  d_k, d_sums = [], []
  for i in range(plan.blocks):
    at = slice(i * SUB, (i + 1) * SUB)
    own = t.right_scale[i] * columns[i][i]
    d_sum = t.right[i][at].astype(jnp.float32) * columns[i][i]
    later = None
    for z in reversed(range(i + 1, plan.blocks)):
      column = columns[z][i]
      d_sum += t.right[z][at].astype(jnp.float32) * column
      later = column if later is None else column + t.decays[z] * later
    if later is not None:
      low = 2.0**-plan.offset
      reach_xk = t.right_scale[i] * (t.decays[i] * 2.0**plan.offset)
      own += reach_xk * (low * later)
    d_k.append(own)
    d_sums.append(d_sum)
  return jnp.concatenate(d_k, 0), jnp.concatenate(d_sums, 0)


def _sum_matrices(masks: Masks, plan: Plan):
  """Ones where s >= c in one document, and where s < c, both [C, 128]."""
  c = plan.chunk
  shape = (c, LANES)
  row = lax.broadcasted_iota(jnp.int32, shape, 0)
  column = lax.broadcasted_iota(jnp.int32, shape, 1) % c
  ones = lambda condition: bfloat16(jnp.where(condition, 1.0, 0.0))
  after = column >= row
  if masks.same_cs is not None:
    after &= masks.same_cs != 0
  return ones(after), ones(column < row)


def _gate_sums(d_sum_ck, written_ck, sums, plan: Plan) -> jax.Array:
  """Sums of dG from each row on, and of what is written before each row."""
  total = None
  for ones_cs, x_ck in zip(sums, (d_sum_ck, written_ck)):
    parts = tiles_lib.split(x_ck)
    if plan.pack == 2:
      parts = (jnp.concatenate(parts, 0),)
    for part in parts:
      product = dot(ones_cs, part)
      total = product if total is None else total + product
  return total


def _norm_gradient(d_y_ck, y_ck, norm_c1, scale: float) -> jax.Array:
  """Gradient before y = scale x / |x|, norm = scale / |x|."""
  if norm_c1 is None:
    return d_y_ck * scale
  along_c1 = jnp.sum(y_ck * d_y_ck, 1, keepdims=True) * scale**-2
  return norm_c1 * (d_y_ck - y_ck * along_c1)


def _backward_kernel(*refs, plan: Plan, has_inverse: bool):
  refs = list(refs)
  take = lambda n: [refs.pop(0) for _ in range(n)]
  inputs = Inputs(*take(6), take(1)[0] if plan.segmented else None)
  states_ref, d_out_ref, d_final_ref = take(3)
  inverse_ref = take(1)[0] if has_inverse else None
  grads = Gradients(*take(7))
  d_state_ref, sums_ref = take(2)
  step = pl.program_id(2)

  @pl.when(step == 0)
  def _():
    d_state_ref[...] = d_final_ref[0]
    sums_ref[...] = jnp.zeros_like(sums_ref)

  masks = tiles_lib.masks(
    inputs.documents[0, 0] if plan.segmented else None, plan
  )
  sums = _sum_matrices(masks, plan)
  beta_ch = forward_kernel.betas(inputs, masks, plan)
  static = masks, plan, True
  prepared = forward_kernel.prepare(inputs, beta_ch, static)
  systems = forward_kernel.systems_of(prepared, masks, plan)
  if has_inverse:
    inverses = [inverse_ref[0, 0, pack] for pack in range(plan.packs)]
  else:
    inverses = tiles_lib.inverses(
      [s.beta_cs * s.alike_cs for s in systems], plan
    )
  refs = inputs, states_ref, d_out_ref, d_state_ref
  solved = _solve(systems, inverses, refs, (prepared, masks, plan))
  pairs = [_pair_gradients(s, solved, (masks, plan)) for s in systems]
  states = prepared, states_ref, d_state_ref, plan
  updates = {}
  for system, (_, minus_d_a_cs) in zip(systems, pairs):
    updates |= _updates(system, solved, minus_d_a_cs, states)
  products = {}
  for system, (weights, _) in zip(systems, pairs):
    own = [prepared[h] for h in system.heads]
    products |= dict(zip(system.heads, _pair_products(own, weights, plan)))
  blocks = grads, inputs, sums_ref
  for key in range(plan.heads // plan.group):
    total = None
    for h in range(key * plan.group, (key + 1) * plan.group):
      p, u = prepared[h], updates[h]
      d = _row_gradients(p, u, products[h], (masks, sums, plan))
      _write_head(h, (d, u, p), blocks, static)
      both = d.q_ck, d.k_ck
      total = both if total is None else jax.tree.map(jnp.add, total, both)
    _write_keys(key, total, p, (grads, plan))

  @pl.when(step == pl.num_programs(2) - 1)
  def _():
    grads.initial_state[0] = d_state_ref[...]
    grads.gate_sums[0] = sums_ref[...]


def _write_keys(head: int, both, p: Prepared, static):
  """Gradients of the raw q and k of one key head."""
  grads, plan = static
  q_ck = _norm_gradient(both[0], p.q_ck, p.q_norm_c1, plan.scale)
  k_ck = _norm_gradient(both[1], p.k_ck, p.k_norm_c1, 1.0)
  grads.q[0, :, plan.keys(head)] = q_ck.astype(grads.q.dtype)
  grads.k[0, :, plan.keys(head)] = k_ck.astype(grads.k.dtype)


def _write_head(head: int, gradients, blocks, static):
  """Gradients of one head's raw v, gate and beta; adds to the gate's sums."""
  d, u, p = gradients
  grads, inputs, sums_ref = blocks
  masks, plan, _ = static
  keys = plan.keys(head)
  d_gate_ck = keep(d.decay_ck, masks.valid_c1)
  if plan.activate_gate:
    s_ck = p.gate.sigmoid_ck
    d_z_ck = d_gate_ck * (plan.bound * s_ck * (1 - s_ck))
    d_gate_ck = inputs.affine[0:1, keys] * d_z_ck
    sums_ref[0:1, keys] += jnp.sum(d_z_ck, 0, keepdims=True)
    sums_ref[1:2, keys] += jnp.sum(d_z_ck * p.gate.z_ck, 0, keepdims=True)
  grads.gate[0, :, keys] = d_gate_ck.astype(grads.gate.dtype)
  d_v_cv = u.d_v_cv
  d_beta_c1 = u.d_beta_c1
  if plan.activate_beta:
    d_beta_c1 = d_beta_c1 * (p.beta_c1 * (1 - p.beta_c1))
  grads.v[0, :, plan.values(head)] = d_v_cv.astype(grads.v.dtype)
  grads.beta[0, 0, :, head : head + 1] = keep(d_beta_c1, masks.valid_c1)


def backward(
  operands: Operands, cotangents: Cotangents, saved, plan: Plan, interpret
) -> Gradients:
  """Gradients of the operands, of the gate's sums and of the first state.

  Args:
    saved: what the forward kernel wrote: the states that entered the chunks,
      and their inverses or None.
  """
  batch, groups, length = operands.beta.shape[:3]
  chunks, heads = length // plan.chunk, plan.heads
  states, inverse = saved
  v, k = plan.value_dim, plan.key_dim
  at = lambda n: chunks - 1 - n
  row = lambda width: pl.BlockSpec(
    (1, plan.chunk, width), lambda b, h, n: (b, at(n), h)
  )
  per_chunk = lambda count, rows, columns: pl.BlockSpec(
    (1, 1, count, rows, columns), lambda b, h, n: (b, at(n), h, 0, 0)
  )
  state_spec = pl.BlockSpec((1, heads, v, k), lambda b, h, n: (b, h, 0, 0))
  sums_spec = pl.BlockSpec((1, 2, heads * k), lambda b, h, n: (b, 0, h))
  specs = forward_kernel.operand_specs(plan, operands, at)
  in_specs = [*specs, per_chunk(heads, v, k), row(heads * v), state_spec]
  given = [x for x in operands if x is not None]
  given += [states, cotangents.out, cotangents.final_state]
  if inverse is not None:
    in_specs.append(per_chunk(plan.packs, plan.chunk, LANES))
    given.append(inverse)
  vary = jax.typeof(operands.q).manual_axis_type
  shape = lambda like, dtype=None: jax.ShapeDtypeStruct(
    like.shape, dtype or like.dtype, manual_axis_type=vary
  )
  sums = jax.ShapeDtypeStruct(
    (batch, 2, groups * heads * k), jnp.float32, manual_axis_type=vary
  )
  return Gradients(
    *pl.pallas_call(
      functools.partial(
        _backward_kernel, plan=plan, has_inverse=inverse is not None
      ),
      grid=(batch, groups, chunks),
      in_specs=in_specs,
      out_specs=[*specs[:5], sums_spec, state_spec],
      out_shape=[
        *(shape(x) for x in operands[:4]),
        shape(operands.beta, jnp.float32),
        sums,
        shape(cotangents.final_state),
      ],
      scratch_shapes=[
        pltpu.VMEM((heads, v, k), jnp.float32),
        pltpu.VMEM((2, heads * k), jnp.float32),
      ],
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=('parallel', 'parallel', 'arbitrary'),
        vmem_limit_bytes=forward_kernel.VMEM_LIMIT,
      ),
      interpret=interpret,
      name='kda_backward',
    )(*given)
  )
