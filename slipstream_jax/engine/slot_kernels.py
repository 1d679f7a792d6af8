"""Compiled loops over slots and positions for the device's programs.

numpy would take several passes over i64 arrays, each with a new array.
"""

import numba
import numpy as np

_kernel = numba.njit(cache=True, nogil=True, boundscheck=False)


@_kernel
def pad_slots(slots: np.ndarray, past: int, out: np.ndarray) -> None:
  """Copies slots. Each absent row and all padding get distinct numbers.

  Args:
    slots: integer[U], -1 where a row has none.
    past: the first number that is not a slot.
    out: i32[P], P >= U.
  """
  for i in range(len(out)):
    out[i] = past + i
  for u in range(len(slots)):
    if slots[u] >= 0:
      out[u] = slots[u]


@_kernel
def pad_positions(positions: np.ndarray, past: int, out: np.ndarray) -> None:
  """Copies positions and pads them with numbers that are not positions.

  Args:
    positions: integer[q].
    past: the first such number.
    out: i32[Q], Q >= q.
  """
  count = len(positions)
  for i in range(count):
    out[i] = positions[i]
  for i in range(count, len(out)):
    out[i] = past + i - count


@_kernel
def sources(at: np.ndarray, loaded: int, held: int, out: np.ndarray) -> None:
  """Writes `apply.sources` to `out`, i32[Q]."""
  from_host = 0
  for i in range(len(at)):
    if at[i] >= 0:
      out[i] = loaded + at[i]
    else:
      out[i] = from_host
      from_host += 1
  for i in range(len(at), len(out)):
    out[i] = loaded + held + i


@_kernel
def misplaced(
  held: np.ndarray, slots: np.ndarray, rows: np.ndarray, load: np.ndarray
) -> int:
  """Returns the first row that is not in its planned slot, or -1.

  Args:
    held: i64[C], the row in each slot.
    slots: i64[U], of the rows. -1 where a row has none.
    rows: i64[U].
    load: positions of rows whose slots may still have other rows.
  """
  loaded = np.zeros(len(rows), np.bool_)
  for position in load:
    loaded[position] = True
  for u in range(len(rows)):
    slot = slots[u]
    if slot < 0:
      continue
    # Bounds are checked for rows to load, too, as `take_slots` does not.
    if slot >= len(held) or not (loaded[u] or held[slot] == rows[u]):
      return u
  return -1


@_kernel
def take_slots(
  held: np.ndarray, slots: np.ndarray, rows: np.ndarray, load: np.ndarray
) -> bool:
  """Puts loaded rows into their slots. Returns whether there are any.

  Args:
    held: out, i64[C], the row in each slot.
    slots: i64[U], of the rows. -1 where a row has none.
    rows: i64[U].
    load: positions of the loaded rows.
  """
  some = False
  for position in load:
    slot = slots[position]
    if slot >= 0:
      held[slot] = rows[position]
      some = True
  return some


@_kernel
def marked_slots(
  rows: np.ndarray, bits: np.ndarray, out: np.ndarray, slots: np.ndarray
) -> int:
  """Finds the marked rows and their slots, in the order of slots.

  Args:
    rows: i64[C], of each slot. -1 where it is empty.
    bits: u8[ceil(N / 8)], as in `mark_kernels`.
    out: i64[C], receives the rows.
    slots: i64[C], receives their slots.

  Returns:
    How many it found.
  """
  count = 0
  for slot in range(len(rows)):
    row = rows[slot]
    if row >= 0 and bits[row >> 3] & np.uint8(1 << (row & 7)):
      out[count] = row
      slots[count] = slot
      count += 1
  return count
