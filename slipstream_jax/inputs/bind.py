"""Binds columns of ids to tables: ids become global rows, batch by batch."""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
from typing import Any, NamedTuple, no_type_check, Protocol, runtime_checkable

from jaxtyping import Float, Int
import numpy as np
import polars as pl

from slipstream_jax.columns.ids import raw_ids, RawIds
from slipstream_jax.columns.lists import Bags, fitted, ListRules, pad_lists
from slipstream_jax.columns.read import (
  as_objects,
  is_missing,
  Lists,
  Place,
  place_in,
)
from slipstream_jax.data.interrupts import held
from slipstream_jax.data.numbered import Column
from slipstream_jax.data.source import BatchSource
from slipstream_jax.errors import is_whole, UserError
from slipstream_jax.hashing import kernel
from slipstream_jax.inputs.fields import check_known, Numbers, Order, Reordered
from slipstream_jax.tables import Feature, row_dtype, TableSet
from slipstream_jax.types import Array, Batch, Lookups
from slipstream_jax.vocabulary.counted import Vocabulary
from slipstream_jax.vocabulary.growing import GrowingVocabulary
from slipstream_jax.vocabulary.history import Cursor
from slipstream_jax.vocabulary.history import Position as VocabularyState

Replace = Callable[[str, GrowingVocabulary], Any]
"""Maps a table and its growing vocabulary to the one to use in its place."""

_STATE = 'vocabularies'  # the key of positions that holds them, by table


@runtime_checkable
class Words(Protocol):
  """Maps raw ids to local ids, as a vocabulary does."""

  def rows(self, ids: Any) -> Array:
    """Returns the local ids of raw ids, in their shape."""
    ...


class Rules(NamedTuple):
  """Settings that say how ids are read."""

  vocabularies: Mapping[str, Words]
  """Vocabularies of raw ids, by feature or by table."""
  lists: ListRules

  @property
  def grow(self) -> bool:
    """Whether a vocabulary grows as batches are read."""
    words = self.vocabularies.values()
    return any(isinstance(one, GrowingVocabulary) for one in words)


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

  @property
  def table(self) -> str:
    """Name of the table."""
    return self.feature.table


def slots(tables: TableSet) -> tuple[Slot, ...]:
  """Returns the slots of all features, in their order."""
  dtype = np.dtype(row_dtype(tables.num_rows))
  result = []
  for name, feature in tables.features.items():
    table = tables.tables[feature.table]
    first, size = tables.first_rows[feature.table], table.vocabulary_size
    unknown = first + size if table.unknown == 'row' else -1
    column = tables.columns[name].start
    result.append(Slot(name, feature, size, first, unknown, column, dtype))
  return tuple(result)


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


class Part(NamedTuple):
  """Rows of one feature whose lists lie end to end."""

  rows: Bags
  column: int
  length: int

  def pad(
    self,
    values: np.ndarray,
    index: Int[np.ndarray, ' m'],
    last: bool,
    out: np.ndarray,
  ) -> None:
    """Writes the lists at `index` of `values` into their columns of `out`."""
    splits = self.rows.splits
    assert splits is not None
    pad_lists(values, splits, index, self.column, self.length, last, out)


@dataclasses.dataclass(frozen=True)
class Examples:
  """Examples in global rows, whose ids were all checked.

  Attributes:
    numbers: dense features, labels and weights.
    matrix: global rows of the features with lists of one length, side by side.
      Raw ids of growing vocabularies have their places in `raw` instead.
    columns: columns of the matrix in the lookups [B, K]. None: all, in order.
    parts: the other features.
    lookup_weights: weights of the matrix, f32. None if no feature is weighted.
    count: n.
    tables: the tables whose rows are looked up.
    last: whether the last lookups of long lists are used, not the first.
    raw: raw ids by feature, for features whose vocabulary grows.
  """

  numbers: Numbers
  matrix: Int[np.ndarray, 'n k']
  columns: Int[np.ndarray, ' k'] | None
  parts: tuple[Part, ...]
  lookup_weights: Float[np.ndarray, 'n k'] | None
  count: int
  tables: TableSet
  last: bool
  raw: Mapping[str, RawColumn]

  def arrays(self) -> Iterator[Column]:
    """Yields all arrays that a checksum of the examples is made of."""
    dense, labels, weights, *_ = self.numbers
    others = labels, weights, self.lookup_weights
    for array in (dense, self.matrix, *others):
      if array is not None and array.size:
        yield array
    for part in self.parts:
      for array in part.rows:
        if array is not None and len(array):
          yield array
    for column in self.raw.values():
      for array in (column.ids.bits, column.places):
        if array is not None and len(array):
          yield array

  def arranged(self, dense: Order | None, labels: Order | None) -> 'Examples':
    """Returns the same examples with columns in other orders. None keeps one.

    Columns are copied when batches are taken, not here.
    """
    numbers = self.numbers
    views: Any = {
      name: Reordered(getattr(numbers, name), order)
      for name, order in (('dense', dense), ('labels', labels))
      if order is not None
    }
    return dataclasses.replace(self, numbers=numbers._replace(**views))

  def take(self, index: Int[np.ndarray, ' m']) -> Batch:
    """Returns the examples at `index`, which must be in range, as a batch."""
    dense, labels, weights, *_ = self.numbers
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
    if self.columns is None:
      return self.matrix.take(index, axis=0)
    shape = (len(index), self.tables.num_columns)
    lookups = np.full(shape, -1, self.matrix.dtype)
    _spread(self.matrix, index, self.columns, lookups)
    for part in self.parts:
      part.pad(part.rows.values, index, self.last, lookups)
    return lookups

  def _weights(
    self, index: Int[np.ndarray, ' m'], lookups: Lookups
  ) -> Float[np.ndarray, 'm K']:
    weights = np.ones(lookups.shape, np.float32)
    if self.lookup_weights is not None:
      columns = self.columns
      if columns is None:
        columns = np.arange(lookups.shape[1])
      _spread(self.lookup_weights, index, columns, weights)
    for part in self.parts:
      if part.rows.weights is not None:
        part.pad(part.rows.weights, index, self.last, weights)
    weights[lookups < 0] = 0  # so that batches do not depend on the form
    return weights


