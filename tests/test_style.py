"""The repository's own rules: imports point one way, suffixes mean axes."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ('pallas_kernels', 'trimoe_jax', 'experiments')
FILES = [p for name in PACKAGES for p in sorted((ROOT / name).rglob('*.py'))]
# A suffix that is no list of axes.
WORDS = ('ids', 'out', 'raw', 'hi', 'lo')


def imported(tree):
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield node.module or ''


@pytest.mark.parametrize('package', PACKAGES)
def test_imports_point_left(package):
  later = PACKAGES[PACKAGES.index(package) + 1 :]
  for path in FILES:
    if path.relative_to(ROOT).parts[0] == package:
      for name in imported(ast.parse(path.read_text())):
        assert name.split('.')[0] not in later, f'{path} imports {name}'


def operand_name(node):
  """The variable behind `x`, `x.astype(...)` or `module.x`."""
  while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
    if node.func.attr != 'astype':
      return None
    node = node.func.value
  if isinstance(node, ast.Attribute):
    return node.attr
  return node.id if isinstance(node, ast.Name) else None


def mismatches(path):
  for node in ast.walk(ast.parse(path.read_text())):
    is_einsum = (
      isinstance(node, ast.Call)
      and isinstance(node.func, ast.Attribute)
      and node.func.attr == 'einsum'
      and node.args
      and isinstance(node.args[0], ast.Constant)
    )
    if not is_einsum:
      continue
    terms = node.args[0].value.split('->')[0].split(',')
    for term, operand in zip(terms, node.args[1:], strict=False):
      name = operand_name(operand)
      suffix = name.rsplit('_', 1)[1] if name and '_' in name else ''
      if suffix and suffix not in WORDS and suffix != term.replace('...', ''):
        yield f'{path}:{node.lineno}: {name} is used as {term}'


def test_einsum_operands_carry_their_axes():
  found = [line for path in FILES for line in mismatches(path)]
  assert not found, '\n'.join(found)


def test_the_lint_sees_a_wrong_suffix(tmp_path):
  path = tmp_path / 'wrong.py'
  path.write_text("jnp.einsum('btd,df->btf', x_btd, w_fd.astype(t))\n")
  assert len(list(mismatches(path))) == 1


def test_sizes():
  for path in FILES:
    is_kernel = path.relative_to(ROOT).parts[0] == 'pallas_kernels'
    lines = path.read_text().count('\n')
    assert lines <= (900 if is_kernel else 600), f'{path}: {lines} lines'
    if path.parent == ROOT / 'experiments':
      assert lines < 120, f'{path}: a verb stays under 120 lines'
