"""Reads row files, and believes nothing that stands in them.

A piece's checksum is looked at before any of its values is handed out, and no
size before the file is known to be as long.
"""

from collections.abc import Iterator
import io
import math
import zlib

import numpy as np

from slipstream_jax.checkpoint import layout
from slipstream_jax.checkpoint.layout import End, FileFacts, HEAD, Leaf, PIECE
from slipstream_jax.checkpoint.pieces import Piece
from slipstream_jax.checkpoint.places import Place
from slipstream_jax.checkpoint.quantize import CODECS, Codes, dequantize
from slipstream_jax.errors import UserError

LOST = 'its disk lost or changed data: use an older checkpoint, or a copy'


def leaves_in(place: Place, name: str) -> tuple[Leaf, ...]:
  """The leaves of a row file.

  Raises:
    UserError: it is damaged.
    OSError: it cannot be read.
  """
  with place.open(name) as file:
    return _read_header(file, f'{place.url}/{name}')[0]


def read_row_file(place: Place, facts: FileFacts) -> Iterator[Piece]:
  """Yields the pieces of a file, about a MiB each, in order.

  Raises:
    UserError: it is damaged, or another one than the facts tell of.
    OSError: it cannot be read.
  """
  for leaves, rows, body in _bodies(place, facts):
    yield Piece(rows, _values(leaves, len(rows), body))


def check_row_file(place: Place, facts: FileFacts) -> None:
  """Reads all of a file; raises as `read_row_file`."""
  for _ in _bodies(place, facts):
    pass


def _bodies(
  place: Place, facts: FileFacts
) -> Iterator[tuple[tuple[Leaf, ...], np.ndarray, memoryview]]:
  """Leaves, rows and blocks of each piece, whose checksum is right."""
  where, size = f'{place.url}/{facts.name}', place.size(facts.name)
  if size != facts.bytes:
    raise _damage(f'{size} bytes, not {facts.bytes}', where)
  with place.open(facts.name) as file:
    leaves, end = _read_header(file, where)
    while True:
      head = _read(file, PIECE.size, where)
      count, width, first, crc = PIECE.unpack(head)
      if count == 0:
        break
      length = layout.piece_bytes(leaves, count, width)
      room = min(size - file.tell(), layout.MOST_PIECE)
      if width not in (1, 2, 4, 8) or length > room:
        raise _damage(f'a piece of {count} rows, gaps of {width} bytes', where)
      body = _read(file, length, where)
      if zlib.crc32(body, zlib.crc32(head[:-4])) != crc:
        raise _damage(f'a wrong checksum before byte {file.tell()}', where)
      rows = _rows(body, count, width, first)
      if rows[0] <= end.last or (rows[1:] <= rows[:-1]).any():
        raise _damage(f'rows that do not ascend from {end.last}', where)
      end.add(rows, crc)
      gaps = layout.padded((count - 1) * width)
      yield leaves, rows, memoryview(body)[gaps:]
    if head != end.packed() or file.read(1):
      raise _damage('an end that is not of what is before it', where)
  if (end.rows, end.crc) != (facts.rows, facts.crc):
    raise _damage(f'{end.rows} rows of checksum {end.crc}', where)


def _read_header(
  file: io.BufferedReader, where: str
) -> tuple[tuple[Leaf, ...], End]:
  head = _read(file, HEAD.size, where)
  magic, version, size, crc = HEAD.unpack(head)
  if magic != layout.MAGIC or version != layout.VERSION:
    raise _damage(f'magic {magic!r} and version {version}', where)
  if size > layout.MOST_HEADER:
    raise _damage(f'a header of {size} bytes', where)
  text = _read(file, size, where)
  if zlib.crc32(text) != crc:
    raise _damage('a header of another checksum', where)
  try:
    leaves = layout.parse_leaves(bytes(text))
  except ValueError as error:
    raise _damage(f'a header that is none ({error})', where) from error
  return leaves, End(bytes(head + text))


def _read(file: io.BufferedReader, size: int, where: str) -> bytearray:
  """So many bytes, which fewer would be damage."""
  data = bytearray(size)
  got = file.readinto(data)
  if got != size:
    raise _damage(f'{got} bytes where {size} are missing', where)
  return data


def _rows(body: bytearray, count: int, width: int, first: int) -> np.ndarray:
  """Rows, i64[count]: none is trusted to ascend, as sums may wrap around."""
  rows = np.empty(count, np.uint64)
  rows[0] = first
  rows[1:] = np.frombuffer(body, f'<u{width}', count - 1)
  return np.cumsum(rows, out=rows).view(np.int64)


def _values(
  leaves: tuple[Leaf, ...], rows: int, body: memoryview
) -> dict[str, np.ndarray]:
  """Arrays by leaf, of the blocks: views where nothing is decoded."""
  values, at = {}, 0
  for leaf in leaves:
    blocks = []
    for dtype, shape in leaf.blocks(rows):
      count = math.prod(shape)
      block = np.frombuffer(body, dtype, count, at).reshape(shape)
      blocks.append(block)
      at += layout.padded(block.nbytes)
    values[leaf.name] = _decoded(leaf, blocks)
  return values


def _decoded(leaf: Leaf, blocks: list[np.ndarray]) -> np.ndarray:
  """The array [n, ...] that blocks hold, as `Leaf.blocks` has them."""
  how = CODECS[leaf.codec]
  if how is None:
    return blocks[0]
  rows = dequantize(Codes(*blocks), leaf.shape[0], how)
  return rows.astype(layout.DTYPES[leaf.dtype], copy=False)


def _damage(got: str, where: str) -> UserError:
  return UserError(
    'a row file must be as it was written', got=got, where=where, hint=LOST
  )
