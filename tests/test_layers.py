"""The rules of the house that a parser can check: docs/architecture.md.

Every file is checked by default: a new room must be named in `GROUPS`, or the
tests fail.
"""

import ast
import functools
import json
import pathlib
import re
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).resolve().parent
ROOT = TESTS.parent
PACKAGE = ROOT / 'slipstream_jax'
FILES = sorted(PACKAGE.rglob('*.py'))
PROGRAMS = sorted(
  path
  for name in ('experiments', 'configs')
  for path in (ROOT / name).rglob('*.py')
)
SERVING = sorted((ROOT / 'slip_serve').rglob('*.py'))
GROUPS = [
  {
    *('types', 'tables'),
    *('errors', 'files', 'hashing'),
  },
  {'selection', 'transforms', 'models'},
  {
    *('store', 'placement', 'data', 'inputs', 'vocabulary', 'scoring'),
    *('columns', 'formats', 'packed', 'synthetic'),
  },
  {'schedules'},
  {'engine'},
  {'training'},
  {'checkpoint'},
  {'export'},
  {'api'},
]
# Rooms that see more than the groups above their own.
SIBLINGS = {
  'transforms': {'selection'},
  'store': {'placement'},
  'data': {'columns'},
  'vocabulary': {'columns', 'data'},
  'formats': {'columns', 'data', 'vocabulary'},
  'packed': {'columns', 'data', 'formats', 'vocabulary'},
  'inputs': {'columns', 'data', 'packed', 'vocabulary'},
  'synthetic': {'data'},
}
PURE = {'selection', 'transforms', 'models'}
HOST_ONLY = {*GROUPS[2], *GROUPS[3]}
HEAVY = {'numba', 'polars', 'scipy', 'orbax'}
# Words that say nothing of what a variable holds.
EMPTY_WORDS = {'told', 'made', 'found', 'shown', 'each'}


def room(path):
  parts = path.relative_to(PACKAGE).parts
  return parts[0] if len(parts) > 1 else path.stem


def tree(path):
  return ast.parse(path.read_text())


def module(path):
  parts = path.relative_to(ROOT).with_suffix('').parts
  return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


@functools.cache
def imports(path):
  names = []
  for node in ast.walk(tree(path)):
    if isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
      names.append(node.module)
      names += [f'{node.module}.{alias.name}' for alias in node.names]
  return names


def rank(name):
  ranks = [i for i, group in enumerate(GROUPS) if name in group]
  assert ranks, f'{name} is in no group of tests/test_layers.py'
  return ranks[0]


def our_rooms(path):
  for name in imports(path):
    parts = name.split('.')
    if parts[0] == 'slipstream_jax' and len(parts) > 1:
      yield parts[1]


def named(paths):
  return pytest.mark.parametrize(
    'path', paths, ids=lambda p: str(p.relative_to(ROOT))
  )


# The package's own __init__ says where its names are, and is above all rooms.
ROOMS = [path for path in FILES if path != PACKAGE / '__init__.py']


def test_every_room_has_its_place():
  rooms = {room(path) for path in ROOMS}
  assert rooms == {name for group in GROUPS for name in group}


@named(ROOMS)
def test_imports_point_up(path):
  mine = room(path)
  for other in set(our_rooms(path)) - {mine}:
    upward = rank(other) < rank(mine)
    # The pure rooms serve anybody's JAX model, the host rooms go without JAX:
    # neither may lean on the other.
    apart = {rank(other), rank(mine)} == {1, 2}
    words = rank(other) == rank(mine) == 0
    allowed = words or (upward and not apart)
    allowed = allowed or other in SIBLINGS.get(mine, set())
    assert allowed, f'{path.name} of {mine} imports {other}'


@named(FILES)
def test_the_package_knows_no_program(path):
  for name in imports(path):
    assert name.split('.')[0] not in {'experiments', 'configs', 'tests'}, name
  # Errors and docstrings name arguments; experiments/common maps them to keys.
  spoken = re.findall(
    r'\bconfig\.[a-z]|--config|\bexperiments\.', path.read_text()
  )
  assert not spoken, spoken


