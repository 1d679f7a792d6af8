"""Atomic file writes that survive a crash of the machine."""

from collections.abc import Iterator
import contextlib
import os
import pathlib
from typing import BinaryIO
import zlib

Path = str | os.PathLike[str]


def replace(path: Path, contents: str) -> None:
  """Writes a text file atomically: afterwards it is complete or unchanged.

  The contents are synced to disk before the file gets its name, so a crash of
  the machine cannot leave a partial file.
  """
  with written(path) as file:
    file.write(contents.encode())


@contextlib.contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
  """Opens a file that gets its name when the block ends, as in `replace`.

  If the block fails, the partial file is removed.
  """
  path = pathlib.Path(path)
  partial = path.with_name(f'{path.name}.tmp')
  try:
    with open(partial, 'wb') as file:
      yield file
    sync(partial)
    # The folder is not synced: a crash may leave the old file, complete.
    partial.replace(path)
  except BaseException:
    partial.unlink(missing_ok=True)
    raise


def sync(path: Path) -> None:
  """Waits until a file's contents are on the disk."""
  with open(path, 'rb') as file:
    os.fsync(file.fileno())


def checksum(path: Path) -> int:
  """Returns the CRC-32 of a file."""
  crc = 0
  with open(path, 'rb') as file:
    while piece := file.read(1 << 22):
      crc = zlib.crc32(piece, crc)
  return crc
