"""Checks and locks the folder of a run before any work is done."""

from collections.abc import Callable, Iterator
import contextlib
import datetime
import errno
import fcntl
import json
import os
import pathlib
import re
import shutil
from typing import Any, BinaryIO

import ml_collections

from experiments.common import cli
from experiments.common.record import (
  as_json,
  CONFIG,
  config_of,
  SUMMARY,
  write_json,
)
from slipstream_jax.checkpoint.chain import READABLE
from slipstream_jax.checkpoint.manifest import steps_in
from slipstream_jax.checkpoint.places import open_place, user_errors
from slipstream_jax.checkpoint.row_file import LOST
from slipstream_jax.errors import UserError
from slipstream_jax.files import written

_CHECKPOINTS = 'checkpoints'
_LOCK = 'run.lock'
_WHERE = '--workdir'
_URL = re.compile(r'[A-Za-z][\w+.-]+:/')
# What must be equal for a resumed run to be the same run.
_SAME = ('seed', 'data', 'model', 'optimizer', 'hot', 'skip')
_LENGTH = ('steps', 'epochs', 'endless_steps')


def folder(name: str | None, kind: str = '') -> pathlib.Path:
  """Returns the folder of that name, or a new one under runs/.

  Raises:
    UserError: the name is a URL.
  """
  if not name:
    now = datetime.datetime.now().strftime('%Y%m%d-%H%M%S')
    return pathlib.Path('runs') / f'{kind}{cli.config_name()}-{now}'
  if _URL.match(name):
    raise UserError(
      'a run writes to a folder, not to a URL',
      got=name,
      where=_WHERE,
      hint='name a folder of this machine, and copy it afterwards',
    )
  return pathlib.Path(name)


@contextlib.contextmanager
def claimed(
  workdir: pathlib.Path, config: ml_collections.ConfigDict
) -> Iterator[None]:
  """Locks the folder for one run. Folders that stay empty are removed.

  Raises:
    UserError: the folder cannot be written, another run uses it, it holds
      another run, or it holds no run to resume.
  """
  if not (workdir / _LOCK).exists():
    _check(workdir, config)  # before a lock is written into the folder
  folders = [path for path in (workdir, *workdir.parents) if not path.exists()]
  try:
    lock = _locked(workdir)
  except OSError as error:
    _remove(folders)
    raise _unwritable(str(workdir), _WHERE, error) from error
  try:
    _check(workdir, config)
    yield
  finally:
    (workdir / _LOCK).unlink(missing_ok=True)
    os.close(lock)
    _remove(folders)


def _locked(workdir: pathlib.Path) -> int:
  """Returns an open file that one process at a time can lock."""
  workdir.mkdir(parents=True, exist_ok=True)
  path = workdir / _LOCK
  while True:
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      # The previous run may have removed the file that was opened.
      if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
        os.truncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        return lock
    except BlockingIOError:
      holder = os.read(lock, 20).decode() or 'of another run'
      os.close(lock)
      raise UserError(
        'a folder is for one run at a time',
        got=f'{workdir}, in which process {holder} is at work',
        where=_WHERE,
        hint='wait for it to end, or name another folder',
      ) from None
    except BaseException:
      os.close(lock)
      raise
    os.close(lock)


def _unwritable(name: str, where: str, error: OSError) -> UserError:
  return UserError(
    'a program must be able to write its output',
    got=f'{name}: {error.strerror}',
    where=where,
    hint='name a place that you may write, on a disk with room',
  )


def _remove(folders: list[pathlib.Path]) -> None:
  """Removes folders that are still empty, innermost first."""
  with contextlib.suppress(OSError):
    for path in folders:
      path.rmdir()


def writable(name: str, where: str) -> pathlib.Path:
  """Makes a folder if it does not exist, and returns it.

  Args:
    name: the folder.
    where: the flag that names it.

  Raises:
    UserError: the folder cannot be made.
  """
  path = pathlib.Path(name)
  try:
    path.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise _unwritable(name, where, error) from error
  return path


@contextlib.contextmanager
def made_folder(name: str, where: str) -> Iterator[pathlib.Path]:
  """Makes a folder as `writable`, and removes it at the end if it is empty."""
  path = pathlib.Path(name)
  new = [one for one in (path, *path.parents) if not one.exists()]
  try:
    yield writable(name, where)
  finally:
    _remove(new)


