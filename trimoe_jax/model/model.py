"""The whole model: embedding, residual blocks, output mix, head.

Legend: b batch, t time, d model width, a vocabulary, m residual sources, j
tokens made of images.
"""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from trimoe_jax import sharding
from trimoe_jax.config import ModelConfig
from trimoe_jax.model import layout, residual, router
from trimoe_jax.model.block import (
  Aux,
  Pass,
  body_cache,
  body_mixes,
  body_parameters,
  join,
  masked_mean,
  moe_rows,
  rows,
  run_body,
  unstack,
)
from trimoe_jax.model.cache import Cache, Span
from trimoe_jax.model.embedding import (
  Inserts,
  embed,
  expand,
  insert_features,
)
from trimoe_jax.model.media import Media
from trimoe_jax.model.parameters import (
  Parameter,
  Table,
  declare,
  normal,
  ones,
  size,
  stack,
)
from trimoe_jax.model.residual import Residual
from trimoe_jax.model.vision import image_features, vision_parameters
from trimoe_jax.model.vision_config import VisionConfig
from trimoe_jax.parallel import context


def model_parameters(config: ModelConfig) -> Table:
  """Every parameter of the model. Router biases are state, not here."""
  init = normal(config.init_std)
  a, d = config.vocab_size, config.width
  table = {
    'embedding': Parameter((a, d), (None, 'embed'), init),
    'output_mix': residual.mix_parameters(config),
    'final_norm': Parameter((d,), (None,), ones),
    'head': Parameter((d, a), ('embed', 'vocab'), init),
  }
  for run in layout.block_runs(config):
    body = body_parameters(config, run.body)
    table[run.name] = stack(body, run.count) if run.count > 1 else body
  if config.vision is not None:
    table['vision'] = vision_parameters(config)
  return table


@dataclasses.dataclass(frozen=True)
class ParameterCount:
  """`total` and `active` are the text model's, `vision` what comes on top.

  `active` leaves out unrouted experts and the embedding's look-up.
  """

  total: int
  active: int
  vision: int = 0


def count_parameters(config: ModelConfig) -> ParameterCount:
  """Total and active parameters from shapes alone, router biases included."""
  c = config.moe
  table = model_parameters(config)
  vision = size(table.pop('vision', {}))
  total = size(table) + config.moe_layers * c.experts
  expert = 3 * c.latent * c.hidden
  idle = config.moe_layers * (c.experts - c.top_k) * expert
  active = total - idle - config.vocab_size * config.width
  return ParameterCount(total, active, vision)


