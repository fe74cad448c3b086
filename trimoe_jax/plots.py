"""Figures of a run: data in, a picture on disk out.

Figures are made without pyplot, so no display, backend or global state is
needed. Colours are those of Okabe and Ito, which stay apart for colour-blind
readers; lines in an order (layers, stages) take a sequential map.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import (
  EngFormatter,
  FixedLocator,
  LogLocator,
  NullLocator,
)

_TRAIN, _HELDOUT, _GREY = '#0072B2', '#D55E00', '#595959'
_STAGE_SHADES = ('#ffffff', '#eceff1')
_CYCLE = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9')
_MARKERS = 'osD^vP'
_BANDS = ('#d6e6f2', '#a3c8e3', '#6fa9d2')  # outermost first
_BAND_NAMES = ('all experts', '5 to 95 %', '25 to 75 %')
_MAX_LEGEND = 12
_LETTER = 0.0095  # width of a letter of a stage's name, in widths of the frame


class StageSpan(NamedTuple):
  """One stage on an axis of tokens: [begin, end), and how to call it."""

  name: str
  begin: float
  end: float


def plot_loss(
  path: str | pathlib.Path,
  tokens: Sequence[float],
  loss: Sequence[float],
  *,
  stages: Sequence[StageSpan],
  heldout: tuple[Sequence[float], Sequence[float]] | None = None,
) -> Figure:
  """Saves the loss over tokens, the stages shaded and named.

  Args:
    path: the picture to write.
    tokens: training tokens seen at each record.
    loss: training loss there, nats a token.
    stages: in order.
    heldout: (tokens, loss) of held-out text; NaN interrupts the line.
  """
  figure, axes = _figure(8.0, 4.2)
  tokens, loss = np.asarray(tokens, float), np.asarray(loss, float)
  loss = np.where(np.isfinite(loss), loss, np.nan)
  smooth = _smooth(loss)
  axes.plot(tokens, loss, color=_TRAIN, alpha=0.25, linewidth=0.8)
  marker = 'o' if len(loss) < 3 else None
  axes.plot(
    tokens,
    smooth,
    color=_TRAIN,
    linewidth=1.8,
    marker=marker,
    label='train (smoothed)',
  )
  lines = smooth
  if heldout is not None:
    axes.plot(*heldout, 'o:', color=_HELDOUT, markersize=5, label='held-out')
    lines = np.concatenate([smooth, np.asarray(heldout[1], float)])
  _shade(axes, stages)
  _limit_losses(axes, loss, lines)
  axes.set(xlabel='training tokens', ylabel='loss (nats a token)')
  axes.xaxis.set_major_formatter(EngFormatter(sep=''))
  axes.legend(loc='upper right', framealpha=0.9)
  return save(figure, path)


def plot_violation(
  path: str | pathlib.Path,
  steps: Sequence[float],
  violation: np.ndarray,
  *,
  layers: Sequence[int],
) -> Figure:
  """Saves MaxVio, (largest - mean) / mean expert load, of every layer.

  Args:
    path: the picture to write.
    steps: training steps, [N].
    violation: [N, layers]; 0 is perfect balance.
    layers: the layers' numbers as the reader counts them.

  Raises:
    ValueError: the shapes do not belong together.
  """
  violation = np.asarray(violation, float)
  if violation.shape != (len(steps), len(layers)):
    raise ValueError(
      f'violation has shape {violation.shape}; {len(steps)} steps and '
      f'{len(layers)} layers need {(len(steps), len(layers))}.'
    )
  figure, axes = _figure(8.0, 4.2)
  colours = _sequence(len(layers))
  # A marker keeps a run of one record visible.
  marker = 'o' if len(steps) < 3 else None
  for column, layer in enumerate(layers):
    axes.plot(
      steps,
      violation[:, column],
      color=colours[column],
      linewidth=1.2,
      marker=marker,
      label=str(layer),
    )
  positive = violation[np.isfinite(violation) & (violation > 0)]
  if positive.size and positive.max() > 10 * positive.min():
    axes.set_yscale('log')
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(_short))
    axes.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
  axes.set(xlabel='training step', ylabel='MaxVio (0: all experts equal)')
  _legend_of_sequence(figure, axes, layers, 'layer')
  return save(figure, path)


def plot_loads(
  path: str | pathlib.Path,
  moments: Sequence[tuple[str, np.ndarray]],
  *,
  layers: Sequence[int],
) -> Figure:
  """Saves how the load is spread over the experts of every layer, by moment.

  Each moment is a panel of its own, all on one axis of loads, whose scale is
  the square root: it keeps idle experts and tenfold loads on one picture.

  Args:
    path: the picture to write.
    moments: (name, bands) of some steps in order; bands is [layers, bands] of
      loads in units of the mean, from the least loaded expert to the most, an
      odd number of them, so that the middle one is the median.
    layers: the layers' numbers as the reader counts them.
  """
  size = max(7.0, 1.1 + len(moments) * (1.1 + 0.06 * min(len(layers), 24)))
  figure = blank(min(size, 14.0), 3.8)
  panels = figure.subplots(1, len(moments), sharey=True, squeeze=False)[0]
  edges = np.arange(len(layers) + 1) - 0.5
  for axes, (name, bands) in zip(panels, moments):
    dress(axes)
    bands = np.asarray(bands, float)
    bands = np.concatenate([bands, bands[-1:]])  # a step to the last edge
    last = bands.shape[1] - 1
    for low in range(last // 2):
      axes.fill_between(
        edges,
        bands[:, low],
        bands[:, last - low],
        step='post',
        color=_BANDS[low % len(_BANDS)],
        linewidth=0,
        label=_BAND_NAMES[low] if last // 2 == len(_BAND_NAMES) else None,
      )
    axes.step(
      edges,
      bands[:, last // 2],
      where='post',
      color=_TRAIN,
      linewidth=1.4,
      label='median',
    )
    axes.axhline(1.0, color=_GREY, linewidth=0.8, linestyle=':', label='mean')
    axes.set_title(name, fontsize=9, color=_GREY)
    axes.set_xlim(edges[0], edges[-1])
    every = -(-len(layers) // 8)
    axes.set_xticks(range(0, len(layers), every), layers[::every])
  largest = max(float(np.max(bands)) for _, bands in moments)
  _scale_loads(panels[0], largest)
  panels[0].set_ylabel('load of an expert / mean load')
  figure.supxlabel('layer', fontsize=10)
  figure.legend(
    *panels[0].get_legend_handles_labels(),
    loc='outside right center',
    frameon=False,
  )
  return save(figure, path)


def _scale_loads(axes: Axes, largest: float) -> None:
  """A square-root axis from 0 to a little above the largest load."""
  root = lambda x: np.sqrt(np.maximum(x, 0.0))
  axes.set_yscale('function', functions=(root, np.square))
  steps = np.array([0, 0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 9, 16, 25, 36, 49, 64])
  if largest > 64:
    steps = np.array([0, 1, 4, 16, 36, 64, 100, 196, 400, 900])
  elif largest > 6:
    steps = np.array([0, 0.25, 1, 2, 4, 6, 9, 16, 25, 36, 49, 64])
  axes.yaxis.set_major_locator(FixedLocator(steps[steps <= 1.3 * largest]))
  axes.yaxis.set_minor_locator(NullLocator())
  axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(_short))
  axes.set_ylim(0.0, 1.08 * max(largest, 1.2))


def plot_depth_mix(
  path: str | pathlib.Path, rows: Sequence[tuple[str, Mapping[str, float]]]
) -> Figure:
  """Saves a heat map of the weights that each sublayer gives to its sources.

  Args:
    path: the picture to write.
    rows: (label, {source: weight}) of every sublayer in order, such as
      ('3 attn', {'emb': 0.2, 'b1': 0.5, 'partial': 0.3}). Columns are all
      sources in the order in which they first occur, 'partial' last; a source
      that a row lacks leaves its cell empty.
  """
  names = list(dict.fromkeys(s for _, weights in rows for s in weights))
  names.sort(key='partial'.__eq__)
  grid = np.full((len(rows), len(names)), np.nan)
  for row, (_, weights) in enumerate(rows):
    for source, weight in weights.items():
      grid[row, names.index(source)] = weight
  height = max(2.6, 0.24 * len(rows) + 1.3)
  figure, axes = _figure(max(4.2, 0.62 * len(names) + 2.4), min(height, 24.0))
  image = axes.imshow(
    grid, aspect='auto', cmap='cividis', norm=Normalize(0.0, 1.0)
  )
  axes.set_facecolor('#f2f2f2')
  axes.set(xlabel='source', ylabel='sublayer')
  axes.set_xticks(range(len(names)), names)
  axes.set_yticks(range(len(rows)), [label for label, _ in rows])
  axes.tick_params(axis='both', length=0)
  axes.grid(False)
  _white_gaps(axes, grid.shape)
  if len(rows) <= 80:
    _write_cells(axes, grid)
  figure.colorbar(image, ax=axes, label='weight', fraction=0.05, pad=0.03)
  return save(figure, path)


def plot_loss_by_position(
  path: str | pathlib.Path,
  curves: Sequence[tuple[str, Sequence[float], Sequence[float]]],
) -> Figure:
  """Saves held-out loss by position in the context, one line a stage.

  Args:
    path: the picture to write.
    curves: (stage name, positions from 1, loss in nats a token).
  """
  figure, axes = _figure(8.0, 4.2)
  last = 1.0
  for index, (name, positions, loss) in enumerate(curves):
    axes.plot(
      positions,
      loss,
      color=_CYCLE[index % len(_CYCLE)],
      marker=_MARKERS[index % len(_MARKERS)],
      markersize=4,
      linewidth=1.6,
      label=name,
    )
    last = max(last, *positions)
  axes.set_xscale('log', base=2)
  ticks = 2.0 ** np.arange(0, np.ceil(np.log2(last)) + 1, 2)
  axes.xaxis.set_major_locator(FixedLocator(ticks))
  axes.xaxis.set_minor_locator(NullLocator())
  axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(_short))
  axes.set(
    xlabel='position in the context (tokens)',
    ylabel='held-out loss (nats a token)',
  )
  axes.legend(title='after stage', loc='best', framealpha=0.9)
  return save(figure, path)


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
  figure = blank(width, height)
  axes = figure.add_subplot()
  dress(axes)
  return figure, axes


def blank(width: float, height: float) -> Figure:
  """An empty figure, in inches."""
  figure = Figure(figsize=(width, height), dpi=130, layout='constrained')
  FigureCanvasAgg(figure)
  return figure


def dress(axes: Axes) -> None:
  """Gives axes the grid and spines of all figures."""
  axes.grid(True, color='#d9d9d9', linewidth=0.6)
  axes.set_axisbelow(True)
  axes.spines[['top', 'right']].set_visible(False)


def save(figure: Figure, path: str | pathlib.Path) -> Figure:
  """Writes the figure, in a new folder if need be, and returns it."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path)
  return figure


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
  figure = blank(width, height)
  axes = figure.add_subplot()
  dress(axes)
  return figure, axes


