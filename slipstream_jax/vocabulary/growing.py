"""A vocabulary that grows during training, and forgets unused ids.

A `History` begins when a vocabulary is created or set to a state, and ends when
it is set to another. A `Cursor` is a cheap reference to a state in it. While a
cursor is referenced, the history keeps the changes that lead back to its state.
"""

import collections
from collections.abc import Mapping
import itertools
import threading
from typing import Any, NamedTuple
import weakref

from jaxtyping import Int
import numpy as np
import polars as pl

from slipstream_jax.columns.ids import as_kind, Kind, raw_ids, RawIds, text_of
from slipstream_jax.data.interrupts import held
from slipstream_jax.errors import check_whole, is_whole, UserError
from slipstream_jax.files import Path
from slipstream_jax.hashing import find
from slipstream_jax.vocabulary import growth
from slipstream_jax.vocabulary import state as states
from slipstream_jax.vocabulary.counted import Vocabulary
from slipstream_jax.vocabulary.growth import Change, Entries

_MOST = (1 << 31) - 1  # batches and rows are numbered in i32


def _settings(
  size: int, admit_after: int, candidates: int | None
) -> dict[str, Any]:
  """Checks and returns the settings with which a state must agree."""
  where = 'GrowingVocabulary, '
  check_whole(size, 2, where + 'size', 'give row 0 and one more at least')
  hint = 'give 1 for a row at first sight'
  check_whole(admit_after, 1, where + 'admit_after', hint)
  if candidates is None:
    candidates = size - 1
  hint = 'leave it out for as many as rows'
  check_whole(candidates, 1, where + 'candidates', hint)
  if max(size, candidates) > _MOST:
    raise UserError(
      'size and candidates must be below 2**31',
      got=f'{size} and {candidates}',
      where=where + 'size',
      hint='use several tables',
    )
  return {
    'what': 'GrowingVocabulary',
    'size': int(size),
    'admit_after': int(admit_after),
    # No id waits if all get a row at once.
    'candidates': int(candidates) if admit_after > 1 else 0,
  }


