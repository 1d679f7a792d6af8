"""All tables of a model: the layout of rows and lookups, and the table groups.

Batches see all tables as one long array of rows: row = first row of the table +
local id, tables in the given order. The lookups of an example are one line of K
columns, features in the given order, `max_length` columns each. Tables of equal
dim, dtype and optimizer form a group. The rows of a group are one block with
its own numbering, and move together.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

from jaxtyping import Int
import numpy as np

from slipstream_jax.errors import check_by_name, UserError
from slipstream_jax.row_space import global_rows, offsets
from slipstream_jax.tables import check_feature, check_table, Feature, Table
from slipstream_jax.types import Array, Lookups


class Group(NamedTuple):
  """Tables of equal dim, dtype and optimizer, whose rows form one block."""

  dim: int
  dtype: str
  optimizer: Any
  """None: the optimizer of all tables."""
  tables: tuple[str, ...]
  """Table names, in the order of the set."""
  features: tuple[str, ...]
  """Features that look these tables up, in the order of the set."""
  columns: tuple[int, ...]
  """Columns of the lookups [B, K] that belong to the group, ascending: K_g."""
  spans: tuple[tuple[int, int], ...]
  """Range [first, end) of each feature among those K_g columns."""
  shifts: tuple[int, ...]
  """For each of those columns: global row minus row of the group."""
  num_rows: int
  """N_g, rows of its tables in total."""
  owner: int = 0
  """Number of the process whose devices train the rows. There is only one."""


_BY_NAME = "give them by name, such as {'item': ...}"


@dataclasses.dataclass(frozen=True, eq=False)
class TableSet:
  """All tables, and the features that look up their rows.

  Attributes:
    tables: by name, in the order of the global row space.
    features: by name, in the order of the lookups' columns. None: for each
      table one pooled feature of one lookup, with the table's name.

  Raises:
    UserError: no table or no feature, a feature without a table, a table
      without a feature, or an invalid value in one of them.
  """

  tables: Mapping[str, Table]
  features: Mapping[str, Feature] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    check_by_name(self.tables, 'TableSet, tables', _BY_NAME)
    check_by_name(self.features, 'TableSet, features', _BY_NAME)
    object.__setattr__(self, 'tables', dict(self.tables))
    features = self.features or {name: Feature(name) for name in self.tables}
    object.__setattr__(self, 'features', dict(features))
    _check_set(self.tables, self.features)

  # The order counts, because it decides the layout of columns and rows.
  def _key(self) -> tuple[Any, ...]:
    return (tuple(self.tables.items()), tuple(self.features.items()))

  def __eq__(self, other: object) -> bool:
    return isinstance(other, TableSet) and self._key() == other._key()

  def __hash__(self) -> int:
    return hash(self._key())

  @functools.cached_property
  def offsets(self) -> Int[np.ndarray, ' tables_and_1']:
    """First global row of each table, and N at the end, i64."""
    return offsets([table.rows for table in self.tables.values()])

  @functools.cached_property
  def first_rows(self) -> dict[str, int]:
    """First global row of each table, by name."""
    return dict(zip(self.tables, self.offsets.tolist(), strict=False))

  @property
  def num_rows(self) -> int:
    """N, rows of all tables in total."""
    return int(self.offsets[-1])

  @functools.cached_property
  def columns(self) -> dict[str, slice]:
    """Columns of each feature in the lookups [B, K], by name."""
    ends = np.cumsum([f.max_length for f in self.features.values()]).tolist()
    starts = [0, *ends[:-1]]
    return dict(zip(self.features, map(slice, starts, ends), strict=True))

  @property
  def num_columns(self) -> int:
    """K, lookups of one example, including padding."""
    return sum(f.max_length for f in self.features.values())

  @property
  def is_weighted(self) -> bool:
    """Whether any feature has lookup weights. Then all lookups have one."""
    return any(feature.weighted for feature in self.features.values())

  @functools.cached_property
  def column_rows(self) -> tuple[np.ndarray, np.ndarray]:
    """Range [first, end) of global rows of each column, i64[K] both."""
    first, last = [], []
    for feature in self.features.values():
      start = self.first_rows[feature.table]
      first += [start] * feature.max_length
      last += [start + self.tables[feature.table].rows] * feature.max_length
    return np.array(first, np.int64), np.array(last, np.int64)

  @functools.cached_property
  def groups(self) -> tuple[Group, ...]:
    """The groups, in the order of their first tables."""
    members: dict[Any, list[str]] = {}
    for name, table in self.tables.items():
      key = (table.dim, table.dtype, table.optimizer)
      members.setdefault(key, []).append(name)
    return tuple(_group(self, names) for names in members.values())

  @functools.cached_property
  def example_shape(self) -> tuple[int, ...]:
    """Shape of an example's lookups: (F,), (F, L) or, if uneven, (K,)."""
    lengths = {feature.max_length for feature in self.features.values()}
    if lengths == {1}:
      return (len(self.features),)
    if len(lengths) == 1:
      return (len(self.features), *lengths)
    return (self.num_columns,)

  def in_groups(
    self, rows: Int[np.ndarray, ' n']
  ) -> tuple[tuple[Int[np.ndarray, ' p'], Int[np.ndarray, ' p']], ...]:
    """Splits global rows by group, and numbers them within their group.

    Returns:
      For each group, ascending positions in `rows`, and rows of the group; i64.
    """
    if len(self.groups) == 1:
      return ((np.arange(len(rows)), rows),)
    table = np.searchsorted(self.offsets, rows, side='right') - 1
    group_of, shifts = self._table_places
    group, own = group_of[table], rows - shifts[table]
    places = map(np.flatnonzero, (group == g for g in range(len(self.groups))))
    return tuple((at, own[at]) for at in places)

  @functools.cached_property
  def _table_places(self) -> tuple[np.ndarray, np.ndarray]:
    """Group of each table, and global row minus row of the group; i64."""
    places: dict[str, tuple[int, int]] = {}
    for number, group in enumerate(self.groups):
      sizes = [self.tables[name].rows for name in group.tables]
      first = zip(group.tables, offsets(sizes).tolist(), strict=False)
      places |= {name: (number, self.first_rows[name] - f) for name, f in first}
    groups, shifts = zip(*(places[name] for name in self.tables), strict=True)
    return np.array(groups), np.array(shifts)

  def lookups(self, ids: Array) -> Lookups:
    """Converts local ids [B, F] or [B, F, L] to global rows. Keeps -1.

    Raises:
      UserError: an id is outside its table or not an integer, or the number of
        features is wrong.
    """
    tables = [feature.table for feature in self.features.values()]
    rows = [self.tables[table].rows for table in tables]
    first = [self.first_rows[table] for table in tables]
    return global_rows(ids, rows, first, self.num_rows)


