"""How the rules that balance experts compare, at 896 experts of which 16 serve.

  python -m experiments.bench balance --out=runs/balance

MaxVio, the load of the busiest expert over the mean load less 1, by step: for
quantile balancing with every estimator and cutoff, the sign rule, an auxiliary
loss, and nothing. `router_traces` says which routers and which batches.
"""

from __future__ import annotations

import json
import math
import pathlib
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from trimoe_jax import plots
from trimoe_jax.config import RouterConfig
from trimoe_jax.evals import router_traces
from trimoe_jax.evals.router_traces import MOE, Record

SOURCES = {
  'repeated': router_traces.repeated,
  'drifting': router_traces.drifting,
  'text': router_traces.text,
}
TITLES = {
  'repeated': 'one batch, repeated',
  'drifting': 'new batches, drifting router',
  'text': 'router in training on text',
}
REPEATED_STEPS = 16  # where all have settled that ever do
EXACT_STEPS = 12  # the exact estimator sorts all tokens of every expert


class Rule(NamedTuple):
  """One way to balance, and how to draw it."""

  name: str
  config: RouterConfig
  colour: str
  line: str = '-'


def _quantile(estimator: str, cutoff: str) -> RouterConfig:
  return RouterConfig(estimator=estimator, cutoff=cutoff)


def _sign(rate: float) -> RouterConfig:
  return RouterConfig(balance='sign', sign_rate=rate)


RULES = (
  Rule('quantile, 1000 bins (K3)', _quantile('uniform', 'kplus1'), '#0072B2'),
  Rule(
    'quantile, 1000 bins, midpoint',
    _quantile('uniform', 'midpoint'),
    '#0072B2',
    '--',
  ),
  Rule('quantile, log edges', _quantile('log_edges', 'kplus1'), '#009E73'),
  Rule(
    'quantile, log edges, midpoint',
    _quantile('log_edges', 'midpoint'),
    '#009E73',
    '--',
  ),
  Rule('quantile, exact', _quantile('exact', 'kplus1'), '#000000'),
  Rule(
    'quantile, exact, midpoint', _quantile('exact', 'midpoint'), '#000000', '--'
  ),
  Rule('sign, 1e-2', _sign(1e-2), '#E69F00'),
  Rule('sign, 1e-3', _sign(1e-3), '#D55E00'),
  Rule('auxiliary loss, 1e-2', RouterConfig(balance='aux_loss'), '#CC79A7'),
  Rule('none', RouterConfig(balance='none'), '#8c8c8c'),
)


class Trace(NamedTuple):
  """What one rule did on one source."""

  source: str
  rule: str
  records: list[Record]


def run(
  out: str | None = None,
  *,
  steps: int = 48,
  tokens: int = 8192,
  text_tokens: int = 4096,
  sources: str = 'repeated,drifting,text',
) -> list[Trace]:
  """Traces of every rule, printed as tables of Markdown.

  Args:
    out: a folder for balance.md, balance.png and balance.json.
    steps: of 'drifting' and 'text'.
    tokens: in a step of 'repeated' and 'drifting'.
    text_tokens: in a step of 'text', a multiple of 64.
    sources: which, by commas.

  Raises:
    ValueError: an unknown source, or a size that does not fit.
  """
  names = sources.split(',')
  _check(names, steps, tokens, text_tokens)
  traces = []
  for source in names:
    size = text_tokens if source == 'text' else tokens
    for rule in RULES:
      length = _steps(source, rule.config, steps)
      start = time.perf_counter()
      records = SOURCES[source](rule.config, steps=length, tokens=size)
      traces.append(Trace(source, rule.name, records))
      seconds = time.perf_counter() - start
      last = records[-1]['max_vio']
      print(
        f'{source}: {rule.name}: MaxVio {records[0]["max_vio"]:.2f} -> '
        f'{last:.2f} in {length} steps of {size} tokens, {seconds:.0f} s',
        flush=True,
      )
  text = '\n\n'.join(
    table(source, [t for t in traces if t.source == source]) for source in names
  )
  print(f'\n{text}')
  if out is not None:
    _write(pathlib.Path(out), text, traces, tokens, text_tokens)
  return traces


