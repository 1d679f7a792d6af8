"""A vocabulary that grows while training, and forgets what is not used."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxtyping import Int
import numpy as np

from slipstream_jax.data.interrupts import held
from slipstream_jax.errors import check_whole, UserError
from slipstream_jax.files import Path
from slipstream_jax.vocabulary import past, saved
from slipstream_jax.vocabulary.fit import Vocabulary
from slipstream_jax.vocabulary.known import EMPTY, find, ids_at, values_of
from slipstream_jax.vocabulary.line import Lease, Line, Mark, Place
from slipstream_jax.vocabulary.raw_ids import as_kind, Kind, raw_ids, RawIds


class Assigned(NamedTuple):
  """The rows of a batch."""

  rows: Int[np.ndarray, '...']
  """Row of each lookup, i32, shaped as the ids."""
  fresh: Int[np.ndarray, ' n']
  """Rows that belong to another id from this batch on, or to their first, i64,
  each once. Before the step, embedding and row state must be reset to those of
  a row that was never trained."""


class Joined(NamedTuple):
  """The rows of a batch in which several features use one table."""

  rows: dict[str, Int[np.ndarray, '...']]
  """Of each feature, as in `Assigned`."""
  fresh: Int[np.ndarray, ' n']
  """As in `Assigned`."""


class GrowingVocabulary:
  """Rows for the ids of one table, as training meets them.

  An id gets a row at its `admit_after`-th lookup, and keeps it from this lookup
  on. Where no row is left, the least recently used one is given to it: the one
  whose latest use lies most batches back, of several the lowest. A row that the
  batch itself uses is never taken: an id that finds no other gets none, and
  asks again at its next lookup. Row 0 stands for ids without a row, and for
  missing ones (None, null, NaN), which are not counted.

  Ids without a row wait, and their lookups are counted, in `candidates` places.
  Where these are full, the one whose latest lookup lies most batches back is
  forgotten, of several the lowest id; one that the batch itself looked up is
  not, and if there is no other, the new one is not counted. An id that lost its
  row starts anew.

  All of it is a function of the batches, taken one by one. Their source may be
  read ahead: `get_state(batches)` gives the state after any of the last
  `history` batches, and a vocabulary with that state goes on as this one did.
  One thread may ask for rows while another saves.

  Numbers are told apart exactly. Text is known by 64 bits of hash: of n texts,
  two have the same with a chance of n * n / 2**65, which is 1 in 4,000 for 100
  million, and then share a row.

  Attributes:
    size: R, rows of the table, row 0 among them.
    lease: which source grows it.

  Example:
    >>> words = GrowingVocabulary(3, admit_after=2)
    >>> words.rows(['a', 'b', 'a']).rows
    array([0, 0, 1], dtype=int32)
    >>> words.rows(['b', 'a'])
    Assigned(rows=array([2, 1], dtype=int32), fresh=array([2]))
    >>> state = words.get_state(batches=1)
    >>> words.set_state(state)
    >>> words.rows(['b', 'a'])
    Assigned(rows=array([2, 1], dtype=int32), fresh=array([2]))
  """

  def __init__(
    self,
    size: int,
    *,
    admit_after: int = 1,
    candidates: int | None = None,
    history: int = 512,
  ) -> None:
    """An empty vocabulary.

    Memory is 32 to 56 bytes a row, 40 to 64 a candidate, 8 for each unique id
    of each batch of the history, and the texts of the rows.

    Args:
      size: R, rows of the table, row 0 among them.
      admit_after: the lookup at which an id gets its row.
      candidates: most ids that wait for their row at a time; as many as there
        are rows, by default.
      history: batches whose states can be asked for: more than are read ahead
        of training.

    Raises:
      UserError: an argument out of range.
    """
    hint = 'give more than is read ahead'
    check_whole(history, 1, 'GrowingVocabulary, history', hint)
    self._settings = past.settings_of(size, admit_after, candidates)
    self.size, self._history, self._whose = size, history, object()
    self._line = Line(self._whose, self._settings, history)
    self.lease = Lease()

  @property
  def batches(self) -> int:
    """Batches taken so far: the position to save with what is trained."""
    return self._line.batches

  def rows(self, ids: Any) -> Assigned:
    """The rows of the next batch, which the vocabulary learns from.

    Args:
      ids: as `Vocabulary.rows` takes them.

    Raises:
      UserError: they are of another type than before; nothing has changed.
    """
    rows, fresh = self.rows_of({'ids': ids})
    return Assigned(rows['ids'], fresh)

  def rows_of(
    self, ids: Mapping[str, Any], after: Mark | None = None
  ) -> Joined:
    """The rows of the next batch, where several features use the table.

    Args:
      ids: of each feature, in an order that is always the same.
      after: where the vocabulary must be; None: wherever it is.

    Raises:
      UserError: they are of another type than before, or it is elsewhere;
        nothing has changed.
    """
    parts, kind = self._parts(ids, 'rows')
    bits = [part.bits for part in parts.values()]
    whole = bits[0] if len(bits) == 1 else np.concatenate([EMPTY.bits, *bits])
    line = self._line
    with line.lock, held():  # a batch is taken whole, or not at all
      if after is not None and not self.is_at(after):
        raise UserError(
          'while a source grows a vocabulary, nobody else may',
          got=f'{line.batches} batches, of which {after.batches} are its own',
          where='GrowingVocabulary',
          hint='look ids up with find or frozen, or close the source before',
        )
      rows, fresh = line.take(whole, kind, list(parts.values()))
    return Joined(_split(rows, parts), fresh)

  def find(self, ids: Any) -> Int[np.ndarray, '...']:
    """Rows of ids, i32, as they are now; nothing is learnt or counted.

    While batches are read ahead, `frozen` is what fits the trained rows.

    Raises:
      UserError: they are of another type than before.
    """
    parts, _ = self._parts({'ids': ids}, 'find')
    raw, line = parts['ids'], self._line
    with line.lock:
      rows, _ = find(line.state.rows.slots, raw.bits)
    return raw.spread(rows)

  def ids(self, rows: Any) -> np.ndarray:
    """Ids of rows now, as objects of their shape; None for rows without one.

    Raises:
      UserError: a row is none of the table's.
    """
    where, line = 'GrowingVocabulary.ids, rows', self._line
    with line.lock:
      bits = line.state.rows.ids[1 : line.state.rows.counts[0] + 1]
      known = values_of(EMPTY._replace(kind=line.kind, bits=bits))
      if line.kind == 'text':
        known = line.words[1 : len(bits) + 1]
      return ids_at(rows, known, 1, self.size, where)

  def frozen(self, batches: int | None = None) -> Vocabulary:
    """A vocabulary with the rows of today, or those after `batches`.

    For evaluation, and for serving the model: unknown ids get row 0.

    Raises:
      UserError: `batches` is not within the history.
    """
    return Vocabulary(self._then(batches).known, size=self.size)

  def get_state(self, batches: int | None = None) -> dict[str, Any]:
    """The state now or after `batches`: numbers, words and arrays.

    Args:
      batches: one of the last `history` numbers of batches.

    Raises:
      UserError: it is not within the history.
    """
    return past.state_of(self._then(batches), self._settings)

  def set_state(self, state: Place) -> None:
    """Goes on from a state that `get_state` told of, or from a mark.

    Raises:
      UserError: it is of other settings, or no such state; nothing has changed.
    """
    if isinstance(state, Mark) and self.is_at(state):
      return
    then = self._then_at(state)
    self._line = Line(self._whose, self._settings, self._history, then)

  def mark(self) -> Mark:
    """The place of now, which can be gone back to while somebody holds it."""
    return self._line.mark()

  def is_at(self, mark: Mark) -> bool:
    """Whether it is at this place, and was not set to another since."""
    return mark.line is self._line and mark.is_now

  def owns(self, mark: Mark) -> bool:
    """Whether the place is one that this vocabulary was at."""
    return mark.line.whose is self._whose

  def copy(self, place: Place | None = None) -> 'GrowingVocabulary':
    """Another one like it, as it is now or was at a place."""
    settings = {k: v for k, v in self._settings.items() if k != 'what'}
    settings['candidates'] = settings['candidates'] or None
    other = GrowingVocabulary(**settings, history=self._history)
    other.set_state(self.mark() if place is None else place)
    return other

  def save(self, path: Path, batches: int | None = None) -> None:
    """Writes the state now, or after `batches`, to a file.

    Raises:
      UserError: it cannot be written, or is not within the history.
    """
    saved.write(path, self.get_state(batches))

  @classmethod
  def load(cls, path: Path, history: int = 512) -> 'GrowingVocabulary':
    """A vocabulary with the settings and the state that `save` wrote.

    Raises:
      UserError: there is no such file, or it is another or damaged.
    """
    state = saved.read(path)
    saved.check(state, {'what': 'GrowingVocabulary'}, ())
    grown = cls(
      state['size'],
      admit_after=state['admit_after'],
      candidates=state['candidates'] or None,
      history=history,
    )
    grown.set_state(state)
    return grown

  def _then(self, batches: int | None) -> past.Then:
    line = self._line
    with line.lock:
      return line.at(batches)

  def _then_at(self, place: Place) -> past.Then:
    if isinstance(place, Mark) and place.line.settings == self._settings:
      return place.then
    state = place.get_state() if isinstance(place, Mark) else place
    return past.then_of(state, self._settings)

  def _parts(
    self, ids: Mapping[str, Any], method: str
  ) -> tuple[dict[str, RawIds], Kind]:
    """Ids of the features, and what those of the table are."""
    parts, kind = {}, self._line.kind
    for name, values in ids.items():
      where = f'GrowingVocabulary.{method}, {name}'
      parts[name] = as_kind(raw_ids(values, where), kind, where)
      kind = parts[name].kind or kind
    return parts, kind


def _split(
  rows: Int[np.ndarray, ' n'], parts: Mapping[str, RawIds]
) -> dict[str, Int[np.ndarray, '...']]:
  """Rows of each feature, of rows of them end to end."""
  split, start = {}, 0
  for name, part in parts.items():
    end = start + len(part.bits)
    split[name], start = part.spread(rows[start:end]), end
  return split
