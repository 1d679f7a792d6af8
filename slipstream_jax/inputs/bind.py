"""Binds columns of ids to tables: ids become global rows."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, no_type_check

from jaxtyping import Float, Int
import numpy as np
import polars as pl

from slipstream_jax.columns.ids import as_kind, raw_ids, RawIds
from slipstream_jax.columns.lists import fitted, ListRules, pad_lists
from slipstream_jax.columns.read import (
  as_objects,
  is_missing,
  Lists,
  Place,
  place_in,
)
from slipstream_jax.data.interrupts import held
from slipstream_jax.data.numbered import Column
from slipstream_jax.errors import is_whole, UserError
from slipstream_jax.hashing import kernel
from slipstream_jax.initializers import VectorsById
from slipstream_jax.inputs.fields import check_known, Numbers
from slipstream_jax.tables import Feature, row_dtype, TableSet
from slipstream_jax.types import Batch, Lookups
from slipstream_jax.vocabulary.counted import Vocabulary
from slipstream_jax.vocabulary.growing import Cursor, GrowingVocabulary
from slipstream_jax.vocabulary.growing import Position as VocabularyState

Replace = Callable[[str, GrowingVocabulary], Any]
"""Maps a table and its growing vocabulary to the one to use in its place."""

_STATE = 'vocabularies'  # the key of positions that holds them, by table


class IdRules(NamedTuple):
  """Settings that say how ids are read."""

  vocabularies: Mapping[str, Any]
  """By feature or by table: objects with a method `rows`, from raw ids to local
  ids of their shape."""
  lists: ListRules


class Slot(NamedTuple):
  """Place of a feature's ids in the global row space."""

  name: str
  feature: Feature
  size: int
  """Ids that the table has rows for."""
  first: int
  """The table's first global row."""
  unknown: int
  """Global row of all other ids, or -1 if they are errors."""
  column: int
  """First column of this feature in the lookups [B, K]."""
  dtype: np.dtype
  """Type of global rows."""


def slots(tables: TableSet) -> list[Slot]:
  """Returns the slots of all features, in their order."""
  dtype = np.dtype(row_dtype(tables.num_rows))
  result = []
  for name, feature in tables.features.items():
    table = tables.tables[feature.table]
    first, size = tables.first_rows[feature.table], table.vocabulary_size
    unknown = first + size if table.unknown == 'row' else -1
    column = tables.columns[name].start
    result.append(Slot(name, feature, size, first, unknown, column, dtype))
  return result


def _slots_by_table(tables: TableSet) -> dict[str, list[Slot]]:
  result: dict[str, list[Slot]] = {}
  for slot in slots(tables):
    result.setdefault(slot.feature.table, []).append(slot)
  return result


class RawColumn(NamedTuple):
  """Raw ids of all lookups of a feature, end to end."""

  ids: RawIds
  places: Int[np.ndarray, ' m'] | None
  """Place of each lookup's id among those that are not missing. None: none is
  missing."""

  def take(self, lookups: Int[np.ndarray, '...']) -> RawIds:
    """Returns the raw ids of some lookups, by their places in the column."""
    ids, chosen, present, shape = self.ids, lookups, None, lookups.shape
    if self.places is not None:
      assert ids.present is not None
      present = ids.present[lookups.reshape(-1)]
      chosen = self.places[lookups.reshape(-1)][present]
    chosen = chosen.reshape(-1)
    words = None if ids.words is None else ids.words.gather(chosen)
    return RawIds(ids.kind, ids.bits[chosen], present, shape, words)