def test_no_import_cycle():
  graph = {module(path): path for path in [*FILES, *PROGRAMS, *SERVING]}
  edges = {
    name: {m for m in imports(path) if m in graph and m != name}
    for name, path in graph.items()
  }
  done, trail = set(), []

  def visit(name):
    assert name not in trail, f'import cycle: {trail[trail.index(name) :]}'
    if name in done:
      return
    trail.append(name)
    for other in edges[name]:
      # A package's __init__ gathers its own files.
      if not name.startswith(f'{other}.'):
        visit(other)
    trail.pop()
    done.add(name)

  for name in edges:
    visit(name)


# Row files are read and written without JAX, as whatever is host only.
ROW_FILES = [
  PACKAGE / 'checkpoint' / f'{name}.py'
  for name in (
    *('chain', 'manifest', 'places', 'policies', 'quantize', 'row_file'),
  )
]


@named([*(path for path in ROOMS if room(path) in HOST_ONLY), *ROW_FILES])
def test_host_code_cannot_reenter_jax(path):
  for name in imports(path):
    assert name.split('.')[0] not in {'jax', 'flax', 'optax'}, name


@named([path for path in ROOMS if room(path) in PURE])
def test_pure_code_has_no_threads_or_files(path):
  for name in imports(path):
    banned = {'threading', 'queue', 'pathlib', 'os', 'io'}
    assert name.split('.')[0] not in banned, name


@pytest.mark.parametrize('name', sorted(PURE))
def test_a_pure_room_loads_nothing_heavy(name):
  modules = [module(path) for path in ROOMS if room(path) == name]
  script = f"""
import importlib, json, sys
for name in {modules}:
  importlib.import_module(name)
print(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))
"""
  done = subprocess.run(
    [sys.executable, '-c', script], cwd=ROOT, capture_output=True, check=True
  )
  assert not HEAVY & set(json.loads(done.stdout))


@named(ROOMS)
def test_kernels_live_with_their_subject(path):
  """A file of kernels is imported by its own room alone."""
  for name in imports(path):
    parts = name.split('.')
    ours = parts[0] == 'slipstream_jax' and len(parts) > 2
    if ours and parts[2].endswith('kernels'):
      assert parts[1] == room(path), name


@named(FILES)
def test_only_the_engine_moves_arrays(path):
  names = {
    node.attr
    for node in ast.walk(tree(path))
    if isinstance(node, ast.Attribute)
  }
  if room(path) != 'engine':
    assert not names & {'device_put', 'device_get'}
  if path.name != 'skip.py':
    assert 'io_callback' not in names


@named([*FILES, *PROGRAMS, *SERVING])
def test_no_print(path):
  for node in ast.walk(tree(path)):
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
      assert node.func.id != 'print'


@named(FILES)
def test_every_raise_shows_the_value(path):
  for node in ast.walk(tree(path)):
    if not isinstance(node, ast.Raise) or node.exc is None:
      continue
    if isinstance(node.exc, ast.Name):  # an exception made or caught before
      continue
    assert isinstance(node.exc, ast.Call), ast.unparse(node)
    name = ast.unparse(node.exc.func)
    if name == 'UserError':
      given = {keyword.arg for keyword in node.exc.keywords}
      assert given == {'got', 'where', 'hint'}, ast.unparse(node)
    else:
      # The last two are errors of their own that fill in all of a UserError.
      expected = ('StopIteration', 'AttributeError', 'BadLoss', 'DamagedError')
      assert name.startswith('_') or name in expected, name


# Modules of the package that need numpy and numba only.
LIGHT = {'errors', 'files', 'hashing'}


@named(SERVING)
def test_who_serves_knows_nothing_of_training(path):
  known = {*sys.stdlib_module_names, 'numpy', 'numba', 'jax', 'slip_serve'}
  for node in ast.walk(tree(path)):
    names = []
    if isinstance(node, ast.ImportFrom):
      names = [node.module]
    elif isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    for name in names:
      first, _, rest = name.partition('.')
      assert first in known or (first == 'slipstream_jax' and rest in LIGHT)


