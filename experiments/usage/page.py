"""The page that --help shows: what a program does, its flags, a config's keys.

What is said of the keys stands in the config files: see `comments`.
"""

from collections.abc import Iterator, Sequence
import inspect
import pathlib
import sys
import textwrap
import types
from typing import Any

from absl import flags

import configs
from experiments.usage import comments, keys

EXAMPLE = 'configs/criteo.py'
"""Whose keys are shown where the command line names no config."""
_WIDTH, _INDENT = 80, 32
_ASKS = {
  f'{dashes}{word}'
  for word in ('help', 'helpshort', 'helpfull', 'h')
  for dashes in ('-', '--')
}


def is_asked(arguments: Sequence[str]) -> bool:
  """Whether a command line asks for help."""
  return any(word.partition('=')[0] in _ASKS for word in arguments)


def help_page(
  main: types.ModuleType, arguments: Sequence[str], has_config: bool
) -> str:
  """What a program does, and all that it can be told.

  Args:
    main: the program's module.
    arguments: of the command line; a --config among them is the one shown.
    has_config: whether the program takes one.

  Raises:
    UserError: that config cannot be read; absl's errors, likewise.
  """
  parts = [inspect.cleandoc(main.__doc__ or ''), 'Flags:']
  lines = list(_flags(main))
  if has_config:
    about = 'Python file of the settings; what follows a colon is its variant.'
    lines.insert(0, _line('--config=FILE[:VARIANT]', about))
    parts += ['\n'.join(lines), *_keys(keys.named(arguments))]
  elif lines:
    parts.append('\n'.join(lines))
  else:
    parts.pop()
  return '\n\n'.join(parts) + '\n'


def _flags(main: types.ModuleType) -> Iterator[str]:
  for flag in flags.FLAGS.get_flags_for_module(main):
    value = (flag.default_as_str or 'VALUE').strip("'")
    yield _line(f'--{flag.name}={value}', flag.help or '')


def _keys(file: str | None) -> Iterator[str]:
  """The keys of a config with their values, and what is said of them."""
  example = pathlib.Path(configs.__file__).with_name('criteo.py')
  values = dict(keys.keys_of(keys.plain(file or str(example))))
  said = comments.comments_of(_files(file or str(example)))
  intro = f'Keys of {file}, with their values:'
  if file is None:
    intro = (
      'Keys of a config with their values, here of '
      f'{EXAMPLE} (those of another: --help --config=FILE):'
    )
  yield textwrap.fill(intro, _WIDTH)
  # In the order of the files, where sections follow one another as in a run.
  order = [key for key in said if key in values]
  order += [key for key in values if key not in said]
  yield '\n'.join(
    _line(f'--config.{key}={_text(values[key])}', said.get(key, ''))
    for key in sorted(order, key=lambda key: _rank(key, order))
  )


def _rank(key: str, order: list[str]) -> int:
  """Where the key's section begins: its keys may be set in many places."""
  section = key.rpartition('.')[0]
  if not section:
    return order.index(key)
  return next(i for i, k in enumerate(order) if k.startswith(f'{section}.'))


def _files(file: str) -> list[pathlib.Path]:
  """The config's file, after all those of `configs` that it has imported."""
  modules = [
    module.__file__
    for name, module in sys.modules.items()
    if name.startswith('configs.') and module.__file__
  ]
  paths = dict.fromkeys([*modules, keys.file_of(file)])
  return [pathlib.Path(name) for name in paths]


def _text(value: Any) -> str:
  return str(value).replace(' ', '') if value != '' else "''"


def _line(name: str, words: str) -> str:
  """A name and what is said of it, in two columns."""
  lines = textwrap.wrap(words, _WIDTH - _INDENT)
  head = f'  {name}'
  if not lines or len(head) + 2 > _INDENT:
    lines.insert(0, '')
  head = textwrap.fill(head, _WIDTH, subsequent_indent='  ')
  rest = [' ' * _INDENT + line for line in lines[1:]]
  return '\n'.join([f'{head:<{_INDENT}}{lines[0]}'.rstrip(), *rest])