class Examples(NamedTuple):
  """Examples in global rows, whose ids were all checked."""

  numbers: Numbers
  matrix: Int[np.ndarray, 'n k']
  """Global rows of the features with lists of one length, side by side. Raw ids
  of growing vocabularies have their places in `raw` instead."""
  columns: Int[np.ndarray, ' k']
  """Columns of the matrix in the lookups [B, K]."""
  ragged: tuple[tuple[Slot, Lists], ...]
  """The other features, with global rows or places as values."""
  lookup_weights: Float[np.ndarray, 'n k'] | None
  """Weights of the matrix, f32. None if none of its features is weighted."""
  size: int
  """n."""
  tables: TableSet
  last: bool
  """Whether the last lookups of long lists are used, not the first."""
  raw: Mapping[str, RawColumn]
  """Raw ids by feature, for features whose vocabulary grows."""

  def arrays(self) -> Iterator[Column]:
    """Yields all arrays that a checksum of the examples is made of."""
    dense, labels, weights, _ = self.numbers
    arrays: list[Any] = [dense, self.matrix, labels, weights]
    arrays.append(self.lookup_weights)
    for _, (values, splits, own) in self.ragged:
      arrays += [values, splits, None if own is None else own.values]
    for column in self.raw.values():
      arrays += [column.ids.bits, column.places]
    return (array for array in arrays if array is not None and array.size)

  def take(self, index: Int[np.ndarray, ' m']) -> Batch:
    """Returns the examples at `index`, which must be in range, as a batch."""
    dense, labels, weights, _ = self.numbers
    lookups = self._lookups(index)
    lookup_weights = None
    if self.tables.is_weighted:
      lookup_weights = self._weights(index, lookups)
    ones = np.ones(len(index), np.float32)
    empty = np.empty((len(index), 0), np.float32)
    shape = (len(index), *self.tables.example_shape)
    return Batch(
      empty if dense is None else dense.take(index, axis=0),
      lookups.reshape(shape),
      None if labels is None else labels.take(index, axis=0),
      ones if weights is None else weights.take(index),
      None if lookup_weights is None else lookup_weights.reshape(shape),
    )

  def _lookups(self, index: Int[np.ndarray, ' m']) -> Lookups:
    if len(self.columns) == self.tables.num_columns:
      return self.matrix.take(index, axis=0)
    shape = (len(index), self.tables.num_columns)
    lookups = np.full(shape, -1, self.matrix.dtype)
    self._write(self.matrix, self.ragged, index, lookups)
    return lookups

  def _weights(
    self, index: Int[np.ndarray, ' m'], lookups: Lookups
  ) -> Float[np.ndarray, 'm K']:
    weights = np.ones(lookups.shape, np.float32)
    ragged = [
      (slot, own.weights)
      for slot, own in self.ragged
      if own.weights is not None
    ]
    self._write(self.lookup_weights, ragged, index, weights)
    weights[lookups < 0] = 0  # so that batches do not depend on the form
    return weights

  def _write(
    self,
    matrix: np.ndarray | None,
    ragged: Iterable[tuple[Slot, Lists]],
    index: Int[np.ndarray, ' m'],
    out: np.ndarray,
  ) -> None:
    """Writes rows of a matrix and lists into their columns of `out`."""
    if matrix is not None:
      _spread(matrix, index, self.columns, out)
    for slot, (values, splits, _) in ragged:
      length = slot.feature.max_length
      pad_lists(values, splits, index, slot.column, length, self.last, out)


def examples_of(
  numbers: Numbers,
  lists: Mapping[str, Lists],
  count: int,
  tables: TableSet,
  rules: IdRules,
  where: str,
) -> Examples:
  """Checks every id, and converts all of them to global rows.

  There are `lists` of n = `count` examples for each feature. The rules come
  from `words_of`.

  Raises:
    UserError: an id is not in its table, or as `fitted`.
  """
  blocks, columns, weights, ragged = [], [], [], []
  raw: dict[str, RawColumn] = {}
  for slot in slots(tables):
    words = rules.vocabularies.get(slot.name)
    place = place_in(f'{where}, feature {slot.name!r}')
    ids = fitted(lists[slot.name], slot.name, slot.feature, rules.lists, place)
    if isinstance(words, GrowingVocabulary):
      rows, raw[slot.name] = _places(ids, slot, place)
    else:
      rows = _rows(ids, slot, words, place)
    if ids.splits is not None:
      ragged.append((slot, ids._replace(values=rows)))
      continue
    rows = rows.reshape(count, -1)
    blocks.append(rows)
    columns.append(np.arange(slot.column, slot.column + rows.shape[1]))
    own = None if ids.weights is None else ids.weights.values
    weights.append(None if own is None else own.reshape(rows.shape))
  # All have the type of rows, except for places in very long columns.
  dtype = np.result_type(*blocks, *(own.values for _, own in ragged))
  # One line per example, so that its lookups are near one another.
  none = np.empty((count, 0), dtype)
  matrix = np.concatenate([none, *blocks], axis=1, dtype=dtype)
  lookup_weights = None
  if any(block is not None for block in weights):
    pairs = zip(weights, blocks, strict=True)
    lookup_weights = np.concatenate(
      [np.ones(b.shape, np.float32) if w is None else w for w, b in pairs],
      axis=1,
    )
  return Examples(
    numbers,
    matrix,
    np.concatenate([np.empty(0, np.int64), *columns]),
    tuple(ragged),
    lookup_weights,
    count,
    tables,
    rules.lists.too_long == 'last',
    raw,
  )


