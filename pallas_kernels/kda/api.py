"""Kimi Delta Attention: checks of the arguments and choice of implementation.

Legend: b batch, t time, h heads, k key width, v value width.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.kda import inputs as kda_inputs
from pallas_kernels.kda import mosaic_gpu, mosaic_tpu, reference, xla

LOWEST_BOUND = -5.0
_SAVE = ('inputs', 'state', 'state_and_t')
_UNBOUNDED = (
  'lower_bound=None leaves the decay unbounded, which overflows its dense '
  "tiles; use 'reference' (exact, one token at a time), or the bounded gate "
  'with lower_bound=-5.0.'
)


def kda(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  gate: jax.Array,
  beta: jax.Array,
  *,
  a_log: jax.Array | None = None,
  dt_bias: jax.Array | None = None,
  lower_bound: float | None = LOWEST_BOUND,
  scale: float | None = None,
  initial_state: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
  normalize_qk: bool = True,
  activate_gate: bool = True,
  activate_beta: bool = True,
  chunk_size: int = 64,
  save: str = 'inputs',
  implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Output and final state of Kimi Delta Attention over a sequence.

    q_t, k_t   divided by their L2 norm                     (normalize_qk)
    g_t        lower_bound * sigmoid(exp(a_log) (gate_t + dt_bias)), the log
               decay per key channel                        (activate_gate)
    beta_t     sigmoid(beta_t)                              (activate_beta)
    S~_t = Diag(exp(g_t)) S_{t-1}
    S_t = S~_t + beta_t k_t (v_t - k_t^T S~_t)^T
    o_t = scale * S_t^T q_t

  Source: Kimi Linear (arXiv 2510.26692), equation 1; the bounded gate is that
  of the Kimi K3 technical report. Differentiable in every floating argument.

  Args:
    q, k: [B, T, H, K], float32, bfloat16 or float64. Matrix products take
      operands of this dtype and accumulate in float32.
    v: [B, T, HV, V], dtype of q. HV is a multiple of H: value head i reads the
      query and key head i // (HV / H).
    gate: [B, T, HV, K]; with activate_gate=False already the natural log of
      the decay, in [lower_bound, 0].
    beta: [B, T, HV]; with activate_beta=False already a number, usually in
      (0, 1).
    a_log: [HV], or None for 0. Only with activate_gate.
    dt_bias: [HV, K], or None for 0. Only with activate_gate.
    lower_bound: in [-5, 0); None selects the unbounded gate of Kimi Linear,
      -exp(a_log) softplus(gate + dt_bias), and only the reference runs it.
    scale: factor of the output, K^-0.5 by default.
    initial_state: [B, HV, K, V] entering the first document; zeros if None.
    segment_ids: [B, T] int32. 0 is padding: such a row yields zeros, passes
      the state on and influences nothing, not even as NaN. A row whose id is
      not that of the latest row before it that is no padding starts from a
      zero state. Documents are isolated as long as they are finite: a NaN in
      one may reach those that share a chunk with it.
    chunk_size: tokens in a chunk, a multiple of 16.
    save: what is kept for the gradient. 'inputs' nothing more, 'state' also
      the state before every group of chunks, on Hopper before every chunk,
      'state_and_t' also each chunk's inverse [C, C], on Hopper with all that
      was made from it.
    implementation: 'mosaic_gpu', 'mosaic_tpu', 'xla', 'reference', or None for
      the best on this device.

  Returns:
    The output [B, T, HV, V] in the dtype of v, and the state [B, HV, K, V]
    leaving the last document, float32 (float64 for float64 inputs). T = 0
    returns the initial state.

  Raises:
    ValueError: shapes that do not fit, a bound or a chunk size out of range.
    TypeError: a dtype that is not allowed.
    NotImplementedError: `implementation` cannot run these arguments here.
  """
  raw = kda_inputs.Raw(q, k, v, gate, beta, a_log, dt_bias)
  settings = _checked(
    raw,
    initial_state,
    segment_ids,
    lower_bound=lower_bound,
    scale=scale,
    normalize_qk=normalize_qk,
    activate_gate=activate_gate,
    activate_beta=activate_beta,
    chunk_size=chunk_size,
    save=save,
  )
  name = dispatch.choose('kda', implementation, _candidates(raw, settings))
  wide = kda_inputs.wide(q.dtype)
  if q.shape[1] == 0:
    shape = (q.shape[0], v.shape[2], q.shape[3], v.shape[3])
    state = jnp.zeros(shape) if initial_state is None else initial_state
    return jnp.zeros(v.shape, v.dtype), state.astype(wide)
  if initial_state is not None:
    initial_state = initial_state.astype(wide)
  elif name != 'mosaic_gpu':  # whose scans need nothing to start from zero
    initial_state = kda_inputs.zero_state(raw)
  run = {
    'mosaic_gpu': mosaic_gpu.chunked,
    'mosaic_tpu': mosaic_tpu.chunked,
    'xla': xla.chunked,
    'reference': reference.recurrence,
  }[name]
  arguments = (raw, initial_state, segment_ids)
  return run(*kda_inputs.equally_varying(arguments), settings)


