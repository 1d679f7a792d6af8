"""A packed data set: a folder of memory-mapped columns and a manifest.

Each column is one file of raw little-endian numbers, as long as the data set,
so that nothing is read but what is used. The manifest is written last, by a
rename: a folder without one is unfinished, and is refused.
"""

from collections.abc import Iterator, Mapping
from concurrent import futures
import json
import math
import pathlib
from typing import Any, NamedTuple
from urllib import parse
import zlib

import numpy as np

from slipstream_jax.errors import check_path, is_whole, UserError
from slipstream_jax.files import Path, replace, sync

VERSION = 3  # since manifests say `features`, `labels` and `label_dtype`
MANIFEST = 'manifest.json'
UNFINISHED = 'unfinished'  # a folder in one that is being prepared
_CHECKED_BYTES = 1 << 22  # read at a time when checksums are made
_THREADS = 4  # that make checksums: more would wait for the disk

AGAIN = 'prepare the data set again'
"""What to do about a packed data set that is not as it was written."""


class _Damaged(Exception):
  """Not what was written; the message says what."""


class Column(NamedTuple):
  """Form of one column: its file is `<name>.<dtype>`, quoted as in a URL."""

  name: str
  dtype: str
  """numpy's name of a fixed-size type, e.g. 'uint16', 'float32'."""
  shape: tuple[int, ...]
  """Examples first."""

  @property
  def file(self) -> str:
    """The column's file in the folder."""
    return f'{parse.quote(self.name, safe="")}.{self.dtype}'

  @property
  def nbytes(self) -> int:
    """Size of the file."""
    return int(np.prod(self.shape, dtype=np.int64)) * self.stored.itemsize

  @property
  def stored(self) -> np.dtype[Any]:
    """Type of the numbers in the file."""
    return np.dtype(self.dtype).newbyteorder('<')

  def size_error(self, path: Path, got: str) -> UserError:
    """The error of a file whose size is not that of the column."""
    return UserError(
      f'a packed column of shape {self.shape} must have {self.nbytes} bytes',
      got=got,
      where=str(path),
      hint=AGAIN,
    )

  def map(self, folder: Path) -> np.ndarray:
    """The column as a read-only array over its file."""
    if self.nbytes == 0:  # which mmap refuses
      return np.empty(self.shape, self.stored)
    path = pathlib.Path(folder) / self.file
    return np.memmap(path, self.stored, 'r', shape=self.shape)


class Packed(NamedTuple):
  """A finished data set, open for reading."""

  folder: pathlib.Path
  manifest: dict[str, Any]
  """What `finish` got as `facts`, beside the columns and their checksums."""
  columns: dict[str, np.ndarray]
  """Read-only arrays by name, memory-mapped."""

  def column(self, form: Column) -> np.ndarray:
    """The column of that form.

    Raises:
      UserError: there is none, or one of another type or shape.
    """
    array = self.columns.get(form.name)
    got = 'no column' if array is None else f'{array.dtype.name} {array.shape}'
    if array is None or got != f'{form.dtype} {form.shape}':
      raise UserError(
        f'column {form.name} must be {form.dtype} of shape {form.shape}',
        got=got,
        where=str(self.folder),
        hint=AGAIN,
      )
    return array


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
  # Before the manifest, or a crash could leave one of columns that are not.
  for path in paths:
    sync(path)
  # Threads help, as zlib lets others run while it counts.
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    checksums = pool.map(checksum, paths)
    entries = [
      {**column._asdict(), 'crc32': crc}
      for column, crc in zip(columns, checksums, strict=True)
    ]
  manifest = {'version': VERSION, **facts, 'columns': entries}
  manifest['checksum'] = _checksum_of(manifest)
  replace(folder / MANIFEST, json.dumps(manifest, indent=2) + '\n')


def is_finished(folder: Path) -> bool:
  """Whether the folder holds a finished data set."""
  return (pathlib.Path(folder) / MANIFEST).exists()


def open_packed(folder: Path) -> Packed:
  """Opens a finished data set; reads its manifest, maps its columns.

  Raises:
    UserError: it is unfinished, of another version, or a file has another
      size than the manifest says.
  """
  manifest = read_manifest(folder)
  folder = pathlib.Path(folder)
  columns = _columns(manifest, folder)
  _check_sizes(folder, columns)
  return Packed(folder, manifest, {c.name: c.map(folder) for c in columns})


