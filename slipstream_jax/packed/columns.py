"""A packed data set: a folder of memory-mapped columns and a manifest.

Each column is one file of raw little-endian numbers, as long as the data set,
so that nothing is read but what is used. The manifest is written last, by a
rename: a folder without one is unfinished, and is refused.
"""

from collections.abc import Iterator, Mapping
from concurrent import futures
import json
import os
import pathlib
from typing import Any, Literal, NamedTuple
import zlib

import numpy as np

from slipstream_jax.errors import UserError

VERSION = 1
MANIFEST = 'manifest.json'
UNFINISHED = 'unfinished'  # a folder in one that is being prepared
_CHECKED_BYTES = 1 << 22  # read at a time when checksums are made
_THREADS = 4  # that make checksums: more would wait for the disk

Path = str | os.PathLike[str]


class Column(NamedTuple):
  """Form of one column: its file is `<name>.<dtype>`."""

  name: str
  dtype: str
  """numpy's name of a fixed-size type, e.g. 'uint16', 'float32'."""
  shape: tuple[int, ...]
  """Inputs first."""

  @property
  def file(self) -> str:
    """The column's file in the folder."""
    return f'{self.name}.{self.dtype}'

  @property
  def nbytes(self) -> int:
    """Size of the file."""
    return int(np.prod(self.shape, dtype=np.int64)) * self._dtype.itemsize

  @property
  def _dtype(self) -> np.dtype[Any]:
    return np.dtype(self.dtype).newbyteorder('<')

  def map(
    self, folder: Path, mode: Literal['r', 'r+', 'w+'] = 'r'
  ) -> np.ndarray:
    """The column as an array over its file; mode 'r', 'r+' or 'w+' (new)."""
    path = pathlib.Path(folder) / self.file
    if self.nbytes == 0:  # which mmap refuses
      if mode == 'w+':
        path.write_bytes(b'')
      return np.empty(self.shape, self._dtype)
    return np.memmap(path, self._dtype, mode, shape=self.shape)


class Packed(NamedTuple):
  """A finished data set, open for reading."""

  folder: pathlib.Path
  manifest: dict[str, Any]
  """What `finish` got as `facts`, beside the columns and their checksums."""
  columns: dict[str, np.ndarray]
  """Read-only arrays by name, memory-mapped."""


def smallest_uint(largest: int) -> str:
  """Name of the smallest unsigned type that holds `largest`."""
  return np.min_scalar_type(largest).name


def finish(
  folder: Path, columns: list[Column], facts: Mapping[str, Any]
) -> None:
  """Seals a folder whose columns are all written: checksums, then manifest.

  Args:
    folder: holds a file for each column.
    columns: their forms.
    facts: anything else to remember; JSON.

  Raises:
    UserError: a column's file is missing or has another size.
  """
  folder = pathlib.Path(folder)
  _check_sizes(folder, columns)
  paths = [folder / column.file for column in columns]
  for path in paths:
    sync(path)
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    checksums = pool.map(checksum, paths)
    entries = [
      {**column._asdict(), 'crc32': crc}
      for column, crc in zip(columns, checksums, strict=True)
    ]
  manifest = {'version': VERSION, **facts, 'columns': entries}
  replace(folder / MANIFEST, json.dumps(manifest, indent=2) + '\n')


def replace(path: Path, contents: str) -> None:
  """Writes a text file that is there whole, or as it was before."""
  path = pathlib.Path(path)
  unfinished = path.with_name(f'{path.name}.tmp')
  unfinished.write_text(contents)
  sync(unfinished)
  unfinished.replace(path)


def sync(path: Path) -> None:
  """Waits until a file's contents are on the disk."""
  with open(path, 'rb') as file:
    os.fsync(file.fileno())


def is_finished(folder: Path) -> bool:
  """Whether the folder holds a finished data set."""
  return (pathlib.Path(folder) / MANIFEST).exists()


def open_packed(folder: Path) -> Packed:
  """Opens a finished data set; reads its manifest, maps its columns.

  Raises:
    UserError: it is unfinished, of another version, or a file has another
      size than the manifest says.
  """
  folder = pathlib.Path(folder)
  manifest = _read_manifest(folder)
  columns = _columns(manifest)
  _check_sizes(folder, columns)
  return Packed(folder, manifest, {c.name: c.map(folder) for c in columns})


def verify(folder: Path) -> Iterator[tuple[str, int]]:
  """Compares every file with its checksum, yielding (file, bytes) of each.

  Raises:
    UserError: as `open_packed`, or a file's contents have changed.
  """
  folder = pathlib.Path(folder)
  manifest = _read_manifest(folder)
  columns = _columns(manifest)
  _check_sizes(folder, columns)
  for column, entry in zip(columns, manifest['columns'], strict=True):
    found = checksum(folder / column.file)
    if found != entry['crc32']:
      raise UserError(
        f'a packed column must have the checksum {entry["crc32"]}',
        got=found,
        where=str(folder / column.file),
        mend='prepare the data set again: the disk or a program changed it',
      )
    yield column.file, column.nbytes


def checksum(path: Path) -> str:
  """CRC-32 of a file, 8 hex digits."""
  crc = 0
  with open(path, 'rb') as file:
    while block := file.read(_CHECKED_BYTES):
      crc = zlib.crc32(block, crc)
  return f'{crc:08x}'


def _columns(manifest: Mapping[str, Any]) -> list[Column]:
  return [
    Column(entry['name'], entry['dtype'], tuple(entry['shape']))
    for entry in manifest['columns']
  ]


def _read_manifest(folder: pathlib.Path) -> dict[str, Any]:
  try:
    manifest = json.loads((folder / MANIFEST).read_text())
    version, _ = manifest['version'], manifest['columns']
  except FileNotFoundError as error:
    begun = (folder / UNFINISHED).exists()
    raise UserError(
      f'a packed data set must have a {MANIFEST}, which is written last',
      got='an unfinished one' if begun else 'a folder without one',
      where=str(folder),
      mend='run experiments.prepare again; it continues where it was stopped'
      if begun
      else 'give a folder that experiments.prepare wrote, or a raw file',
    ) from error
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise UserError(
      f'a {MANIFEST} must be as it was written',
      got=repr(error),
      where=str(folder),
      mend='delete the folder and prepare the data set again',
    ) from error
  if version != VERSION:
    raise UserError(
      f'a packed data set must be of version {VERSION}',
      got=version,
      where=str(folder / MANIFEST),
      mend='prepare it again with this version of the library',
    )
  return manifest


def _check_sizes(folder: pathlib.Path, columns: list[Column]) -> None:
  for column in columns:
    path = folder / column.file
    size = path.stat().st_size if path.exists() else None
    if size != column.nbytes:
      raise UserError(
        f'a packed column of shape {column.shape} must have'
        f' {column.nbytes} bytes',
        got='no file' if size is None else f'{size} bytes',
        where=str(path),
        mend='prepare the data set again',
      )
