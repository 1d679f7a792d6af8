"""State transitions of a growing vocabulary.

`take` changes the state in place and returns the previous values. With these
changes, the state after any of the last batches can be derived from the newest
one. So a vocabulary that is read ahead of training needs no copies.

Ids are in a hash table of pairs, `hashing`. The value of an id is

    bits 32..62: place, from 1 on | bits 0..31: number of its last batch

so that a use writes to the cache line that it reads.
"""

from collections.abc import Iterable, Sequence
import dataclasses
from typing import NamedTuple, no_type_check

from jaxtyping import Int, UInt32
import numpy as np

from slipstream_jax.hashing import (
  insert,
  kernel,
  new_pairs,
  remove,
  slot_of,
  touch,
)

_AHEAD = 64  # ids whose slots are prefetched together
_LAST = (1 << 32) - 1  # bits of a value that are a last batch
_SHARE = 16  # a queue holds one in 16 places
_LEAST = 1024  # but at least this many
_DONE, _NEEDS_ROWS, _NEEDS_WAITING = 0, 1, 2
"""Why `_admit` returned. With the last two, it needs that queue refilled."""


class Queue(NamedTuple):
  """Places in the order in which they may be reassigned."""

  places: np.ndarray
  """i32[k]."""
  last: np.ndarray
  """Last batch of each place when it was queued, i32[k]. A place used since
  then is skipped."""
  at: np.ndarray
  """i64[2]: the next place; the batch for which the queue is complete."""


class Places(NamedTuple):
  """n places for ids, changed in place. At most 2/3 of `slots` are in use."""

  slots: np.ndarray
  """Hash table of ids, i64[slots, 2]."""
  ids: np.ndarray
  """The latest id of each place, i64[n + 1]. Place 0 is unused."""
  sights: np.ndarray
  """How often each id was seen, u32[n + 1]; u32[0] if that is not counted."""
  free: np.ndarray
  """Places that were released, i32[n]; the first `counts[1]` are valid."""
  counts: np.ndarray
  """i64[2]: number of places taken so far, from 1 on; number in `free`."""
  oldest: Queue
  """Places that may be reassigned first."""


class _Growth(NamedTuple):
  """Changes of a batch beyond uses, with the previous values."""

  fresh: np.ndarray
  """i64[n, 4]: row, position of the id that got it, previous id and its last
  batch, both 0 if there was none."""
  waited: np.ndarray
  """i64[2 n, 3]: as `Change.waited`."""
  counts: np.ndarray
  """i64[3]: length of `fresh`, length of `waited`, why `_admit` stopped."""


@dataclasses.dataclass
class State:
  """State of a vocabulary, changed in place.

  Attributes:
    rows: ids that have a row.
    waiting: ids that were not seen often enough yet.
    scratch: buffers for `_use`. Allocation would cost a fifth of the lookups.
  """

  rows: Places
  waiting: Places
  scratch: list[np.ndarray]


class Change(NamedTuple):
  """Changes of a batch: the previous values."""

  used: Int[np.ndarray, 'u 2']
  """Rows, and the last batch that had used each, i32."""
  fresh: Int[np.ndarray, 'f 3']
  """Rows given to another id, their previous id and its last batch; 0 if none,
  i64."""
  waited: Int[np.ndarray, 'w 3']
  """Ids that wait or waited, their previous sights and last batch; 0 if none,
  i64."""


class Entries(NamedTuple):
  """A state after some batch, without its hash tables."""

  ids: Int[np.ndarray, ' n']
  """Ids of the rows from 1 on, i64."""
  last: Int[np.ndarray, ' n']
  """The last batch that used each row, i32."""
  waiting_ids: Int[np.ndarray, ' w']
  """Ids that were not seen often enough yet, i64, sorted."""
  waiting_sights: UInt32[np.ndarray, ' w']
  """Number of sights of each, u32."""
  waiting_last: Int[np.ndarray, ' w']
  """Last batch of each, i32."""


