"""The benchmark of decoding: its sizes, its rows, its figure, mistakes."""

import dataclasses

import jax
import pytest
from matplotlib.image import imread

from experiments.configs import micro
from trimoe_jax.config import ModelConfig, from_dict
from trimoe_jax.model.mha import FullAttention
from trimoe_jax.model.model import count_parameters
from trimoe_jax.sampling import bench, bench_figure


def test_micro_is_the_configuration():
  want = from_dict(ModelConfig, micro.get_config().model.to_dict())
  assert dataclasses.replace(bench.SHAPES['micro'], remat=want.remat) == want


def test_full_attention_has_the_same_size():
  config = bench.SHAPES['micro']
  ours = count_parameters(config).total
  full = count_parameters(FullAttention.of(config)).total
  assert full == pytest.approx(ours, rel=0.02)


def test_bytes_of_a_token():
  grown = {}
  for name, kind in bench.MODELS.items():
    config = kind.of(bench.SHAPES['micro'])
    size = lambda length, c=config: bench._cache_bytes(c, 1, length)
    grown[name] = (size(2048) - size(1024)) / 1024
  assert grown['trimoe'] == 4 * (64 + 32) * 2  # latents of four layers
  assert grown['full'] == 13 * 14 * (64 + 64) * 2


def test_a_filled_cache_looks_read():
  config = bench.MODELS['trimoe'].of(bench.SHAPES['tiny'])
  cache = bench._state(config, 2, 1500, 2100).cache
  assert int(cache.length) == 1500
  assert cache.valid.sum(1).tolist() == [1500, 1500]
  assert cache.room == 2100
  assert all(bool((x != 0).any()) for x in jax.tree.leaves(cache.layers))


def test_the_figure_has_both_models(tmp_path):
  rows = [
    {
      'model': name,
      'prefix': 4**n * 1024,
      'batch': 1,
      'tokens/s': 900.0 / (1 + slope * 4**n),
      'MB/sequence': 2.0 + slope * 4**n,
    }
    for name, slope in (('trimoe', 0.01), ('full', 0.6))
    for n in range(6)
  ]
  figure = bench_figure.draw(tmp_path / 'decode.png', rows)
  assert imread(tmp_path / 'decode.png').std() > 0.01
  labels = figure.axes[0].get_legend_handles_labels()[1]
  assert labels == ['KDA + MLA', 'full attention']


def test_mistakes():
  with pytest.raises(ValueError, match="shape='huge'"):
    bench.run('huge')
  with pytest.raises(ValueError, match="models='half'"):
    bench.run('tiny', models='half')


@pytest.mark.slow
def test_rows(tmp_path):
  rows = bench.run(
    'tiny', prefixes=(1024,), tokens=2, repeats=1, out=str(tmp_path)
  )
  assert [row['model'] for row in rows] == ['trimoe', 'full']
  for row in rows:
    assert row['tokens/s'] * row['ms/token'] == pytest.approx(1e3)
  assert (tmp_path / 'decode.png').exists()
