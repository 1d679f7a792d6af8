"""A row with all its row state as one record: bytes side by side."""

import math
from typing import NamedTuple

from jaxtyping import Int, UInt8
import numpy as np

from slipstream_jax.store.disk import kernels
from slipstream_jax.store.helpers import ALONE, Helpers
from slipstream_jax.types import RowBlock

Records = UInt8[np.ndarray, '_records width']
"""Of some rows, each in the bytes of its leaves, the row first."""

Places = Int[np.ndarray, ' _places']
"""Positions of records, i64; none below 0."""


class Layout(NamedTuple):
  """Where the leaves of a row lie in its record."""

  none: RowBlock
  """No row, of the leaves' dtypes and shapes."""
  starts: tuple[int, ...]
  """First byte of each leaf, and the width last."""

  @property
  def width(self) -> int:
    """Bytes of a record."""
    return self.starts[-1]

  def empty(self, size: int) -> RowBlock:
    """A block of so many rows of any values."""
    rows, *state = (
      np.empty((size, *leaf.shape[1:]), leaf.dtype) for leaf in _leaves(self)
    )
    return RowBlock(rows, tuple(state))

  def take(
    self, records: Records, at: Places, out: RowBlock, helpers: Helpers = ALONE
  ) -> None:
    """Copies records at some places to the rows of a block [P, ...]."""
    leaves = [_bytes(leaf) for leaf in (out.rows, *out.state)]
    pieces = [
      _words(records, start, leaf)
      for start, leaf in zip(self.starts, leaves, strict=False)
    ]

    def copy(part: slice) -> None:
      for words, start, leaf in pieces:
        kernels.take(words, at[part], start, leaf[part])

    helpers.run(copy, len(at), len(at) * self.width)

  def put(
    self,
    records: Records,
    at: Places,
    block: RowBlock,
    helpers: Helpers = ALONE,
  ) -> None:
    """Copies the first rows of a block [P, ...] to records at some places."""
    leaves = [_bytes(leaf) for leaf in (block.rows, *block.state)]
    pieces = [
      _words(records, start, leaf)
      for start, leaf in zip(self.starts, leaves, strict=False)
    ]

    def copy(part: slice) -> None:
      for words, start, leaf in pieces:
        kernels.put(words, at[part], start, leaf[part])

    helpers.run(copy, len(at), len(at) * self.width)

  def copy(self, block: RowBlock, out: RowBlock, at: Places) -> None:
    """Copies all rows of a block to some places of another."""
    for leaf, into in zip(
      (block.rows, *block.state), (out.rows, *out.state), strict=True
    ):
      into[at] = leaf

  def packed(self, block: RowBlock, rows: int) -> Records:
    """The first rows of a block as records of their own."""
    records = np.empty((rows, self.width), np.uint8)
    self.put(records, np.arange(rows), block)
    return records


def layout_of(none: RowBlock) -> Layout:
  """The layout of rows as of a block of none."""
  leaves = (none.rows, *none.state)
  sizes = [x.dtype.itemsize * math.prod(x.shape[1:]) for x in leaves]
  return Layout(none, (0, *np.cumsum(sizes).tolist()))


def put_whole(records: Records, at: Places, values: Records) -> None:
  """Record at[i] = values[i], of one width; none where at[i] is below 0."""
  words, start, some = _words(records, 0, values)
  kernels.put(words, at, start, some)


def _words(
  records: np.ndarray, start: int, leaf: np.ndarray
) -> tuple[np.ndarray, int, np.ndarray]:
  """Bytes as words, where they are whole ones: copied in a quarter the time."""
  sizes = records.shape[1], start, leaf.shape[1]
  for dtype in (np.uint64, np.uint32, np.uint16):
    word = np.dtype(dtype).itemsize
    if not any(size % word for size in sizes):
      return records.view(dtype), start // word, leaf.view(dtype)
  return records, start, leaf


def _leaves(layout: Layout) -> tuple[np.ndarray, ...]:
  return layout.none.rows, *layout.none.state


def _bytes(leaf: np.ndarray) -> np.ndarray:
  """The rows of a leaf as u8[P, w]: a view, where the leaf is contiguous."""
  flat = np.ascontiguousarray(leaf).reshape(
    len(leaf), math.prod(leaf.shape[1:])
  )
  return flat.view(np.uint8)