class Model(nn.Module):
  """K3's model, with a vision tower where the configuration has one.

  `apply({'params': params}, tokens, router=state)` gives logits;
  `method='hidden'` stops before the head, for chunked losses;
  `method='extend'` continues a cache.
  """

  config: ModelConfig

  def setup(self):
    table = model_parameters(self.config)
    self.params = declare(self, table)

  def __call__(
    self,
    tokens: jax.Array,
    router: router.RouterState | None = None,
    images: Media | None = None,
    segment_ids: jax.Array | None = None,
    *,
    length: int | None = None,
  ) -> jax.Array:
    """Next-token logits [B, T, a] float32 of tokens [B, S] int32.

    Args:
      tokens: token ids. With images, one placeholder for each medium, which
        becomes as many places as the medium has tokens (h w / 4): T > S.
      router: the router's state; None stands for zero biases.
      images: the media of every row, in the order of their placeholders.
      segment_ids: [B, S] int32; documents 1, 2, ... are isolated from each
        other, 0 is padding.
      length: T with images; what does not fit is cut off, places left over are
        padding at the end. None: room for a whole row of patches.

    Raises:
      ValueError: images for a model without a vision tower.
    """
    if images is not None:
      tokens, segment_ids = expand(
        tokens, images, segment_ids, vision=self._vision(), length=length
      )
    h_btd, _ = self.hidden(tokens, router, segment_ids, images=images)
    return self.logits(h_btd)

  def image_features(self, images: Media) -> jax.Array:
    """The rows that placeholders become, [B, P / 4, d]; see `vision.py`.

    Raises:
      ValueError: the model has no vision tower.
    """
    self._vision()
    return image_features(self.params['vision'], images, self.config)

  def _vision(self) -> VisionConfig:
    if self.config.vision is None:
      raise ValueError(
        'images were given, but this model has no vision tower; set '
        'model.vision, or leave images at None and describe them as text.'
      )
    return self.config.vision

  def hidden(
    self,
    tokens: jax.Array,
    router: router.RouterState | None = None,
    segment_ids: jax.Array | None = None,
    *,
    images: Media | None = None,
    observe: bool = False,
    depth: bool = False,
  ) -> tuple[jax.Array, Aux]:
    """What the head reads, [B, T, d], and the layers' reports.

    Args:
      tokens: [B, T] int32, placeholders repeated for every token of a medium.
      router, segment_ids: as for logits.
      images: as for logits.
      observe: count router statistics (training only).
      depth: collect mean depth-mix weights, [layers * 2 + 1, columns].
    """
    inserts = self._inserts(tokens, images)
    split = context.is_split(tokens.shape[1], self.config.kda.conv_width - 1)
    if split:
      balance = lambda x: context.balance(x, 'batch', 'seq')
      tokens, segment_ids = jax.tree.map(balance, (tokens, segment_ids))
      inserts = inserts and inserts._replace(row=balance(inserts.row))
    shared = Pass(
      config=self.config,
      segment_ids=segment_ids,
      mask=None if segment_ids is None else segment_ids > 0,
      observe=observe,
      depth=depth,
      split=split,
    )
    embedded = embed(self.params['embedding'], tokens, self.config, inserts)
    h_btd, aux, _ = self._forward(embedded, router, shared, None)
    if split:
      h_btd = context.restore(h_btd, 'batch', 'seq', None)
    return h_btd, aux

  def extend(
    self,
    tokens: jax.Array,
    cache: Cache,
    router: router.RouterState | None = None,
    valid: jax.Array | None = None,
    *,
    fresh: bool = False,
    last: bool = False,
    inserts: Inserts | None = None,
  ) -> tuple[jax.Array, Cache]:
    """Logits [B, T, a] of tokens that continue `cache`, and the new cache.

    Args:
      tokens: [B, T] int32; T = 1 is a decoding step.
      cache: from `init_cache` or an earlier call, with room for T more.
      router: as for logits.
      valid: [B, T] bool, False for (left) padding; None: all real.
      fresh: whether the cache is empty, which lets a prompt attend blockwise.
      last: only the last token's logits, [B, 1, a]: all that a prompt needs.
      inserts: the images of these tokens, from `insert_features`.
    """
    if valid is None:
      valid = jnp.ones(tokens.shape, bool)
    span = Span(
      start=cache.length,
      valid=jax.lax.dynamic_update_slice_in_dim(
        cache.valid, valid, cache.length, 1
      ),
      fresh=fresh,
    )
    shared = Pass(
      config=self.config,
      segment_ids=valid.astype(jnp.int32),
      mask=valid,
      span=span,
    )
    embedded = embed(self.params['embedding'], tokens, self.config, inserts)
    h_btd, _, new = self._forward(embedded, router, shared, cache.layers)
    # Nothing is written before everything is read, so no entry is copied.
    h_btd, new = jax.lax.optimization_barrier((h_btd, new))
    if last:
      h_btd = h_btd[:, -1:]
    return self.logits(h_btd), cache.extended(new, span, tokens.shape[1])

  def logits(self, h_btd: jax.Array) -> jax.Array:
    """The head: [B, T, d] to [B, T, a] float32."""
    head_da = sharding.use(self.params['head'], h_btd.dtype, 'embed', 'vocab')
    return sharding.einsum(
      'btd,da->bta',
      h_btd,
      head_da,
      out=('batch', 'seq', 'vocab'),
      preferred_element_type=jnp.promote_types(h_btd.dtype, jnp.float32),
    )

  def _inserts(self, tokens, images):
    """What images put into the stream of `tokens`; None without images."""
    if images is None:
      return None
    features_bjd = self.image_features(images)
    return insert_features(tokens, features_bjd, self.config)

  def _forward(self, embedded, states, shared, caches):
    config = self.config
    if states is None:
      states = router.init_state(config.moe_layers, config.router, config.moe)
    sources = embedded[None]
    reports, kept, at = [], {}, 0
    for run in layout.block_runs(config):
      own = rows(states, at, run.moe_layers)
      cache = None if caches is None else caches[run.name]
      inputs = (self.params[run.name], own, cache)
      run_blocks = _repeated_blocks if run.count > 1 else _one_block
      sources, aux, kept[run.name] = run_blocks(run, inputs, sources, shared)
      reports.append(aux)
      at += run.moe_layers
    h_btd, weights = read_out(self.params, sources, config)
    aux = join(reports)
    if shared.depth:
      aux = aux.replace(
        depth=jnp.concatenate(
          [
            aux.depth.reshape(-1, config.sources),
            masked_mean(weights, shared.mask)[None],
          ]
        )
      )
    return h_btd, aux, kept


