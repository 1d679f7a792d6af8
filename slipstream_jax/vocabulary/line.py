"""A growing vocabulary batch by batch, and what it was before them.

A `Line` begins where a vocabulary is made or set to a state, and goes on until
it is set to another. A `Mark` is a place on it, at the price of two words: as
long as somebody holds it, the line keeps what leads back there.
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

from slipstream_jax.errors import is_whole, UserError
from slipstream_jax.vocabulary import growth, past
from slipstream_jax.vocabulary.fit import Vocabulary
from slipstream_jax.vocabulary.growth import Change
from slipstream_jax.vocabulary.past import Then
from slipstream_jax.vocabulary.raw_ids import Kind, RawIds


class Line:
  """The states of a vocabulary; the newest of them is at hand.

  Attributes:
    batches: taken so far.
    kind: of the ids.
    state: ids that have a row, and ids that wait.
    words: texts of all rows; none where ids are numbers.
    lock: held while a batch is taken, and while a state is read.
    whose: the vocabulary, by something that only its lines have.
  """

  def __init__(
    self,
    whose: object,
    settings: Mapping[str, Any],
    history: int,
    then: Then | None = None,
  ) -> None:
    """Begins with `then`, or empty; nothing is known of what was before.

    Args:
      whose: see above.
      settings: from `settings_of`.
      history: batches whose changes are kept though nobody marked them.
      then: a state of such settings.

    Raises:
      UserError: `then` cannot be a state.
    """
    self.whose, self.settings, self._history = whose, settings, history
    size, waiting = settings['size'], settings['candidates']
    if then is None:
      self.state = growth.new_state(size - 1, waiting)
    else:
      state = growth.state_of(then.snapshot, size - 1, waiting)
      if state is None:
        past.refuse()
      self.state = state
    self.kind: Kind = '' if then is None else then.kind
    self.batches = 0 if then is None else then.batches
    self.lock = threading.RLock()
    self.words = np.full(size if self.kind == 'text' else 0, None, object)
    if then is not None:
      self.words[1 : len(then.words) + 1] = then.words
    self._changes: collections.deque[tuple[Change, list[str | None]]]
    self._changes = collections.deque()
    self._marks = weakref.WeakValueDictionary[int, Mark]()

  @property
  def first(self) -> int:
    """The fewest batches after which the state is still known."""
    return self.batches - len(self._changes)

  def take(
    self, ids: Int[np.ndarray, ' n'], kind: Kind, parts: list[RawIds]
  ) -> tuple[Int[np.ndarray, ' n'], Int[np.ndarray, ' f']]:
    """Rows of the next batch, i32, and the fresh ones among them, i64.

    Args:
      ids: of all features, end to end.
      kind: of them.
      parts: the features.
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
    """Drops changes that are older than the history, and than any mark."""
    if len(self._changes) <= self._history:
      return
    # Listed, as marks go whenever their last holder does.
    needed = min([self.batches - self._history, *self._marks.keys()])
    while self.first < needed:
      self._changes.popleft()

  def at(self, batches: int | None) -> Then:
    """What was after `batches`; None stands for now.

    Raises:
      UserError: that is not known.
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
    return Then(self.kind, int(at), snapshot, own)

  def mark(self) -> 'Mark':
    """The place of now; the same one until a batch is taken."""
    with self.lock:
      mark = self._marks.get(self.batches)
      if mark is None:
        self._marks[self.batches] = mark = Mark(self)
      return mark


class Mark:
  """A vocabulary after some batch, which is told only when it is asked for.

  Attributes:
    line: of the vocabulary.
    batches: how many it had taken.
  """

  def __init__(self, line: Line) -> None:
    """The newest place of the line."""
    self.line, self.batches = line, line.batches

  @property
  def then(self) -> Then:
    """The vocabulary at this place."""
    with self.line.lock:
      return self.line.at(self.batches)

  @property
  def is_now(self) -> bool:
    """Whether no batch was taken since."""
    return self.batches == self.line.batches

  def get_state(self) -> dict[str, Any]:
    """As `GrowingVocabulary.get_state`, of then."""
    return past.state_of(self.then, self.line.settings)


Place = Mark | Mapping[str, Any]
"""Where a vocabulary was: by a mark, or by what `get_state` returned."""


def frozen_at(place: Place) -> Vocabulary:
  """What `GrowingVocabulary.frozen` gives, of such a place.

  Raises:
    UserError: a state that cannot be one.
  """
  if isinstance(place, Mark):
    return Vocabulary(place.then.known, size=place.line.settings['size'])
  names = ('size', 'admit_after', 'candidates')
  settings = {name: place.get(name) for name in names}
  then = past.then_of(place, {'what': 'GrowingVocabulary', **settings})
  return Vocabulary(then.known, size=place['size'])


class Lease:
  """Who grows a vocabulary: one source at a time."""

  def __init__(self) -> None:
    """Nobody so far."""
    self._holder: weakref.ref[object] | None = None

  def take(self, holder: object) -> None:
    """Gives it to `holder`, who has it until it is freed or gives it back.

    Raises:
      UserError: somebody else has it.
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
    """Lets others have it, if it is the holder's."""
    if self._holder is not None and self._holder() is holder:
      self._holder = None
