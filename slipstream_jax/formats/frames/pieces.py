"""Pieces of users' tables: frames of bounded size, in order."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import polars as pl

from slipstream_jax.errors import UserError

ROWS = 1 << 16
"""Most rows of a frame, except for frames cut at the blocks of a text file."""


class Piece(NamedTuple):
  """Consecutive rows of a source."""

  frame: pl.DataFrame
  where: Callable[[int], str]
  """Returns the place of row i of the frame, for errors."""
  read: int = 0
  """Bytes of the source read up to here; 0 if unknown."""


class FramePart(NamedTuple):
  """A part of a source that can be read separately."""

  name: str
  """Shown in progress and errors; the path if the part is a file."""
  size: int
  """Size in bytes; 0 if unknown."""
  pieces: Callable[[], Iterator[Piece]]
  """Reads the part from its start, in the same pieces each time."""


def recut(frames: Iterator[pl.DataFrame], name: str) -> Iterator[Piece]:
  """Cuts frames of any sizes into pieces of `ROWS` rows and a last rest.

  A resumed preparation counts pieces, and a stream's frames may have other
  sizes each time.
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
  """Cuts a frame, whose first row has the number `first`, into pieces."""
  for at in range(0, frame.height, ROWS):
    yield cut(frame.slice(at, ROWS), first + at, name)


def cut(frame: pl.DataFrame, first: int, name: str, read: int = 0) -> Piece:
  """Returns a piece whose first row has the number `first` in its source."""
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
  """Whether two types are compatible. A column of nulls fits any type."""
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
  """Returns the first line of a polars error, without the advice after it."""
  lines = str(error).splitlines() or [type(error).__name__]
  return f'"{lines[0]}"'
