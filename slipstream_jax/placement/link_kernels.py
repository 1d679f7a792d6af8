"""Compiled loops of `base` and `pinned` over rows, slots and lookups."""

import numba
import numpy as np

from slipstream_jax.hashing import place_slot

_kernel = numba.njit(cache=True, nogil=True, boundscheck=False)


@_kernel
def places(
  held: np.ndarray, rows: np.ndarray, scratch: np.ndarray, out: np.ndarray
) -> int:
  """Writes to out[i] the place of rows[i] in `held`, or -1.

  Args:
    held: i64[V], unique.
    rows: i64[U].
    scratch: i32[m], m a power of two above V.
    out: i64[U].

  Returns:
    How many of the rows are in `held`.
  """
  scratch[:] = -1
  count = 0
  for v in range(len(held)):
    scratch[place_slot(scratch, held, held[v])] = v
  for u in range(len(rows)):
    out[u] = scratch[place_slot(scratch, held, rows[u])]
    count += out[u] >= 0
  return count


@_kernel
def moves(
  inverse: np.ndarray, slots: np.ndarray, missing: np.ndarray
) -> tuple[int, int, int]:
  """Finds the rows without a slot, and counts the lookups of the others.

  Args:
    inverse: i32[n], places of lookups in `slots`. -1 is padding.
    slots: integer[U], -1 for rows without a slot.
    missing: out, i64[U], whose first places receive the rows without a slot.

  Returns:
    The number of rows without a slot, of lookups without padding, and of
    lookups whose row has a slot.
  """
  absent = lookups = misses = 0
  # One byte per row keeps the array in the processor's cache.
  without = np.empty(len(slots), np.uint8)
  for u in range(len(slots)):
    without[u] = slots[u] < 0
    missing[absent] = u
    absent += without[u]
  for place in inverse:
    lookups += place >= 0
  if absent == len(slots):
    return absent, lookups, 0
  if absent > 0:
    for place in inverse:
      if place >= 0:
        misses += without[place]
  return absent, lookups, lookups - misses


@_kernel
def slots_of_hot(hot: np.ndarray, num_hot: int, out: np.ndarray) -> None:
  """Converts places i32[U] among H hot rows to slots i64[U]. -1 if cold."""
  for u in range(len(hot)):
    out[u] = hot[u] if hot[u] < num_hot else -1
