"""Forward kernel of Kimi Delta Attention for TPUs, in Pallas Mosaic TPU.

Legend: b batch, t time, c row in the chunk, s column of a pack, k key width, v
value width. States are kept transposed, [V, K], so that their decay is a row.

Grid (batch, groups of heads, chunks); the last axis runs in order and carries
the state in VMEM. Arrays stay [B, T, H * D]: a head is a slice of lanes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda import mosaic_tpu_tiles as tiles_lib
from pallas_kernels.kda.mosaic_tpu_tiles import LANES, Plan, bfloat16, dot

VMEM_LIMIT = 48 * 2**20


class Operands(NamedTuple):
  """Arrays as the kernels take them; N = T / C, P packs of heads."""

  q: jax.Array  # [B, T, H K]
  k: jax.Array  # [B, T, H K]
  v: jax.Array  # [B, T, HV V]
  gate: jax.Array  # [B, T, HV K]
  beta: jax.Array  # [B, groups, T, heads]
  affine: jax.Array  # [2, HV K] float32
  documents: jax.Array | None  # [B, N, 2, 128] float32


class Outputs(NamedTuple):
  """Which results the forward kernel writes.

  affine: instead of a given state, carry offset and transition of the affine
    map from the state before the sequence to the one after it, as a state of
    V + K columns that starts as [0 | I] and meets the values [v | 0].
  """

  out: bool = True
  states: bool = False
  inverse: bool = False
  affine: bool = False


def operand_specs(plan: Plan, operands: Operands, chunk_index) -> list:
  """Block specs of the operands; chunk_index maps a grid step to its chunk."""
  c, heads = plan.chunk, plan.heads
  keys = heads // plan.group * plan.key_dim
  row = lambda width: pl.BlockSpec(
    (1, c, width), lambda b, h, n: (b, chunk_index(n), h)
  )
  specs = [
    row(keys),
    row(keys),
    row(heads * plan.value_dim),
    row(heads * plan.key_dim),
    pl.BlockSpec((1, 1, c, heads), lambda b, h, n: (b, h, chunk_index(n), 0)),
    pl.BlockSpec((2, heads * plan.key_dim), lambda b, h, n: (0, h)),
  ]
  if operands.documents is not None:
    specs.append(
      pl.BlockSpec((1, 1, 2, LANES), lambda b, h, n: (b, chunk_index(n), 0, 0))
    )
  return specs


class Inputs(NamedTuple):
  """Blocks of `Operands` in VMEM."""

  q: jax.Array
  k: jax.Array
  v: jax.Array
  gate: jax.Array
  beta: jax.Array
  affine: jax.Array
  documents: jax.Array | None


class Prepared(NamedTuple):
  """Everything of one head that does not depend on the state."""

  q_ck: jax.Array  # normalised and times the scale
  k_ck: jax.Array
  q_norm_c1: jax.Array | None  # factor from the raw q
  k_norm_c1: jax.Array | None
  gate: tiles_lib.Gate
  tiles: tiles_lib.Tiles
  beta_c1: jax.Array


def betas(inputs: Inputs, masks, plan: Plan) -> jax.Array:
  """[C, heads] in float32."""
  beta_ch = inputs.beta[0, 0].astype(jnp.float32)
  if plan.activate_beta:
    beta_ch = tiles_lib.sigmoid(beta_ch)
  return tiles_lib.keep(beta_ch, masks.valid_c1)


def prepare(inputs: Inputs, beta_ch, static) -> list[Prepared]:
  """Activates and decays the heads of the chunk; static: masks, plan, clean.

  With `clean`, padding rows of q and k are zero; without, they may hold
  anything, which only products over rows of the chunk would notice.
  """
  masks, plan, clean = static
  valid = masks.valid_c1 if clean else None
  shared = [
    _normalized(inputs, plan.keys(key), valid, plan)
    for key in range(plan.heads // plan.group)
  ]
  gates, prepared = [], []
  for h in range(plan.heads):
    gate_ck, affine_2k = inputs.gate[0, :, plan.keys(h)], inputs.affine
    gates.append(
      tiles_lib.gate(gate_ck, affine_2k[:, plan.keys(h)], masks, plan)
    )
  sums = [tiles_lib.sub_block_sums(g.decay_ck, masks, plan) for g in gates]
  for h, gate in enumerate(gates):
    q_ck, k_ck, *norms = shared[h // plan.group]
    tiles = tiles_lib.tiles(q_ck, k_ck, sums[h], masks, plan)
    beta_c1 = beta_ch[:, h : h + 1]
    prepared.append(Prepared(q_ck, k_ck, *norms, gate, tiles, beta_c1))
  return prepared


def _normalized(inputs: Inputs, keys: slice, valid, plan: Plan):
  """q times the scale and k of one key head, and their factors from the raw."""
  wide = lambda ref: tiles_lib.keep(ref[0, :, keys].astype(jnp.float32), valid)
  q_ck, k_ck = wide(inputs.q), wide(inputs.k)
  if not plan.normalize:
    return q_ck * plan.scale, k_ck, None, None
  q_norm_c1 = tiles_lib.inverse_norm(q_ck) * plan.scale
  k_norm_c1 = tiles_lib.inverse_norm(k_ck)
  return q_ck * q_norm_c1, k_ck * k_norm_c1, q_norm_c1, k_norm_c1


class System(NamedTuple):
  """The pairs of a pack's heads, all [C, 128]."""

  heads: range
  attend_cs: jax.Array  # P, bfloat16
  alike_cs: jax.Array  # M
  beta_cs: jax.Array  # of the row, on the lanes of the head


