"""Where files are kept: a folder, or anything that fsspec has a URL for.

A file is there whole or not at all, whatever fails while it is written. In a
folder it gets its name once its bytes are on the disk, and the folder is synced
then; elsewhere it is collected first and put at once, which object stores make
whole by themselves. Names are flat: there are no folders within a place.
"""

from collections.abc import Iterable, Iterator
import contextlib
import errno
import io
import os
import pathlib
import stat
import tempfile
from typing import Protocol, runtime_checkable

import fsspec
from fsspec.implementations.local import LocalFileSystem

from slipstream_jax.errors import check_path, UserError

Bytes = bytes | bytearray | memoryview
_UNFINISHED = '.slipstream-tmp'
_AHEAD = 1 << 22  # bytes of a request; each waits for the network once


class _Refused(OSError):
  """A file system said no, in whatever way."""


@runtime_checkable
class Place(Protocol):
  """Files by name. All of it raises OSError, and nothing else."""

  url: str
  """What it was opened by, to name in errors."""

  def write(self, name: str, pieces: Iterable[Bytes]) -> int:
    """Writes a file whole, over one of that name; returns its bytes.

    Whatever is raised, by `pieces` too, the place is as it was.
    """

  def open(self, name: str) -> io.BufferedReader:
    """A file to read from its start."""

  def read(self, name: str, most: int) -> bytes:
    """All bytes of a file, or its first `most + 1`, if there are more."""

  def size(self, name: str) -> int:
    """Bytes of a file."""

  def names(self, prefix: str = '') -> list[str]:
    """Sorted names that begin so, of whatever kind; of no folder, none."""

  def delete(self, name: str) -> None:
    """Removes a file, if it is there."""

  def sweep(self) -> None:
    """Removes what writers left that were killed; none may be writing."""


def open_place(path: str | os.PathLike[str]) -> Place:
  """A place by path or URL: local, `file://`, `memory://`, `s3://` and others.

  The folder need not exist; writing makes it.

  Raises:
    UserError: nothing here can open such a URL.
  """
  check_path(path, 'open_place, path')
  url = os.fspath(path)
  if '://' not in url:
    return _Folder(pathlib.Path(url).absolute())
  try:
    system, inner = fsspec.core.url_to_fs(url)
  except (ImportError, ValueError) as error:
    raise UserError(
      'a place must be a path, or a URL that fsspec can open',
      got=f'"{url}": {error}',
      where='open_place, path',
      hint='install what it asks for, or give a folder',
    ) from error
  if isinstance(system, LocalFileSystem):
    return _Folder(pathlib.Path(inner))
  return _Remote(url, system, inner.rstrip('/'))


class _Folder:
  """A folder of this machine."""

  def __init__(self, path: pathlib.Path) -> None:
    self.url, self._path = str(path), path

  def write(self, name: str, pieces: Iterable[Bytes]) -> int:
    self._path.mkdir(parents=True, exist_ok=True)
    partial = self._path / f'{name}{_UNFINISHED}'
    try:
      with open(partial, 'wb') as file:
        for piece in pieces:
          file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
      partial.replace(self._path / name)
    except BaseException:
      with contextlib.suppress(OSError):
        partial.unlink(missing_ok=True)
      raise
    _sync_folder(self._path)
    return size

  def open(self, name: str) -> io.BufferedReader:
    return open(self._path / name, 'rb', opener=_open_regular)

  def read(self, name: str, most: int) -> bytes:
    return _first(self.open(name), self.size(name), most)

  def size(self, name: str) -> int:
    status = (self._path / name).stat()
    _check_regular(name, status)
    return status.st_size

  def names(self, prefix: str = '') -> list[str]:
    return sorted(
      name
      for name in self._all()
      if name.startswith(prefix) and not name.endswith(_UNFINISHED)
    )

  def delete(self, name: str) -> None:
    if not (self._path / name).is_dir():  # it is none of a writer's
      (self._path / name).unlink(missing_ok=True)

  def sweep(self) -> None:
    for name in self._all():
      if name.endswith(_UNFINISHED):
        self.delete(name)

  def _all(self) -> Iterable[str]:
    try:
      with os.scandir(self._path) as entries:
        # Also what is no file: it may stand where one was.
        return [entry.name for entry in entries]
    except FileNotFoundError:
      return []