def verify(folder: Path) -> Iterator[tuple[str, int]]:
  """Compares every file with its checksum, yielding (file, bytes) of each.

  Raises:
    UserError: as `open_packed`, or a file's contents have changed.
  """
  packed = open_packed(folder)
  for entry in packed.manifest['columns']:
    column = _column(entry, packed.folder)
    crc = checksum(packed.folder / column.file)
    if crc != entry['crc32']:
      raise UserError(
        f'a packed column must have the checksum {entry["crc32"]}',
        got=crc,
        where=str(packed.folder / column.file),
        hint=f'{AGAIN}: the disk or a program changed it',
      )
    yield column.file, column.nbytes


def checksum(path: Path) -> str:
  """CRC-32 of a file, 8 hex digits."""
  crc = 0
  with open(path, 'rb') as file:
    while block := file.read(_CHECKED_BYTES):
      crc = zlib.crc32(block, crc)
  return f'{crc:08x}'


def read_manifest(folder: Path) -> dict[str, Any]:
  """What a finished data set says of itself.

  Raises:
    UserError: it is unfinished, damaged, or of another version.
  """
  check_path(folder, 'packed_dataset, folder')
  folder = pathlib.Path(folder)
  try:
    manifest = json.loads((folder / MANIFEST).read_bytes())
    version, _ = manifest['version'], manifest['columns']
    crc = manifest.pop('checksum', None)  # those of before have none
    damaged = crc is not None and crc != _checksum_of(manifest)
    if version == VERSION and damaged:
      raise _Damaged(f'the checksum {crc!r:.20}')
  except FileNotFoundError as error:
    begun = (folder / UNFINISHED).exists()
    raise UserError(
      f'a packed data set must have a {MANIFEST}, which is written last',
      got='an unfinished one' if begun else 'a folder without one',
      where=str(folder),
      hint='prepare it again: that continues where it was stopped'
      if begun
      else 'give a folder that was prepared, or a raw file',
    ) from error
  except NotADirectoryError as error:
    raise UserError(
      'a packed data set must be a folder',
      got='a file',
      where=str(folder),
      hint='pack it first, with slip.pack, or read it with polars or pandas',
    ) from error
  except (
    *(_Damaged, OSError, ValueError, KeyError, TypeError),
    *(AttributeError, RecursionError),
  ) as error:
    raise UserError(
      f'a {MANIFEST} must be as it was written',
      got=repr(error)[:200],
      where=str(folder),
      hint=f'delete the folder and {AGAIN}',
    ) from error
  if version != VERSION:
    raise UserError(
      f'a packed data set must be of version {VERSION}',
      got=version,
      where=str(folder / MANIFEST),
      hint=f'delete the folder and {AGAIN}',
    )
  return manifest


def _checksum_of(manifest: Mapping[str, Any]) -> str:
  """CRC-32 of a manifest, 8 hex digits, however it is laid out."""
  text = json.dumps(manifest, sort_keys=True)
  return f'{zlib.crc32(text.encode()):08x}'


def _columns(manifest: Mapping[str, Any], folder: pathlib.Path) -> list[Column]:
  entries = manifest['columns']
  # Of anything else that can be gone through, none is an entry.
  entries = entries if isinstance(entries, list) else [entries]
  return [_column(entry, folder) for entry in entries]


def _column(entry: Any, folder: pathlib.Path) -> Column:
  """The form of a column that a manifest tells of.

  Raises:
    UserError: it tells of none.
  """
  try:
    name, dtype, shape = (entry[key] for key in ('name', 'dtype', 'shape'))
    good = isinstance(name, str) and _is_number(dtype)
    good = good and all(is_whole(size, 0, 1 << 62) for size in shape)
    # Or the bytes of the file would not be a number of numpy's.
    good = good and math.prod(shape) < 1 << 59 and len(shape) <= 8
  except (KeyError, TypeError) as error:
    good, entry = False, {'error': error}
  if not good:
    raise UserError(
      'a packed column must have a name, the type of its numbers and a shape',
      got=f'{entry!r:.200}',
      where=str(folder / MANIFEST),
      hint=f'delete the folder and {AGAIN}',
    )
  return Column(name, dtype, tuple(shape))


def _is_number(dtype: object) -> bool:
  """Whether numpy has a plain number of that name."""
  if not isinstance(dtype, str):
    return False
  try:
    return np.dtype(dtype).kind in 'iuf' and np.dtype(dtype).name == dtype
  except TypeError:
    return False


def _check_sizes(folder: pathlib.Path, columns: list[Column]) -> None:
  for column in columns:
    path = folder / column.file
    size = path.stat().st_size if path.exists() else None
    if size != column.nbytes:
      got = 'no file' if size is None else f'{size} bytes'
      error = column.size_error(path, got)
      raise error
