"""Pages are true as far as a parser can tell.

Examples run, links lead somewhere, commands and keys exist, and figures are
those of the benchmark page that has them.
"""

import ast
import doctest
import functools
import importlib
import importlib.util
import pathlib
import re
import shlex

import jax
import pytest

import slipstream_jax as slip
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
COMMAND = re.compile(
  r'python3? -m ((?:experiments|slip_serve)[\w.]*\b)([^\n`|&;]*)'
)
KEY = re.compile(r'\bconfig\.(?!json\b)([a-z_]+(?:\.[a-z_]+)*)')
# Made when the site is built: docs/_site/hooks.py.
BUILT = re.compile(r'^(\.\./)?api/\w+\.md$')


TEXTS = [*PAGES, ROOT / 'README.md']
PROGRAMS = [
  path
  for room in ('configs', 'experiments', 'slip_serve', 'slipstream_jax')
  for path in sorted((ROOT / room).rglob('*.py'))
  if re.search(r'-m (experiments|slip_serve)|=\.\.\.', path.read_text())
]


def name(path):
  return str(path.relative_to(ROOT))


@pytest.mark.parametrize(
  'page',
  [
    pytest.param(
      page,
      id=name(page),
      marks=[pytest.mark.slow] * (page.stem not in ('index', 'quickstart')),
    )
    for page in WITH_EXAMPLES
  ],
)
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


@pytest.mark.parametrize('page', TEXTS, ids=name)
def test_links_lead_somewhere(page):
  text = re.sub(r'```.*?```|`[^`]*`', '', page.read_text(), flags=re.DOTALL)
  for target in LINK.findall(text):
    path = target.partition('#')[0]
    if ':' in path or not path or BUILT.match(path):
      continue
    assert (page.parent / path).exists(), f'{name(page)}: {target}'


@functools.cache
def keys_of(file=None, variant=''):
  """The keys of a config, sections included; of all configs if None."""
  pytest.importorskip('ml_collections')
  if file is None:
    files = sorted((ROOT / 'configs').glob('[!_]*.py'))
    known = {f'configs/{path.name}' for path in files}
    known.remove('configs/common.py')  # no config, but what they share
    return frozenset().union(*(keys_of(one) for one in known))
  module = importlib.import_module(f'configs.{pathlib.Path(file).stem}')
  config = module.get_config(variant) if variant else module.get_config()
  return frozenset(_keys('', config))


def _keys(prefix, config):
  for key, value in config.items():
    yield prefix + key
    if hasattr(value, 'items'):
      yield from _keys(f'{prefix}{key}.', value)


@pytest.mark.parametrize('page', TEXTS, ids=name)
def test_keys_that_a_page_names_exist(page):
  prose = page.read_text()
  for _, block in examples.blocks(page, 'python'):
    prose = prose.replace(block, '')  # a `config` of its own
  assert set(KEY.findall(prose)) <= keys_of()


def flags_of(program):
  """What a program takes, by the source of its package."""
  path = pathlib.Path(importlib.util.find_spec(program).origin)
  if path.name == '__init__.py':
    path = path.with_name('__main__.py')
  text = path.read_text()
  if 'import runner' in text:  # benches share a flag
    text += (ROOT / 'experiments/bench/runner.py').read_text()
  known = re.findall(
    r"(?:DEFINE_\w+\(|add_argument\()\s*'(?:--)?([\w-]+)'", text
  )
  return {'help', *known, *(f'no{flag}' for flag in known)}


def commands(text):
  """Each command of a text: the program and its words."""
  text = re.sub(r'\\\n\s*', ' ', text)
  for program, rest in COMMAND.findall(text):
    if not program.endswith('.NAME'):  # any of them
      yield program.rstrip('.'), rest


def check_command(program, rest):
  """Fails where a command names what there is not.

  Words in capitals and files outside of configs/ stand for a user's own.
  """
  assert importlib.util.find_spec(program), program
  assert '...' not in rest, rest
  file, variant = None, ''
  for word in shlex.split(rest):
    flag, _, value = word.partition('=')
    if flag == '--config':
      if value.startswith('configs/') and 'NAME' not in value:
        file, _, variant = value.partition(':')
        assert (ROOT / file).is_file(), word
    elif flag.startswith('--config.'):
      assert flag.removeprefix('--config.') in keys_of(file, variant), word
    elif flag.startswith('--'):
      assert flag[2:] in flags_of(program), f'{program}: {word}'


