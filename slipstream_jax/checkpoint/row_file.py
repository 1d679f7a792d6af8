"""Row files: arrays with an entry per row, checksummed piece by piece.

  magic, version, header: JSON of the leaves, checksum of the header
  piece: number of rows, first row, checksum | gaps | the blocks of each leaf
  ... each about a MiB, so memory does not depend on the size of the file
  end: a piece without rows, with their total and a checksum of all checksums

Rows ascend. They are stored as gaps to the previous row, in the narrowest
unsigned integer that holds the gaps of the piece. Blocks begin at multiples of
8 bytes. All numbers are little-endian.

A reader compares the checksum of a piece before it returns any of its values,
and the length of the file before it allocates.
"""

from collections.abc import Iterable, Iterator
import io
import json
import math
import struct
from typing import Any, NamedTuple
import zlib

from jaxtyping import Int, Shaped
import ml_dtypes
import numpy as np

from slipstream_jax.checkpoint.places import Bytes, Place
from slipstream_jax.checkpoint.quantize import (
  code_bytes,
  CODECS,
  Codes,
  dequantize,
  HALF,
  quantize,
  RAW,
  to_half,
)
from slipstream_jax.errors import is_whole, UserError

LOST = 'its disk lost or changed data: use an older checkpoint, or a copy'
"""Hint for damaged files."""
PIECE_BYTES = 1 << 20
"""Approximate bytes of a piece. A longer row is a piece by itself."""
_MAX_PIECE = 1 << 28
_MAX_HEADER = 1 << 16
_MAGIC, _VERSION = b'SLIPROWS', 1
_HEAD = struct.Struct('<8sIII')
"""Magic, version, bytes of the header, its CRC-32."""
_PIECE = struct.Struct('<IIQI')
"""Rows, bytes of a gap, first row, CRC-32 of these three and of the blocks."""
ROWS = 'rows'
"""Name of the leaf of the rows. Other leaves are row state."""
_DTYPES = {
  str(np.dtype(dtype)): np.dtype(dtype)
  for dtype in (
    *(bool, ml_dtypes.bfloat16, np.float16, np.float32, np.float64),
    *(np.int8, np.int16, np.int32, np.int64),
    *(np.uint8, np.uint16, np.uint32, np.uint64),
  )
}


class Leaf(NamedTuple):
  """An array that has an entry for each row."""

  name: str
  dtype: str
  """A numeric dtype of numpy, or bfloat16."""
  shape: tuple[int, ...]
  """Shape of one row's entry."""
  codec: str = RAW
  """One of `CODECS`, or `HALF`."""

  @property
  def row_bytes(self) -> int:
    """Bytes of a row's entry in a file."""
    return sum(
      dtype.itemsize * math.prod(shape) for dtype, shape in self.blocks(1)
    )

  def blocks(self, rows: int) -> list[tuple[np.dtype, tuple[int, ...]]]:
    """Returns dtype and shape of each block that stores this many rows."""
    how = CODECS.get(self.codec)
    if how is None:
      dtype = HALF if self.codec == HALF else self.dtype
      return [(_DTYPES[dtype], (rows, *self.shape))]
    codes = code_bytes(self.shape[0], how.bits)
    f32 = np.dtype(np.float32)
    return [(np.dtype(np.uint8), (rows, codes)), (f32, (rows,)), (f32, (rows,))]


class FileFacts(NamedTuple):
  """A file of a checkpoint, as its manifest describes it."""

  name: str
  bytes: int
  crc: int
  """CRC-32 of the pieces' checksums for a row file, else of all bytes."""
  rows: int | None = None
  """Number of rows of a row file, else None."""
  owner: int = 0
  """Number of the process whose rows a row file has."""


class Piece(NamedTuple):
  """Some rows and their values."""

  rows: Int[np.ndarray, ' n']
  """Ascending, i64."""
  values: dict[str, Shaped[np.ndarray, 'n ...']]
  """By name of the leaf."""


class _Trailer:
  """Totals of the pieces so far, which the end of a file repeats.

  Attributes:
    rows: number of rows.
    last: last row, or -1.
    crc: CRC-32 of the header and then of the pieces' checksums.
  """

  def __init__(self, header: bytes) -> None:
    self.rows, self.last, self.crc = 0, -1, zlib.crc32(header)

  def add(self, rows: np.ndarray, crc: int) -> None:
    self.rows += len(rows)
    self.last = int(rows[-1])
    self.crc = zlib.crc32(crc.to_bytes(4, 'little'), self.crc)

  def packed(self) -> bytes:
    """Returns the piece without rows that ends the file."""
    return _PIECE.pack(0, 0, self.rows, self.crc)