def _rows(
  lists: Lists, slot: Slot, words: Any, place: Place
) -> Int[np.ndarray, '...']:
  """Returns global rows of ids, and -1 for padding, in the ids' shape.

  `words` is the vocabulary of raw ids. None: the ids are local.
  """
  values, padding = lists.values, lists.padding
  if not isinstance(words, Vocabulary):  # which takes a series as it is
    values = as_objects(values)
  real = (
    None  # places of the ids among padding, if a vocabulary gets them alone
  )
  if words is not None:
    if padding is not None:
      real = np.flatnonzero(~padding)
    known = values if real is None else values.reshape(-1)[real]
    values = np.asarray(words.rows(known))
    if values.shape != known.shape:
      raise UserError(
        'a vocabulary must give one row per id',
        got=f'shape {list(values.shape)} for {list(known.shape)}',
        where=place(None),
        hint='return an array shaped as the ids',
      )

  def where(index: int) -> str:
    if not values.size:
      return place(None)
    return lists.where(index if real is None else int(real[index]), place)

  _check_whole(values, slot, where)
  # Unsigned ones past the end become negative. They are not padding. But -1
  # from a vocabulary is, where words or unsigned raw ids cannot be padded.
  ids = np.ascontiguousarray(values).astype(np.int64, copy=False).reshape(-1)
  is_padded = real is None and values.ndim == 2 and values.dtype.kind == 'i'
  rows = np.empty(len(ids), slot.dtype)
  flaw = _place_ids(ids, slot.size, slot.first, slot.unknown, is_padded, rows)
  if flaw >= 0:
    or_padding = ', or -1 for padding' * is_padded
    raise UserError(
      f'ids of feature {slot.name!r} must be in [0, {slot.size}) of table'
      f' {slot.feature.table!r}{or_padding}',
      got=int(values.reshape(-1)[flaw]),
      where=where(flaw),
      hint="enlarge the table, or make it with unknown='row', one row for all"
      ' such ids',
    )
  if real is not None:
    ids = np.full(np.prod(lists.shape), -1, slot.dtype)
    ids[real] = rows
    rows = ids
  return rows.reshape(lists.shape)


def _places(
  lists: Lists, slot: Slot, place: Place
) -> tuple[Int[np.ndarray, '...'], RawColumn]:
  """Returns each lookup's place in the column of raw ids, and that column."""
  values, padding = lists.values, lists.padding
  flat = values if isinstance(values, pl.Series) else values.reshape(-1)
  ids = raw_ids(flat, place(None))
  places = None if ids.present is None else np.cumsum(ids.present) - 1
  lookups = np.arange(len(flat)).reshape(values.shape)
  # Use the type of rows if it is large enough.
  lookups = lookups.astype(np.result_type(slot.dtype, row_dtype(len(flat))))
  if padding is not None:
    lookups[padding] = -1
  return lookups, RawColumn(ids, places)


def _check_whole(
  values: np.ndarray, slot: Slot, where: Callable[[int], str]
) -> None:
  """Checks that ids have an integer type. Else names the first other value."""
  kind, flat = values.dtype.kind, values.reshape(-1)
  if kind in 'iu':
    return
  odd = np.zeros(len(flat), bool)
  if kind == 'f':
    odd = ~(np.isfinite(flat) & (flat == np.floor(flat)))
  elif kind == 'O':
    odd = np.array([not is_whole(x, 0, slot.size) for x in flat], bool)
  index = int(np.argmax(odd)) if odd.any() else 0
  value = flat[index] if len(flat) else None
  value = value.item() if isinstance(value, np.generic) else value
  hint = 'convert them to int64'
  if kind in 'SUT' or isinstance(value, str | bytes):
    hint = (
      f'give vocabularies={{{slot.name!r}: Vocabulary.fit(...)}}, which knows'
      ' the ids of words'
    )
  elif odd.any() and (kind == 'f' or is_missing(value)):
    hint = 'fill what is missing, and give whole numbers'
  raise UserError(
    f'ids of feature {slot.name!r} must be integers in [0, {slot.size})',
    got=f'{value!r} of type {values.dtype}',
    where=where(index),
    hint=hint,
  )


