"""A packed data set: a folder of memory-mapped columns and a manifest.

Each column is one file of raw little-endian numbers, as long as the data set,
so that nothing is read but what is used. The manifest is written last, by a
rename: a folder without one is unfinished, and is refused.

One more file has the CRC-32 of each block of 64 KiB of each column. Whoever
reads a block for the first time compares it, so a process compares every byte
that it uses, once. Blocks are not larger because a shuffled order reads 8 to 32
KB of a column at a time, and the whole block must come from the disk then.
Folders that were written before blocks had checksums have one for each whole
column: `verify` compares those.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
import json
import math
import os
import pathlib
from typing import Any, NamedTuple
from urllib import parse
import zlib

from jaxtyping import UInt32
import numpy as np

from slipstream_jax.errors import check_path, is_whole, UserError
from slipstream_jax.files import Path, replace, sync, written

VERSION = 3  # since manifests say `features`, `labels` and `label_dtype`
MANIFEST = 'manifest.json'
UNFINISHED = 'unfinished'  # a folder in one that is being prepared
BLOCKS = 'blocks.crc32'
"""File of the blocks' checksums; no column's, whose names end with a type."""
BLOCK_BYTES = 1 << 16
"""Bytes of a block; the last one of a column may be shorter."""
_THREADS = 4  # that make checksums: more would wait for the disk

AGAIN = 'delete the folder and prepare the data set again'
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
  """Read-only arrays by name, memory-mapped. Nothing is compared with a
  checksum here: see `whole`."""
  blocks: 'Blocks | None'
  """None: the folder was written before blocks had checksums."""

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

  def whole(self, form: Column) -> np.ndarray:
    """The column of that form, all of it compared with its checksums.

    Raises:
      UserError: as `column`, or it is not as it was written.
    """
    array = self.column(form)
    if self.blocks is None:
      _check_whole(self, form)
    else:
      self.blocks.check_whole(form)
    return array


class Blocks:
  """The checksums of a data set's blocks, and which blocks were compared.

  Several threads may use it: two that meet at a block may both compare it.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    columns: Sequence[Column],
    sums: UInt32[np.ndarray, ' blocks'],
    block_bytes: int,
  ) -> None:
    """Takes the checksums of all blocks, column after column."""
    ends = np.cumsum([_blocks_of(c.nbytes, block_bytes) for c in columns])
    parts = np.split(sums, ends[:-1])
    self._folder, self._block_bytes = folder, block_bytes
    self._sums = {c.name: part for c, part in zip(columns, parts, strict=True)}
    self._compared = {
      c.name: np.zeros(len(self._sums[c.name]), bool) for c in columns
    }

  def check(self, column: Column, file: int, first: int, end: int) -> None:
    """Compares the blocks of bytes [first, end) that were not compared yet.

    Args:
      column: of which the bytes are.
      file: descriptor of the column's open file.
      first: the first byte.
      end: the byte after the last one.

    Raises:
      UserError: a block is not as it was written.
    """
    begin, stop = first // self._block_bytes, _blocks_of(end, self._block_bytes)
    compared = self._compared[column.name]
    for block in begin + np.flatnonzero(~compared[begin:stop]):
      self._check_block(column, file, int(block))
      compared[block] = True

  def check_whole(self, column: Column) -> None:
    """Compares all blocks of a column that were not compared yet.

    Raises:
      UserError: a block is not as it was written.
    """
    with open(self._folder / column.file, 'rb') as file:
      self.check(column, file.fileno(), 0, column.nbytes)

  def _check_block(self, column: Column, file: int, block: int) -> None:
    first = block * self._block_bytes
    size = min(self._block_bytes, column.nbytes - first)
    path, data = self._folder / column.file, os.pread(file, size, first)
    if len(data) < size:  # the file was cut off after it was opened
      error = column.size_error(path, f'{first + len(data)} bytes')
      raise error
    crc, written = zlib.crc32(data), int(self._sums[column.name][block])
    if crc != written:
      raise UserError(
        f'block {block} of column {column.name} must have the checksum'
        f' {written:08x}',
        got=f'{crc:08x}',
        where=f'{path}, bytes {first} to {first + size - 1}',
        hint=f'{AGAIN}, as the disk or a program changed the file',
      )


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
    sums = [*pool.map(_checksums, paths)]
  entries = [
    {**column._asdict(), 'crc32': whole}
    for column, (whole, _) in zip(columns, sums, strict=True)
  ]
  data = np.concatenate([blocks for _, blocks in sums]).tobytes()
  with written(folder / BLOCKS) as file:
    file.write(data)
  manifest = {
    'version': VERSION,
    **facts,
    'columns': entries,
    # Beside the columns: what tells the order of batches is made of those.
    'blocks': {'bytes': BLOCK_BYTES, 'crc32': f'{zlib.crc32(data):08x}'},
  }
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
  arrays = {column.name: column.map(folder) for column in columns}
  blocks = _blocks(manifest, folder, columns)
  return Packed(folder, manifest, arrays, blocks)


