"""Configuration of the library: frozen dataclasses and one strict conversion.

Every size, count and 1-based layer list of the model comes from here; nothing
else in the library reads flags. `from_dict` turns nested dictionaries (an
`ml_collections.ConfigDict`'s `to_dict()`, or JSON) into these classes and
names the nearest valid field when one is unknown.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from trimoe_jax.data.sources import DataConfig
from trimoe_jax.data.stages import StageConfig
from trimoe_jax.model.vision_config import VisionConfig
from trimoe_jax.optim.config import OptimConfig

Remat = Literal['none', 'block', 'full']
Balance = Literal['quantile', 'sign', 'aux_loss', 'none']
Mixer = Literal['kda', 'mla']
Ffn = Literal['dense', 'moe']
Dispatch = Literal['auto', 'replicated', 'ring', 'all_to_all']


@dataclasses.dataclass(frozen=True)
class KdaConfig:
  """Kimi Delta Attention. `value_heads` may be a multiple of `heads`."""

  heads: int = 4
  key_dim: int = 32
  value_dim: int = 32
  value_heads: int | None = None  # None: as many as `heads`
  conv_width: int = 4
  gate_rank: int = 32
  lower_bound: float = -5.0
  chunk_size: int = 64
  implementation: str | None = None  # None: chosen for the device

  @property
  def state_heads(self) -> int:
    return self.value_heads or self.heads

  def __post_init__(self):
    if self.state_heads % self.heads:
      raise ValueError(
        f'kda.value_heads={self.value_heads} is not a multiple of '
        f'kda.heads={self.heads}; choose a multiple, or None for {self.heads}.'
      )
    if not -5.0 <= self.lower_bound < 0.0:
      raise ValueError(
        f'kda.lower_bound={self.lower_bound} is outside [-5, 0); the dense '
        'intra-chunk tiles need a bounded log-decay. Use -5.0.'
      )
    if self.chunk_size % 16 or self.chunk_size < 16:
      raise ValueError(
        f'kda.chunk_size={self.chunk_size} is not a positive multiple of 16; '
        'use 64 or 128.'
      )


@dataclasses.dataclass(frozen=True)
class MlaConfig:
  """Gated multi-head latent attention without position encoding."""

  heads: int = 4
  query_rank: int = 32
  kv_rank: int = 16
  nope_dim: int = 32
  shared_dim: int = 16  # the 64-wide slice of K3 that is never rotated
  value_dim: int = 32
  block_size: int = 512  # tokens in one block of the blockwise softmax
  # 'tokamax', 'cudnn', 'splash' or 'xla'; None: the best that rounds no output.
  implementation: str | None = None

  @property
  def query_dim(self) -> int:
    return self.nope_dim + self.shared_dim


@dataclasses.dataclass(frozen=True)
class MoeConfig:
  """Stable LatentMoE: routed experts work in a latent of width `latent`."""

  experts: int = 16
  top_k: int = 2
  shared_experts: int = 1
  hidden: int = 32
  latent: int = 32
  weight_scale: float = 1.0
  dispatch: Dispatch = 'auto'  # how tokens and experts meet on several devices
  capacity: float | None = None  # of 'all_to_all'; None: never drops a token

  def __post_init__(self):
    if not 0 < self.top_k < self.experts:
      raise ValueError(
        f'moe.top_k={self.top_k} must be at least 1 and smaller than '
        f'moe.experts={self.experts}: the cutoff is the (top_k+1)-th score.'
      )
    if self.capacity is None:
      return
    if self.dispatch != 'all_to_all':
      raise ValueError(
        f'moe.capacity={self.capacity} limits the buffers of all_to_all and '
        f"moe.dispatch={self.dispatch!r}; set moe.dispatch='all_to_all' or "
        'moe.capacity=None.'
      )
    if self.capacity < 1.0:
      raise ValueError(
        f'moe.capacity={self.capacity} would drop tokens at perfect balance; '
        'use at least 1, such as 1.25, or None to drop none.'
      )


@dataclasses.dataclass(frozen=True)
class RouterConfig:
  """How expert load is balanced; the default is quantile balancing as in K3."""

  balance: Balance = 'quantile'
  estimator: Literal['uniform', 'exact', 'log_edges'] = 'uniform'
  cutoff: Literal['kplus1', 'midpoint'] = 'kplus1'
  timing: Literal['lagged', 'in_batch'] = 'lagged'
  space: Literal['sigmoid', 'logit'] = 'sigmoid'
  num_bins: int = 1000
  ema: float = 0.0
  sign_rate: float = 1e-3
  aux_weight: float = 1e-2
  warm_start: int = 4  # forward passes that balance before the first step

  def __post_init__(self):
    if self.num_bins < 2:
      raise ValueError(
        f'router.num_bins={self.num_bins}; a quantile needs at least 2 bins.'
      )
    if self.warm_start < 0:
      raise ValueError(
        f'router.warm_start={self.warm_start} is negative; give a number of '
        'forward passes, such as 4, or 0 to start from zero biases.'
      )
    if not 0.0 <= self.ema < 1.0:
      raise ValueError(f'router.ema={self.ema} is outside [0, 1).')


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The model. Layer numbers in `mla_layers` are 1-based, as released."""

  vocab_size: int = 512
  width: int = 128
  layers: int = 8
  mla_layers: tuple[int, ...] = (4, 8)
  dense_layers: int = 1  # the first layers carry a dense MLP instead of experts
  dense_hidden: int = 512
  residual_block: int = 4  # decoder layers in one block of attention residuals
  norm_eps: float = 1e-5
  latent_norm_eps: float = 1e-6  # MLA's query and key-value latent norms
  situ_beta: float = 4.0
  situ_linear_beta: float = 25.0
  init_std: float = 0.02
  dtype: str = 'bfloat16'
  remat: Remat = 'none'
  kda: KdaConfig = dataclasses.field(default_factory=KdaConfig)
  mla: MlaConfig = dataclasses.field(default_factory=MlaConfig)
  moe: MoeConfig = dataclasses.field(default_factory=MoeConfig)
  router: RouterConfig = dataclasses.field(default_factory=RouterConfig)
  vision: VisionConfig | None = None  # None: text only

  def __post_init__(self):
    wrong = [i for i in self.mla_layers if not 1 <= i <= self.layers]
    if wrong:
      raise ValueError(
        f'mla_layers={self.mla_layers} names layers {wrong}, but layers are '
        f'numbered 1 to {self.layers}.'
      )
    if not 0 <= self.dense_layers < self.layers:
      raise ValueError(
        f'dense_layers={self.dense_layers} must lie in [0, {self.layers - 1}]: '
        'at least one layer has experts.'
      )
    if self.residual_block < 1:
      raise ValueError(
        f'residual_block={self.residual_block}; a block has at least 1 layer.'
      )
    if self.dtype not in ('bfloat16', 'float32', 'float64'):
      raise ValueError(
        f'dtype={self.dtype!r}; use bfloat16, float32 or float64.'
      )

  @property
  def scans_layers(self) -> bool:
    """Whether equal layers are stacked and scanned; see `layout.Unrolled`."""
    return True

  def mixer(self, layer: int) -> Mixer:
    """The mixer of 0-based `layer`."""
    return 'mla' if layer + 1 in self.mla_layers else 'kda'

  def ffn(self, layer: int) -> Ffn:
    """The feed-forward part of 0-based `layer`."""
    return 'dense' if layer < self.dense_layers else 'moe'

  @property
  def moe_layers(self) -> int:
    return self.layers - self.dense_layers

  @property
  def sources(self) -> int:
    """Sources of the output mix: every block sum and the embedding."""
    return -(-self.layers // self.residual_block) + 1


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """`chunk` tokens have logits at once; `z_loss` 1e-4 is usual, 0 is none."""

  chunk: int = 2048
  z_loss: float = 0.0


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Devices along each mesh axis; the product is the number of devices."""

  pipe: int = 1
  data: int = 1
  context: int = 1
  expert: int = 1
  tensor: int = 1

  def sizes(self) -> dict[str, int]:
    return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
  """`chunks` of layers in one stage of mesh.pipe; more shrink the bubble.

  The bubble is (pipe - 1) / (micro_batches * chunks + pipe - 1) of a step.
  """

  chunks: int = 1

  def __post_init__(self):
    if self.chunks < 1:
      raise ValueError(
        f'pipeline.chunks={self.chunks}; a stage has at least 1 chunk.'
      )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """Held-out measurements at the end of a stage, and the sampled text."""

  batches: int = 4  # of held-out rows, at the stage's context
  batch_tokens: int = 16384  # in one such batch
  every_steps: int | None = None  # None: at stage ends only
  needles: int = 16  # recall questions at each context length
  sample_prompt: str = 'def '
  sample_tokens: int = 256
  temperature: float = 0.8


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """`keep` of the regular checkpoints stay; those of stage ends always do."""

  every_steps: int | None = 100  # None: at stage ends only
  keep: int = 2


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """A whole run. Everything that decides its numbers is in here."""

  name: str = 'run'
  seed: int = 0
  model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
  data: DataConfig = dataclasses.field(default_factory=DataConfig)
  stages: tuple[StageConfig, ...] = ()
  optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
  loss: LossConfig = dataclasses.field(default_factory=LossConfig)
  mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
  pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)
  eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
  checkpoint: CheckpointConfig = dataclasses.field(
    default_factory=CheckpointConfig
  )
  log_every: int = 1
  profile_steps: tuple[int, int] | None = None  # [first, last] traced once

  def __post_init__(self):
    if not self.stages:
      raise ValueError(
        'stages is empty; give at least one, such as '
        'dict(context=1024, batch=8, tokens=1_000_000).'
      )
    router = self.model.router
    split = [s for s in self.stages if s.micro_batches > 1]
    if router.estimator == 'exact' and split:
      raise ValueError(
        "router.estimator='exact' needs all margins of a step at once and "
        f'stage.micro_batches={split[0].micro_batches}; use 1 micro-batch or '
        "the 'uniform' or 'log_edges' estimator."
      )
    _check_divisible(self)
    _check_pipeline(self)
    _check_images(self)


def _check_divisible(config: TrainConfig):
  """Refuses sizes that the mesh cannot split evenly."""
  mesh, model = config.mesh, config.model
  uneven = [
    ('model.kda.heads', model.kda.heads, 'tensor', mesh.tensor),
    ('model.mla.heads', model.mla.heads, 'tensor', mesh.tensor),
    ('model.vocab_size', model.vocab_size, 'tensor', mesh.tensor),
    ('model.moe.experts', model.moe.experts, 'expert', mesh.expert),
  ]
  for i, stage in enumerate(config.stages):
    rows = stage.batch // stage.micro_batches
    shards = mesh.data * mesh.expert
    where = f'stages[{i}]'
    uneven.append((f'{where}.batch/micro_batches', rows, 'data*expert', shards))
    uneven.append((f'{where}.context', stage.context, 'context', mesh.context))
  for name, size, axis, ways in uneven:
    if size % ways:
      raise ValueError(
        f"{name}={size} is not divisible by the mesh's {axis} ({ways}); "
        f'choose a multiple of {ways} or a smaller mesh.'
      )


def _check_pipeline(config: TrainConfig):
  """Refuses what stages cannot hold, or cannot be kept busy with."""
  stages, layers = config.mesh.pipe, config.model.layers
  if stages == 1:
    return
  if config.model.router.estimator == 'exact':
    raise ValueError(
      "router.estimator='exact' keeps the margins of every token, and stages "
      "only add statistics up; use the 'uniform' or 'log_edges' estimator, or "
      'mesh.pipe=1.'
    )
  chunks = stages * config.pipeline.chunks
  if chunks > layers:
    raise ValueError(
      f'mesh.pipe={stages} stages of pipeline.chunks={config.pipeline.chunks} '
      f'are {chunks} chunks of layers and the model has {layers} layers; '
      f'choose at most {layers} chunks.'
    )
  for i, stage in enumerate(config.stages):
    if stage.micro_batches < stages:
      raise ValueError(
        f'stages[{i}].micro_batches={stage.micro_batches} cannot fill '
        f'mesh.pipe={stages} stages; choose a multiple of {stages}.'
      )


def _check_images(config: TrainConfig):
  """Refuses images where nothing can look at them."""
  for i, stage in enumerate(config.stages):
    if stage.patches and config.model.vision is None:
      raise ValueError(
        f'stages[{i}].patches={stage.patches}, but the model has no vision '
        'tower; set model.vision or stage.patches=0.'
      )
    if stage.patches and config.mesh.pipe > 1:
      raise ValueError(
        f'stages[{i}].patches={stage.patches} with mesh.pipe='
        f'{config.mesh.pipe}: a pipeline does not train on images yet; use '
        'mesh.pipe=1 and more of mesh.data, or stage.patches=0.'
      )


def from_dict(cls: type, values: Mapping[str, Any], path: str = '') -> Any:
  """An instance of the configuration class `cls` from nested dictionaries.

  Args:
    cls: one of the dataclasses above.
    values: field values; nested mappings for nested dataclasses, sequences for
      tuples. Fields left out keep their defaults.
    path: prefix of field names in messages.

  Raises:
    ValueError: an unknown field (the nearest valid one is named) or a value
      that the class refuses.
    TypeError: a value of the wrong type.
  """
  hints = typing.get_type_hints(cls)
  known = [field.name for field in dataclasses.fields(cls)]
  for name in values:
    if name not in known:
      near = difflib.get_close_matches(name, known, 1, 0.0)[0]
      raise ValueError(
        f'{path}{name} is not a field of {cls.__name__}; did you mean '
        f'{path}{near}? It has {", ".join(known)}.'
      )
  return cls(
    **{
      name: _convert(hints[name], value, f'{path}{name}')
      for name, value in values.items()
    }
  )


def _convert(kind: Any, value: Any, path: str) -> Any:
  """`value` as the type `kind`; only int is coerced, to float."""
  origin, options = typing.get_origin(kind), typing.get_args(kind)
  if origin in (typing.Union, types.UnionType):
    if value is None and type(None) in options:
      return None
    (kind,) = [option for option in options if option is not type(None)]
    return _convert(kind, value, path)
  if dataclasses.is_dataclass(kind):
    if isinstance(value, Mapping):
      return from_dict(kind, value, f'{path}.')
    raise _wrong_type(path, value, f'a dictionary of {kind.__name__} fields')
  if origin is Literal:
    if value in options:
      return value
    near = difflib.get_close_matches(str(value), map(str, options), 1, 0.0)
    raise ValueError(
      f'{path}={value!r}; choose one of {options}. Nearest: {near[0]!r}.'
    )
  if origin is tuple:
    if isinstance(value, Sequence) and not isinstance(value, str):
      inner = options[:1] * len(value) if Ellipsis in options else options
      if len(inner) == len(value):
        pairs = enumerate(zip(inner, value))
        return tuple(_convert(k, v, f'{path}[{i}]') for i, (k, v) in pairs)
    raise _wrong_type(path, value, f'a sequence like {kind}')
  if kind is float and isinstance(value, int) and not isinstance(value, bool):
    return float(value)
  if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
    return value
  raise _wrong_type(path, value, kind.__name__)


def _wrong_type(path: str, value: Any, wanted: str) -> TypeError:
  return TypeError(
    f'{path}={value!r} is a {type(value).__name__}; give {wanted}.'
  )
