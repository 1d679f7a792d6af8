"""The keys of a config: all of them, and which one was meant."""

from collections.abc import Iterator, Sequence
import difflib
import importlib.machinery
import pathlib
import re
import types
from typing import Any

import ml_collections

import configs
from slipstream_jax.errors import UserError

_SETTING = re.compile(r'--?(?:no)?config\.([^=]+)(?:=.*)?', re.DOTALL)
_CONFIG = re.compile(r'--?config=(.*)')


def keys_of(
  config: ml_collections.ConfigDict, before: str = ''
) -> Iterator[tuple[str, Any]]:
  """All keys with their values: 'data.path', None."""
  for name, value in config.items():
    if isinstance(value, ml_collections.ConfigDict):
      yield from keys_of(value, f'{before}{name}.')
    else:
      yield before + name, value


def named(arguments: Sequence[str]) -> str | None:
  """What a command line gives as --config; None if it gives none."""
  words = zip(arguments, [*arguments[1:], ''], strict=True)
  for word, following in words:
    match = _CONFIG.fullmatch(word)
    if match or word in ('--config', '-config'):
      return match[1] if match else following
  return None


def plain(file: str) -> ml_collections.ConfigDict:
  """The config of a file, without anything that the command line sets.

  Raises:
    UserError: there is no such file, or it gives no config.
  """
  if not any(pathlib.Path(name).is_file() for name in (file, file_of(file))):
    raise UserError(
      'a config must be a Python file',
      got=f'{file_of(file)}, which is not there',
      where='--config',
      hint='name one of your own, or ' + ', '.join(_shipped()),
    )
  loader = importlib.machinery.SourceFileLoader('_config', file_of(file))
  module = types.ModuleType(loader.name)
  loader.exec_module(module)
  variant = file.removeprefix(file_of(file))
  config = module.get_config(*([variant[1:]] if variant else []))
  if not isinstance(config, ml_collections.ConfigDict):
    raise UserError(
      'get_config must return an ml_collections.ConfigDict',
      got=type(config).__name__,
      where=f'--config={file}',
      hint='start from common.start of configs/common.py',
    )
  return config


def file_of(config: str) -> str:
  """The file that a --config names, without the variant after its colon."""
  file = config.rpartition(':')[0] if ':' in config else config
  return config if pathlib.Path(config).is_file() else file


def _shipped() -> list[str]:
  folder = pathlib.Path(configs.__file__).parent
  names = {path.name for path in folder.glob('[a-z]*.py')} - {'common.py'}
  return [f'configs/{name}' for name in sorted(names)]


def check_keys(arguments: Sequence[str]) -> None:
  """Looks whether the config has all keys that a command line sets.

  Raises:
    UserError: it has not; the sentence names the nearest ones.
  """
  file = named(arguments)
  if file is None:
    return
  words = [match[1] for match in map(_SETTING.fullmatch, arguments) if match]
  config = plain(file)
  keys = [key for key, _ in keys_of(config)]
  sections = {key.rpartition('.')[0] for key in keys}
  for word in words:
    key = re.sub(r'\[.*', '', word)  # of a tuple's entry
    if key in sections and key:
      raise UserError(
        f'config.{key} must be set key by key',
        got=f'--config.{key}',
        where='command line',
        hint='its keys are ' + ', '.join(k for k in keys if _within(k, key)),
      )
    if key not in keys:
      raise UserError(
        f'config.{key} must be a key of {file}',
        got='none of that name',
        where=f'--config.{key}',
        hint=_hint(key, keys),
      )


def _within(key: str, section: str) -> bool:
  return key.startswith(f'{section}.')


def _hint(key: str, keys: list[str]) -> str:
  """What was meant, or else all that could have been."""
  near = difflib.get_close_matches(key, keys, 1, 0.7)
  if not near:  # the right name in a wrong section, or nearly
    lasts = {k.rpartition('.')[2]: k for k in keys}
    last = difflib.get_close_matches(key.rpartition('.')[2], lasts, 1, 0.8)
    near = [lasts[name] for name in last]
  if near:
    return f'did you mean --config.{near[0]}? See --help for all keys'
  section = key.rpartition('.')[0]
  inside = [k for k in keys if section and _within(k, section)]
  return f'its keys are {", ".join(inside or keys)}'
