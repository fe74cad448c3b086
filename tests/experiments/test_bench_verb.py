"""The bench verb: flags, dispatch, and one error for each mistake."""

import pytest

from experiments import bench


def test_flags():
  flags = ['--chip=v6e', '--length=8192', '--peer=False', '--names=("a",)']
  assert bench.parse(flags) == {
    'chip': 'v6e',
    'length': 8192,
    'peer': False,
    'names': ('a',),
  }
  with pytest.raises(ValueError, match='write --name=value'):
    bench.parse(['chip=v6e'])


@pytest.mark.parametrize('verb', [*bench.VERBS, 'tpu_schedule'])
def test_every_verb_has_a_function(verb):
  run, keywords = bench.function_of(verb, {})
  assert callable(run) and keywords == {}


def test_specs_by_name():
  _, keywords = bench.function_of('kda', {'specs': 'small,k3_head'})
  assert [spec.name for spec in keywords['specs']] == ['small', 'k3_head']


@pytest.mark.parametrize(
  'verb,keywords,message',
  [
    ('kdb', {}, 'the verbs are'),
    ('tpu_schedule', {'op': 'mla'}, '--op=.*kda'),
    ('kda', {'chunks': 64}, 'no flags of kda; it takes'),
  ],
)
def test_mistakes(verb, keywords, message):
  with pytest.raises(ValueError, match=message):
    bench.function_of(verb, keywords)


def test_help_and_mistakes_at_the_command_line(capsys):
  assert bench.main(['--help']) == 0
  assert 'tpu_schedule --chip=v6e' in capsys.readouterr().out
  assert bench.main(['kdb']) == 2
  assert capsys.readouterr().err.startswith('bench: ')
