"""Flags and exit codes, the same for every program.

A user's mistake ends a program with one sentence on stderr and exit code 1;
a traceback means a bug.
"""

from collections.abc import Callable, Sequence
import pathlib
import re
import sys
from typing import NoReturn

from absl import app, flags, logging
import jax
import ml_collections
from ml_collections import config_flags

from slipstream_jax.errors import UserError

Main = Callable[[ml_collections.ConfigDict], None]

_CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'Experiment config, e.g. configs/criteo.py[:variant].'
)


def run(main: Main) -> NoReturn:
  """Parses flags, calls `main(config)` and exits: 0, 1, or 130 on Ctrl-C."""
  app.run(lambda _: sys.exit(_guarded(main)), flags_parser=_parse)


def _guarded(main: Main) -> int:
  logging.set_verbosity(logging.WARNING)  # orbax tells its life otherwise
  # Every transfer is one that stream/buffers.py asks for.
  jax.config.update('jax_transfer_guard', 'disallow')
  try:
    if _CONFIG.value is None:
      raise UserError(
        'a program needs a config',
        got='none',
        where='--config',
        mend='add --config=configs/criteo.py',
      )
    main(_CONFIG.value)
  except UserError as error:
    return _fail(str(error))
  except KeyboardInterrupt:
    _fail('interrupted; the last checkpoint, if any, is whole')
    return 130
  return 0


def _parse(arguments: Sequence[str]) -> list[str]:
  try:
    return flags.FLAGS(arguments)
  except (flags.Error, AttributeError, OSError) as error:
    # absl and ml_collections say what is wrong in their first or last line,
    # with a traceback of the config file between them.
    lines = [line.strip() for line in str(error).strip('\'" ').splitlines()]
    said = lines[-1] if 'Traceback' in str(error) else '; '.join(lines)
    said = re.sub(r"\\+[n']", ' ', said).strip()
    if isinstance(error, AttributeError):
      said = f'unknown config key {said}'
    sys.exit(_fail(f'{said} (command line); see --config=FILE for the keys.'))


def _fail(sentence: str) -> int:
  sys.stderr.write(f'error: {sentence}\n')
  return 1


def config_name() -> str:
  """The config's file name without folder and suffix, e.g. 'criteo'."""
  flag = flags.FLAGS['config']
  file = getattr(flag, 'config_filename', None) or 'run'
  return pathlib.Path(str(file)).stem