def take(
  state: State,
  ids: Int[np.ndarray, ' n'],
  now: int,
  enough: int,
  unsigned: bool,
) -> tuple[Int[np.ndarray, ' n'], Change, Int[np.ndarray, ' f']]:
  """Takes a batch: finds the rows of its ids, and gives rows to some of them.

  Args:
    state: changed in place.
    ids: i64[n].
    now: number of the batch, from 1 on, one more than the last.
    enough: the sight at which an id gets its row.
    unsigned: whether ids are u64. Decides the order of waiting ids in ties.

  Returns:
    Rows i32[n], 0 for ids without a row; the previous values; and for each
      fresh row the position of the id that got it, i64.
  """
  if len(state.scratch[0]) < len(ids):
    state.scratch[:] = _scratch(len(ids))
  rows = np.empty(len(ids), np.int32)
  missed, used = state.scratch
  misses, uses, _ = _use(ids, state.rows.slots, now, rows, missed, used)
  missed = missed[:misses]
  growth = _Growth(
    np.empty((misses, 4), np.int64),
    np.empty((2 * misses, 3), np.int64),
    np.zeros(3, np.int64),
  )
  while len(missed):
    done = _admit(
      ids, missed, rows, now, enough, state.rows, state.waiting, growth
    )
    missed = missed[done:]
    if growth.counts[2] == _NEEDS_ROWS:
      state.rows = _queued(state.rows, now)
    elif growth.counts[2] == _NEEDS_WAITING:
      ties = state.waiting.ids
      ties = ties.view(np.uint64) if unsigned else ties
      state.waiting = _queued(state.waiting, now, ties)
  fresh, waited, _ = growth.counts
  changed = growth.fresh[:fresh]
  change = Change(
    used[:uses].copy(), changed[:, [0, 2, 3]], growth.waited[:waited].copy()
  )
  return rows, change, changed[:, 1]


def entries(state: State, changes: Sequence[Change]) -> Entries:
  """Returns the state before `changes`, of which the latest is last."""
  count = int(state.rows.counts[0])
  ids, last = state.rows.ids[1 : count + 1].copy(), _last(state.rows)[1:]
  for used, fresh, _ in reversed(changes):
    last[used[:, 0] - 1] = used[:, 1]
    ids[fresh[:, 0] - 1], last[fresh[:, 0] - 1] = fresh[:, 1], fresh[:, 2]
  # Rows are taken in order, so the rows taken since then are the last ones.
  count = int(np.count_nonzero(last))
  waiting = _waiting(state.waiting, [change.waited for change in changes])
  return Entries(ids[:count], last[:count], *waiting)


def restore(saved: Entries, rows: int, waiting: int) -> State | None:
  """Returns the state of some entries, or None if they have an id twice.

  `rows` and `waiting` are numbers of places.
  """
  state = State(
    _new_places(rows, False), _new_places(waiting, True), _scratch(0)
  )
  unique = True
  for places, ids, last in (
    (state.rows, saved.ids, saved.last),
    (state.waiting, saved.waiting_ids, saved.waiting_last),
  ):
    places.counts[0] = len(ids)
    places.ids[1 : len(ids) + 1] = ids
    values = np.arange(1, len(ids) + 1) << 32 | last.astype(np.int64)
    unique &= insert(
      places.slots, np.require(ids, np.int64, ['C', 'W']), values
    )
  state.waiting.sights[1 : len(saved.waiting_ids) + 1] = saved.waiting_sights
  return state if unique else None


def _new_places(count: int, sights: bool) -> Places:
  none = np.empty(0, np.int32)
  return Places(
    new_pairs(count),
    np.zeros(count + 1, np.int64),
    np.zeros(count + 1 if sights else 0, np.uint32),
    np.zeros(count if sights else 0, np.int32),
    np.zeros(2, np.int64),
    Queue(none, none, np.zeros(2, np.int64)),
  )


def _scratch(ids: int) -> list[np.ndarray]:
  return [np.empty(ids, np.int64), np.empty((ids + 1, 2), np.int32)]


