"""A mistake in the configuration is one clear error before any compilation."""

import json

import pytest

from experiments.configs import as_config_dict, as_dict, tiny
from trimoe_jax.config import ModelConfig, TrainConfig, from_dict
from trimoe_jax.run import prepare

STAGE = dict(context=128, batch=2, steps=3)


@pytest.mark.parametrize(
  'values, error, words',
  [
    (dict(stagess=[STAGE]), ValueError, 'stagess.*did you mean stages'),
    (
      dict(stages=[STAGE], model=dict(kda=dict(haeds=2))),
      ValueError,
      'model.kda.haeds.*did you mean model.kda.heads',
    ),
    (
      dict(stages=[STAGE], optim=dict(lr='fast')),
      TypeError,
      "optim.lr='fast' is a str; give float",
    ),
    (
      dict(stages=[STAGE | dict(batch=2.5)]),
      TypeError,
      r'stages\[0\].batch=2.5 is a float; give int',
    ),
    (
      dict(stages=[STAGE], model=dict(remat='blok')),
      ValueError,
      "model.remat='blok'.*Nearest: 'block'",
    ),
    (
      dict(stages=[STAGE], model=dict(moe=dict(experts=4, top_k=4))),
      ValueError,
      'moe.top_k=4.*smaller than moe.experts=4',
    ),
    (
      dict(stages=[STAGE], mesh=dict(tensor=3)),
      ValueError,
      r'model.kda.heads=4 is not divisible by.*tensor \(3\)',
    ),
    (
      dict(stages=[STAGE | dict(micro_batches=3)]),
      ValueError,
      'batch=2 is not divisible by stage.micro_batches=3',
    ),
    (dict(), ValueError, 'stages is empty'),
    (
      dict(stages=[STAGE], model=dict(router=dict(warm_start=-1))),
      ValueError,
      'router.warm_start=-1 is negative.*or 0',
    ),
    (
      dict(stages=[STAGE], model=dict(mla_layers=[9])),
      ValueError,
      r'names layers \[9\].*numbered 1 to 8',
    ),
    (
      dict(stages=[STAGE], model=dict(kda=dict(lower_bound=-6.0))),
      ValueError,
      r'lower_bound=-6.0 is outside \[-5, 0\)',
    ),
    (
      dict(stages=[STAGE], model=dict(kda=dict(heads=4, value_heads=6))),
      ValueError,
      'value_heads=6 is not a multiple',
    ),
  ],
)
def test_mistakes(values, error, words):
  with pytest.raises(error, match=words):
    from_dict(TrainConfig, values)


def test_exact_estimator_needs_one_micro_batch():
  values = dict(
    stages=[STAGE | dict(micro_batches=2)],
    model=dict(router=dict(estimator='exact')),
  )
  with pytest.raises(ValueError, match='needs all margins'):
    from_dict(TrainConfig, values)


@pytest.mark.parametrize(
  'change, words',
  [
    (dict(data=dict(source='/no/such/folder')), '/no/such/folder'),
    (dict(mesh=dict(data=3)), r'not divisible by.*data\*expert \(3\)'),
    (dict(mesh=dict(context=16)), 'needs 16 devices.*nearest that fits'),
  ],
)
def test_what_does_not_fit_the_machine(change, words, small_config, tmp_path):
  with pytest.raises(ValueError, match=words):
    prepare(small_config(**change), tmp_path / 'run')
  assert not (tmp_path / 'run').exists()  # nothing was claimed


def test_empty_corpus(small_config, tmp_path):
  (tmp_path / 'empty').mkdir()
  data = dict(source=str(tmp_path / 'empty'))
  with pytest.raises(ValueError, match='empty'):
    prepare(small_config(data=data), tmp_path / 'run')


def test_document_longer_than_a_stage(small_config, tmp_path, text_folder):
  data = dict(source=str(text_folder), long_documents='refuse')
  with pytest.raises(ValueError, match='stage 1'):
    prepare(small_config(data=data), tmp_path / 'run')


def test_vocabulary_smaller_than_the_tokenizer(small_config, tmp_path):
  config = small_config()
  values = json.loads(json.dumps(as_dict(as_config_dict(config))))
  values['model']['vocab_size'] = 100
  with pytest.raises(ValueError, match='vocab_size=100.*264'):
    prepare(from_dict(TrainConfig, values), tmp_path / 'run')


def test_flags_and_back():
  config = from_dict(TrainConfig, as_dict(tiny.get_config()))
  assert from_dict(TrainConfig, as_dict(as_config_dict(config))) == config
  flags = tiny.get_config()
  flags.optim.lr = 0.5
  flags.data.source = 'corpus/*.txt'
  changed = from_dict(TrainConfig, as_dict(flags))
  assert changed.optim.lr == 0.5 and changed.data.source == 'corpus/*.txt'
  with pytest.raises(ValueError, match='variant'):
    tiny.get_config('huge')


def test_layers_of_k3():
  k3 = ModelConfig(layers=93, mla_layers=(*range(4, 93, 4), 93))
  mla = [i for i in range(93) if k3.mixer(i) == 'mla']
  assert len(mla) == 24 and mla[-2:] == [91, 92]
  assert [k3.ffn(i) for i in (0, 1)] == ['dense', 'moe']