def examples_of(
  numbers: Numbers,
  lists: Mapping[str, Lists],
  count: int,
  tables: TableSet,
  rules: Rules,
  where: str,
) -> Examples:
  """Checks every id, and converts all of them to global rows.

  Args:
    numbers: what examples hold beside ids.
    lists: ids of every feature of the tables.
    count: n, of all columns.
    tables: the tables whose rows are looked up.
    rules: how to read them, with vocabularies by feature.
    where: the source, for errors.

  Raises:
    UserError: an id that is not in its table, or a list or a weight as of
      `fitted`.
  """
  blocks, columns, weights, parts = [], [], [], []
  raw: dict[str, RawColumn] = {}
  for slot in slots(tables):
    words = rules.vocabularies.get(slot.name)
    place = place_in(f'{where}, feature {slot.name!r}')
    bags = fitted(lists[slot.name], slot.name, slot.feature, rules.lists, place)
    if isinstance(words, GrowingVocabulary):
      rows, raw[slot.name] = _places(bags, slot, place)
    else:
      rows = _rows(bags, slot, words, place)
    if bags.splits is not None:
      length = slot.feature.max_length
      bags = bags._replace(values=rows)
      parts.append(Part(bags, slot.column, length))
      continue
    rows = rows.reshape(count, -1)
    blocks.append(rows)
    columns.append(np.arange(slot.column, slot.column + rows.shape[1]))
    flat = bags.weights
    weights.append(None if flat is None else flat.reshape(rows.shape))
  # All have the type of rows, except for places in very long columns.
  dtype = np.result_type(*blocks, *(part.rows.values for part in parts))
  if not blocks:
    matrix = np.empty((count, 0), dtype)
    used = np.empty(0, np.int64)
  else:
    # One line per example: its lookups are then near one another.
    matrix = np.concatenate(blocks, axis=1, dtype=dtype)
    used = np.concatenate(columns)
  whole = len(used) == tables.num_columns
  return Examples(
    numbers,
    matrix,
    None if whole else used,
    tuple(parts),
    _side_by_side(weights, blocks),
    count,
    tables,
    rules.lists.too_long == 'last',
    raw,
  )


def _rows(
  bags: Bags, slot: Slot, words: Words | None, place: Place
) -> Int[np.ndarray, '...']:
  """Returns global rows of ids, and -1 for padding, in the ids' shape.

  Raises:
    UserError: an id that is not in its table, or is no whole number.
  """
  values = bags.values
  if words is not None:
    values = _known(bags, words, slot, place)
  _check_whole(bags._replace(values=values), slot, place)
  # Unsigned ones past the end become negative, and are no more padding for it.
  ids = np.ascontiguousarray(values).astype(np.int64, copy=False).reshape(-1)
  is_padded = values.ndim == 2 and values.dtype.kind == 'i'
  rows = np.empty(len(ids), slot.dtype)
  flaw = _place_ids(ids, slot.size, slot.first, slot.unknown, is_padded, rows)
  if flaw >= 0:
    _refuse(bags._replace(values=values), slot, flaw, is_padded, place)
  return rows.reshape(values.shape)