def _smooth(values: np.ndarray) -> np.ndarray:
  """A running median over 4 % of the records: a spike leaves no box."""
  half = len(values) // 50
  if not half:
    return values
  padded = np.pad(values, half, constant_values=np.nan)
  windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
  # An empty window (a stretch without numbers) stays a gap.
  some = np.isfinite(windows).any(axis=1)
  out = np.full(len(values), np.nan)
  out[some] = np.nanmedian(windows[some], axis=1)
  return out


def _shade(axes: Axes, stages: Sequence[StageSpan]) -> None:
  """Shades every other stage and writes the names above the frame."""
  if not stages:
    return
  first, last = stages[0].begin, stages[-1].end
  axes.set_xlim(first, last)
  ends: list[float] = []  # where the text of each row ends so far
  for index, (name, begin, end) in enumerate(stages):
    shade = _STAGE_SHADES[index % len(_STAGE_SHADES)]
    axes.axvspan(begin, end, color=shade, zorder=0, linewidth=0)
    half = 0.5 * _LETTER * len(name)
    middle = (0.5 * (begin + end) - first) / (last - first)
    middle = min(max(middle, half), 1 - half)
    # The lowest row in which the name does not touch the one before.
    row = next((i for i, x in enumerate(ends) if x < middle - half), len(ends))
    ends[row : row + 1] = [middle + half + _LETTER]
    axes.text(
      middle,
      1.02 + 0.05 * row,
      name,
      transform=axes.transAxes,
      ha='center',
      va='bottom',
      fontsize=9,
      color=_GREY,
    )


