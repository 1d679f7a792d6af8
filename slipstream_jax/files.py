"""Text files that are there whole or not at all, on the disk too."""

import os
import pathlib

Path = str | os.PathLike[str]


def replace(path: Path, contents: str) -> None:
  """Writes a text file that is there whole, or as it was before.

  A crash of the machine changes nothing of that: the contents are on the disk
  before the file gets its name.
  """
  path = pathlib.Path(path)
  partial = path.with_name(f'{path.name}.tmp')
  partial.write_text(contents)
  sync(partial)
  # The folder is not synced: after a crash the old file may be there, whole.
  partial.replace(path)


def sync(path: Path) -> None:
  """Waits until a file's contents are on the disk."""
  with open(path, 'rb') as file:
    os.fsync(file.fileno())
