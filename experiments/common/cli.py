"""Flags and exit codes, the same for every program.

A user's mistake ends a program with one sentence on stderr and exit code 1;
a traceback means a bug.
"""

from collections.abc import Callable, Sequence
import errno
import os
import pathlib
import shlex
import sys
import traceback
from typing import ClassVar, NoReturn

from absl import app, flags, logging
import jax
import ml_collections
from ml_collections import config_flags

from experiments.common import interrupts
from experiments.common.errors import in_config
from experiments.usage import keys, page
from slipstream_jax.engine.buffers import reuse_host_memory
from slipstream_jax.errors import UserError

Main = Callable[[ml_collections.ConfigDict], None]
MayHaveConfig = Callable[[ml_collections.ConfigDict | None], None]
"""Of a program that needs no config, where a run's folder has one."""

_CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'Experiment config, e.g. configs/criteo.py[:variant].'
)

_KEPT = 'the last checkpoint, if any, is whole'
# What a disk says that has no room, or is none to write to.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def run(
  main: Main | MayHaveConfig,
  config: ml_collections.ConfigDict | None = None,
  kept: str = _KEPT,
  words: tuple[int, int] = (0, 0),
  needs_config: bool = True,
) -> NoReturn:
  """Parses flags, calls `main(config)` and exits: 0, 1, or 130 on Ctrl-C.

  SIGTERM ends it as Ctrl-C does, with 143.

  Args:
    main: the program.
    config: what it is called with; None is what --config says.
    kept: what a Ctrl-C leaves, as a clause.
    words: the least and the most that it takes beside flags: see `words_of`.
    needs_config: whether it cannot do without --config.
  """

  def call(arguments: list[str]) -> NoReturn:
    _Line.words = arguments[1:]
    chosen = _CONFIG.value if config is None else config
    code = guarded(main, chosen, kept, needs_config)
    if code > 1:  # interrupted: no thread may keep it alive, or complain
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(code)
    sys.exit(code)

  def parse(arguments: Sequence[str]) -> list[str]:
    return _parse(arguments, config is None, words)

  app.run(call, flags_parser=parse)


class _Line:
  """Of the process: what its command line has beside flags."""

  words: ClassVar[list[str]] = []


def words_of() -> list[str]:
  """The words of the command line that are no flags."""
  return _Line.words


def guarded(
  main: Main | MayHaveConfig,
  config: ml_collections.ConfigDict | None,
  kept: str = _KEPT,
  needs_config: bool = True,
) -> int:
  """Calls `main(config)`; a user's mistake becomes a sentence and code 1.

  A KeyboardInterrupt that `main` raises itself says what is kept.
  """
  # Orbax tells its life otherwise, and every failure twice.
  logging.set_verbosity(logging.FATAL)
  reuse_host_memory()
  # Every transfer is one that engine/buffers.py asks for.
  jax.config.update('jax_transfer_guard', 'disallow')
  with interrupts.installed(kept):
    try:
      if config is None and needs_config:
        raise UserError(
          'a program needs a config',
          got='none',
          where='--config',
          hint='add --config=configs/criteo.py',
        )
      main(config)
    except UserError as error:
      return _fail(str(in_config(error)))
    except OSError as error:
      if error.errno not in _NO_ROOM:
        raise
      return _fail(f'{_no_room(error)}; {kept}.')
    except KeyboardInterrupt as error:
      _fail(f'interrupted; {str(error) or kept}')
      return interrupts.code()
  return 0


def _no_room(error: OSError) -> str:
  return f'files must find room on a disk, got {error.strerror} ' + (
    f'({error.filename})' if error.filename else '(writing)'
  )


def again(*more: str) -> str:
  """The command that this program was started with, and more, for a shell."""
  return shlex.join([*sys.orig_argv, *more])


def _parse(
  arguments: Sequence[str], has_config: bool, words: tuple[int, int]
) -> list[str]:
  """Reads the flags; ends the program where that is all, or goes wrong."""
  file = keys.named(arguments)
  if file is not None:  # modules beside it are found, as beside a script
    sys.path.append(str(pathlib.Path(file).resolve().parent))
  try:
    if page.is_asked(arguments):
      main = sys.modules['__main__']
      sys.stdout.write(page.help_page(main, arguments, has_config))
      sys.exit(0)
    keys.check_keys(arguments)
    rest = flags.FLAGS(arguments)
    getattr(_CONFIG.value, 'seed', None)  # raises if the file was not read
    _check_words(rest[1:], file, has_config, words)
  except UserError as error:
    sys.exit(_fail(str(error)))
  except Exception as error:  # the config is a program of the user's own
    sys.exit(_fail(f'{_said(error, file)} (command line); see --help.'))
  return rest


def _check_words(
  rest: list[str], file: str | None, has_config: bool, words: tuple[int, int]
) -> None:
  least, most = words
  if file is not None and not has_config:
    raise UserError(
      'this program takes no config',
      got=f'--config={file}',
      where='command line',
      hint='leave it out; --help says what there is',
    )
  if most and not least <= len(rest) <= most:
    count = '1 word' if least == most == 1 else f'{least} to {most} words'
    raise UserError(
      f'beside flags there must be {count}',
      got=shlex.join(rest) or 'none',
      where='command line',
      hint='see --help',
    )
  if rest and not most:
    raise UserError(
      'every word on the command line must be a flag',
      got=shlex.join(rest),
      where='command line',
      hint='write --name=value, without spaces around the sign',
    )


def _said(error: Exception, file: str | None) -> str:
  """What went wrong, without the traceback that absl puts in its errors."""
  if isinstance(error, flags.Error | OSError):
    text = str(error)
  else:
    text = f'{type(error).__name__}: {error}'
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  if any(line.startswith('Traceback') for line in lines):
    lines = lines[-1:]
  name = file and pathlib.Path(keys.file_of(file)).name
  lines_of_file = [
    frame.lineno
    for frame in traceback.extract_tb(error.__traceback__)
    if pathlib.Path(frame.filename).name == name
  ]
  where = f' in line {lines_of_file[-1]} of {file}' if lines_of_file else ''
  return ' '.join(' '.join(lines).split()) + where


def _fail(sentence: str) -> int:
  sys.stderr.write(f'error: {sentence}\n')
  return 1


def config_name() -> str:
  """The config's file name without folder and suffix, e.g. 'criteo'."""
  flag = flags.FLAGS['config']
  file = getattr(flag, 'config_filename', None) or 'run'
  return pathlib.Path(str(file)).stem