def _open_regular(path: str, flags: int) -> int:
  """Opens a regular file; does not wait for a writer where it is a pipe."""
  handle = os.open(path, flags | os.O_NONBLOCK)
  try:
    _check_regular(os.path.basename(path), os.fstat(handle))
  except BaseException:
    os.close(handle)
    raise
  return handle


def _check_regular(name: str, status: os.stat_result) -> None:
  """Raises an error if something that is not a regular file has the name."""
  if not stat.S_ISREG(status.st_mode):
    raise _Refused(f'{name} is a folder, pipe, socket or device, not a file')


def _first(file: io.BufferedReader, size: int, most: int) -> bytes:
  """The first bytes of a file of this size, of which as many are allocated."""
  with file:
    return file.read(min(size, most) + 1)


def _sync_folder(path: pathlib.Path) -> None:
  """Waits until the names in a folder are on the disk."""
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  except OSError as error:  # some file systems have no such thing
    if error.errno not in (errno.EINVAL, errno.ENOTSUP):
      raise
  finally:
    os.close(handle)


class _Remote:
  """What fsspec reaches; listings are never taken from a cache."""

  def __init__(
    self, url: str, system: fsspec.AbstractFileSystem, path: str
  ) -> None:
    self.url, self._system, self._path = url, system, path

  def write(self, name: str, pieces: Iterable[Bytes]) -> int:
    # Through a file, as it may be larger than what memory has to spare.
    with tempfile.NamedTemporaryFile(prefix='slipstream-') as file:
      for piece in pieces:
        file.write(piece)
      file.flush()
      with _os_errors():
        self._system.put_file(file.name, self._at(name))
      return file.tell()

  def open(self, name: str) -> io.BufferedReader:
    ranges = _Ranges(self._system, self._at(name), self.size(name))
    return io.BufferedReader(ranges, _AHEAD)

  def read(self, name: str, most: int) -> bytes:
    return _first(self.open(name), self.size(name), most)

  def size(self, name: str) -> int:
    with _os_errors():
      self._system.invalidate_cache()
      return int(self._system.size(self._at(name)))

  def names(self, prefix: str = '') -> list[str]:
    with _os_errors():
      self._system.invalidate_cache()
      try:
        paths = self._system.ls(self._path, detail=False)
      except FileNotFoundError:
        return []
    names = (path.rstrip('/').rpartition('/')[2] for path in paths)
    return sorted(name for name in names if name.startswith(prefix))

  def delete(self, name: str) -> None:
    with _os_errors(), contextlib.suppress(FileNotFoundError):
      self._system.rm_file(self._at(name))

  def sweep(self) -> None:
    """There is nothing: what is not put whole is not there."""

  def _at(self, name: str) -> str:
    return f'{self._path}/{name}'


class _Ranges(io.RawIOBase):
  """A remote file, read by requests for ranges of its bytes."""

  def __init__(
    self, system: fsspec.AbstractFileSystem, path: str, size: int
  ) -> None:
    self._system, self._path, self._size, self._at = system, path, size, 0

  def readable(self) -> bool:
    return True

  def tell(self) -> int:
    return self._at

  def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
    end = min(self._at + len(buffer), self._size)
    if end == self._at:
      return 0
    with _os_errors():
      data = self._system.cat_file(self._path, start=self._at, end=end)
    buffer[: len(data)] = data
    self._at += len(data)
    return len(data)


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
  try:
    yield
  except OSError:
    raise
  except Exception as error:  # each file system has errors of its own
    raise _Refused(f'{type(error).__name__}: {error}') from error