def _queued(places: Places, now: int, ties: np.ndarray | None = None) -> Places:
  """Returns places with the least recently used ones queued, or some of them.

  Ties are ordered by `ties`, or else by place. Later uses only move a place
  back, so those at the front stay valid or are skipped. One scan therefore
  serves many batches.
  """
  last = _last(places)
  which = np.flatnonzero((last > 0) & (last < now))
  whole, keep = len(which), max(_LEAST, len(last) // _SHARE)
  if keep < whole:
    latest = np.partition(last[which], keep - 1)[keep - 1]
    which = which[last[which] <= latest]
  if ties is None:
    which = which[np.argsort(last[which], kind='stable')]
  else:
    which = which[np.lexsort((ties[which], last[which]))]
  at = np.array([0, now if len(which) == whole else 0])
  return places._replace(oldest=Queue(which.astype(np.int32), last[which], at))


def _waiting(
  places: Places, waited: Iterable[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns the last three fields of `Entries`, before the given changes."""
  last = _last(places)
  which = np.flatnonzero(last)
  now = np.stack(
    [places.ids[which], places.sights[which].astype(np.int64), last[which]],
    axis=1,
  )
  # An id's first change has its previous state. Without one, it is unchanged.
  events = np.concatenate([*waited, now])
  _, first = np.unique(events[:, 0], return_index=True)
  before = events[first]
  before = before[before[:, 1] > 0]
  ids, sights, batches = np.ascontiguousarray(before.T)
  return ids, sights.astype(np.uint32), batches.astype(np.int32)


@kernel
@no_type_check
def _use(
  ids: np.ndarray,
  slots: np.ndarray,
  now: int,
  rows: np.ndarray,
  missed: np.ndarray,
  used: np.ndarray,
) -> tuple:
  """Finds the places of ids, and marks them as used by batch `now`.

  Args:
    ids: i64[n].
    slots: as in `Places`.
    now: number of the batch, above all before.
    rows: out, i32[n], 0 if the id has no place.
    missed: out, i64[n], positions of the ids without a place, in order.
    used: out, i32[n + 1, 2], as `Change.used`.

  Returns:
    How many were missed, how many were used, and a sum, as in `touch`.
  """
  mask, misses, uses, read = np.int64(len(slots) - 1), 0, 0, 0
  first = np.empty(_AHEAD, np.int64)
  for start in range(0, len(ids), _AHEAD):
    end = min(start + _AHEAD, len(ids))
    read += touch(slots, ids[start:end], first)
    for i in range(start, end):
      slot = first[i - start]
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
      last = word & _LAST
      used[uses, 0], used[uses, 1] = word >> 32, last
      uses += last != now
      slots[slot, 1] = (word - last) | now
  return misses, uses, read


def _last(places: Places) -> Int[np.ndarray, ' places']:
  """Returns the last batch of each place, i32. 0 if it has no id."""
  last = np.zeros(len(places.ids), np.int32)
  _find_last(places, last)
  return last


@kernel
@no_type_check
def _find_last(places: Places, last: np.ndarray) -> None:
  # Returns nothing: Ctrl-C while numba makes an array is a SystemError.
  for slot in range(len(places.slots)):
    word = places.slots[slot, 1]
    last[word >> 32] = word & _LAST
  last[0] = 0


@kernel
@no_type_check
def _next_place(places: Places, now: int) -> int:
  """Returns a place to give to an id, 0 if there is none.

  Returns -1 if the queue must be refilled to find out.
  """
  if places.counts[1] > 0:
    return places.free[places.counts[1] - 1]
  if places.counts[0] < len(places.ids) - 1:
    return places.counts[0] + 1
  queue = places.oldest
  while queue.at[0] < len(queue.places):
    place = queue.places[queue.at[0]]
    word = places.slots[slot_of(places.slots, places.ids[place]), 1]
    # Otherwise it was used since, or reassigned, so it is not the oldest.
    if word == np.int64(place) << 32 | queue.last[queue.at[0]]:
      return place
    queue.at[0] += 1
  return 0 if queue.at[1] == now else -1


@kernel
@no_type_check
def _take(places: Places, wanted: int, now: int) -> int:
  """Gives the place of `_next_place` to an id.

  Returns the last batch of the id that had the place, or 0.
  """
  last = 0
  if places.counts[1] > 0:
    places.counts[1] -= 1
    place = np.int64(places.free[places.counts[1]])
  elif places.counts[0] < len(places.ids) - 1:
    places.counts[0] += 1
    place = places.counts[0]
  else:
    queue = places.oldest
    place = np.int64(queue.places[queue.at[0]])
    last = queue.last[queue.at[0]]
    queue.at[0] += 1
    remove(places.slots, slot_of(places.slots, places.ids[place]))
  slot = slot_of(places.slots, wanted)
  places.slots[slot, 0] = places.ids[place] = wanted
  places.slots[slot, 1] = place << 32 | now
  return last


@kernel
@no_type_check
def _wait(
  waiting: Places, wanted: int, now: int, enough: int, growth: _Growth
) -> int:
  """Counts a sight of an id without a row, and returns the number of sights.

  Returns 0 if there is no place to wait in, and -1 if the queue must be
  refilled.
  """
  slot = slot_of(waiting.slots, wanted)
  word = waiting.slots[slot, 1]
  if word == 0:
    place = _next_place(waiting, now)
    if place <= 0:
      return place
    old, sights = waiting.ids[place], waiting.sights[place]
    last = _take(waiting, wanted, now)
    if last:
      _note(growth, old, sights, last)
    waiting.sights[place] = 1
    _note(growth, wanted, 0, 0)
    return 1
  place, last = word >> 32, word & _LAST
  if last != now:
    _note(growth, wanted, waiting.sights[place], last)
    waiting.slots[slot, 1] = (word - last) | now
  # With enough sights it only waits for a row.
  waiting.sights[place] = min(np.int64(waiting.sights[place]) + 1, enough)
  return int(waiting.sights[place])


@kernel
@no_type_check
def _note(growth: _Growth, wanted: int, sights: int, last: int) -> None:
  """Appends to `growth.waited`."""
  at = growth.counts[1]
  growth.waited[at, 0], growth.waited[at, 1] = wanted, sights
  growth.waited[at, 2] = last
  growth.counts[1] = at + 1


@kernel
@no_type_check
def _stop_waiting(waiting: Places, wanted: int) -> None:
  slot = slot_of(waiting.slots, wanted)
  place = waiting.slots[slot, 1] >> 32
  remove(waiting.slots, slot)
  waiting.free[waiting.counts[1]] = place
  waiting.counts[1] += 1


@kernel
@no_type_check
def _admit(
  ids: np.ndarray,
  missed: np.ndarray,
  rows: np.ndarray,
  now: int,
  enough: int,
  places: Places,
  waiting: Places,
  growth: _Growth,
) -> int:
  """Counts the lookups of ids without a row, and gives rows to those due.

  Args:
    ids: i64[n].
    missed: i64[m], positions in `ids` to handle, in order.
    rows: in and out, i32[n], zeros where missed.
    now: number of the batch.
    enough: the sight at which an id gets its row.
    places: ids that have a row.
    waiting: ids that wait for a row; unused if `enough` is 1.
    growth: in and out. Changes are appended, and why it stopped is set.

  Returns:
    How many of `missed` are done.
  """
  growth.counts[2] = _DONE
  for done in range(len(missed)):
    at = missed[done]
    wanted = ids[at]
    word = places.slots[slot_of(places.slots, wanted), 1]
    if word != 0:  # it got its row from an earlier lookup of this batch
      rows[at] = word >> 32
      continue
    if enough > 1:
      sights = _wait(waiting, wanted, now, enough, growth)
      if sights < 0:
        growth.counts[2] = _NEEDS_WAITING
        return done
      if sights < enough:
        continue
    row = _next_place(places, now)
    if row < 0:
      # This lookup is repeated. `_wait` caps its sights at `enough`.
      growth.counts[2] = _NEEDS_ROWS
      return done
    if row == 0:  # this batch uses all rows
      continue
    fresh = growth.fresh[growth.counts[0]]
    fresh[0], fresh[1], fresh[2] = row, at, places.ids[row]
    fresh[3] = _take(places, wanted, now)
    growth.counts[0] += 1
    rows[at] = row
    if enough > 1:
      _stop_waiting(waiting, wanted)
  return len(missed)
