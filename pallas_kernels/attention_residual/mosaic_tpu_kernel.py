"""The depth mix of a block of tokens in VMEM, on TPUs.

Tokens lie on sublanes, channels on lanes, and `ROWS` tokens at a time are gone
over twice: scores and then the sum, or the products with the cotangent and then
the gradients. Lane m of a register of scalars is the m-th source's. Sums over
channels are first added lane by lane, in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES, SUBLANES = 128, 8
ROWS = 16  # of a bfloat16 register
MOST_SOURCES = 32
WEIGHTS = 2  # place in the saved lanes, after rstd and logits
_UNROLL = 14  # most registers of a row between two tests of a loop


class Plan(NamedTuple):
  """Static choices.

  Attributes:
    finished, count: sources in the first array, and with the partial sum.
    tokens, width: of the sources.
    eps: added to the mean square of a key.
    block: tokens of a grid step.
    masked: whether sources may be masked.
    normalized: whether the mixture is normalized.
  """

  finished: int
  count: int
  tokens: int
  width: int
  eps: float
  block: int
  masked: bool
  normalized: bool

  @property
  def ragged(self) -> bool:
    """Whether the last grid step has rows beyond the tokens."""
    return self.tokens % self.block > 0


def _lane(x) -> jax.Array:
  return lax.broadcasted_iota(jnp.int32, x.shape, 1)


def _over_channels(plan: Plan, body, start):
  """`carry = body(channels, carry)` for one register of lanes after another."""
  registers = plan.width // LANES
  fits = (n for n in range(_UNROLL, 0, -1) if registers % n == 0)
  together = next(fits)

  def step(i, carry):
    first = pl.multiple_of(i * (together * LANES), LANES)
    for k in range(together):
      carry = body(pl.ds(first + k * LANES, LANES), carry)
    return carry

  return lax.fori_loop(0, registers // together, step, start)


def _over_rows(plan: Plan, body):
  """`body(rows)` for `ROWS` tokens of the block after another."""

  @pl.loop(0, plan.block // ROWS)
  def _(i):
    body(pl.ds(pl.multiple_of(i * ROWS, ROWS), ROWS))


def _read(refs, m: int, at, live) -> jax.Array:
  """Rows of a source, float32; zeros if it is masked and `live` is given."""
  x = refs[m][at]
  if live is not None:
    x = jnp.where(live[m] > 0, x, jnp.zeros_like(x))
  return x.astype(jnp.float32)


def _in_lanes(columns) -> jax.Array:
  """[ROWS, LANES]: the sum of the m-th [ROWS, LANES] in lane m."""
  result = jnp.zeros_like(columns[0])
  lane = _lane(result)
  for m, x in enumerate(columns):
    total = jnp.sum(x, axis=1, keepdims=True)
    result = jnp.where(lane == m, total, result)
  return result


def _live_lanes(plan: Plan, live_ref, like) -> jax.Array:
  """Which lanes belong to a source that is not masked."""
  lane = _lane(like)
  if not plan.masked:
    return lane < plan.count
  flags = jnp.zeros(like.shape, jnp.int32)
  for m in range(plan.count):
    flags = jnp.where(lane == m, live_ref[m], flags)
  return flags > 0


def _shares(plan: Plan, weights) -> list[jax.Array]:
  """Each source's lane of a register of scalars, in all lanes."""
  return [
    jnp.broadcast_to(weights[:, m : m + 1], (ROWS, LANES))
    for m in range(plan.count)
  ]


def _mixture(plan: Plan, sources, at, shares, live) -> jax.Array:
  """The weighted sum of the raw rows, float32."""
  out_d = shares[0] * _read(sources, 0, at, live)
  for m in range(1, plan.count):
    out_d += shares[m] * _read(sources, m, at, live)
  return out_d


def _scores(plan: Plan, live_ref, sums):
  """(rstd, logits, weights) with the m-th source's in lane m."""
  square, product = (_in_lanes(x) for x in zip(*sums))
  own = _live_lanes(plan, live_ref, square)
  rstd = lax.rsqrt(square / plan.width + plan.eps)
  logits = jnp.where(own, product * rstd, -jnp.inf)
  top = jnp.max(logits, axis=1, keepdims=True)
  term = jnp.where(own, jnp.exp(logits - top), 0.0)
  total = jnp.sum(term, axis=1, keepdims=True)
  weights = term / jnp.where(total > 0, total, 1.0)
  return jnp.where(own, rstd, 0.0), jnp.where(own, logits, 0.0), weights


