"""What forward and backward of Kimi Delta Attention share in a TPU kernel.

Legend: c row in the chunk, s column (of several heads side by side), x row in
a sub-block of 16, k key width, v value width; a suffix 1 is a broadcast axis.

The kernels work on one chunk of several heads. Matrices [C, C] of 128 / C heads
lie side by side on the 128 lanes, so that elementwise work on them fills the
vector registers; products of such a pack go through block-diagonal operands.
Decays are kept in powers of two. Both kernels build P, M and T with the
functions of this file, hence from the same roundings.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

SUB = 16
LANES = 128
_LOG2_E = math.log2(math.e)
# exp2 of it is finite, and its reciprocal is too small to change a sum.
_LARGEST_EXPONENT = 120.0
_NORM_EPS = 1e-6
_ROWS = 8  # sublanes of a float32 register


class Plan(NamedTuple):
  """Static choices of one kernel."""

  chunk: int  # 64 or 128
  heads: int  # value heads in a grid step
  group: int  # value heads of one key head
  key_dim: int
  value_dim: int
  bound: float
  scale: float
  normalize: bool
  activate_gate: bool
  activate_beta: bool
  segmented: bool

  @property
  def pack(self) -> int:
    """Heads whose [C, C] matrices share the lanes."""
    return LANES // self.chunk

  @property
  def packs(self) -> int:
    return -(-self.heads // self.pack)

  @property
  def blocks(self) -> int:
    return self.chunk // SUB

  @property
  def offset(self) -> float:
    """Log2 of the constant that both factors of a decay are shifted by."""
    return -self.bound * SUB / 2 * _LOG2_E

  def pack_heads(self, pack: int) -> range:
    return range(pack * self.pack, min(self.heads, (pack + 1) * self.pack))

  def keys(self, head: int) -> slice:
    return slice(head * self.key_dim, (head + 1) * self.key_dim)

  def values(self, head: int) -> slice:
    return slice(head * self.value_dim, (head + 1) * self.value_dim)


class Masks(NamedTuple):
  """Bit masks, 0 or -1 in int32; the last five are None without segments."""

  attend_cs: jax.Array  # row may read column, itself included
  strict_cs: jax.Array  # the same without the diagonal
  same_cs: jax.Array | None  # of one document; padding is of that before it
  valid_c1: jax.Array | None
  entering_c1: jax.Array | None  # row is in the document that enters
  leaving_c1: jax.Array | None  # row is in the document that leaves
  through_11: jax.Array | None  # no document begins in the chunk; float


class Gate(NamedTuple):
  """The decay gate of one head and what its gradient needs."""

  z_ck: jax.Array  # argument of the sigmoid
  sigmoid_ck: jax.Array
  decay_ck: jax.Array  # log2 of the decay


class Tiles(NamedTuple):
  """Decayed operands of one head."""

  left: tuple[jax.Array, ...]  # [q L; k L] of each sub-block, bfloat16
  right: tuple[jax.Array, ...]  # k R of rows up to each sub-block, bfloat16
  left_scale: tuple[jax.Array, ...]  # L = exp(G - G_start + offset)
  right_scale: tuple[jax.Array, ...]  # exp(G_start - G - offset), own rows
  decays: tuple[jax.Array, ...]  # exp(G_end - G_start) [1, K] per sub-block
  starts: tuple[jax.Array, ...]  # exp(G_start - offset) [1, K]
  read_ck: jax.Array  # q exp(G), bfloat16
  erase_ck: jax.Array  # -k exp(G), bfloat16
  write_ck: jax.Array  # k exp(G_C - G), float32
  gamma_1k: jax.Array  # exp(G_C)


def dot(a, b, contract=(1, 0)) -> jax.Array:
  """Product over axis contract[0] of a and contract[1] of b, in float32."""
  dimensions = (((contract[0],), (contract[1],)), ((), ()))
  return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def keep(x, mask) -> jax.Array:
  """`x` where the int32 mask is -1, zero where it is 0; NaN is cleared."""
  if mask is None:
    return x
  bits = lax.bitcast_convert_type(x, jnp.int32) & mask
  return lax.bitcast_convert_type(bits, jnp.float32)


def _iota(shape, axis: int) -> jax.Array:
  return lax.broadcasted_iota(jnp.int32, shape, axis)


def _mask(condition) -> jax.Array:
  return jnp.where(condition, -1, 0)


def bfloat16(x) -> jax.Array:
  return x.astype(jnp.bfloat16)


def masks(documents_2s, plan: Plan) -> Masks:
  """Masks of a chunk from its documents, counted from the entering one.

  Args:
    documents_2s: [2, 128] float32 or None: document of each token, and 1 for
      tokens that are no padding; once per head of a pack.
  """
  shape = (plan.chunk, LANES)
  row_cs, column_cs = _iota(shape, 0), _iota(shape, 1) % plan.chunk
  attend_cs, strict_cs = row_cs >= column_cs, row_cs > column_cs
  if documents_2s is None:
    return Masks(_mask(attend_cs), _mask(strict_cs), *[None] * 5)
  own_cs = (row_cs == column_cs) & (_iota(shape, 1) < plan.chunk)
  column = lambda x_1s: jnp.sum(jnp.where(own_cs, x_1s, 0.0), 1, keepdims=True)
  document_1s, valid_1s = documents_2s[0:1], documents_2s[1:2]
  document_c1, valid_c1 = column(document_1s), column(valid_1s) > 0
  last_11 = document_1s[:, plan.chunk - 1 : plan.chunk]
  same_cs = document_c1 == document_1s
  pair_cs = same_cs & (valid_1s > 0) & valid_c1
  return Masks(
    _mask(attend_cs & pair_cs),
    _mask(strict_cs & pair_cs),
    _mask(same_cs),
    _mask(valid_c1),
    _mask((document_c1 == 0) & valid_c1),
    _mask((document_c1 == last_11) & valid_c1),
    jnp.where(last_11 == 0, 1.0, 0.0),
  )


def inverse_norm(x_ck) -> jax.Array:
  """rsqrt(sum x^2 + 1e-6) [C, 1]."""
  return lax.rsqrt(jnp.sum(x_ck * x_ck, 1, keepdims=True) + _NORM_EPS)


def sigmoid(x) -> jax.Array:
  """Sigmoid with a relative error of a few units in the last place."""
  exponent = jnp.minimum(-_LOG2_E * x, _LARGEST_EXPONENT)
  return 1 / (1 + jnp.exp2(exponent))


def gate(gate_ck, affine_2k, masks: Masks, plan: Plan) -> Gate:
  """The decay in powers of two, 0 on padding.

  Args:
    affine_2k: exp(a_log) and exp(a_log) * dt_bias per channel.
  """
  x_ck = gate_ck.astype(jnp.float32)
  if not plan.activate_gate:
    decay_ck = keep(x_ck, masks.valid_c1) * _LOG2_E
    return Gate(decay_ck, decay_ck, decay_ck)
  z_ck = keep(x_ck * affine_2k[0:1] + affine_2k[1:2], masks.valid_c1)
  sigmoid_ck = keep(sigmoid(z_ck), masks.valid_c1)
  return Gate(z_ck, sigmoid_ck, (plan.bound * _LOG2_E) * sigmoid_ck)


def split(x) -> tuple[jax.Array, jax.Array]:
  """High and low bfloat16 parts whose sum has 16 digits."""
  high = bfloat16(x)
  return high, bfloat16(x - high.astype(jnp.float32))


def sub_block_sums(decay_ck, masks: Masks, plan: Plan) -> jax.Array:
  """Sums from the start of each row's sub-block or document, row included."""
  shape = (plan.chunk, 2 * plan.chunk)
  row, column = _iota(shape, 0), _iota(shape, 1) % plan.chunk
  inside = (row >= column) & (row // SUB == column // SUB)
  if masks.same_cs is not None:
    # A document's numbers do not depend on others then, to the last bit.
    copies = shape[1] // LANES
    inside &= jnp.concatenate([masks.same_cs] * copies, 1) != 0
  ones = bfloat16(jnp.where(inside, 1.0, 0.0))
  return dot(ones, jnp.concatenate(split(decay_ck), 0))


def tiles(q_ck, k_ck, sums_ck, masks: Masks, plan: Plan) -> Tiles:
  """Decayed operands; every exponent is within 8 |bound| nats of zero.

  sums_ck: `sub_block_sums` of the log2 decays.
  """
  start_1k = jnp.full((1, plan.key_dim), 2.0**-plan.offset, jnp.float32)
  left, right, read, erase, running = [], [], [], [], None
  left_scale, right_scale, decays, starts = [], [], [], []
  for z in range(plan.blocks):
    rows = slice(z * SUB, (z + 1) * SUB)
    scale_xk = jnp.exp2(sums_ck[rows] + plan.offset)
    inverse_xk = jnp.exp2(-plan.offset - sums_ck[rows])
    q_xk, k_xk = q_ck[rows] * scale_xk, k_ck[rows] * scale_xk
    own_xk = k_ck[rows] * inverse_xk
    running = own_xk if z == 0 else jnp.concatenate([running, own_xk], 0)
    decay_1k = scale_xk[SUB - 1 :] * 2.0**-plan.offset
    left.append(bfloat16(jnp.concatenate([q_xk, k_xk], 0)))
    right.append(bfloat16(running))
    read.append(q_xk * start_1k)
    erase.append(k_xk * -start_1k)
    left_scale.append(scale_xk)
    right_scale.append(inverse_xk)
    decays.append(decay_1k)
    starts.append(start_1k)
    last = z == plan.blocks - 1
    running = running * (decay_1k * 2.0**plan.offset if last else decay_1k)
    start_1k = start_1k * decay_1k
  gamma_1k = start_1k * 2.0**plan.offset
  if masks.through_11 is not None:
    gamma_1k = gamma_1k * masks.through_11
  rows = lambda parts: jnp.concatenate(parts, 0)
  return Tiles(
    *map(tuple, (left, right, left_scale, right_scale, decays, starts)),
    bfloat16(keep(rows(read), masks.entering_c1)),
    bfloat16(keep(rows(erase), masks.entering_c1)),
    keep(running, masks.leaving_c1),
    gamma_1k,
  )


def _padded(x, rows: int) -> jax.Array:
  """Zero rows appended up to `rows`."""
  missing = rows - x.shape[0]
  if missing == 0:
    return x
  return jnp.concatenate([x, jnp.zeros((missing, x.shape[1]), x.dtype)], 0)


def stacked(parts, plan: Plan) -> jax.Array:
  """Rows of a pack's heads, each padded to C and all of them to 128."""
  parts = [_padded(x, plan.chunk) for x in parts]
  return _padded(jnp.concatenate(parts, 0), LANES)


def block_diagonal(parts, plan: Plan) -> jax.Array:
  """[128, heads * width] with the head's [C, width] on the diagonal."""
  columns = []
  for i, x in enumerate(parts):
    zeros = lambda n, x=x: jnp.zeros((n * plan.chunk, x.shape[1]), x.dtype)
    pieces = [zeros(i), x, zeros(plan.pack - 1 - i)]
    columns.append(jnp.concatenate([p for p in pieces if p.shape[0]], 0))
  return jnp.concatenate(columns, 1)


def own_lanes(parts, plan: Plan) -> jax.Array:
  """[n, 128] that has the lanes of the i-th head from the i-th part."""
  value = parts[0]
  for i, x in enumerate(parts[1:], 1):
    value = jnp.where(_iota(x.shape, 1) >= i * plan.chunk, x, value)
  return value


def score_products(heads: list[Tiles], plan: Plan) -> list[jax.Array]:
  """Of each sub-block: (q, k) rows of every head with columns of all heads."""
  products = []
  for z in range(plan.blocks):
    left = jnp.concatenate([t.left[z] for t in heads], 0)
    right = stacked([t.right[z] for t in heads], plan)
    products.append(dot(left, right, (1, 1)))
  return products


def scores(products: list[jax.Array], masks: Masks, plan: Plan):
  """P in bfloat16 and M in float32 of a pack, both [C, 128]."""
  heads = products[0].shape[0] // (2 * SUB)

  def rows(first: int, mask_cs):
    parts = []
    for z, product in enumerate(products):
      at = lambda i, x=product: x[(2 * i + first) * SUB :][:SUB]
      own = own_lanes([at(i) for i in range(heads)], plan)
      parts.append(keep(own, mask_cs[z * SUB : (z + 1) * SUB]))
    return jnp.concatenate(parts, 0)

  return bfloat16(rows(0, masks.attend_cs)), rows(1, masks.strict_cs)


def inverses(systems: list[jax.Array], plan: Plan) -> list[jax.Array]:
  """(I + A)^-1 in bfloat16 of packed strictly lower A [C, 128].

  Blocks of 16 by substitution in float32, one column of all of them at a time;
  larger blocks from their two halves: [[X1, 0], [-X2 L X1, X2]].
  """
  shape = (SUB, LANES)
  block_xs = _iota(shape, 1) % plan.chunk // SUB
  solved = _solve_blocks([_diagonal(a_cs, block_xs, plan) for a_cs in systems])
  inverses = []
  for solved_xs in solved:
    rows = [
      jnp.where(block_xs == z, solved_xs, 0.0) for z in range(plan.blocks)
    ]
    inverses.append(jnp.concatenate(rows, 0))
  size = SUB
  while size < plan.chunk:
    inverses = _merge(systems, inverses, size, plan)
    size *= 2
  return [bfloat16(x) for x in inverses]


def _diagonal(a_cs, block_xs, plan: Plan) -> jax.Array:
  """[16, 128] with each 16-column block from the rows of its own block."""
  value = a_cs[:SUB]
  for z in range(1, plan.blocks):
    value = jnp.where(block_xs == z, a_cs[z * SUB : (z + 1) * SUB], value)
  return value


def _solve_blocks(systems: list[jax.Array]) -> list[jax.Array]:
  """Inverses of I + A for blocks [16, 16] of strictly lower A on the lanes."""
  shape = (_ROWS, LANES)
  row, column = _iota(shape, 0), _iota(shape, 1) % SUB
  first = _iota(shape, 1) // SUB * SUB
  unit = lambda half: jnp.where(column == row + half * _ROWS, 1.0, 0.0)
  halves = [(a_xs[:_ROWS], a_xs[_ROWS:]) for a_xs in systems]
  solved = [[unit(0), unit(1)] for _ in systems]
  for j in range(SUB - 1):
    source, at = divmod(j, _ROWS)
    for a, x in zip(halves, solved):
      pivot = x[source][at : at + 1]
      for half in range(source, 2):
        if half == 0 and at == _ROWS - 1:
          continue  # no row of the upper half is below the pivot
        factor = jnp.take_along_axis(
          a[half], first + j, axis=1, mode='promise_in_bounds'
        )
        x[half] = x[half] - factor * pivot
  return [jnp.concatenate(x, 0) for x in solved]


def _block_diagonal_lanes(x_cs, plan: Plan) -> jax.Array:
  """[128, 128] with every head's [C, C] on the diagonal, of bfloat16."""
  if plan.pack == 1:
    return x_cs
  words = pltpu.bitcast(x_cs, jnp.int32)
  lane = _iota((1, LANES), 1) // plan.chunk
  parts = [words & _mask(lane == i) for i in range(plan.pack)]
  return pltpu.bitcast(jnp.concatenate(parts, 0), jnp.bfloat16)


def _merge(systems, inverses, size: int, plan: Plan) -> list[jax.Array]:
  """Inverses of blocks of 2 `size` from those of `size`."""
  starts = range(size, plan.chunk, 2 * size)
  odd = lambda m_cs: jnp.concatenate([m_cs[j : j + size] for j in starts], 0)
  shape = (plan.chunk // 2, LANES)
  row_block = 2 * (_iota(shape, 0) // size) + 1
  partner = _iota(shape, 1) % plan.chunk // size == row_block - 1
  products = [
    _fine_left(jnp.where(partner, odd(a_cs), 0.0), bfloat16(x_cs), plan)
    for a_cs, x_cs in zip(systems, inverses)
  ]
  zeros = jnp.zeros((size, LANES), jnp.bfloat16)
  corners = []
  for x_cs, product in zip(inverses, products):
    pieces = []
    for i in range(len(starts)):
      pieces += [zeros, bfloat16(product[i * size : (i + 1) * size])]
    corners.append(_fine_left(odd(x_cs), jnp.concatenate(pieces, 0), plan))
  merged = []
  for x_cs, corner in zip(inverses, corners):
    pieces = []
    for i, j in enumerate(starts):
      rows = corner[i * size : (i + 1) * size]
      pieces += [x_cs[j - size : j], x_cs[j : j + size] - rows]
    merged.append(jnp.concatenate(pieces, 0))
  return merged


def _fine_left(left, right_cs, plan: Plan) -> jax.Array:
  """Product per head of a float32 `left` and a bfloat16 `right`.

  Rounding `left` too would be felt where keys are alike and betas near 1:
  there the error of the final state would be 8.4e-3 instead of 5.7e-3.
  """
  both = jnp.concatenate(split(left), 0)
  products = dot(both, _block_diagonal_lanes(right_cs, plan))
  rows = left.shape[0]
  return products[:rows] + products[rows:]
