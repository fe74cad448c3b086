"""Causal attention by JAX's Pallas kernel for TPUs, splash attention.

The kernel's output has the dtype of its queries: they come in float32 here, so
that it is not rounded, while keys and values keep the dtype of the matmuls.

Suffixes: b batch, t time, h heads, k key width, v value width, i query block, j
key block.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as kernels,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask_info as masks,
)

from pallas_kernels import dispatch

_LANES = 128
_BLOCK, _LONG_BLOCK = 512, 1024
# Of blocks along a sequence: the table of tiles lies in scalar memory, which
# has 1 MiB.
_MOST_BLOCKS = 256


def refusal(q_bthk: jax.Array, v_bthv: jax.Array) -> str | None:
  """Why `attend` cannot run here, or None."""
  if dispatch.device_kind() != 'tpu':
    return 'it is a TPU kernel'
  if q_bthk.dtype != jnp.bfloat16 or v_bthv.dtype != jnp.bfloat16:
    return f'it is for bfloat16, not {q_bthk.dtype}'
  if q_bthk.shape[1] > _MOST_BLOCKS * _LONG_BLOCK:
    return f'{q_bthk.shape[1]} tokens are too many for its table of tiles'
  return None


def attend(
  q_bthk: jax.Array,
  k_bthk: jax.Array,
  v_bthv: jax.Array,
  document_bt: jax.Array | None,
  *,
  scale: float,
  interpret: bool = False,
) -> jax.Array:
  """softmax(scale q k^T) v over earlier rows of the same document.

  Args:
    q_bthk, k_bthk, v_bthv: [B, T, H, K], the same, and [B, T, H, V].
    document_bt: int32 [B, T], another number for every document; None for one.
    scale: multiplies the scores.
    interpret: run on any device, slowly.

  Returns:
    [B, T, H, V] float32.
  """
  time = q_bthk.shape[1]
  block = _block(time)
  missing = -time % block
  if missing and document_bt is not None:
    # Rows that are cut off later; causal masks keep them out of the others.
    document_bt = jnp.pad(document_bt, ((0, 0), (0, missing)))
  arrays = (q_bthk.astype(jnp.float32) * scale, k_bthk, v_bthv)
  pad = ((0, 0), (0, missing), (0, 0), (0, 0))
  arrays = [jnp.pad(x, pad).swapaxes(1, 2) for x in arrays]
  kernel = _kernel(time + missing, block, interpret)
  segments = None
  if document_bt is not None:
    segments = kernels.SegmentIds(document_bt, document_bt)
  out_bhtv = jax.vmap(kernel)(*arrays, segments)
  return out_bhtv.swapaxes(1, 2)[:, :time]


def _block(time: int) -> int:
  """Rows in a block; a short sequence is one."""
  if time > _MOST_BLOCKS * _BLOCK // 2:
    return _LONG_BLOCK
  return min(_BLOCK, -(-time // _LANES) * _LANES)


def _kernel(time: int, block: int, interpret: bool):
  """The causal kernel of one sequence [H, T, ...]."""
  sizes = kernels.BlockSizes(
    block_q=block,
    block_kv=block,
    block_kv_compute=min(block, _BLOCK),
    block_q_dkv=block,
    block_kv_dkv=block,
    block_kv_dkv_compute=min(block, _BLOCK),
    block_q_dq=block,
    block_kv_dq=block,
  )
  by_query, by_key = _tiles(time, block)
  return kernels.SplashAttentionKernel(
    by_query,
    by_query,
    by_key,
    block_sizes=sizes,
    is_mqa=False,
    save_residuals=False,
    mask_value=kernels.DEFAULT_MASK_VALUE,
    attn_logits_soft_cap=None,
    residual_checkpoint_name=None,
    mask_function=_is_visible,
    interpret=interpret,
  )


def _is_visible(query, key):
  return query >= key


@functools.cache
def _tiles(time: int, block: int) -> tuple[masks.MaskInfo, masks.MaskInfo]:
  """Which tiles are full, cut by the diagonal or empty, by query and by key.

  The library finds the same by looking at all T^2 pairs (tested): half a minute
  for 32,768 tokens.
  """
  count = time // block
  i, j = np.indices((count, count))
  kind = np.where(j < i, 2, np.where(j == i, 1, 0)).astype(np.int8)
  dtype = np.int8 if count <= 128 else np.int16

  def info(block_index):
    # What is fetched for a tile: an empty one names the next, which is first.
    fetched = np.where(j <= i, block_index, 0).astype(dtype)
    return masks.MaskInfo(
      data_next=fetched[None],
      mask_next=None,
      block_mask=kind[None],
      partial_mask_blocks=None,
      q_sequence=np.arange(time, dtype=np.int32),
    )

  return info(j), info(i)
