"""A packed data set: a folder of memory-mapped columns and a manifest.

Each column is one file of raw little-endian numbers. The manifest is written
last, by a rename. A folder without one is unfinished, and is refused.

One more file has the CRC-32 of each block of 64 KiB of each column. A process
compares a block when it first reads it. Blocks are not larger, because a
shuffled order reads 8 to 32 KB of a column at a time. Older folders have only a
checksum for each whole column, which `verify` compares.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
import contextlib
import json
import math
import os
import pathlib
from typing import Any, NamedTuple, NoReturn
from urllib import parse
import zlib

from jaxtyping import UInt32
import numpy as np

from slipstream_jax.errors import check_path, is_whole, UserError
from slipstream_jax.files import Path, replace, sync, written

VERSION = 3
MANIFEST = 'manifest.json'
UNFINISHED = 'unfinished'  # the folder for what a preparation has done so far
BLOCKS = 'blocks.crc32'
"""File of the blocks' checksums. Names of columns end with a type instead."""
BLOCK_BYTES = 1 << 16
"""Bytes of a block. The last one of a column may be shorter."""
_THREADS = 4  # for checksums; with more, the disk is the limit

AGAIN = 'delete the folder and prepare the data set again'
_CHANGED = f'{AGAIN}, as the disk or a program changed the file'


class DamagedError(UserError):
  """A packed data set differs from what was written."""

  def __init__(self, rule: str, got: object, where: Path, hint: str = AGAIN):
    """Creates the error; see `UserError`."""
    super().__init__(rule, got=got, where=str(where), hint=hint)


class _BadFileError(Exception):
  """A file differs from what was written. The message says how."""


@contextlib.contextmanager
def reporting_damage(rule: str, where: Path) -> Iterator[None]:
  """Raises DamagedError for any error of a file that is not as written."""
  try:
    yield
  except UserError:
    raise
  except (
    *(_BadFileError, OSError, ValueError, LookupError, TypeError),
    *(AttributeError, OverflowError, RecursionError),
  ) as error:
    is_ours = isinstance(error, _BadFileError)
    got = str(error) if is_ours else repr(error)[:200]
    raise DamagedError(rule, got, where) from error


class Column(NamedTuple):
  """Form of one column. Its file is `<name>.<dtype>`, quoted as in a URL."""

  name: str
  dtype: str
  """numpy's name of a fixed-size type, e.g. 'uint16', 'float32'."""
  shape: tuple[int, ...]
  """Examples first."""

  @property
  def file(self) -> str:
    """Name of the column's file."""
    return f'{parse.quote(self.name, safe="")}.{self.dtype}'

  @property
  def nbytes(self) -> int:
    """Size of the file."""
    return int(np.prod(self.shape, dtype=np.int64)) * self.stored.itemsize

  @property
  def stored(self) -> np.dtype[Any]:
    """Type of the numbers in the file."""
    return np.dtype(self.dtype).newbyteorder('<')

  def refuse_size(self, folder: Path, got: str) -> NoReturn:
    """Raises the error of a file that has another size than the column."""
    raise DamagedError(
      f'a packed column of shape {self.shape} must have {self.nbytes} bytes',
      got,
      pathlib.Path(folder, self.file),
    )

  def map(self, folder: Path) -> np.ndarray:
    """Returns the column as a read-only array over its file."""
    if self.nbytes == 0:  # mmap refuses empty files
      return np.empty(self.shape, self.stored)
    path = pathlib.Path(folder, self.file)
    return np.memmap(path, self.stored, 'r', shape=self.shape)


class PackedData(NamedTuple):
  """A finished data set, open for reading."""

  folder: pathlib.Path
  manifest: dict[str, Any]
  """The `facts` given to `finish`, the columns and their checksums."""
  columns: dict[str, np.ndarray]
  """Read-only arrays by name, memory-mapped. Reading them compares no
  checksums; see `whole`."""
  blocks: 'Blocks | None'
  """None for an older folder without checksums of blocks."""

  def column(self, form: Column) -> np.ndarray:
    """Returns the column of that form, or raises a `UserError`."""
    array = self.columns.get(form.name)
    got = 'no column' if array is None else f'{array.dtype.name} {array.shape}'
    if array is None or got != f'{form.dtype} {form.shape}':
      rule = f'column {form.name} must be {form.dtype} of shape {form.shape}'
      raise DamagedError(rule, got, self.folder)
    return array

  def whole(self, form: Column) -> np.ndarray:
    """Returns the column of that form after comparing all its checksums."""
    array = self.column(form)
    path = self.folder / form.file
    if self.blocks is not None:
      with path.open('rb') as file:
        self.blocks.check(form, file.fileno(), 0, form.nbytes)
      return array
    entries = {entry['name']: entry for entry in self.manifest['columns']}
    expected = entries[form.name].get('crc32')
    crc, _ = _checksums(path)
    if crc != expected:
      rule = f'a packed column must have the checksum {expected}'
      raise DamagedError(rule, crc, path, _CHANGED)
    return array


