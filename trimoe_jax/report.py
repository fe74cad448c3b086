"""The report of a finished run: figures, a table a stage, a sampled text.

All of it is made from metrics.jsonl, so that it can be written again, but for
the continuation, which is sampled from the last state.
"""

from __future__ import annotations

import json
import math
from typing import Any

import jax
import numpy as np

from trimoe_jax import hosts, plots, report_pictures
from trimoe_jax.metrics import read_jsonl
from trimoe_jax.model.model import Model, count_parameters
from trimoe_jax.run import Run
from trimoe_jax.sampling.sample import generate
from trimoe_jax.train_state import TrainState

Record = dict[str, Any]


def is_finished(run: Run) -> bool:
  """Whether the run reached its last step and its report was written."""
  return run.report_path.exists()


def write(run: Run, state: TrainState):
  """Writes figures/*.png and report.md; every process must take part."""
  continuation = _continuation(run, state)
  if hosts.is_main():
    _write(run, continuation)
  hosts.wait('report')


def _write(run: Run, continuation: str):
  records = read_jsonl(run.metrics_path)
  steps = [r for r in records if r['kind'] == 'step']
  evals = [r for r in records if r['kind'] == 'eval']
  compiles = [r for r in records if r['kind'] == 'compile']
  warm = next((r for r in records if r['kind'] == 'warm_start'), None)
  draw(run, steps, evals, warm)
  text = '\n\n'.join(
    [
      f'# Run {run.config.name}',
      _summary(run),
      _stage_table(run, steps, stage_ends(evals), compiles),
      _balance_table(_moe_layers(run), steps, warm),
      *report_pictures.section(run, evals[-1]),
      _figures(),
      continuation,
    ]
  )
  fresh = run.report_path.with_suffix('.new')
  fresh.write_text(text + '\n', encoding='utf-8')
  fresh.replace(run.report_path)


def stage_ends(evals: list[Record]) -> list[tuple[Record, Record]]:
  """The first and the last evaluation of every stage, in order."""
  last = {record['stage']: record for record in evals}
  first = {record['stage']: record for record in reversed(evals)}
  return [(first[stage], last[stage]) for stage in sorted(last)]


def draw(
  run: Run, steps: list[Record], evals: list[Record], warm: Record | None
):
  """Writes the figures."""
  figures = run.workdir / 'figures'
  trained = [run.batches.tokens_before(s) for s in run.batches.first_steps]
  plots.plot_loss(
    figures / 'loss.png',
    [r['trained'] for r in steps],
    [r['loss'] for r in steps],
    stages=[
      plots.StageSpan(f'{n:,}', a, b)
      for n, a, b in zip(run.contexts, trained[:-1], trained[1:])
    ],
    heldout=_heldout_lines(evals),
  )
  plots.plot_violation(
    figures / 'max_vio.png',
    [r['step'] for r in steps],
    np.array([r['max_vio'] for r in steps], float),
    layers=_moe_layers(run),
  )
  plots.plot_loads(
    figures / 'loads.png', _moments(steps, warm), layers=_moe_layers(run)
  )
  plots.plot_depth_mix(
    figures / 'depth_mix.png', _depth_rows(run, evals[-1]['depth'])
  )
  plots.plot_loss_by_position(
    figures / 'loss_by_position.png',
    [_position_curve(record) for _, record in stage_ends(evals)],
  )


def _moe_layers(run: Run) -> list[int]:
  """The layers with experts, counted from 1."""
  model = run.config.model
  return [i + 1 for i in range(model.layers) if model.ffn(i) == 'moe']


def _moments(
  steps: list[Record], warm: Record | None
) -> list[tuple[str, np.ndarray]]:
  """Spread of the loads before the warm start ('cold') and at four steps."""
  moments = []
  if warm is not None:
    moments.append(('cold', warm['load_bands'][0]))
  picked = np.linspace(0, len(steps) - 1, 4).round().astype(int)
  for record in [steps[i] for i in dict.fromkeys(picked.tolist())]:
    moments.append((f'step {record["step"]:,}', record['load_bands']))
  return moments