def _places(
  bags: Bags, slot: Slot, place: Place
) -> tuple[Int[np.ndarray, '...'], RawColumn]:
  """Returns each lookup's place in the column of raw ids, and that column.

  Raises:
    UserError: ids that are neither integers nor text.
  """
  values, padding = bags.values, bags.padding
  flat = values if isinstance(values, pl.Series) else values.reshape(-1)
  ids = raw_ids(flat, place(None))
  places = None if ids.present is None else np.cumsum(ids.present) - 1
  lookups = np.arange(len(flat)).reshape(values.shape)
  # Use the type of rows if it is large enough.
  lookups = lookups.astype(np.result_type(slot.dtype, row_dtype(len(flat))))
  if padding is not None:
    lookups[padding] = -1
  return lookups, RawColumn(ids, places)


def _known(bags: Bags, words: Words, slot: Slot, place: Place) -> np.ndarray:
  """Returns the local ids of raw ids. Padding stays."""
  raw, padding = bags.values, bags.padding
  if not isinstance(words, Vocabulary):  # it takes a series as it is
    raw = as_objects(raw)
  some = raw if padding is None else raw[~padding]
  local = np.asarray(words.rows(some))
  if local.shape != some.shape:
    raise UserError(
      'a vocabulary must give one row per id',
      got=f'shape {list(local.shape)} for {list(some.shape)}',
      where=place(None),
      hint='return an array shaped as the ids',
    )
  if padding is None:
    return local
  whole = np.full(raw.shape, -1, np.result_type(local.dtype, np.int64))
  whole[~padding] = local
  strange = ~padding & (whole < 0)  # -1 from a vocabulary is no padding
  if strange.any() and slot.unknown < 0:
    bags = bags._replace(values=whole)
    _refuse(bags, slot, int(np.argmax(strange)), False, place)
  whole[strange] = slot.size
  return whole


def _check_whole(bags: Bags, slot: Slot, place: Place) -> None:
  """Checks that ids have an integer type.

  Raises:
    UserError: they have another type. Names the first id that is no integer.
  """
  values = bags.values
  if isinstance(values, pl.Series):
    values = as_objects(values)
  if values.dtype.kind in 'iu':
    return
  flat, index, hint = values.reshape(-1), 0, 'convert them to int64'
  if values.dtype.kind == 'f':
    odd = ~(np.isfinite(flat) & (flat == np.floor(flat)))
    if odd.any():
      index = int(np.argmax(odd))
      hint = 'fill what is missing, and give whole numbers'
  elif values.dtype.kind == 'O':
    odd = np.array([not is_whole(x, 0, slot.size) for x in flat], bool)
    index = int(np.argmax(odd))
    if is_missing(_at(flat, index)):
      hint = 'fill what is missing, and convert them to int64'
  elif values.dtype.kind == 'b':
    hint = 'convert them to int64, if True is to be the id 1'
  if values.dtype.kind in 'SUT' or isinstance(_at(flat, index), str | bytes):
    hint = (
      f'give vocabularies={{{slot.name!r}: Vocabulary.fit(...)}}, which knows'
      ' the ids of words'
    )
  raise UserError(
    f'ids of feature {slot.name!r} must be integers in [0, {slot.size})',
    got=f'{_at(flat, index)!r} of type {values.dtype}',
    where=_where(bags, index, place) if len(flat) else place(None),
    hint=hint,
  )


def _at(flat: np.ndarray, index: int) -> Any:
  value = flat[index] if len(flat) else None
  return value.item() if isinstance(value, np.generic) else value


def _where(bags: Bags, index: int, place: Place) -> str:
  return Lists(bags.values, bags.splits).where(index, place)


def _refuse(
  bags: Bags, slot: Slot, index: int, is_padded: bool, place: Place
) -> None:
  padding = ', or -1 for padding' * is_padded
  raise UserError(
    f'ids of feature {slot.name!r} must be in [0, {slot.size}) of table'
    f' {slot.table!r}{padding}',
    got=int(bags.values.reshape(-1)[index]),
    where=_where(bags, index, place),
    hint="enlarge the table, or make it with unknown='row', one row for all"
    ' such ids',
  )


def _side_by_side(
  weights: list[np.ndarray | None], rows: list[np.ndarray]
) -> np.ndarray | None:
  """Joins weights of lookups, side by side. None if there are none."""
  if all(block is None for block in weights):
    return None
  blocks = [
    np.ones(block.shape, np.float32) if given is None else given
    for given, block in zip(weights, rows, strict=True)
  ]
  return np.concatenate(blocks, axis=1)


