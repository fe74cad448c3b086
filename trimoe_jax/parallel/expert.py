"""Expert parallelism: experts travel to the tokens, or tokens to the experts.

Every function here runs inside a `shard_map` in which a device holds its own
tokens and its own experts, E / R of them for R ranks of the mesh axis. Tokens
are routed before, on the device they live on, so that neither the router nor
its statistics depend on the strategy:

- 'replicated' gathers the experts and leaves the tokens where they are.
- 'ring' gathers the tokens, runs the local experts on all of them and returns
  partial sums by a reduce-scatter: (R - 1) T rows received each way.
- 'all_to_all' sends every token-expert copy to the rank of its expert and back:
  T J (R - 1) / R rows each way, so less than 'ring' once R exceeds J.

Devices that hold the same tokens (those along a tensor axis) share them: each
takes its part through its experts and all gather the sums.

What travels has the latent's width. Whatever the router does must fit, so
'ring' holds R T J rows and 'all_to_all' R T min(J, E / R); only a capacity, and
the drops it brings, take that down to about T J. Only copies that exist travel
where the backend has `jax.lax.ragged_all_to_all`; CPUs lack it and exchange the
buffers with their padding.

Suffixes: t tokens, j top-k slot, l latent width, e experts, g rows of one
device's copies, c places in the buffers that all ranks exchange.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch as implementations
from pallas_kernels.grouped_matmul import combine, dispatch, sort_rows
from trimoe_jax.config import Dispatch

# Up to as many ranks 'ring' moves no more than 'all_to_all' at K3's top 16.
MAX_RING = 16


class Routes(NamedTuple):
  """Where one device's tokens go.

  Attributes:
    indices: int32 [T, J] experts of the whole layer, distinct in a token.
    weights: float32 [T, J].
    mask: bool [T], False for padding, which no expert sees.
  """

  indices: jax.Array
  weights: jax.Array
  mask: jax.Array


# (expert weights [E, ...], rows z_gl, group sizes [E]) -> y_gl; rows past the
# groups must give zero.
RunRows = Callable[[Any, jax.Array, jax.Array], jax.Array]


def choose(strategy: Dispatch, ranks: int) -> Dispatch:
  """The strategy that `'auto'` stands for with `ranks` expert ranks."""
  if strategy != 'auto':
    return strategy
  if ranks == 1:
    return 'replicated'
  return 'ring' if ranks <= MAX_RING else 'all_to_all'


def run_experts(
  run: RunRows,
  experts: Any,
  z_tl: jax.Array,
  routes: Routes,
  *,
  axis: str | None,
  shared: str | None = None,
  strategy: Dispatch = 'auto',
  capacity: float | None = None,
) -> tuple[jax.Array, jax.Array]:
  """The weighted sum of each token's experts, and the copies left out.

      u_t = sum_j weights_tj run(expert indices_tj, z_t)

  The sum is float32; its slots are added in order, under 'ring' in the order
  of slots within a rank and then of the reduction over ranks.

  Args:
    run: applies expert weights to rows sorted by expert.
    experts: this device's experts, a tree of [E / R, ...] in rank order.
    z_tl: [T, l] this device's tokens.
    routes: of these tokens.
    axis: the mesh axis over which experts are sharded; None where there is no
      mesh and `experts` holds all of them.
    shared: a mesh axis along which devices hold the same tokens and experts;
      they share the work where it divides the tokens. The number of dropped
      copies is of all of them.
    strategy: as above; 'auto' is 'ring' up to 16 ranks, then 'all_to_all'.
    capacity: rows that one device may send to one rank, as a multiple of the
      T J / R it sends at perfect balance ('all_to_all' only). Copies beyond
      it are dropped from the last token on, so that no output depends on a
      later token: they add nothing and have zero gradients. None has room for
      the worst case, T min(J, E / R) rows.

  Returns:
    ([T, l] in the dtype of z_tl, int32 number of dropped copies).
  """
  options = dict(axis=axis, strategy=strategy, capacity=capacity)
  parts = 1 if shared is None else jax.lax.axis_size(shared)
  if parts == 1 or z_tl.shape[0] % parts:
    return _run(run, experts, z_tl, routes, **options)
  own = functools.partial(_own, axis=shared)
  u_tl, dropped = _run(
    run, experts, *jax.tree.map(own, (z_tl, routes)), **options
  )
  return _gather(u_tl, shared), jax.lax.psum(dropped, shared)


def _own(x_t, axis):
  """This device's part of what all along `axis` hold."""
  count = x_t.shape[0] // jax.lax.axis_size(axis)
  start = count * jax.lax.axis_index(axis)
  return jax.lax.dynamic_slice_in_dim(x_t, start, count)


