"""Sequences over the 'context' mesh axis: fragments, halos, entering states.

A sequence of T tokens over P ranks is cut into 2 P fragments, and rank r holds
fragments r and 2 P - 1 - r ("zig-zag"), so that causal attention costs every
rank the same. `balance` and `restore` change between that order and the natural
one; both are two permutations of half of a rank's tokens. Everything between
them is a function of single tokens except the two mixers, which call the rest
of this file inside `sharding.local`.

KDA (K3 report, section 5; Kimi Linear, arXiv 2510.26692): the state leaving a
fragment is affine in the one that enters, S_out = M S_in + b. The pairs (M, b)
are gathered and folded by every rank; beyond `_GATHERED` ranks a scan in log2 P
permutations takes less memory. MLA: the latents are gathered, keys and values
are made from them one block at a time.

Legend: b batch, f fragment of a rank (2), p fragment of the sequence (2 P), t
time, h heads, k key width, v value width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trimoe_jax import sharding

AXIS = 'context'
FRAGMENTS = 2  # held by one rank
_GATHERED = 16  # ranks; beyond, states are found by a scan

Pair = tuple[jax.Array, jax.Array]


def is_split(length: int, reach: int = 1) -> bool:
  """Whether a sequence is cut over the context axis of the mesh in context.

  Args:
    length: tokens of the whole sequence.
    reach: tokens that a fragment must have, to lend them to the next.
  """
  ranks = sharding.axis_size(AXIS)
  pieces = FRAGMENTS * ranks
  return ranks > 1 and length % pieces == 0 and length // pieces >= reach


def balance(x: jax.Array, *names: str | None) -> jax.Array:
  """[B, T, ...] from the natural order to that of the fragments."""
  return _reorder(_balance_shard, x, names)


def restore(x: jax.Array, *names: str | None) -> jax.Array:
  """The inverse of `balance`."""
  return _reorder(_restore_shard, x, names)


def _reorder(function, x, names):
  run = sharding.local(function, inputs=(names,), outputs=names)
  return run(x)


def _balance_shard(x_bt):
  """Rank p holds fragments 2 p and 2 p + 1 and sends each to its owner."""
  ranks, rank = _place()
  even, odd = _both(x_bt)
  owner = lambda p: min(p, FRAGMENTS * ranks - 1 - p)
  even = jax.lax.ppermute(even, AXIS, [(p, owner(2 * p)) for p in range(ranks)])
  odd = jax.lax.ppermute(
    odd, AXIS, [(p, owner(2 * p + 1)) for p in range(ranks)]
  )
  # Of a rank's two fragments the even one has the parity of its first.
  return _joined(*_swapped(rank % 2 == 1, even, odd))


def _restore_shard(x_bt):
  ranks, rank = _place()
  even, odd = _swapped(rank % 2 == 1, *_both(x_bt))
  owner = lambda p: min(p, FRAGMENTS * ranks - 1 - p)
  even = jax.lax.ppermute(even, AXIS, [(owner(2 * p), p) for p in range(ranks)])
  odd = jax.lax.ppermute(
    odd, AXIS, [(owner(2 * p + 1), p) for p in range(ranks)]
  )
  return _joined(even, odd)


def _place() -> tuple[int, jax.Array]:
  return jax.lax.axis_size(AXIS), jax.lax.axis_index(AXIS)


def _both(x_bt):
  return jnp.split(x_bt, FRAGMENTS, axis=1)


def _joined(first, second):
  return jnp.concatenate([first, second], axis=1)


def _swapped(condition, first, second):
  pick = lambda a, b: jnp.where(condition, a, b)
  return pick(second, first), pick(first, second)


def places() -> jax.Array:
  """[F] int32: which of the 2 P fragments this rank holds."""
  ranks, rank = _place()
  return jnp.stack([rank, FRAGMENTS * ranks - 1 - rank]).astype(jnp.int32)


def fragments(x_bt: jax.Array) -> jax.Array:
  """A rank's tokens [B, F L, ...] as [B F, L, ...]: one row a fragment."""
  batch, time = x_bt.shape[:2]
  shape = (batch * FRAGMENTS, time // FRAGMENTS, *x_bt.shape[2:])
  return x_bt.reshape(shape)


def tokens(x_bt: jax.Array) -> jax.Array:
  """The inverse of `fragments`."""
  rows, time = x_bt.shape[:2]
  shape = (rows // FRAGMENTS, time * FRAGMENTS, *x_bt.shape[2:])
  return x_bt.reshape(shape)


def gather(x_bt: jax.Array) -> jax.Array:
  """[B, T, ...] of the whole sequence, in its natural order."""
  batch, time = x_bt.shape[:2]
  x_bf = x_bt.reshape(batch, FRAGMENTS, time // FRAGMENTS, *x_bt.shape[2:])
  x_pb = _gather_fragments(jnp.swapaxes(x_bf, 0, 1))
  x_bp = jnp.moveaxis(x_pb, 0, 1)
  return x_bp.reshape(batch, -1, *x_bt.shape[2:])


def _gather_fragments(x_f):
  """[F, ...] of every rank as [2 P, ...] in the natural order."""
  x_rf = jax.lax.all_gather(x_f, AXIS)
  return jnp.concatenate([x_rf[:, 0], x_rf[::-1, 1]])


def _own(x_p):
  """The entries [F, ...] of this rank's fragments."""
  return jnp.take(x_p, places(), axis=0)


def halo(x: jax.Array, first: jax.Array) -> jax.Array:
  """The last tokens of the fragment before each of a rank's fragments.

  Args:
    x: [B F, L, ...], rows of `fragments`.
    first: [B, N, ...], the N <= L tokens before the whole sequence.

  Returns:
    [B F, N, ...].
  """
  ranks, rank = _place()
  count = first.shape[1]
  last_bf = _by_sequence(x[:, -count:])
  before = _shifted(last_bf[:, 0], +1)
  middle = _shifted(last_bf[:, 1], -1)
  before = jnp.where(rank == 0, first.astype(x.dtype), before)
  # The two fragments of the last rank are neighbours.
  middle = jnp.where(rank == ranks - 1, last_bf[:, 0], middle)
  return _by_row(jnp.stack([before, middle], axis=1))


def _by_sequence(x):
  return x.reshape(-1, FRAGMENTS, *x.shape[1:])


def _by_row(x_bf):
  return x_bf.reshape(-1, *x_bf.shape[2:])


def from_last(x: jax.Array) -> jax.Array:
  """[B, ...] of the sequence's last fragment on every rank, from [B F, ...].

  That fragment is the second one of rank 0.
  """
  return _from_rank(0, _by_sequence(x)[:, 1])


def _continues(segment_ids: jax.Array) -> jax.Array:
  """[F, B]: whether a fragment begins in the document that it is handed.

  That document is the one of the last token before that is no padding.
  """
  ids_bft = _by_sequence(segment_ids)
  first_fb, last_fb = _ends(ids_bft).T, _ends(ids_bft[..., ::-1]).T
  last_pb = _gather_fragments(last_fb)
  latest = lambda before, after: jnp.where(after == 0, before, after)
  latest_pb = jax.lax.associative_scan(latest, last_pb)
  before_pb = jnp.concatenate([jnp.zeros_like(last_pb[:1]), latest_pb[:-1]])
  before_fb = _own(before_pb)
  return (before_fb == 0) | (first_fb == 0) | (first_fb == before_fb)


def _ends(ids):
  """The first id along the last axis that is not padding, or 0."""
  at = jnp.argmax(ids != 0, axis=-1)
  return jnp.take_along_axis(ids, at[..., None], -1)[..., 0]


def entering_states(
  transition: jax.Array,
  offset: jax.Array,
  initial: jax.Array | None,
  segment_ids: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """The state that enters each fragment, and the one that leaves the last.

  Args:
    transition, offset: [B F, H, K, K] and [B F, H, K, V], the affine map of
      each fragment that goes on with the document before it.
    initial: [B, H, K, V], the state before the sequence; None for zeros.
    segment_ids: [B F, L], or None for one document.

  Returns:
    [B F, H, K, V] and [B, H, K, V].
  """
  by_fragment = lambda x: jnp.swapaxes(_by_sequence(x), 0, 1)
  transition, offset = by_fragment(transition), by_fragment(offset)
  if initial is None:
    initial = jnp.zeros_like(offset[0])
  goes_on = None
  if segment_ids is not None:
    goes_on = _continues(segment_ids)[..., None, None, None]
    transition = jnp.where(goes_on, transition, 0)
  ranks, _ = _place()
  find = _entering_gathered if ranks <= _GATHERED else _entering_scanned
  states_fb, final = find((transition, offset), initial)
  if goes_on is not None:
    states_fb = jnp.where(goes_on, states_fb, 0)
  return _by_row(jnp.swapaxes(states_fb, 0, 1)), final


def _moved(pair: Pair, state):
  transition, offset = pair
  return _product(transition, state) + offset


def _product(a, b):
  return jnp.matmul(a, b, precision='highest')


def _then(first: Pair, second: Pair) -> Pair:
  """The map of one range and then the next."""
  return _product(second[0], first[0]), _moved(second, first[1])


def _entering_gathered(own: Pair, initial):
  def step(state, pair):
    return _moved(pair, state), state

  every = tuple(map(_gather_fragments, own))
  final, states_p = jax.lax.scan(step, initial, every)
  return _own(states_p), final


def _entering_scanned(own: Pair, initial):
  """First fragments follow the ranks upwards, second ones downwards."""
  ranks, rank = _place()
  first, second = (tuple(x[f] for x in own) for f in range(FRAGMENTS))
  up = _inclusive(first, +1)
  middle = _from_rank(ranks - 1, _moved(up, initial))
  down = _inclusive(second, -1)
  final = _from_rank(0, _moved(down, middle))
  before = _shifted(_moved(up, initial), +1)
  states = jnp.where(rank == 0, initial, before)
  after = _shifted(_moved(down, middle), -1)
  return jnp.stack([states, jnp.where(rank == ranks - 1, middle, after)]), final


def _from_rank(source: int, x):
  _, rank = _place()
  return jax.lax.psum(jnp.where(rank == source, x, 0), AXIS)


def _shifted(x, by: int):
  """`x` of the rank `by` places before; zeros where there is none."""
  ranks, _ = _place()
  pairs = [(r, r + by) for r in range(ranks) if 0 <= r + by < ranks]
  return jax.lax.ppermute(x, AXIS, pairs)


def _inclusive(pair: Pair, direction: int) -> Pair:
  """The map of all ranks up to this one, by doubling distances."""
  ranks, rank = _place()
  reached = rank if direction > 0 else ranks - 1 - rank
  distance = 1
  while distance < ranks:
    before = tuple(_shifted(x, direction * distance) for x in pair)
    longer = _then(before, pair)
    pair = tuple(
      jnp.where(reached >= distance, a, b) for a, b in zip(longer, pair)
    )
    distance *= 2
  return pair
