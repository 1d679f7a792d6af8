"""A growing vocabulary batch by batch, and its states after earlier batches.

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

from slipstream_jax.columns.ids import Kind, raw_ids, RawIds, text_of
from slipstream_jax.errors import check_whole, is_whole, UserError
from slipstream_jax.vocabulary import growth
from slipstream_jax.vocabulary import state as states
from slipstream_jax.vocabulary.counted import Vocabulary
from slipstream_jax.vocabulary.growth import Change, Entries

_MOST = (1 << 31) - 1  # batches and rows are numbered in i32


def settings_of(
  size: int, admit_after: int, candidates: int | None
) -> dict[str, Any]:
  """Returns the settings with which a state must agree.

  Raises:
    UserError: an argument of `GrowingVocabulary` is out of range.
  """
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
    settings: from `settings_of`.
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
    saved: Snapshot | None = None,
  ) -> None:
    """Begins with a state, or empty. Earlier states are unknown.

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
    if saved is None:
      self.state = growth.new_state(size - 1, waiting)
    else:
      state = growth.restore(saved.entries, size - 1, waiting)
      if state is None:
        raise _damaged()
      self.state = state
    self.kind: Kind = '' if saved is None else saved.kind
    self.batches = 0 if saved is None else saved.batches
    self.lock = threading.RLock()
    self.words = np.full(size if self.kind == 'text' else 0, None, object)
    if saved is not None:
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
  """A reference to the newest state of a history, computed lazily."""

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