class Blocks:
  """Checksums of a data set's blocks, and which blocks were compared already.

  Several threads may use it.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    columns: Sequence[Column],
    sums: UInt32[np.ndarray, ' blocks'],
    block_bytes: int,
  ) -> None:
    """Creates it from the checksums of all blocks, column after column."""
    ends = np.cumsum([_blocks_of(c.nbytes, block_bytes) for c in columns])
    parts = np.split(sums, ends[:-1])
    self._folder, self._block_bytes = folder, block_bytes
    self._sums = {c.name: part for c, part in zip(columns, parts, strict=True)}
    self._compared = {
      name: np.zeros(len(part), bool) for name, part in self._sums.items()
    }

  def check(self, column: Column, file: int, first: int, end: int) -> None:
    """Compares the blocks of bytes [first, end) that were not compared yet.

    `file` is the column's open file. Raises a `UserError` if a block changed.
    """
    begin, stop = first // self._block_bytes, _blocks_of(end, self._block_bytes)
    compared = self._compared[column.name]
    for block in begin + np.flatnonzero(~compared[begin:stop]):
      self._check_block(column, file, int(block))
      compared[block] = True

  def _check_block(self, column: Column, file: int, block: int) -> None:
    first = block * self._block_bytes
    size = min(self._block_bytes, column.nbytes - first)
    data = os.pread(file, size, first)
    if len(data) < size:  # the file was cut off after it was opened
      column.refuse_size(self._folder, f'{first + len(data)} bytes')
    crc, expected = zlib.crc32(data), int(self._sums[column.name][block])
    if crc != expected:
      raise DamagedError(
        f'block {block} of column {column.name} must have the checksum'
        f' {expected:08x}',
        f'{crc:08x}',
        f'{self._folder / column.file}, bytes {first} to {first + size - 1}',
        _CHANGED,
      )


def smallest_uint(largest: int) -> str:
  """Returns the name of the smallest unsigned type that holds `largest`."""
  return np.min_scalar_type(largest).name


def finish(
  folder: Path, columns: list[Column], facts: Mapping[str, Any]
) -> None:
  """Finishes a folder of written columns: adds checksums, then the manifest.

  `facts` are the other contents of the manifest, as JSON.

  Raises:
    UserError: a column's file is missing or has another size.
  """
  folder = pathlib.Path(folder)
  _check_sizes(folder, columns)
  paths = [folder / column.file for column in columns]
  # Before the manifest: after a crash, columns with a manifest are complete.
  for path in paths:
    sync(path)
  # Threads help, because zlib releases the GIL.
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    sums = [*pool.map(_checksums, paths)]
  data = np.concatenate([blocks for _, blocks in sums]).tobytes()
  with written(folder / BLOCKS) as file:
    file.write(data)
  manifest = {
    'version': VERSION,
    **facts,
    'columns': [
      {**column._asdict(), 'crc32': whole}
      for column, (whole, _) in zip(columns, sums, strict=True)
    ],
    # Not among the columns, because the state of a source depends on those.
    'blocks': {'bytes': BLOCK_BYTES, 'crc32': f'{zlib.crc32(data):08x}'},
  }
  manifest['checksum'] = _checksum_of(manifest)
  replace(folder / MANIFEST, json.dumps(manifest, indent=2) + '\n')


def is_finished(folder: Path) -> bool:
  """Whether the folder has a finished data set."""
  return pathlib.Path(folder, MANIFEST).exists()


def open_packed(folder: Path) -> PackedData:
  """Opens a finished data set: reads its manifest and maps its columns.

  Raises:
    UserError: the data set is unfinished, damaged, or of another version.
  """
  manifest = read_manifest(folder)
  folder = pathlib.Path(folder)
  entries = manifest['columns']
  entries = entries if isinstance(entries, list) else [entries]
  columns = [_column(entry, folder) for entry in entries]
  _check_sizes(folder, columns)
  arrays = {column.name: column.map(folder) for column in columns}
  return PackedData(
    folder, manifest, arrays, _blocks(manifest, folder, columns)
  )


def verify(folder: Path) -> Iterator[tuple[str, int]]:
  """Compares every file with its checksums and yields its name and bytes.

  Raises:
    UserError: as `open_packed`, or a file has changed.
  """
  packed = open_packed(folder)
  # Not the columns by name, because a damaged manifest may have a name twice.
  for entry in packed.manifest['columns']:
    column = _column(entry, packed.folder)
    packed.whole(column)
    yield column.file, column.nbytes


def _checksums(path: Path) -> tuple[str, UInt32[np.ndarray, ' blocks']]:
  """Returns the CRC-32 of a file, as 8 hex digits, and of each block."""
  whole, count = 0, _blocks_of(os.path.getsize(path), BLOCK_BYTES)
  blocks = np.zeros(count, '<u4')
  with open(path, 'rb') as file:
    for place in range(count):
      block = file.read(BLOCK_BYTES)
      whole, blocks[place] = zlib.crc32(block, whole), zlib.crc32(block)
  return f'{whole:08x}', blocks


def _blocks_of(nbytes: int, block_bytes: int) -> int:
  return -(-nbytes // block_bytes)


def _blocks(
  manifest: Mapping[str, Any], folder: pathlib.Path, columns: Sequence[Column]
) -> Blocks | None:
  """Reads the checksums of the blocks. Returns None for an older folder."""
  if 'blocks' not in manifest:
    return None
  path, facts = folder / BLOCKS, manifest['blocks']
  rule = "the checksums of a packed data set's blocks must be as written"
  with reporting_damage(rule, path):
    block_bytes, expected = facts['bytes'], facts['crc32']
    if not is_whole(block_bytes, 1, 1 << 30):
      raise _BadFileError(f'blocks of {block_bytes!r:.50} bytes')
    count = sum(_blocks_of(column.nbytes, block_bytes) for column in columns)
    data = path.read_bytes()
    if len(data) != 4 * count:
      raise _BadFileError(f'{len(data)} bytes for {count} blocks')
    if f'{zlib.crc32(data):08x}' != expected:
      raise _BadFileError(f'the checksum {zlib.crc32(data):08x}')
  return Blocks(folder, columns, np.frombuffer(data, '<u4'), block_bytes)


def read_manifest(folder: Path) -> dict[str, Any]:
  """Reads the manifest of a finished data set.

  Raises:
    UserError: the data set is unfinished, damaged, or of another version.
  """
  check_path(folder, 'packed_dataset, folder')
  folder = pathlib.Path(folder)
  with reporting_damage(f'a {MANIFEST} must be as it was written', folder):
    try:
      manifest = json.loads((folder / MANIFEST).read_bytes())
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
    version, _ = manifest['version'], manifest['columns']
    crc = manifest.pop('checksum', None)  # older manifests have none
    if version == VERSION and crc not in (None, _checksum_of(manifest)):
      raise _BadFileError(f'the checksum {crc!r:.20}')
  if version != VERSION:
    rule = f'a packed data set must be of version {VERSION}'
    raise DamagedError(rule, version, folder / MANIFEST)
  return manifest


def _checksum_of(manifest: Mapping[str, Any]) -> str:
  """Returns the CRC-32 of a manifest's contents as 8 hex digits."""
  text = json.dumps(manifest, sort_keys=True)
  return f'{zlib.crc32(text.encode()):08x}'


def _column(entry: Any, folder: pathlib.Path) -> Column:
  """Returns the column of a manifest's entry."""
  rule = 'a packed column must have a name, the type of its numbers and a shape'
  with reporting_damage(rule, folder / MANIFEST):
    name, dtype, shape = (entry[key] for key in ('name', 'dtype', 'shape'))
    good = isinstance(name, str) and isinstance(dtype, str)
    # Refuses other spellings of a type, such as 'int' and '<u2'.
    known = np.dtype(dtype)
    good = good and known.kind in 'iuf' and known.name == dtype
    good = good and all(is_whole(size, 0, 1 << 62) for size in shape)
    # Limits that numpy has for arrays.
    if not (good and math.prod(shape) < 1 << 59 and len(shape) <= 8):
      raise _BadFileError(f'{entry!r:.200}')
    return Column(name, dtype, tuple(shape))


def _check_sizes(folder: pathlib.Path, columns: list[Column]) -> None:
  for column in columns:
    path = folder / column.file
    size = path.stat().st_size if path.exists() else None
    if size != column.nbytes:
      got = 'no file' if size is None else f'{size} bytes'
      column.refuse_size(folder, got)