def verify(folder: Path) -> Iterator[tuple[str, int]]:
  """Compares every file with its checksums, yielding (file, bytes) of each.

  Raises:
    UserError: as `open_packed`, or a file's contents have changed.
  """
  packed = open_packed(folder)
  for column in _columns(packed.manifest, packed.folder):
    packed.whole(column)
    yield column.file, column.nbytes


def _check_whole(packed: Packed, column: Column) -> None:
  """Compares a column with the one checksum of all of it."""
  path, entries = packed.folder / column.file, packed.manifest['columns']
  expected = next(e.get('crc32') for e in entries if e['name'] == column.name)
  crc, _ = _checksums(path)
  if crc != expected:
    raise UserError(
      f'a packed column must have the checksum {expected}',
      got=crc,
      where=str(path),
      hint=f'{AGAIN}, as the disk or a program changed the file',
    )


def _checksums(path: Path) -> tuple[str, UInt32[np.ndarray, ' blocks']]:
  """CRC-32 of a file, as 8 hex digits, and of each of its blocks."""
  whole, number = 0, _blocks_of(os.path.getsize(path), BLOCK_BYTES)
  blocks = np.zeros(number, '<u4')
  with open(path, 'rb') as file:
    for place in range(number):
      block = file.read(BLOCK_BYTES)
      whole, blocks[place] = zlib.crc32(block, whole), zlib.crc32(block)
  return f'{whole:08x}', blocks


def _blocks_of(nbytes: int, block_bytes: int) -> int:
  return -(-nbytes // block_bytes)


def _blocks(
  manifest: Mapping[str, Any], folder: pathlib.Path, columns: Sequence[Column]
) -> Blocks | None:
  """The checksums of the blocks; None if they had none when it was written.

  Raises:
    UserError: they are not as they were written.
  """
  if 'blocks' not in manifest:
    return None
  path, facts = folder / BLOCKS, manifest['blocks']
  try:
    block_bytes, expected = facts['bytes'], facts['crc32']
    if not is_whole(block_bytes, 1, 1 << 30):
      raise _Damaged(f'blocks of {block_bytes!r:.50} bytes')
    number = sum(_blocks_of(column.nbytes, block_bytes) for column in columns)
    size = path.stat().st_size
    if size != 4 * number:
      raise _Damaged(f'{size} bytes for {number} blocks')
    data = path.read_bytes()
    if f'{zlib.crc32(data):08x}' != expected:
      raise _Damaged(f'the checksum {zlib.crc32(data):08x}')
  except (_Damaged, OSError, KeyError, TypeError) as error:
    raise UserError(
      "the checksums of a packed data set's blocks must be as they were"
      ' written',
      got=repr(error)[:200],
      where=str(path),
      hint=AGAIN,
    ) from error
  return Blocks(folder, columns, np.frombuffer(data, '<u4'), block_bytes)


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
      hint=AGAIN,
    ) from error
  if version != VERSION:
    raise UserError(
      f'a packed data set must be of version {VERSION}',
      got=version,
      where=str(folder / MANIFEST),
      hint=AGAIN,
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
      hint=AGAIN,
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
