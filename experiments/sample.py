"""Continues a prompt with a trained model.

    python -m experiments.sample --workdir=runs/tiny --prompt='def '
    python -m experiments.sample --checkpoint=DIR --tokenizer=tokenizer.json \\
        --prompt='Once' --temperature=0

A run brings its tokenizer; a folder in the released layout needs one named.
"""

import sys

import jax
import numpy as np
from absl import app, flags, logging

from trimoe_jax.data import load_tokenizer
from trimoe_jax.interop import hf, runs
from trimoe_jax.model.model import Model
from trimoe_jax.run import read_config
from trimoe_jax.sampling import generate

WORKDIR = flags.DEFINE_string('workdir', None, 'A run to sample from.')
STEP = flags.DEFINE_integer(
  'step', None, 'Of the run; the latest if not given.'
)
CHECKPOINT = flags.DEFINE_string(
  'checkpoint', None, 'A folder in the released layout to sample from.'
)
TOKENIZER = flags.DEFINE_string(
  'tokenizer', 'bytes', "'bytes' or a tokenizer.json; only with --checkpoint."
)
PROMPT = flags.DEFINE_multi_string(
  'prompt', None, 'Text to continue; give several to continue them together.'
)
MAX_TOKENS = flags.DEFINE_integer('max_tokens', 256, 'Tokens to make at most.')
TEMPERATURE = flags.DEFINE_float('temperature', 0.8, '0 is greedy.')
TOP_P = flags.DEFINE_float(
  'top_p', None, 'Draw from the most probable tokens that reach this sum.'
)
SEED = flags.DEFINE_integer('seed', 0, 'Decides the draws.')


def load():
  """The checkpoint that the flags name, and its tokenizer."""
  if (WORKDIR.value is None) == (CHECKPOINT.value is None):
    raise ValueError('give either --workdir or --checkpoint.')
  if WORKDIR.value is not None:
    name = read_config(WORKDIR.value).data.tokenizer
    return runs.load(WORKDIR.value, STEP.value), load_tokenizer(name)
  checkpoint = hf.load(CHECKPOINT.value)
  tokenizer = load_tokenizer(TOKENIZER.value)
  size = checkpoint.config.vocab_size
  if tokenizer.vocab_size > size:
    raise ValueError(
      f'--tokenizer={TOKENIZER.value} has {tokenizer.vocab_size} tokens and '
      f'the model {size}; name the tokenizer it was trained with.'
    )
  params, router = jax.device_put((checkpoint.params, checkpoint.router))
  return checkpoint._replace(params=params, router=router), tokenizer


def left_padded(prompts):
  """Token rows of one length, and which tokens are real."""
  width = max(map(len, prompts))
  tokens = np.zeros((len(prompts), width), np.int32)
  valid = np.zeros(tokens.shape, bool)
  for row, prompt in enumerate(prompts):
    tokens[row, width - len(prompt) :] = prompt
    valid[row, width - len(prompt) :] = True
  return tokens, valid


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments {argv[1:]}.')
  try:
    checkpoint, tokenizer = load()
    prompts = [[tokenizer.bos_id, *tokenizer.encode(p)] for p in PROMPT.value]
    tokens, valid = left_padded(prompts)
    out = generate(
      Model(checkpoint.config),
      checkpoint.params,
      checkpoint.router,
      tokens,
      valid=valid,
      max_tokens=MAX_TOKENS.value,
      temperature=TEMPERATURE.value,
      top_p=TOP_P.value,
      key=jax.random.key(SEED.value),
      stop=tokenizer.eos_id,
    )
  except (ValueError, OSError) as error:
    sys.exit(f'error: {error}')
  for prompt, row in zip(PROMPT.value, np.asarray(out)):
    print(prompt + tokenizer.decode(row))


if __name__ == '__main__':
  flags.mark_flag_as_required('prompt')
  logging.set_verbosity(logging.ERROR)
  app.run(main)
