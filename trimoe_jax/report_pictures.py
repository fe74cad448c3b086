"""The report's part about held-out pictures: a table and a figure."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from trimoe_jax import plots
from trimoe_jax.evals.heldout import Evaluator
from trimoe_jax.evals.questions import row_images
from trimoe_jax.run import Run

FILE = 'answers.png'
_COLUMNS = 6
_RIGHT, _WRONG = '#00684a', '#b03a00'


def section(run: Run, record: dict[str, Any]) -> list[str]:
  """The section's text, its figure written; nothing for a run without images.

  Args:
    run: a finished run.
    record: its last evaluation.
  """
  if 'questions' not in record:
    return []
  evaluator = Evaluator(run.config, run.corpus, run.mesh, lambda text: None)
  batches = evaluator.batches(record['context'])
  shown = []
  for example in record['examples']:
    batch, row, number = example['place']
    image = list(row_images(batches[batch], row))[number]
    shown.append((image, example['answers']))
  plot_answers(run.workdir / 'figures' / FILE, shown)
  return [
    f'{_table(record["questions"])}\n\n![Held-out pictures](figures/{FILE})'
  ]


def _table(questions: dict[str, dict[str, Any]]) -> str:
  lines = [
    '| question | asked | right | chance | characters right |',
    '| --- | ---: | ---: | ---: | ---: |',
  ]
  for name, r in questions.items():
    lines.append(
      f'| {name} | {r["count"]} | {r["right"]:.0%} | {r["chance"]:.0%} | '
      f'{r["characters"]:.0%} |'
    )
  table = '\n'.join(lines)
  return (
    '## Pictures\n\nHeld-out pictures show digits and parts of photographs '
    'that no picture for training shows. An answer is right when all its '
    'characters and the full stop are predicted; chance is the share of the '
    f'most frequent answer.\n\n{table}'
  )


def plot_answers(
  path: str | pathlib.Path,
  shown: Sequence[tuple[np.ndarray, Sequence[Sequence[Any]]]],
) -> Figure:
  """Saves pictures with the questions and the model's answers below.

  Args:
    path: the picture to write.
    shown: (image [H, W, 3] uint8, [[question, want, got, right], ...]) of each
      picture; wrong answers get the right one below them.
  """
  rows = max(1, -(-len(shown) // _COLUMNS))
  figure = Figure(figsize=(1.75 * _COLUMNS, 2.3 * rows), dpi=110)
  grid = figure.subplots(rows, _COLUMNS, squeeze=False).reshape(-1)
  for axes in grid:
    axes.set_axis_off()
  for axes, (image, answers) in zip(grid, shown):
    axes.imshow(image, interpolation='nearest')
    for line, (text, colour) in enumerate(_lines(answers)):
      place = dict(transform=axes.transAxes, fontsize=8.5, color=colour)
      axes.text(0.0, -0.13 * (line + 1), text, **place)
  figure.subplots_adjust(0.02, 0.42 / (2.3 * rows), 0.98, 0.99, hspace=0.42)
  return plots.save(figure, path)


def _lines(answers: Sequence[Sequence[Any]]) -> Iterator[tuple[str, str]]:
  """Text and colour of the lines below a picture."""
  for question, want, got, right in answers:
    said = ''.join(c if c.isprintable() else '·' for c in got)
    yield f'{question}? {said}', _RIGHT if right else _WRONG
    if not right:
      yield f'    true: {want}', _WRONG
