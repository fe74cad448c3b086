"""Kimi Delta Attention in chunks of tokens, in plain JAX, with its own VJP.

Legend: n chunks, b batch, h value heads, k key width, v value width, c and s
row and column position in the chunk, z sub-block of 16 rows, i sub-block of
columns, x and y position in a sub-block, w the pair (query, key).

With G the running sum of the log decay g in a chunk that starts from state S:

  P = tril(q_c . (exp(G_c - G_s) k_s));  M = strict tril(k_c . (...) k_s)
  T = (I + Diag(beta) M)^-1
  E = V - (k exp(G)) S;  U = T Diag(beta) E
  O = scale ((q exp(G)) S + P U)
  S' = Diag(exp(G_C)) S + (k exp(G_C - G))^T U

Source: Kimi Linear (arXiv 2510.26692), section 3, with the inverse applied to
the prediction error so that its gradient is one product, -stril(dR U^T).

Each exponential of a difference is split at a sub-block's start minus a
constant 8 |lower_bound| nats. The reference point is causal, and both factors
stay within exp(+-40): small gradients are then not flushed to zero.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import dispatch
from pallas_kernels.kda import inputs as kda_inputs

_SUB = 16
# Chunks times heads times batch that are prepared together: enough to fill a
# few cores, few enough that the temporaries stay in a cache. Where one chunk
# of the batch is more, a CPU takes the batch in slices.
_GROUP_CELLS = 32


class Plan(NamedTuple):
  """`groups` groups of `group` chunks of `chunk` tokens cover the sequence.

  The batch goes through in `slices` parts, one after the other.
  """

  chunk: int
  group: int
  groups: int
  slices: int


class Group(NamedTuple):
  """Tokens that are prepared together: [B, group * chunk, ...]."""

  arrays: tuple[jax.Array, ...]  # q, k, v, gate, beta
  valid: jax.Array | None  # [B, L] bool
  document: jax.Array | None  # [B, L] int32
  before: jax.Array | None  # [B] int32, document of the row before the group


class Masks(NamedTuple):
  """Which pairs of rows share a document, and who meets the states."""

  same_nbcs: jax.Array
  near_nbzxy: jax.Array  # the same, of the rows of one sub-block
  entering_nbc: jax.Array  # row is in the document that entered the chunk
  leaving_nbc: jax.Array  # row is in the document that leaves the chunk
  through_nb: jax.Array  # no document begins in the chunk


class Tiles(NamedTuple):
  """Decayed operands of a group of chunks."""

  left_nbhzwxk: jax.Array  # q L and k L, operand dtype
  right_nbhzsk: jax.Array  # k_s R for the rows of sub-block z, operand dtype
  left_scale_nbhzxk: jax.Array  # L = exp(G - G_start(z) + offset)
  right_scale_nbhzsk: jax.Array  # R = exp(G_start(z) - G - offset)
  head_nbhck: jax.Array  # exp(G), 0 on rows that do not see the state
  tail_nbhck: jax.Array  # exp(G_C - G), 0 on rows that do not reach the end
  gamma_nbhk: jax.Array  # exp(G_C), 0 if a document begins in the chunk


class Scan(NamedTuple):
  """Operands of the recurrence over chunks, leading axis n."""

  erase: jax.Array  # k exp(G), nbhck
  write: jax.Array  # k exp(G_C - G), nbhck, wide
  inverse: jax.Array  # T, nbhcs
  v: jax.Array
  beta: jax.Array
  gamma: jax.Array


def _dot(subscripts: str, a, b, dtype) -> jax.Array:
  """Product accumulated in `dtype`; exact passes for wide operands."""
  return jnp.einsum(
    subscripts,
    a,
    b,
    precision=lax.Precision.HIGHEST,
    preferred_element_type=dtype,
  )


def _plan(v_bthv: jax.Array, chunk_size: int) -> Plan:
  batch, length, heads = v_bthv.shape[:3]
  chunk = min(chunk_size, -(-length // _SUB) * _SUB)
  chunks = -(-length // chunk)
  slices = _slices(v_bthv)
  most = max(1, min(chunks, _GROUP_CELLS * slices // (batch * heads)))
  groups = -(-chunks // most)
  return Plan(chunk, -(-chunks // groups), groups, slices)


def _slices(v_bthv: jax.Array) -> int:
  """Parts of a batch that would not fit a CPU's cache in one piece."""
  if pltpu.is_tpu_device() or dispatch.device_kind() != 'cpu':
    return 1  # these want all the parallel work that there is
  batch, heads = (_local_size(v_bthv, axis) for axis in (0, 2))
  least = min(batch, -(-batch * heads // _GROUP_CELLS))
  # Without a divisor near the best number, parts would be too small.
  near = range(least, 2 * least)
  return next((n for n in near if batch % n == 0), 1)


def _local_size(x: jax.Array, axis: int) -> int:
  """Length of the axis on one device, as far as types tell."""
  sharding = jax.typeof(x).sharding
  names = sharding.spec[axis] or ()
  names = (names,) if isinstance(names, str) else names
  return x.shape[axis] // math.prod(sharding.mesh.shape[n] for n in names)


def _sliced(x: jax.Array, plan: Plan) -> jax.Array:
  """[B, ...] to [slices, B / slices, ...], whichever way B is sharded."""
  x = x.reshape(-1, plan.slices, *x.shape[1:])
  return jnp.moveaxis(x, 1, 0)


def _unsliced(x: jax.Array) -> jax.Array:
  return jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:])


