"""Host loops over tables of ids: finding, admitting and forgetting them.

A table is open addressing with linear probing in i64[capacity, 2]: an id and

    bits 32..62: place, from 1 on | bits 0..31: number of its last batch

so that a use writes to the very cache line that it reads; 0 is a free slot.
No table is ever more than 2/3 full. Where an id lies has no influence on what
is answered. This file stays out of jaxtyping's import hook, which numba cannot
compile through.
"""

from typing import NamedTuple

import numpy as np

from slipstream_jax.hashing import GOLDEN, kernel

_AHEAD = 64  # ids whose memory is asked for at once
LAST = (1 << 32) - 1
"""The bits of a last batch."""


class Places(NamedTuple):
  """n places for ids; the arrays are changed in place."""

  slots: np.ndarray
  """Where ids are found, i64[capacity, 2]; capacity a power of two."""
  ids: np.ndarray
  """The latest id of each place, i64[n + 1]; 0 is no place."""
  sights: np.ndarray
  """How often the id was seen, u32[n + 1]; [0] where that is not counted."""
  free: np.ndarray
  """Places that were given back, i32[n], the first `counts[1]` of them."""
  counts: np.ndarray
  """i64[2]: how many places were taken so far, from 1 on; given back."""


@kernel
def _home(wanted: int, mask: np.int64) -> np.int64:
  """Slot at which the search for an id begins."""
  # A bijection, and the high half of a product, whose low bits know the id's
  # low bits alone: a seventh faster in all than `hashing.mix`.
  bits = np.uint64(wanted)
  bits = (bits ^ (bits >> np.uint64(32))) * GOLDEN
  return np.int64(bits >> np.uint64(32)) & mask


@kernel
def seek(slots: np.ndarray, wanted: int) -> np.int64:
  """Slot in which an id is, or would be."""
  mask = np.int64(len(slots) - 1)
  at = _home(wanted, mask)
  while slots[at, 1] != 0 and slots[at, 0] != wanted:
    at = (at + 1) & mask
  return at


@kernel
def empty(slots: np.ndarray, hole: np.int64) -> None:
  """Frees a slot; those after it move up, so that they are found."""
  mask = np.int64(len(slots) - 1)
  at = (hole + 1) & mask
  while slots[at, 1] != 0:
    home = _home(slots[at, 0], mask)
    # It may not move to before where its search begins.
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
  """Places of ids; changes nothing.

  Args:
    ids: i64[n].
    slots: as in `Places`.
    rows: out, i32[n]; 0 where the id has no place.
    missed: out, i64[n]; where that is so, in order.

  Returns:
    How many were missed, and a sum of what was read, as in `use`.
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
  """Places of ids, from now on used by batch `now`.

  An id in a large table misses every cache. Reading one word of each of the
  next 64 lets the processor wait for all of them at once.

  Args:
    ids: i64[n].
    slots: as in `Places`.
    now: number of the batch, above all before.
    rows: out, i32[n]; 0 where the id has no place.
    missed: out, i64[n]; where that is so, in order.
    used: out, i32[n + 1, 2]; the place and the last batch of each id that
      this batch is the first to use.

  Returns:
    How many were missed, how many were used, and a sum of what was read, so
    that reading is not optimised away.
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
      # Written in any case, and counted if it is news: a branch here would be
      # taken at random.
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
