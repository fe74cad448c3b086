"""The figure of the decoding benchmark: time and memory over the prefix."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from trimoe_jax import plots

_STYLES = {'trimoe': ('#0072B2', 'o'), 'full': ('#D55E00', 's')}
_NAMES = {'trimoe': 'KDA + MLA', 'full': 'full attention'}


def draw(
  path: str | pathlib.Path, rows: Sequence[dict[str, Any]], batch: int = 1
) -> Figure:
  """Saves tokens a second, and bytes a sequence, over the prefix.

  Args:
    path: the picture to write.
    rows: those of `bench.run`.
    batch: of the rows that are drawn.
  """
  figure = plots.blank(9.0, 3.9)
  left, right = figure.subplots(1, 2)
  for axes, column, label in (
    (left, 'tokens/s', 'tokens a second'),
    (right, 'MB/sequence', 'cache of one sequence'),
  ):
    for name in _STYLES:
      own = [r for r in rows if r['model'] == name and r['batch'] == batch]
      own.sort(key=lambda row: row['prefix'])
      if own:
        _line(axes, own, column, name)
    axes.set(xlabel='tokens read before', ylabel=label)
    plots.dress(axes)
    _lengths(axes, sorted({row['prefix'] for row in rows}))
  left.set_ylim(bottom=0)
  right.set_yscale('log')
  right.yaxis.set_major_formatter(FuncFormatter(_bytes))
  right.yaxis.set_minor_locator(NullLocator())
  left.legend(frameon=False)
  return plots.save(figure, path)


def _line(axes: Axes, rows, column: str, name: str):
  color, marker = _STYLES[name]
  axes.plot(
    [row['prefix'] for row in rows],
    [row[column] for row in rows],
    color=color,
    marker=marker,
    label=_NAMES[name],
  )


def _lengths(axes: Axes, lengths: Sequence[int]):
  axes.set_xscale('log', base=2)
  axes.set_xticks(lengths)
  axes.xaxis.set_minor_locator(NullLocator())
  axes.xaxis.set_major_formatter(
    FuncFormatter(
      lambda x, _: f'{x / 2**20:.0f}M' if x >= 2**20 else f'{x / 2**10:.0f}K'
    )
  )


def _bytes(megabytes: float, _: object = None) -> str:
  if megabytes >= 1000:
    return f'{megabytes / 1000:g} GB'
  return f'{megabytes:g} MB'
