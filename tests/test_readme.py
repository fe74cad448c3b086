"""What the README tells a person to type exists and runs."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / 'README.md').read_text()
PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]


def test_library_example_runs(monkeypatch):
  monkeypatch.chdir(ROOT)
  (code,) = re.findall(r'```python\n(.*?)```', TEXT, re.DOTALL)
  scope = {}
  exec(code, scope)
  assert scope['logits'].shape == (1, 3, 101)
  assert scope['more'].shape == (1, 8)


def test_commands_exist():
  verbs = set(re.findall(r'python -m experiments\.(\w+)', TEXT))
  assert {'train', 'sample', 'convert', 'bench'} <= verbs
  for verb in verbs:
    assert (ROOT / 'experiments' / f'{verb}.py').exists(), verb
  for path in re.findall(r'experiments/configs/\w+\.py', TEXT):
    assert (ROOT / path).exists(), path
  makefile = (ROOT / 'Makefile').read_text()
  for target in re.findall(r'\bmake ([a-z-]+)', TEXT):
    assert re.search(rf'^{target}:', makefile, re.MULTILINE), target


@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.name)
def test_links_and_trees_name_files(page):
  text = page.read_text()
  for target in re.findall(r'\]\(([^)#]+)\)', text):
    if '://' not in target:
      assert (page.parent / target).exists(), target
  top = re.findall(r'^    (\w+/)  ', text, re.MULTILINE)
  for name in top:
    assert (ROOT / name).is_dir(), name


def test_repository_speaks_of_itself():
  for path in ROOT.rglob('*'):
    inside = path.relative_to(ROOT).parts
    if inside[0].startswith('.') or path.suffix not in ('.py', '.md', '.cfg'):
      continue
    text = path.read_text()
    for word in ('/work' + '/', 'pypi' + '.org', '..' + '/shared'):
      assert word not in text, f'{path} says {word}'