def _checked(
  raw: kda_inputs.Raw, initial_state, segment_ids, **options
) -> kda_inputs.Settings:
  """The static choices, once arrays and options are known to be allowed."""
  options = {'scale': None, 'chunk_size': 64, 'save': 'inputs'} | options
  flags = ('normalize_qk', 'activate_gate', 'activate_beta')
  options = {'lower_bound': LOWEST_BOUND} | dict.fromkeys(flags, True) | options
  settings = kda_inputs.Settings(**options)
  check_arrays(raw, initial_state, settings.activate_gate)
  _check_segments(segment_ids, raw.q.shape[:2])
  check_bound(settings.lower_bound)
  if settings.chunk_size < 16 or settings.chunk_size % 16:
    raise ValueError(
      f'chunk_size={settings.chunk_size} is not a positive multiple of 16; '
      'use 64.'
    )
  if settings.save not in _SAVE:
    raise ValueError(
      f'save={settings.save!r} does not exist; choose one of {_SAVE}.'
    )
  scale = raw.q.shape[-1] ** -0.5 if settings.scale is None else settings.scale
  return settings._replace(scale=float(scale))


def _candidates(
  raw: kda_inputs.Raw, settings: kda_inputs.Settings
) -> list[dispatch.Candidate]:
  unbounded = _UNBOUNDED if settings.lower_bound is None else None
  hopper = mosaic_gpu.refusal(*raw[:5], lower_bound=settings.lower_bound)
  return [
    ('mosaic_gpu', hopper),
    ('mosaic_tpu', mosaic_tpu.refusal(raw, settings)),
    ('xla', unbounded),
    ('reference', None),
  ]


def check_bound(lower_bound: float | None):
  """Raises ValueError for a bound that the dense tiles cannot represent."""
  if lower_bound is not None and not LOWEST_BOUND <= lower_bound < 0:
    raise ValueError(
      f'lower_bound={lower_bound} is outside [{LOWEST_BOUND}, 0): 16 tokens '
      'of decay must fit the range of float32. Use -5.0, or None for the '
      'unbounded gate of Kimi Linear.'
    )


def check_arrays(raw: kda_inputs.Raw, initial_state, activate_gate: bool):
  """Raises ValueError or TypeError for arrays that do not fit together."""
  for name, array, rank in (('q', raw.q, 4), ('v', raw.v, 4)):
    if array.ndim != rank:
      raise ValueError(
        f'{name} has shape {array.shape}; it must have {rank} axes, '
        '[batch, time, heads, width].'
      )
  batch, length, heads, key_dim = raw.q.shape
  value_heads, value_dim = raw.v.shape[2:]
  if heads == 0 or value_heads % heads:
    raise ValueError(
      f'v has {value_heads} heads and q has {heads}; the heads of v must be a '
      'multiple of those of q.'
    )
  gated = (batch, length, value_heads, key_dim)
  _check('k', raw.k, raw.q.shape, 'that of q')
  _check('v', raw.v, (batch, length, value_heads, value_dim), '[B, T, HV, V]')
  _check('gate', raw.gate, gated, '[B, T, HV, K]')
  _check('beta', raw.beta, gated[:3], '[B, T, HV]')
  _check('a_log', raw.a_log, (value_heads,), '[HV]')
  _check('dt_bias', raw.dt_bias, (value_heads, key_dim), '[HV, K]')
  state = (batch, value_heads, key_dim, value_dim)
  _check('initial_state', initial_state, state, '[B, HV, K, V]')
  if not raw.q.dtype == raw.k.dtype == raw.v.dtype:
    raise TypeError(
      f'q, k and v have dtypes {raw.q.dtype}, {raw.k.dtype}, {raw.v.dtype}; '
      'cast them to one dtype, bfloat16 or float32.'
    )
  if raw.q.dtype == jnp.float16:
    raise TypeError(
      'q, k and v are float16, whose range ends at exp(11); decayed tiles '
      'need exp(40). Use bfloat16 or float32.'
    )
  if not activate_gate and not (raw.a_log is None and raw.dt_bias is None):
    raise ValueError(
      'activate_gate=False takes gate as the log decay itself; a_log and '
      'dt_bias must then be None.'
    )


