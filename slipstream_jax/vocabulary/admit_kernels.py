"""Host loops that give places to new ids, and take back those unused longest.

They work on what `place_kernels.use` missed, one lookup after the other, and
note what was there before, so that all of it can be undone. This file stays
out of jaxtyping's import hook, which numba cannot compile through.
"""

from typing import NamedTuple

import numpy as np

from slipstream_jax.hashing import kernel
from slipstream_jax.vocabulary.place_kernels import empty, LAST, Places, seek

DONE, NEEDS_ROWS, NEEDS_WAITING = 0, 1, 2
"""Why `admit` returned: of the last two, it waits for that queue."""


class Queue(NamedTuple):
  """Places in the order in which they may leave."""

  places: np.ndarray
  """i32[k]."""
  last: np.ndarray
  """Last batch of each as it was queued, i32[k]: one used since stays."""
  at: np.ndarray
  """i64[2]: the next to leave; the batch for which there are no others."""


class Growth(NamedTuple):
  """What a batch changed beyond uses; each with what was there before."""

  fresh: np.ndarray
  """i64[n, 4]: row, lookup that got it, id before, its last batch; 0 = none."""
  waited: np.ndarray
  """i64[2 n, 3]: id that waits or waited, its sights before, last batch."""
  counts: np.ndarray
  """i64[3]: how many of both there are; why `admit` stopped."""


@kernel
def _next_place(places: Places, queue: Queue, now: int) -> int:
  """A place to be had; 0 if there is none, -1 if the queue has run out."""
  if places.counts[1] > 0:
    return places.free[places.counts[1] - 1]
  if places.counts[0] < len(places.ids) - 1:
    return places.counts[0] + 1
  while queue.at[0] < len(queue.places):
    place = queue.places[queue.at[0]]
    word = places.slots[seek(places.slots, places.ids[place]), 1]
    # Else it was used since, or given to another id, and so is not the oldest.
    if word == np.int64(place) << 32 | queue.last[queue.at[0]]:
      return place
    queue.at[0] += 1
  return 0 if queue.at[1] == now else -1


@kernel
def _take(places: Places, queue: Queue, wanted: int, now: int) -> int:
  """Gives the place of `_next_place` to an id; returns its last batch or 0."""
  last = 0
  if places.counts[1] > 0:
    places.counts[1] -= 1
    place = np.int64(places.free[places.counts[1]])
  elif places.counts[0] < len(places.ids) - 1:
    places.counts[0] += 1
    place = places.counts[0]
  else:
    place = np.int64(queue.places[queue.at[0]])
    last = queue.last[queue.at[0]]
    queue.at[0] += 1
    empty(places.slots, seek(places.slots, places.ids[place]))
  slot = seek(places.slots, wanted)
  places.slots[slot, 0] = places.ids[place] = wanted
  places.slots[slot, 1] = place << 32 | now
  return last


@kernel
def _wait(
  waiting: Places,
  queue: Queue,
  wanted: int,
  now: int,
  enough: int,
  growth: Growth,
) -> int:
  """Counts a sight; returns the sights, or -1 if the queue has run out."""
  at = growth.counts[1]
  slot = seek(waiting.slots, wanted)
  word = waiting.slots[slot, 1]
  if word == 0:
    place = _next_place(waiting, queue, now)
    if place <= 0:
      return place
    old, sights = waiting.ids[place], np.int64(waiting.sights[place])
    last = _take(waiting, queue, wanted, now)
    if last:
      growth.waited[at, 0], growth.waited[at, 1] = old, sights
      growth.waited[at, 2] = last
      at += 1
    waiting.sights[place] = 1
    growth.waited[at, 0] = wanted
    growth.waited[at, 1] = growth.waited[at, 2] = 0
    growth.counts[1] = at + 1
    return 1
  place, last = word >> 32, word & LAST
  if last != now:
    growth.waited[at, 0], growth.waited[at, 1] = wanted, waiting.sights[place]
    growth.waited[at, 2] = last
    growth.counts[1] = at + 1
    waiting.slots[slot, 1] = (word - last) | now
  # Once it has enough it only waits for a row.
  waiting.sights[place] = min(np.int64(waiting.sights[place]) + 1, enough)
  return int(waiting.sights[place])


@kernel
def _stop_waiting(waiting: Places, wanted: int) -> None:
  slot = seek(waiting.slots, wanted)
  place = waiting.slots[slot, 1] >> 32
  empty(waiting.slots, slot)
  waiting.free[waiting.counts[1]] = place
  waiting.counts[1] += 1


@kernel
def admit(
  ids: np.ndarray,
  missed: np.ndarray,
  rows: np.ndarray,
  now: int,
  enough: int,
  places: Places,
  oldest: Queue,
  waiting: Places,
  oldest_waiting: Queue,
  growth: Growth,
) -> int:
  """Counts the lookups of ids without a row, and gives rows to those due.

  Args:
    ids: i64[n].
    missed: i64[m], places among `ids` to look at, in order.
    rows: in and out, i32[n], zeros where missed.
    now: number of the batch.
    enough: the sight at which an id gets its row.
    places: rows, of ids that have one.
    oldest: rows that may leave.
    waiting: places of ids that wait for a row; unused if `enough` is 1.
    oldest_waiting: of these, which may leave.
    growth: in and out; what was changed is added.

  Returns:
    How many of `missed` are done; `growth.counts[2]` says why not all.
  """
  growth.counts[2] = DONE
  for done in range(len(missed)):
    at = missed[done]
    wanted = ids[at]
    word = places.slots[seek(places.slots, wanted), 1]
    if word != 0:  # it got its row from an earlier lookup of this batch
      rows[at] = word >> 32
      continue
    if enough > 1:
      sights = _wait(waiting, oldest_waiting, wanted, now, enough, growth)
      if sights < 0:
        growth.counts[2] = NEEDS_WAITING
        return done
      if sights < enough:
        continue
    row = _next_place(places, oldest, now)
    if row < 0:
      # The lookup comes again: its id has enough sights, and stays so.
      growth.counts[2] = NEEDS_ROWS
      return done
    if row == 0:  # all rows are used by this very batch
      continue
    fresh = growth.fresh[growth.counts[0]]
    fresh[0], fresh[1], fresh[2] = row, at, places.ids[row]
    fresh[3] = _take(places, oldest, wanted, now)
    growth.counts[0] += 1
    rows[at] = row
    if enough > 1:
      _stop_waiting(waiting, wanted)
  return len(missed)