@contextlib.contextmanager
def output_file(
  path: pathlib.Path, where: str = '--output'
) -> Iterator[BinaryIO]:
  """Opens a new file, which gets its name when the block ends.

  Its folder is made, and removed if the block fails.

  Args:
    path: the file.
    where: the flag that names it.

  Raises:
    UserError: the file cannot be written. Known before the block begins.
  """
  try:
    if path.is_dir():
      raise IsADirectoryError(errno.EISDIR, 'Is a directory', path)
    with made_folder(str(path.parent), where), written(path) as file:
      yield file
  except OSError as error:
    # An error of the block is about another file, or about a full disk.
    if not str(error.filename).startswith(str(path)):
      raise
    raise _unwritable(str(path), where, error) from error


@contextlib.contextmanager
def json_output(name: str | None) -> Iterator[Callable[[Any], object]]:
  """Yields a function that writes a value as JSON into --output, if given."""
  if not name:
    yield lambda value: None
    return
  with output_file(pathlib.Path(name)) as file:
    yield lambda value: file.write(as_json(value).encode())


def free_bytes(workdir: pathlib.Path) -> int:
  """Returns the free bytes on the disk of a folder, which may not exist yet."""
  return shutil.disk_usage(existing(workdir)).free


def existing(workdir: pathlib.Path) -> pathlib.Path:
  """Returns the folder or its innermost parent that exists."""
  return next(p for p in (workdir, *workdir.absolute().parents) if p.exists())


def _check(workdir: pathlib.Path, config: ml_collections.ConfigDict) -> None:
  """Checks that a run may use this folder."""
  if config.resume:
    _check_same(
      _old(workdir, checkpoints_at(workdir, config)), _resolved(config)
    )
    return
  place = config.checkpoint.path
  if place is not None and newest_step(place) is not None:
    raise UserError(
      'a new run needs a place of its own for checkpoints',
      got=f'{place}, which has some',
      where='config.checkpoint.path',
      hint='name another one, or set --config.resume=True to continue that run',
    )
  if not workdir.exists():
    return
  names = (
    [path.name for path in workdir.iterdir()] if workdir.is_dir() else ['']
  )
  if set(names) - {_LOCK}:
    raise UserError(
      'a new run needs a new or empty folder',
      got=workdir,
      where=_WHERE,
      hint='name another one, or set --config.resume=True to continue it',
    )


def _old(workdir: pathlib.Path, where: str) -> dict[str, Any]:
  """Returns the config of the run to resume, with checkpoints at `where`."""
  if newest_step(where) is None and not (workdir / SUMMARY).exists():
    raise UserError(
      'resuming needs a checkpoint',
      got='none',
      where=str(workdir),
      hint='start anew in another --workdir, or give that of the run',
    )
  return _resolved(config_of(workdir))


def checkpoints_at(
  workdir: pathlib.Path, config: ml_collections.ConfigDict
) -> str:
  """Returns the folder or URL of a run's checkpoints."""
  # Configs of older runs lack the key.
  path = config.get('checkpoint', {}).get('path')
  return str(workdir / _CHECKPOINTS) if path is None else path


def newest_step(where: str) -> int | None:
  """Returns the step of the newest checkpoint at a place. None: it has none.

  Raises:
    UserError: the place cannot be read.
  """
  place = open_place(where)
  with user_errors(where, READABLE, LOST):
    return max(steps_in(place), default=None)


def _check_same(old: dict[str, Any], new: dict[str, Any]) -> None:
  for key in _SAME:
    if old.get(key) != new.get(key):
      raise UserError(
        f'a resumed run must keep config.{key}, which was {old.get(key)}',
        got=new.get(key),
        where=f'config.{key}',
        hint='use the settings the run was started with',
      )


def is_finished(
  workdir: pathlib.Path, config: ml_collections.ConfigDict
) -> bool:
  """Whether the run to resume has taken all its steps already.

  Raises:
    UserError: it has not, and it kept no checkpoint.
  """
  if not (config.resume and (workdir / SUMMARY).exists()):
    return False
  where = checkpoints_at(workdir, config)
  old, new = _old(workdir, where)['train'], _resolved(config)['train']
  if all(old[key] == new[key] for key in _LENGTH):
    return True
  if newest_step(where) is None:
    raise UserError(
      'a finished run can only resume from its checkpoint',
      got='none, because it was not kept',
      where='config.train.keep_checkpoint',
      hint='start anew in another --workdir',
    )
  return False


def begin(workdir: pathlib.Path, config: ml_collections.ConfigDict) -> None:
  """Writes the config. From here on the run is not finished."""
  (workdir / SUMMARY).unlink(missing_ok=True)
  write_json(workdir / CONFIG, _resolved(config))


def _resolved(config: ml_collections.ConfigDict) -> dict[str, Any]:
  resolved: dict[str, Any] = json.loads(config.to_json_best_effort())
  return resolved