def _grouped(x: jax.Array, plan: Plan) -> jax.Array:
  """[B, T, ...] padded and cut to [slices, groups, B / slices, L, ...]."""
  length = plan.chunk * plan.group
  tail = plan.groups * length - x.shape[1]
  if tail:
    x = jnp.pad(x, [(0, 0), (0, tail)] + [(0, 0)] * (x.ndim - 2))
  x = x.reshape(-1, plan.slices, plan.groups, length, *x.shape[2:])
  return jnp.moveaxis(x, 0, 2)


def _ungrouped(x: jax.Array, length: int) -> jax.Array:
  x = jnp.moveaxis(x, 2, 0)
  batch = x.shape[0] * x.shape[1]
  return x.reshape(batch, -1, *x.shape[4:])[:, :length]


def _groups(raw: kda_inputs.Raw, segment_ids, plan: Plan) -> Group:
  """All groups of all slices, stacked on two leading axes."""
  arrays = tuple(_grouped(x, plan) for x in raw[:5])
  batch, length = raw.q.shape[:2]
  if segment_ids is None:
    if length == plan.chunk * plan.group * plan.groups:
      return Group(arrays, None, None, None)
    valid = jnp.ones((batch, length), bool)
    return Group(arrays, _grouped(valid, plan), None, None)
  ids = _grouped(segment_ids, plan)
  docs = kda_inputs.documents(_ungrouped(ids, ids.shape[1] * ids.shape[3]))
  document = _grouped(docs.index, plan)
  before = jnp.pad(document[:, :-1, :, -1], ((0, 0), (1, 0), (0, 0)))
  return Group(arrays, _grouped(docs.valid, plan), document, before)


def _chunks(x: jax.Array, chunk: int) -> jax.Array:
  """[B, n c, H, ...] to [n, B, H, c, ...]."""
  x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
  return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 3, 2)


def _tokens(x_nbhcv: jax.Array) -> jax.Array:
  x = jnp.moveaxis(jnp.moveaxis(x_nbhcv, 2, 3), 0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])


def _masks(group: Group, chunk: int) -> Masks | None:
  if group.document is None:
    return None
  document = group.document.reshape(group.document.shape[0], -1, chunk)
  document_nbc = jnp.moveaxis(document, 1, 0)
  last_nb = document_nbc[:, :, -1]
  first_nb = jnp.concatenate([group.before[None], last_nb[:-1]])
  document_nbzx = document_nbc.reshape(*last_nb.shape, -1, _SUB)
  same = lambda x: x[..., :, None] == x[..., None, :]
  return Masks(
    same(document_nbc),
    same(document_nbzx),
    document_nbc == first_nb[..., None],
    document_nbc == last_nb[..., None],
    first_nb == last_nb,
  )


