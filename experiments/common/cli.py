"""Runs a program: reads its command line, calls its `main`, and exits.

A mistake of the user ends a program with one sentence on stderr and exit code
1. A traceback means a bug.

A program's own module holds its docstring and its flags. It imports nothing
that imports JAX, which takes seconds, so `--help` and a wrong command line are
answered at once. `run` then imports the function that does the work.
"""

from collections.abc import Callable, Sequence
import contextlib
import errno
import importlib
import os
import pathlib
import platform
import re
import shlex
import sys
import traceback
from typing import Any, Literal, NoReturn
import warnings
import zlib

from absl import app, flags, logging
from ml_collections import config_flags

from experiments.common import usage
from slipstream_jax.errors import UserError

CONFIG_FILE = 'config.json'
"""Holds the config in the folder of a run."""
_CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'Experiment config, e.g. configs/criteo.py[:variant].'
)
_KEPT = 'the last checkpoint, if any, is whole'
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_CACHE = 'JAX_COMPILATION_CACHE_DIR'


def run(
  main: Callable[..., None] | str,
  config: Literal['required', 'optional', 'none'] = 'required',
  words: str = '',
  kept: str = _KEPT,
  on_cpu: bool = False,
) -> NoReturn:
  """Calls `main(config, *words)` and exits: 0, 1, or 130 after a Ctrl-C.

  SIGTERM ends a program as Ctrl-C does, with 143. Without a config, `main` is
  called with the words alone.

  Args:
    main: the program. 'module:function' names a function to import, which gets
      the program's flags, too, by their names.
    config: whether it takes a --config. If optional, `main` may get None.
    words: what the command line has beside flags, such as 'RUN', '[RUN]',
      '[RUN ...]' or 'FILE LINES [SEED]'. RUN is the folder of a run. It is
      checked and given to `main` as a path, any other word as a string.
    kept: what a Ctrl-C leaves, as a clause.
    on_cpu: computes on the CPU unless JAX_PLATFORMS is set, because a run may
      be training on the accelerator at the same time.
  """

  def program(*arguments: Any) -> None:
    if isinstance(main, str):
      imported(main)(*arguments, **own_flags())
    else:
      main(*arguments)

  def call(arguments: list[str]) -> NoReturn:
    if on_cpu:
      os.environ.setdefault('JAX_PLATFORMS', 'cpu')
    configs = [] if config == 'none' else [_CONFIG.value]
    code = guarded(program, *configs, *arguments, kept=kept)
    # Interrupted: no thread may keep the process alive. Nor may JAX wait for
    # other processes, if this one has failed.
    if code > 1 or (code and _has_joined()):
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(code)
    sys.exit(code)

  def parse(arguments: Sequence[str]) -> list[Any]:
    return read_command_line(arguments, config, words)

  app.run(call, flags_parser=parse)


def _has_joined() -> bool:
  import jax

  return bool(jax.distributed.is_initialized())


def imported(name: str) -> Callable[..., Any]:
  """Imports the function 'module:function'."""
  module, _, function = name.partition(':')
  called: Callable[..., Any] = getattr(
    importlib.import_module(module), function
  )
  return called


def own_flags() -> dict[str, Any]:
  """Returns the values of the program's own flags by their names."""
  program = sys.modules['__main__']
  return {f.name: f.value for f in flags.FLAGS.get_flags_for_module(program)}


def guarded(
  main: Callable[..., None], *arguments: Any, kept: str = _KEPT
) -> int:
  """Calls `main(*arguments)` and returns an exit code.

  A mistake of the user becomes a sentence and code 1. A KeyboardInterrupt that
  `main` raises itself says what is kept.
  """
  # Before signals are handled, as Polars replaces the handlers when imported.
  import jax
  import polars as _  # noqa: F401

  from experiments.common import interrupts
  from experiments.common.errors import in_config
  from slipstream_jax.engine.buffers import reuse_host_memory

  logging.set_verbosity(logging.FATAL)  # Orbax logs every failure twice.
  reuse_host_memory()
  # Every transfer is one that engine/buffers.py asks for.
  jax.config.update('jax_transfer_guard', 'disallow')
  _keep_compiled_programs()
  with interrupts.installed(kept):
    try:
      main(*arguments)
    except UserError as error:
      return _fail(str(in_config(error)))
    except OSError as error:
      if error.errno not in _DISK_ERRORS:
        raise
      where = f'({error.filename})' if error.filename else '(writing)'
      rule = f'files must find room on a disk, got {error.strerror} {where}'
      return _fail(f'{rule}; {kept}.')
    except KeyboardInterrupt as error:
      _fail(f'interrupted; {str(error) or kept}')
      return interrupts.code()
  return 0


def _keep_compiled_programs() -> None:
  """Keeps compiled programs in the user's cache folder, for the next process.

  JAX_COMPILATION_CACHE_DIR names another folder, or none if it is empty. If the
  folder cannot be written, programs are compiled every time.
  """
  import jax

  warnings.filterwarnings(
    'ignore', 'Error (reading|writing) persistent compilation cache'
  )
  if _CACHE in os.environ:
    return
  try:
    folder = _cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    _remove_empty(folder)
  except (OSError, RuntimeError):  # There may be no home at all.
    return
  if os.access(folder, os.W_OK):
    jax.config.update('jax_compilation_cache_dir', str(folder))
    # Programs of small models compile in less than JAX's default of 1 s.
    if 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS' not in os.environ:
      jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)


