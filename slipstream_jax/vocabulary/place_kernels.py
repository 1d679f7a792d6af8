"""Kernels on hash tables of ids: find, use and remove.

A table uses open addressing with linear probing in i64[capacity, 2]: an id and

    bits 32..62: place, from 1 on | bits 0..31: number of its last batch

A use therefore writes to the cache line that it reads. 0 is a free slot. No
table is more than 2/3 full. Results do not depend on the slot of an id.
"""

from typing import NamedTuple

import numpy as np

from slipstream_jax.hashing import GOLDEN, kernel

_AHEAD = 64  # ids whose slots are prefetched together
LAST = (1 << 32) - 1
"""Mask of the bits of a last batch."""


class Places(NamedTuple):
  """n places for ids. The arrays are changed in place."""

  slots: np.ndarray
  """Hash table of ids, i64[capacity, 2]; capacity is a power of two."""
  ids: np.ndarray
  """The latest id of each place, i64[n + 1]. Place 0 is unused."""
  sights: np.ndarray
  """How often each id was seen, u32[n + 1]; u32[0] if that is not counted."""
  free: np.ndarray
  """Places that were released, i32[n]; the first `counts[1]` are valid."""
  counts: np.ndarray
  """i64[2]: number of places taken so far, from 1 on; number in `free`."""


@kernel
def _home(wanted: int, mask: np.int64) -> np.int64:
  """Returns the slot at which the search for an id begins."""
  # The high half of a product, because its low bits depend on the id's low bits
  # only. In total a seventh faster than `hashing.mix`.
  bits = np.uint64(wanted)
  bits = (bits ^ (bits >> np.uint64(32))) * GOLDEN
  return np.int64(bits >> np.uint64(32)) & mask


@kernel
def seek(slots: np.ndarray, wanted: int) -> np.int64:
  """Returns the slot in which an id is, or would be."""
  mask = np.int64(len(slots) - 1)
  at = _home(wanted, mask)
  while slots[at, 1] != 0 and slots[at, 0] != wanted:
    at = (at + 1) & mask
  return at


@kernel
def empty(slots: np.ndarray, hole: np.int64) -> None:
  """Frees a slot, and moves later ids up so that they are found."""
  mask = np.int64(len(slots) - 1)
  at = (hole + 1) & mask
  while slots[at, 1] != 0:
    home = _home(slots[at, 0], mask)
    # It may not move in front of the start of its search.
    if ((at - home) & mask) >= ((at - hole) & mask):
      slots[hole, 0], slots[hole, 1] = slots[at, 0], slots[at, 1]
      hole = at
    at = (at + 1) & mask
  slots[hole, 0], slots[hole, 1] = 0, 0


@kernel
def fill(slots: np.ndarray, ids: np.ndarray, last: np.ndarray) -> bool:
  """Puts unique ids i64[n] at places 1 to n, with their last batches i32[n].

  Returns:
    Whether they were unique.
  """
  for i in range(len(ids)):
    at = seek(slots, ids[i])
    if slots[at, 1] != 0:
      return False
    slots[at, 0], slots[at, 1] = ids[i], (i + 1) << 32 | np.int64(last[i])
  return True


@kernel
def find(
  ids: np.ndarray, slots: np.ndarray, rows: np.ndarray, missed: np.ndarray
) -> tuple:
  """Finds the places of ids. Changes nothing.

  Args:
    ids: i64[n].
    slots: as in `Places`.
    rows: out, i32[n], 0 if the id has no place.
    missed: out, i64[n], positions of the ids without a place, in order.

  Returns:
    How many were missed, and a sum of the values read, as in `use`.
  """
  mask, misses, read = np.int64(len(slots) - 1), 0, 0
  at = np.empty(_AHEAD, np.int64)
  for start in range(0, len(ids), _AHEAD):
    end = min(start + _AHEAD, len(ids))
    for i in range(start, end):
      at[i - start] = _home(ids[i], mask)
      read += slots[at[i - start], 0]
    for i in range(start, end):
      slot = at[i - start]
      while slots[slot, 1] != 0 and slots[slot, 0] != ids[i]:
        slot = (slot + 1) & mask
      rows[i] = slots[slot, 1] >> 32
      missed[misses] = i
      misses += slots[slot, 1] == 0
  return misses, read


@kernel
def use(
  ids: np.ndarray,
  slots: np.ndarray,
  now: int,
  rows: np.ndarray,
  missed: np.ndarray,
  used: np.ndarray,
) -> tuple:
  """Finds the places of ids, and marks them as used by batch `now`.

  An id in a large table misses every cache. Reading one word of each of the
  next 64 ids lets the processor wait for all of them at once.

  Args:
    ids: i64[n].
    slots: as in `Places`.
    now: number of the batch, above all before.
    rows: out, i32[n], 0 if the id has no place.
    missed: out, i64[n], positions of the ids without a place, in order.
    used: out, i32[n + 1, 2]; the place and the previous last batch of each id
      that this batch uses for the first time.

  Returns:
    How many were missed, how many were used, and a sum of the values read,
      which prevents the compiler from removing the reads.
  """
  mask, misses, uses, read = np.int64(len(slots) - 1), 0, 0, 0
  at = np.empty(_AHEAD, np.int64)
  for start in range(0, len(ids), _AHEAD):
    end = min(start + _AHEAD, len(ids))
    for i in range(start, end):
      at[i - start] = _home(ids[i], mask)
      read += slots[at[i - start], 0]
    for i in range(start, end):
      slot = at[i - start]
      word = slots[slot, 1]
      while word != 0 and slots[slot, 0] != ids[i]:
        slot = (slot + 1) & mask
        word = slots[slot, 1]
      rows[i] = word >> 32
      if word == 0:
        missed[misses] = i
        misses += 1
        continue
      # Always written, and counted only if new, because a branch here would be
      # unpredictable.
      last = word & LAST
      used[uses, 0], used[uses, 1] = word >> 32, last
      uses += last != now
      slots[slot, 1] = (word - last) | now
  return misses, uses, read


@kernel
def last_uses(places: Places, last: np.ndarray) -> None:
  """Fills i32[n + 1], zeros, with the last batch of every place in use."""
  for slot in range(len(places.slots)):
    word = places.slots[slot, 1]
    last[word >> 32] = word & LAST
  last[0] = 0
