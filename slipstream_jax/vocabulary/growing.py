"""A vocabulary that grows during training, and forgets unused ids."""

from collections.abc import Mapping
from typing import Any, NamedTuple
import weakref

from jaxtyping import Int
import numpy as np

from slipstream_jax.columns.ids import as_kind, Kind, raw_ids, RawIds
from slipstream_jax.data.interrupts import held
from slipstream_jax.errors import check_whole, UserError
from slipstream_jax.files import Path
from slipstream_jax.hashing import find
from slipstream_jax.vocabulary import state as states
from slipstream_jax.vocabulary.counted import Vocabulary
from slipstream_jax.vocabulary.history import (
  Cursor,
  History,
  Position,
  settings_of,
  Snapshot,
)


class Assigned(NamedTuple):
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
    Assigned(rows=array([2, 1], dtype=int32), fresh=array([2]))
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
    self._settings = settings_of(size, admit_after, candidates)
    self.size, self._history_length, self._token = size, history, object()
    self._history = History(self._token, self._settings, history)
    self._holder: weakref.ref[object] | None = None

  @property
  def batches(self) -> int:
    """Batches taken so far: the position to save with the trained state."""
    return self._history.batches

  def assign(self, ids: Any) -> Assigned:
    """Returns the rows of the next batch, and learns from its ids.

    Args:
      ids: as in `Vocabulary.rows`.

    Raises:
      UserError: the ids have another type than before. Nothing has changed.
    """
    rows, fresh = self.assign_features({'ids': ids})
    return Assigned(rows['ids'], fresh)

  def assign_features(
    self, ids: Mapping[str, Any], after: Cursor | None = None
  ) -> Assigned:
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
    return Assigned(by_feature, fresh)

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