def _remove_empty(folder: pathlib.Path) -> None:
  """Removes entries of which a full disk or a kill left nothing but the name.

  JAX would compile such a program in every process, and never write it again.
  """
  for entry in folder.glob('*-cache'):
    with contextlib.suppress(FileNotFoundError):  # Another process was faster.
      if not entry.stat().st_size:
        entry.unlink()


def _cache_folder() -> pathlib.Path:
  """Returns a folder for each kind of CPU: an entry holds its machine code."""
  home = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  try:
    cpu = pathlib.Path('/proc/cpuinfo').read_text().partition('\n\n')[0]
    features = re.findall(r'^(?:flags|Features)\s*:(.*)$', cpu, re.M)
  except OSError:
    features = []
  kind = f'{platform.machine()}-{zlib.crc32("".join(features).encode()):08x}'
  return pathlib.Path(home) / 'slipstream_jax' / kind


def again(*more: str) -> str:
  """Returns the shell command that started this program, with more words."""
  return shlex.join([*sys.orig_argv, *more])


def without(flag: re.Pattern[str]) -> list[str]:
  """Returns the program's arguments but some flags, to start another with.

  The pattern's second group is a flag's value, from its '=' on.
  """
  others, is_value = [], False
  for argument in sys.argv[1:]:
    own = flag.fullmatch(argument)
    if not (own or is_value):
      others.append(argument)
    is_value = own is not None and own[2] is None
  return others


def config_name() -> str:
  """Returns the config's file name without folder and suffix: 'criteo'."""
  flag = flags.FLAGS['config']
  file = getattr(flag, 'config_filename', None) or 'run'
  return pathlib.Path(str(file)).stem


def read_command_line(
  arguments: Sequence[str],
  config: Literal['required', 'optional', 'none'] = 'required',
  words: str = '',
) -> list[Any]:
  """Parses flags and returns the words beside them; see `run`.

  Prints the page of --help, or a sentence that says what is wrong. Both end the
  program.
  """
  file = usage.config_flag(arguments)
  if file is not None:  # Modules beside a config are found, as beside a script.
    sys.path.append(str(pathlib.Path(file).resolve().parent))
  try:
    if usage.asks_for_help(arguments):
      program = sys.modules['__main__']
      page = usage.help_page(program, arguments, config != 'none')
      sys.stdout.write(page)
      sys.exit(0)
    usage.check_keys(arguments)
    rest = flags.FLAGS(arguments)[1:]
    getattr(_CONFIG.value, 'seed', None)  # Raises if the file was not read.
    _check_config(file, config)
    return _read_words(rest, words)
  except UserError as error:
    sys.exit(_fail(str(error)))
  except Exception as error:  # A config is a program of the user's own.
    sys.exit(_fail(f'{_in_words(error, file)} (command line); see --help.'))


def _check_config(file: str | None, config: str) -> None:
  if config == 'required' and file is None:
    raise UserError(
      'a program needs a config',
      got='none',
      where='--config',
      hint='add --config=configs/criteo.py',
    )
  if config == 'none' and file is not None:
    raise UserError(
      'this program takes no config',
      got=f'--config={file}',
      where='command line',
      hint='leave it out, and see --help',
    )


def _read_words(given: list[str], words: str) -> list[Any]:
  """Returns the words given, checked against the pattern `words`."""
  names = re.findall(r'[A-Z_]+', words)
  least = len(re.sub(r'\[.*?\]', '', words).split())
  if len(given) > len(names) and '...' in words:
    names += names[-1:] * (len(given) - len(names))
  if given and not words:
    raise UserError(
      'every word on the command line must be a flag',
      got=shlex.join(given),
      where='command line',
      hint='write --name=value, without spaces around the sign',
    )
  if not least <= len(given) <= len(names):
    raise UserError(
      f'beside flags there must be {words}',
      got=shlex.join(given) or 'none',
      where='command line',
      hint='see --help',
    )
  return [
    run_folder(word) if name == 'RUN' else word
    for name, word in zip(names, given, strict=False)
  ]


def run_folder(name: str) -> pathlib.Path:
  """Returns the folder of a run, which is finished or under way.

  Raises:
    UserError: there is no such folder, or it holds no run.
  """
  folder = pathlib.Path(name)
  if not (folder / CONFIG_FILE).is_file():
    lacks = f'no {CONFIG_FILE}' if folder.is_dir() else 'no such folder'
    raise UserError(
      'RUN must be the folder of a run',
      got=f'{name}: {lacks}',
      where='command line',
      hint='give one that `python -m experiments.report` lists',
    )
  return folder


def _in_words(error: Exception, file: str | None) -> str:
  """Describes an error in one line, with the line of the config it is from."""
  if isinstance(error, flags.Error | OSError):
    text = str(error)
  else:
    text = f'{type(error).__name__}: {error}'
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  if any(line.startswith('Traceback') for line in lines):  # absl adds one
    lines = lines[-1:]
  name = file and pathlib.Path(usage.file_of(file)).name
  numbers = [
    frame.lineno
    for frame in traceback.extract_tb(error.__traceback__)
    if pathlib.Path(frame.filename).name == name
  ]
  where = f' in line {numbers[-1]} of {file}' if numbers else ''
  return ' '.join(' '.join(lines).split()) + where


def _fail(sentence: str) -> int:
  sys.stderr.write(f'error: {sentence}\n')
  return 1
