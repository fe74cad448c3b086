"""Routers that drift, to see how a rule of balance follows them.

Every source has 896 experts, 16 of them chosen, and yields one record of
`router.metrics` a step: of the batch routed under the bias that the step before
left.

'repeated': one batch, over and over. A linear router reads features x = m + z,
    z ~ N(0, 1) in 64 dimensions, |m|^2 = 64, by weights w ~ N(0, 1 / 64), so
    that logits are N(o_j, 1) with an offset o_j ~ N(0, 1) of every expert.
'drifting': the same router on new features every step, while its weights walk
    at random: logits and offsets move by N(0, 0.05) a step.
'text': one Stable LatentMoE layer is trained from scratch to predict the next
    byte of Python's standard library, in rows of 64 bytes, by Adam at 2e-3. It
    reads embeddings of the last four bytes and a sum over all before, in which
    each byte weighs 0.95 of the next. The router, 64 wide, is trained with it,
    so that a rule changes what becomes of the router.

An auxiliary loss acts through the router's weights: on 'text' it is added to
the loss with its weight, elsewhere Adam at 2e-3 moves the weights by it alone.

Suffixes: b rows, t tokens, s tokens before, d features, e experts, a
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trimoe_jax.config import ModelConfig, MoeConfig, RouterConfig
from trimoe_jax.data import (
  DataConfig,
  StageConfig,
  StagedBatches,
  load_corpus,
)
from trimoe_jax.model import parameters, router
from trimoe_jax.model.latent_moe import moe_layer, moe_parameters
from trimoe_jax.model.norm import rms_norm
from trimoe_jax.model.parameters import Parameter, normal

WIDTH = 64
MOE = MoeConfig(experts=896, top_k=16, hidden=8, latent=16)
RATE = 2e-3  # of Adam
WALK = 0.05  # of the logits, a step
CONTEXT = 64
TAPS = 4  # bytes that 'text' sees one by one
MEMORY = 0.95  # of the sum of all bytes before

Record = dict[str, float]


def repeated(
  rule: RouterConfig, *, steps: int, tokens: int, moe: MoeConfig = MOE
) -> list[Record]:
  """Records of one batch that is routed again and again."""
  first = next(_linear(tokens, moe, walk=0.0))
  return _replay(rule, (first for _ in range(steps)), moe)


def drifting(
  rule: RouterConfig, *, steps: int, tokens: int, moe: MoeConfig = MOE
) -> list[Record]:
  """Records of new batches under a router that walks at random."""
  batches = _linear(tokens, moe, walk=WALK)
  return _replay(rule, (next(batches) for _ in range(steps)), moe)


def text(
  rule: RouterConfig,
  *,
  steps: int,
  tokens: int,
  moe: MoeConfig = MOE,
  source: str | None = None,
) -> list[Record]:
  """Records of a layer in training; also 'loss', nats a byte.

  Args:
    rule: of balance.
    steps: of training.
    tokens: in a step, a multiple of 64.
    moe: sizes of the layer.
    source: text to train on; None is the standard library.
  """
  corpus = load_corpus(DataConfig(source=source))
  stage = StageConfig(context=CONTEXT, batch=tokens // CONTEXT, steps=steps)
  batches = StagedBatches(corpus, [stage])
  config = ModelConfig(
    vocab_size=corpus.tokenizer.vocab_size,
    width=WIDTH,
    dtype='float32',
    moe=moe,
    router=rule,
  )
  params = parameters.initialize(_text_parameters(config), jax.random.key(0))
  optimizer = optax.adam(RATE)
  carry = params, optimizer.init(params), router.init_state(1, rule, moe)

  @jax.jit
  def step(carry, batch):
    params, moments, state = carry
    grad = jax.grad(_text_loss, has_aux=True)
    grads, (loss, stats) = grad(params, batch, state, config)
    updates, moments = optimizer.update(grads, moments)
    params = optax.apply_updates(params, updates)
    found = router.metrics(stats) | {'loss': loss}
    return (params, moments, router.solve(state, stats, rule)), found

  return _collect(step, carry, map(batches.batch_at, range(steps)))


def _linear(
  tokens: int, moe: MoeConfig, *, walk: float
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Features [T, d] and router weights [d, E] of every step, without end."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.standard_normal(shape, np.float32)
  mean_d = draw(WIDTH)
  mean_d *= WIDTH**0.5 / np.linalg.norm(mean_d)
  w_de = draw(WIDTH, moe.experts) / np.float32(WIDTH**0.5)
  while True:
    yield mean_d + draw(tokens, WIDTH), w_de
    w_de = w_de + np.float32(walk / WIDTH**0.5) * draw(WIDTH, moe.experts)


def _replay(rule: RouterConfig, batches, moe: MoeConfig) -> list[Record]:
  """Records of given features and router weights."""
  optimizer = optax.adam(RATE)
  learned_de = jnp.zeros((WIDTH, moe.experts))  # what an auxiliary loss adds
  state = router.init_state(1, rule, moe)

  def routed(learned_de, x_td, w_de, state):
    logits_te = jnp.matmul(x_td, w_de + learned_de, precision='highest')
    one = jax.tree.map(lambda s: s[0], state)
    stats = router.route(logits_te, one, moe, rule, observe=True)[2]
    stats = jax.tree.map(lambda s: s[None], stats)
    loss = router.aux_loss(stats) if rule.balance == 'aux_loss' else 0.0
    return jnp.asarray(loss, jnp.float32), stats

  @jax.jit
  def step(carry, batch):
    learned_de, moments, state = carry
    if rule.balance == 'aux_loss':
      grad = jax.grad(routed, has_aux=True)
      grads, stats = grad(learned_de, *batch, state)
      updates, moments = optimizer.update(grads, moments)
      learned_de += updates
    else:
      _, stats = routed(learned_de, *batch, state)
    state = router.solve(state, stats, rule)
    return (learned_de, moments, state), router.metrics(stats)

  moments = optimizer.init(learned_de)
  return _collect(step, (learned_de, moments, state), batches)


def _collect(step, carry: Any, batches) -> list[Record]:
  """The scalars of every step."""
  records = []
  for batch in batches:
    carry, found = step(carry, batch)
    records.append(
      {k: float(np.squeeze(v)) for k, v in found.items() if np.size(v) == 1}
    )
  return records


def _text_parameters(config: ModelConfig) -> dict[str, Any]:
  shape = TAPS + 1, config.vocab_size, config.width
  return {
    'embedding': Parameter(shape, (None, None, None), normal(1.0)),
    'moe': moe_parameters(config),
    'head': Parameter(shape[:0:-1], (None, None), normal(config.width**-0.5)),
  }


def _text_features(embedding, tokens_bt, eps: float):
  """[B, T, d] of the last bytes and of all before; no two texts look alike."""
  taps = [jnp.roll(tokens_bt, i, axis=1).at[:, :i].set(0) for i in range(TAPS)]
  x_btd = sum(embedding[i][taps[i]] for i in range(TAPS))
  time_t = jnp.arange(tokens_bt.shape[1])
  age_ts = time_t[:, None] - time_t
  fade_ts = jnp.where(age_ts >= 0, MEMORY**age_ts, 0.0)
  fade_ts *= (1 - MEMORY**2) ** 0.5  # so that the sum is as large as one byte
  x_bsd = embedding[TAPS][tokens_bt]
  x_btd += jnp.einsum('ts,bsd->btd', fade_ts, x_bsd)
  return rms_norm(x_btd, jnp.ones(x_btd.shape[-1]), eps)


def _text_loss(params, batch, state, config: ModelConfig):
  """Summed training loss, and the mean loss of bytes and the statistics."""
  x_btd = _text_features(params['embedding'], batch['tokens'], config.norm_eps)
  y_btd, stats = moe_layer(
    params['moe'],
    x_btd,
    config,
    state=jax.tree.map(lambda s: s[0], state),
    mask=batch['segment_ids'] > 0,
    observe=True,
  )
  logits_bta = (x_btd + y_btd) @ params['head']
  loss_bt = optax.softmax_cross_entropy_with_integer_labels(
    logits_bta, batch['targets']
  )
  mask = batch['loss_mask']
  loss = jnp.sum(loss_bt * mask) / jnp.maximum(jnp.sum(mask), 1)
  stats = router.reduce(jax.tree.map(lambda s: s[None], stats))
  total = loss
  if config.router.balance == 'aux_loss':
    total += config.router.aux_weight * router.aux_loss(stats)
  return total, (loss, stats)
