"""Where files are kept: a folder, or a URL that fsspec can open.

A file exists whole or not at all, even if its writing fails. In a folder it is
renamed once its bytes are on the disk, and then the folder is synced. Elsewhere
it is collected in a temporary file and uploaded at once, which object stores
make atomic. A place has no folders within it.
"""

from collections.abc import Iterable, Iterator
import contextlib
import errno
import io
import os
import pathlib
import stat
import tempfile
from typing import Any, Protocol, runtime_checkable

from slipstream_jax.errors import check_path, UserError

Bytes = bytes | bytearray | memoryview
NO_ROOM = 'look whether its disk is full or read-only; what was there still is'
"""Hint for failed writes."""
_UNFINISHED = '.slipstream-tmp'
_AHEAD = 1 << 22  # bytes of a request, each of which waits for the network


class _PlaceError(OSError):
  """Raised when a file system fails in its own way."""


@runtime_checkable
class Place(Protocol):
  """Files by name. Its methods raise only OSError."""

  url: str
  """Path or URL, to name in errors."""

  def write(self, name: str, pieces: Iterable[Bytes]) -> int:
    """Writes or replaces a file, and returns its size in bytes.

    If it fails, or `pieces` raises, the place is unchanged.
    """

  def open(self, name: str) -> io.BufferedReader:
    """Opens a file to read it from its start."""

  def read(self, name: str, most: int) -> bytes:
    """Returns the bytes of a file, or the first `most + 1` if it has more."""
    # No more is allocated than the file has.
    size = min(self.size(name), most)
    with self.open(name) as file:
      return file.read(size + 1)

  def size(self, name: str) -> int:
    """Returns the bytes of a file."""

  def names(self, prefix: str = '') -> list[str]:
    """Returns the sorted names with a prefix, also of what is not a file.

    A folder that does not exist has no names.
    """

  def delete(self, name: str) -> None:
    """Removes a file if it exists."""

  def sweep(self) -> None:
    """Removes unfinished files of killed writers. No writer may be active."""


def open_place(path: str | os.PathLike[str]) -> Place:
  """Opens a path or URL: local, `file://`, `memory://`, `s3://` and others.

  The folder need not exist. The first write creates it.

  Raises:
    UserError: fsspec cannot open the URL.
  """
  check_path(path, 'open_place, path')
  url = os.fspath(path)
  if '://' not in url:
    return _Folder(pathlib.Path(url).absolute())
  # Imported here, as row files can be used without it.
  import fsspec
  from fsspec.implementations.local import LocalFileSystem

  try:
    system, inner = fsspec.core.url_to_fs(url)
  except (ImportError, ValueError) as error:
    raise UserError(
      'a place must be a path, or a URL that fsspec can open',
      got=f'"{url}": {error}',
      where='open_place, path',
      hint='install the package that it names, or give a folder',
    ) from error
  if isinstance(system, LocalFileSystem):
    return _Folder(pathlib.Path(inner))
  return _Remote(url, system, inner.rstrip('/'))


@contextlib.contextmanager
def user_errors(where: str, rule: str, hint: str) -> Iterator[None]:
  """Converts an OSError in the block to a UserError."""
  try:
    yield
  except OSError as error:
    message = ' '.join(str(error).split()) or type(error).__name__
    raise UserError(rule, got=f'"{message}"', where=where, hint=hint) from error


class _Folder(Place):
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
    if not (self._path / name).is_dir():  # no writer makes folders
      (self._path / name).unlink(missing_ok=True)

  def sweep(self) -> None:
    for name in self._all():
      if name.endswith(_UNFINISHED):
        self.delete(name)

  def _all(self) -> list[str]:
    try:
      return os.listdir(self._path)
    except FileNotFoundError:
      return []


def _open_regular(path: str, flags: int) -> int:
  """Opens a regular file. Does not wait for the writer of a pipe."""
  handle = os.open(path, flags | os.O_NONBLOCK)
  try:
    _check_regular(os.path.basename(path), os.fstat(handle))
  except BaseException:
    os.close(handle)
    raise
  return handle


def _check_regular(name: str, status: os.stat_result) -> None:
  if not stat.S_ISREG(status.st_mode):
    raise _PlaceError(f'{name} is a folder, pipe, socket or device, not a file')


def _sync_folder(path: pathlib.Path) -> None:
  """Waits until the names in a folder are on the disk."""
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  except OSError as error:  # some file systems cannot sync folders
    if error.errno not in (errno.EINVAL, errno.ENOTSUP):
      raise
  finally:
    os.close(handle)


class _Remote(Place):
  """A file system of fsspec. Listings never come from its cache."""

  def __init__(self, url: str, system: Any, path: str) -> None:
    self.url, self._system, self._path = url, system, path

  def write(self, name: str, pieces: Iterable[Bytes]) -> int:
    # Through a file, as the content may be larger than the free memory.
    with tempfile.NamedTemporaryFile(prefix='slipstream-') as file:
      for piece in pieces:
        file.write(piece)
      file.flush()
      with _os_errors():
        self._system.put_file(file.name, self._at(name))
      return file.tell()

  def open(self, name: str) -> io.BufferedReader:
    ranges = _RemoteFile(self._system, self._at(name), self.size(name))
    return io.BufferedReader(ranges, _AHEAD)

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
    """Does nothing, as unfinished files are never uploaded."""

  def _at(self, name: str) -> str:
    return f'{self._path}/{name}'


class _RemoteFile(io.RawIOBase):
  """A remote file, read by requests for ranges of its bytes."""

  def __init__(self, system: Any, path: str, size: int) -> None:
    self._system, self._path, self._size, self._at = system, path, size, 0

  def readable(self) -> bool:
    return True

  def seekable(self) -> bool:
    return True

  def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
    starts = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}
    self._at = max(0, starts[whence] + offset)
    return self._at

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
    raise _PlaceError(f'{type(error).__name__}: {error}') from error
