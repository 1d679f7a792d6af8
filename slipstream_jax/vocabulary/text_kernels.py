"""Host loops over text: its hashes, and text found by them and compared.

Texts lie end to end: u8 bytes of UTF-8 and i64[n], where each ends. This file
stays out of jaxtyping's import hook, which numba cannot compile through.
"""

import numpy as np

from slipstream_jax.hashing import kernel, mix

_AHEAD = 64  # texts whose memory is asked for at once


@kernel
def hash_texts(data: np.ndarray, ends: np.ndarray, hashes: np.ndarray) -> None:
  """64 bits of each text, u64[n]: the same on every machine.

  Of texts of one length, at most 8 bytes, no two have the same.
  """
  start = 0
  for i in range(len(ends)):
    bits = mix(np.uint64(ends[i] - start + 1))
    while start < ends[i]:
      word, end = np.uint64(0), min(start + 8, ends[i])
      for at in range(end - 1, start - 1, -1):
        word = word << np.uint64(8) | np.uint64(data[at])
      bits = mix(bits ^ word)
      start = end
    hashes[i] = bits


@kernel
def _start(ends: np.ndarray, i: int) -> int:
  return ends[i - 1] if i > 0 else 0


@kernel
def _same(
  data: np.ndarray, ends: np.ndarray, i: int, other: np.ndarray, start: int
) -> bool:
  """Whether text i is what lies in `other` from `start` on."""
  first = _start(ends, i)
  for at in range(first, ends[i]):
    if data[at] != other[start + at - first]:
      return False
  return True


@kernel
def fill_texts(hashes: np.ndarray, slots: np.ndarray, rows: np.ndarray) -> None:
  """Puts unique texts, u64[n], into a table of hashes and i64 rows."""
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
  """Reads where texts are likely to be found; returns a sum of what it read.

  A search misses the caches three times, each time to know where to look next:
  for many texts at once the processor waits for them together.
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
  """Rows of texts; of equal hashes the one of equal text.

  Args:
    data: u8, the texts that are sought.
    ends: i64[n], where they end.
    hashes: u64[n], of them.
    slots: i64[capacity, 2], of hashes and rows; not full.
    first: row of the first known text.
    known: u8, the texts that have a row.
    known_ends: i64[k], where they end.
    rows: out, i32[n]; 0 where a text has none.

  Returns:
    A sum of what was read, so that reading is not optimised away.
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