@pytest.mark.parametrize('page', TEXTS, ids=name)
def test_commands_of_a_page_run_as_they_stand(page):
  for program, rest in commands(page.read_text()):
    assert not re.search(r'\[-', rest), f'{program}{rest}: no optional parts'
    check_command(program, rest)
  for line in examples.commands(page):
    assert '...' not in line, line


@pytest.mark.parametrize('path', PROGRAMS, ids=name)
def test_commands_of_a_program_exist(path):
  """In its docstring, which is its help, and in its errors."""
  for text in texts_of(path):
    for program, rest in commands(text):
      for sign in '[]':  # parts that may be left out
        rest = rest.replace(sign, ' ')
      if 'config.key=value' not in rest:
        check_command(program, rest)
    assert not re.search(r'--[\w.]+=\.\.\.', text), text


def texts_of(path):
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
      yield node.value
    elif isinstance(node, ast.JoinedStr):
      yield ''.join(
        part.value if isinstance(part, ast.Constant) else 'X'
        for part in node.values
      )


def features():
  """Our column of the comparison, of rows that are features: name to cell."""
  page = (DOCS / 'comparison.md').read_text()
  table = page.partition('## Feature by feature')[2]
  table = table.partition('**Around it**')[0]
  rows = [line.strip('| ').split('|') for line in table.splitlines()]
  return {
    row[0].strip(): row[-1].strip()
    for row in rows
    if len(row) == 7 and row[0].strip() not in ('', '---')
  }


def is_there(claim):
  """Whether a name or a link of the comparison leads somewhere.

  A name is one of `slip`, a config key, a program or a file.
  """
  head, _, rest = claim.partition('.')
  if claim.endswith('.md') or '.md#' in claim:
    return (DOCS / claim.partition('#')[0]).is_file()
  if head == 'slip':
    return hasattr(slip, rest)
  if head == 'config':
    return rest in keys_of()
  if claim.endswith('.py'):
    return (ROOT / claim).is_file()
  return head in ('experiments', 'slip_serve') and bool(
    importlib.util.find_spec(claim)
  )


def test_each_feature_that_we_claim_names_what_shows_it():
  assert len(features()) > 20
  for feature, cell in features().items():
    claims = re.findall(r'`([^`]+)`', re.sub(r'\[.*?\]', '', cell))
    claims += LINK.findall(cell)
    assert re.match('(yes|no)\\b', cell), f'{feature}: {cell}'
    assert bool(claims) == cell.startswith('yes'), f'{feature}: {cell}'
    for claim in claims:
      assert is_there(claim), f'{feature}: {claim}'


FIGURE = re.compile(
  r'(?:AUC|log loss) [\d.]*\d|[\d.]+ % of the examples left out'
)


def test_figures_of_the_configs_are_those_of_the_newest_page():
  found = 0
  for path in sorted((ROOT / 'configs').glob('[!_]*.py')):
    words = ast.get_docstring(ast.parse(path.read_text())) or ''
    words = ' '.join(words.split())
    for part in re.split(r' (?=\* `configs/)', words):
      of = re.match(r'\* `(configs/[^`]+)`', part)
      config = of[1] if of else f'configs/{path.name}'
      before, *expected = re.split(r'\bExpected\b', part)
      for text in expected:
        options = re.findall(r'`(--config[^`]+)`', before)
        row = measured(frozenset([config, *options]))
        stated = re.match(rf': ((?:{FIGURE.pattern})(?:, |\b))+', text)
        assert stated, f'{config}: Expected{text:.60}'
        for figure in FIGURE.findall(stated[0]):
          number = re.search(r'\d[\d.]*', figure)[0]
          title = figure.replace(number, '').replace('% of the', '').strip()
          digits = len(number.partition('.')[2])
          value = float(row[title].rstrip(' %'))
          assert f'{value:.{digits}f}' == number, f'{config}: {figure}'
          found += 1
        before = text
  assert found >= 10


def measured(setting):
  """The row of that config and these options, from the newest page with one."""
  for page in sorted((DOCS / 'benchmarks').glob('2*.md'), reverse=True):
    head = []
    for line in page.read_text().splitlines():
      cells = [cell.strip() for cell in line.strip('|').split('|')]
      if not line.startswith('|'):
        head = []
      elif not head:
        head = cells
      elif frozenset(re.findall('`([^`]+)`', cells[0])) == setting:
        return dict(zip(head, cells, strict=True))
  raise AssertionError(f'no page has figures of {" ".join(sorted(setting))}')