def read_out(
  params: Table, sources_mbtd: jax.Array, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
  """What the head reads of all sources [B, T, d]; the mix's weights."""
  return residual.read_all(
    params['output_mix'], sources_mbtd, config, params['final_norm']
  )


def _one_block(run, inputs, sources, shared):
  """One residual block: the sources grow by its sum."""
  block = functools.partial(_block, run)
  if shared.config.remat != 'none':
    block = jax.checkpoint(block)
  partial, aux, cache = block(inputs, sources, run.first + 1, shared)
  return jnp.concatenate([sources, partial[None]]), aux, cache


def _block(run, inputs, sources, filled, shared):
  """The sum of one block that reads the first `filled` sources."""
  stream = Residual.start(sources, filled)
  if shared.span is not None:
    mixes = body_mixes(run.body, inputs[0])
    stream = stream.in_two_phases(mixes, shared.config)
  stream, aux, cache = run_body(run.body, inputs, stream, shared)
  return stream.partial, aux, cache


def _repeated_blocks(run, inputs, sources, shared):
  """Scans equal blocks; block n reads n + 1 of the sources and adds one.

  The sources are the whole state at a block's entry, so rematerializing a
  block needs nothing else: they are kept once, not once a block.
  """
  params, states, caches = inputs
  room = jnp.zeros((run.count, *sources.shape[1:]), sources.dtype)
  room = sharding.constrain(room, *residual.SOURCES)
  xs = (params, moe_rows(states, run.count), caches)
  scan = functools.partial(_scan_blocks, run)
  if shared.config.remat != 'none' and caches is None:
    scan = functools.partial(_scan_blocks_saving_sources, run)
  sources, (aux, cache) = scan(xs, jnp.concatenate([sources, room]), shared)
  return sources, unstack(aux), cache


def _scan_blocks(run, xs, sources, shared):
  def step(sources, x):
    number, inputs = x
    partial, aux, cache = _block(run, inputs, sources, number + 1, shared)
    sources = jax.lax.dynamic_update_index_in_dim(
      sources, partial, number + 1, 0
    )
    return sources, (aux, cache)

  numbers = run.first + jnp.arange(run.count)
  return jax.lax.scan(step, sources, (numbers, xs))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan_blocks_saving_sources(run, xs, sources, shared):
  return _scan_blocks(run, xs, sources, shared)


def _scan_blocks_fwd(run, xs, sources, shared):
  sources, reports = _scan_blocks(run, xs, sources, shared)
  return (sources, reports), (xs, sources, shared)


def _scan_blocks_bwd(run, saved, cotangents):
  """Reruns the blocks from the last to the first, from the kept sources."""
  xs, sources, shared = saved
  d_sources, d_reports = cotangents
  leaves, structure = jax.tree.flatten(d_reports)
  is_float = [leaf.dtype != jax.dtypes.float0 for leaf in leaves]

  def step(d_sources, x):
    number, (params, states, caches), floats = x
    block = lambda params, sources: _block(
      run, (params, states, caches), sources, number + 1, shared
    )
    _, transpose = jax.vjp(block, params, sources)
    d_partial = jax.lax.dynamic_index_in_dim(
      d_sources, number + 1, 0, keepdims=False
    )
    floats = iter(floats)
    d_report = structure.unflatten(
      next(floats) if f else np.zeros(leaf.shape[1:], leaf.dtype)
      for f, leaf in zip(is_float, leaves)
    )
    d_params, d_read = transpose((d_partial, *d_report))
    return d_sources + d_read, d_params

  numbers = run.first + jnp.arange(run.count)
  floats = [leaf for f, leaf in zip(is_float, leaves) if f]
  d_sources, d_params = jax.lax.scan(
    step, d_sources, (numbers, xs, floats), reverse=True
  )
  # Router states and masks are not trained; nothing flows into them.
  return (d_params, *_no_gradient(xs[1:])), d_sources, _no_gradient(shared)


_scan_blocks_saving_sources.defvjp(_scan_blocks_fwd, _scan_blocks_bwd)


def _no_gradient(tree):
  """The zero cotangent of a tree of floats and integers."""
  return jax.tree.map(
    lambda x: (
      jnp.zeros_like(x)
      if jnp.issubdtype(x.dtype, jnp.floating)
      else np.zeros(x.shape, jax.dtypes.float0)
    ),
    tree,
  )


def init_cache(config: ModelConfig, batch: int, length: int) -> Cache:
  """An empty cache with room for `length` tokens of `batch` sequences."""
  layers = {}
  for run in layout.block_runs(config):
    body = body_cache(config, run.body, batch, length)
    if run.count > 1:
      body = jax.tree.map(
        lambda x, n=run.count: jnp.broadcast_to(x, (n, *x.shape)), body
      )
    layers[run.name] = body
  return Cache(
    layers=layers,
    valid=jnp.zeros((batch, length), bool),
    length=jnp.zeros((), jnp.int32),
  )
