"""The examples of the pages and docstrings run, and links lead somewhere."""

import doctest
import importlib
import importlib.util
import pathlib
import re

import jax
import pytest

from tests.support import examples

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = ROOT / 'docs'
PAGES = [
  *sorted(page for page in DOCS.rglob('*.md') if '_site' not in page.parts),
  *(ROOT / name for name in ('CHANGELOG.md', 'CONTRIBUTING.md')),
]
WITH_EXAMPLES = [page for page in PAGES if examples.blocks(page, 'python')]
AT_A_PROMPT = [page for page in PAGES if '    >>> ' in page.read_text()]
WITH_DOCTESTS = [
  path
  for path in sorted((ROOT / 'slipstream_jax').rglob('*.py'))
  if '>>> ' in path.read_text()
]
LINK = re.compile(r'\]\(\s*([^)\s]+)\s*\)')
PROGRAM = re.compile(r'python -m (experiments(?:\.\w+)+)')
KEY = re.compile(r'\bconfig\.([a-z_]+(?:\.[a-z_]+)*)')
# Made when the site is built: docs/_site/hooks.py.
BUILT = re.compile(r'^(\.\./)?api/\w+\.md$')


def name(path):
  return str(path.relative_to(ROOT))


def test_there_are_examples():
  assert WITH_EXAMPLES
  assert WITH_DOCTESTS


@pytest.mark.parametrize('page', WITH_EXAMPLES, ids=name)
def test_examples_of_a_page_run(page, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)  # for what they write
  examples.run(page)


@pytest.mark.parametrize('page', AT_A_PROMPT, ids=name)
def test_examples_at_a_prompt_of_a_page_run(page):
  with jax.transfer_guard('allow'):
    result = doctest.testfile(str(page), module_relative=False)
  assert result.attempted
  assert not result.failed


@pytest.mark.parametrize('path', WITH_DOCTESTS, ids=name)
def test_examples_of_docstrings_run(path):
  module = '.'.join(path.relative_to(ROOT).with_suffix('').parts)
  with jax.transfer_guard('allow'):  # as outside of these tests
    result = doctest.testmod(importlib.import_module(module))
  assert result.attempted
  assert not result.failed


@pytest.mark.parametrize('page', PAGES, ids=name)
def test_links_lead_somewhere(page):
  text = re.sub(r'```.*?```|`[^`]*`', '', page.read_text(), flags=re.DOTALL)
  for target in LINK.findall(text):
    path = target.partition('#')[0]
    if ':' in path or not path or BUILT.match(path):
      continue
    assert (page.parent / path).exists(), f'{name(page)}: {target}'


@pytest.mark.parametrize('page', PAGES, ids=name)
def test_programs_that_a_page_names_exist(page):
  for program in PROGRAM.findall(page.read_text()):
    assert importlib.util.find_spec(program), program


@pytest.fixture(scope='module')
def keys():
  """Of all configs, those of one section's name included."""
  pytest.importorskip('ml_collections')
  known = set()
  for path in sorted((ROOT / 'configs').glob('[!_]*.py')):
    module = importlib.import_module(f'configs.{path.stem}')
    if hasattr(module, 'get_config'):
      known |= set(of_config('', module.get_config()))
  return known


def of_config(prefix, config):
  for key, value in config.items():
    yield prefix + key
    if hasattr(value, 'items'):
      yield from of_config(f'{prefix}{key}.', value)


@pytest.mark.parametrize('page', PAGES, ids=name)
def test_keys_that_a_page_names_exist(page, keys):
  prose = page.read_text()
  for _, block in examples.blocks(page, 'python'):
    prose = prose.replace(block, '')  # a `config` of its own
  assert set(KEY.findall(prose)) <= keys
