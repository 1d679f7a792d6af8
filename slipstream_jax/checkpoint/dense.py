"""What is not of rows, as one file: arrays that orbax writes, in a zip.

orbax writes folders of many files; a place holds files that are whole or
absent. So it writes to a folder of its own, whose files go into one that is
put in its place at once. On the way back that file has its checksum looked at
before orbax, whose readers are native code, sees any of it.
"""

from collections.abc import Iterator
import contextlib
import io
import pathlib
import shutil
import tempfile
from typing import Any
import zipfile

import orbax.checkpoint as ocp

from slipstream_jax.checkpoint.orbax_calls import call_orbax

_CHUNK = 1 << 20
_RULE = 'a checkpoint must be written whole'
_ROOM = 'look whether its disk is full or read-only; what was there still is'
_LOST = 'its disk lost or changed data: start anew, or use a copy of it'


def packed(arrays: Any, where: str) -> Iterator[bytes]:
  """The file's bytes, in pieces, of a tree of arrays, or None, by name.

  Args:
    arrays: of the host; nobody writes them meanwhile.
    where: to name in an error.

  Raises:
    UserError: the folder of temporary files has no room.
  """
  with _folder() as folder:
    call_orbax(lambda: _write(folder / 'arrays', arrays), _RULE, where, _ROOM)
    with tempfile.TemporaryFile(dir=folder) as file:
      with zipfile.ZipFile(file, 'w') as archive:
        for path in sorted((folder / 'arrays').rglob('*')):
          if path.is_file():
            name = path.relative_to(folder / 'arrays').as_posix()
            archive.write(path, name)
      file.seek(0)
      while piece := file.read(_CHUNK):
        yield piece


def unpacked(file: io.BufferedReader, like: Any, where: str) -> Any:
  """The arrays of a file that is known to be as it was written.

  Args:
    file: to read.
    like: a tree of arrays of the same dtypes, shapes and sides.
    where: to name in an error.

  Raises:
    UserError: it is no such file, or its arrays are others.
  """

  def read() -> Any:
    with _folder() as folder:
      # A zip is read from its end, which not every place can do.
      with tempfile.TemporaryFile(dir=folder) as copy:
        shutil.copyfileobj(file, copy, _CHUNK)
        with zipfile.ZipFile(copy) as archive:
          archive.extractall(folder)
      args = ocp.checkpoint_utils.construct_restore_args(like)
      restore = ocp.args.PyTreeRestore(like, restore_args=args)
      with contextlib.closing(_checkpointer()) as checkpointer:
        return checkpointer.restore(folder, args=restore)

  return call_orbax(
    read, 'a checkpoint must be whole to be restored', where, _LOST
  )


def _checkpointer() -> ocp.Checkpointer:
  # Trained values hardly compress; what zstd saves is not worth it.
  return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


def _write(folder: pathlib.Path, arrays: Any) -> None:
  with contextlib.closing(_checkpointer()) as checkpointer:
    checkpointer.save(folder, args=ocp.args.PyTreeSave(arrays))


@contextlib.contextmanager
def _folder() -> Iterator[pathlib.Path]:
  """A folder of temporary files, gone afterwards."""
  path = tempfile.mkdtemp(prefix='slipstream-')
  try:
    yield pathlib.Path(path)
  finally:
    shutil.rmtree(path, ignore_errors=True)