def systems_of(prepared: list[Prepared], masks, plan: Plan) -> list[System]:
  """The `System` of each pack."""
  heads = [plan.pack_heads(pack) for pack in range(plan.packs)]
  products = [
    tiles_lib.score_products([prepared[h].tiles for h in own], plan)
    for own in heads
  ]
  systems = []
  for own, product in zip(heads, products):
    shape = (plan.chunk, LANES)
    wide = [jnp.broadcast_to(prepared[h].beta_c1, shape) for h in own]
    scores = tiles_lib.scores(product, masks, plan)
    systems.append(System(own, *scores, tiles_lib.own_lanes(wide, plan)))
  return systems


def _forward_kernel(*refs, plan: Plan, outputs: Outputs):
  refs = list(refs)
  take = lambda wanted: refs.pop(0) if wanted else None
  inputs = Inputs(*(take(True) for _ in range(6)), take(plan.segmented))
  initial_ref, final_ref = take(not outputs.affine), take(True)
  out_ref, states_ref = take(outputs.out), take(outputs.states)
  inverse_ref, state_ref = take(outputs.inverse), take(True)
  step = pl.program_id(2)

  @pl.when(step == 0)
  def _():
    state_ref[...] = _identity(plan) if outputs.affine else initial_ref[0]

  masks = tiles_lib.masks(
    inputs.documents[0, 0] if plan.segmented else None, plan
  )
  beta_ch = betas(inputs, masks, plan)
  static = masks, plan, False
  prepared = prepare(inputs, beta_ch, static)
  systems = systems_of(prepared, masks, plan)
  inverses = tiles_lib.inverses([s.beta_cs * s.alike_cs for s in systems], plan)
  if inverse_ref is not None:
    for pack, inverse_cs in enumerate(inverses):
      inverse_ref[0, 0, pack] = inverse_cs
  blocks = inputs, state_ref, out_ref, states_ref
  _scan(systems, inverses, blocks, (prepared, masks, plan, outputs))

  @pl.when(step == pl.num_programs(2) - 1)
  def _():
    final_ref[0] = state_ref[...]


