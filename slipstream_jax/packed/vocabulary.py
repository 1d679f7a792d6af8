"""The vocabulary of a packed data set: maps other ids as it mapped its own.

For scoring later, or for evaluating on other files: an id gets the row that
it had in training, and one that training did not see gets row 0.
"""

import numpy as np

from slipstream_jax.data.vocabulary import Counted, RankedBuckets
from slipstream_jax.files import Path
from slipstream_jax.packed.columns import open_packed
from slipstream_jax.packed.reader import form_of


def packed_vocabulary(folder: Path) -> Counted | RankedBuckets:
  """The vocabulary that `prepare` saved with a data set.

  `vocabulary.map(columns)` takes columns of raw ids i64, one per table, as the
  format's `RawData` gives them, and returns local rows i32[n, F].

  Raises:
    UserError: the folder is not finished, or a column of its vocabulary is
      missing or not as it was written.
  """
  packed = open_packed(folder)
  columns = tuple(
    np.asarray(packed.whole(table.vocabulary))
    for table in form_of(packed).of_tables
  )
  hashed = packed.manifest.get('hash_rows') is not None
  return RankedBuckets(columns) if hashed else Counted(columns)
