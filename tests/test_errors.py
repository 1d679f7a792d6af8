"""The one error that users cause, and who may catch it."""

import ast
import pathlib
import pickle

import pytest

from slipstream_jax.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILES = [
  path
  for folder in ('slipstream_jax', 'experiments', 'configs')
  for path in sorted((ROOT / folder).rglob('*.py'))
]
WIDER = {'ValueError', 'Exception', 'BaseException'}


def test_it_is_a_value_error_and_survives_pickling():
  error = UserError('a must be 1', got=2, where='f, a', hint='set it')
  assert isinstance(error, ValueError)
  again = pickle.loads(pickle.dumps(error))
  assert str(again) == str(error) == 'a must be 1, got 2 (f, a); set it.'
  assert (again.rule, again.got, again.where) == ('a must be 1', 2, 'f, a')


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_handler_takes_it_from_one_below(path):
  """Handlers are tried in order, so that of UserError must come first."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Try):
      caught = [
        {n.id for n in ast.walk(handler.type) if isinstance(n, ast.Name)}
        for handler in node.handlers
        if handler.type is not None
      ]
      for i, names in enumerate(caught):
        if 'UserError' in names:
          assert not any(WIDER & before for before in caught[:i]), node.lineno
