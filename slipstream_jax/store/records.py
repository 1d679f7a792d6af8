"""Records: a row and all its row state as contiguous bytes."""

import math
from typing import NamedTuple

from jaxtyping import Int, UInt8
import numpy as np

from slipstream_jax.store import block_kernels
from slipstream_jax.store.helpers import ALONE, Helpers
from slipstream_jax.types import RowBlock

Records = UInt8[np.ndarray, '_records width']
"""Records of some rows. Each has the bytes of its leaves, the row first."""

Places = Int[np.ndarray, ' _places']
"""Positions of records, i64, none below 0."""


class Layout(NamedTuple):
  """Offsets of a row's leaves in its record."""

  none: RowBlock
  """An empty block with the leaves' dtypes and shapes."""
  starts: tuple[int, ...]
  """The first byte of each leaf, and the width last."""

  @property
  def width(self) -> int:
    """Bytes of a record."""
    return self.starts[-1]

  def empty(self, size: int) -> RowBlock:
    """Returns a block of `size` rows of any values."""
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
        block_kernels.take(words, at[part], start, leaf[part])

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
        block_kernels.put(words, at[part], start, leaf[part])

    helpers.run(copy, len(at), len(at) * self.width)

  def copy(self, block: RowBlock, out: RowBlock, at: Places) -> None:
    """Copies all rows of a block to some places of another."""
    for leaf, into in zip(
      (block.rows, *block.state), (out.rows, *out.state), strict=True
    ):
      into[at] = leaf

  def packed(self, block: RowBlock, rows: int) -> Records:
    """Returns the first rows of a block as new records."""
    records = np.empty((rows, self.width), np.uint8)
    self.put(records, np.arange(rows), block)
    return records


def layout_of(none: RowBlock) -> Layout:
  """Returns the layout of rows like those of an empty block."""
  leaves = (none.rows, *none.state)
  sizes = [x.dtype.itemsize * math.prod(x.shape[1:]) for x in leaves]
  return Layout(none, (0, *np.cumsum(sizes).tolist()))


def put_whole(records: Records, at: Places, values: Records) -> None:
  """Sets record at[i] = values[i] of the same width. Skips at[i] below 0."""
  words, start, some = _words(records, 0, values)
  block_kernels.put(words, at, start, some)


def _words(
  records: np.ndarray, start: int, leaf: np.ndarray
) -> tuple[np.ndarray, int, np.ndarray]:
  """Views bytes as words if sizes allow: copies take a quarter of the time."""
  sizes = records.shape[1], start, leaf.shape[1]
  for dtype in (np.uint64, np.uint32, np.uint16):
    word = np.dtype(dtype).itemsize
    if not any(size % word for size in sizes):
      return records.view(dtype), start // word, leaf.view(dtype)
  return records, start, leaf


def _leaves(layout: Layout) -> tuple[np.ndarray, ...]:
  return layout.none.rows, *layout.none.state


def _bytes(leaf: np.ndarray) -> np.ndarray:
  """Returns the rows of a leaf as u8[P, w], a view if it is contiguous."""
  flat = np.ascontiguousarray(leaf).reshape(
    len(leaf), math.prod(leaf.shape[1:])
  )
  return flat.view(np.uint8)
