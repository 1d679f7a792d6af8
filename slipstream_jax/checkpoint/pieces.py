"""Some rows at a time, and what lies there for them."""

from typing import Any, NamedTuple

from jaxtyping import Int, Shaped
import numpy as np


class Piece(NamedTuple):
  """Some rows and what lies there for them."""

  rows: Int[np.ndarray, ' n']
  """Ascending, i64."""
  values: dict[str, Shaped[np.ndarray, 'n ...']]
  """By the name of the leaf."""


def concatenate(pieces: list[Piece]) -> Piece:
  """Pieces end to end; of one, itself."""
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
  """The rows of a piece at a slice, a mask or places."""
  values = {name: x[at] for name, x in piece.values.items()}
  return Piece(piece.rows[at], values)
