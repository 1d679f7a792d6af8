"""The design's rules that a parser can check: layers, raises, prints."""

import ast
import pathlib

import pytest

TESTS = pathlib.Path(__file__).resolve().parent
PACKAGE = pathlib.Path(__file__).resolve().parents[1] / 'slipstream_jax'
FILES = sorted(PACKAGE.rglob('*.py'))
GROUPS = [
  {'types', 'tables', 'errors', 'files', 'hashing', 'runtime'},
  {'selection', 'transforms', 'models'},
  {'store', 'placement', 'data', 'raw', 'packed', 'synthetic'},
  {'schedules'},
  {'stream'},
  {'train'},
]
# Files of these folders see more than the groups above their own.
SIBLINGS = {
  'transforms': {'selection'},
  'placement': {'store'},
  'data': {'store'},
  'raw': {'data'},
  'packed': {'data', 'raw'},
  'synthetic': {'data'},
}
HOST_ONLY = {
  *('store', 'placement', 'data', 'raw', 'packed', 'synthetic', 'schedules'),
}
PURE = {'selection', 'transforms', 'models'}


def room(path):
  parts = path.relative_to(PACKAGE).parts
  return parts[0] if len(parts) > 1 else path.stem


def imports(path):
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
      yield node.module
      yield from (f'{node.module}.{alias.name}' for alias in node.names)


def rank(name):
  return next(i for i, group in enumerate(GROUPS) if name in group)


def our_rooms(path):
  for module in imports(path):
    parts = module.split('.')
    if parts[0] == 'slipstream_jax' and len(parts) > 1:
      yield parts[1]


def named(paths):
  return pytest.mark.parametrize(
    'path', paths, ids=lambda p: str(p.relative_to(PACKAGE))
  )


def test_there_is_something_to_check():
  assert len(FILES) > 20
  assert {room(f) for f in FILES} >= {'types', 'store', 'stream', 'train'}


@named([f for f in FILES if f != PACKAGE / '__init__.py'])
def test_imports_point_up(path):
  mine = room(path)
  for other in set(our_rooms(path)) - {mine}:
    upward = rank(other) < rank(mine)
    # Group 1a is usable with anybody's JAX model, group 1b without JAX:
    # neither may lean on the other.
    apart = {rank(other), rank(mine)} == {1, 2}
    words = rank(other) == rank(mine) == 0
    allowed = words or (upward and not apart)
    allowed = allowed or other in SIBLINGS.get(mine, set())
    assert allowed, f'{path.name} of {mine} imports {other}'


def test_no_import_cycle():
  graph = {}
  for path in FILES:
    parts = path.relative_to(PACKAGE.parent).with_suffix('').parts
    name = '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)
    graph[name] = path
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


@named([f for f in FILES if room(f) in HOST_ONLY])
def test_host_code_cannot_reenter_jax(path):
  for module in imports(path):
    assert module.split('.')[0] not in {'jax', 'flax', 'optax'}, module


@named([f for f in FILES if room(f) in PURE])
def test_pure_code_has_no_threads_files_or_numba(path):
  for module in imports(path):
    banned = {'threading', 'queue', 'numba', 'pathlib', 'os', 'io'}
    assert module.split('.')[0] not in banned, module


@named(FILES)
def test_only_stream_moves_arrays(path):
  names = {
    node.attr
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Attribute)
  }
  if room(path) != 'stream':
    assert not names & {'device_put', 'device_get'}
  if path.name != 'skip.py':
    assert 'io_callback' not in names


@named(FILES)
def test_no_print_and_no_assert_on_input(path):
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
      assert node.func.id != 'print'


@named(FILES)
def test_every_raise_shows_the_value(path):
  for node in ast.walk(ast.parse(path.read_text())):
    if not isinstance(node, ast.Raise) or node.exc is None:
      continue
    if isinstance(node.exc, ast.Name):  # an exception made or caught before
      continue
    assert isinstance(node.exc, ast.Call), ast.unparse(node)
    name = ast.unparse(node.exc.func)
    if name == 'UserError':
      given = {keyword.arg for keyword in node.exc.keywords}
      assert given == {'got', 'where', 'mend'}, ast.unparse(node)
    else:
      assert name.startswith('_') or name == 'StopIteration', name


@named(FILES)
def test_files_are_short(path):
  assert len(path.read_text().splitlines()) <= 300


@named(FILES)
def test_public_things_are_documented_and_typed(path):
  tree = ast.parse(path.read_text())
  assert ast.get_docstring(tree), 'module'
  for node in public_things(tree):
    assert ast.get_docstring(node), f'{node.name} has no docstring'
    if isinstance(node, ast.FunctionDef):
      assert node.returns is not None, f'{node.name} has no return type'


def public_things(parent):
  """Public functions, classes, and the public methods of those classes."""
  for node in parent.body:
    kind = isinstance(node, ast.FunctionDef | ast.ClassDef)
    if kind and not node.name.startswith('_'):
      yield node
      if isinstance(node, ast.ClassDef):
        yield from public_things(node)


# Where processes are started, each in a `with` that ends it.
STARTERS = {'programs.py', 'processes.py', 'test_run.py'}
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
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
      assert node.attr not in STARTS.get(node.value.id, ()), ast.unparse(node)
