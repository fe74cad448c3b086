"""The vision tower and its projector: patches in, rows of the text stream out.

Kimi K3's MoonViT-V2 as its released code computes it (technical report,
section 2.4; where the report says that attention is factorized over space and
time, the code attends jointly over all patches of a medium, as here). Media
are packed into rows (`media.py`), so no patch is computed for padding but at
the end of a row.

Legend: b batch, p patches, c colours, y x pixels of a patch, d tower width, h
heads, k channels of a head, f hidden width, j tokens, m merged width, w text
width, i the three of query, key and value.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from trimoe_jax import sharding
from trimoe_jax.config import ModelConfig
from trimoe_jax.model.media import (
  Media,
  Places,
  Sources,
  places,
  token_sources,
)
from trimoe_jax.model.norm import rms_norm
from trimoe_jax.model.parameters import Parameter, Table, normal, ones, stack
from trimoe_jax.model.vision_attention import attend_within
from trimoe_jax.model.vision_config import MERGE, PATCH, VisionConfig

THETA = 10_000.0
ROWS = ('batch', None)  # a row's patches stay on one device of the batch axes
STREAM = (*ROWS, None)


def vision_parameters(config: ModelConfig) -> Table:
  """The tower's and the projector's parameters: 401M and 46M in K3."""
  v, init = config.vision, normal(config.init_std)
  norm = Parameter((v.width,), (None,), ones)
  heads = (v.heads, v.head_dim)
  axes = ('tower_heads', None)
  into, out = ('embed', 'hidden'), ('hidden', 'embed')
  block = {
    'attention_norm': norm,
    'attention': {
      'qkv': Parameter((v.width, 3, *heads), ('embed', None, *axes), init),
      'out': Parameter((*heads, v.width), (*axes, 'embed'), init),
    },
    'ffn_norm': norm,
    'mlp': {
      'up': Parameter((v.width, v.hidden), into, init),
      'down': Parameter((v.hidden, v.width), out, init),
    },
  }
  return {
    'patch': Parameter(
      (v.width, 3, PATCH, PATCH), ('embed', None, None, None), init
    ),
    'position': Parameter(
      (v.rows, v.columns, v.width), (None, None, 'embed'), init
    ),
    'blocks': stack(block, v.layers),
    'final_norm': norm,
    'projector': {
      'up': Parameter((v.merged, v.merged), into, init),
      'down': Parameter((v.merged, config.width), out, init),
      'norm': Parameter((config.width,), (None,), ones),
    },
  }


def image_features(
  params: Table, media: Media, config: ModelConfig
) -> jax.Array:
  """Rows of the text stream for all media: [B, P / 4, w] in the model's dtype.

  The tokens of a row's media follow each other in the order of the media; what
  comes after the last is without meaning (and finite).

  Args:
    params: of `vision_parameters(config)`.
    media: [B, P, 3, y, x] patches and their grids; P is a multiple of 4.
    config: with a `vision`.
  """
  v = config.vision
  count = media.patches.shape[1]
  place = _locally(
    functools.partial(places, patches=count), media.grids, outputs=ROWS
  )
  x_bpd = embed_patches(params, media.patches, place, config)
  x_bpd = tower(params, x_bpd, place, config)
  x_bpd = rms_norm(x_bpd, params['final_norm'], v.norm_eps)
  merged_bjm = _locally(
    lambda x_bpd, grids: merge(
      x_bpd, token_sources(grids, count // MERGE**2), v.frames
    ),
    x_bpd,
    media.grids,
    outputs=STREAM,
  )
  return project(params['projector'], merged_bjm, config)


def normalize_pixels(patches: jax.Array, dtype) -> jax.Array:
  """uint8 pixels as (x / 255 - 1/2) / (1/2); floats are taken as they are."""
  if patches.dtype == jnp.uint8:
    patches = patches.astype(jnp.float32) / 127.5 - 1.0
  return patches.astype(dtype)


def embed_patches(
  params: Table, patches: jax.Array, place: Places, config: ModelConfig
) -> jax.Array:
  """Linear map of the pixels plus the position, [B, P, d]."""
  dtype = jnp.dtype(config.dtype)
  pixels_bpcyx = normalize_pixels(patches, dtype)
  patch_dcyx = sharding.use(params['patch'], dtype, 'embed', None, None, None)
  x_bpd = sharding.einsum(
    'bpcyx,dcyx->bpd', pixels_bpcyx, patch_dcyx, out=STREAM
  )
  table = sharding.use(params['position'], dtype, None, None, 'embed')
  add = lambda x_bpd, table, place: (
    x_bpd
    + (
      grid_position(table, place) + time_position(place, x_bpd.shape[-1])
    ).astype(dtype)
  )
  run = sharding.local(
    add,
    inputs=(STREAM, (None, None, None), jax.tree.map(lambda _: ROWS, place)),
    outputs=STREAM,
  )
  return run(x_bpd, table, place)


def grid_position(table: jax.Array, place: Places) -> jax.Array:
  """The learned table resized to each medium's grid, at each patch, [B, P, d].

  Bilinear with half-pixel centres and without antialiasing: entry i of n reads
  the table at (i + 1/2) size / n - 1/2, held at its edges.

  Args:
    table: [rows, columns, d].
    place: of the patches.
  """
  wide = jnp.promote_types(table.dtype, jnp.float32)

  def sample(index, count, size):
    at = (index + 0.5) * (size / jnp.maximum(count, 1).astype(wide)) - 0.5
    at = jnp.maximum(at, 0.0)
    low = jnp.minimum(jnp.floor(at).astype(jnp.int32), size - 1)
    return low, jnp.minimum(low + 1, size - 1), (at - low)[..., None]

  top, bottom, down = sample(place.row, place.rows, table.shape[0])
  left, right, across = sample(place.column, place.columns, table.shape[1])
  read = lambda y, x: table[y, x].astype(wide)
  upper = read(top, left) * (1 - across) + read(top, right) * across
  lower = read(bottom, left) * (1 - across) + read(bottom, right) * across
  return upper * (1 - down) + lower * down


def time_position(place: Places, width: int) -> jax.Array:
  """[sin(t w_i) | cos(t w_i)], w_i = 10000^(-2 i / d); zero for one frame."""
  half = width // 2
  rate = THETA ** (-jnp.arange(half, dtype=float) / half)
  angle = place.frame[..., None] * rate
  both = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
  return jnp.where((place.frames > 1)[..., None], both, 0)


def rotation(place: Places, config: VisionConfig) -> tuple:
  """Cosines and sines [B, P, 1, k / 2] that turn queries and keys.

  Pair 2i of adjacent channels turns by column * r_i and pair 2i + 1 by
  row * r_i, r_i = 10000^(-4 i / k); every frame alike.
  """
  pairs = config.head_dim // 4
  rate = THETA ** (-jnp.arange(pairs, dtype=float) / pairs)
  angle = jnp.stack(
    [at[..., None] * rate for at in (place.column, place.row)], axis=-1
  )
  angle = angle.reshape(*place.row.shape, 1, 2 * pairs)
  return jnp.cos(angle), jnp.sin(angle)


def rotate(x_bphk: jax.Array, turn: tuple) -> jax.Array:
  """Adjacent channels as complex numbers, turned; float32 in between."""
  cosine, sine = turn
  wide = x_bphk.astype(jnp.promote_types(x_bphk.dtype, jnp.float32))
  real, imaginary = wide[..., 0::2], wide[..., 1::2]
  turned = jnp.stack(
    [real * cosine - imaginary * sine, real * sine + imaginary * cosine],
    axis=-1,
  )
  return turned.reshape(x_bphk.shape).astype(x_bphk.dtype)


def tower(
  params: Table, x_bpd: jax.Array, place: Places, config: ModelConfig
) -> jax.Array:
  """The blocks, one scan over their stacked parameters."""
  block = lambda x_bpd, own: (_block(own, x_bpd, place, config), None)
  if config.remat != 'none':
    block = jax.checkpoint(block)
  return jax.lax.scan(block, x_bpd, params['blocks'])[0]


def _block(params, x_bpd, place, config):
  """x += Attention(norm(x)); x += MLP(norm(x))."""
  v = config.vision
  h_bpd = rms_norm(x_bpd, params['attention_norm'], v.norm_eps)
  x_bpd += attention(params['attention'], h_bpd, place, config)
  h_bpd = rms_norm(x_bpd, params['ffn_norm'], v.norm_eps)
  return x_bpd + _gelu_mlp(params['mlp'], h_bpd, approximate=True)


def attention(
  params: Table, x_bpd: jax.Array, place: Places, config: ModelConfig
) -> jax.Array:
  """Softmax attention within each medium, over all its frames."""
  v, dtype = config.vision, x_bpd.dtype
  # A tensor axis that does not divide the heads computes all of them.
  shared = v.heads % sharding.axis_ways('tower_heads') == 0
  heads = (*ROWS, 'tower_heads' if shared else None, None)
  qkv_dihk = sharding.use(
    params['qkv'], dtype, 'embed', None, 'tower_heads', None
  )
  out_hkd = sharding.use(params['out'], dtype, 'tower_heads', None, 'embed')
  qkv_ibphk = sharding.einsum(
    'bpd,dihk->ibphk', x_bpd, qkv_dihk, out=(None, *heads)
  )

  def attend(q_bphk, k_bphk, v_bphk, place):
    turn = rotation(place, v)
    return attend_within(
      rotate(q_bphk, turn),
      rotate(k_bphk, turn),
      v_bphk,
      place.bounds,
      scale=v.head_dim**-0.5,
      block_size=v.block_size,
    ).astype(dtype)

  run = sharding.local(
    attend,
    inputs=(heads, heads, heads, jax.tree.map(lambda _: ROWS, place)),
    outputs=heads,
  )
  a_bphk = run(*qkv_ibphk, place)
  return sharding.einsum('bphk,hkd->bpd', a_bphk, out_hkd, out=STREAM)


def merge(x_bpd: jax.Array, sources: Sources, frames: int) -> jax.Array:
  """Squares of 2 x 2 patches side by side, averaged over frames, [B, J, 4 d].

  Args:
    x_bpd: patches.
    sources: the patches of each token.
    frames: of one medium at most.
  """
  wide = jnp.promote_types(x_bpd.dtype, jnp.float32)
  batch, tokens = sources.stride.shape
  last = x_bpd.shape[1] - 1

  def add(frame, sum_bjm):
    at = sources.first + frame * sources.stride[..., None]
    at = jnp.minimum(at, last).reshape(batch, -1)
    x_bjm = jnp.take_along_axis(x_bpd, at[..., None], axis=1)
    x_bjm = x_bjm.reshape(batch, tokens, -1).astype(wide)
    return sum_bjm + jnp.where((frame < sources.frames)[..., None], x_bjm, 0)

  sum_bjm = jnp.zeros((batch, tokens, MERGE**2 * x_bpd.shape[-1]), wide)
  for frame in range(frames):
    sum_bjm = add(frame, sum_bjm)
  mean = sum_bjm / jnp.maximum(sources.frames, 1)[..., None]
  return mean.astype(x_bpd.dtype)


def project(
  params: Table, merged_bjm: jax.Array, config: ModelConfig
) -> jax.Array:
  """norm(down(gelu(up(x)))), the GELU exact: [B, J, m] to [B, J, w]."""
  y_bjw = _gelu_mlp(params, merged_bjm, approximate=False)
  return rms_norm(y_bjw, params['norm'], config.vision.projector_eps)


def _gelu_mlp(params, x_bpd, *, approximate: bool):
  """down(gelu(up(x))); the GELU is float32."""
  dtype = x_bpd.dtype
  up_df = sharding.use(params['up'], dtype, 'embed', 'hidden')
  down_fd = sharding.use(params['down'], dtype, 'hidden', 'embed')
  h_bpf = sharding.einsum('bpd,df->bpf', x_bpd, up_df, out=(*ROWS, 'hidden'))
  wide = h_bpf.astype(jnp.promote_types(dtype, jnp.float32))
  h_bpf = jax.nn.gelu(wide, approximate=approximate).astype(dtype)
  return sharding.einsum('bpf,fd->bpd', h_bpf, down_fd, out=STREAM)


def _locally(function, *arrays, outputs):
  """`function` of arrays whose rows are on the batch axes, each on its own."""
  inputs = tuple(('batch', *([None] * (x.ndim - 1))) for x in arrays)
  return sharding.local(function, inputs=inputs, outputs=outputs)(*arrays)
