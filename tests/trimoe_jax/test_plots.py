"""Figures hold the data they were given, and their texts do not collide."""

import itertools

import numpy as np
import pytest
from matplotlib.image import imread

from trimoe_jax import plots


def check_picture(path):
  image = imread(path)
  assert image.ndim == 3 and image.std() > 0.01  # something was drawn
  return image


def overlaps(figure, texts):
  """Pairs of visible texts whose boxes intersect."""
  renderer = figure.canvas.get_renderer()
  boxes = [
    (t.get_text(), t.get_window_extent(renderer))
    for t in texts
    if t.get_text() and t.get_visible()
  ]
  return [
    (a, b)
    for (a, box_a), (b, box_b) in itertools.combinations(boxes, 2)
    if box_a.overlaps(box_b)
  ]


@pytest.mark.parametrize('ends', [(1, 2, 3, 4), (0.05, 0.1, 0.5, 4)])
def test_loss_shades_and_names_stages(tmp_path, ends):
  tokens = np.linspace(0, 4, 200)
  loss = 5 - tokens
  loss[50] = 1000.0
  loss[60:80] = np.nan
  stages = [
    plots.StageSpan(f'{context} tokens', begin, end)
    for context, begin, end in zip(
      (128, 1024, 4096, 16384), (0, *ends[:-1]), ends
    )
  ]
  figure = plots.plot_loss(
    tmp_path / 'figures' / 'loss.png',
    tokens,
    loss,
    stages=stages,
    heldout=([0, 4], [5.1, 1.2]),
  )
  check_picture(tmp_path / 'figures' / 'loss.png')
  (axes,) = figure.axes
  assert [t.get_text() for t in axes.texts] == [s.name for s in stages]
  assert not overlaps(figure, axes.texts)
  assert axes.get_ylim()[1] < 10  # one spike does not flatten the rest
  _, smooth, heldout = axes.lines
  assert np.nanmax(smooth.get_ydata()) < 6
  np.testing.assert_array_equal(heldout.get_ydata(), [5.1, 1.2])


def test_loss_of_one_record(tmp_path):
  plots.plot_loss(tmp_path / 'a.png', [1.0], [2.0], stages=[])
  check_picture(tmp_path / 'a.png')


@pytest.mark.parametrize('count, legends', [(3, 1), (40, 0)])
def test_violation_has_one_line_a_layer(tmp_path, count, legends):
  violation = np.exp(-np.arange(50.0))[:, None] + 0.01 * np.arange(count)
  figure = plots.plot_violation(
    tmp_path / 'v.png', range(50), violation, layers=range(2, 2 + count)
  )
  check_picture(tmp_path / 'v.png')
  axes = figure.axes[0]
  assert len(axes.lines) == count and axes.get_yscale() == 'log'
  assert (axes.get_legend() is not None) == bool(legends)
  assert len(figure.axes) == 2 - legends  # a colour bar instead
  flat = plots.plot_violation(
    tmp_path / 'v.png', [1], np.zeros((1, count)), layers=range(count)
  )
  assert flat.axes[0].get_yscale() == 'linear'


def test_violation_checks_shapes(tmp_path):
  with pytest.raises(ValueError, match=r'need \(3, 2\)'):
    plots.plot_violation(
      tmp_path / 'v.png', range(3), np.zeros((2, 3)), layers=(1, 2)
    )


@pytest.mark.parametrize('largest', [1.1, 5.0, 40.0, 300.0])
@pytest.mark.parametrize('layers', [3, 92])
def test_loads_are_a_panel_a_moment(tmp_path, layers, largest):
  spread = np.array([0.0, 0.2, 0.5, 0.9, 1.1, 1.4, largest])
  bands = np.tile(spread, (layers, 1))
  moments = [('cold', bands), ('step 1', bands / 2), ('step 1,000', bands)]
  numbers = list(range(2, 2 + layers))
  figure = plots.plot_loads(tmp_path / 'l.png', moments, layers=numbers)
  check_picture(tmp_path / 'l.png')
  assert [a.get_title() for a in figure.axes] == [m[0] for m in moments]
  assert not overlaps(figure, [a.title for a in figure.axes])
  for axes, (_, wanted) in zip(figure.axes, moments):
    median = axes.lines[0].get_ydata()
    np.testing.assert_array_equal(median[:-1], wanted[:, 3])
    assert axes.get_ylim()[1] > largest
    assert not overlaps(figure, axes.get_xticklabels())
  assert not overlaps(figure, figure.axes[0].get_yticklabels())
  names = [t.get_text() for t in figure.legends[0].get_texts()]
  assert names == ['all experts', '5 to 95 %', '25 to 75 %', 'median', 'mean']


def test_depth_mix_leaves_absent_sources_empty(tmp_path):
  rows = [
    ('1 attn', {'emb': 1.0}),
    ('1 ffn', {'emb': 0.25, 'partial': 0.75}),
    ('2 attn', {'emb': 0.5, 'b1': 0.25, 'partial': 0.25}),
    ('output', {'emb': 0.0, 'b1': 0.4, 'b2': 0.6}),
  ]
  figure = plots.plot_depth_mix(tmp_path / 'm.png', rows)
  check_picture(tmp_path / 'm.png')
  axes = figure.axes[0]
  names = [t.get_text() for t in axes.get_xticklabels()]
  assert names == ['emb', 'b1', 'b2', 'partial']
  assert [t.get_text() for t in axes.get_yticklabels()] == [r[0] for r in rows]
  grid = axes.images[0].get_array()
  nan = np.nan
  want = [
    [1.0, nan, nan, nan],
    [0.25, nan, nan, 0.75],
    [0.5, 0.25, nan, 0.25],
    [0.0, 0.4, 0.6, nan],
  ]
  np.testing.assert_array_equal(np.ma.filled(grid, nan), want)
  assert len(axes.texts) == 9  # one number a weight, none elsewhere
  assert not overlaps(figure, [*axes.texts, *axes.get_yticklabels()])


def test_loss_by_position_is_one_line_a_stage(tmp_path):
  curves = [
    (f'{n} tokens', 2.0 ** np.arange(k), np.linspace(3, 2, k))
    for n, k in ((128, 8), (16384, 15))
  ]
  figure = plots.plot_loss_by_position(tmp_path / 'p.png', curves)
  check_picture(tmp_path / 'p.png')
  (axes,) = figure.axes
  assert axes.get_xscale() == 'log' and len(axes.lines) == 2
  labels = [t.get_text() for t in axes.get_xticklabels()]
  assert '16K' in labels and '64' in labels
  assert not overlaps(figure, axes.get_xticklabels())
