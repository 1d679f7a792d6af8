"""What a row file's bytes are: leaves, pieces, and the blocks of a piece.

  magic, version, header: JSON of the leaves, its checksum
  piece: how many rows, the first one, checksum | gaps | a block per leaf
  ... of about a MiB each, so that a file needs no more memory than that
  end: a piece of no rows, with their number and a checksum of all checksums

Rows ascend, and lie there as gaps to the row before, in the narrowest unsigned
integer that holds those of the piece. Blocks begin at multiples of 8 bytes. All
is little-endian.
"""

import json
import math
import struct
from typing import Any, NamedTuple
import zlib

import ml_dtypes
import numpy as np

from slipstream_jax.checkpoint.quantize import code_bytes, CODECS, RAW
from slipstream_jax.errors import is_whole

PIECE_BYTES = 1 << 20
"""About as many has a piece; of a row that is longer, one row."""
MOST_PIECE = 1 << 28
"""No piece has more."""
MOST_HEADER = 1 << 16
HEAD = struct.Struct('<8sIII')
"""Magic, version, bytes of the header, its CRC-32."""
PIECE = struct.Struct('<IIQI')
"""Rows, bytes of a gap, first row, CRC-32 of these three and the blocks."""
MAGIC, VERSION = b'SLIPROWS', 1
ROWS = 'rows'
"""The leaf that codecs are for; others are row state, and stay as they are."""
DTYPES = {
  str(np.dtype(dtype)): np.dtype(dtype)
  for dtype in (
    *(bool, ml_dtypes.bfloat16, np.float16, np.float32, np.float64),
    *(np.int8, np.int16, np.int32, np.int64),
    *(np.uint8, np.uint16, np.uint32, np.uint64),
  )
}


class _BadHeader(ValueError):
  """What is no header of a row file; the message says why."""


class Leaf(NamedTuple):
  """An array that has an entry for each row."""

  name: str
  dtype: str
  """One of `DTYPES`."""
  shape: tuple[int, ...]
  """Of one row's entry."""
  codec: str = RAW
  """One of `CODECS`."""

  @property
  def row_bytes(self) -> int:
    """Bytes of a row's entry in a file."""
    return sum(
      dtype.itemsize * math.prod(shape) for dtype, shape in self.blocks(1)
    )

  def blocks(self, rows: int) -> list[tuple[np.dtype, tuple[int, ...]]]:
    """Dtype and shape of what lies in a file for so many rows."""
    how = CODECS[self.codec]
    if how is None:
      return [(DTYPES[self.dtype], (rows, *self.shape))]
    codes = code_bytes(self.shape[0], how.bits)
    f32 = np.dtype(np.float32)
    return [(np.dtype(np.uint8), (rows, codes)), (f32, (rows,)), (f32, (rows,))]


class FileFacts(NamedTuple):
  """What a manifest says of a file."""

  name: str
  bytes: int
  crc: int
  """CRC-32: of a row file of its pieces' checksums, of others of all bytes."""
  rows: int | None = None
  """Of a row file."""


class End:
  """What is known of a file at its end.

  Attributes:
    rows: how many there were.
    last: the last of them; -1 if there was none.
    crc: CRC-32 of the header, and then of the pieces' checksums.
  """

  def __init__(self, header: bytes) -> None:
    """Of a file of no piece."""
    self.rows, self.last, self.crc = 0, -1, zlib.crc32(header)

  def add(self, rows: np.ndarray, crc: int) -> None:
    """Counts a piece, of rows i64[n] and this checksum."""
    self.rows += len(rows)
    self.last = int(rows[-1])
    self.crc = zlib.crc32(crc.to_bytes(4, 'little'), self.crc)

  def packed(self) -> bytes:
    """The piece of no rows that ends the file."""
    return PIECE.pack(0, 0, self.rows, self.crc)


def leaves_of(
  values: dict[str, np.ndarray], codec: str = RAW
) -> tuple[Leaf, ...]:
  """The leaves of arrays [n, ...]; those called `ROWS` by the codec."""
  leaves = (Leaf(k, str(x.dtype), x.shape[1:]) for k, x in values.items())
  return in_codec(tuple(leaves), codec)


def in_codec(leaves: tuple[Leaf, ...], codec: str) -> tuple[Leaf, ...]:
  """The same leaves; that called `ROWS` by another codec."""
  return tuple(
    leaf._replace(codec=codec) if leaf.name == ROWS else leaf for leaf in leaves
  )


def flaw_of(leaves: tuple[Leaf, ...]) -> str | None:
  """Why no file can have these leaves; None if one can."""
  if len({leaf.name for leaf in leaves}) < len(leaves):
    return 'two leaves of one name'
  for leaf in leaves:
    if not isinstance(leaf.name, str) or leaf.dtype not in DTYPES:
      return f'dtype {leaf.dtype} of leaf {leaf.name}'
    sized = len(leaf.shape) <= 8 and all(is_whole(n, 0) for n in leaf.shape)
    # numpy counts as if an axis of length 0 had length 1.
    if not sized or math.prod(max(n, 1) for n in leaf.shape) > MOST_PIECE:
      return f'shape {leaf.shape} of leaf {leaf.name}'
    if leaf.codec not in CODECS:
      return f'codec {leaf.codec} of leaf {leaf.name}'
    floating = leaf.dtype in ('float32', 'float16', 'bfloat16')
    if leaf.codec != RAW and not (floating and len(leaf.shape) == 1):
      return f'codec {leaf.codec} of leaf {leaf.name}, which is no float [n, D]'
  if row_bytes(leaves) > MOST_PIECE // 2:
    return f'{row_bytes(leaves)} bytes in a row'
  size = len(header_of(leaves))
  return f'a header of {size} bytes' if size > MOST_HEADER else None


def row_bytes(leaves: tuple[Leaf, ...]) -> int:
  """Bytes of a row in a file, its number aside."""
  return sum(leaf.row_bytes for leaf in leaves)


def piece_bytes(leaves: tuple[Leaf, ...], rows: int, width: int) -> int:
  """Bytes of the gaps and blocks of a piece."""
  total = padded((rows - 1) * width)
  for leaf in leaves:
    for dtype, shape in leaf.blocks(rows):
      total += padded(dtype.itemsize * math.prod(shape))
  return total


def padded(size: int) -> int:
  """Bytes of a block with those up to the next one."""
  return -(-size // 8) * 8


def header_of(leaves: tuple[Leaf, ...]) -> bytes:
  """The beginning of a file."""
  text = json.dumps({'leaves': leaves}).encode()
  return HEAD.pack(MAGIC, VERSION, len(text), zlib.crc32(text)) + text


def parse_leaves(text: bytes) -> tuple[Leaf, ...]:
  """The leaves that a header's JSON tells of.

  Raises:
    _BadHeader: it is no such JSON.
  """
  try:
    parsed: Any = json.loads(text)
    leaves = tuple(
      Leaf(name, dtype, tuple(shape), codec)
      for name, dtype, shape, codec in parsed['leaves']
    )
    flaw = flaw_of(leaves)
  except (ValueError, KeyError, TypeError, RecursionError) as error:
    raise _BadHeader(f'{type(error).__name__}: {error}') from error
  if flaw is not None:
    raise _BadHeader(flaw)
  return leaves