def table(source: str, traces: Sequence[Trace]) -> str:
  """Markdown: MaxVio at steps 1, 2, 4, ..., and what else the end shows.

  The mean of the last quarter smooths what differs from batch to batch.
  """
  longest = max(len(t.records) for t in traces)
  shown = [2**i for i in range(longest.bit_length())]
  head = ['rule', *(f'step {n}' for n in shown), 'last quarter']
  head += ['MinVio', 'dead experts']
  has_loss = 'loss' in traces[0].records[0]
  head += ['loss'] if has_loss else []
  lines = [head, ['---'] + ['---:'] * (len(head) - 1)]
  for trace in traces:
    records = trace.records
    tail = records[-max(1, len(records) // 4) :]
    mean = lambda name, tail=tail: float(np.mean([r[name] for r in tail]))
    cells = [trace.rule]
    cells += [
      f'{records[n - 1]["max_vio"]:.2f}' if n <= len(records) else ''
      for n in shown
    ]
    cells += [f'{mean("max_vio"):.2f}', f'{mean("min_vio"):.2f}']
    cells.append(f'{mean("dead"):.0f}')
    if has_loss:
      cells.append(f'{mean("loss"):.3f}' if len(records) == longest else '')
    lines.append(cells)
  rows = '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)
  return f'MaxVio, {TITLES[source]}:\n\n{rows}'


def draw(
  path: str | pathlib.Path, traces: Sequence[Trace], sizes: dict[str, int]
) -> Figure:
  """Saves MaxVio by step, a panel a source.

  Args:
    path: the picture to write.
    traces: of every source, in order.
    sizes: tokens in a step of each source.
  """
  names = list(dict.fromkeys(t.source for t in traces))
  figure = plots.blank(2.9 * len(names) + 2.5, 3.7)
  panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
  styles = {rule.name: rule for rule in RULES}
  for axes, source in zip(panels, names):
    plots.dress(axes)
    longest = 1
    for trace in (t for t in traces if t.source == source):
      style = styles[trace.rule]
      values = np.array([r['max_vio'] for r in trace.records])
      longest = max(longest, len(values))
      axes.plot(
        np.arange(1, len(values) + 1),
        # Perfect balance has no place on this axis; its lower edge stands in.
        np.maximum(values, 1e-3),
        style.line,
        color=style.colour,
        linewidth=1.4,
        label=trace.rule,
      )
    if source != 'repeated':
      axes.axhline(
        noise_floor(sizes[source]),
        color='#595959',
        linewidth=0.9,
        linestyle=':',
        label='noise of independent tokens',
      )
    axes.set_title(TITLES[source], fontsize=10)
    _scale(axes, longest)
  panels[0].set_ylabel('MaxVio (0: all experts equal)')
  figure.supxlabel('step', fontsize=10)
  handles, labels = panels[-1].get_legend_handles_labels()
  figure.legend(
    handles, labels, loc='outside right center', frameon=False, fontsize=9
  )
  return plots.save(figure, path)


def noise_floor(tokens: int) -> float:
  """MaxVio of a perfect bias on new independent tokens, a Poisson maximum."""
  return math.sqrt(2 * math.log(MOE.experts) * MOE.experts / tokens / MOE.top_k)


def _scale(axes: Axes, longest: int) -> None:
  plain = FuncFormatter(lambda x, _: f'{x:g}')
  axes.set_xscale('log', base=2)
  axes.set_yscale('log')
  ticks = 2.0 ** np.arange(longest.bit_length())
  for axis, places in (
    (axes.xaxis, ticks),
    (axes.yaxis, [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50]),
  ):
    axis.set_major_locator(FixedLocator(places))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(plain)
  axes.set_xlim(0.95, max(2.0, 1.05 * longest))


def _steps(source: str, rule: RouterConfig, steps: int) -> int:
  if source == 'repeated':
    steps = min(steps, REPEATED_STEPS)
  if rule.balance == 'quantile' and rule.estimator == 'exact':
    steps = min(steps, EXACT_STEPS)
  return steps


def _check(names: list[str], steps: int, tokens: int, text_tokens: int):
  unknown = sorted(set(names) - set(SOURCES))
  if unknown:
    raise ValueError(
      f'sources={",".join(unknown)} unknown; choose among {",".join(SOURCES)}.'
    )
  if steps < 1 or tokens < 1:
    raise ValueError(f'steps={steps} and tokens={tokens} must be positive.')
  context = router_traces.CONTEXT
  if text_tokens < context or text_tokens % context:
    raise ValueError(
      f'text_tokens={text_tokens} is no multiple of {context}, the length of a '
      f'row; choose {max(1, round(text_tokens / context)) * context}.'
    )


def _write(
  out: pathlib.Path,
  text: str,
  traces: list[Trace],
  tokens: int,
  text_tokens: int,
):
  """The tables, the traces and the figure."""
  out.mkdir(parents=True, exist_ok=True)
  (out / 'balance.md').write_text(text + '\n')
  (out / 'balance.json').write_text(
    json.dumps([t._asdict() for t in traces]) + '\n'
  )
  sizes = dict.fromkeys(SOURCES, tokens) | {'text': text_tokens}
  draw(out / 'balance.png', traces, sizes)
  print(f'\nwritten: {out}/balance.md, balance.json, balance.png')