def _limit_losses(axes: Axes, loss: np.ndarray, lines: np.ndarray) -> None:
  """Frames every low and all of `lines`, but not a spike of a single record."""
  shown = np.concatenate([loss, lines])
  if np.isfinite(shown).any():
    low, high = np.nanmin(shown), np.nanmax(lines)
    margin = 0.06 * max(high - low, 1e-3)
    axes.set_ylim(low - margin, high + margin)


def _sequence(count: int) -> np.ndarray:
  # Ends short of the map's yellow, which is hard to see on white.
  return matplotlib.colormaps['viridis'](np.linspace(0.0, 0.88, max(count, 1)))


def _legend_of_sequence(
  figure: Figure, axes: Axes, numbers: Sequence[int], title: str
) -> None:
  """A legend; a colour bar where a legend would be too long."""
  if len(numbers) <= _MAX_LEGEND:
    axes.legend(
      title=title,
      loc='center left',
      bbox_to_anchor=(1.0, 0.5),
      frameon=False,
    )
    return
  colours = matplotlib.colors.ListedColormap(_sequence(len(numbers)))
  norm = Normalize(min(numbers), max(numbers))
  mappable = matplotlib.cm.ScalarMappable(norm, colours)
  figure.colorbar(mappable, ax=axes, label=title, pad=0.02)


