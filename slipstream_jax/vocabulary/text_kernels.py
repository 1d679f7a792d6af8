"""Kernels on text: hash, find by hash, and compare.

Texts lie end to end: u8 bytes of UTF-8 and i64[n], the end of each.
"""

import numpy as np

from slipstream_jax.hashing import kernel

_AHEAD = 64  # texts whose memory is prefetched together


@kernel
def _start(ends: np.ndarray, i: int) -> int:
  return ends[i - 1] if i > 0 else 0


@kernel
def _same(
  data: np.ndarray, ends: np.ndarray, i: int, other: np.ndarray, start: int
) -> bool:
  """Whether text i equals the bytes of `other` from `start` on."""
  first = _start(ends, i)
  for at in range(first, ends[i]):
    if data[at] != other[start + at - first]:
      return False
  return True


@kernel
def fill_texts(hashes: np.ndarray, slots: np.ndarray, rows: np.ndarray) -> None:
  """Adds unique texts to a table of hashes, given as u64[n], and i64 rows."""
  mask = np.int64(len(slots) - 1)
  for i in range(len(hashes)):
    at = np.int64(hashes[i] & np.uint64(mask))
    while slots[at, 1] != 0:
      at = (at + 1) & mask
    slots[at, 0], slots[at, 1] = np.int64(hashes[i]), rows[i]


@kernel
def _touch(
  hashes: np.ndarray,
  slots: np.ndarray,
  first: int,
  known: np.ndarray,
  known_ends: np.ndarray,
) -> int:
  """Reads the likely places of texts. Returns a sum of the values read.

  A search has three dependent cache misses. Doing each for many texts at once
  lets the processor wait for them together.
  """
  mask, read = np.int64(len(slots) - 1), 0
  for i in range(len(hashes)):
    read += slots[np.int64(hashes[i] & np.uint64(mask)), 1]
  for i in range(len(hashes)):
    row = slots[np.int64(hashes[i] & np.uint64(mask)), 1]
    if row != 0:
      read += known_ends[row - first]
  for i in range(len(hashes)):
    row = slots[np.int64(hashes[i] & np.uint64(mask)), 1]
    if row != 0:
      start = _start(known_ends, row - first)
      if start < known_ends[row - first]:
        read += known[start]
  return read


@kernel
def find_texts(
  data: np.ndarray,
  ends: np.ndarray,
  hashes: np.ndarray,
  slots: np.ndarray,
  first: int,
  known: np.ndarray,
  known_ends: np.ndarray,
  rows: np.ndarray,
) -> int:
  """Finds the rows of texts. Compares the texts if hashes are equal.

  Args:
    data: u8, the texts to find.
    ends: i64[n], their ends.
    hashes: u64[n], their hashes.
    slots: i64[capacity, 2], hashes and rows; not full.
    first: row of the first known text.
    known: u8, the texts that have a row.
    known_ends: i64[k], their ends.
    rows: out, i32[n], 0 for texts without a row.

  Returns:
    A sum of the values read, which prevents the compiler from removing the
      reads.
  """
  mask, read = np.int64(len(slots) - 1), 0
  for i in range(len(ends)):
    if i % _AHEAD == 0:
      some = hashes[i : i + _AHEAD]
      read += _touch(some, slots, first, known, known_ends)
    length = ends[i] - _start(ends, i)
    at = np.int64(hashes[i] & np.uint64(mask))
    rows[i] = 0
    while slots[at, 1] != 0:
      if slots[at, 0] == np.int64(hashes[i]):
        k = slots[at, 1] - first
        before = _start(known_ends, k)
        same = known_ends[k] - before == length
        if same and _same(data, ends, i, known, before):
          rows[i] = slots[at, 1]
          break
      at = (at + 1) & mask
  return read
