"""Continues prompts with a trained model.

    python -m experiments.sample --workdir=runs/tiny --prompt='def '
    python -m experiments.sample --checkpoint=DIR --tokenizer=tokenizer.json \\
        --prompt='Once' --temperature=0 --stream
    python -m experiments.sample --workdir=runs/vision \\
        --prompt='<|media_pad|>What is this?' --image=photo.png

A run brings its tokenizer; a folder in the released layout needs one named.
`<|media_pad|>` in a prompt stands for the next --image, and a single prompt
without it has its images in front. Several prompts are continued together.
"""

import sys

import jax
import numpy as np
from absl import app, flags, logging

from trimoe_jax.data import images, load_tokenizer
from trimoe_jax.interop import hf, runs
from trimoe_jax.model.model import Model
from trimoe_jax.run import read_config
from trimoe_jax.sampling.sample import SEGMENT, stream
from trimoe_jax.sampling.text import read_prompts, text_of

WORKDIR = flags.DEFINE_string('workdir', None, 'A run to sample from.')
STEP = flags.DEFINE_integer('step', None, 'Of the run; None: the latest.')
CHECKPOINT = flags.DEFINE_string(
  'checkpoint', None, 'A folder in the released layout to sample from.'
)
TOKENIZER = flags.DEFINE_string(
  'tokenizer', 'bytes', "'bytes' or a tokenizer.json; only with --checkpoint."
)
PROMPT = flags.DEFINE_multi_string(
  'prompt', None, 'Text to continue; give several to continue them together.'
)
IMAGE = flags.DEFINE_multi_string(
  'image', [], 'A file for the next placeholder of the prompts.'
)
MAX_TOKENS = flags.DEFINE_integer('max_tokens', 256, 'Tokens to make at most.')
TEMPERATURE = flags.DEFINE_float('temperature', 0.8, '0 is greedy.')
TOP_P = flags.DEFINE_float(
  'top_p', None, 'Draw from the fewest tokens that reach this probability.'
)
TOP_K = flags.DEFINE_integer('top_k', None, 'Draw from so many at most.')
SEED = flags.DEFINE_integer('seed', 0, 'Decides the draws.')
STREAM = flags.DEFINE_bool('stream', False, 'Print tokens as they are made.')
EVERY = 8  # tokens between two prints of a stream


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


def sample():
  """Prints what the flags ask for."""
  if STREAM.value and len(PROMPT.value) > 1:
    raise ValueError('--stream prints one prompt; give one, or --nostream.')
  checkpoint, tokenizer = load()
  prompts = read_prompts(
    PROMPT.value,
    [images.load(path) for path in IMAGE.value],
    tokenizer=tokenizer,
    vision=checkpoint.config.vision,
  )
  pieces = stream(
    Model(checkpoint.config),
    checkpoint.params,
    checkpoint.router,
    prompts.tokens,
    valid=prompts.valid,
    images=prompts.images,
    max_tokens=MAX_TOKENS.value,
    temperature=TEMPERATURE.value,
    top_p=TOP_P.value,
    top_k=TOP_K.value,
    key=jax.random.key(SEED.value),
    stop=tokenizer.eos_id,
    every=EVERY if STREAM.value else SEGMENT,
  )
  if STREAM.value:
    print(PROMPT.value[0], end='')
    for text in text_of(pieces, tokenizer):
      print(text, end='', flush=True)
    return print()
  out = np.concatenate([np.asarray(tokens) for tokens in pieces], 1)
  for prompt, row in zip(PROMPT.value, out):
    print(prompt + tokenizer.decode(row))


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments {argv[1:]}.')
  try:
    sample()
  except (ValueError, OSError) as error:
    sys.exit(f'error: {error}')


if __name__ == '__main__':
  flags.mark_flag_as_required('prompt')
  logging.set_verbosity(logging.ERROR)
  app.run(main)