def forward(plan: Plan, live_ref, *refs):
  """out [block, D] and saved scalars [block, LANES] of a block of tokens."""
  sources, refs = refs[: plan.count], refs[plan.count :]
  w_ref, *norm_ref, out_ref, stats_ref = refs
  live = live_ref if plan.masked else None
  zeros = jnp.zeros((ROWS, LANES), jnp.float32)

  def mix(rows):
    def score(at, carry):
      w_1d = w_ref[:, at]
      next_carry = []
      for m, (square, product) in enumerate(carry):
        x_d = sources[m][rows, at].astype(jnp.float32)
        next_carry.append((square + x_d * x_d, product + x_d * w_1d))
      return next_carry

    sums = _over_channels(plan, score, [(zeros, zeros)] * plan.count)
    saved = _scores(plan, live_ref, sums)
    shares = _shares(plan, saved[WEIGHTS])

    def add(at, square):
      out_d = _mixture(plan, sources, (rows, at), shares, live)
      out_d = out_d.astype(out_ref.dtype)
      out_ref[rows, at] = out_d
      if not plan.normalized:
        return square
      return square + jnp.square(out_d.astype(jnp.float32))

    square = _over_channels(plan, add, zeros)
    if plan.normalized:
      scale = _normalize(plan, (out_ref, norm_ref[0]), rows, square)
      saved = (*saved, scale)
    stats_ref[rows, :] = _side_by_side(saved)

  _over_rows(plan, mix)


def _normalize(plan: Plan, refs, rows, square) -> jax.Array:
  """Normalizes rows of the output in place and returns their scale."""
  out_ref, norm_ref = refs
  mean = jnp.sum(square, axis=1, keepdims=True) / plan.width
  scale = jnp.broadcast_to(lax.rsqrt(mean + plan.eps), (ROWS, LANES))

  def apply(at, _):
    n_d = (out_ref[rows, at].astype(jnp.float32) * scale).astype(out_ref.dtype)
    out_d = n_d.astype(jnp.float32) * norm_ref[:, at]
    out_ref[rows, at] = out_d.astype(out_ref.dtype)

  _over_channels(plan, apply, None)
  return scale


def _side_by_side(parts) -> jax.Array:
  """The first lanes of each part, one part after another."""
  result, lane = parts[0], _lane(parts[0])
  for i, x in enumerate(parts[1:], 1):
    moved = pltpu.roll(x, i * MOST_SOURCES, 1)
    result = jnp.where(lane >= i * MOST_SOURCES, moved, result)
  return result


def _part(stats, i: int) -> jax.Array:
  """Lanes of the i-th part of what `_side_by_side` made, from lane 0 on."""
  return (
    pltpu.roll(stats, (LANES - i * MOST_SOURCES) % LANES, 1) if i else stats
  )


class Gradient(NamedTuple):
  """References of the backward pass, in the order of the kernel's."""

  sources: list
  w: jax.Array
  norm_gain: jax.Array | None
  do: jax.Array
  stats: jax.Array
  d_weights: jax.Array
  d_w: jax.Array
  d_norm_gain: jax.Array | None
  d_rows: list  # of each source
  kept: list  # two [ROWS, D] float32, if the mixture is normalized


def gradient_refs(plan: Plan, refs) -> Gradient:
  """The references of the backward kernel by name."""
  refs = list(refs)
  take = lambda: refs.pop(0)
  sources = [take() for _ in range(plan.count)]
  w = take()
  norm_gain = take() if plan.normalized else None
  do, stats, d_weights, d_w = take(), take(), take(), take()
  d_norm_gain = take() if plan.normalized else None
  d_sources = take()
  d_rows = [d_sources.at[m] for m in range(plan.finished)]
  if plan.count > plan.finished:
    d_rows.append(take())
  return Gradient(
    sources, w, norm_gain, do, stats, d_weights, d_w, d_norm_gain, d_rows, refs
  )


def _inside(plan: Plan, first, rows) -> jax.Array | None:
  """Which rows are tokens; None if all are.

  Args:
    first: token of the block.
    rows: of the block.
  """
  if not plan.ragged:
    return None
  token = lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 0)
  return token + first + rows.start < plan.tokens


