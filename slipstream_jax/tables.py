"""Embedding tables and the features that look up their rows, as pure data.

`Table` and `Feature` play the roles of keras-rs' `TableConfig` and
`FeatureConfig`. `vocabulary_size`, `embedding_dim`, `initializer`, `optimizer`
and `combiner` mean the same, but a combiner belongs to a feature.

Batches see all tables of a `TableSet` as one array of rows, the global row
space: row = first row of the table + local id, tables in the given order. The
lookups of an example are K columns, features in the given order, `max_length`
columns each. Tables of equal dim, dtype and optimizer form a group. The rows of
a group are one block with its own numbering, and move together.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import itertools
from typing import Any, get_args, Literal, NamedTuple

from jaxtyping import Int
import numpy as np

from slipstream_jax.errors import (
  as_array,
  check_by_name,
  check_optimizer,
  check_whole,
  choose,
  UserError,
)
from slipstream_jax.initializers import as_initializer
from slipstream_jax.named import in_short, refuse_others
from slipstream_jax.types import Array, Lookups

Combiner = Literal['sum', 'mean', 'sqrtn', 'none']
COMBINERS: tuple[Combiner, ...] = get_args(Combiner)
Unknown = Literal['error', 'row']
ROW_DTYPES = ('float32', 'bfloat16', 'float16')


class Table(NamedTuple):
  """One embedding table."""

  vocabulary_size: int
  """Number of ids: 0 to vocabulary_size - 1."""
  embedding_dim: int = 16
  """D, length of a row."""
  dtype: str = 'float32'
  """Dtype of the rows wherever they are kept, one of `ROW_DTYPES`. Steps
  compute new rows in f32 and round half precision stochastically."""
  initializer: Any = None
  """Initial rows: `Uniform`, `Constant`, an array [R, D] of real numbers, a
  mapping from ids to vectors [D], or a function as those of
  `jax.nn.initializers`. None: Uniform(1/sqrt(vocabulary_size)), as in DLRM
  (arXiv 1906.00091).

  Values are rounded to f32, and then to the nearest of `dtype`. Row i of an
  array is the initial row i. An array without the row of unknown ids leaves it
  to the default. A mapping has ids as the trainer's first source has them: raw
  ids where it has a `Vocabulary`, else numbers of rows. Rows of other ids have
  the default, and ids without a row are left out. A function draws each row
  [1, D] by a key of its own, or the whole table at once if its values depend on
  the number of rows."""
  optimizer: Any = None
  """An optax chain for this table's rows. None: the optimizer of all tables."""
  unknown: Unknown = 'error'
  """What to do with ids outside [0, vocabulary_size): 'error' raises, 'row'
  maps all of them to one extra row, the last."""

  def __repr__(self) -> str:
    return in_short(self)

  @property
  def rows(self) -> int:
    """R: `vocabulary_size`, plus the row of unknown ids if there is one."""
    return self.vocabulary_size + (self.unknown == 'row')


class Feature(NamedTuple):
  """One feature: the lookups of an example in one table."""

  table: str
  """Name of the table. Several features may share it."""
  combiner: Combiner = 'sum'
  """How the rows of a bag become one embedding [D]: their weighted sum ('sum'),
  divided by the sum of weights ('mean') or by the root of the sum of squared
  weights ('sqrtn'). It is 0 for an empty bag or a divisor of 0. With 'none' the
  model gets the sequence [L, D], each row times its weight, 0 at padding."""
  max_length: int = 1
  """L, the most lookups of one example. Shorter bags are padded."""
  weighted: bool = False
  """Whether each lookup carries a weight (f32). If not, all weigh 1."""

  def __repr__(self) -> str:
    return in_short(self)


# Names of fields in Keras and TorchRec.
_OF_FEATURES = (
  "give combiner to a feature: Trainer(..., features={'item':"
  " slip.Feature('item', combiner='mean')})"
)
refuse_others(
  Table,
  {
    'combiner': _OF_FEATURES,
    'pooling': _OF_FEATURES,
    'num_embeddings': 'name it vocabulary_size',
    'input_dim': 'name it vocabulary_size',
    'output_dim': 'name it embedding_dim',
    'data_type': 'name it dtype',
    'embeddings_initializer': 'name it initializer',
    'name': "give tables by name: Trainer(..., {'item': slip.Table(...)})",
    'placement': 'give it to Trainer',
  },
)
refuse_others(
  Feature,
  {
    'pooling': 'name it combiner',
    'name': "give features by name: features={'item': slip.Feature(...)}",
  },
)


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
  ranges: tuple[tuple[int, int], ...]
  """For each of those features: range [first, end) of its table's rows in the
  group."""
  num_rows: int
  """N_g, rows of its tables in total."""


_COUNT = 'count the rows, elements or lookups again'
_BY_NAME = "give them by name, such as {'item': ...}"


