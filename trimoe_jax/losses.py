"""Next-token losses that never hold the logits of a whole batch.

Hidden states meet the head in chunks of tokens, one after the other; only
float32 numbers a token leave a chunk, and the backward pass makes the logits
of a chunk again. Without this, a million tokens and 163,840 entries of
vocabulary would need 687 GB of logits.

Chunks are strided along time, [T] -> [c, n] with chunk i = [:, i]: where the
sequence is sharded, every device then has a part of every chunk.

Suffixes here: b batch, t time, c position in chunk, n chunks, d model width, a
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

DEFAULT_CHUNK = 2048


class LossSums(NamedTuple):
  """Sums over tokens; the objective is (loss + z) / tokens."""

  loss: jax.Array  # float32, nats
  z: jax.Array  # float32, the z-loss with its factor
  tokens: jax.Array  # float32, the sum of the mask


def cross_entropy(
  hidden_btd: jax.Array,
  head_da: jax.Array,
  targets_bt: jax.Array,
  mask_bt: jax.Array,
  *,
  chunk: int = DEFAULT_CHUNK,
  z_loss: float = 0.0,
) -> LossSums:
  """Sums of the masked next-token loss and of its z-loss.

    loss = sum_t mask_t (logsumexp(l_t) - l_t[target_t]),  l_t = h_t W
    z    = z_loss * sum_t mask_t logsumexp(l_t)^2

  Args:
    hidden_btd: after the final norm, in the model's dtype.
    head_da: cast to the dtype of `hidden_btd`; products accumulate in float32.
    targets_bt: int32 next tokens; anything where the mask is 0.
    mask_bt: bool, or float weights.
    chunk: tokens whose logits exist at once on a device.
    z_loss: factor of the z-loss (1e-4 is usual); 0 for none.

  Returns:
    Sums, not means, so that micro-batches can be added. A token whose mask is
    0 contributes nothing to a sum or a gradient, even if its hidden state is
    not a number.
  """
  keep_bt = mask_bt > 0
  hidden_btd = jnp.where(keep_bt[..., None], hidden_btd, 0)
  nll_bt, lse_bt = _token_terms(hidden_btd, head_da, targets_bt, chunk=chunk)
  weight_bt = mask_bt.astype(nll_bt.dtype)
  return LossSums(
    loss=jnp.sum(weight_bt * nll_bt),
    z=z_loss * jnp.sum(weight_bt * lse_bt**2),
    tokens=jnp.sum(weight_bt),
  )


def token_losses(
  hidden_btd: jax.Array,
  head_da: jax.Array,
  targets_bt: jax.Array,
  *,
  chunk: int = DEFAULT_CHUNK,
) -> jax.Array:
  """The loss of every token, [B, T] float32 nats: minus its log-probability.

  Args and gradients as in `cross_entropy`.
  """
  return _token_terms(hidden_btd, head_da, targets_bt, chunk=chunk)[0]


def token_predictions(
  hidden_btd: jax.Array, head_da: jax.Array, *, chunk: int = DEFAULT_CHUNK
) -> jax.Array:
  """The most probable next token of every position, [B, T] int32.

  Of equal logits the smallest token wins.
  """
  head_da = _gathered(head_da, hidden_btd)
  time = hidden_btd.shape[1]

  def predict(hidden_bcd):
    logits_bca = _logits(hidden_bcd, head_da)
    best_bc = jnp.max(logits_bca, axis=-1)
    # Not argmax: its axis may be sharded, and max and min reduce across it.
    token_a = jnp.arange(logits_bca.shape[-1], dtype=jnp.int32)
    is_best_bca = logits_bca == best_bc[..., None]
    return jnp.min(jnp.where(is_best_bca, token_a, token_a.size - 1), axis=-1)

  return _join(_map(predict, _split(hidden_btd, chunk)), time)


def _token_terms(hidden_btd, head_da, targets_bt, *, chunk):
  """Loss and logsumexp of every token, [B, T] float32 each."""
  time = hidden_btd.shape[1]
  nll_nbc, lse_nbc = _chunk_terms(
    _split(hidden_btd, chunk),
    _gathered(head_da, hidden_btd),
    _split(targets_bt, chunk),
  )
  return _join(nll_nbc, time), _join(lse_nbc, time)


@jax.custom_vjp
def _chunk_terms(hidden_nbcd, head_da, targets_nbc):
  """Loss and logsumexp of every token, chunk by chunk, [n, B, c] each."""

  def terms(hidden_bcd, targets_bc):
    logits_bca = _logits(hidden_bcd, head_da)
    lse_bc = jax.nn.logsumexp(logits_bca, axis=-1)
    hit_bca = _is_target(targets_bc, logits_bca.shape[-1])
    return lse_bc - jnp.sum(jnp.where(hit_bca, logits_bca, 0), axis=-1), lse_bc

  return _map(terms, hidden_nbcd, targets_nbc)


def _chunk_terms_forward(hidden_nbcd, head_da, targets_nbc):
  out = _chunk_terms(hidden_nbcd, head_da, targets_nbc)
  return out, (hidden_nbcd, head_da, targets_nbc, out[1])


def _chunk_terms_backward(saved, cotangents):
  """dlogits = (dnll + dlse) softmax - dnll onehot, from logits made again."""
  hidden_nbcd, head_da, targets_nbc, lse_nbc = saved
  wide = lse_nbc.dtype
  head_spec = _spec(head_da)

  def step(dhead_da, chunk):
    hidden_bcd, targets_bc, lse_bc, dnll_bc, dlse_bc = chunk
    p_bca = jnp.exp(_logits(hidden_bcd, head_da) - lse_bc[..., None])
    hit_bca = _is_target(targets_bc, p_bca.shape[-1])
    dlogits_bca = (dnll_bc + dlse_bc)[..., None] * p_bca - jnp.where(
      hit_bca, dnll_bc[..., None], 0
    )
    dlogits_bca = dlogits_bca.astype(hidden_bcd.dtype)
    dhidden_bcd = jnp.einsum(
      'bca,da->bcd',
      dlogits_bca,
      head_da,
      preferred_element_type=wide,
      out_sharding=_spec(hidden_bcd),
    ).astype(hidden_bcd.dtype)
    dhead_da += jnp.einsum(
      'bcd,bca->da',
      hidden_bcd,
      dlogits_bca,
      preferred_element_type=wide,
      out_sharding=head_spec,
    )
    return dhead_da, dhidden_bcd

  chunks = (hidden_nbcd, targets_nbc, lse_nbc, *cotangents)
  dhead_da, dhidden_nbcd = jax.lax.scan(
    step, jnp.zeros_like(head_da, dtype=wide), chunks
  )
  return dhidden_nbcd, dhead_da.astype(head_da.dtype), None


_chunk_terms.defvjp(_chunk_terms_forward, _chunk_terms_backward)


def _logits(hidden_bcd: jax.Array, head_da: jax.Array) -> jax.Array:
  return jnp.einsum(
    'bcd,da->bca',
    hidden_bcd,
    head_da,
    preferred_element_type=jnp.promote_types(hidden_bcd.dtype, jnp.float32),
  )


def _is_target(targets_bc: jax.Array, vocabulary: int) -> jax.Array:
  # A comparison, not a gather: the vocabulary may be sharded.
  return targets_bc[..., None] == jnp.arange(vocabulary, dtype=jnp.int32)


def _map(f: Callable[..., Any], *chunks: jax.Array) -> Any:
  return jax.lax.map(lambda args: f(*args), chunks)


def _split(x_bt: jax.Array, chunk: int) -> jax.Array:
  """[B, T, ...] -> [n, B, c, ...] with about `chunk` tokens on a device."""
  batch, time, *rest = x_bt.shape
  count = _chunk_count(x_bt, chunk)
  size = -(-time // count)
  if size * count > time:
    tail = [(0, 0)] * len(rest)
    x_bt = jnp.pad(x_bt, [(0, 0), (0, size * count - time), *tail])
  shape = (batch, size, count, *rest)
  spec = _spec(x_bt)
  if spec is not None:  # said, because a size of 1 leaves it open
    spec = jax.P(*spec[:2], None, *spec[2:])
  return jnp.moveaxis(jax.lax.reshape(x_bt, shape, out_sharding=spec), 2, 0)


def _chunk_count(x_bt: jax.Array, chunk: int) -> int:
  """Chunks along time: one that leaves no remainder if that is at hand.

  A sharded time cannot be padded; every device gets whole positions there.
  """
  if chunk < 1:
    raise ValueError(f'chunk={chunk} tokens; it must be at least 1.')
  batch, time = x_bt.shape[:2]
  shards = _shards(x_bt, 1)
  local = batch // _shards(x_bt, 0)
  least = -(-time // max(1, shards * chunk // local))
  most = time // shards if shards > 1 else min(2 * least, time)
  even = (n for n in range(least, most + 1) if time % (n * shards) == 0)
  return next(even, most if shards > 1 else least)


def _shards(x_bt: jax.Array, axis: int) -> int:
  """Devices that an axis is split over."""
  sharding = jax.typeof(x_bt).sharding
  if sharding.mesh.empty:
    return 1
  names = _mesh_axes(sharding.spec[axis])
  return math.prod(sharding.mesh.shape[n] for n in names)


def _join(x_nbc: jax.Array, time: int) -> jax.Array:
  """The inverse of `_split`: [n, B, c] -> [B, T]."""
  count, batch, size = x_nbc.shape
  return jnp.moveaxis(x_nbc, 0, 2).reshape(batch, size * count)[:, :time]


def _gathered(head_da: jax.Array, hidden_btd: jax.Array) -> jax.Array:
  """The head in the model's dtype; with a mesh, whole in its model width.

  The vocabulary stays on those mesh axes that shard no axis of the tokens.
  """
  head_da = head_da.astype(hidden_btd.dtype)
  spec = _spec(head_da)
  if spec is None:
    return head_da
  taken = {n for entry in _spec(hidden_btd) for n in _mesh_axes(entry)}
  kept = tuple(n for n in _mesh_axes(spec[1]) if n not in taken)
  return jax.sharding.reshard(head_da, PartitionSpec(None, kept or None))


def _mesh_axes(entry: Any) -> tuple[str, ...]:
  if entry is None:
    return ()
  return (entry,) if isinstance(entry, str) else tuple(entry)


def _spec(x: jax.Array) -> PartitionSpec | None:
  """How `x` is sharded on an explicit mesh; None without one."""
  sharding = jax.typeof(x).sharding
  return None if sharding.mesh.empty else sharding.spec
