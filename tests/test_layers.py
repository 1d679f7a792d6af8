"""The rules of the house that a parser can check: docs/architecture.md.

Every file is checked by default: a new room must be named in `GROUPS`, or the
tests fail. A rule yields what is wrong with a file.
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
# The package's own __init__ says where its names are, and is above all rooms.
ROOMS = [path for path in FILES if path != PACKAGE / '__init__.py']
PROGRAMS = sorted(
  path
  for name in ('experiments', 'configs')
  for path in (ROOT / name).rglob('*.py')
)
SERVING = sorted((ROOT / 'slip_serve').rglob('*.py'))
LIBRARY = [*FILES, *SERVING]
ALL = [*FILES, *PROGRAMS, *SERVING]
GROUPS = [
  {
    'types',
    'tables',
    'errors',
    'files',
    'hashing',
    'named',
    'row_kernels',
    'initializers',
    'host_roots',
  },
  {'selection', 'transforms', 'models'},
  {
    *('store', 'placement', 'data', 'inputs', 'vocabulary', 'scoring'),
    *('columns', 'formats', 'packed', 'synthetic', 'distributed'),
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
  'distributed': {'placement'},
  'data': {'columns'},
  'vocabulary': {'columns', 'data'},
  'formats': {'columns', 'data', 'vocabulary'},
  'packed': {'columns', 'data', 'formats', 'vocabulary'},
  'inputs': {'columns', 'data', 'packed', 'vocabulary'},
  'synthetic': {'data'},
}
PURE = {'selection', 'transforms', 'models'}
HOST_ONLY = {*GROUPS[2], *GROUPS[3]}
# Row files are read and written without JAX, as whatever is host only.
ROW_FILES = [
  PACKAGE / 'checkpoint' / f'{name}.py'
  for name in (
    *('chain', 'manifest', 'places', 'policies', 'quantize', 'row_file'),
  )
]
# Words that say nothing of what a variable holds.
EMPTY_WORDS = {'told', 'made', 'found', 'shown', 'each'}


def room(path):
  parts = path.relative_to(PACKAGE).parts
  return parts[0] if len(parts) > 1 else path.stem


def rank(name):
  ranks = [i for i, group in enumerate(GROUPS) if name in group]
  assert ranks, f'{name} is in no group of tests/test_layers.py'
  return ranks[0]


def module(path):
  parts = path.relative_to(ROOT).with_suffix('').parts
  return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


@functools.cache
def tree(path):
  return ast.parse(path.read_text())


@functools.cache
def nodes(path):
  return [*ast.walk(tree(path))]


def of_kind(path, *kinds):
  return [node for node in nodes(path) if isinstance(node, kinds)]


@functools.cache
def imports(path):
  names = []
  for node in of_kind(path, ast.Import, ast.ImportFrom):
    if isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
    elif node.module:
      names.append(node.module)
      names += [f'{node.module}.{alias.name}' for alias in node.names]
  return names


def outermost(path):
  """The first name of each module that a file imports."""
  return {name.partition('.')[0] for name in imports(path)}


def own_imports(path):
  """Imports of the package, as their parts without its name."""
  parts = [name.split('.') for name in imports(path)]
  return [p[1:] for p in parts if p[0] == 'slipstream_jax' and len(p) > 1]


def calls(path):
  """Calls of plain names, with their line."""
  for node in of_kind(path, ast.Call):
    if isinstance(node.func, ast.Name):
      yield node.func.id, node.lineno


def imports_point_up(path):
  mine = room(path)
  for other in {parts[0] for parts in own_imports(path)} - {mine}:
    # The pure rooms serve anybody's JAX model, the host rooms go without JAX:
    # neither may lean on the other.
    apart = {rank(other), rank(mine)} == {1, 2}
    words = rank(other) == rank(mine) == 0
    allowed = words or (rank(other) < rank(mine) and not apart)
    if not (allowed or other in SIBLINGS.get(mine, set())):
      yield f'{mine} imports {other}'


def the_package_knows_no_program(path):
  yield from outermost(path) & {'experiments', 'configs', 'tests'}
  # Errors and docstrings name arguments; experiments/common maps them to keys.
  yield from re.findall(
    r'\bconfig\.[a-z]|--config|\bexperiments\.', path.read_text()
  )


def host_code_cannot_reenter_jax(path):
  yield from outermost(path) & {'jax', 'flax', 'optax'}


def pure_code_has_no_threads_or_files(path):
  yield from outermost(path) & {'threading', 'queue', 'pathlib', 'os', 'io'}


def kernels_are_imported_by_their_own_room_alone(path):
  for name, *rest in own_imports(path):
    if rest and rest[0].endswith('kernels') and name != room(path):
      yield f'{name}.{rest[0]}'


def only_the_engine_moves_arrays(path):
  names = {node.attr for node in of_kind(path, ast.Attribute)}
  if room(path) != 'engine':
    yield from names & {'device_put', 'device_get'}
  if path.name != 'skip.py':
    yield from names & {'io_callback'}


def nothing_is_printed(path):
  yield from (line for name, line in calls(path) if name == 'print')


def every_raise_shows_the_value(path):
  for node in of_kind(path, ast.Raise):
    # A name is of an exception that was made or caught before.
    if node.exc is None or isinstance(node.exc, ast.Name):
      continue
    assert isinstance(node.exc, ast.Call), ast.unparse(node)
    name = ast.unparse(node.exc.func)
    # The last two are errors of their own that fill in all of a UserError.
    known = ('StopIteration', 'AttributeError', 'BadLoss', 'DamagedError')
    is_good = name.startswith('_') or name in known
    if name == 'UserError':
      given = {keyword.arg for keyword in node.exc.keywords}
      is_good = given == {'got', 'where', 'hint'}
    if not is_good:
      yield ast.unparse(node)


def no_handler_takes_a_user_error_from_one_below(path):
  """Handlers are tried in order, so that of UserError must come first."""
  wider = {'ValueError', 'Exception', 'BaseException'}
  for node in of_kind(path, ast.Try):
    caught = [
      {n.id for n in ast.walk(handler.type) if isinstance(n, ast.Name)}
      for handler in node.handlers
      if handler.type is not None
    ]
    for i, names in enumerate(caught):
      if 'UserError' in names and any(wider & before for before in caught[:i]):
        yield f'line {node.lineno}'


def who_serves_knows_nothing_of_training(path):
  known = {*sys.stdlib_module_names, 'numpy', 'numba', 'jax', 'slip_serve'}
  if path.stem in ('app', 'server'):  # of the extra `serve`
    known |= {'uvicorn', 'starlette', 'h11'}
  yield from outermost(path) - known - {'slipstream_jax'}
  light = {'errors', 'files', 'hashing'}  # these need numpy and numba only
  yield from {parts[0] for parts in own_imports(path)} - light


def nothing_runs_what_a_file_holds(path):
  yield from outermost(path) & {'pickle', 'dill', 'joblib', 'shelve'}
  yield from (line for name, line in calls(path) if name in ('eval', 'exec'))
  for node in of_kind(path, ast.keyword):
    if node.arg == 'allow_pickle' and ast.unparse(node.value) != 'False':
      yield 'allow_pickle'


def variables_say_what_they_hold(path):
  names = [node.arg for node in of_kind(path, ast.arg)]
  names += [n.name for n in of_kind(path, ast.FunctionDef, ast.ClassDef)]
  names += [
    node.id
    for node in of_kind(path, ast.Name)
    if isinstance(node.ctx, ast.Store)
  ]
  yield from EMPTY_WORDS & set(names)


def public_things_are_documented_and_typed(path):
  if not ast.get_docstring(tree(path)):
    yield 'module'
  for node in public_things(tree(path)):
    if not ast.get_docstring(node):
      yield f'{node.name} has no docstring'
    if isinstance(node, ast.FunctionDef) and node.returns is None:
      yield f'{node.name} has no return type'


def public_things(parent):
  """Public functions, classes, and the public methods of those classes."""
  for node in parent.body:
    kind = isinstance(node, ast.FunctionDef | ast.ClassDef)
    if kind and not node.name.startswith('_'):
      yield node
      if isinstance(node, ast.ClassDef):
        yield from public_things(node)


def functions_fit_a_screen(path):
  """No function has more than 60 lines of code."""
  lines = path.read_text().splitlines()
  for node in of_kind(path, ast.FunctionDef, ast.AsyncFunctionDef):
    documented = {
      number
      for function in ast.walk(node)
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
    if len(code) > 60:
      yield f'{node.name}: {len(code)} lines of code'


# Where processes are started, each in a `with` that ends it.
STARTERS = {'programs.py', 'test_layers.py'}
STARTS = {
  'subprocess': {'Popen', 'run', 'call', 'check_call', 'check_output'},
  'os': {'fork', 'system', 'popen', 'spawnv', 'posix_spawn'},
  'multiprocessing': {'Process', 'Pool'},
}


def processes_are_started_in_one_place(path):
  for node in of_kind(path, ast.Attribute):
    owner = ast.unparse(node.value)
    if node.attr in STARTS.get(owner, ()):
      yield ast.unparse(node)


RULES = {
  imports_point_up: ROOMS,
  the_package_knows_no_program: FILES,
  host_code_cannot_reenter_jax: [
    *(path for path in ROOMS if room(path) in HOST_ONLY),
    *ROW_FILES,
  ],
  pure_code_has_no_threads_or_files: [p for p in ROOMS if room(p) in PURE],
  kernels_are_imported_by_their_own_room_alone: ROOMS,
  only_the_engine_moves_arrays: FILES,
  nothing_is_printed: ALL,
  every_raise_shows_the_value: FILES,
  no_handler_takes_a_user_error_from_one_below: ALL,
  who_serves_knows_nothing_of_training: SERVING,
  nothing_runs_what_a_file_holds: ALL,
  variables_say_what_they_hold: ALL,
  public_things_are_documented_and_typed: LIBRARY,
  functions_fit_a_screen: LIBRARY,
  processes_are_started_in_one_place: [
    path for path in sorted(TESTS.rglob('*.py')) if path.name not in STARTERS
  ],
}


@pytest.mark.parametrize('rule', RULES, ids=lambda rule: rule.__name__)
def test_rules_of_files(rule):
  files = RULES[rule]
  assert files
  wrong = [f'{p.relative_to(ROOT)}: {what}' for p in files for what in rule(p)]
  assert not wrong, '\n'.join(wrong)


def test_every_room_has_its_place():
  rooms = {room(path) for path in ROOMS}
  assert rooms == {name for group in GROUPS for name in group}


def test_no_import_cycle():
  graph = {module(path): path for path in ALL}
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


def test_no_small_file_serves_one_other():
  """What one file alone needs stands in that file, unless it is long."""
  # Each is a list of values, or a member of one.
  small = {'schedules/hotline.py', 'schedules/systems.py'}
  importers: dict[str, set[str]] = {}
  for path in LIBRARY:
    for name in imports(path):
      importers.setdefault(name, set()).add(module(path))
  for path in ROOMS:
    short = len(path.read_text().splitlines()) < 80
    if path.stem != '__init__' and short:
      alone = len(importers.get(module(path), set()) - {module(path)}) < 2
      name = str(path.relative_to(PACKAGE))
      assert alone == (name in small), name


TRAINING = {'flax', 'optax', 'orbax', 'polars', 'fsspec', 'jaxtyping'}
LOADS_NOTHING_OF = {
  name: (
    [module(path) for path in ROOMS if room(path) == name],
    {'numba', 'polars', 'scipy', 'orbax'},
  )
  for name in sorted(PURE)
} | {'slip_serve': (['slip_serve.server'], TRAINING)}


@pytest.mark.parametrize('name', LOADS_NOTHING_OF)
def test_nothing_heavy_is_loaded(name):
  modules, heavy = LOADS_NOTHING_OF[name]
  script = f"""
import importlib, json, sys
for name in {modules}:
  importlib.import_module(name)
print(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))
"""
  done = subprocess.run(
    [sys.executable, '-c', script], cwd=ROOT, capture_output=True, check=True
  )
  assert not heavy & set(json.loads(done.stdout))
