"""A vocabulary that grows while training, and forgets what is not used."""

from collections.abc import Mapping
import threading
from typing import Any, NamedTuple

from jaxtyping import Int
import numpy as np
import polars as pl

from slipstream_jax.data.interrupts import held
from slipstream_jax.errors import check_whole
from slipstream_jax.files import Path
from slipstream_jax.vocabulary import growth, past, saved
from slipstream_jax.vocabulary.fit import Vocabulary
from slipstream_jax.vocabulary.growth import Change
from slipstream_jax.vocabulary.known import EMPTY, find, ids_at, values_of
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
    self.size, self._enough, self._history = size, admit_after, history
    self._lock = threading.RLock()
    waiting = self._settings['candidates']
    self._reset(growth.new_state(size - 1, waiting), '', 0)

  @property
  def batches(self) -> int:
    """Batches taken so far: the position to save with what is trained."""
    return self._past.batches

  def rows(self, ids: Any) -> Assigned:
    """The rows of the next batch, which the vocabulary learns from.

    Args:
      ids: as `Vocabulary.rows` takes them.

    Raises:
      UserError: they are of another type than before; nothing has changed.
    """
    rows, fresh = self.rows_of({'ids': ids})
    return Assigned(rows['ids'], fresh)

  def rows_of(self, ids: Mapping[str, Any]) -> Joined:
    """The rows of the next batch, where several features use the table.

    Args:
      ids: of each feature, in an order that is always the same.

    Raises:
      UserError: they are of another type than before; nothing has changed.
    """
    parts, kind = self._parts(ids, 'rows')
    bits = [part.bits for part in parts.values()]
    whole = bits[0] if len(bits) == 1 else np.concatenate([EMPTY.bits, *bits])
    with self._lock, held():  # a batch is taken whole, or not at all
      rows, fresh = self._take(whole, kind, list(parts.values()))
    return Joined(_split(rows, parts), fresh)

  def find(self, ids: Any) -> Int[np.ndarray, '...']:
    """Rows of ids, i32, as they are now; nothing is learnt or counted.

    While batches are read ahead, `frozen` is what fits the trained rows.

    Raises:
      UserError: they are of another type than before.
    """
    parts, _ = self._parts({'ids': ids}, 'find')
    raw = parts['ids']
    with self._lock:
      rows, _ = find(self._state.rows.slots, raw.bits)
    return raw.spread(rows)

  def ids(self, rows: Any) -> np.ndarray:
    """Ids of rows now, as objects of their shape; None for rows without one.

    Raises:
      UserError: a row is none of the table's.
    """
    where = 'GrowingVocabulary.ids, rows'
    with self._lock:
      bits = self._state.rows.ids[1 : self._state.rows.counts[0] + 1]
      known = values_of(EMPTY._replace(kind=self._kind, bits=bits))
      if self._kind == 'text':
        known = self._words[1 : len(bits) + 1]
      return ids_at(rows, known, 1, self.size, where)

  def frozen(self, batches: int | None = None) -> Vocabulary:
    """A vocabulary with the rows of today, or those after `batches`.

    For evaluation, and for serving the model: unknown ids get row 0.

    Raises:
      UserError: `batches` is not within the history.
    """
    with self._lock:
      known = self._then(batches).known
    return Vocabulary(known, size=self.size)

  def get_state(self, batches: int | None = None) -> dict[str, Any]:
    """The state now or after `batches`: numbers, words and arrays.

    Args:
      batches: one of the last `history` numbers of batches.

    Raises:
      UserError: it is not within the history.
    """
    with self._lock:
      then = self._then(batches)
    return past.state_of(then, self._settings)

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Goes on from a state that `get_state` told of.

    Raises:
      UserError: it is of other settings, or no such state; nothing has changed.
    """
    then = past.then_of(state, self._settings)
    places = self.size - 1, self._settings['candidates']
    new = growth.state_of(then.snapshot, *places)
    if new is None:
      past.refuse()
    with self._lock, held():
      self._reset(new, then.kind, then.batches)
      self._words[1 : len(then.words) + 1] = then.words

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

  def _reset(self, state: growth.State, kind: Kind, batches: int) -> None:
    self._state, self._kind = state, kind
    self._past = past.Past(batches, self._history)
    self._words = np.full(self.size if kind == 'text' else 0, None, object)

  def _then(self, batches: int | None) -> past.Then:
    return self._past.at(self._state, self._words, self._kind, batches)

  def _parts(
    self, ids: Mapping[str, Any], method: str
  ) -> tuple[dict[str, RawIds], Kind]:
    """Ids of the features, and what those of the table are."""
    parts, kind = {}, self._kind
    for name, values in ids.items():
      where = f'GrowingVocabulary.{method}, {name}'
      parts[name] = as_kind(raw_ids(values, where), kind, where)
      kind = parts[name].kind or kind
    return parts, kind

  def _take(
    self, ids: np.ndarray, kind: Kind, parts: list[RawIds]
  ) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a batch, and the fresh ones among them."""
    if kind == 'text' and not len(self._words):
      self._words = np.full(self.size, None, object)
    now, unsigned = self.batches + 1, kind != 'int64'
    rows, missed, used = growth.use(self._state, ids, now)
    growth_of = growth.admit(
      self._state, ids, missed, rows, now, self._enough, unsigned
    )
    fresh, places = growth_of.fresh[:, 0].copy(), growth_of.fresh[:, 1]
    before: list[str | None] = []
    if kind == 'text' and len(fresh):
      words = [part.words for part in parts if part.words is not None]
      before = self._words[fresh].tolist()
      self._words[fresh] = pl.concat(words).gather(places).to_list()
    change = Change(
      used, growth_of.fresh[:, [0, 2, 3]], growth_of.waited.copy()
    )
    self._past.add(change, before)
    self._kind = kind
    return rows, fresh


def _split(
  rows: Int[np.ndarray, ' n'], parts: Mapping[str, RawIds]
) -> dict[str, Int[np.ndarray, '...']]:
  """Rows of each feature, of rows of them end to end."""
  ends = np.cumsum([len(part.bits) for part in parts.values()])[:-1]
  pieces = np.split(rows, ends)
  return {
    name: part.spread(piece)
    for (name, part), piece in zip(parts.items(), pieces, strict=True)
  }
