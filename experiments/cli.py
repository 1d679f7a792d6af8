"""Flags and exit codes, the same for every program.

A user's mistake ends a program with one sentence on stderr and exit code 1;
a traceback means a bug.
"""

import _thread
from collections.abc import Callable, Sequence
import pathlib
import re
import sys
from typing import Any, NoReturn
import warnings

from absl import app, flags, logging
import jax
import ml_collections
from ml_collections import config_flags

from slipstream_jax.errors import UserError
from slipstream_jax.stream.host_memory import reuse_host_memory

Main = Callable[[ml_collections.ConfigDict], None]

_CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'Experiment config, e.g. configs/criteo.py[:variant].'
)


_KEPT = 'the last checkpoint, if any, is whole'


def run(
  main: Main,
  config: ml_collections.ConfigDict | None = None,
  kept: str = _KEPT,
) -> NoReturn:
  """Parses flags, calls `main(config)` and exits: 0, 1, or 130 on Ctrl-C.

  Args:
    main: the program.
    config: what it is called with; None is what --config says.
    kept: what a Ctrl-C leaves, as a clause.
  """

  def call(_: list[str]) -> NoReturn:
    chosen = _CONFIG.value if config is None else config
    sys.exit(guarded(main, chosen, kept))

  app.run(call, flags_parser=_parse)


def guarded(
  main: Main, config: ml_collections.ConfigDict | None, kept: str = _KEPT
) -> int:
  """Calls `main(config)`; a user's mistake becomes a sentence and code 1."""
  logging.set_verbosity(logging.WARNING)  # orbax tells its life otherwise
  reuse_host_memory()
  # Every transfer is one that stream/buffers.py asks for.
  jax.config.update('jax_transfer_guard', 'disallow')
  sys.unraisablehook = _keep_interrupts
  try:
    if config is None:
      raise UserError(
        'a program needs a config',
        got='none',
        where='--config',
        mend='add --config=configs/criteo.py',
      )
    main(config)
  except UserError as error:
    return _fail(str(error))
  except KeyboardInterrupt:
    # What was cut off in the middle complains as it is taken down.
    sys.unraisablehook = lambda unraisable: None
    warnings.simplefilter('ignore')
    _fail(f'interrupted; {kept}')
    return 130
  return 0


def _parse(arguments: Sequence[str]) -> list[str]:
  try:
    rest = flags.FLAGS(arguments)
    getattr(_CONFIG.value, 'seed', None)  # raises if the file was not read
    return rest
  except (flags.Error, AttributeError, KeyError, OSError) as error:
    sys.exit(_fail(f'{_said(error)} (command line); see README.md.'))


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


def _keep_interrupts(unraisable: Any) -> None:
  """A Ctrl-C that falls into a callback, where Python drops it, comes again."""
  if issubclass(unraisable.exc_type, KeyboardInterrupt):
    _thread.interrupt_main()
  else:
    sys.__unraisablehook__(unraisable)


def _fail(sentence: str) -> int:
  sys.stderr.write(f'error: {sentence}\n')
  return 1


def config_name() -> str:
  """The config's file name without folder and suffix, e.g. 'criteo'."""
  flag = flags.FLAGS['config']
  file = getattr(flag, 'config_filename', None) or 'run'
  return pathlib.Path(str(file)).stem