def _run(run, experts, z_tl, routes, *, axis, strategy, capacity):
  """`run_experts` of tokens that no other device has."""
  none = jnp.zeros((), jnp.int32)
  if axis is None:
    return _run_sorted(run, experts, z_tl, routes), none
  strategy = choose(strategy, jax.lax.axis_size(axis))
  if strategy == 'replicated':
    experts = jax.tree.map(lambda w: _gather(w, axis), experts)
    return _run_sorted(run, experts, z_tl, routes), none
  if strategy == 'ring':
    return _ring(run, experts, z_tl, routes, axis=axis), none
  if strategy == 'all_to_all':
    return _all_to_all(run, experts, z_tl, routes, axis=axis, capacity=capacity)
  raise ValueError(
    f"strategy={strategy!r}; choose 'auto', 'replicated', 'ring' or "
    "'all_to_all'."
  )


def _count(experts: Any) -> int:
  return jax.tree.leaves(experts)[0].shape[0]


def _gather(x: jax.Array, axis: str) -> jax.Array:
  return jax.lax.all_gather(x, axis, tiled=True)


def _run_sorted(run, experts, z_tl, routes):
  """The experts at hand on the tokens at hand."""
  rows = sort_rows(routes.indices, _count(experts), routes.mask)
  y_gl = run(experts, dispatch(z_tl, rows), rows.group_sizes)
  return combine(y_gl, routes.weights, rows)