def words_of(
  rules: IdRules, tables: TableSet, replace: Replace | None, where: str
) -> tuple[IdRules, dict[str, GrowingVocabulary]]:
  """Returns the rules with vocabularies by feature, and those that grow.

  The second ones are by table. `replace` returns what to use in place of a
  growing one. None keeps all.

  Raises:
    UserError: a vocabulary belongs to no feature and no table, or has no method
      `rows`. Or a table has several growing ones, a growing one has several
      tables, or its table is too small.
  """
  given = rules.vocabularies
  known = [*dict.fromkeys([*tables.features, *tables.tables])]
  check_known([*given], known, f'{where}, vocabularies')
  for name, words in given.items():
    if not callable(getattr(words, 'rows', None)):
      raise UserError(
        'a vocabulary must have a method rows',
        got=type(words).__name__,
        where=f'{where}, vocabularies, {name!r}',
        hint='make it with Vocabulary.fit(ids)',
      )
  own = {
    name: given.get(name, given.get(feature.table))
    for name, feature in tables.features.items()
    if name in given or feature.table in given
  }
  growing = _growing_of(own, tables, where)
  if replace is not None and growing:
    others = {table: replace(table, v) for table, v in growing.items()}
    for name, feature in tables.features.items():
      if feature.table in others:
        own[name] = others[feature.table]
    growing = _growing_of(own, tables, where)
  return rules._replace(vocabularies=own), growing


def _growing_of(
  words: Mapping[str, Any], tables: TableSet, where: str
) -> dict[str, GrowingVocabulary]:
  """Returns the growing vocabularies by table."""
  growing: dict[str, GrowingVocabulary] = {}
  for table, columns in _slots_by_table(tables).items():
    known = {slot.name: words.get(slot.name) for slot in columns}
    grown = [v for v in known.values() if isinstance(v, GrowingVocabulary)]
    if not grown:
      continue
    own, size = grown[0], columns[0].size
    others = [name for name, other in known.items() if other is not own]
    if others:
      raise UserError(
        'features that share a table share its one growing vocabulary',
        got=f'another one, or none, for feature {others[0]!r}',
        where=f'{where}, vocabularies, {table!r}',
        hint='give it by the name of the table',
      )
    if own.size > size:
      raise UserError(
        f'table {table!r} must have a row for each of its vocabulary',
        got=f'{size} for {own.size}',
        where=f'{where}, vocabularies, {table!r}',
        hint='give both the same size',
      )
    if any(own is other for other in growing.values()):
      raise UserError(
        'a growing vocabulary must be of one table',
        got=f'another one, and {table!r}',
        where=f'{where}, vocabularies',
        hint='give each table its own, or let the features share a table',
      )
    growing[table] = own
  return growing


class _VectorNumbers:
  """The number of the vector that an initializer has for an id."""

  def __init__(self, how: VectorsById) -> None:
    raw = raw_ids(how.ids, how.where)
    self._known, self._where = Vocabulary(raw._replace(present=None)), how.where
    self._kind = raw.kind
    there = raw.present
    all_of_them = np.arange(len(how.ids))
    self._numbers = all_of_them if there is None else np.flatnonzero(there)

  def of(self, ids: RawIds) -> Int[np.ndarray, ' n']:
    """Returns the number of each id's vector, i64, or -1 if it has none."""
    rows = self._known.rows(as_kind(ids, self._kind, self._where))
    return np.append(-1, self._numbers)[rows]


