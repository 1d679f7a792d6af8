"""Flags and exit codes, the same for every program.

A user's mistake ends a program with one sentence on stderr and exit code 1;
a traceback means a bug.
"""

from collections.abc import Callable, Sequence
import errno
import os
import pathlib
import re
import shlex
import sys
from typing import NoReturn

from absl import app, flags, logging
import jax
import ml_collections
from ml_collections import config_flags

from experiments.common import interrupts
from experiments.common.errors import in_config
from slipstream_jax.errors import UserError
from slipstream_jax.runtime import reuse_host_memory

Main = Callable[[ml_collections.ConfigDict], None]

_CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'Experiment config, e.g. configs/criteo.py[:variant].'
)

_KEPT = 'the last checkpoint, if any, is whole'
# What a disk says that has no room, or is none to write to.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def run(
  main: Main,
  config: ml_collections.ConfigDict | None = None,
  kept: str = _KEPT,
) -> NoReturn:
  """Parses flags, calls `main(config)` and exits: 0, 1, or 130 on Ctrl-C.

  SIGTERM ends it as Ctrl-C does, with 143.

  Args:
    main: the program.
    config: what it is called with; None is what --config says.
    kept: what a Ctrl-C leaves, as a clause.
  """

  def call(_: list[str]) -> NoReturn:
    chosen = _CONFIG.value if config is None else config
    code = guarded(main, chosen, kept)
    if code > 1:  # interrupted: no thread may keep it alive, or complain
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(code)
    sys.exit(code)

  app.run(call, flags_parser=_parse)


def guarded(
  main: Main, config: ml_collections.ConfigDict | None, kept: str = _KEPT
) -> int:
  """Calls `main(config)`; a user's mistake becomes a sentence and code 1.

  A KeyboardInterrupt that `main` raises itself says what is kept.
  """
  # Orbax tells its life otherwise, and every failure twice.
  logging.set_verbosity(logging.FATAL)
  reuse_host_memory()
  # Every transfer is one that stream/buffers.py asks for.
  jax.config.update('jax_transfer_guard', 'disallow')
  with interrupts.installed(kept):
    try:
      if config is None:
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


def _parse(arguments: Sequence[str]) -> list[str]:
  try:
    rest = flags.FLAGS(arguments)
    getattr(_CONFIG.value, 'seed', None)  # raises if the file was not read
  except (flags.Error, AttributeError, KeyError, OSError) as error:
    sys.exit(_fail(f'{_said(error)} (command line); see README.md.'))
  if rest[1:]:
    stray = UserError(
      'every word on the command line must be a flag',
      got=shlex.join(rest[1:]),
      where='command line',
      hint='write --name=value, without spaces around the sign',
    )
    sys.exit(_fail(str(stray)))
  return rest


def _said(error: Exception) -> str:
  """What absl and ml_collections say, without the traceback they put in it."""
  text = str(error)
  if isinstance(error, AttributeError | KeyError):
    # Of a quoted and escaped string.
    text = 'unknown config key ' + re.sub(r"[\\']+n?", ' ', text)
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  if any(line.startswith('Traceback') for line in lines):
    lines = lines[-1:]
  return ' '.join(' '.join(lines).split())


def _fail(sentence: str) -> int:
  sys.stderr.write(f'error: {sentence}\n')
  return 1


def config_name() -> str:
  """The config's file name without folder and suffix, e.g. 'criteo'."""
  flag = flags.FLAGS['config']
  file = getattr(flag, 'config_filename', None) or 'run'
  return pathlib.Path(str(file)).stem