def _sub_block_sums(decay_nbhzyk: jax.Array, masks) -> jax.Array:
  """Sums from the start of the sub-block, or of a document that begins in it.

  What a document computes then holds no rounding of another one. Rows and
  columns of one document still share their reference point, and sums over
  whole sub-blocks are only used where a document fills them.
  """
  wide = decay_nbhzyk.dtype
  lower_xy = jnp.tril(jnp.ones((_SUB, _SUB), bool))
  if masks is None:
    ones_xy = lower_xy.astype(wide)
    return _dot('xy,nbhzyk->nbhzxk', ones_xy, decay_nbhzyk, wide)
  ones_nbzxy = (lower_xy & masks.near_nbzxy).astype(wide)
  return _dot('nbzxy,nbhzyk->nbhzxk', ones_nbzxy, decay_nbhzyk, wide)


def _tiles(x: kda_inputs.Activated, masks, dtype, bound: float) -> Tiles:
  """The decayed operands, every exponent within 16 |bound| nats."""
  wide = x.q.dtype
  offset = math.exp(-bound * _SUB / 2)
  blocks = x.q.shape[3] // _SUB
  sub = lambda a: a.reshape(*a.shape[:3], blocks, _SUB, a.shape[-1])
  q_nbhzxk, k_nbhzxk, decay_nbhzyk = sub(x.q), sub(x.k), sub(x.decay)
  local_nbhzxk = _sub_block_sums(decay_nbhzyk, masks)
  # between[z, i] sums the blocks i .. z-1; z = blocks is the chunk's end.
  z, i, j = np.indices((blocks + 1, blocks, blocks))
  between_zij = jnp.asarray((i <= j) & (j < z), wide)
  span_nbhzik = _dot(
    'zij,nbhjk->nbhzik', between_zij, local_nbhzxk[..., -1, :], wide
  )
  reached = jnp.asarray(z[..., 0] >= i[..., 0])[..., None]
  span_scale = jnp.where(reached, jnp.exp(span_nbhzik), 0)
  left_scale = jnp.exp(local_nbhzxk) * offset
  right_scale = (
    span_scale[..., :-1, :, None, :]
    * (jnp.exp(-local_nbhzxk) * (1 / offset))[..., None, :, :, :]
  )
  flat = lambda a: a.reshape(*a.shape[:-3], -1, a.shape[-1])
  right_scale = flat(right_scale)
  head = flat(left_scale * (span_scale[..., :-1, 0, None, :] * (1 / offset)))
  tail = flat(jnp.exp(span_nbhzik[..., -1, :, None, :] - local_nbhzxk))
  gamma = span_scale[..., -1, 0, :]
  if masks is not None:
    head = jnp.where(masks.entering_nbc[:, :, None, :, None], head, 0)
    tail = jnp.where(masks.leaving_nbc[:, :, None, :, None], tail, 0)
    gamma = jnp.where(masks.through_nb[:, :, None, None], gamma, 0)
  left = jnp.stack([q_nbhzxk * left_scale, k_nbhzxk * left_scale], axis=-3)
  return Tiles(
    left.astype(dtype),
    (x.k[..., None, :, :] * right_scale).astype(dtype),
    left_scale,
    right_scale,
    head,
    tail,
    gamma,
  )


def _tril(chunk: int, masks, strict: bool) -> jax.Array:
  """Pairs (row, earlier column) of one document: [C, C] or [n, b, 1, C, C]."""
  lower = jnp.tril(jnp.ones((chunk, chunk), bool), -1 if strict else 0)
  return lower if masks is None else lower & masks.same_nbcs[:, :, None]


def _scores(tiles: Tiles, masks) -> tuple[jax.Array, jax.Array]:
  """P and M of the module's docstring, [n, b, h, C, C], in wide dtype."""
  scores_nbhzwxs = _dot(
    'nbhzwxk,nbhzsk->nbhzwxs',
    tiles.left_nbhzwxk,
    tiles.right_nbhzsk,
    tiles.gamma_nbhk.dtype,
  )
  chunk = scores_nbhzwxs.shape[-1]
  rows = lambda w: scores_nbhzwxs[..., w, :, :].reshape(
    *scores_nbhzwxs.shape[:3], chunk, chunk
  )
  attend = jnp.where(_tril(chunk, masks, strict=False), rows(0), 0)
  return attend, jnp.where(_tril(chunk, masks, strict=True), rows(1), 0)


