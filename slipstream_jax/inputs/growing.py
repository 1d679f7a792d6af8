"""Raw ids that get their rows batch by batch, by vocabularies that grow."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxtyping import Int
import numpy as np

from slipstream_jax.columns.ids import raw_ids, RawIds
from slipstream_jax.data.interrupts import held
from slipstream_jax.data.source import BatchSource
from slipstream_jax.errors import UserError
from slipstream_jax.inputs.slots import Slot, slots
from slipstream_jax.tables import TableSet
from slipstream_jax.types import Batch
from slipstream_jax.vocabulary.growing import GrowingVocabulary
from slipstream_jax.vocabulary.history import Cursor, Position

Replace = Callable[[str, GrowingVocabulary], Any]
"""Maps a table and its growing vocabulary to the one to use in its place."""

_STATE = 'vocabularies'  # where positions hold them, by table


class RawColumn(NamedTuple):
  """Raw ids of a feature: those of all its lookups, end to end."""

  ids: RawIds
  places: Int[np.ndarray, ' m'] | None
  """Of each lookup its id among those that are not missing; None: none is."""

  def take(self, lookups: Int[np.ndarray, '...']) -> RawIds:
    """The raw ids of some lookups, by their places in the column."""
    ids, chosen, present, shape = self.ids, lookups, None, lookups.shape
    if self.places is not None:
      assert ids.present is not None
      present = ids.present[lookups.reshape(-1)]
      chosen = self.places[lookups.reshape(-1)][present]
    chosen = chosen.reshape(-1)
    words = None if ids.words is None else ids.words.gather(chosen)
    return RawIds(ids.kind, ids.bits[chosen], present, shape, None, words)


def raw_column(values: np.ndarray, where: str) -> RawColumn:
  """The raw ids that an array of any shape holds.

  Raises:
    UserError: they are neither integers nor text.
  """
  ids = raw_ids(values.reshape(-1), where)._replace(text=None)
  if ids.present is None:
    return RawColumn(ids, None)
  return RawColumn(ids, np.cumsum(ids.present) - 1)


def growing_of(
  words: Mapping[str, Any], tables: TableSet, where: str
) -> dict[str, GrowingVocabulary]:
  """By table, the vocabularies that grow.

  Args:
    words: by feature, what knows its ids, where it has such.
    tables: of the features.
    where: the source.

  Raises:
    UserError: a table, or a vocabulary, that has more than one of the other,
      or a table that is too small.
  """
  growing: dict[str, GrowingVocabulary] = {}
  for slot in slots(tables):
    own = words.get(slot.name)
    for name, feature in tables.features.items():
      other = words.get(name)
      grows = isinstance(own, GrowingVocabulary) or isinstance(
        other, GrowingVocabulary
      )
      if feature.table != slot.table or other is own or not grows:
        continue
      raise UserError(
        'features that share a table share its one growing vocabulary',
        got=f'another one, or none, for feature {name!r}',
        where=f'{where}, vocabularies, {slot.table!r}',
        hint='give it by the name of the table',
      )
    if not isinstance(own, GrowingVocabulary):
      continue
    if own.size > slot.size:
      raise UserError(
        f'table {slot.table!r} must have a row for each of its vocabulary',
        got=f'{slot.size} for {own.size}',
        where=f'{where}, vocabularies, {slot.table!r}',
        hint='give both the same size',
      )
    if any(own is v for t, v in growing.items() if t != slot.table):
      raise UserError(
        'a growing vocabulary must be of one table',
        got=f'another one, and {slot.table!r}',
        where=f'{where}, vocabularies',
        hint='give each table its own, or let the features share a table',
      )
    growing[slot.table] = own
  return growing


class Growth:
  """The vocabularies that the batches of one source grow, if any do."""

  def __init__(
    self, growing: Mapping[str, GrowingVocabulary], tables: TableSet
  ) -> None:
    """Changes nothing yet.

    Args:
      growing: from `growing_of`.
      tables: see there.
    """
    self._growing = growing
    self._slots: dict[str, list[Slot]] = {table: [] for table in growing}
    for slot in slots(tables):
      if slot.table in growing:
        self._slots[slot.table].append(slot)
    # Where this source has brought them; None: it has not begun.
    self._cursors: dict[str, Cursor] | None = None

  def set_vocabularies(
    self, trained: Mapping[str, Position]
  ) -> dict[str, Cursor]:
    """Takes the vocabularies over, to go on from where training is.

    Args:
      trained: by table, its vocabulary as trained, where there is one.

    Returns:
      By table, a mark of its vocabulary.

    Raises:
      UserError: another source grows one, or what was trained is of another;
        nothing has changed.
    """
    for table, vocabulary in self._growing.items():
      place = trained.get(table)
      other = isinstance(place, Cursor) and not vocabulary.has_made(place)
      if other and vocabulary.batches:
        raise UserError(
          'a table goes on with the vocabulary that it was trained with',
          got='another one, which knows ids already',
          where=f'vocabularies, {table!r}',
          hint='give that or a new one, or make another trainer',
        )
    known = {t: trained[t] for t in self._growing if t in trained}
    self._go_to(known)
    assert self._cursors is not None
    return self._cursors

  def _go_to(self, places: Mapping[str, Position]) -> None:
    """Sets vocabularies to places, all or none of them."""
    try:
      for vocabulary in self._growing.values():
        vocabulary.acquire(self)
    except BaseException:
      self.close()
      raise
    with held():
      before = {t: self._growing[t].cursor() for t in places}
      try:
        for table, place in places.items():
          self._growing[table].set_state(place)
      except BaseException:
        for table, cursor in before.items():
          self._growing[table].set_state(cursor)
        raise
      self._cursors = {t: v.cursor() for t, v in self._growing.items()}

  def grow(self, batch: Batch, raw: Mapping[str, RawColumn]) -> Batch:
    """The batch in global rows, with the rows that got another id.

    Args:
      batch: its lookups of features whose vocabulary grows are places in their
        columns, and are written.
      raw: the columns of these features.

    Raises:
      UserError: ids of another type than before, or somebody else has grown a
        vocabulary; nothing has changed.
    """
    if not self._growing:
      return batch
    if self._cursors is None:
      self.set_vocabularies({})
    assert self._cursors is not None
    lookups = batch.lookups.reshape(len(batch.weights), -1)
    fresh = []
    try:
      for table, vocabulary in self._growing.items():
        columns = self._slots[table]
        first, ids, real = columns[0].first, {}, {}
        for slot in columns:
          view = lookups[:, slot.column : slot.column + slot.length]
          there = view >= 0
          # Of a whole column all, which is quicker to take and to give.
          real[slot.name] = ... if there.all() else there
          ids[slot.name] = raw[slot.name].take(view[real[slot.name]])
        rows, new = vocabulary.assign_features(ids, self._cursors[table])
        for slot in columns:
          view = lookups[:, slot.column : slot.column + slot.length]
          own = np.add(rows[slot.name], first, dtype=view.dtype)
          view[real[slot.name]] = own
        fresh.append(new + first)
    except BaseException:
      self._go_to(self._cursors)  # some have taken the batch, others not
      raise
    self._cursors = {t: v.cursor() for t, v in self._growing.items()}
    return batch._replace(fresh=np.concatenate(fresh))

  def get_state(self) -> dict[str, Any]:
    """What a position says of them: by table, where they are."""
    if not self._growing:
      return {}
    cursors = self._cursors
    return {
      _STATE: cursors or {t: v.cursor() for t, v in self._growing.items()}
    }

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Takes them over, to go on from a position.

    Raises:
      UserError: it is of other vocabularies, or another source grows one;
        nothing has changed.
    """
    places = state.get(_STATE, {})
    if places.keys() != self._growing.keys():
      raise UserError(
        'a position must hold the growing vocabularies of its tables:'
        f' {", ".join(self._growing) or "none"}',
        got=', '.join(places) or 'none',
        where='set_state, state',
        hint='give the vocabularies that the run was started with',
      )
    if places:
      self._go_to(places)

  def close(self) -> None:
    """Lets other sources grow them."""
    self._cursors = None
    for vocabulary in self._growing.values():
      vocabulary.release(self)


class Growing(BatchSource):
  """A source of batches that may grow vocabularies: a base."""

  def __init__(self, growth: Growth) -> None:
    """Takes over `growth`, of the batches that are read."""
    self._growth = growth

  def set_vocabularies(
    self, trained: Mapping[str, Position]
  ) -> dict[str, Cursor]:
    """As `BatchSource.set_vocabularies`."""
    return self._growth.set_vocabularies(trained)
