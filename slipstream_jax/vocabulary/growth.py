"""How a growing vocabulary grows: functions of its state and a batch of ids.

`use` and `admit` change the state in place and return what was there before.
With these changes any of the last batches' states can be told from the newest
one: a vocabulary that is read ahead of training needs no copy of itself.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxtyping import Int, UInt32
import numpy as np

from slipstream_jax.vocabulary import admit_kernels, place_kernels
from slipstream_jax.vocabulary.admit_kernels import Growth, Queue
from slipstream_jax.vocabulary.known import slots_for
from slipstream_jax.vocabulary.place_kernels import Places

_SHARE = 16  # of the places, one in so many is queued to leave at a time
_LEAST = 1024  # but so many at least


class State(NamedTuple):
  """Where a vocabulary stands; all of it is changed in place."""

  rows: Places
  """Ids that have a row."""
  waiting: Places
  """Ids that were seen, but not often enough."""
  queues: list[Queue]
  """Which of both may leave first: no more than both of them say."""
  scratch: list[np.ndarray]
  """Of `use`; kept, for new memory costs as much as a fifth of the lookups."""


class Change(NamedTuple):
  """What a batch changed, as it was before."""

  used: Int[np.ndarray, 'u 2']
  """Rows, and the last batch that had used each, i32."""
  fresh: Int[np.ndarray, 'f 3']
  """Rows given to another id, that id, and its last batch; 0 if none, i64."""
  waited: Int[np.ndarray, 'w 3']
  """Ids that wait or waited, their sights, 0 if none, and last batch, i64."""


class Snapshot(NamedTuple):
  """A state after some batch, without its hash tables."""

  ids: Int[np.ndarray, ' n']
  """Of the rows from 1 on, i64."""
  last: Int[np.ndarray, ' n']
  """The last batch that used each row, i32."""
  waiting_ids: Int[np.ndarray, ' w']
  """Ids that were seen, but not often enough; i64, sorted."""
  waiting_sights: UInt32[np.ndarray, ' w']
  """How often."""
  waiting_last: Int[np.ndarray, ' w']
  """Their last batches, i32."""


def new_state(rows: int, waiting: int) -> State:
  """The state before the first batch, with places for so many ids."""
  places = _new_places(rows, False), _new_places(waiting, True)
  return State(*places, [_no_queue(), _no_queue()], _scratch(0))


def use(
  state: State, ids: Int[np.ndarray, ' n'], now: int
) -> tuple[
  Int[np.ndarray, ' n'], Int[np.ndarray, ' m'], Int[np.ndarray, 'u 2']
]:
  """Rows of ids, which batch `now` uses.

  Args:
    state: changed in place.
    ids: i64[n].
    now: number of the batch, from 1 on, one more than the last.

  Returns:
    Rows i32[n], 0 where there is none; where that is, i64[m]; and
    `Change.used`.
  """
  if len(state.scratch[0]) < len(ids):
    state.scratch[:] = _scratch(len(ids))
  rows = np.empty(len(ids), np.int32)
  missed, used = state.scratch
  misses, uses, _ = place_kernels.use(
    ids, state.rows.slots, now, rows, missed, used
  )
  return rows, missed[:misses].copy(), used[:uses].copy()


def admit(
  state: State,
  ids: Int[np.ndarray, ' n'],
  missed: Int[np.ndarray, ' m'],
  rows: Int[np.ndarray, ' n'],
  now: int,
  enough: int,
  unsigned: bool,
) -> Growth:
  """Gives rows to missed ids that were seen often enough.

  Args:
    state: changed in place.
    ids: i64[n].
    missed: which of them have no row, as `use` says.
    rows: i32[n]; in and out.
    now: number of the batch, which `use` was given.
    enough: the sight at which an id gets its row.
    unsigned: whether ids are u64, which decides between ids that wait.

  Returns:
    What was changed.
  """
  growth = Growth(
    np.empty((len(missed), 4), np.int64),
    np.empty((2 * len(missed), 3), np.int64),
    np.zeros(3, np.int64),
  )
  while len(missed):
    done = admit_kernels.admit(
      ids,
      missed,
      rows,
      now,
      enough,
      state.rows,
      state.queues[0],
      state.waiting,
      state.queues[1],
      growth,
    )
    missed = missed[done:]
    match growth.counts[2]:
      case admit_kernels.NEEDS_ROWS:
        state.queues[0] = _oldest(state.rows, now)
      case admit_kernels.NEEDS_WAITING:
        ties = state.waiting.ids
        ties = ties.view(np.uint64) if unsigned else ties
        state.queues[1] = _oldest(state.waiting, now, ties)
  fresh, waited, _ = growth.counts
  return Growth(growth.fresh[:fresh], growth.waited[:waited], growth.counts)


def snapshot(state: State, changes: Sequence[Change]) -> Snapshot:
  """The state as it was before `changes`, the latest of them last."""
  count = int(state.rows.counts[0])
  ids, last = state.rows.ids[1 : count + 1].copy(), _last(state.rows)[1:]
  for used, fresh, _ in reversed(changes):
    last[used[:, 0] - 1] = used[:, 1]
    ids[fresh[:, 0] - 1], last[fresh[:, 0] - 1] = fresh[:, 1], fresh[:, 2]
  # Rows are taken in order, so those that were taken since are the last.
  count = int(np.count_nonzero(last))
  waiting = _waiting(state.waiting, [change.waited for change in changes])
  return Snapshot(ids[:count], last[:count], *waiting)


def state_of(saved: Snapshot, rows: int, waiting: int) -> State | None:
  """The inverse of `snapshot`; None if it says an id twice.

  Args:
    saved: the state.
    rows: places for ids with a row, at least as many as there are.
    waiting: places for ids that wait.
  """
  state = new_state(rows, waiting)
  unique = True
  for places, ids, last in (
    (state.rows, saved.ids, saved.last),
    (state.waiting, saved.waiting_ids, saved.waiting_last),
  ):
    places.counts[0] = len(ids)
    places.ids[1 : len(ids) + 1] = ids
    unique &= place_kernels.fill(places.slots, ids, last)
  state.waiting.sights[1 : len(saved.waiting_ids) + 1] = saved.waiting_sights
  return state if unique else None


def _new_places(count: int, sights: bool) -> Places:
  return Places(
    slots_for(count),
    np.zeros(count + 1, np.int64),
    np.zeros(count + 1 if sights else 0, np.uint32),
    np.zeros(count if sights else 0, np.int32),
    np.zeros(2, np.int64),
  )


def _scratch(ids: int) -> list[np.ndarray]:
  return [np.empty(ids, np.int64), np.empty((ids + 1, 2), np.int32)]


def _no_queue() -> Queue:
  none = np.empty(0, np.int32)
  return Queue(none, none, np.zeros(2, np.int64))


def _last(places: Places) -> Int[np.ndarray, ' _']:
  """Last batch of each place, i32; 0 where it has no id."""
  last = np.zeros(len(places.ids), np.int32)
  place_kernels.last_uses(places, last)
  return last


def _oldest(places: Places, now: int, ties: np.ndarray | None = None) -> Queue:
  """Places that may leave: those unused longest, of these the lowest ties.

  Without `ties`, the lowest places.

  Not all of them: a use only moves a place back, so the first ones stay first,
  and those used since are passed over. So a scan serves many batches.
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
  return Queue(which.astype(np.int32), last[which], at)


def _waiting(
  places: Places, waited: Iterable[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """The last three of `Snapshot`, before changes of those that wait."""
  last = _last(places)
  which = np.flatnonzero(last)
  now = np.stack(
    [places.ids[which], places.sights[which].astype(np.int64), last[which]],
    axis=1,
  )
  # An id is as its first change found it; without one, as it is now.
  events = np.concatenate([*waited, now])
  _, first = np.unique(events[:, 0], return_index=True)
  before = events[first]
  before = before[before[:, 1] > 0]
  ids, sights, batches = np.ascontiguousarray(before.T)
  return ids, sights.astype(np.uint32), batches.astype(np.int32)