class Growth:
  """The growing vocabularies of one source, batch by batch."""

  def __init__(
    self, growing: Mapping[str, GrowingVocabulary], tables: TableSet
  ) -> None:
    """Takes vocabularies by table, and changes nothing yet."""
    self._growing = growing
    self._slots = _slots_by_table(tables)
    given = {table: tables.tables[table].initializer for table in growing}
    self._vectors = {
      table: how for table, how in given.items() if isinstance(how, VectorsById)
    }
    self._numbers: dict[str, _VectorNumbers] = {}
    # Cursors after the last batch of this source. None: it has not begun.
    self._cursors: dict[str, Cursor] | None = None

  def set_vocabularies(
    self, trained: Mapping[str, VocabularyState]
  ) -> dict[str, Cursor]:
    """Acquires the vocabularies and sets them to the state of training.

    Arguments, result and errors are those of `BatchSource.set_vocabularies`.
    """
    for table, vocabulary in self._growing.items():
      place = trained.get(table)
      other = isinstance(place, Cursor) and not vocabulary.has_made(place)
      if other and vocabulary.batches:
        raise UserError(
          'a table must keep the vocabulary that it was trained with',
          got='another one, which knows ids already',
          where=f'vocabularies, {table!r}',
          hint='give that or a new one, or make another trainer',
        )
    return self._go_to({t: trained[t] for t in self._growing if t in trained})

  def _go_to(self, places: Mapping[str, VocabularyState]) -> dict[str, Cursor]:
    """Sets vocabularies to states, all or none of them."""
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
      self._cursors = self._current()
    return self._cursors

  def _current(self) -> dict[str, Cursor]:
    return {table: v.cursor() for table, v in self._growing.items()}

  def grow(self, batch: Batch, raw: Mapping[str, RawColumn]) -> Batch:
    """Converts a batch to global rows, and lists the rows that it reassigns.

    Lookups of growing vocabularies are places in the `raw` columns of these
    features. They are overwritten.

    Raises:
      UserError: ids have another type than before, or a vocabulary was grown
        elsewhere. Nothing has changed.
    """
    if not self._growing:
      return batch
    cursors = self._cursors or self.set_vocabularies({})
    lookups = batch.lookups.reshape(len(batch.weights), -1)
    fresh, vectors = [], []
    try:
      for table, vocabulary in self._growing.items():
        ids, views = {}, {}
        for slot in self._slots[table]:
          end = slot.column + slot.feature.max_length
          view = lookups[:, slot.column : end]
          there = view >= 0
          # Taking a whole column is faster than taking by a mask.
          real = ... if there.all() else there
          views[slot.name] = view, real
          ids[slot.name] = raw[slot.name].take(view[real])
        rows, new = vocabulary.assign_features(ids, cursors[table])
        first = self._slots[table][0].first
        for name, (view, real) in views.items():
          view[real] = np.add(rows[name], first, dtype=view.dtype)
        fresh.append(new + first)
        vectors.append(self._vectors_of(table, new))
    except BaseException:
      self._go_to(cursors)  # some have taken the batch, others not
      raise
    self._cursors = self._current()
    numbers = np.concatenate(vectors) if self._vectors else None
    return batch._replace(fresh=np.concatenate(fresh), fresh_vectors=numbers)

  def _vectors_of(
    self, table: str, fresh: Int[np.ndarray, ' n']
  ) -> Int[np.ndarray, ' n']:
    """Returns `Batch.fresh_vectors` of fresh local rows of a table."""
    if table not in self._vectors or not len(fresh):
      return np.full(len(fresh), -1)
    if table not in self._numbers:  # with the first row that is given
      self._numbers[table] = _VectorNumbers(self._vectors[table])
    return self._numbers[table].of(self._growing[table].raw_ids_of(fresh))

  def get_state(self) -> dict[str, Any]:
    """Returns cursors of the vocabularies by table, as part of a position."""
    return {_STATE: self._cursors or self._current()} if self._growing else {}

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Acquires the vocabularies and sets them to the state of a position.

    Raises:
      UserError: the position is of other vocabularies, or another source grows
        one. Nothing has changed.
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
    """Releases the vocabularies, so that other sources can grow them."""
    self._cursors = None
    for vocabulary in self._growing.values():
      vocabulary.release(self)


@kernel
@no_type_check
def _place_ids(
  ids: np.ndarray,
  size: int,
  first: int,
  unknown: int,
  is_padded: bool,
  rows: np.ndarray,
) -> int:
  """Converts local ids i64[n] to global rows, written to `rows` [n].

  `size`, `first` and `unknown` are those of a `Slot`. With `is_padded`, the id
  -1 is no lookup and stays. Returns -1, or the index of the first id that is an
  error.
  """
  for i in range(len(ids)):
    wanted = ids[i]
    if (wanted >= 0) & (wanted < size):
      rows[i] = first + wanted
    elif is_padded and wanted == -1:
      rows[i] = -1
    elif unknown >= 0:
      rows[i] = unknown
    else:
      return i
  return -1


@kernel
@no_type_check
def _spread(
  values: np.ndarray, index: np.ndarray, columns: np.ndarray, out: np.ndarray
) -> None:
  """Writes rows `index` i64[B] of values [n, k] to columns i64[k] of [B, K]."""
  for i in range(len(index)):
    for k in range(len(columns)):
      out[i, columns[k]] = values[index[i], k]