def _ring(run, experts, z_tl, routes, *, axis):
  """Local experts on the tokens of all ranks."""
  count = _count(experts)
  indices_tj = jnp.where(routes.mask[:, None], routes.indices, -1)
  travel = z_tl, indices_tj, routes.weights
  z_tl, indices_tj, weights_tj = (_gather(x, axis) for x in travel)
  # Padding and experts of other ranks fall outside [0, count): no row for them.
  rows = sort_rows(indices_tj - count * jax.lax.axis_index(axis), count)
  y_gl = run(experts, dispatch(z_tl, rows), rows.group_sizes)
  return _combine_scatter(y_gl, weights_tj, rows, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _combine_scatter(y_gl, weights_tj, rows, axis):
  """`combine` over the experts of all ranks, for the tokens of this one.

  Partial sums travel in float32, so that the result is rounded once. Their
  cotangent is known in the narrow dtype and travels in it.
  """
  wide = jnp.promote_types(y_gl.dtype, jnp.float32)
  partial_tl = combine(y_gl.astype(wide), weights_tj, rows)
  u_tl = jax.lax.psum_scatter(partial_tl, axis, tiled=True)
  return u_tl.astype(y_gl.dtype)


def _combine_scatter_forward(y_gl, weights_tj, rows, axis):
  saved = y_gl, weights_tj, rows
  return _combine_scatter(y_gl, weights_tj, rows, axis), saved


def _combine_scatter_backward(axis, saved, du_tl):
  y_gl, weights_tj, rows = saved
  _, pull = jax.vjp(lambda y, w: combine(y, w, rows), y_gl, weights_tj)
  return *pull(_gather(du_tl, axis)), None


_combine_scatter.defvjp(_combine_scatter_forward, _combine_scatter_backward)


def _all_to_all(run, experts, z_tl, routes, *, axis, capacity):
  """Copies to the ranks of their experts and back."""
  count, ranks = _count(experts), jax.lax.axis_size(axis)
  known_tj = (routes.indices >= 0) & (routes.indices < count * ranks)
  rank_tj = jnp.where(known_tj, routes.indices // count, ranks)
  # The sort is stable: rows for one rank lie in the order of tokens and slots.
  rows = sort_rows(rank_tj, ranks, routes.mask)
  room = _room(*routes.indices.shape, count, ranks, capacity)
  travel = _ragged if _has_ragged() else _padded
  send, send_back = travel(rows.group_sizes, rank_tj.size, room, axis)
  expert_g = (routes.indices % count).reshape(-1)[rows.order]
  # Places that hold no copy name an expert that does not exist.
  expert_c = send(expert_g, count)
  z_cl = send(dispatch(z_tl, rows), 0)

  arrived = sort_rows(expert_c[:, None], count)
  there, back = arrived.order, arrived.inverse[:, 0]
  y_cl = run(experts, _move(z_cl, there, back), arrived.group_sizes)
  y_gl = send_back(_move(y_cl, back, there))
  dropped = jnp.maximum(rows.group_sizes - room, 0)
  return (
    combine(y_gl, routes.weights, rows),
    jnp.sum(dropped, dtype=jnp.int32),
  )


def _has_ragged() -> bool:
  reason = None
  if implementations.device_kind() == 'cpu':
    reason = 'jax.lax.ragged_all_to_all has no CPU backend'
  choices = (('ragged', reason), ('padded', None))
  return implementations.choose('all_to_all', None, choices) == 'ragged'


def _padded(sizes_r, rows: int, room: int, axis: str):
  """(there, back) by buffers of equal length, padding included."""
  layout = _layout(sizes_r, rows, room)
  exchange = functools.partial(
    jax.lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0, tiled=True
  )

  def send(x, fill):
    if x.ndim == 1:
      return exchange(_take(x, layout.row, fill))
    return exchange(_move(x, layout.row, layout.place))

  return send, lambda y: _move(exchange(y), layout.place, layout.row)


class _Slices(NamedTuple):
  """Rows that this rank exchanges with each, as `ragged_all_to_all` reads it.

  Attributes:
    start, sent: own rows for each rank.
    landing: where they lie in the array of each rank.
    received: rows from each rank.
  """

  start: jax.Array
  sent: jax.Array
  landing: jax.Array
  received: jax.Array


def _ragged(sizes_r, rows: int, room: int, axis: str):
  """(there, back) of nothing but copies, one rank's behind another's."""
  ranks = sizes_r.shape[0]
  kept_r = jnp.minimum(sizes_r, room)
  start_r = jnp.cumsum(sizes_r) - sizes_r
  # Of every source (rows) and destination (columns).
  kept_rr, start_rr = (_gather(x[None], axis) for x in (kept_r, start_r))
  landing_rr = jnp.cumsum(kept_rr, axis=0) - kept_rr
  me = jax.lax.axis_index(axis)
  arrived = kept_rr[:, me]
  there = _Slices(start_r, kept_r, landing_rr[me], arrived)
  back = _Slices(landing_rr[:, me], arrived, start_rr[:, me], kept_r)
  return (
    lambda x, fill: _travel(axis, (ranks * room, fill), x, (there, back)),
    lambda y: _travel(axis, (rows, 0), y, (back, there)),
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _travel(axis, target, x, ways):
  """x by the slices `ways[0]`, into `target`: rows and what fills the others.

  `ways[1]` is the inverse, by which the gradient travels.
  """
  length, fill = target
  out = jnp.full((length, *x.shape[1:]), fill, x.dtype)
  return jax.lax.ragged_all_to_all(x, out, *ways[0], axis_name=axis)


def _travel_forward(axis, target, x, ways):
  return _travel(axis, target, x, ways), (ways, x.shape[0])


def _travel_backward(axis, target, saved, dout):
  ways, length = saved
  return _travel(axis, (length, 0), dout, ways[::-1]), None


_travel.defvjp(_travel_forward, _travel_backward)


def _room(tokens, slots, count, ranks, capacity):
  """Rows of the buffer from one device to one rank."""
  worst = tokens * min(slots, count)
  if capacity is None:
    return worst
  return min(worst, math.ceil(capacity * tokens * slots / ranks))


class _Layout(NamedTuple):
  """Rows sorted by rank and their places in the buffers of all ranks."""

  row: jax.Array  # of each place, past the last row where it is empty
  place: jax.Array  # of each row, past the last place where it is dropped


def _layout(sizes_r, rows: int, room: int) -> _Layout:
  """The first `room` rows of each rank get a place, in order."""
  ranks = sizes_r.shape[0]
  end_r = jnp.cumsum(sizes_r)
  start_r, kept_r = end_r - sizes_r, jnp.minimum(sizes_r, room)
  place_c = jnp.arange(ranks * room, dtype=jnp.int32)
  rank_c, within_c = place_c // room, place_c % room
  row_c = start_r[rank_c] + within_c
  row_c = jnp.where(within_c < kept_r[rank_c], row_c, rows)
  row_g = jnp.arange(rows, dtype=jnp.int32)
  # Rows behind all groups belong to a rank that does not exist.
  rank_g = jnp.searchsorted(end_r, row_g, side='right').astype(jnp.int32)
  within_g = row_g - start_r[jnp.minimum(rank_g, ranks - 1)]
  sent_g = (rank_g < ranks) & (within_g < room)
  place_g = jnp.where(sent_g, rank_g * room + within_g, ranks * room)
  return _Layout(row_c, place_g)


@jax.custom_vjp
def _move(x, there, back):
  """x[there], zero where `there` points past the end; `back` is its inverse.

  Every row moves to one place at most, so the gradient is a gather too.
  """
  return _take(x, there, 0)


def _move_forward(x, there, back):
  return _move(x, there, back), back


def _move_backward(back, dmoved):
  return _take(dmoved, back, 0), None, None


_move.defvjp(_move_forward, _move_backward)


def _take(x, index, fill):
  return x.at[index].get(mode='fill', fill_value=fill)