def concatenate(pieces: list[Piece]) -> Piece:
  """Joins pieces end to end. Returns a single piece without a copy."""
  if len(pieces) == 1:
    return pieces[0]
  return Piece(
    np.concatenate([piece.rows for piece in pieces]),
    {
      name: np.concatenate([piece.values[name] for piece in pieces])
      for name in pieces[0].values
    },
  )


def part_of(piece: Piece, at: Any) -> Piece:
  """Returns the rows of a piece at a slice, mask or array of indices."""
  values = {name: x[at] for name, x in piece.values.items()}
  return Piece(piece.rows[at], values)


def leaves_of(
  values: dict[str, np.ndarray], codec: str = RAW
) -> tuple[Leaf, ...]:
  """Returns the leaves of arrays [n, ...]. The codec is that of the rows."""
  leaves = (Leaf(k, str(x.dtype), x.shape[1:]) for k, x in values.items())
  return with_codec(tuple(leaves), codec)


def with_codec(leaves: tuple[Leaf, ...], codec: str) -> tuple[Leaf, ...]:
  """Returns the leaves with another codec of the rows.

  Unless it is `RAW`, row state in float32 is stored as `HALF`.
  """

  def own(leaf: Leaf) -> str:
    if leaf.name == ROWS or codec == RAW:
      return codec
    return HALF if leaf.dtype == 'float32' else RAW

  return tuple(leaf._replace(codec=own(leaf)) for leaf in leaves)


def write_row_file(
  place: Place,
  name: str,
  leaves: tuple[Leaf, ...],
  pieces: Iterable[Piece],
) -> FileFacts:
  """Writes a row file. If it fails, the place is unchanged.

  Pieces have any length, ascend also from one to the next, and must not change
  afterwards. What their iterator raises passes through.

  Raises:
    UserError: rows or leaves are invalid, or values to be quantized are not
      finite.
    OSError: the file cannot be written.
  """
  flaw = _flaw_of(leaves)
  if flaw is not None:
    raise UserError(
      'a row file holds numbers, a few per row',
      got=flaw,
      where='write_row_file, leaves',
      hint='give other arrays',
    )
  header = _header_of(leaves)
  trailer = _Trailer(header)
  size = place.write(name, _content(header, leaves, pieces, trailer))
  return FileFacts(name, size, trailer.crc, trailer.rows)


def facts_in(place: Place, name: str) -> FileFacts:
  """Reads the facts of a row file that another process wrote, from its end.

  Raises:
    UserError: it has no end.
    OSError: it cannot be read. FileNotFoundError: it is not there yet.
  """
  size, where = place.size(name), f'{place.url}/{name}'
  with place.open(name) as file:
    file.seek(max(0, size - _PIECE.size))
    end = _PIECE.unpack(_read(file, _PIECE.size, where))
  count, width, rows, crc = end
  if count or width:
    raise _damage('no end', where)
  return FileFacts(name, size, crc, rows)


def leaves_in(place: Place, name: str) -> tuple[Leaf, ...]:
  """Reads the leaves of a row file, or raises as `read_row_file`."""
  with place.open(name) as file:
    return _read_header(file, f'{place.url}/{name}')[0]


def read_row_file(place: Place, facts: FileFacts) -> Iterator[Piece]:
  """Yields the pieces of a file, about a MiB each, in order.

  Raises:
    UserError: the file is damaged or does not match `facts`.
    OSError: it cannot be read.
  """
  for leaves, rows, body in _checked_pieces(place, facts):
    yield Piece(rows, _values(leaves, len(rows), body))


def check_row_file(place: Place, facts: FileFacts) -> None:
  """Reads the whole file, and raises what `read_row_file` raises."""
  for _ in _checked_pieces(place, facts):
    pass


