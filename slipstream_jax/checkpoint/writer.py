"""Writes row files: pieces of about a MiB, with a checksum each."""

from collections.abc import Iterable, Iterator
import zlib

import numpy as np

from slipstream_jax.checkpoint import layout
from slipstream_jax.checkpoint.layout import End, FileFacts, Leaf, PIECE
from slipstream_jax.checkpoint.pieces import concatenate, part_of, Piece
from slipstream_jax.checkpoint.places import Bytes, Place
from slipstream_jax.checkpoint.quantize import CODECS, quantize
from slipstream_jax.errors import UserError


def write_row_file(
  place: Place,
  name: str,
  leaves: tuple[Leaf, ...],
  pieces: Iterable[Piece],
) -> FileFacts:
  """Writes a row file whole, or leaves all as it was.

  Args:
    place: where to.
    name: of the file.
    leaves: what each piece has, `layout.leaves_of` its arrays.
    pieces: rows [n], ascending from piece to piece too, with values [n, ...] by
      leaf; of any length. They must not change afterwards; what is raised here
      passes through.

  Returns:
    What to say of it in a manifest.

  Raises:
    UserError: rows or leaves are other than that, or to be quantized and not
      finite.
    OSError: it cannot be written.
  """
  flaw = layout.flaw_of(leaves)
  if flaw is not None:
    raise UserError(
      'a row file holds numbers, a few per row',
      got=flaw,
      where='write_row_file, leaves',
      hint='give other arrays',
    )
  header = layout.header_of(leaves)
  end = End(header)
  size = place.write(name, _file(header, leaves, pieces, end))
  return FileFacts(name, size, end.crc, end.rows)


def _file(
  header: bytes, leaves: tuple[Leaf, ...], pieces: Iterable[Piece], end: End
) -> Iterator[Bytes]:
  yield header
  most = max(1, layout.PIECE_BYTES // (layout.row_bytes(leaves) + 4))
  for piece in _cut(pieces, most):
    _check_piece(piece, leaves, end.last)
    width, gaps = _gaps(piece.rows)
    blocks = [gaps]
    for leaf in leaves:
      blocks += _stored(leaf, piece.values[leaf.name])
    head = PIECE.pack(len(piece.rows), width, int(piece.rows[0]), 0)[:-4]
    crc = zlib.crc32(head)
    parts = [part for block in blocks for part in _padded(block)]
    for part in parts:
      crc = zlib.crc32(part, crc)
    yield head + crc.to_bytes(4, 'little')
    yield from parts
    end.add(piece.rows, crc)
  yield end.packed()


def _cut(pieces: Iterable[Piece], most: int) -> Iterator[Piece]:
  """The same rows in pieces of `most`, but for the last."""
  waiting: list[Piece] = []
  total = 0
  for rows, values in pieces:
    if not len(rows):
      continue
    waiting.append(Piece(rows, values))
    total += len(rows)
    if total < most:
      continue
    whole, rest = concatenate(waiting), total % most
    cut = total - rest
    for start in range(0, cut, most):
      yield part_of(whole, slice(start, start + most))
    waiting = [part_of(whole, slice(cut, None))] if rest else []
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
        hint='give what the leaves say',
      )


def _gaps(rows: np.ndarray) -> tuple[int, np.ndarray]:
  """Bytes of a gap, and the gaps from row to row."""
  gaps = np.diff(rows).astype(np.uint64)
  dtype = np.min_scalar_type(gaps.max(initial=0))
  return dtype.itemsize, gaps.astype(dtype)


def _stored(leaf: Leaf, values: np.ndarray) -> list[np.ndarray]:
  """The blocks of a leaf, as `Leaf.blocks` has them."""
  how = CODECS[leaf.codec]
  return [values] if how is None else [*quantize(values, how)]


def _padded(block: np.ndarray) -> Iterator[Bytes]:
  data = np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
  yield data
  if len(data) % 8:
    yield bytes(-len(data) % 8)
