"""What config files say of their keys: the comments beside the assignments.

The files are the one place where keys are explained; `--help` reads them there.
"""

import ast
from collections.abc import Iterator
import io
import pathlib
import tokenize

_Aliases = dict[str, str]
"""Local names of a function to the section of the config that they stand for,
'' for the config itself."""


def comments_of(paths: list[pathlib.Path]) -> dict[str, str]:
  """Keys in the order of their assignments, each with what is said of it.

  A comment stands behind the assignment, or on the lines right above it. The
  first one of a key counts; a key without any has ''.

  Args:
    paths: config files, in the order in which they are to be heard.
  """
  comments: dict[str, str] = {}
  for path in paths:
    text = path.read_text()
    lines = _comment_lines(text)
    for key, node in _assignments(ast.parse(text)):
      comments[key] = comments.get(key) or _beside(node, lines)
  return comments


def _comment_lines(text: str) -> dict[int, tuple[bool, str]]:
  """Comments by line: whether the line holds nothing else, and the words."""
  tokens = tokenize.generate_tokens(io.StringIO(text).readline)
  return {
    token.start[0]: (
      token.line.lstrip().startswith('#'),
      token.string.lstrip('# ').rstrip(),
    )
    for token in tokens
    if token.type == tokenize.COMMENT
  }


def _beside(node: ast.stmt, lines: dict[int, tuple[bool, str]]) -> str:
  """The words above a statement, and those beside it."""
  words: list[str] = []
  line = node.lineno - 1
  while lines.get(line, (False, ''))[0]:
    words.insert(0, lines[line][1])
    line -= 1
  inside = range(node.lineno, (node.end_lineno or node.lineno) + 1)
  words += [lines[number][1] for number in inside if number in lines]
  return ' '.join(words)


def _assignments(module: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
  """Keys with the statements that set them, in the order of the file."""
  for function in module.body:
    if isinstance(function, ast.FunctionDef):
      yield from _in_block(function.body, {'config': ''})


def _in_block(
  block: list[ast.stmt], aliases: _Aliases
) -> Iterator[tuple[str, ast.stmt]]:
  for node in block:
    if isinstance(node, ast.Assign):
      yield from ((key, node) for key in _keys(node, aliases))
    for part in ast.iter_child_nodes(node):
      if isinstance(part, ast.stmt):
        yield from _in_block([part], aliases)
      elif isinstance(part, ast.match_case):
        yield from _in_block(part.body, aliases)


def _keys(node: ast.Assign, aliases: _Aliases) -> list[str]:
  """Keys that an assignment sets; names that it gives to sections are noted."""
  targets = [x for x in node.targets if isinstance(x, ast.Attribute)]
  keys = [key for key in map(_Path(aliases), targets) if key]
  meant = keys[0] if keys else _Path(aliases)(node.value)
  if meant:
    names = [x.id for x in node.targets if isinstance(x, ast.Name)]
    aliases.update(dict.fromkeys(names, meant))
  return keys


class _Path:
  """An expression to the key that it stands for: `data.path`, or None."""

  def __init__(self, aliases: _Aliases) -> None:
    self._aliases = aliases

  def __call__(self, node: ast.expr) -> str | None:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
      names.insert(0, node.attr)
      node = node.value
    if not (isinstance(node, ast.Name) and node.id in self._aliases):
      return None
    return '.'.join([*filter(None, [self._aliases[node.id]]), *names])
