"""The columns of a packed data set, and the form of each."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
import zlib

from slipstream_jax.errors import UserError
from slipstream_jax.formats.base import RawData
from slipstream_jax.packed.columns import Column, smallest_uint
from slipstream_jax.tables import Feature
from slipstream_jax.vocabulary.counted import Vocabulary

_FEATURE = ('table', 'pooling', 'max_length', 'weighted')
"""Names in a manifest of the fields of `Feature`, in their order."""


class TableColumns(NamedTuple):
  """Columns of one table."""

  frequency: Column
  """Uses of each row by the training examples."""
  vocabulary: Column
  """Raw ids of rows 1 to R - 1. With hashed ids, the row of each bucket. Of a
  given vocabulary, its known ids."""
  shared: Column | None = None
  """Rows of the last ids of a given vocabulary."""


class Given(NamedTuple):
  """A vocabulary that was given, not counted."""

  known: int
  """Ids that it knows."""
  shared: int
  """The last of them, which share rows."""
  hash_rows: int
  """Rows that unknown ids share, from row 1 on."""
  crc32: str
  """Checksum of ids and shared rows, 8 hex digits."""


class Layout(NamedTuple):
  """The facts about a data set that decide its columns; see `RawData`."""

  features: Mapping[str, Feature]
  dense_features: int
  labels: int
  label_dtype: str
  hash_rows: int | None
  """As in `prepare`."""
  vocabularies: Mapping[str, Given] | None = None
  """By table, if they were given."""

  def facts(self) -> dict[str, Any]:
    """Returns all fields but `hash_rows` as JSON."""
    features = [
      {'name': name, **dict(zip(_FEATURE, feature, strict=True))}
      for name, feature in self.features.items()
    ]
    facts = {**self._asdict(), 'features': features}
    del facts['hash_rows']
    return facts

  def example_columns(self, examples: int) -> tuple[Column, Column]:
    """Returns the columns of labels and dense features."""
    heads = (self.labels,) if self.labels else ()
    return (
      Column('labels', self.label_dtype, (examples, *heads)),
      Column('dense', 'float32', (examples, self.dense_features)),
    )

  def lookups(self, feature: str, rows: int, examples: int) -> Column:
    """Returns the column of a feature's local rows.

    R = `rows` of its table pads lists after their end.
    """
    return Column(feature, smallest_uint(rows), self._shape(feature, examples))

  def lookup_weights(self, examples: int) -> dict[str, Column]:
    """Returns the weights' column of each weighted feature, by its name."""
    return {
      name: Column(f'weights_{name}', 'float32', self._shape(name, examples))
      for name, feature in self.features.items()
      if feature.weighted
    }

  def of_table(self, table: str, rows: int) -> TableColumns:
    """Returns the columns of a table of R = `rows`."""
    shared = None
    if self.vocabularies is not None:
      words = self.vocabularies[table]
      vocabulary = Column(f'vocabulary_{table}', 'int64', (words.known,))
      shared = Column(f'shared_{table}', 'int32', (words.shared,))
    elif self.hash_rows is None:
      vocabulary = Column(f'vocabulary_{table}', 'int64', (rows - 1,))
    else:
      dtype = smallest_uint(rows - 1)
      vocabulary = Column(f'rank_{table}', dtype, (self.hash_rows,))
    return TableColumns(
      Column(f'frequency_{table}', 'uint32', (rows,)), vocabulary, shared
    )

  def columns(self, rows: Mapping[str, int], examples: int) -> list[Column]:
    """Returns all columns. `rows` has R of each table by its name."""
    columns = [*self.example_columns(examples)]
    tables = set()
    for name, feature in self.features.items():
      table = feature.table
      columns.append(self.lookups(name, rows[table], examples))
      if table not in tables:
        tables.add(table)
        of_table = self.of_table(table, rows[table])
        columns += [column for column in of_table if column is not None]
    return [*columns, *self.lookup_weights(examples).values()]

  def _shape(self, feature: str, examples: int) -> tuple[int, ...]:
    length = self.features[feature].max_length
    return (examples,) if length == 1 else (examples, length)


def layout_of(
  raw: RawData,
  hash_rows: int | None,
  vocabularies: Sequence[Vocabulary] | None = None,
) -> Layout:
  """Returns the layout of raw data.

  Args:
    raw: the raw data.
    hash_rows: as in `prepare`.
    vocabularies: one for each table, if they are given.

  Raises:
    UserError: two columns would have the same name.
  """
  given = None
  if vocabularies is not None:
    all_of = zip(raw.tables, vocabularies, strict=True)
    given = {name: _given(words) for name, words in all_of}
  layout = Layout(
    raw.features,
    raw.dense_features,
    raw.labels,
    raw.label_dtype,
    hash_rows,
    given,
  )
  columns = layout.columns(dict.fromkeys(raw.tables, 1), 0)
  names = [column.name for column in columns]
  twice = sorted({name for name in names if names.count(name) > 1})
  if twice:
    raise UserError(
      'features and tables need names that no other column has',
      got=', '.join(twice),
      where=raw.name,
      hint='give the feature another name',
    )
  return layout


def _given(words: Vocabulary) -> Given:
  shared = words.shared
  crc = zlib.crc32(shared.tobytes(), zlib.crc32(words.known.tobytes()))
  hash_rows = words.first_row - 1
  return Given(len(words.known), len(shared), hash_rows, f'{crc:08x}')


def layout_from(facts: Mapping[str, Any]) -> Layout:
  """Returns the layout that a manifest describes.

  Raises:
    AttributeError, KeyError, TypeError, ValueError: a fact is missing or
      invalid.
  """
  features = {
    feature['name']: Feature(*(feature[key] for key in _FEATURE))
    for feature in facts['features']
  }
  vocabularies = None
  if facts.get('vocabularies') is not None:  # older manifests lack it
    vocabularies = {
      name: Given(int(known), int(shared), int(hash_rows), str(crc))
      for name, (known, shared, hash_rows, crc) in facts['vocabularies'].items()
    }
  return Layout(
    features,
    int(facts['dense_features']),
    int(facts['labels']),
    str(facts['label_dtype']),
    facts['hash_rows'],
    vocabularies,
  )