class Snapshot(NamedTuple):
  """A vocabulary's state after some batch."""

  kind: Kind
  batches: int
  """Number of batches taken."""
  entries: Entries
  words: list[str | None]
  """Texts of the rows from 1 on, if ids are text."""

  @property
  def known(self) -> RawIds:
    """The ids of the rows from 1 on."""
    if self.words:
      words = pl.Series(self.words, dtype=pl.String)
      return raw_ids(words, 'GrowingVocabulary')
    return states.integers(self.entries.ids)._replace(kind=self.kind)

  def to_dict(self, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state as numbers, words and arrays, with the settings."""
    words = pl.Series(self.words, dtype=pl.String)
    text = text_of(words)._asdict() if self.kind == 'text' else {}
    own = {'kind': self.kind, 'batches': self.batches}
    return {**settings, **own, **self.entries._asdict(), **text}

  @classmethod
  def from_dict(
    cls, state: Mapping[str, Any], settings: Mapping[str, Any]
  ) -> 'Snapshot':
    """Restores the result of `to_dict`.

    Raises:
      UserError: it has other settings, or is not such a state.
    """
    kind: Any = state.get('kind')
    batches: Any = state.get('batches')
    text = ('data', 'ends') if kind == 'text' else ()
    states.check(state, settings, (*Entries._fields, *text))
    entries = Entries(*(state[name] for name in Entries._fields))
    words = states.from_arrays(state).words if text else None
    snapshot = cls(
      kind, batches, entries, [] if words is None else words.to_list()
    )
    if not snapshot._is_consistent(settings['size'], settings['candidates']):
      raise _damaged()
    return snapshot

  def _is_consistent(self, size: int, candidates: int) -> bool:
    """Whether a state from outside is complete and consistent."""
    ids, last, waiting, sights, waiting_last = map(len, self.entries)
    return (
      self.kind in ('', 'int64', 'uint64', 'text')
      and is_whole(self.batches, 0, _MOST)
      and ids == last < size
      and waiting == sights == waiting_last <= candidates
      and all(array.dtype.kind in 'iu' for array in self.entries)
      and all(
        ((batch > 0) & (batch <= self.batches)).all()
        for batch in (self.entries.last, self.entries.waiting_last)
      )
      and len(self.words) == (ids if self.kind == 'text' else 0)
    )


_EMPTY = Snapshot('', 0, Entries(*np.empty((5, 0), np.int64)), [])


def _damaged() -> UserError:
  return UserError(
    'a state must be complete and consistent',
    got='a damaged state',
    where='set_state, state',
    hint='give what get_state returned',
  )


class History:
  """The states of a vocabulary. The newest one is stored, others are derived.

  Attributes:
    owner: a token that all histories of one vocabulary share.
    settings: from `_settings`.
    batches: number of batches taken so far.
    kind: kind of the ids.
    state: ids that have a row, and ids that wait.
    words: texts of all rows, empty if ids are integers.
    lock: held while a batch is taken, and while a state is read.
  """

  def __init__(
    self,
    owner: object,
    settings: Mapping[str, Any],
    length: int,
    saved: Snapshot,
  ) -> None:
    """Begins with a state. Earlier states are unknown.

    Args:
      owner: see above.
      settings: see above.
      length: number of batches whose changes are kept even without a cursor.
      saved: a state with these settings.

    Raises:
      UserError: `saved` is not a valid state.
    """
    self.owner, self.settings, self._length = owner, settings, length
    size, waiting = settings['size'], settings['candidates']
    state = growth.restore(saved.entries, size - 1, waiting)
    if state is None:
      raise _damaged()
    self.state, self.kind, self.batches = state, saved.kind, saved.batches
    self.lock = threading.RLock()
    self.words = np.full(size if self.kind == 'text' else 0, None, object)
    self.words[1 : len(saved.words) + 1] = saved.words
    self._changes: collections.deque[tuple[Change, list[str | None]]]
    self._changes = collections.deque()
    self._cursors = weakref.WeakValueDictionary[int, Cursor]()

  @property
  def first(self) -> int:
    """The earliest number of batches whose state is still known."""
    return self.batches - len(self._changes)

  def take(
    self, ids: Int[np.ndarray, ' n'], kind: Kind, parts: list[RawIds]
  ) -> tuple[Int[np.ndarray, ' n'], Int[np.ndarray, ' f']]:
    """Takes a batch. Returns its rows, i32, and the fresh ones among them, i64.

    The ids of `kind` are those of all `parts`, end to end.
    """
    if kind == 'text' and not len(self.words):
      self.words = np.full(self.settings['size'], None, object)
    now, enough = self.batches + 1, self.settings['admit_after']
    rows, change, places = growth.take(
      self.state, ids, now, enough, kind != 'int64'
    )
    fresh = change.fresh[:, 0].copy()
    before: list[str | None] = []
    if kind == 'text' and len(fresh):
      words = [part.words for part in parts if part.words is not None]
      before = self.words[fresh].tolist()
      self.words[fresh] = pl.concat(words).gather(places).to_list()
    self._changes.append((change, before))
    self.batches, self.kind = now, kind
    self._forget()
    return rows, fresh

  def _forget(self) -> None:
    """Drops changes older than `length` batches and older than all cursors."""
    if len(self._changes) <= self._length:
      return
    # Copied to a list, because cursors may be freed at any time.
    needed = min([self.batches - self._length, *self._cursors.keys()])
    while self.first < needed:
      self._changes.popleft()

  def at(self, batches: int | None) -> Snapshot:
    """Returns the state after `batches`, or the current one for None.

    Raises:
      UserError: that state is not known.
    """
    with self.lock:
      at = self.batches if batches is None else batches
      first = self.first
      if not is_whole(at, first, self.batches + 1):
        raise UserError(
          f'batches must be in [{first}, {self.batches}]',
          got=repr(at),
          where='GrowingVocabulary, batches',
          hint='make it with a longer history, or ask sooner',
        )
      undone = list(itertools.islice(self._changes, at - first, None))
      entries = growth.entries(self.state, [change for change, _ in undone])
      words = self.words.copy()
      if len(words):
        for change, before in reversed(undone):
          words[change.fresh[:, 0]] = before
      own = words[1 : len(entries.ids) + 1].tolist()
      return Snapshot(self.kind, int(at), entries, own)

  def cursor(self) -> 'Cursor':
    """Returns a cursor at the current state, the same until the next batch."""
    with self.lock:
      cursor = self._cursors.get(self.batches)
      if cursor is None:
        self._cursors[self.batches] = cursor = Cursor(self)
      return cursor


class Cursor:
  """A reference to a state of a history, the newest one when it is made."""

  def __init__(self, history: History) -> None:
    self.history, self.batches = history, history.batches

  @property
  def snapshot(self) -> Snapshot:
    """The state that it refers to."""
    return self.history.at(self.batches)

  def get_state(self) -> dict[str, Any]:
    """Returns its state, as `GrowingVocabulary.get_state` does."""
    return self.snapshot.to_dict(self.history.settings)


Position = Cursor | Mapping[str, Any]
"""A state of a growing vocabulary: a cursor, or the result of `get_state`."""


class AssignedRows(NamedTuple):
  """The rows of a batch."""

  rows: Any
  """Row of each lookup, i32, shaped as the ids. `assign_features` returns a
  dict of them, by feature."""
  fresh: Int[np.ndarray, ' n']
  """Rows that this batch gives to another id, or to their first id; i64, each
  once. Before the step, their embeddings and row state must be reset to
  untrained values."""


class GrowingVocabulary:
  """Rows for the ids of one table, assigned as training sees them.

  An id gets a row at its `admit_after`-th lookup. If all rows are taken, it
  gets the least recently used one. Ties go to the lowest row. Rows that the
  same batch uses are never taken. If there is no other, the id gets no row and
  tries again at its next lookup. Row 0 is for ids without a row, and for
  missing ids (None, null, NaN), which are not counted.

  Ids without a row wait in `candidates` places, where their lookups are
  counted. If all places are taken, the id whose latest lookup is oldest is
  forgotten. Ties go to the lowest id. Ids that the same batch looked up are
  never forgotten. If there is no other, the new id is not counted. An id that
  loses its row starts from zero.

  The result depends only on the batches, in their order. Batches may be read
  ahead: `get_state(batches)` returns the state after any of the last `history`
  batches. One thread may ask for rows while another saves.

  Integers are compared exactly. Text is compared by a hash of 64 bits: among n
  texts, two collide and share a row with a chance of n * n / 2**65. That is 1
  in 4,000 for 100 million texts.

  Attributes:
    size: R, rows of the table, including row 0.

  Example:
    >>> words = GrowingVocabulary(3, admit_after=2)
    >>> words.assign(['a', 'b', 'a']).rows
    array([0, 0, 1], dtype=int32)
    >>> words.assign(['b', 'a'])
    AssignedRows(rows=array([2, 1], dtype=int32), fresh=array([2]))
    >>> state = words.get_state(batches=1)
    >>> words.set_state(state)
    >>> words.rows(['b', 'a'])
    array([0, 1], dtype=int32)
  """

  def __init__(
    self,
    size: int,
    *,
    admit_after: int = 1,
    candidates: int | None = None,
    history: int = 512,
  ) -> None:
    """Creates an empty vocabulary.

    It uses 32 to 56 bytes per row, 40 to 64 per candidate, 8 per unique id of
    each batch of the history, and the texts of the rows.

    Args:
      size: R, rows of the table, including row 0.
      admit_after: the lookup at which an id gets its row.
      candidates: most ids that may wait for a row. None: as many as rows.
      history: number of batches whose states are kept, above those read ahead
        of training.

    Raises:
      UserError: an argument out of range.
    """
    hint = 'give more than is read ahead'
    check_whole(history, 1, 'GrowingVocabulary, history', hint)
    self._settings = _settings(size, admit_after, candidates)
    self.size, self._history_length, self._token = size, history, object()
    self._history = History(self._token, self._settings, history, _EMPTY)
    self._holder: weakref.ref[object] | None = None

  @property
  def batches(self) -> int:
    """Batches taken so far: the position to save with the trained state."""
    return self._history.batches

  def assign(self, ids: Any) -> AssignedRows:
    """Returns the rows of the next batch, and learns from its ids.

    Args:
      ids: as in `Vocabulary.rows`.

    Raises:
      UserError: the ids have another type than before. Nothing has changed.
    """
    rows, fresh = self.assign_features({'ids': ids})
    return AssignedRows(rows['ids'], fresh)

  def assign_features(
    self, ids: Mapping[str, Any], after: Cursor | None = None
  ) -> AssignedRows:
    """Returns the rows of the next batch of several features.

    Args:
      ids: ids of each feature, always in the same order.
      after: where the vocabulary must be. None: anywhere.

    Raises:
      UserError: as `assign`, or the vocabulary is not at `after`. Nothing has
        changed.
    """
    parts, kind = self._parts(ids, 'assign')
    bits = [part.bits for part in parts.values()]
    whole = np.concatenate([states.NO_IDS.bits, *bits])
    history = self._history
    with history.lock, held():  # a batch is taken completely or not at all
      if after is not None and not self.is_at(after):
        raise UserError(
          'while a source grows a vocabulary, nothing else may grow it',
          got=f'{history.batches} batches, {after.batches} from the source',
          where='GrowingVocabulary',
          hint='look ids up with rows or frozen, or close the source before',
        )
      rows, fresh = history.take(whole, kind, list(parts.values()))
    by_feature, start = {}, 0
    for name, part in parts.items():
      end = start + len(part.bits)
      by_feature[name], start = part.spread(rows[start:end]), end
    return AssignedRows(by_feature, fresh)

  def rows(self, ids: Any) -> Int[np.ndarray, '...']:
    """Returns the current rows of ids, i32, without learning or counting.

    If batches are read ahead, use `frozen` for the rows that are trained.

    Raises:
      UserError: the ids have another type than before.
    """
    parts, _ = self._parts({'ids': ids}, 'rows')
    raw, history = parts['ids'], self._history
    values = np.empty(len(raw.bits), np.int64)
    with history.lock:
      find(history.state.rows.slots, raw.bits, values)
    return raw.spread((values >> 32).astype(np.int32))

  def ids(self, rows: Any) -> np.ndarray:
    """Returns the current ids of rows, as `Vocabulary.ids`."""
    where, history = 'GrowingVocabulary.ids, rows', self._history
    with history.lock:
      bits = history.state.rows.ids[1 : history.state.rows.counts[0] + 1]
      known = states.values_of(RawIds(history.kind, bits, None, bits.shape))
      if history.kind == 'text':
        known = history.words[1 : len(bits) + 1]
      return states.ids_at(rows, known, 1, self.size, where)

  def raw_ids_of(self, rows: Int[np.ndarray, ' n']) -> RawIds:
    """Returns the current ids of rows that have one."""
    history = self._history
    with history.lock:
      bits, words = history.state.rows.ids[rows], None
      if history.kind == 'text':
        words = pl.Series(history.words[rows].tolist(), dtype=pl.String)
      return RawIds(history.kind, bits, None, bits.shape, words)

  def frozen(self, batches: int | None = None) -> Vocabulary:
    """Returns a fixed vocabulary with the rows of now, or after `batches`.

    For evaluation and serving: unknown ids get row 0.

    Raises:
      UserError: `batches` is not within the history.
    """
    return Vocabulary(self._history.at(batches).known, size=self.size)

  def get_state(self, batches: int | None = None) -> dict[str, Any]:
    """Returns the state now or after `batches`: numbers, words and arrays.

    Raises:
      UserError: `batches` is not within the history.
    """
    return self._history.at(batches).to_dict(self._settings)

  def set_state(self, state: Position) -> None:
    """Restores a state from `get_state`, or the state at a cursor.

    Raises:
      UserError: it has other settings, or is not such a state. Nothing has
        changed.
    """
    start: Snapshot
    if isinstance(state, Cursor) and self.is_at(state):
      return
    if isinstance(state, Cursor) and state.history.settings == self._settings:
      start = state.snapshot
    else:
      values = state.get_state() if isinstance(state, Cursor) else state
      start = Snapshot.from_dict(values, self._settings)
    self._history = History(
      self._token, self._settings, self._history_length, start
    )

  def cursor(self) -> Cursor:
    """Returns a cursor at the current state, which is kept as long as it."""
    return self._history.cursor()

  def is_at(self, cursor: Cursor) -> bool:
    """Whether it is at this cursor, and was not set to another state since."""
    history = self._history
    return cursor.history is history and cursor.batches == history.batches

  def has_made(self, cursor: Cursor) -> bool:
    """Whether the cursor refers to a state of this vocabulary."""
    return cursor.history.owner is self._token

  def acquire(self, source: object) -> None:
    """Lets one source alone grow the vocabulary, until it is freed or releases.

    Raises:
      UserError: another source has acquired it.
    """
    other = None if self._holder is None else self._holder()
    if other is not None and other is not source:
      raise UserError(
        'a vocabulary grows by one source at a time',
        got='a second one, while the first may read on',
        where='GrowingVocabulary',
        hint='close the trainer or the batches that read the first, or give'
        ' the second a vocabulary of its own',
      )
    self._holder = weakref.ref(source)

  def release(self, source: object) -> None:
    """Lets other sources grow the vocabulary, if `source` has acquired it."""
    if self._holder is not None and self._holder() is source:
      self._holder = None

  def copy(self, position: Position | None = None) -> 'GrowingVocabulary':
    """Returns a copy of the vocabulary, as it is now or was at a position."""
    state = self.cursor() if position is None else position
    return self._of(self._settings, state, self._history_length)

  @classmethod
  def _of(
    cls, settings: Mapping[str, Any], state: Position, history: int
  ) -> 'GrowingVocabulary':
    other = cls(
      settings['size'],
      admit_after=settings['admit_after'],
      candidates=settings['candidates'] or None,
      history=history,
    )
    other.set_state(state)
    return other

  def save(self, path: Path, batches: int | None = None) -> None:
    """Writes the state now, or after `batches`, to a file.

    Raises:
      UserError: it cannot be written, or is not within the history.
    """
    states.write(path, self.get_state(batches))

  @classmethod
  def load(cls, path: Path, history: int = 512) -> 'GrowingVocabulary':
    """Creates a vocabulary with the settings and the state of a saved one.

    Raises:
      UserError: the file does not exist, holds something else, or is damaged.
    """
    state = states.read(path)
    states.check(state, {'what': 'GrowingVocabulary'}, ())
    return cls._of(state, state, history)

  def _parts(
    self, ids: Mapping[str, Any], method: str
  ) -> tuple[dict[str, RawIds], Kind]:
    """Returns the ids of each feature, and the kind of the table's ids."""
    parts, kind = {}, self._history.kind
    for name, values in ids.items():
      where = f'GrowingVocabulary.{method}, {name}'
      parts[name] = as_kind(raw_ids(values, where), kind, where)
      kind = parts[name].kind or kind
    return parts, kind


def frozen_at(position: Position) -> Vocabulary:
  """Returns the result of `GrowingVocabulary.frozen` at a position.

  Raises:
    UserError: an invalid state.
  """
  if isinstance(position, Cursor):
    size, saved = position.history.settings['size'], position.snapshot
  else:
    names = ('size', 'admit_after', 'candidates')
    settings = {name: position.get(name) for name in names}
    saved = Snapshot.from_dict(
      position, {'what': 'GrowingVocabulary', **settings}
    )
    size = position['size']
  return Vocabulary(saved.known, size=size)
