"""Vocabularies whose rows are hashes of ids: several ids may share a row."""

from typing import Any, NamedTuple

from jaxtyping import Int, Integer, UInt
import numpy as np

from slipstream_jax.columns.ids import raw_ids, RawIds
from slipstream_jax.hashing import bucket, salt
from slipstream_jax.tables import row_dtype
from slipstream_jax.vocabulary.state import ids_at, NO_IDS


class HashVocabulary(NamedTuple):
  """Gives each id the row of its hash. Needs no pass over the data.

  It has no row for unknown ids. Missing ids (None) get row 0.
  """

  size: int
  """R, rows of the table."""
  table: int
  """Number of the table from 0 on. Tables have different hashes."""

  def rows(self, ids: Any) -> Int[np.ndarray, '...']:
    """Returns the rows of ids, as in `TableVocabulary`."""
    raw = raw_ids(ids, 'Hashed.rows, ids')
    rows = _buckets(raw, self.table, self.size)
    return raw.spread(rows.astype(row_dtype(self.size)))

  def ids(self, rows: Any) -> np.ndarray:
    """Returns None for each row, because no row belongs to a single id."""
    return ids_at(rows, NO_IDS.bits, 0, self.size, 'Hashed.ids, rows')

  def get_state(self) -> dict[str, Any]:
    """Returns size and table."""
    return {'what': 'Hashed', **self._asdict()}


class RankedHashVocabulary(NamedTuple):
  """Gives rows to buckets of hashed ids, the most frequent bucket first.

  Row 0 is for missing ids and for buckets that training did not use.
  """

  ranks: UInt[np.ndarray, ' buckets']
  """Row of each bucket, 0 where training used none."""
  table: int
  """As in `HashVocabulary`."""

  @property
  def size(self) -> int:
    """R, rows of the table."""
    return int(self.ranks.max(initial=0)) + 1

  def rows(self, ids: Any) -> Int[np.ndarray, '...']:
    """Returns the rows of ids, i32, as in `TableVocabulary`."""
    raw = raw_ids(ids, 'Ranked.rows, ids')
    buckets = _buckets(raw, self.table, len(self.ranks))
    return raw.spread(self.ranks[buckets].astype(np.int32))

  def ids(self, rows: Any) -> np.ndarray:
    """Returns None for each row, because no row belongs to a single id."""
    return ids_at(rows, NO_IDS.bits, 0, self.size, 'Ranked.ids, rows')

  def get_state(self) -> dict[str, Any]:
    """Returns ranks and table."""
    return {'what': 'Ranked', **self._asdict()}


def _buckets(
  raw: RawIds, table: int, buckets: int
) -> Integer[np.ndarray, ' n']:
  """Returns the bucket of each id in [0, buckets), u64."""
  return bucket(raw.bits.view(np.uint64), salt(table), np.uint64(buckets))
