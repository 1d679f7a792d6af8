"""The folder of a run: whose it is, and what it may hold before the run."""

from collections.abc import Iterator
import contextlib
import datetime
import fcntl
import json
import os
import pathlib
import re
import shutil
from typing import Any, NoReturn

import ml_collections

from experiments.common import cli
from experiments.common.record import CONFIG, SUMMARY, write_json
from slipstream_jax.checkpoint.chain import READABLE
from slipstream_jax.checkpoint.manifest import steps_in
from slipstream_jax.checkpoint.places import open_place, user_errors
from slipstream_jax.checkpoint.row_file import LOST
from slipstream_jax.errors import UserError

_CHECKPOINTS = 'checkpoints'
_LOCK = 'run.lock'
_WHERE = '--workdir'
_URL = re.compile(r'[A-Za-z][\w+.-]+:/')
# What must be equal for a resumed run to be the same run.
_SAME = ('seed', 'data', 'model', 'optimizer', 'hot', 'skip')
_LENGTH = ('steps', 'epochs', 'endless_steps')


def folder(name: str | None, kind: str = '') -> pathlib.Path:
  """The folder of that name, or else a new one under runs/.

  Raises:
    UserError: it is a URL, which would become a folder named like it.
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
  """Holds the folder for one run alone, once that may use it.

  What the run leaves empty is removed: a run that never began changes nothing.

  Raises:
    UserError: the folder cannot be written, another run is at work in it, it
      holds another run, or none where one is resumed.
  """
  if not (workdir / _LOCK).exists():
    _check(workdir, config)  # or there would be a lock in another's folder
  folders = [path for path in (workdir, *workdir.parents) if not path.exists()]
  try:
    lock = _locked(workdir)
  except OSError as error:
    _remove(folders)
    raise _unwritable(workdir, error) from error
  try:
    _check(workdir, config)
    yield
  finally:
    (workdir / _LOCK).unlink(missing_ok=True)
    os.close(lock)
    _remove(folders)


def _locked(workdir: pathlib.Path) -> int:
  """An open file of this process that no other one can hold at a time."""
  workdir.mkdir(parents=True, exist_ok=True)
  path = workdir / _LOCK
  while True:
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      # The run before may have removed the file that was opened.
      if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
        os.truncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        return lock
    except BlockingIOError:
      _refuse(workdir, os.read(lock, 20).decode())
    except BaseException:
      os.close(lock)
      raise
    os.close(lock)


def _refuse(workdir: pathlib.Path, holder: str) -> NoReturn:
  raise UserError(
    'a folder is for one run at a time',
    got=f'{workdir}, in which process {holder or "of another run"} is at work',
    where=_WHERE,
    hint='wait for it to end, or name another folder',
  )


def _unwritable(workdir: pathlib.Path, error: OSError) -> UserError:
  return UserError(
    'a run must be able to write to its folder',
    got=f'{workdir}: {error.strerror}',
    where=_WHERE,
    hint='name a folder that you may write, on a disk with room',
  )


def _remove(folders: list[pathlib.Path]) -> None:
  """Removes folders that are still empty, the innermost first."""
  with contextlib.suppress(OSError):
    for path in folders:
      path.rmdir()


def writable(name: str, where: str) -> pathlib.Path:
  """The folder of that name, which is there from here on.

  Args:
    name: of the folder.
    where: the flag that it comes from.

  Raises:
    UserError: it cannot be written.
  """
  path = pathlib.Path(name)
  try:
    path.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise UserError(
      'what is written needs a folder',
      got=f'{name}: {error.strerror}',
      where=where,
      hint='name one that you may write, on a disk with room',
    ) from error
  return path


@contextlib.contextmanager
def made_folder(name: str, where: str) -> Iterator[pathlib.Path]:
  """Makes a folder, and removes it at the end if it is still empty.

  So a program that is refused its data leaves no folder behind.

  Args:
    name: of the folder.
    where: the flag that it comes from.

  Raises:
    UserError: it cannot be written.
  """
  path = pathlib.Path(name)
  new = [one for one in (path, *path.parents) if not one.exists()]
  try:
    yield writable(name, where)
  finally:
    _remove(new)


def free_bytes(workdir: pathlib.Path) -> int:
  """Room on the disk of a folder, which need not be there yet."""
  return shutil.disk_usage(existing(workdir)).free


def existing(workdir: pathlib.Path) -> pathlib.Path:
  """The folder, or the innermost one around it that is there."""
  return next(p for p in (workdir, *workdir.absolute().parents) if p.exists())


def _check(workdir: pathlib.Path, config: ml_collections.ConfigDict) -> None:
  """Looks whether a run may use this folder, before any work is done."""
  if config.resume:
    _check_same(
      _old(workdir, checkpoints_at(workdir, config)), _resolved(config)
    )
    return
  if config.checkpoint.path is not None:
    _check_new_place(config.checkpoint.path)
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


def _check_new_place(where: str) -> None:
  """Another run's checkpoints would be taken for those of this one."""
  if has_checkpoint(where):
    raise UserError(
      'a new run needs a place of its own for checkpoints',
      got=f'{where}, which has some',
      where='config.checkpoint.path',
      hint='name another one, or set --config.resume=True to continue that run',
    )


def _old(workdir: pathlib.Path, where: str) -> dict[str, Any]:
  """The config of the run that is resumed, whose checkpoints are at `where`."""
  if not (has_checkpoint(where) or (workdir / SUMMARY).exists()):
    raise UserError(
      'resuming needs a checkpoint',
      got='none',
      where=str(workdir),
      hint='start anew in another --workdir, or give that of the run',
    )
  try:
    old: dict[str, Any] = json.loads((workdir / CONFIG).read_text())
  except (OSError, ValueError) as error:
    raise UserError(
      'resuming needs the config of the run',
      got=str(error),
      where=str(workdir / CONFIG),
      hint='start anew in another --workdir',
    ) from error
  return old


def checkpoints_at(
  workdir: pathlib.Path, config: ml_collections.ConfigDict
) -> str:
  """Folder or URL of a run's checkpoints."""
  # A run of before this key has none.
  path = config.get('checkpoint', {}).get('path')
  return str(workdir / _CHECKPOINTS) if path is None else path


def has_checkpoint(where: str) -> bool:
  """Whether a place has a checkpoint.

  Raises:
    UserError: the place cannot be read.
  """
  place = open_place(where)
  with user_errors(where, READABLE, LOST):
    return bool(steps_in(place))


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
  """Whether the run to be resumed has taken all the steps it is asked for.

  Raises:
    UserError: it has not, and kept nothing to go on from.
  """
  if not (config.resume and (workdir / SUMMARY).exists()):
    return False
  where = checkpoints_at(workdir, config)
  old, new = _old(workdir, where)['train'], _resolved(config)['train']
  if all(old[key] == new[key] for key in _LENGTH):
    return True
  if not has_checkpoint(where):
    raise UserError(
      'a finished run goes on only from its checkpoint',
      got='none, for it was not kept',
      where='config.train.keep_checkpoint',
      hint='start anew in another --workdir',
    )
  return False


def begin(workdir: pathlib.Path, config: ml_collections.ConfigDict) -> None:
  """Writes the resolved config; the run is not finished from here on."""
  (workdir / SUMMARY).unlink(missing_ok=True)
  write_json(workdir / CONFIG, _resolved(config))


def _resolved(config: ml_collections.ConfigDict) -> dict[str, Any]:
  resolved: dict[str, Any] = json.loads(config.to_json_best_effort())
  return resolved
