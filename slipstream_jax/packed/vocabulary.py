"""The vocabulary of a packed data set: maps other ids as it mapped its own.

For scoring later, or for evaluating on other files: an id gets the row that
it had in training, and one that training did not see gets row 0.
"""

from collections.abc import Iterable
from typing import NamedTuple

from jaxtyping import UInt
import numpy as np

from slipstream_jax.data.vocabulary import Counted, Hashed, Ids
from slipstream_jax.files import Path
from slipstream_jax.packed.columns import open_packed
from slipstream_jax.packed.reader import form_of
from slipstream_jax.types import Lookups


class RankedBuckets(NamedTuple):
  """Rows of hashed ids, the most frequent buckets first."""

  ranks: tuple[UInt[np.ndarray, ' buckets'], ...]
  """Row of each bucket of each table; 0 where training used none."""

  @property
  def rows(self) -> tuple[int, ...]:
    """R of each table, with the row of unknown ids."""
    return tuple(int(ranks.max(initial=0)) + 1 for ranks in self.ranks)

  def rows_of(self, table: int, ids: Ids) -> Ids:
    """Rows of ids of one table, by its number; i32[n]."""
    ranks = self.ranks[table]
    buckets = Hashed(len(self.ranks), len(ranks)).rows_of(table, ids)
    return ranks[buckets].astype(np.int32)

  def map(self, columns: Iterable[Ids]) -> Lookups:
    """Rows of ids, one column of ids per table; i32[n, F], local to tables."""
    rows = [self.rows_of(*column) for column in enumerate(columns)]
    return np.stack(rows, axis=1)


def packed_vocabulary(folder: Path) -> Counted | RankedBuckets:
  """The vocabulary that `prepare` saved with a data set.

  `vocabulary.map(columns)` takes columns of raw ids i64, one per table, as the
  format's `RawData` gives them, and returns local rows i32[n, F].

  Raises:
    UserError: the folder is not finished, or lacks the columns of a
      vocabulary.
  """
  packed = open_packed(folder)
  columns = tuple(
    np.asarray(packed.column(table.vocabulary))
    for table in form_of(packed).of_tables
  )
  hashed = packed.manifest.get('hash_rows') is not None
  return RankedBuckets(columns) if hashed else Counted(columns)