def tables_of(
  sizes: Mapping[str, int],
  features: Mapping[str, Feature] | None = None,
  dim: int = 16,
  dtype: str = 'float32',
) -> TableSet:
  """Returns tables of these sizes that agree in all else, so one group."""
  tables = {name: Table(size, dim, dtype) for name, size in sizes.items()}
  return TableSet(tables, features or {})


def sequences_of(names: Sequence[str], length: int) -> dict[str, Feature]:
  """Returns one sequence feature of `length` steps for each table name."""
  return {name: Feature(name, 'none', length) for name in names}


def features_of(
  names: Sequence[str], sequence_length: int | None = None
) -> dict[str, Feature]:
  """Returns one feature for each table name: a sequence if given a length L."""
  if sequence_length is not None:
    return sequences_of(names, sequence_length)
  return {name: Feature(name) for name in names}


def _group(tables: TableSet, names: Sequence[str]) -> Group:
  ends = offsets([tables.tables[name].rows for name in names])
  first = dict(zip(names, ends.tolist(), strict=False))
  features = [n for n, f in tables.features.items() if f.table in first]
  columns: list[int] = []
  spans: list[tuple[int, int]] = []
  shifts: list[int] = []
  for name in features:
    table, span = tables.features[name].table, tables.columns[name]
    length = span.stop - span.start
    spans.append((len(columns), len(columns) + length))
    columns += range(span.start, span.stop)
    shifts += [tables.first_rows[table] - first[table]] * length
  one = tables.tables[names[0]]
  return Group(
    one.dim,
    one.dtype,
    one.optimizer,
    tuple(names),
    tuple(features),
    tuple(columns),
    tuple(spans),
    tuple(shifts),
    int(ends[-1]),
  )


def _check_set(
  tables: Mapping[str, Table], features: Mapping[str, Feature]
) -> None:
  if not tables:
    raise UserError(
      'a table set needs at least one table',
      got='none',
      where='TableSet, tables',
      hint="give some by name, such as {'item': Table(1000, dim=16)}",
    )
  for name, table in tables.items():
    check_table(f'Table {name!r}', table)
  for name, feature in features.items():
    check_feature(f'Feature {name!r}', feature, tables)
  unused = set(tables) - {feature.table for feature in features.values()}
  if unused:
    raise UserError(
      'each table needs a feature that looks its rows up',
      got=f'none for {", ".join(sorted(unused))}',
      where='TableSet, features',
      hint='add a feature of that table, or leave the table out',
    )
