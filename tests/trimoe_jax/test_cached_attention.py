"""Attention over a cache and new tokens against one plain softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import small_config

from trimoe_jax.model import cached_attention, mla
from trimoe_jax.model.cache import Span

BATCH, HEADS, WIDTH = 2, 3, 4
FILLED, TIME, ROOM = 27, 5, 40


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def draw(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def problem(filled=FILLED, time=TIME, room=ROOM):
  """Rows of the cache with junk after `filled`, new rows, queries, span."""
  cache = draw(BATCH, room, WIDTH).at[:, filled:].set(1e6)
  valid = np.arange(room) < filled + time
  valid = np.stack([valid, valid & (np.arange(room) >= 4)])
  valid[1, filled + 1] = False  # padding among the new tokens
  span = Span(start=jnp.int32(filled), valid=jnp.asarray(valid))
  new = draw(BATCH, time, WIDTH, seed=1)
  return cache, new, draw(BATCH, time, HEADS, WIDTH, seed=2), span


def form_of(query_bthk):
  return cached_attention.Form(
    lambda rows_bsk: jnp.einsum('bthk,bsk->bhts', query_bthk, rows_bsk),
    lambda p_bhts, rows_bsk: jnp.einsum('bhts,bsk->bhtk', p_bhts, rows_bsk),
  )


def plain(cache, new, query_bthk, span):
  """All rows at once, each new token's own."""
  at, time = int(span.start), new.shape[1]
  rows = jnp.concatenate([cache[:, :at], new], 1)
  score = jnp.einsum('bthk,bsk->bhts', query_bthk, rows)
  slot, query = np.arange(at + time), at + np.arange(time)
  visible = (slot <= query[:, None]) & span.valid[:, None, : at + time]
  visible |= slot == query[:, None]
  p = jax.nn.softmax(jnp.where(visible[:, None], score, -jnp.inf), -1)
  return jnp.einsum('bhts,bsk->bhtk', p, rows)


@pytest.mark.parametrize('filled', [0, 1, 8, 27, 35])
@pytest.mark.parametrize('block', [8, 16, 64])
def test_blocks_equal_one_softmax(filled, block, monkeypatch):
  monkeypatch.setattr(cached_attention, 'SMALLEST', block)
  monkeypatch.setattr(cached_attention, 'SCORES', 1)
  cache, new, query, span = problem(filled)
  got = cached_attention.attend(form_of(query), cache, new, span)
  np.testing.assert_allclose(
    got, plain(cache, new, query, span), rtol=1e-12, atol=1e-12
  )


def test_only_filled_blocks_are_read(monkeypatch):
  monkeypatch.setattr(cached_attention, 'SMALLEST', 8)
  monkeypatch.setattr(cached_attention, 'SCORES', 1)
  cache, new, query, span = problem(filled=10)
  want = cached_attention.attend(form_of(query), cache, new, span)
  poisoned = cache.at[:, 16:].set(jnp.nan)  # from the third block on
  got = cached_attention.attend(form_of(query), poisoned, new, span)
  np.testing.assert_array_equal(got, want)


def test_a_block_has_at_most_so_many_scores():
  assert cached_attention.block_size(14, 2**20) == 2**20
  assert cached_attention.block_size(14 * 1024, 2**16) == 1024
  assert cached_attention.block_size(96 * 4096, 2**20) == 256
  assert cached_attention.block_size(1, 300) == 300


def test_latents_and_heads_are_the_same_attention():
  c = small_config().mla
  cache, new, _, span = problem()
  width = c.kv_rank + c.shared_dim
  cache = {'latent': draw(BATCH, ROOM, width, seed=3)}
  new = {'latent': draw(BATCH, TIME, width, seed=4)}
  query = draw(BATCH, TIME, c.heads, c.query_dim, seed=5)
  up = draw(c.kv_rank, c.heads, c.nope_dim + c.value_dim, seed=6)

  def run(make):
    form, finish = make(query, up, c)
    return finish(cached_attention.attend(form, cache, new, span))

  np.testing.assert_allclose(run(mla._absorbed), run(mla._by_head), rtol=1e-10)


def test_few_queries_stay_in_the_latent_space():
  k3 = small_config().mla.__class__(
    heads=96,
    query_rank=1536,
    kv_rank=512,
    nope_dim=128,
    shared_dim=64,
    value_dim=128,
  )
  assert mla.absorbs(k3, 1)
  assert mla.absorbs(k3, 128)
  assert not mla.absorbs(k3, 256)