def words_of(
  rules: Rules, tables: TableSet, replace: Replace | None, where: str
) -> tuple[Rules, dict[str, GrowingVocabulary]]:
  """Finds the vocabulary of each feature, and those that grow.

  Args:
    rules: the rules, as the user gave them.
    tables: the tables of the features.
    replace: returns replacements of growing vocabularies. None keeps them.
    where: the source.

  Returns:
    The rules with vocabularies by feature, and the growing ones by table.

  Raises:
    UserError: a vocabulary belongs to no feature and no table, has no method
      `rows`, or as `growing_of`.
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
  own: dict[str, Words] = {}
  for slot in slots(tables):
    key = slot.name if slot.name in given else slot.table
    if key in given:
      own[slot.name] = given[key]
  growing = growing_of(own, tables, where)
  if replace is not None and growing:
    others = {table: replace(table, v) for table, v in growing.items()}
    for slot in slots(tables):
      if slot.table in others:
        own[slot.name] = others[slot.table]
    growing = growing_of(own, tables, where)
  return rules._replace(vocabularies=own), growing


def growing_of(
  words: Mapping[str, Any], tables: TableSet, where: str
) -> dict[str, GrowingVocabulary]:
  """Returns the growing vocabularies by table.

  Args:
    words: vocabularies by feature.
    tables: the tables of the features.
    where: the source.

  Raises:
    UserError: a table has several vocabularies, a vocabulary has several
      tables, or a table is too small.
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
  """Growing vocabularies of the batches of one source."""

  def __init__(
    self, growing: Mapping[str, GrowingVocabulary], tables: TableSet
  ) -> None:
    """Takes vocabularies, and changes nothing yet.

    Args:
      growing: vocabularies by table, from `growing_of`.
      tables: all tables.
    """
    self._growing = growing
    self._slots: dict[str, list[Slot]] = {table: [] for table in growing}
    for slot in slots(tables):
      if slot.table in growing:
        self._slots[slot.table].append(slot)
    # Cursors after the last batch of this source. None: it has not begun.
    self._cursors: dict[str, Cursor] | None = None

  def set_vocabularies(
    self, trained: Mapping[str, VocabularyState]
  ) -> dict[str, Cursor]:
    """Takes the vocabularies over, in the state in which training has them.

    Args:
      trained: states of the vocabularies by table, if they were trained.

    Returns:
      By table, a cursor of its vocabulary.

    Raises:
      UserError: another source grows one, or another one was trained. Nothing
        has changed.
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

  def _go_to(self, places: Mapping[str, VocabularyState]) -> None:
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
      self._cursors = {t: v.cursor() for t, v in self._growing.items()}

  def grow(self, batch: Batch, raw: Mapping[str, RawColumn]) -> Batch:
    """Converts a batch to global rows, and adds the rows that got another id.

    Args:
      batch: a batch. Lookups of growing vocabularies are places in their
        columns, and are overwritten.
      raw: the columns of these features.

    Raises:
      UserError: ids have another type than before, or a vocabulary was grown
        elsewhere. Nothing has changed.
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
          view = lookups[:, slot.column : slot.column + slot.feature.max_length]
          there = view >= 0
          # Taking a whole column is faster than taking by a mask.
          real[slot.name] = ... if there.all() else there
          ids[slot.name] = raw[slot.name].take(view[real[slot.name]])
        rows, new = vocabulary.assign_features(ids, self._cursors[table])
        for slot in columns:
          view = lookups[:, slot.column : slot.column + slot.feature.max_length]
          own = np.add(rows[slot.name], first, dtype=view.dtype)
          view[real[slot.name]] = own
        fresh.append(new + first)
    except BaseException:
      self._go_to(self._cursors)  # some have taken the batch, others not
      raise
    self._cursors = {t: v.cursor() for t, v in self._growing.items()}
    return batch._replace(fresh=np.concatenate(fresh))

  def get_state(self) -> dict[str, Any]:
    """Returns cursors of the vocabularies by table, as part of a position."""
    if not self._growing:
      return {}
    cursors = self._cursors
    return {
      _STATE: cursors or {t: v.cursor() for t, v in self._growing.items()}
    }

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Takes the vocabularies over, in the state of a position.

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


class Growing(BatchSource):
  """Base of the sources whose batches may grow vocabularies."""

  def __init__(self, growth: Growth) -> None:
    """Takes over the vocabularies of `growth`."""
    self._growth = growth

  def set_vocabularies(
    self, trained: Mapping[str, VocabularyState]
  ) -> dict[str, Cursor]:
    """Sets growing vocabularies to the state in which training has them."""
    return self._growth.set_vocabularies(trained)


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
  """Converts local ids to global rows.

  Args:
    ids: i64[n].
    size: ids that the table has rows for.
    first: the table's first global row.
    unknown: global row of all other ids, or -1 if they are errors.
    is_padded: whether the id -1 is no lookup, and stays.
    rows: out, integer[n].

  Returns:
    -1, or the index of the first id that is an error.
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
  """Writes rows of a matrix into some columns of another.

  Args:
    values: [n, k].
    index: i64[B], the rows to write.
    columns: i64[k], the column of `out` for each column.
    out: [B, K].
  """
  for i in range(len(index)):
    for k in range(len(columns)):
      out[i, columns[k]] = values[index[i], k]
