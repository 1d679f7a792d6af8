"""Files that are there whole or not at all, on the disk too."""

from collections.abc import Iterator
import contextlib
import os
import pathlib
from typing import BinaryIO

Path = str | os.PathLike[str]


def replace(path: Path, contents: str) -> None:
  """Writes a text file that is there whole, or as it was before.

  A crash of the machine changes nothing of that: the contents are on the disk
  before the file gets its name.
  """
  with written(path) as file:
    file.write(contents.encode())


@contextlib.contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
  """A file to write that gets its name when the block has ended, as `replace`.

  If the block fails, nothing is left of it.
  """
  path = pathlib.Path(path)
  partial = path.with_name(f'{path.name}.tmp')
  try:
    with open(partial, 'wb') as file:
      yield file
    sync(partial)
    # The folder is not synced: after a crash the old file may be there, whole.
    partial.replace(path)
  except BaseException:
    partial.unlink(missing_ok=True)
    raise


def in_memory(folder: Path) -> bool:
  """Whether a folder's files are memory, as those of a tmpfs.

  False where the system does not tell, or there is no such folder.
  """
  try:
    device = os.stat(folder).st_dev
    mounts = pathlib.Path('/proc/self/mountinfo').read_text().splitlines()
  except OSError:
    return False
  number = f'{os.major(device)}:{os.minor(device)}'
  # Number, parent, device, ..., a dash, and the kind of the file system.
  for mount in mounts:
    words = mount.split()
    if words[2] == number:
      return words[words.index('-') + 1] in {'tmpfs', 'ramfs'}
  return False


def sync(path: Path) -> None:
  """Waits until a file's contents are on the disk."""
  with open(path, 'rb') as file:
    os.fsync(file.fileno())
