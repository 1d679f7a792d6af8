"""Examples in the global rows of a set of tables: what batches are cut from."""

from collections.abc import Iterator, Mapping
import dataclasses
from typing import Any, NamedTuple

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.data.numbered import Column
from slipstream_jax.errors import UserError
from slipstream_jax.inputs.columns import Lists
from slipstream_jax.inputs.given import check_known, Numbers
from slipstream_jax.inputs.growing import growing_of, RawColumn, Replace
from slipstream_jax.inputs.known import Order, Reordered
from slipstream_jax.inputs.list_kernels import pad_lists, spread
from slipstream_jax.inputs.rows import to_places, to_rows, TooLong, Words
from slipstream_jax.inputs.slots import slots
from slipstream_jax.tables import TableSet
from slipstream_jax.types import Batch, Lookups
from slipstream_jax.vocabulary.growing import GrowingVocabulary


class Rules(NamedTuple):
  """How ids are read."""

  vocabularies: Mapping[str, Words]
  """By feature, or by table, what knows the ids of raw ones."""
  too_long: TooLong
  """What of a list longer than its feature's `max_length` is used."""

  @property
  def grow(self) -> bool:
    """Whether a vocabulary grows as batches are read."""
    words = self.vocabularies.values()
    return any(isinstance(one, GrowingVocabulary) for one in words)


class Part(NamedTuple):
  """Rows of one feature whose lists lie end to end."""

  rows: Lists
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
  """Examples in global rows, each id of them looked at.

  Attributes:
    numbers: what they hold beside ids.
    matrix: global rows of the features of equal lengths, side by side; of raw
      ids that have none yet, their places in `raw`.
    columns: of the lookups [B, K], those of the matrix; None: all, in order.
    parts: the other features.
    lookup_weights: of the matrix, f32; None where no feature is weighted.
    count: n.
    tables: whose rows they are.
    last: of lists that are too long the last lookups are used, not the first.
    raw: by feature, ids whose vocabulary grows.
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
    """All that tells these examples from others, for their checksum."""
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
    """Returns the same examples with columns in other orders; None keeps one.

    Nothing is copied but what is taken.
    """
    numbers = self.numbers
    views: Any = {
      name: Reordered(getattr(numbers, name), order)
      for name, order in (('dense', dense), ('labels', labels))
      if order is not None
    }
    return dataclasses.replace(self, numbers=numbers._replace(**views))

  def take(self, index: Int[np.ndarray, ' m']) -> Batch:
    """The examples at `index`, which must be in range, as a batch."""
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
    spread(self.matrix, index, self.columns, lookups)
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
      spread(self.lookup_weights, index, columns, weights)
    for part in self.parts:
      if part.rows.weights is not None:
        part.pad(part.rows.weights, index, self.last, weights)
    weights[lookups < 0] = 0  # an equal batch, however the lists came
    return weights


def examples_of(
  numbers: Numbers,
  lists: Mapping[str, Lists],
  count: int,
  tables: TableSet,
  rules: Rules,
  where: str,
) -> Examples:
  """Looks at every id, and makes global rows of all.

  Args:
    numbers: what there is beside ids.
    lists: ids of every feature of the tables.
    count: n, of all columns.
    tables: what the ids are of.
    rules: how to read them, with vocabularies by feature.
    where: the source, for errors.

  Raises:
    UserError: the first id that is none of its table.
  """
  blocks, columns, weights, parts = [], [], [], []
  raw: dict[str, RawColumn] = {}
  for slot in slots(tables):
    words = rules.vocabularies.get(slot.name)
    place, given = f'{where}, feature {slot.name!r}', lists[slot.name]
    if isinstance(words, GrowingVocabulary):
      rows, raw[slot.name] = to_places(given, slot, rules.too_long, place)
    else:
      rows = to_rows(given, slot, words, rules.too_long, place)
    if rows.splits is not None:
      parts.append(Part(rows, slot.column, slot.length))
      continue
    width = rows.values.shape[1]
    blocks.append(rows.values)
    columns.append(np.arange(slot.column, slot.column + width))
    weights.append(rows.weights)
  # All are rows of one type, but for places in columns that are very long.
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
    rules.too_long == 'last',
    raw,
  )


def _side_by_side(
  weights: list[np.ndarray | None], rows: list[np.ndarray]
) -> np.ndarray | None:
  """Weights of the same lookups as the rows; None if there are none."""
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
  """The rules with vocabularies by feature; by table, those that grow.

  Args:
    rules: as the user gave them.
    tables: of the features.
    replace: makes what is used in place of those that grow; None: themselves.
    where: the source.

  Raises:
    UserError: a vocabulary that is of no feature and no table, that knows no
      rows of ids, or that cannot grow so.
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
