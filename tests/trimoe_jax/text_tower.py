"""An oracle: K3's text tower in NumPy float64, from the released tensors.

It shares no code with the library. Each detail that can be wrong is one branch.
"""

import functools
import json
import pathlib
import types

import ml_dtypes  # noqa: F401  NumPy learns bfloat16 from it
import numpy as np
from safetensors.numpy import load_file

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'tiny_checkpoint'


def sigmoid(x):
  return 0.5 * (1 + np.tanh(x / 2))


def normalize(x, eps):
  return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def softmax(x, axis):
  e = np.exp(x - x.max(axis=axis, keepdims=True))
  return e / e.sum(axis=axis, keepdims=True)


class Tower:
  """Logits by the equations; `wrong` names the detail that is not K3's."""

  def __init__(self, wrong=None):
    config = json.loads((GOLDEN / 'config.json').read_text())['text_config']
    linear = config.pop('linear_attn_config')
    self.c = types.SimpleNamespace(**config, **linear)
    self.wrong = wrong
    self.load = {}
    self.outputs = {}

  def logits(self, ids, weights):
    """[B, T, vocabulary] of ids [B, T]."""
    at, block = (
      self.view(weights, 'language_model.'),
      self.c.attn_res_block_size,
    )
    prefix, blocks = at('model.embed_tokens.weight')[ids], []
    for i in range(self.c.num_hidden_layers):
      layer = self.view(weights, f'language_model.model.layers.{i}.')
      attention = self.view(weights, layer.prefix + 'self_attn.')
      h = prefix
      if blocks:
        h = self.mix([*blocks, prefix], layer, 'self_attention_res')
      if i % block == 0:
        blocks = [*blocks, prefix]
        if self.wrong != 'prefix not reset':
          prefix = np.zeros_like(prefix)
      h = self.norm(h, layer('input_layernorm.weight'))
      full = i + 1 in self.c.full_attn_layers
      a = (self.mla if full else self.kda)(h, attention)
      prefix = prefix + a
      h = self.mix([*blocks, prefix], layer, 'mlp_res')
      h = self.norm(h, layer('post_attention_layernorm.weight'))
      if i < self.c.first_k_dense_replace:
        m = self.mlp(h, layer, 'mlp.')
      else:
        m = self.moe(h, layer, i)
      prefix = prefix + m
    h = prefix
    if self.wrong != 'output mix skipped':
      h = self.mix([*blocks, prefix], at, 'model.output_attn_res')
    return self.norm(h, at('model.norm.weight')) @ at('lm_head.weight').T

  @staticmethod
  def view(weights, prefix):
    """A function from the rest of a tensor's name to its values."""
    get = lambda name: weights[prefix + name]
    get.prefix = prefix
    return get

  def norm(self, x, gain, eps=None):
    return normalize(x, eps or self.c.rms_norm_eps) * gain

  def mix(self, sources, at, name):
    values = np.stack(sources)
    keys = normalize(values, self.c.rms_norm_eps)
    query = at(f'{name}_proj.weight')[0]
    if self.wrong != 'gain dropped':
      query = query * at(f'{name}_norm.weight')
    p = softmax(keys @ query, axis=0)
    if self.wrong == 'normalised values':
      values = keys
    return np.einsum('mbt,mbtd->btd', p, values)

  def heads(self, x, count=None):
    return x.reshape(*x.shape[:2], count or self.c.num_heads, -1)

  def kda(self, x, at):
    q, k, v = (
      self.heads(
        self.conv(x @ at(f'{n}_proj.weight').T, at(f'{n}_conv1d.weight'))
      )
      for n in 'qkv'
    )
    q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    decay = np.exp(self.log_decay(x, at))
    beta = sigmoid(x @ at('b_proj.weight').T)
    state = np.zeros((*decay.shape[:1], *decay.shape[2:], v.shape[-1]))
    o = np.zeros_like(v)
    for t in range(x.shape[1]):
      decayed = decay[:, t, :, :, None] * state
      read = state if self.wrong == 'undecayed delta' else decayed
      error = v[:, t] - np.einsum('bhk,bhkv->bhv', k[:, t], read)
      write = np.einsum('bh,bhk,bhv->bhkv', beta[:, t], k[:, t], error)
      state = decayed + write
      o[:, t] = np.einsum('bhk,bhkv->bhv', q[:, t], state)
    o = self.norm(o * self.c.head_dim**-0.5, at('o_norm.weight'))
    gate = self.heads(x @ at('g_proj.weight').T)
    open_ = (
      gate * sigmoid(gate) if self.wrong == 'swish gate' else sigmoid(gate)
    )
    return (o * open_).reshape(*x.shape[:2], -1) @ at('o_proj.weight').T

  def conv(self, u, taps):
    width = taps.shape[-1]
    padded = np.pad(u, ((0, 0), (width - 1, 0), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, width, axis=1)
    y = np.einsum('btcw,cw->btc', windows, taps[:, 0])
    return y * sigmoid(y)

  def log_decay(self, x, at):
    low = x @ at('f_a_proj.weight').T
    z = self.heads(low @ at('f_b_proj.weight').T + at('dt_bias'))
    bound, padded = self.c.gate_lower_bound, at('A_log')
    a = np.exp(padded[: self.c.num_heads, None])
    if self.wrong == 'A_log per channel':
      a = np.exp(padded)
    if self.wrong == 'softplus-clamp gate':
      return np.maximum(-a * np.logaddexp(0, z), bound)
    if self.wrong == 'exp(A) outside the sigmoid':
      return bound * a * sigmoid(z)
    return bound * sigmoid(a * z)

  def mla(self, x, at):
    c, nope = self.c, self.c.qk_nope_head_dim
    low = self.norm(
      x @ at('q_a_proj.weight').T, at('q_a_layernorm.weight'), 1e-6
    )
    q = self.heads(low @ at('q_b_proj.weight').T, c.num_attention_heads)
    latent = x @ at('kv_a_proj_with_mqa.weight').T
    latent, shared = np.split(latent, [c.kv_lora_rank], axis=-1)
    latent = self.norm(latent, at('kv_a_layernorm.weight'), 1e-6)
    kv = self.heads(latent @ at('kv_b_proj.weight').T, c.num_attention_heads)
    scores = np.einsum('bthn,bshn->bhts', q[..., :nope], kv[..., :nope])
    if self.wrong != 'shared slice dropped':
      scores = scores + np.einsum('bthe,bse->bhts', q[..., nope:], shared)
    wide = nope if self.wrong == 'MLA scale' else nope + c.qk_rope_head_dim
    later = np.triu(np.ones(scores.shape[2:], bool), 1)
    p = softmax(np.where(later, -np.inf, scores * wide**-0.5), axis=-1)
    o = np.einsum('bhts,bshv->bthv', p, kv[..., nope:])
    o = o.reshape(*x.shape[:2], -1) * sigmoid(x @ at('g_proj.weight').T)
    return o @ at('o_proj.weight').T

  def situ(self, gate, up):
    b1, b2 = self.c.activation_situ_beta, self.c.activation_situ_linear_beta
    capped = up if self.wrong == 'no up-cap' else b2 * np.tanh(up / b2)
    return b1 * np.tanh(gate / b1) * sigmoid(gate) * capped

  def mlp(self, x, at, name):
    gate, up, down = (
      at(f'{name}{part}_proj.weight').T for part in ('gate', 'up', 'down')
    )
    return self.situ(x @ gate, x @ up) @ down

  def moe(self, x, layer, number):
    name = 'block_sparse_moe.'
    at = lambda rest: layer(name + rest)
    scores = sigmoid(x @ at('gate.weight').T)
    biased = scores + at('gate.e_score_correction_bias')
    chosen = np.argsort(-biased, axis=-1)[..., : self.c.num_experts_per_token]
    used = biased if self.wrong == 'biased router weights' else scores
    weights = np.zeros_like(scores)
    np.put_along_axis(
      weights, chosen, np.take_along_axis(used, chosen, -1), axis=-1
    )
    weights /= weights.sum(-1, keepdims=True) + 1e-20
    self.load[number] = (weights != 0).sum((0, 1))
    z = x @ at('routed_expert_down_proj.weight').T
    u = np.zeros_like(z)
    for e in range(self.c.num_experts):
      w1, w2, w3 = (at(f'experts.{e}.w{n}.weight').T for n in (1, 2, 3))
      u += weights[..., e, None] * (self.situ(z @ w1, z @ w3) @ w2)
    if self.wrong != 'no latent norm':
      u = self.norm(u, at('routed_expert_norm.weight'))
    routed = u @ at('routed_expert_up_proj.weight').T
    return routed + self.mlp(x, at, 'shared_experts.')


@functools.cache
def weights():
  """Every text tensor in float64, experts unpacked."""
  stored = {}
  for path in sorted(GOLDEN.glob('*.safetensors')):
    stored.update(load_file(path))
  grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
  grid = np.concatenate([grid, -grid])
  found = {}
  for name, x in stored.items():
    if name.endswith('_packed'):
      codes = np.empty((x.shape[0], 2 * x.shape[1]), np.uint8)
      codes[:, 0::2], codes[:, 1::2] = x % 16, x // 16
      scale = stored[name.replace('_packed', '_scale')].astype(float)
      scale = np.repeat(2.0 ** (scale - 127), 32, axis=1)
      found[name.removesuffix('_packed')] = grid[codes] * scale
    elif not name.endswith('_scale'):
      found[name] = x.astype(np.float64)
  return found


@functools.cache
def golden():
  return dict(np.load(GOLDEN / 'golden.npz'))
