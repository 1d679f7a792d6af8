"""The vocabulary of a packed data set: maps other ids as it mapped its own.

For scoring later, or for evaluating on other files: an id gets the row that
it had in training, and one that training did not see gets row 0.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxtyping import Int, UInt
import numpy as np

from slipstream_jax.data.vocabulary import Counted, Hashed, Ids
from slipstream_jax.errors import UserError
from slipstream_jax.packed.columns import open_packed, Path
from slipstream_jax.types import Lookups


class Ranked(NamedTuple):
  """Rows of hashed ids, the most frequent buckets first."""

  ranks: tuple[UInt[np.ndarray, ' buckets'], ...]
  """Row of each bucket of each table; 0 where training used none."""

  @property
  def rows(self) -> tuple[int, ...]:
    """R of each table, with the row of unknown ids."""
    return tuple(int(ranks.max(initial=0)) + 1 for ranks in self.ranks)

  def map(self, columns: Iterable[Ids]) -> Lookups:
    """Rows of ids, one column of ids per table; i32[n, F], local to tables."""
    buckets = Hashed(len(self.ranks), len(self.ranks[0])).map(columns)
    pairs = zip(self.ranks, buckets.T, strict=True)
    rows: list[Int[np.ndarray, ' n']] = [
      ranks[at].astype(np.int32) for ranks, at in pairs
    ]
    return np.stack(rows, axis=1)


def packed_vocabulary(folder: Path) -> Counted | Ranked:
  """The vocabulary that `experiments.prepare` saved with a data set.

  `vocabulary.map(columns)` takes columns of raw ids i64, one per table, as the
  format's `RawData` gives them, and returns local rows i32[n, F].

  Raises:
    UserError: the folder is not finished, or its manifest names no kind of
      vocabulary.
  """
  packed = open_packed(folder)
  facts: dict[str, Any] = packed.manifest
  names = [table['name'] for table in facts['tables']]
  kind = facts.get('vocabulary', {}).get('kind')
  if kind not in ('counted', 'hashed'):
    raise UserError(
      "a packed vocabulary must be 'counted' or 'hashed'",
      got=repr(kind),
      where=str(packed.folder),
      mend='prepare the data set with experiments.prepare',
    )
  word = 'vocabulary' if kind == 'counted' else 'rank'
  columns = tuple(
    np.asarray(packed.columns[f'{word}_{name}']) for name in names
  )
  return Counted(columns) if kind == 'counted' else Ranked(columns)