def _heldout_lines(evals: list[Record]) -> tuple[list, list]:
  """Tokens and held-out losses with a gap after every stage.

  Stages are measured on rows of their own context, so a line from one to the
  next would mean nothing.
  """
  tokens, losses = [], []
  for i, record in enumerate(evals):
    if i and record['stage'] != evals[i - 1]['stage']:
      tokens.append(record['trained'])
      losses.append(math.nan)
    tokens.append(record['trained'])
    losses.append(record['heldout_loss'])
  return tokens, losses


def _depth_rows(run: Run, depth: list) -> list[tuple[str, dict[str, float]]]:
  """Each sublayer's label and its weights by source.

  The last column is the open block's sum; the first sublayer of a block has
  none yet, and the output reads the last block there.
  """
  model = run.config.model
  names = ['emb', *(f'b{n}' for n in range(1, model.sources - 1))]
  rows = []
  for row, weights in enumerate(depth):
    layer, part = divmod(row, 2)
    if layer == model.layers:
      sources = dict(zip([*names, 'partial'], weights))
      rows.append(('output', sources))
      continue
    known = layer // model.residual_block + 1
    sources = dict(zip(names[:known], weights))
    if layer % model.residual_block or part:
      sources['partial'] = weights[-1]
    rows.append((f'{layer + 1} {"ffn" if part else "attn"}', sources))
  return rows


def _position_curve(record: Record):
  buckets = [b for b in record['by_position'] if b['tokens']]
  middle = [math.sqrt((b['start'] + 1) * b['stop']) for b in buckets]
  name = f'stage {record["stage"] + 1}: {record["context"]:,} tokens'
  return name, middle, [b['nats_per_token'] for b in buckets]


def _summary(run: Run) -> str:
  model = run.config.model
  count = count_parameters(model)
  environment = json.loads((run.workdir / 'env.json').read_text())
  mla = len(model.mla_layers)
  router = model.router
  seeing = f' and {count.vision:,} for images' if count.vision else ''
  return (
    f'{count.total:,} parameters ({count.active:,} active){seeing}: '
    f'{model.layers} layers ({model.layers - mla} KDA, {mla} gated MLA), '
    f'{model.moe.experts} experts of which {model.moe.top_k} are chosen '
    f'(balance: {router.balance}), {model.sources - 1} residual blocks. '
    'Trained on '
    f'{run.config.data.source or "the Python standard library"} with '
    f'{jax.local_device_count()} {environment["devices"][0]} device(s), jax '
    f'{environment["packages"]["jax"]}.'
  )


