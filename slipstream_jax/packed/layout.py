"""Which columns a packed data set has, and what each of them looks like."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from slipstream_jax.errors import UserError
from slipstream_jax.formats.base import RawData
from slipstream_jax.packed.columns import Column, smallest_uint
from slipstream_jax.tables import Feature


class _Nothing(ValueError):
  """A manifest that tells of none; the message says of what."""


@dataclasses.dataclass(frozen=True)
class TableColumns:
  """Columns of one table."""

  frequency: Column
  """Uses of each row by the examples to train on."""
  vocabulary: Column
  """Raw ids of rows 1 to R - 1; of hashed ids, the row of each bucket."""


@dataclasses.dataclass(frozen=True)
class Layout:
  """What of a data set decides the columns of its examples."""

  features: Mapping[str, Feature]
  dense_features: int
  labels: int
  """T of labels [n, T]; 0 where they are [n]."""
  label_dtype: str
  hash_rows: int | None
  """As in `prepare`."""

  def facts(self) -> dict[str, Any]:
    """The same as JSON, but for `hash_rows`."""
    return {
      'features': [
        {'name': name, **feature._asdict()}
        for name, feature in self.features.items()
      ],
      'dense_features': self.dense_features,
      'labels': self.labels,
      'label_dtype': self.label_dtype,
    }

  def example_columns(self, examples: int) -> tuple[Column, Column]:
    """Labels and dense features."""
    heads = (self.labels,) if self.labels else ()
    return (
      Column('labels', self.label_dtype, (examples, *heads)),
      Column('dense', 'float32', (examples, self.dense_features)),
    )

  def lookups(self, feature: str, rows: int, examples: int) -> Column:
    """Rows of a feature from 0 on; R = `rows` stands where a list has ended."""
    shape = self._shape(feature, examples)
    return Column(feature, smallest_uint(rows), shape)  # R itself is padding

  def lookup_weights(self, examples: int) -> dict[str, Column]:
    """Weights of the lookups of each weighted feature, by its name."""
    return {
      name: Column(f'weights_{name}', 'float32', self._shape(name, examples))
      for name, feature in self.features.items()
      if feature.weighted
    }

  def of_table(self, table: str, rows: int) -> TableColumns:
    """Columns of a table of R = `rows`."""
    if self.hash_rows is None:
      vocabulary = Column(f'vocabulary_{table}', 'int64', (rows - 1,))
    else:
      dtype = smallest_uint(rows - 1)
      vocabulary = Column(f'rank_{table}', dtype, (self.hash_rows,))
    frequency = Column(f'frequency_{table}', 'uint32', (rows,))
    return TableColumns(frequency, vocabulary)

  def columns(self, rows: Mapping[str, int], examples: int) -> list[Column]:
    """All of them; `rows` has R of each table, by its name."""
    columns = [*self.example_columns(examples)]
    written = set()
    for name, feature in self.features.items():
      table = feature.table
      columns.append(self.lookups(name, rows[table], examples))
      if table not in written:
        written.add(table)
        of_table = self.of_table(table, rows[table])
        columns += [of_table.frequency, of_table.vocabulary]
    return [*columns, *self.lookup_weights(examples).values()]

  def _shape(self, feature: str, examples: int) -> tuple[int, ...]:
    length = self.features[feature].max_length
    return (examples,) if length == 1 else (examples, length)


def layout_of(raw: RawData, hash_rows: int | None) -> Layout:
  """The layout of raw data.

  Raises:
    UserError: two columns would have one name.
  """
  layout = Layout(
    raw.features, raw.dense_features, raw.labels, raw.label_dtype, hash_rows
  )
  names = [
    column.name for column in layout.columns(dict.fromkeys(raw.tables, 1), 0)
  ]
  twice = sorted({name for name in names if names.count(name) > 1})
  if twice:
    raise UserError(
      'features and tables need names that no other column has',
      got=', '.join(twice),
      where=raw.name,
      hint='give the feature another name',
    )
  return layout


def layout_from(facts: Mapping[str, Any]) -> Layout:
  """The layout that a manifest tells of.

  Raises:
    KeyError, TypeError, ValueError: it does not, or of no feature by name.
  """
  features = {
    feature['name']: Feature(*(feature[key] for key in Feature._fields))
    for feature in facts['features']
  }
  if not features or not all(isinstance(name, str) for name in features):
    raise _Nothing(f'the features {[*features]!r:.100}')
  return Layout(
    features,
    int(facts['dense_features']),
    int(facts['labels']),
    str(facts['label_dtype']),
    facts['hash_rows'],
  )
