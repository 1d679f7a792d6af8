"""What tables of one's own are read as: frames of bounded size, in order."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import polars as pl

from slipstream_jax.errors import UserError

ROWS = 1 << 16
"""Most rows of a frame that is not cut where a block of text ends."""


class Piece(NamedTuple):
  """Some consecutive rows."""

  frame: pl.DataFrame
  where: Callable[[int], str]
  """The place of row i of the frame, as errors name it."""
  read: int = 0
  """Bytes of the source read up to here; 0 where that is not known."""


class FramePart(NamedTuple):
  """A part of a source that can be read by itself."""

  name: str
  """Said in progress and errors; a path where it is a file."""
  size: int
  """In bytes; 0 where that is not known."""
  pieces: Callable[[], Iterator[Piece]]
  """Reads it anew: the same pieces each time."""


def recut(frames: Iterator[pl.DataFrame], name: str) -> Iterator[Piece]:
  """Pieces of exactly `ROWS` rows, however the frames are cut; one less last.

  Where a preparation is continued it counts pieces, and those of a stream may
  be cut another way each time.
  """
  first, held = 0, None
  for frame in frames:
    held = frame if held is None else _joined(held, frame, name)
    while held.height >= ROWS:
      yield cut(held.head(ROWS), first, name)
      held, first = held.slice(ROWS), first + ROWS
  if held is not None and held.height:
    yield cut(held, first, name)


def cuts(frame: pl.DataFrame, first: int, name: str) -> Iterator[Piece]:
  """A frame in pieces of `ROWS` rows; its first row has that number."""
  for at in range(0, frame.height, ROWS):
    yield cut(frame.slice(at, ROWS), first + at, name)


def cut(frame: pl.DataFrame, first: int, name: str, read: int = 0) -> Piece:
  """A piece whose first row has the number `first` in its source."""
  return Piece(frame, lambda row: f'{name}, row {first + row}', read)


def _joined(held: pl.DataFrame, frame: pl.DataFrame, name: str) -> pl.DataFrame:
  for column, dtype in held.schema.items():
    other = frame.schema[column]
    if not _agree(dtype, other):
      raise UserError(
        'all frames of a source must have the same columns of the same types',
        got=f'{other} after {dtype}',
        where=f'{name}, column {column}',
        hint='give each frame the types of the first one',
      )
  return pl.concat([held, frame], how='vertical_relaxed', rechunk=True)


def _agree(dtype: Any, other: Any) -> bool:
  """Whether both are of one kind; a column of nothing yet is of any."""
  if isinstance(dtype, pl.List) and isinstance(other, pl.List):
    return _agree(dtype.inner, other.inner)
  kinds = (
    dtype.is_integer() and other.is_integer(),
    dtype.is_float() and other.is_float(),
    dtype == other,
    pl.Null in (dtype, other),
  )
  return any(kinds)


def first_line(error: Exception) -> str:
  """What an error of polars says, without its advice."""
  lines = str(error).splitlines() or [type(error).__name__]
  return f'"{lines[0]}"'