def _stage_table(
  run: Run,
  steps: list[Record],
  ends: list[tuple[Record, Record]],
  compiles: list[Record],
) -> str:
  """One row a stage: what it read, what it reached, how fast."""
  lengths = sorted(set(run.contexts))
  head = [
    'stage',
    'context',
    'steps',
    'tokens',
    'loss',
    'held-out: before',
    'after',
  ]
  head += [f'recall {n:,}' for n in lengths] + ['tokens/s', 'compile s']
  lines = [head, ['---'] + ['---:'] * (len(head) - 1)]
  for start, end in ends:
    number = end['stage']
    stage = run.config.stages[number]
    losses = [r['loss'] for r in steps if r['stage'] == number]
    tail = losses[-max(1, len(losses) // 10) :]
    seconds = sum(r['seconds'] for r in compiles if r['stage'] == number)
    recall = end['recall']
    shown = [recall.get(str(n)) for n in lengths]
    lines.append(
      [
        str(number + 1),
        f'{stage.context:,}',
        f'{stage.num_steps:,}',
        f'{stage.num_steps * stage.step_tokens:,}',
        f'{np.mean(tail):.3f}',
        f'{start["heldout_loss"]:.3f}',
        f'{end["heldout_loss"]:.3f}',
        *(f'{r["token_accuracy"]:.0%}' if r else '' for r in shown),
        f'{end["rate"]:,.0f}',
        f'{seconds:.0f}',
      ]
    )
  table = '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)
  chances = [r['token_chance'] for r in ends[-1][1]['recall'].values()]
  guess = f'{chances[0]:.0%}' if chances and chances[0] else 'unknown'
  note = (
    'Losses are nats a token: of training, the mean of the last tenth of a '
    "stage; of held-out documents at the stage's context, before and after "
    'it. Held-out rows differ from stage to stage, the longest documents '
    'first, so compare within a row. Recall is the share of answer tokens of '
    f'{run.config.eval.needles} needles that the model predicts; the chance '
    f'of a guess is {guess}.'
  )
  return f'## Stages\n\n{table}\n\n{note}'


def _balance_table(
  layers: list[int], steps: list[Record], warm: Record | None
) -> str:
  """One row a layer with experts: how evenly they were loaded."""
  tail = steps[-max(1, len(steps) // 10) :]
  columns = {
    'MaxVio: step 1': (steps[:1], 'max_vio', '.2f'),
    'end': (tail, 'max_vio', '.2f'),
    'MinVio: end': (tail, 'min_vio', '.2f'),
    'dead experts': (tail, 'dead', '.1f'),
    'crossing bin': (tail, 'crossing_mass', '.1%'),
    'unresolved': (tail, 'unresolved', '.1f'),
    'dropped': (tail, 'dropped', '.2%'),
  }
  if warm is not None:
    cold = {'max_vio': warm['max_vio'][0]}
    columns = {'MaxVio: cold': ([cold], 'max_vio', '.2f')} | columns
  columns = {
    title: [format(x, shape) for x in np.mean([r[n] for r in records], 0)]
    for title, (records, n, shape) in columns.items()
    if n in records[0]
  }
  lines = [['layer', *columns], ['---:'] * (1 + len(columns))]
  rows = zip(map(str, layers), *columns.values())
  lines += rows
  table = '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)
  note = (
    'MaxVio is the largest load of an expert over the mean load less 1, MinVio '
    '1 less the smallest over the mean; 0 is perfect balance. Cold is before '
    'the warm start of the router, the end the mean of the last tenth of the '
    'steps, as are the columns after it. The crossing bin holds an '
    "expert's quantile: given is its largest share of the tokens, and the "
    'number of experts for which it holds more than their whole target load.'
  )
  return f'## Balance\n\n{table}\n\n{note}'


def _figures() -> str:
  titles = {
    'loss.png': 'Loss over tokens, stages shaded',
    'max_vio.png': 'Load violation of every layer over steps',
    'loads.png': 'Load of the experts of every layer over training',
    'depth_mix.png': 'Depth-mix weights of every sublayer at the end',
    'loss_by_position.png': 'Held-out loss by position in the context',
  }
  lines = [f'![{title}](figures/{name})' for name, title in titles.items()]
  return '## Figures\n\n' + '\n\n'.join(lines)


def _continuation(run: Run, state: TrainState) -> str:
  """Text sampled from the last state, after the configured prompt."""
  settings, tokenizer = run.config.eval, run.corpus.tokenizer
  prompt = [tokenizer.bos_id, *tokenizer.encode(settings.sample_prompt)]
  with jax.set_mesh(run.mesh):
    tokens = generate(
      Model(run.config.model),
      state.params,
      state.router,
      np.array([prompt], np.int32),
      max_tokens=settings.sample_tokens,
      temperature=settings.temperature,
      key=jax.random.fold_in(state.key, state.step),
    )
  text = tokenizer.decode(hosts.fetch(tokens)[0])
  fence = '````'
  return (
    f'## Continuation\n\nOf {settings.sample_prompt!r} at temperature '
    f'{settings.temperature}:\n\n{fence}\n{settings.sample_prompt}{text}\n'
    f'{fence}'
  )
