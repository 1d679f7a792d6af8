"""Checksums of a checkpoint's files, looked at before orbax reads them.

Its readers are native code. Where one of many files fails, the others' reads
call back into an event loop that is closed, which can end the whole process: so
what is damaged must not come that far.
"""

import contextlib
import json
import pathlib
import zlib

from slipstream_jax.files import replace

_CHUNK = 1 << 22


class _Damaged(ValueError):
  """A file is not what was written."""


def write(folder: pathlib.Path, step: int) -> None:
  """Writes the checksums of a step's files beside it, and drops older ones.

  Where that fails, there are none: the step is whole without them.
  """
  with contextlib.suppress(OSError):
    for path in folder.glob('files_*.json'):
      path.unlink()
    files = _files(folder / str(step))
    sums = {name: _sum(path) for name, path in files.items()}
    replace(_path(folder, step), json.dumps(sums))


def check(folder: pathlib.Path, step: int, item: str) -> None:
  """Looks whether the files of a step's item are those that were written.

  A step without checksums, as of a run killed before it could write them, is
  taken as it is: what it holds has checksums of its own.

  Args:
    folder: of the checkpoints.
    step: which has the files.
    item: its folder's name; files beside the items are looked at as well.

  Raises:
    OSError: a file cannot be read.
    ValueError: one is damaged or missing, or their list is.
  """
  path = _path(folder, step)
  if not path.exists():
    return
  try:
    saved = dict(json.loads(path.read_text()).items())
  except (ValueError, AttributeError) as error:
    raise _Damaged(f'{path.name} is no list of checksums') from error
  files = _files(folder / str(step))
  for name in sorted(saved.keys() | files.keys()):
    if '/' in name and not name.startswith(f'{item}/'):
      continue
    if name not in files or saved.get(name) != _sum(files[name]):
      raise _Damaged(f'{name} has another checksum than was written')


def _path(folder: pathlib.Path, step: int) -> pathlib.Path:
  return folder / f'files_{step}.json'


def _files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
  paths = (path for path in folder.rglob('*') if path.is_file())
  return {path.relative_to(folder).as_posix(): path for path in paths}


def _sum(path: pathlib.Path) -> int:
  """CRC-32 of a file's bytes."""
  crc = 0
  with open(path, 'rb') as file:
    while chunk := file.read(_CHUNK):
      crc = zlib.crc32(chunk, crc)
  return crc