def _flaw_of(leaves: tuple[Leaf, ...]) -> str | None:
  """Returns why no file can have these leaves, or None."""
  if len({leaf.name for leaf in leaves}) < len(leaves):
    return 'two leaves of one name'
  for leaf in leaves:
    if not isinstance(leaf.name, str) or leaf.dtype not in _DTYPES:
      return f'dtype {leaf.dtype} of leaf {leaf.name}'
    sized = len(leaf.shape) <= 8 and all(is_whole(n, 0) for n in leaf.shape)
    # numpy limits the product of the other axes even if one has length 0.
    if not sized or math.prod(max(n, 1) for n in leaf.shape) > _MAX_PIECE:
      return f'shape {leaf.shape} of leaf {leaf.name}'
    if leaf.codec == HALF and leaf.dtype == 'float32':
      continue
    if leaf.codec not in CODECS:
      return f'codec {leaf.codec} of leaf {leaf.name}'
    floating = leaf.dtype in ('float32', 'float16', 'bfloat16')
    if leaf.codec != RAW and not (floating and len(leaf.shape) == 1):
      return f'codec {leaf.codec} of leaf {leaf.name}, which is no float [n, D]'
  row_bytes = sum(leaf.row_bytes for leaf in leaves)
  if row_bytes > _MAX_PIECE // 2:
    return f'{row_bytes} bytes in a row'
  size = len(_header_of(leaves))
  return f'a header of {size} bytes' if size > _MAX_HEADER else None


