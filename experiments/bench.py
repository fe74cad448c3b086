"""Times a kernel family, or reads its static TPU schedule.

  python -m experiments.bench kda --specs=small,k3_head --chunk_size=64
  python -m experiments.bench quantile_router
  python -m experiments.bench balance --out=runs/balance
  python -m experiments.bench decode '--prefixes=(1024,65536)' --out=runs/decode
  python -m experiments.bench kda_layer --peers=fla
  python -m experiments.bench tpu_schedule --chip=v6e --op=kda --length=8192

Every flag after the verb is an argument of the verb's function: numbers,
booleans and None as Python writes them, names of specs by commas.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys

VERBS = {
  'kda': 'pallas_kernels.kda.bench',
  'short_conv': 'pallas_kernels.kda.conv_bench',
  'gated_norm': 'pallas_kernels.kda.norm_bench',
  'attention_residual': 'pallas_kernels.attention_residual.bench',
  'quantile_router': 'pallas_kernels.quantile_router.bench',
  'grouped_matmul': 'pallas_kernels.grouped_matmul.bench',
  'balance': 'trimoe_jax.evals.balance',
  'moe': 'trimoe_jax.model.moe_bench',
  'kda_layer': 'trimoe_jax.model.kda_bench',
  'decode': 'trimoe_jax.sampling.bench',
}
SCHEDULES = {
  'attention_residual': 'pallas_kernels.attention_residual.tpu_bench',
  'kda': 'pallas_kernels.kda.tpu_bench',
  'quantile_router': 'pallas_kernels.quantile_router.tpu_bench',
}


def parse(flags: list[str]) -> dict:
  """Keywords from --name=value.

  Raises:
    ValueError: a flag of another form.
  """
  keywords = {}
  for flag in flags:
    name, equals, value = flag.removeprefix('--').partition('=')
    if not (flag.startswith('--') and equals and name.isidentifier()):
      raise ValueError(f'{flag!r} is no flag; write --name=value.')
    try:
      keywords[name] = ast.literal_eval(value)
    except (ValueError, SyntaxError):
      keywords[name] = value
  return keywords


def function_of(verb: str, keywords: dict):
  """The function that a verb runs, and its keywords.

  Raises:
    ValueError: an unknown verb, kernel family or flag.
  """
  if verb == 'tpu_schedule':
    # Programs are compiled for a TPU; nothing runs, on whatever is here.
    os.environ.setdefault('JAX_PLATFORMS', 'cpu')
    operation, known = keywords.pop('op', 'kda'), SCHEDULES
  else:
    operation, known = verb, VERBS
  if operation not in known:
    verbs = sorted(VERBS) + ['tpu_schedule']
    raise ValueError(
      f'{operation!r} is unknown; the verbs are {verbs}, and tpu_schedule '
      f'takes --op={"|".join(sorted(SCHEDULES))}.'
    )
  module = importlib.import_module(known[operation])
  if isinstance(keywords.get('specs'), str):
    specs = importlib.import_module(module.__package__ + '.arg_specs')
    keywords['specs'] = [specs.named(n) for n in keywords['specs'].split(',')]
  parameters = inspect.signature(module.run).parameters.values()
  names = [p.name for p in parameters if p.kind != p.VAR_KEYWORD]
  open_ended = len(names) < len(parameters)
  if not open_ended and not set(keywords) <= set(names):
    unknown = sorted(set(keywords) - set(names))
    raise ValueError(f'{unknown} are no flags of {verb}; it takes {names}.')
  return module.run, keywords


def main(arguments: list[str]) -> int:
  if not arguments or arguments[0] in ('-h', '--help'):
    print(__doc__)
    return 0 if arguments else 2
  try:
    run, keywords = function_of(arguments[0], parse(arguments[1:]))
  except ValueError as error:
    print(f'bench: {error}', file=sys.stderr)
    return 2
  run(**keywords)
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