def unit_lower_inverse(a: jax.Array) -> jax.Array:
  """(I + A)^-1 for strictly lower triangular A [..., C, C], C = 16 2^m.

  A ladder: blocks of 2b from the inverses X of their two blocks of b,
  [[X1, 0], [-X2 L X1, X2]]. Powers of A are never formed: for correlated keys
  they reach 1e9 while the inverse stays below 1. Arithmetic is in the dtype of
  A, without low-precision passes.
  """
  size = a.shape[-1]
  dot = lambda x, y: jnp.matmul(x, y, precision=lax.Precision.HIGHEST)
  blocks = jnp.stack(
    [a[..., j : j + _SUB, j : j + _SUB] for j in range(0, size, _SUB)], -3
  )
  row, column = np.indices((_SUB, _SUB))
  inverse = jnp.eye(_SUB, dtype=a.dtype)
  for b in (1, 2, 4, 8):
    pair = (row // (2 * b) == column // (2 * b)) & (row // b != column // b)
    lower = jnp.where(pair, blocks, 0)
    inverse -= lower if b == 1 else dot(inverse, dot(lower, inverse))
  b = _SUB
  while b < size:
    lower = jnp.stack(
      [a[..., j + b : j + 2 * b, j : j + b] for j in range(0, size, 2 * b)], -3
    )
    first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
    corner = -dot(second, dot(lower, first))
    inverse = jnp.concatenate(
      [
        jnp.concatenate([first, jnp.zeros_like(first)], -1),
        jnp.concatenate([corner, second], -1),
      ],
      -2,
    )
    b *= 2
  return inverse[..., 0, :, :]


def _inverse(alike_nbhcs, beta_nbhc, dtype) -> jax.Array:
  """T in the operand dtype; sizes that are not 16 2^m are padded."""
  size = alike_nbhcs.shape[-1]
  full = _SUB * 2 ** (size // _SUB - 1).bit_length()
  a = beta_nbhc[..., None] * alike_nbhcs
  a = jnp.pad(a, [(0, 0)] * 3 + [(0, full - size)] * 2)
  return unit_lower_inverse(a)[..., :size, :size].astype(dtype)


def _scan_operands(x, tiles: Tiles, inverse, dtype) -> Scan:
  return Scan(
    (x.k * tiles.head_nbhck).astype(dtype),
    x.k * tiles.tail_nbhck,
    inverse,
    x.v,
    x.beta,
    tiles.gamma_nbhk,
  )


def _parts(x: jax.Array, dtype) -> list[jax.Array]:
  """`x` as a sum of operands: one, or in bfloat16 a high and a low part.

  Where keys are alike, what a chunk writes nearly cancels, and one rounding of
  the keys would be most of the state's error.
  """
  high = x.astype(dtype)
  if high.dtype == x.dtype:
    return [high]
  return [high, (x - high.astype(x.dtype)).astype(dtype)]


def _states(scan: Scan, state_bhkv):
  """State after the group; per chunk the state before, E, and U."""
  wide, dtype = state_bhkv.dtype, scan.erase.dtype

  def step(state_bhkv, chunk: Scan):
    error_bhcv = chunk.v - _dot(
      'bhck,bhkv->bhcv', chunk.erase, state_bhkv.astype(dtype), wide
    )
    update_bhcv = _dot(
      'bhcs,bhsv->bhcv',
      chunk.inverse,
      (chunk.beta[..., None] * error_bhcv).astype(dtype),
      wide,
    ).astype(dtype)
    after = chunk.gamma[..., None] * state_bhkv
    for write_bhck in _parts(chunk.write, dtype):
      after += _dot('bhck,bhcv->bhkv', write_bhck, update_bhcv, wide)
    return after, (state_bhkv, error_bhcv, update_bhcv)

  return lax.scan(step, state_bhkv, scan)


def _state_gradients(scan: Scan, d_update_nbhcv, d_read_nbhkv, d_state_bhkv):
  """Gradient before the group; per chunk the one after it, and dR."""
  wide, dtype = d_state_bhkv.dtype, scan.erase.dtype

  def step(d_state_bhkv, chunk):
    scan, d_update_bhcv, d_read_bhkv = chunk
    d_update_bhcv += _dot(
      'bhck,bhkv->bhcv',
      scan.write.astype(dtype),
      d_state_bhkv.astype(dtype),
      wide,
    )
    d_r_bhcv = _dot(
      'bhcs,bhcv->bhsv', scan.inverse, d_update_bhcv.astype(dtype), wide
    )
    d_v_bhcv = (scan.beta[..., None] * d_r_bhcv).astype(dtype)
    d_before = (
      scan.gamma[..., None] * d_state_bhkv
      + d_read_bhkv
      - _dot('bhck,bhcv->bhkv', scan.erase, d_v_bhcv, wide)
    )
    return d_before, (d_state_bhkv, d_r_bhcv)

  xs = (scan, d_update_nbhcv, d_read_nbhkv)
  return lax.scan(step, d_state_bhkv, xs, reverse=True)


class Prepared(NamedTuple):
  """Everything of a group that does not depend on the state."""

  tiles: Tiles
  masks: Masks | None
  attend_nbhcs: jax.Array
  alike_nbhcs: jax.Array
  scan: Scan


def _activate(arrays, parameters, valid, settings) -> kda_inputs.Activated:
  raw = kda_inputs.Raw(*arrays, *parameters)
  x = kda_inputs.activate(raw, valid, settings)
  return jax.tree.map(lambda a: _chunks(a, settings.chunk_size), x)


def _prepare(x, group: Group, inverse, settings) -> Prepared:
  dtype = group.arrays[0].dtype
  masks = _masks(group, settings.chunk_size)
  tiles = _tiles(x, masks, dtype, settings.lower_bound)
  attend, alike = _scores(tiles, masks)
  if inverse is None:
    inverse = _inverse(alike, x.beta, dtype)
  scan = _scan_operands(x, tiles, inverse, dtype)
  return Prepared(tiles, masks, attend, alike, scan)


def _forward_group(state_bhkv, group: Group, parameters, settings):
  """State after the group, its output [B, L, H, V], and its inverses."""
  x = _activate(group.arrays, parameters, group.valid, settings)
  p = _prepare(x, group, None, settings)
  after, (states_nbhkv, _, update_nbhsv) = _states(p.scan, state_bhkv)
  wide, dtype = state_bhkv.dtype, update_nbhsv.dtype
  read_nbhck = (x.q * p.tiles.head_nbhck).astype(dtype)
  states_nbhkv = states_nbhkv.astype(dtype)
  attend_nbhcs = p.attend_nbhcs.astype(dtype)
  out = _dot('nbhck,nbhkv->nbhcv', read_nbhck, states_nbhkv, wide)
  out += _dot('nbhcs,nbhsv->nbhcv', attend_nbhcs, update_nbhsv, wide)
  out = _tokens(settings.scale * out)
  if group.valid is not None:
    out = jnp.where(group.valid[..., None, None], out, 0)
  return after, out.astype(group.arrays[2].dtype), p.scan.inverse


def _backward_group(d_state_bhkv, group: Group, kept, call):
  """Gradients of the state before the group, its arrays and parameters."""
  parameters, settings = call
  entering_bhkv, inverse, d_out = kept
  wide, dtype = d_state_bhkv.dtype, group.arrays[0].dtype
  x, pull = jax.vjp(
    lambda arrays, weights: _activate(arrays, weights, group.valid, settings),
    group.arrays,
    parameters,
  )
  p = _prepare(x, group, inverse, settings)
  _, (states_nbhkv, error_nbhcv, update_nbhcv) = _states(p.scan, entering_bhkv)
  if group.valid is not None:
    d_out = jnp.where(group.valid[..., None, None], d_out, 0)
  d_out_nbhcv = settings.scale * _chunks(d_out.astype(wide), x.q.shape[3])
  low_out_nbhcv = d_out_nbhcv.astype(dtype)
  attend_nbhcs = p.attend_nbhcs.astype(dtype)
  read_nbhck = (x.q * p.tiles.head_nbhck).astype(dtype)
  d_before, (d_after_nbhkv, d_r_nbhcv) = _state_gradients(
    p.scan,
    _dot('nbhcs,nbhcv->nbhsv', attend_nbhcs, low_out_nbhcv, wide),
    _dot('nbhck,nbhcv->nbhkv', read_nbhck, low_out_nbhcv, wide),
    d_state_bhkv,
  )
  d_v_nbhcv = x.beta[..., None] * d_r_nbhcv
  d_a, d_weights_nbhzwxs = _pair_gradients(
    p, x.beta, (low_out_nbhcv, d_r_nbhcv.astype(dtype), update_nbhcv)
  )
  d_beta = (d_r_nbhcv * error_nbhcv).sum(-1) + (d_a * p.alike_nbhcs).sum(-1)
  states, low_v = states_nbhkv.astype(dtype), d_v_nbhcv.astype(dtype)
  d_read = _dot('nbhcv,nbhkv->nbhck', low_out_nbhcv, states, wide)
  d_erase = -_dot('nbhcv,nbhkv->nbhck', low_v, states, wide)
  d_write = _dot(
    'nbhcv,nbhkv->nbhck', update_nbhcv, d_after_nbhkv.astype(dtype), wide
  )
  through_nbhk = p.tiles.gamma_nbhk * (states_nbhkv * d_after_nbhkv).sum(-1)
  own_nbhc = (d_out_nbhcv * update_nbhcv.astype(wide)).sum(-1)
  d_q, d_k, d_decay = _operand_gradients(
    p, x, d_weights_nbhzwxs, (d_read, d_erase, d_write, own_nbhc, through_nbhk)
  )
  d_x = kda_inputs.Activated(d_q, d_k, d_v_nbhcv, d_decay, d_beta)
  return d_before, *pull(d_x)


def _pair_gradients(p: Prepared, beta_nbhc, operands):
  """dA, and (dP, dM) as rounded weights of the decayed operands.

  The diagonal of dP is left out: its decay is 1 whatever the gate, so it would
  only add rounding to the gate's gradient.
  """
  d_out_nbhcv, d_r_nbhcv, update_nbhsv = operands
  wide = beta_nbhc.dtype
  chunk = beta_nbhc.shape[-1]
  strict = _tril(chunk, p.masks, strict=True)
  dot = lambda x_nbhcv: _dot('nbhcv,nbhsv->nbhcs', x_nbhcv, update_nbhsv, wide)
  d_p = jnp.where(strict, dot(d_out_nbhcv), 0)
  d_a = jnp.where(strict, -dot(d_r_nbhcv), 0)
  sub = lambda a: a.reshape(*a.shape[:3], -1, _SUB, chunk)
  d_weights = jnp.stack([sub(d_p), sub(beta_nbhc[..., None] * d_a)], -3)
  return d_a, d_weights.astype(d_out_nbhcv.dtype)


def _operand_gradients(p: Prepared, x, d_weights_nbhzwxs, states):
  """Gradients of q, k and the log decay.

  The gate's gradient at a token sums pairs on both sides of it. Pairs that
  lie wholly after it cancel between their row and their column, and do so to
  accumulation accuracy only because both are built from the same rounded
  operands and weights.
  """
  d_read, d_erase, d_write, own_nbhc, through_nbhk = states
  t, wide = p.tiles, x.q.dtype
  rows_nbhzwxk = _dot(
    'nbhzwxs,nbhzsk->nbhzwxk', d_weights_nbhzwxs, t.right_nbhzsk, wide
  )
  columns_nbhzsk = _dot(
    'nbhzwxs,nbhzwxk->nbhzsk', d_weights_nbhzwxs, t.left_nbhzwxk, wide
  )
  flat = lambda a_nbhzxk: a_nbhzxk.reshape(x.q.shape)
  own_nbhc1 = own_nbhc[..., None]
  d_q = (
    flat(t.left_scale_nbhzxk * rows_nbhzwxk[..., 0, :, :])
    + t.head_nbhck * d_read
    + own_nbhc1 * x.k
  )
  written = t.tail_nbhck * d_write
  d_k = (
    flat(t.left_scale_nbhzxk * rows_nbhzwxk[..., 1, :, :])
    + _sum_of_products(t.right_scale_nbhzsk, columns_nbhzsk, 3)
    + t.head_nbhck * d_erase
    + written
    + own_nbhc1 * x.q
  )
  d_sum_nbhsk = (
    flat(_sum_of_products(t.left_nbhzwxk.astype(wide), rows_nbhzwxk, 4))
    - _sum_of_products(t.right_nbhzsk.astype(wide), columns_nbhzsk, 3)
    + t.head_nbhck * (x.q * d_read + x.k * d_erase)
  )
  return d_q, d_k, _gate_sums(p, d_sum_nbhsk, x.k * written, through_nbhk)


def _sum_of_products(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
  """(a * b).sum(axis) of a short axis, without storing the product."""
  pick = lambda x, i: lax.index_in_dim(x, i, axis, keepdims=False)
  terms = (pick(a, i) * pick(b, i) for i in range(a.shape[axis]))
  return functools.reduce(jnp.add, terms)


def _gate_sums(p: Prepared, d_sum_nbhsk, written_nbhsk, through_nbhk):
  """Reverse sums of dG, and exclusive prefix sums of what reaches the end."""
  wide, chunk = d_sum_nbhsk.dtype, d_sum_nbhsk.shape[3]
  before_cs = _tril(chunk, None, strict=True).astype(wide)
  d_decay = _dot('cs,nbhsk->nbhck', before_cs, written_nbhsk, wide)
  d_decay += through_nbhk[..., None, :]
  if p.masks is None:
    after_cs = _tril(chunk, None, strict=False).T.astype(wide)
    return d_decay + _dot('cs,nbhsk->nbhck', after_cs, d_sum_nbhsk, wide)
  after_nbcs = _tril(chunk, p.masks, strict=False)[:, :, 0].mT.astype(wide)
  return d_decay + _dot('nbcs,nbhsk->nbhck', after_nbcs, d_sum_nbhsk, wide)


def chunked(
  raw: kda_inputs.Raw, initial_state, segment_ids, settings
) -> tuple[jax.Array, jax.Array]:
  """Output [B, T, HV, V] and final state [B, HV, K, V]; see `kda`."""
  plan = _plan(raw.v, settings.chunk_size)
  call = (settings._replace(chunk_size=plan.chunk), plan)
  # Parameter gradients add up over groups in the wide dtype.
  wide = kda_inputs.wide(raw.q.dtype)
  parameters = jax.tree.map(lambda p: p.astype(wide), raw[5:])
  raw = kda_inputs.Raw(*raw[:5], *parameters)
  return _chunked(call, raw, initial_state, segment_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(call, raw, initial_state, segment_ids):
  out, state, _ = _forward(call, raw, initial_state, segment_ids)
  return out, state


def _forward(call, raw, initial_state, segment_ids):
  """Output, final state, and per group the entering state and inverses."""
  settings, plan = call

  def step(state, group):
    after, out, inverse = _forward_group(state, group, raw[5:], settings)
    return after, (out, (state, inverse))

  state, (out, kept) = lax.map(
    lambda xs: lax.scan(step, *xs),
    (_sliced(initial_state, plan), _groups(raw, segment_ids, plan)),
  )
  return _ungrouped(out, raw.q.shape[1]), _unsliced(state), kept


def _chunked_forward(call, raw, initial_state, segment_ids):
  out, state, (entering, inverse) = _forward(
    call, raw, initial_state, segment_ids
  )
  save = call[0].save
  kept = (
    None if save == 'inputs' else entering,
    inverse if save == 'state_and_t' else None,
  )
  return (out, state), (raw, initial_state, segment_ids, kept)


def _chunked_backward(call, residuals, cotangents):
  settings, plan = call
  raw, initial_state, segment_ids, (entering, inverse) = residuals
  d_out, d_state = cotangents
  if entering is None:
    _, _, (entering, _) = _forward(call, raw, initial_state, segment_ids)

  def step(carry, xs):
    d_state, d_parameters = carry
    group, kept = xs
    d_state, d_arrays, d_group = _backward_group(
      d_state, group, kept, (raw[5:], settings)
    )
    d_parameters = jax.tree.map(jnp.add, d_parameters, d_group)
    return (d_state, d_parameters), d_arrays

  zeros = jax.tree.map(jnp.zeros_like, raw[5:])
  groups = _groups(raw, segment_ids, plan)
  kept = (entering, inverse, _grouped(d_out, plan))
  (d_state, d_parameters), d_arrays = lax.map(
    lambda xs: lax.scan(step, (xs[0], zeros), xs[1:], reverse=True),
    (_sliced(d_state, plan), groups, kept),
  )
  length = raw.q.shape[1]
  d_arrays = [_ungrouped(x, length) for x in d_arrays]
  d_parameters = jax.tree.map(lambda d: d.sum(0), d_parameters)
  return kda_inputs.Raw(*d_arrays, *d_parameters), _unsliced(d_state), None


_chunked.defvjp(_chunked_forward, _chunked_backward)
