"""Records: a row and all its row state as contiguous bytes."""

import itertools
import math
from typing import Any, NamedTuple, no_type_check

from jaxtyping import Int, UInt8
import numpy as np

from slipstream_jax.hashing import kernel
from slipstream_jax.store.threads import ALONE, Helpers
from slipstream_jax.types import RowBlock

# bytes, required by XLA's CPU backend to share memory instead of copying
_ALIGNMENT = 64

Records = UInt8[np.ndarray, '_records width']
"""Records of some rows. Each has the bytes of its leaves, the row first."""

Places = Int[np.ndarray, ' _places']
"""Positions of records, i64. Below 0: the record is skipped."""


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
      aligned((size, *leaf.shape[1:]), leaf.dtype)
      for leaf in (self.none.rows, *self.none.state)
    )
    return RowBlock(rows, tuple(state))

  def take(
    self, records: Records, at: Places, out: RowBlock, helpers: Helpers = ALONE
  ) -> None:
    """Copies records at some places to the rows of a block [P, ...]."""
    self._copy(take, records, at, out, helpers)

  def put(
    self,
    records: Records,
    at: Places,
    block: RowBlock,
    helpers: Helpers = ALONE,
  ) -> None:
    """Copies the first rows of a block [P, ...] to records at some places."""
    self._copy(put, records, at, block, helpers)

  def _copy(
    self,
    copy: Any,
    records: Records,
    at: Places,
    block: RowBlock,
    helpers: Helpers,
  ) -> None:
    pairs = [
      as_words(records[:, start:end], as_bytes(leaf))
      for (start, end), leaf in zip(
        itertools.pairwise(self.starts), (block.rows, *block.state), strict=True
      )
    ]

    def copy_part(part: slice) -> None:
      for own, leaf in pairs:
        copy(own, at[part], leaf[part])

    helpers.run(copy_part, len(at), len(at) * self.width)


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
  """Returns an array of any values, which XLA's CPU backend need not copy."""
  nbytes = math.prod(shape) * np.dtype(dtype).itemsize
  memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
  start = -memory.ctypes.data % _ALIGNMENT
  whole = memory[start : start + nbytes].view(dtype)
  return whole.reshape(shape)


def layout_of(none: RowBlock) -> Layout:
  """Returns the layout of rows like those of an empty block."""
  leaves = (none.rows, *none.state)
  sizes = [x.dtype.itemsize * math.prod(x.shape[1:]) for x in leaves]
  return Layout(none, (0, *np.cumsum(sizes).tolist()))


def put_whole(records: Records, at: Places, values: Records) -> None:
  """Sets records[at[i]] = values[i]."""
  own, values = as_words(records, values)
  put(own, at, values)


def as_bytes(leaf: np.ndarray) -> np.ndarray:
  """Returns the rows of a leaf as u8[P, w], a view if it is contiguous."""
  flat = np.ascontiguousarray(leaf)
  return flat.reshape(len(leaf), math.prod(leaf.shape[1:])).view(np.uint8)


def as_words(
  records: np.ndarray, leaf: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Views bytes as words if sizes allow: copies take a quarter of the time."""
  start = records.ctypes.data
  sizes = start, records.strides[0], leaf.shape[1]
  for dtype in (np.uint64, np.uint32, np.uint16):
    if not any(size % np.dtype(dtype).itemsize for size in sizes):
      return records.view(dtype), leaf.view(dtype)
  return records, leaf


@kernel
@no_type_check
def take(records: np.ndarray, at: np.ndarray, out: np.ndarray) -> None:
  """Sets out[i] = records[at[i]].

  Args:
    records: [C, w] of any dtype.
    at: i64[n]. Where it is below 0, out[i] is not written.
    out: [P, w], P >= n.
  """
  for i in range(len(at)):
    record = at[i]
    if record >= 0:
      for k in range(out.shape[1]):
        out[i, k] = records[record, k]


@kernel
@no_type_check
def put(records: np.ndarray, at: np.ndarray, values: np.ndarray) -> None:
  """Sets records[at[i]] = values[i], the inverse of `take`.

  It reads no record, so the processor never waits for one: many stores are
  under way at a time.
  """
  for i in range(len(at)):
    record = at[i]
    if record >= 0:
      for k in range(values.shape[1]):
        records[record, k] = values[i, k]