def _padded(size: int) -> int:
  """Rounds a size up to a multiple of 8 bytes."""
  return -(-size // 8) * 8


def _header_of(leaves: tuple[Leaf, ...]) -> bytes:
  text = json.dumps({'leaves': leaves}).encode()
  return _HEAD.pack(_MAGIC, _VERSION, len(text), zlib.crc32(text)) + text


def _content(
  header: bytes,
  leaves: tuple[Leaf, ...],
  pieces: Iterable[Piece],
  trailer: _Trailer,
) -> Iterator[Bytes]:
  """Yields the bytes of a file, and adds its pieces to the trailer."""
  yield header
  row_bytes = sum(leaf.row_bytes for leaf in leaves)
  for piece in _resized(pieces, max(1, PIECE_BYTES // (row_bytes + 4))):
    _check_piece(piece, leaves, trailer.last)
    gaps = np.diff(piece.rows).astype(np.uint64)
    gaps = gaps.astype(np.min_scalar_type(gaps.max(initial=0)))
    blocks = [gaps]
    for leaf in leaves:
      how, values = CODECS.get(leaf.codec), piece.values[leaf.name]
      if leaf.codec == HALF:
        values = to_half(values)
      blocks += [values] if how is None else [*quantize(values, how)]
    head = _PIECE.pack(len(piece.rows), gaps.itemsize, int(piece.rows[0]), 0)
    crc = zlib.crc32(head[:-4])
    parts = [part for block in blocks for part in _padded_bytes(block)]
    for part in parts:
      crc = zlib.crc32(part, crc)
    yield head[:-4] + crc.to_bytes(4, 'little')
    yield from parts
    trailer.add(piece.rows, crc)
  yield trailer.packed()


def _resized(pieces: Iterable[Piece], size: int) -> Iterator[Piece]:
  """Yields the same rows in pieces of `size` rows, and a shorter last one."""
  waiting: list[Piece] = []
  total = 0
  for rows, values in pieces:
    if not len(rows):
      continue
    waiting.append(Piece(rows, values))
    total += len(rows)
    if total < size:
      continue
    whole, rest = concatenate(waiting), total % size
    end = total - rest
    for start in range(0, end, size):
      yield part_of(whole, slice(start, start + size))
    waiting = [part_of(whole, slice(end, None))] if rest else []
    total = rest
  if waiting:
    yield concatenate(waiting)


def _check_piece(piece: Piece, leaves: tuple[Leaf, ...], last: int) -> None:
  rows = piece.rows
  ascending = rows[0] > last and (rows[1:] > rows[:-1]).all()
  if rows.dtype != np.int64 or not ascending:
    raise UserError(
      'rows of a file must be int64, ascend, and be 0 or more',
      got=f'{rows} after row {last}',
      where='write_row_file, pieces',
      hint='sort them, and give each once',
    )
  for leaf in leaves:
    value = piece.values.get(leaf.name)
    shape = (len(rows), *leaf.shape)
    if value is None or (str(value.dtype), value.shape) != (leaf.dtype, shape):
      raise UserError(
        f'leaf {leaf.name} must be {leaf.dtype}{list(shape)}',
        got=value if value is None else f'{value.dtype}{list(value.shape)}',
        where='write_row_file, pieces',
        hint='give the arrays that the leaves describe',
      )


def _padded_bytes(block: np.ndarray) -> Iterator[Bytes]:
  data = np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
  yield data
  if len(data) % 8:
    yield bytes(-len(data) % 8)


def _checked_pieces(
  place: Place, facts: FileFacts
) -> Iterator[tuple[tuple[Leaf, ...], np.ndarray, memoryview]]:
  """Yields leaves, rows and blocks of each piece with a correct checksum."""
  where, size = f'{place.url}/{facts.name}', place.size(facts.name)
  if size != facts.bytes:
    raise _damage(f'{size} bytes, not {facts.bytes}', where)
  with place.open(facts.name) as file:
    leaves, trailer = _read_header(file, where)
    while True:
      head = _read(file, _PIECE.size, where)
      count, width, first, crc = _PIECE.unpack(head)
      if count == 0:
        break
      gaps = _padded((count - 1) * width)
      blocks = (block for leaf in leaves for block in leaf.blocks(count))
      length = gaps + sum(
        _padded(dtype.itemsize * math.prod(shape)) for dtype, shape in blocks
      )
      room = min(size - file.tell(), _MAX_PIECE)
      if width not in (1, 2, 4, 8) or length > room:
        raise _damage(f'a piece of {count} rows, gaps of {width} bytes', where)
      body = _read(file, length, where)
      if zlib.crc32(body, zlib.crc32(head[:-4])) != crc:
        raise _damage(f'a wrong checksum before byte {file.tell()}', where)
      rows = _rows(body, count, width, first)
      if rows[0] <= trailer.last or (rows[1:] <= rows[:-1]).any():
        raise _damage(f'rows that do not ascend from {trailer.last}', where)
      trailer.add(rows, crc)
      yield leaves, rows, memoryview(body)[gaps:]
    if head != trailer.packed() or file.read(1):
      raise _damage('an end that does not match the pieces before it', where)
  if (trailer.rows, trailer.crc) != (facts.rows, facts.crc):
    raise _damage(f'{trailer.rows} rows of checksum {trailer.crc}', where)


def _read_header(
  file: io.BufferedReader, where: str
) -> tuple[tuple[Leaf, ...], _Trailer]:
  head = _read(file, _HEAD.size, where)
  magic, version, size, crc = _HEAD.unpack(head)
  if magic != _MAGIC or version != _VERSION:
    raise _damage(f'magic {magic!r} and version {version}', where)
  if size > _MAX_HEADER:
    raise _damage(f'a header of {size} bytes', where)
  text = _read(file, size, where)
  if zlib.crc32(text) != crc:
    raise _damage('a header of another checksum', where)
  try:
    leaves = tuple(
      Leaf(name, dtype, tuple(shape), codec)
      for name, dtype, shape, codec in json.loads(bytes(text))['leaves']
    )
    flaw = _flaw_of(leaves)
  except (ValueError, KeyError, TypeError, RecursionError) as error:
    flaw = f'{type(error).__name__}: {error}'
  if flaw is not None:
    raise _damage(f'an invalid header ({flaw})', where)
  return leaves, _Trailer(bytes(head + text))


def _read(file: io.BufferedReader, size: int, where: str) -> bytearray:
  """Reads exactly `size` bytes."""
  data = bytearray(size)
  got = file.readinto(data)
  if got != size:
    raise _damage(f'{got} bytes where {size} are missing', where)
  return data


def _rows(body: bytearray, count: int, width: int, first: int) -> np.ndarray:
  """Returns rows, i64[count]. They may not ascend, as sums may wrap around."""
  rows = np.empty(count, np.uint64)
  rows[0] = first
  rows[1:] = np.frombuffer(body, f'<u{width}', count - 1)
  return np.cumsum(rows, out=rows).view(np.int64)


def _values(
  leaves: tuple[Leaf, ...], rows: int, body: memoryview
) -> dict[str, np.ndarray]:
  """Returns arrays by leaf. They are views unless they are decoded."""
  values, at = {}, 0
  for leaf in leaves:
    blocks = []
    for dtype, shape in leaf.blocks(rows):
      count = math.prod(shape)
      block = np.frombuffer(body, dtype, count, at).reshape(shape)
      blocks.append(block)
      at += _padded(block.nbytes)
    how, array = CODECS.get(leaf.codec), blocks[0]
    if how is not None:
      array = dequantize(Codes(*blocks), leaf.shape[0], how)
    values[leaf.name] = array.astype(_DTYPES[leaf.dtype], copy=False)
  return values


def _damage(got: str, where: str) -> UserError:
  return UserError(
    'a row file must be as it was written', got=got, where=where, hint=LOST
  )
