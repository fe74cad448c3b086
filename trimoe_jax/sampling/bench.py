"""Time of a decoding step over the length of what was read before.

The model of the repository against one of the same size whose every layer is
softmax attention with a key and a value of each head in its cache
(`model/mha.py`). Caches hold random numbers, as if a prompt of that length had
been read; `prefill` reads one truly. Weights are random too.

A step reads every weight that its tokens use and the whole cache once: the
floor is those bytes at the bandwidth of a copy here.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.timing import copy_bandwidth
from trimoe_jax.config import KdaConfig, MlaConfig, ModelConfig, MoeConfig
from trimoe_jax.model import router
from trimoe_jax.model.cache import SLOTTED, Cache
from trimoe_jax.model.layout import Unrolled
from trimoe_jax.model.mha import FullAttention
from trimoe_jax.model.model import (
  Model,
  count_parameters,
  init_cache,
  model_parameters,
)
from trimoe_jax.model.parameters import Parameter
from trimoe_jax.sampling import Drawing, State, advance, serving_params, start
from trimoe_jax.sampling.decode import row_keys

COLUMNS = (
  'model',
  'prefix',
  'batch',
  'ms/token',
  'tokens/s',
  'floor ms',
  'MB/sequence',
)
# experiments/configs, as far as a step depends on them.
SHAPES = {
  'tiny': ModelConfig(
    vocab_size=264,
    width=96,
    layers=4,
    mla_layers=(4,),
    dense_hidden=384,
    residual_block=1,
    dtype='float32',
    kda=KdaConfig(heads=2, value_dim=32, key_dim=32, gate_rank=32),
    mla=MlaConfig(heads=2, value_dim=32, query_rank=32, kv_rank=16),
    moe=MoeConfig(experts=16, top_k=2, hidden=64, latent=48),
  ),
  'micro': ModelConfig(
    vocab_size=16384,
    width=512,
    layers=13,
    mla_layers=(4, 8, 12, 13),
    dense_hidden=2432,
    residual_block=2,
    kda=KdaConfig(heads=14, key_dim=64, value_dim=64, gate_rank=64),
    mla=MlaConfig(
      heads=14,
      query_rank=128,
      kv_rank=64,
      nope_dim=64,
      shared_dim=32,
      value_dim=64,
    ),
    moe=MoeConfig(
      experts=64, top_k=4, shared_experts=2, hidden=224, latent=256
    ),
  ),
}
MODELS = {'trimoe': Unrolled, 'full': FullAttention}
PERIOD = 1024  # random slots, repeated over the prefix


def run(
  shape: str = 'micro',
  *,
  models: str = 'trimoe,full',
  prefixes: tuple[int, ...] = tuple(4**n * 1024 for n in range(6)),
  batches: tuple[int, ...] = (1,),
  tokens: int = 64,
  repeats: int = 5,
  prefill: int | None = None,
  gigabytes: float = 100.0,
  out: str | None = None,
) -> list[dict[str, float | str]]:
  """A row for each model, batch and prefix, printed and returned.

  Args:
    shape: a key of SHAPES.
    models: keys of MODELS by commas.
    prefixes: tokens in the cache before the first step that is timed.
    batches: sequences decoded together.
    tokens: steps of one timed call.
    repeats: timed calls, of which the median is reported.
    prefill: also read a prompt of so many tokens, in pieces, and print the
      tokens a second.
    gigabytes: larger caches are left out, and said so.
    out: a folder; rows are added to those in its decode.jsonl, and all are
      drawn in decode.png.

  Raises:
    ValueError: an unknown shape or model.
  """
  names = models.split(',')
  if shape not in SHAPES or not set(names) <= set(MODELS):
    raise ValueError(
      f'shape={shape!r}, models={models!r}: choose of {sorted(SHAPES)} and '
      f'{sorted(MODELS)}.'
    )
  bandwidth = copy_bandwidth()
  print(' '.join(f'{name:>12}' for name in COLUMNS))
  rows = []
  for name in names:
    config = MODELS[name].of(SHAPES[shape])
    model, weights = Model(config), _weights(config)
    for batch in batches:
      for prefix in prefixes:
        room = prefix + (repeats + 1) * tokens
        if _cache_bytes(config, batch, room) > gigabytes * 1e9:
          print(f'{name:>12} {prefix:>12} {batch:>12}: cache too large')
          continue
        seconds = _step_seconds(
          model, weights, (batch, prefix, room), tokens, repeats
        )
        size = _cache_bytes(config, 1, prefix)
        width = jnp.dtype(config.dtype).itemsize
        moved = width * _active(config, batch) + batch * size
        values = seconds * 1e3, batch / seconds, moved / bandwidth * 1e3
        values = (name, prefix, batch, *values, size / 1e6)
        rows.append(dict(zip(COLUMNS, values)))
        print(' '.join(_cell(x) for x in values), flush=True)
    if prefill:
      _print_prefill(name, model, weights, prefill)
  if out is not None:
    _keep(pathlib.Path(out), rows)
  return rows


def _keep(folder: pathlib.Path, rows):
  """Adds rows to decode.jsonl and draws all of them."""
  from trimoe_jax.sampling import bench_figure  # matplotlib starts slowly

  folder.mkdir(parents=True, exist_ok=True)
  records = folder / 'decode.jsonl'
  with records.open('a') as file:
    file.writelines(json.dumps(row) + '\n' for row in rows)
  lines = records.read_text().splitlines()
  bench_figure.draw(folder / 'decode.png', [json.loads(x) for x in lines])


def _cell(x) -> str:
  return f'{x:>12.4f}' if isinstance(x, float) else f'{x:>12}'


def _weights(config):
  """Random weights, made on the host: their program would compile for long."""
  drawn = np.random.default_rng(0).standard_normal(2**20, np.float32)

  def draw(path, parameter):
    shape = parameter.shape
    if len(shape) == 1:
      return np.full(shape, float(path[-1].key != 'a_log'), np.float32)
    return np.resize(config.init_std * drawn, shape)

  params = jax.tree_util.tree_map_with_path(
    draw,
    model_parameters(config),
    is_leaf=lambda x: isinstance(x, Parameter),
  )
  state = router.init_state(config.moe_layers, config.router, config.moe)
  return jax.device_put(serving_params(params, Model(config))), state


def _active(config, batch: int) -> int:
  """Weights that one step of a batch reads; tokens choose experts apart."""
  count, c = count_parameters(config), config.moe
  expert = config.moe_layers * 3 * c.latent * c.hidden
  used = c.experts * (1 - (1 - c.top_k / c.experts) ** batch)
  return count.active + round((used - c.top_k) * expert)


def _cache_bytes(config, batch: int, room: int) -> int:
  shapes = jax.eval_shape(lambda: init_cache(config, batch, room).layers)
  return sum(
    math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes)
  )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _filled(config, batch: int, room: int, prefix, drawn) -> Cache:
  """A cache of the numbers drawn, as after `prefix` tokens."""
  cache = init_cache(config, batch, room)

  def fill(name, axis, x):
    axis += SLOTTED.get(name, 0)
    period = PERIOD if name in SLOTTED else x.shape[axis]
    shape = (*x.shape[:axis], period, *x.shape[axis + 1 :])
    rows = jnp.resize(drawn, shape).astype(x.dtype)
    times = [-(-n // m) for n, m in zip(x.shape, shape)]
    whole = jnp.tile(rows, times)
    return jax.lax.slice_in_dim(whole, 0, x.shape[axis], axis=axis)

  return Cache(
    layers=cache.map_layers(fill),
    valid=jnp.broadcast_to(jnp.arange(room) < prefix, cache.valid.shape),
    length=jnp.int32(prefix),
  )


def _state(config, batch: int, prefix: int, room: int) -> State:
  drawn = np.random.default_rng(1).standard_normal(2**20, np.float32)
  return State(
    cache=_filled(config, batch, room, prefix, 0.1 * drawn),
    logits=jnp.zeros((batch, config.vocab_size)),
    last=jnp.zeros(batch, jnp.int32),
    stopped=jnp.zeros(batch, bool),
    keys=row_keys(jax.random.key(0), batch),
    step=jnp.int32(0),
  )


def _step_seconds(model, weights, size, tokens: int, repeats: int) -> float:
  """Median seconds of one step, of a call that makes `tokens`."""
  state = _state(model.config, *size)
  seconds = []
  for _ in range(repeats + 1):
    begin = time.perf_counter()
    out, state = _advance(model, weights, state, tokens)
    jax.block_until_ready((out, state))
    seconds.append((time.perf_counter() - begin) / tokens)
  return sorted(seconds[1:])[repeats // 2]


def _advance(model, weights, state, tokens: int) -> tuple[Any, State]:
  stop_s = jnp.full(4, -1, jnp.int32)
  return advance(
    model,
    weights,
    state,
    Drawing(0.0),
    stop_s,
    count=jnp.int32(tokens),
    most=tokens,
  )


def _print_prefill(name, model, weights, length: int):
  """Reads one prompt twice; the second time is without compilation."""
  key = jax.random.key(1)
  vocabulary = model.config.vocab_size
  prompt = jax.random.randint(key, (1, length), 0, vocabulary)
  read = lambda: jax.block_until_ready(
    start(model, weights, prompt, key=key, max_tokens=64)
  )
  read()
  begin = time.perf_counter()
  state = read()
  seconds = time.perf_counter() - begin
  finite = bool(jnp.all(jnp.isfinite(state.logits)))
  print(
    f'{name}: a prompt of {length} tokens read in {seconds:.3f} s, '
    f'{length / seconds:.0f} tokens/s; finite logits: {finite}',
    flush=True,
  )
