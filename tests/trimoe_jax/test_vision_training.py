"""A run with images: it stops, continues bitwise, answers and reports."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.configs import as_dict
from experiments.configs import vision as vision_page
from trimoe_jax import loop, report, report_pictures
from trimoe_jax.config import TrainConfig, from_dict
from trimoe_jax.data import ByteTokenizer, pictures
from trimoe_jax.metrics import read_jsonl
from trimoe_jax.run import prepare

TOWER = dict(
  width=16,
  layers=1,
  heads=2,
  head_dim=8,
  hidden=16,
  rows=4,
  columns=4,
  placeholder=ByteTokenizer.media_id,
)


def with_images(small_config) -> TrainConfig:
  model = dataclasses.asdict(small_config().model) | {'vision': TOWER}
  return small_config(
    model=model,
    data=dict(source='pictures', heldout_fraction=0.3),
    stages=[dict(context=64, batch=4, steps=4, patches=32, images=2)],
    checkpoint=dict(every_steps=2),
    eval=dict(batches=60, batch_tokens=512, needles=1, sample_tokens=8),
  )


@pytest.mark.slow
def test_a_run_with_images_continues_bitwise(
  small_config, tmp_path, monkeypatch
):
  monkeypatch.setattr(pictures, 'COUNT', 60)
  config = with_images(small_config)
  whole = prepare(config, tmp_path / 'whole')
  state = loop.train(whole, should_stop=lambda: False)
  part = prepare(config, tmp_path / 'part')
  asked = iter([False, True])
  assert loop.train(part, should_stop=lambda: next(asked)) is None
  part = prepare(config, tmp_path / 'part')
  resumed = loop.train(part, should_stop=lambda: False)
  for x, y in zip(
    jax.tree.leaves(state.params), jax.tree.leaves(resumed.params)
  ):
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))

  report.write(part, resumed)
  text = part.report_path.read_text()
  assert '## Pictures' in text and '| What is it? In digits |' in text
  assert (part.workdir / 'figures' / 'answers.png').exists()
  last = [r for r in read_jsonl(part.metrics_path) if r['kind'] == 'eval'][-1]
  assert len(last['questions']) == 3
  assert len(last['examples']) == 18


def test_answers_are_drawn(tmp_path):
  shown = [
    (
      np.full((56, 56, 3), 40 * n, np.uint8),
      [['How many', '2', '2', True], ['Which', '4-7-', '4-\n-', n % 2 == 0]],
    )
    for n in range(5)
  ]
  figure = report_pictures.plot_answers(tmp_path / 'x.png', shown)
  texts = [t.get_text() for axes in figure.axes for t in axes.texts]
  assert len(texts) == 12 and 'Which? 4-·-' in texts
  assert '    true: 4-7-' in texts
  assert (tmp_path / 'x.png').stat().st_size > 1000


def test_images_need_a_tower_and_no_pipeline(small_config):
  values = as_dict(vision_page.get_config())
  values['model']['vision'] = None
  with pytest.raises(ValueError, match='the model has no vision tower'):
    from_dict(TrainConfig, values)
  values = as_dict(vision_page.get_config())
  values['mesh'] = {'pipe': 2}
  values['stages'][0]['micro_batches'] = 2
  with pytest.raises(ValueError, match='does not train on images yet'):
    from_dict(TrainConfig, values)