def _check(name: str, array, shape: tuple[int, ...], meaning: str):
  if array is None:
    return
  if array.shape != shape:
    raise ValueError(
      f'{name} has shape {array.shape}; it must be {shape}, {meaning}.'
    )
  if not jnp.issubdtype(array.dtype, jnp.floating):
    raise TypeError(f'{name} is {array.dtype}; it must be floating point.')


def _check_segments(segment_ids, shape: tuple[int, int]):
  if segment_ids is None:
    return
  if segment_ids.shape != shape:
    raise ValueError(
      f'segment_ids has shape {segment_ids.shape}; it must be {shape}, [B, T].'
    )
  if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
    raise TypeError(f'segment_ids is {segment_ids.dtype}; it must be int32.')


def affine_summary(
  k: jax.Array,
  v: jax.Array,
  gate: jax.Array,
  beta: jax.Array,
  *,
  a_log: jax.Array | None = None,
  dt_bias: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
  implementation: str | None = None,
  **options,
) -> tuple[jax.Array, jax.Array]:
  """Transition and offset of a token range: S_out = transition S_in + offset.

  The state is affine in the one that entered. Values [v | 0] on an entering
  state [0 | I] yield both parts in one pass of the recurrence over K + V
  columns; ranges compose as (M2 M1, M2 b1 + b2). Over a range in which a
  document begins the transition is 0.

  Args:
    k, v, gate, beta, a_log, dt_bias, segment_ids, implementation: as for `kda`.
    **options: further keywords of `kda` but `initial_state` and `scale`.

  Returns:
    transition [B, HV, K, K] and offset [B, HV, K, V], dtype of a state.

  Raises:
    As `kda`.
  """
  raw = kda_inputs.Raw(k, k, v, gate, beta, a_log, dt_bias)
  settings = _checked(raw, None, segment_ids, **options)
  name = dispatch.choose('kda', implementation, _candidates(raw, settings))
  if name == 'mosaic_tpu' and k.shape[1]:
    arguments = kda_inputs.equally_varying((raw, segment_ids))
    return mosaic_tpu.affine_summary(*arguments, settings)
  run = functools.partial(
    kda,
    k,
    k,
    gate=gate,
    beta=beta,
    a_log=a_log,
    dt_bias=dt_bias,
    segment_ids=segment_ids,
    implementation=name,
    **options,
  )
  key_dim, value_dim = k.shape[-1], v.shape[-1]
  if name == 'mosaic_gpu':  # its values are at most 128 wide
    none = jnp.zeros((*v.shape[:3], key_dim), v.dtype)
    zeros_bhkk = kda_inputs.zero_state(raw._replace(v=none))
    identity = zeros_bhkk + jnp.eye(key_dim, dtype=zeros_bhkk.dtype)
    return run(v=none, initial_state=identity)[1], run(v=v)[1]
  padded = jnp.pad(v, [(0, 0)] * 3 + [(0, key_dim)])
  zeros_bhkv = kda_inputs.zero_state(raw._replace(v=padded))
  column = jnp.arange(value_dim + key_dim) - value_dim
  identity = (column == jnp.arange(key_dim)[:, None]).astype(zeros_bhkv.dtype)
  _, state = run(v=padded, initial_state=zeros_bhkv + identity)
  return state[..., value_dim:], state[..., :value_dim]
