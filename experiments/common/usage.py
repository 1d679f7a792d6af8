"""The `--help` page of a program, and the keys that its config may have.

Keys are explained in the config files alone, by the comments beside their
assignments. Nothing here imports JAX: `--help` must answer at once.
"""

from collections.abc import Iterator, Sequence
import difflib
import importlib.machinery
import inspect
import pathlib
import re
import sys
import textwrap
import types
from typing import Any

from absl import flags
import ml_collections

import configs
from slipstream_jax.errors import UserError

CONFIGS = pathlib.Path(configs.__file__).parent
_EXAMPLE = 'configs/criteo.py'
_WIDTH, _INDENT = 80, 32
_HELP = re.compile(r'--?(?:help|helpshort|helpfull|h)(?:=.*)?')
_SETTING = re.compile(r'--?(?:no)?config\.([^=]+)(?:=.*)?', re.DOTALL)
_CONFIG = re.compile(r'--?config=(.*)')
# Targets of an assignment, a name on its right, and a comment behind it.
_ASSIGNED = re.compile(
  r'\s+((?:[a-z_][\w.]* = )+)(?:([a-z_][\w.]*)\b)?(?:.*  # (.*))?'
)


def keys_of(
  config: ml_collections.ConfigDict, prefix: str = ''
) -> Iterator[tuple[str, Any]]:
  """Yields every key with its value, such as ('data.path', None)."""
  for name, value in config.items():
    if isinstance(value, ml_collections.ConfigDict):
      yield from keys_of(value, f'{prefix}{name}.')
    else:
      yield prefix + name, value


def config_flag(arguments: Sequence[str]) -> str | None:
  """Returns the value of --config on a command line, or None."""
  words = zip(arguments, [*arguments[1:], ''], strict=True)
  for word, following in words:
    match = _CONFIG.fullmatch(word)
    if match or word in ('--config', '-config'):
      return match[1] if match else following
  return None


def file_of(config: str) -> str:
  """Returns the file that a --config names, without its ':variant'."""
  file = config.rpartition(':')[0] if ':' in config else config
  return config if pathlib.Path(config).is_file() else file


def load_config(name: str) -> ml_collections.ConfigDict:
  """Returns the config of FILE[:VARIANT], before the command line changes it.

  Raises:
    UserError: the file does not exist, or returns no config.
  """
  file = file_of(name)
  if not pathlib.Path(file).is_file():
    shipped = {path.name for path in CONFIGS.glob('[a-z]*.py')} - {'common.py'}
    raise UserError(
      'a config must be a Python file',
      got=f'{file}, which is not there',
      where='--config',
      hint='name one of your own, or '
      + ', '.join(f'configs/{name}' for name in sorted(shipped)),
    )
  loader = importlib.machinery.SourceFileLoader('_config', file)
  module = types.ModuleType(loader.name)
  loader.exec_module(module)
  variant = name.removeprefix(file)
  config = module.get_config(*([variant[1:]] if variant else []))
  if not isinstance(config, ml_collections.ConfigDict):
    raise UserError(
      'get_config must return an ml_collections.ConfigDict',
      got=type(config).__name__,
      where=f'--config={name}',
      hint='start from common.start of configs/common.py',
    )
  return config


def check_keys(arguments: Sequence[str]) -> None:
  """Checks that the config has every key that a command line sets.

  Raises:
    UserError: it has not; the hint names the nearest key.
  """
  file = config_flag(arguments)
  if file is None:
    return
  keys = [key for key, _ in keys_of(load_config(file))]
  for match in filter(None, map(_SETTING.fullmatch, arguments)):
    key = re.sub(r'\[.*', '', match[1])  # an element of a tuple
    inside = [other for other in keys if other.startswith(f'{key}.')]
    if inside:
      raise UserError(
        f'config.{key} must be set key by key',
        got=f'--config.{key}',
        where='command line',
        hint='its keys are ' + ', '.join(inside),
      )
    if key not in keys:
      raise UserError(
        f'config.{key} must be a key of {file}',
        got='none of that name',
        where=f'--config.{key}',
        hint=_nearest(key, keys),
      )


def _nearest(key: str, keys: list[str]) -> str:
  """Suggests the key that was probably meant, or lists the possible ones."""
  near = difflib.get_close_matches(key, keys, 1, 0.7)
  if not near:  # maybe the right name in another section
    last_names = {k.rpartition('.')[2]: k for k in keys}
    name = key.rpartition('.')[2]
    match = difflib.get_close_matches(name, last_names, 1, 0.8)
    near = [last_names[one] for one in match]
  if near:
    return f'did you mean --config.{near[0]}? See --help for all keys'
  section = key.rpartition('.')[0]
  inside = [k for k in keys if section and k.startswith(f'{section}.')]
  return f'its keys are {", ".join(inside or keys)}'


