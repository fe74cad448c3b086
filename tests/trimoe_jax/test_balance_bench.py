"""The balance benchmark: its routers, tables and figure."""

import json

import numpy as np
import pytest
from matplotlib.image import imread

from trimoe_jax.config import MoeConfig, RouterConfig
from trimoe_jax.evals import balance, router_traces

MOE = MoeConfig(experts=32, top_k=2, hidden=8, latent=8)


def violations(source, steps=8, tokens=2048, **fields):
  records = source(RouterConfig(**fields), steps=steps, tokens=tokens, moe=MOE)
  assert len(records) == steps
  return [r['max_vio'] for r in records]


def test_a_repeated_batch_settles():
  none = violations(router_traces.repeated, balance='none')
  quantile = violations(router_traces.repeated)
  assert none[0] > 1.0 and set(none) == {none[0]} == {quantile[0]}
  assert quantile[-1] < 0.1


def test_a_drifting_router_is_followed():
  none = violations(router_traces.drifting, balance='none')
  quantile = violations(router_traces.drifting)
  assert len(set(none)) > 1
  assert max(quantile[2:]) < 0.5 * min(none)


def test_an_auxiliary_loss_moves_the_weights():
  loss = violations(router_traces.repeated, steps=30, balance='aux_loss')
  assert loss[-1] < 0.7 * loss[0]


@pytest.mark.slow
def test_a_layer_trains_on_text(text_folder):
  records = router_traces.text(
    RouterConfig(),
    steps=6,
    tokens=4 * router_traces.CONTEXT,
    moe=MOE,
    source=str(text_folder),
  )
  assert records[-1]['loss'] < records[0]['loss']
  assert records[-1]['max_vio'] < records[0]['max_vio']
  assert {'min_vio', 'dead', 'crossing_mass'} <= set(records[0])


@pytest.fixture
def fake_sources(monkeypatch):
  """Sources whose violation halves at every step."""

  def source(rule, *, steps, tokens):
    del rule, tokens
    return [
      dict(max_vio=8.0 / 2**n, min_vio=0.5, dead=n % 2, loss=3.0)
      for n in range(steps)
    ]

  monkeypatch.setattr(
    balance, 'SOURCES', dict.fromkeys(balance.SOURCES, source)
  )


def test_tables_and_figure(fake_sources, tmp_path, capsys):
  traces = balance.run(str(tmp_path / 'out'), steps=20)
  assert len(traces) == 3 * len(balance.RULES)
  printed = capsys.readouterr().out
  tables = (tmp_path / 'out' / 'balance.md').read_text()
  assert tables.strip() in printed
  rows = [x for x in tables.splitlines() if x.startswith('| none ')]
  assert rows[0].startswith('| none | 8.00 | 4.00 | 1.00 | 0.06 | 0.00 |')
  exact = [x for x in tables.splitlines() if x.startswith('| quantile, exact ')]
  assert exact[1].count('|  |') >= 1  # fewer steps than the others
  saved = json.loads((tmp_path / 'out' / 'balance.json').read_text())
  assert len(saved) == len(traces) and saved[0]['records'][0]['max_vio'] == 8.0
  image = imread(tmp_path / 'out' / 'balance.png')
  assert image.ndim == 3 and image.std() > 0.01


def test_every_rule_has_a_look_of_its_own(fake_sources, tmp_path):
  looks = {(rule.colour, rule.line) for rule in balance.RULES}
  assert len(looks) == len({r.name for r in balance.RULES}) == 10
  traces = balance.run(steps=4)
  sizes = dict.fromkeys(balance.SOURCES, 8192)
  figure = balance.draw(tmp_path / 'b.png', traces, sizes)
  names = [t.get_text() for t in figure.legends[0].get_texts()]
  assert names[:-1] == [rule.name for rule in balance.RULES]
  renderer = figure.canvas.get_renderer()
  for axes in figure.axes:
    boxes = [t.get_window_extent(renderer) for t in axes.get_xticklabels() if t]
    assert not any(a.overlaps(b) for a, b in zip(boxes, boxes[1:]))


def test_noise_floor():
  """Largest of 896 Poisson loads with a mean of 1,024."""
  rng = np.random.default_rng(0)
  loads = rng.poisson(1024, (200, 896))
  drawn = np.mean(loads.max(1) / 1024 - 1)
  assert balance.noise_floor(57344) == pytest.approx(drawn, rel=0.2)


@pytest.mark.parametrize(
  'flags, message',
  [
    (dict(sources='text,images'), 'sources=images unknown; choose among'),
    (dict(steps=0), 'must be positive'),
    (dict(text_tokens=100), 'no multiple of 64.*choose 128'),
  ],
)
def test_mistakes(flags, message):
  with pytest.raises(ValueError, match=message):
    balance.run(**flags)
