"""A chain's rows in ascending order, each once: as a base would have them.

All files are read side by side, a piece of each at a time. Whatever comes up to
the first of their last rows is merged and handed on; so memory is a few MiB per
link, however many rows there are.
"""

from collections.abc import Iterator

import numpy as np

from slipstream_jax.checkpoint.manifest import Manifest
from slipstream_jax.checkpoint.places import Place
from slipstream_jax.checkpoint.row_file import (
  concatenate,
  part_of,
  Piece,
  read_row_file,
)


def merged_rows(
  place: Place, chain: tuple[Manifest, ...], group: str
) -> Iterator[Piece]:
  """Yields a group's rows, ascending, of each row what the last link has.

  Raises:
    UserError: a file is damaged.
    OSError: one cannot be read.
  """
  return merged(
    [
      read_row_file(place, link.rows[group])
      for link in chain
      if group in link.rows
    ]
  )


def merged(sources: list[Iterator[Piece]]) -> Iterator[Piece]:
  """The same of sources that ascend: of each row what the last source has."""
  # Source and what of its piece is not merged yet; in order, as the last holds.
  waiting = [(s, p) for s in sources if (p := next(s, None)) is not None]
  while waiting:
    end = min(piece.rows[-1] for _, piece in waiting)
    taken, left = [], []
    for source, piece in waiting:
      cut = int(np.searchsorted(piece.rows, end, side='right'))
      if cut:
        taken.append(part_of(piece, slice(0, cut)))
      rest: Piece | None = part_of(piece, slice(cut, None))
      if cut == len(piece.rows):
        rest = next(source, None)
      if rest is not None:
        left.append((source, rest))
    waiting = left
    yield _last_of_each(taken)


def _last_of_each(pieces: list[Piece]) -> Piece:
  """Pieces in one, ascending; of a row in several, what the last has."""
  if len(pieces) == 1:
    return pieces[0]
  whole = concatenate(pieces)
  order = np.argsort(whole.rows, kind='stable')
  rows = whole.rows[order]
  last = np.append(rows[1:] != rows[:-1], True)
  return part_of(whole, order[last])