def asks_for_help(arguments: Sequence[str]) -> bool:
  """Whether a command line asks for help."""
  return any(map(_HELP.fullmatch, arguments))


def help_page(
  program: types.ModuleType, arguments: Sequence[str], has_config: bool
) -> str:
  """Returns what a program does, its flags, and the keys of its config.

  Args:
    program: the program's module.
    arguments: the command line. The keys shown are those of its --config.
    has_config: whether the program takes a config.

  Raises:
    UserError: the config cannot be read.
  """
  lines = [
    _line(
      f'--{flag.name}={(flag.default_as_str or "VALUE").strip(chr(39))}',
      flag.help or '',
    )
    for flag in flags.FLAGS.get_flags_for_module(program)
  ]
  keys: list[str] = []
  if has_config:
    about = 'Python file of the settings; what follows a colon is its variant.'
    lines.insert(0, _line('--config=FILE[:VARIANT]', about))
    keys = _keys_and_comments(config_flag(arguments))
  parts = [inspect.cleandoc(program.__doc__ or '')]
  if lines:
    parts += ['Flags:', '\n'.join(lines)]
  return '\n\n'.join(parts + keys) + '\n'


def _keys_and_comments(file: str | None) -> list[str]:
  """Returns an introduction, and a config's keys with values and comments."""
  name = file or str(CONFIGS / pathlib.Path(_EXAMPLE).name)
  values = dict(keys_of(load_config(name)))
  imported = [
    module.__file__
    for module_name, module in sys.modules.items()
    if module_name.startswith('configs.') and module.__file__
  ]
  files = [pathlib.Path(file) for file in dict.fromkeys(imported)]
  comments = comments_of([*files, pathlib.Path(file_of(name))])
  order = [key for key in comments if key in values]
  order += [key for key in values if key not in comments]
  first: dict[str, int] = {}  # a section's keys may be set in many places
  for place, key in enumerate(order):
    first.setdefault(key.partition('.')[0], place)
  order.sort(key=lambda key: first[key.partition('.')[0]])
  intro = f'Keys of {file}, with their values:'
  if file is None:
    intro = (
      f'Keys of a config with their values, here of {_EXAMPLE} (for another: '
      '--help --config=FILE):'
    )
  texts = {
    key: str(value).replace(' ', '') if value != '' else "''"
    for key, value in values.items()
  }
  lines = [
    _line(f'--config.{key}={texts[key]}', comments.get(key, ''))
    for key in order
  ]
  return [textwrap.fill(intro, _WIDTH), '\n'.join(lines)]


def _line(name: str, words: str) -> str:
  """Returns a name and its explanation in two columns."""
  lines = textwrap.wrap(words, _WIDTH - _INDENT)
  head = f'  {name}'
  if not lines or len(head) + 2 > _INDENT:
    lines.insert(0, '')
  head = textwrap.fill(head, _WIDTH, subsequent_indent='  ')
  rest = [' ' * _INDENT + line for line in lines[1:]]
  return '\n'.join([f'{head:<{_INDENT}}{lines[0]}'.rstrip(), *rest])


def comments_of(files: Sequence[pathlib.Path]) -> dict[str, str]:
  """Returns the comment of every key, in the order of the assignments.

  A comment stands behind the assignment, or on the lines right above it. The
  first comment of a key counts. A key without any has ''.

  Args:
    files: config files; earlier ones come first.
  """
  comments: dict[str, str] = {}
  for line, above, sections in _lines(files):
    match = _ASSIGNED.match(line)
    if match is None:
      continue
    targets, value, comment = match.groups()
    names = [name.strip() for name in targets.split('=')[:-1]]
    keys = [_key(name, sections) for name in names if '.' in name]
    section = keys[0] if keys else _key(value or '', sections)
    if section:
      sections.update((name, section) for name in names if '.' not in name)
    for key in filter(None, keys):
      words = ' '.join([*above, *filter(None, [comment])])
      comments[key] = comments.get(key) or words
  return comments


def _lines(
  files: Sequence[pathlib.Path],
) -> Iterator[tuple[str, list[str], dict[str, str]]]:
  """Yields each line of code, the comments above it, and names of sections.

  Names of sections are local to a function, and the caller adds to them.
  """
  for path in files:
    above: list[str] = []
    sections: dict[str, str] = {}
    for line in path.read_text().splitlines():
      text = line.strip()
      if text.startswith('#'):
        above.append(text.lstrip('# '))
        continue
      if text.startswith('def '):
        sections = {'config': ''}
      yield line, above, sections
      above = []


def _key(name: str, sections: dict[str, str]) -> str | None:
  """Returns the key of a name such as `data.path`."""
  first, _, rest = name.partition('.')
  if first not in sections:
    return None
  return '.'.join(filter(None, [sections[first], rest]))