def test_serving_loads_nothing_heavy():
  script = """
import slip_serve.http, json, sys
print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))
"""
  done = subprocess.run(
    [sys.executable, '-c', script], cwd=ROOT, capture_output=True, check=True
  )
  heavy = {'flax', 'optax', 'orbax', 'polars', 'fsspec', 'jaxtyping'}
  assert not heavy & set(json.loads(done.stdout))


@named([*FILES, *PROGRAMS, *SERVING])
def test_nothing_runs_what_a_file_holds(path):
  for name in imports(path):
    assert name.split('.')[0] not in {'pickle', 'dill', 'joblib', 'shelve'}
  for node in ast.walk(tree(path)):
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
      assert node.func.id not in {'eval', 'exec'}, f'line {node.lineno}'
    if isinstance(node, ast.keyword) and node.arg == 'allow_pickle':
      assert ast.unparse(node.value) == 'False'


@named([*FILES, *PROGRAMS, *SERVING])
def test_variables_say_what_they_hold(path):
  for node in ast.walk(tree(path)):
    stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    name = (
      node.id
      if stored
      else node.arg
      if isinstance(node, ast.arg)
      else node.name
      if isinstance(node, ast.FunctionDef | ast.ClassDef)
      else None
    )
    assert name not in EMPTY_WORDS, f'line {node.lineno}'


@named([*FILES, *SERVING])
def test_public_things_are_documented_and_typed(path):
  parsed = tree(path)
  assert ast.get_docstring(parsed), 'module'
  for node in public_things(parsed):
    assert ast.get_docstring(node), f'{node.name} has no docstring'
    if isinstance(node, ast.FunctionDef):
      assert node.returns is not None, f'{node.name} has no return type'


@named([*FILES, *SERVING])
def test_functions_fit_a_screen(path):
  """No function has more than 60 lines of code."""
  lines = path.read_text().splitlines()
  for node in ast.walk(tree(path)):
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      continue
    inside = [
      n for n in ast.walk(node) if isinstance(n, ast.FunctionDef | ast.Lambda)
    ]
    documented = {
      number
      for function in inside
      if isinstance(function, ast.FunctionDef) and ast.get_docstring(function)
      for number in range(
        function.body[0].lineno, (function.body[0].end_lineno or 0) + 1
      )
    }
    code = [
      number
      for number in range(node.body[0].lineno, (node.end_lineno or 0) + 1)
      if number not in documented
      and lines[number - 1].strip()
      and not lines[number - 1].strip().startswith('#')
    ]
    assert len(code) <= 60, f'{node.name}: {len(code)} lines of code'


# Each is a list of values, or a member of one.
SMALL = {'schedules/hotline.py', 'schedules/systems.py'}


def test_no_small_file_serves_one_other():
  """What one file alone needs stands in that file, unless it is long."""
  importers: dict[str, set[str]] = {}
  for path in [*FILES, *SERVING]:
    for name in imports(path):
      importers.setdefault(name, set()).add(module(path))
  for path in ROOMS:
    short = len(path.read_text().splitlines()) < 80
    if path.stem != '__init__' and short:
      alone = len(importers.get(module(path), set()) - {module(path)}) < 2
      name = str(path.relative_to(PACKAGE))
      assert alone == (name in SMALL), name


def public_things(parent):
  """Public functions, classes, and the public methods of those classes."""
  for node in parent.body:
    kind = isinstance(node, ast.FunctionDef | ast.ClassDef)
    if kind and not node.name.startswith('_'):
      yield node
      if isinstance(node, ast.ClassDef):
        yield from public_things(node)


# Where processes are started, each in a `with` that ends it.
STARTERS = {'programs.py', 'test_layers.py'}
STARTS = {
  'subprocess': {'Popen', 'run', 'call', 'check_call', 'check_output'},
  'os': {'fork', 'system', 'popen', 'spawnv', 'posix_spawn'},
  'multiprocessing': {'Process', 'Pool'},
}


@pytest.mark.parametrize(
  'path',
  [f for f in sorted(TESTS.rglob('*.py')) if f.name not in STARTERS],
  ids=lambda path: path.stem,
)
def test_tests_start_processes_in_one_place(path):
  for node in ast.walk(tree(path)):
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
      assert node.attr not in STARTS.get(node.value.id, ()), ast.unparse(node)
