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
RSTD, LOGITS, WEIGHTS = range(3)  # places in the saved lanes
_UNROLL = 14  # most registers of a row between two tests of a loop


class Plan(NamedTuple):
  """Static choices.

  Attributes:
    finished, count: sources in the first array, and with the partial sum.
    tokens, width: of the sources.
    eps: added to the mean square of a key.
    block: tokens of a grid step.
    masked: whether sources may be masked.
  """

  finished: int
  count: int
  tokens: int
  width: int
  eps: float
  block: int
  masked: bool

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


def forward(plan: Plan, live_ref, *refs):
  """out [block, D] and saved scalars [block, LANES] of a block of tokens."""
  sources, (w_ref, out_ref, stats_ref) = refs[: plan.count], refs[plan.count :]
  live = live_ref if plan.masked else None

  def mix(rows):
    def score(at, carry):
      w_1d = w_ref[:, at]
      next_carry = []
      for m, (square, product) in enumerate(carry):
        x_d = sources[m][rows, at].astype(jnp.float32)
        next_carry.append((square + x_d * x_d, product + x_d * w_1d))
      return next_carry

    zeros = jnp.zeros((ROWS, LANES), jnp.float32)
    sums = _over_channels(plan, score, [(zeros, zeros)] * plan.count)
    square, product = (_in_lanes(x) for x in zip(*sums))
    own = _live_lanes(plan, live_ref, square)
    rstd = lax.rsqrt(square / plan.width + plan.eps)
    logits = jnp.where(own, product * rstd, -jnp.inf)
    top = jnp.max(logits, axis=1, keepdims=True)
    term = jnp.where(own, jnp.exp(logits - top), 0.0)
    total = jnp.sum(term, axis=1, keepdims=True)
    weights = term / jnp.where(total > 0, total, 1.0)
    saved = (jnp.where(own, rstd, 0.0), jnp.where(own, logits, 0.0), weights)
    stats_ref[rows, :] = _side_by_side(saved)
    shares = [weights[:, m : m + 1] for m in range(plan.count)]
    shares = [jnp.broadcast_to(p, (ROWS, LANES)) for p in shares]

    def add(at, _):
      out_d = shares[0] * _read(sources, 0, (rows, at), live)
      for m in range(1, plan.count):
        out_d += shares[m] * _read(sources, m, (rows, at), live)
      out_ref[rows, at] = out_d.astype(out_ref.dtype)

    _over_channels(plan, add, None)

  _over_rows(plan, mix)


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


def backward(plan: Plan, live_ref, *refs):
  """Gradients of a block's sources, and this core's share of that of w."""
  sources, refs = refs[: plan.count], refs[plan.count :]
  w_ref, do_ref, stats_ref, d_weights_ref, d_w_ref, *d_refs = refs
  d_rows = [d_refs[0].at[m] for m in range(plan.finished)] + d_refs[1:]
  live = live_ref if plan.masked else None
  step = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)

  @pl.when(pl.program_id(1) == 0)
  def _():
    d_w_ref[...] = jnp.zeros_like(d_w_ref)

  def gradients(rows):
    def products(at, carry):
      do_d = do_ref[rows, at].astype(jnp.float32)
      return [
        total + do_d * sources[m][rows, at].astype(jnp.float32)
        for m, total in enumerate(carry)
      ]

    zeros = jnp.zeros((ROWS, LANES), jnp.float32)
    sums = _over_channels(plan, products, [zeros] * plan.count)
    product = _in_lanes(sums)
    own = _live_lanes(plan, live_ref, product)
    stats = stats_ref[rows, :]
    rstd, logits, weights = (_part(stats, i) for i in range(3))
    weights = jnp.where(own, weights, 0.0)
    dp = jnp.where(own, product + d_weights_ref[rows, :], 0.0)
    mean = jnp.sum(weights * dp, axis=1, keepdims=True)
    slope = jnp.where(own, weights * (dp - mean) * rstd, 0.0)
    pull = jnp.where(own, slope * rstd * logits / plan.width, 0.0)
    inside = None
    if plan.ragged:
      token = lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 0)
      inside = token + step * plan.block + rows.start < plan.tokens
    wide = lambda x, m: jnp.broadcast_to(x[:, m : m + 1], (ROWS, LANES))
    scalars = [
      [wide(x, m) for x in (weights, slope, pull)] for m in range(plan.count)
    ]

    def through(at, _):
      do_d = do_ref[rows, at].astype(jnp.float32)
      w_1d = w_ref[:, at]
      dw_d = jnp.zeros((ROWS, LANES), jnp.float32)
      for m, (p, s, minus) in enumerate(scalars):
        x_d = _read(sources, m, (rows, at), live)
        dx_d = p * do_d + (s * w_1d - minus * x_d)
        d_rows[m][rows, at] = dx_d.astype(d_refs[0].dtype)
        dw_d += s * x_d
      if inside is not None:
        dw_d = jnp.where(inside, dw_d, 0.0)
      d_w_ref[:, at] += dw_d[:SUBLANES] + dw_d[SUBLANES:]

    _over_channels(plan, through, None)

  _over_rows(plan, gradients)
