"""What tables of one's own are read as: frames of bounded size, in order."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

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


def recut(
  frames: Iterator[pl.DataFrame], name: str, rows: int = ROWS
) -> Iterator[Piece]:
  """Pieces of exactly `rows` rows, however the frames are cut; one less last.

  Where a preparation is continued it counts pieces, and those of a stream may
  be cut another way each time.
  """
  first, held = 0, None
  for frame in frames:
    held = frame if held is None else _joined(held, frame, name)
    while held.height >= rows:
      yield cut(held.head(rows), first, name)
      held, first = held.slice(rows), first + rows
  if held is not None and held.height:
    yield cut(held, first, name)


def cut(frame: pl.DataFrame, first: int, name: str, read: int = 0) -> Piece:
  """A piece whose first row has the number `first` in its source."""
  return Piece(frame, lambda row: f'{name}, row {first + row}', read)


def _joined(held: pl.DataFrame, frame: pl.DataFrame, name: str) -> pl.DataFrame:
  try:
    # Relaxed, as a column of nothing yet has no type.
    return pl.concat([held, frame], how='vertical_relaxed', rechunk=True)
  except pl.exceptions.PolarsError as error:
    raise UserError(
      'all frames of a source must have the same columns of the same types',
      got=first_line(error),
      where=name,
      hint='give each frame the columns of the first one',
    ) from error


def first_line(error: Exception) -> str:
  """What an error of polars says, without its advice."""
  lines = str(error).splitlines() or [type(error).__name__]
  return f'"{lines[0]}"'
