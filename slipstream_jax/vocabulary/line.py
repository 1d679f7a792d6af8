"""A growing vocabulary batch by batch, and its states after earlier batches.

A `History` begins when a vocabulary is created or set to a state, and ends when
it is set to another. A `Mark` is a cheap reference to a state in it. While a
mark is referenced, the history keeps the changes that lead back to its state.
"""

import collections
from collections.abc import Mapping
import itertools
import threading
from typing import Any
import weakref

from jaxtyping import Int
import numpy as np
import polars as pl

from slipstream_jax.columns.ids import Kind, RawIds
from slipstream_jax.errors import is_whole, UserError
from slipstream_jax.vocabulary import growth, past
from slipstream_jax.vocabulary.fit import Vocabulary
from slipstream_jax.vocabulary.growth import Change
from slipstream_jax.vocabulary.past import PastState


class History:
  """The states of a vocabulary. The newest one is stored, others are derived.

  Attributes:
    batches: number of batches taken so far.
    kind: kind of the ids.
    state: ids that have a row, and ids that wait.
    words: texts of all rows, empty if ids are integers.
    lock: held while a batch is taken, and while a state is read.
    owner: a token that all histories of one vocabulary share.
  """

  def __init__(
    self,
    owner: object,
    settings: Mapping[str, Any],
    length: int,
    saved: PastState | None = None,
  ) -> None:
    """Begins with a state, or empty. Earlier states are unknown.

    Args:
      owner: see above.
      settings: from `settings_of`.
      length: number of batches whose changes are kept even without a mark.
      saved: a state with these settings.

    Raises:
      UserError: `saved` is not a valid state.
    """
    self.owner, self.settings, self._length = owner, settings, length
    size, waiting = settings['size'], settings['candidates']
    if saved is None:
      self.state = growth.new_state(size - 1, waiting)
    else:
      state = growth.restore(saved.snapshot, size - 1, waiting)
      if state is None:
        past.raise_damaged()
      self.state = state
    self.kind: Kind = '' if saved is None else saved.kind
    self.batches = 0 if saved is None else saved.batches
    self.lock = threading.RLock()
    self.words = np.full(size if self.kind == 'text' else 0, None, object)
    if saved is not None:
      self.words[1 : len(saved.words) + 1] = saved.words
    self._changes: collections.deque[tuple[Change, list[str | None]]]
    self._changes = collections.deque()
    self._marks = weakref.WeakValueDictionary[int, Mark]()

  @property
  def first(self) -> int:
    """The earliest number of batches whose state is still known."""
    return self.batches - len(self._changes)

  def take(
    self, ids: Int[np.ndarray, ' n'], kind: Kind, parts: list[RawIds]
  ) -> tuple[Int[np.ndarray, ' n'], Int[np.ndarray, ' f']]:
    """Takes a batch. Returns its rows, i32, and the fresh ones among them, i64.

    Args:
      ids: ids of all features, end to end.
      kind: their kind.
      parts: ids of each feature.
    """
    if kind == 'text' and not len(self.words):
      self.words = np.full(self.settings['size'], None, object)
    now, unsigned = self.batches + 1, kind != 'int64'
    rows, missed, used = growth.use(self.state, ids, now)
    enough = self.settings['admit_after']
    grown = growth.admit(self.state, ids, missed, rows, now, enough, unsigned)
    fresh, places = grown.fresh[:, 0].copy(), grown.fresh[:, 1]
    before: list[str | None] = []
    if kind == 'text' and len(fresh):
      words = [part.words for part in parts if part.words is not None]
      before = self.words[fresh].tolist()
      self.words[fresh] = pl.concat(words).gather(places).to_list()
    change = Change(used, grown.fresh[:, [0, 2, 3]], grown.waited.copy())
    self._changes.append((change, before))
    self.batches, self.kind = now, kind
    self._forget()
    return rows, fresh

  def _forget(self) -> None:
    """Drops changes older than `length` batches and older than all marks."""
    if len(self._changes) <= self._length:
      return
    # Copied to a list, because marks may be freed at any time.
    needed = min([self.batches - self._length, *self._marks.keys()])
    while self.first < needed:
      self._changes.popleft()

  def at(self, batches: int | None) -> PastState:
    """Returns the state after `batches`, or the current one for None.

    Raises:
      UserError: that state is not known.
    """
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
    snapshot = growth.snapshot(self.state, [change for change, _ in undone])
    words = self.words.copy()
    if len(words):
      for change, before in reversed(undone):
        words[change.fresh[:, 0]] = before
    own = words[1 : len(snapshot.ids) + 1].tolist()
    return PastState(self.kind, int(at), snapshot, own)

  def mark(self) -> 'Mark':
    """Returns a mark of the current state, the same until the next batch."""
    with self.lock:
      mark = self._marks.get(self.batches)
      if mark is None:
        self._marks[self.batches] = mark = Mark(self)
      return mark


class Mark:
  """A reference to a vocabulary's state after some batch, computed lazily.

  Attributes:
    history: the vocabulary's history.
    batches: number of batches taken.
  """

  def __init__(self, history: History) -> None:
    """Marks the newest state of a history."""
    self.history, self.batches = history, history.batches

  @property
  def past_state(self) -> PastState:
    """The state at this mark."""
    with self.history.lock:
      return self.history.at(self.batches)

  @property
  def is_now(self) -> bool:
    """Whether no batch was taken since."""
    return self.batches == self.history.batches

  def get_state(self) -> dict[str, Any]:
    """Returns the result of `GrowingVocabulary.get_state` at this mark."""
    return past.to_dict(self.past_state, self.history.settings)


Place = Mark | Mapping[str, Any]
"""A state of a vocabulary: a mark, or the result of `get_state`."""


def frozen_at(place: Place) -> Vocabulary:
  """Returns the result of `GrowingVocabulary.frozen` at a place.

  Raises:
    UserError: an invalid state.
  """
  if isinstance(place, Mark):
    return Vocabulary(
      place.past_state.known, size=place.history.settings['size']
    )
  names = ('size', 'admit_after', 'candidates')
  settings = {name: place.get(name) for name in names}
  saved = past.from_dict(place, {'what': 'GrowingVocabulary', **settings})
  return Vocabulary(saved.known, size=place['size'])


class Lease:
  """The right to grow a vocabulary, held by one source at a time."""

  def __init__(self) -> None:
    """Creates a lease without a holder."""
    self._holder: weakref.ref[object] | None = None

  def take(self, holder: object) -> None:
    """Gives the lease to `holder`, until it is freed or returns the lease.

    Raises:
      UserError: another holder has it.
    """
    other = None if self._holder is None else self._holder()
    if other is not None and other is not holder:
      raise UserError(
        'a vocabulary grows by one source at a time',
        got='a second one, while the first may read on',
        where='GrowingVocabulary',
        hint='close the trainer or the batches that read the first, or give'
        ' the second a vocabulary of its own',
      )
    self._holder = weakref.ref(holder)

  def give_back(self, holder: object) -> None:
    """Ends the lease if `holder` has it."""
    if self._holder is not None and self._holder() is holder:
      self._holder = None
