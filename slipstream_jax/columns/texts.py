"""Hashes of texts, and tables that find texts by them. Light: no polars.

Texts lie end to end: u8 bytes of UTF-8 and i64[n], the end of each.
"""

from collections.abc import Sequence
import hashlib
from typing import no_type_check

import numpy as np

from slipstream_jax.hashing import kernel, mix

MISSING = -1
"""Stands for a missing id in packed folders."""

_AHEAD = 64  # texts whose memory is prefetched together


def text_ids(texts: Sequence[bytes]) -> np.ndarray:
  """Hashes texts to i64[n], the same on every machine. b'' is `MISSING`."""
  # Texts repeat, so each is hashed once.
  ids = {text: _text_id(text) for text in set(texts)}
  return np.fromiter((ids[text] for text in texts), np.int64, len(texts))


def _text_id(text: bytes) -> int:
  if not text:
    return MISSING
  # Not Python's hash, which differs between processes. 63 bits are never
  # negative, unlike `MISSING` and the padding of lists.
  digest = hashlib.blake2b(text, digest_size=8).digest()
  return int.from_bytes(digest, 'little') >> 1


@kernel
@no_type_check
def hash_texts(data: np.ndarray, ends: np.ndarray, hashes: np.ndarray) -> None:
  """Hashes each text to 64 bits, u64[n], the same on every machine.

  Texts of the same length, at most 8 bytes, never collide.
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
@no_type_check
def _start(ends: np.ndarray, i: int) -> int:
  return ends[i - 1] if i > 0 else 0


@kernel
@no_type_check
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
@no_type_check
def fill_texts(hashes: np.ndarray, slots: np.ndarray, rows: np.ndarray) -> None:
  """Adds unique texts to a table of hashes, given as u64[n], and i64 rows."""
  mask = np.int64(len(slots) - 1)
  for i in range(len(hashes)):
    at = np.int64(hashes[i] & np.uint64(mask))
    while slots[at, 1] != 0:
      at = (at + 1) & mask
    slots[at, 0], slots[at, 1] = np.int64(hashes[i]), rows[i]


@kernel
@no_type_check
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
@no_type_check
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