def _add_rows(ref, at, x, inside):
  """Adds rows of float32, those that are tokens, to the sums of sublanes."""
  if inside is not None:
    x = jnp.where(inside, x, 0.0)
  ref[:, at] += x[:SUBLANES] + x[SUBLANES:]


def _slopes(plan: Plan, live_ref, saved, sums):
  """(weights, slope, pull) with the m-th source's in lane m."""
  stats, d_weights = saved
  product = _in_lanes(sums)
  own = _live_lanes(plan, live_ref, product)
  rstd, logits, weights = (_part(stats, i) for i in range(3))
  weights = jnp.where(own, weights, 0.0)
  dp = jnp.where(own, product + d_weights, 0.0)
  mean = jnp.sum(weights * dp, axis=1, keepdims=True)
  slope = jnp.where(own, weights * (dp - mean) * rstd, 0.0)
  pull = jnp.where(own, slope * rstd * logits / plan.width, 0.0)
  return weights, slope, pull


def _through_norm(plan: Plan, g: Gradient, live_ref, rows, inside):
  """Leaves the gradient of the mixture in `g.kept[0]`; see `mosaic_gpu`."""
  kept, mixture = g.kept
  live = live_ref if plan.masked else None
  stats = g.stats[rows, :]
  own = _live_lanes(plan, live_ref, stats)
  shares = _shares(plan, jnp.where(own, _part(stats, WEIGHTS), 0.0))
  scale = jnp.broadcast_to(stats[:, LANES - 1 :], (ROWS, LANES))
  zeros = jnp.zeros((ROWS, LANES), jnp.float32)

  def again(at, product):
    h_d = _mixture(plan, g.sources, (rows, at), shares, live)
    h_d = h_d.astype(g.do.dtype).astype(jnp.float32)
    do_d = g.do[rows, at].astype(jnp.float32)
    dn_d = do_d * g.norm_gain[:, at]
    n_d = (h_d * scale).astype(g.do.dtype).astype(jnp.float32)
    _add_rows(g.d_norm_gain, at, do_d * n_d, inside)
    kept[:, at], mixture[:, at] = dn_d, h_d
    return product + dn_d * h_d

  product = jnp.sum(_over_channels(plan, again, zeros), axis=1, keepdims=True)
  pull = scale * scale * scale * product / plan.width

  def apply(at, _):
    kept[:, at] = scale * kept[:, at] - pull * mixture[:, at]

  _over_channels(plan, apply, None)


def backward(plan: Plan, live_ref, *refs):
  """Gradients of a block's sources, and this core's share of the vectors'."""
  g = gradient_refs(plan, refs)
  live = live_ref if plan.masked else None
  step = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)

  @pl.when(pl.program_id(1) == 0)
  def _():
    g.d_w[...] = jnp.zeros_like(g.d_w)
    if plan.normalized:
      g.d_norm_gain[...] = jnp.zeros_like(g.d_norm_gain)

  def gradients(rows):
    inside = _inside(plan, step * plan.block, rows)
    if plan.normalized:
      _through_norm(plan, g, live_ref, rows, inside)
      cotangent = lambda at: g.kept[0][:, at]
    else:
      cotangent = lambda at: g.do[rows, at].astype(jnp.float32)

    def products(at, carry):
      do_d = cotangent(at)
      return [
        total + do_d * g.sources[m][rows, at].astype(jnp.float32)
        for m, total in enumerate(carry)
      ]

    zeros = jnp.zeros((ROWS, LANES), jnp.float32)
    sums = _over_channels(plan, products, [zeros] * plan.count)
    saved = g.stats[rows, :], g.d_weights[rows, :]
    scalars = _slopes(plan, live_ref, saved, sums)
    scalars = list(zip(*(_shares(plan, x) for x in scalars)))

    def through(at, _):
      do_d, w_1d, dw_d = cotangent(at), g.w[:, at], zeros
      for m, (p, s, minus) in enumerate(scalars):
        x_d = _read(g.sources, m, (rows, at), live)
        dx_d = p * do_d + (s * w_1d - minus * x_d)
        g.d_rows[m][rows, at] = dx_d.astype(g.do.dtype)
        dw_d += s * x_d
      _add_rows(g.d_w, at, dw_d, inside)

    _over_channels(plan, through, None)

  _over_rows(plan, gradients)