def _scan(systems: list[System], inverses, blocks, static):
  """Outputs of the chunk, and the states after it.

  Each step is done for all packs before the next: the compiler then finds work
  of other heads for the time that a product takes.
  """
  inputs, state_ref, out_ref, states_ref = blocks
  prepared, masks, plan, outputs = static
  heads = [h for s in systems for h in s.heads]
  errors, reads = {}, {}
  for h in heads:
    low_state = bfloat16(state_ref[h])
    if states_ref is not None:
      states_ref[0, 0, h] = low_state
    p = prepared[h]
    read = [p.tiles.read_ck] if outputs.out else []
    left = jnp.concatenate([p.tiles.erase_ck, *read], 0)
    seen = dot(left, low_state, (1, 1))
    v_cv = inputs.v[0, :, plan.values(h)].astype(jnp.float32)
    v_cv = tiles_lib.keep(v_cv, masks.valid_c1)
    if outputs.affine:
      zeros_ck = jnp.zeros((plan.chunk, plan.key_dim), jnp.float32)
      v_cv = jnp.concatenate([v_cv, zeros_ck], 1)
    errors[h] = bfloat16(p.beta_c1 * (v_cv + seen[: plan.chunk]))
    reads[h] = seen[plan.chunk :]
  updates = []
  for system, inverse_cs in zip(systems, inverses):
    right = [errors[h] for h in system.heads]
    updates.append(
      bfloat16(dot(inverse_cs, tiles_lib.block_diagonal(right, plan)))
    )
  width = errors[heads[0]].shape[1]
  for system, update in zip(systems, updates):
    parts = [
      update[:, i * width :][:, :width] for i in range(len(system.heads))
    ]
    for h, update_cv in zip(system.heads, parts):
      t = prepared[h].tiles
      # Keys in two parts: where they are alike the writes nearly cancel.
      write_2ck = jnp.concatenate(tiles_lib.split(t.write_ck), 0)
      update_2cv = jnp.concatenate([update_cv, update_cv], 0)
      written = dot(update_2cv, write_2ck, (0, 0))
      state_ref[h] = t.gamma_1k * state_ref[h] + written
    if out_ref is None:
      continue
    seen = dot(system.attend_cs, tiles_lib.block_diagonal(parts, plan))
    for i, h in enumerate(system.heads):
      out_cv = reads[h] + seen[:, plan.values(i)]
      out_ref[0, :, plan.values(h)] = out_cv.astype(out_ref.dtype)


def _identity(plan: Plan) -> jax.Array:
  """[0 | I] of every head, transposed: [heads, V + K, K]."""
  shape = (plan.heads, plan.value_dim + plan.key_dim, plan.key_dim)
  row, column = (lax.broadcasted_iota(jnp.int32, shape, i) for i in (1, 2))
  return jnp.where(row - plan.value_dim == column, 1.0, 0.0)


def forward(
  operands: Operands, initial_bhvk, plan: Plan, outputs: Outputs, interpret
) -> list[jax.Array]:
  """Final state [B, HV, V, K], then the results that `outputs` names.

  The state is [B, HV, V + K, K] and `initial_bhvk` None with outputs.affine.

  out [B, T, HV V]; states [B, N, HV, V, K] bfloat16, which entered each chunk;
  inverse [B, N, HV / pack, C, 128] bfloat16.
  """
  batch, groups, length = operands.beta.shape[:3]
  chunks = length // plan.chunk
  heads, v, k = plan.heads, plan.value_dim, plan.key_dim
  rows = v + k if outputs.affine else v
  vary = jax.typeof(operands.q).manual_axis_type
  shape = functools.partial(jax.ShapeDtypeStruct, manual_axis_type=vary)
  state_spec = pl.BlockSpec((1, heads, rows, k), lambda b, h, n: (b, h, 0, 0))
  specs = [state_spec]
  shapes = [shape((batch, groups * heads, rows, k), jnp.float32)]
  if outputs.out:
    specs.append(
      pl.BlockSpec((1, plan.chunk, heads * v), lambda b, h, n: (b, n, h))
    )
    shapes.append(shape(operands.v.shape, operands.v.dtype))
  per_chunk = lambda count, rows, columns: pl.BlockSpec(
    (1, 1, count, rows, columns), lambda b, h, n: (b, n, h, 0, 0)
  )
  if outputs.states:
    specs.append(per_chunk(heads, v, k))
    shapes.append(shape((batch, chunks, groups * heads, v, k), jnp.bfloat16))
  if outputs.inverse:
    specs.append(per_chunk(plan.packs, plan.chunk, LANES))
    shapes.append(
      shape(
        (batch, chunks, groups * plan.packs, plan.chunk, LANES), jnp.bfloat16
      )
    )
  in_specs = operand_specs(plan, operands, lambda n: n)
  given = [x for x in operands if x is not None]
  if not outputs.affine:
    in_specs.append(state_spec)
    given.append(initial_bhvk)
  return pl.pallas_call(
    functools.partial(_forward_kernel, plan=plan, outputs=outputs),
    grid=(batch, groups, chunks),
    in_specs=in_specs,
    out_specs=specs,
    out_shape=shapes,
    scratch_shapes=[pltpu.VMEM((heads, rows, k), jnp.float32)],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'parallel', 'arbitrary'),
      vmem_limit_bytes=VMEM_LIMIT,
    ),
    interpret=interpret,
    name='kda_affine' if outputs.affine else 'kda_forward',
  )(*given)
