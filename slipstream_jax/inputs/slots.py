"""Where the ids of each feature belong in the global row space."""

from typing import NamedTuple

import numpy as np

from slipstream_jax.tables import row_dtype, TableSet


class Slot(NamedTuple):
  """Where the ids of a feature belong."""

  name: str
  table: str
  size: int
  """Ids that the table has rows for."""
  first: int
  """The table's first global row."""
  unknown: int
  """Global row of all other ids; -1: they are errors."""
  column: int
  """Of the lookups [B, K], the first of this feature."""
  length: int
  """L, columns of this feature."""
  weighted: bool
  """Whether its lookups carry weights."""
  dtype: np.dtype
  """Of global rows."""


def slots(tables: TableSet) -> tuple[Slot, ...]:
  """One per feature, in their order."""
  dtype = np.dtype(row_dtype(tables.num_rows))
  result = []
  for name, feature in tables.features.items():
    table, first = (
      tables.tables[feature.table],
      tables.first_rows[feature.table],
    )
    result.append(
      Slot(
        name,
        feature.table,
        table.vocabulary_size,
        first,
        first + table.vocabulary_size if table.unknown == 'row' else -1,
        tables.columns[name].start,
        feature.max_length,
        feature.weighted,
        dtype,
      )
    )
  return tuple(result)