@dataclasses.dataclass(frozen=True, eq=False)
class TableSet:
  """All tables, and the features that look up their rows.

  Attributes:
    tables: by name, in the order of the global row space.
    features: by name, in the order of the lookups' columns. By default, each
      table has one pooled feature of one lookup, with the table's name.

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
    tables = {k: _with_initializer(k, t) for k, t in self.tables.items()}
    object.__setattr__(self, 'tables', tables)

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
      key = (table.embedding_dim, table.dtype, table.optimizer)
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
      for name, (start, _) in zip(group.features, group.spans, strict=True):
        places[self.features[name].table] = number, group.shifts[start]
    groups, shifts = zip(*(places[name] for name in self.tables), strict=True)
    return np.array(groups), np.array(shifts)

  def lookups(self, ids: Array) -> Lookups:
    """Converts local ids [B, F] or [B, F, L] to global rows. Keeps -1.

    Raises:
      UserError: an id is outside its table or not an integer, or the number of
        features is wrong.
    """
    tables = [feature.table for feature in self.features.values()]
    ids = as_array(ids, 'lookups')
    if ids.ndim not in (2, 3) or ids.shape[1] != len(tables):
      raise UserError(
        f'ids must be [B, {len(tables)}] or [B, {len(tables)}, L]',
        got=ids.shape,
        where='lookups',
        hint='give one column of ids per feature',
      )
    check_integers(ids, 'lookups')
    rows = [self.tables[table].rows for table in tables]
    shape = (1, len(rows)) + (1,) * (ids.ndim - 2)
    bad = (ids < -1) | (ids >= np.reshape(rows, shape))
    if bad.any():
      at = tuple(int(i) for i in np.argwhere(bad)[0])
      raise UserError(
        f'ids of feature {at[1]} must be in [0, {rows[at[1]]}) or -1',
        got=int(ids[at]),
        where=f'lookups{list(at)}',
        hint='map unknown ids to a row of the table first',
      )
    # From the number of rows, not from the largest id: all batches then have
    # one dtype, and the step is compiled once.
    dtype = row_dtype(self.num_rows)
    first = np.array([self.first_rows[table] for table in tables], dtype)
    return np.where(
      ids < 0, dtype(-1), ids.astype(dtype) + first.reshape(shape)
    )


def tables_of(
  sizes: Mapping[str, int],
  features: Mapping[str, Feature] | None = None,
  dim: int = 16,
  dtype: str = 'float32',
) -> TableSet:
  """Returns tables of these sizes that agree in all else, so one group."""
  tables = {name: Table(size, dim, dtype) for name, size in sizes.items()}
  return TableSet(tables, features or {})


def features_of(
  names: Sequence[str], sequence_length: int | None = None
) -> dict[str, Feature]:
  """Returns one feature for each table name: a sequence if given a length L."""
  if sequence_length is None:
    return {name: Feature(name) for name in names}
  return {name: Feature(name, 'none', sequence_length) for name in names}


def _group(tables: TableSet, names: Sequence[str]) -> Group:
  ends = offsets([tables.tables[name].rows for name in names])
  ranges = dict(zip(names, itertools.pairwise(ends.tolist()), strict=True))
  first = {name: start for name, (start, _) in ranges.items()}
  features = [n for n, f in tables.features.items() if f.table in first]
  columns: list[int] = []
  spans: list[tuple[int, int]] = []
  shifts: list[int] = []
  for name in features:
    table, span = tables.features[name].table, tables.columns[name]
    start = len(columns)
    columns += range(span.start, span.stop)
    spans.append((start, len(columns)))
    shift = tables.first_rows[table] - first[table]
    shifts += [shift] * (len(columns) - start)
  one = tables.tables[names[0]]
  return Group(
    one.embedding_dim,
    one.dtype,
    one.optimizer,
    tuple(names),
    tuple(features),
    tuple(columns),
    tuple(spans),
    tuple(shifts),
    tuple(ranges[tables.features[name].table] for name in features),
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
      hint="give some by name, such as {'item': Table(1000, embedding_dim=16)}",
    )
  for name, table in tables.items():
    _check_table(f'Table {name!r}', table)
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


def _check_table(where: str, table: Table) -> None:
  _check_type(where, table, Table)
  for name in ('vocabulary_size', 'embedding_dim'):
    check_whole(getattr(table, name), 1, f'{where}, {name}', _COUNT)
  choose(dict.fromkeys(ROW_DTYPES), table.dtype, f'{where}, dtype')
  unknowns = dict.fromkeys(get_args(Unknown))
  choose(unknowns, table.unknown, f'{where}, unknown')
  if table.optimizer is not None:
    check_optimizer(table.optimizer, f'{where}, optimizer')


def _with_initializer(name: str, table: Table) -> Table:
  """Returns a checked table whose initializer can be hashed."""
  rows = tuple(dict.fromkeys((table.vocabulary_size, table.rows)))
  where = f'Table {name!r}, initializer'
  how = as_initializer(
    table.initializer, rows, table.embedding_dim, table.dtype, where
  )
  return table._replace(initializer=how)


def check_feature(
  where: str, feature: Feature, tables: Mapping[str, Table]
) -> None:
  """Checks the values of a feature of one of the tables.

  Raises:
    UserError: a value is invalid, or the feature's table does not exist.
  """
  _check_type(where, feature, Feature)
  choose(tables, feature.table, f'{where}, table')
  choose(dict.fromkeys(COMBINERS), feature.combiner, f'{where}, combiner')
  check_whole(feature.max_length, 1, f'{where}, max_length', _COUNT)


def _check_type(where: str, value: object, wanted: type) -> None:
  if not isinstance(value, wanted):
    raise UserError(
      f'it must be a {wanted.__name__}',
      got=repr(value),
      where=where,
      hint=f'make it with {wanted.__name__}(...)',
    )


def offsets(rows: Sequence[int]) -> np.ndarray:
  """Returns the first global row of each table, then N: i64[F + 1]."""
  return np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])


def row_dtype(num_rows: int) -> type[np.integer]:
  """Returns the smaller of i32 and i64 that can number `num_rows` rows."""
  return np.int32 if num_rows <= np.iinfo(np.int32).max else np.int64


def check_integers(lookups: np.ndarray, where: str) -> None:
  """Checks that lookups have an integer type.

  Raises:
    UserError: they have another type.
  """
  if lookups.dtype.kind not in 'iu':
    raise UserError(
      'lookups must be of an integer type',
      got=lookups.dtype,
      where=where,
      hint='number the rows of each table from 0 on',
    )