def _white_gaps(axes: Axes, shape: tuple[int, int]) -> None:
  """Thin white lines between cells."""
  axes.set_xticks(np.arange(-0.5, shape[1]), minor=True)
  axes.set_yticks(np.arange(-0.5, shape[0]), minor=True)
  axes.grid(True, which='minor', color='white', linewidth=1.0)
  axes.tick_params(which='minor', length=0)
  axes.spines[:].set_visible(False)


def _write_cells(axes: Axes, grid: np.ndarray) -> None:
  """The weights in their cells, dark on light and light on dark."""
  colour_map = matplotlib.colormaps['cividis']
  for row, column in np.argwhere(np.isfinite(grid)):
    value = grid[row, column]
    red, green, blue = to_rgb(colour_map(value))
    light = 0.3 * red + 0.59 * green + 0.11 * blue > 0.5
    axes.text(
      column,
      row,
      f'{value:.2f}',
      ha='center',
      va='center',
      fontsize=7,
      color='black' if light else 'white',
    )


def _short(value: float, _: object = None) -> str:
  """1024 -> 1K, 1048576 -> 1M, 0.01 -> 0.01."""
  for size, suffix in ((1 << 20, 'M'), (1 << 10, 'K')):
    if value >= size and value % size == 0:
      return f'{value / size:g}{suffix}'
  return f'{value:g}'
