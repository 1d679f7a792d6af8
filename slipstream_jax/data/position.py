"""Where a source is: batches delivered, and a checksum of what they are of.

A count alone would continue any source anywhere: other inputs would be left
out, or trained twice, and nobody would know.
"""

from collections.abc import Iterable
import json
import zlib

import numpy as np

from slipstream_jax.errors import is_whole, UserError

_SAMPLED = 1 << 10  # inputs that tell one data set from another


def checksum(told: object, columns: Iterable[np.ndarray] = ()) -> int:
  """CRC-32 of a description and of 1,024 inputs' values, evenly spaced.

  Args:
    told: what else decides which inputs come when; JSON, or numpy's numbers.
    columns: arrays [n, ...] of the inputs.
  """
  crc = zlib.crc32(json.dumps(told, default=lambda x: x.item()).encode())
  for column in columns:
    form = f'{column.dtype.str} {column.shape}'.encode()
    last = len(column) - 1
    some = np.linspace(0, last, min(last + 1, _SAMPLED)).astype(np.int64)
    crc = zlib.crc32(column[some].tobytes(), zlib.crc32(form, crc))
  return crc


def delivered_of(state: dict[str, int], order: int, reads: str) -> int:
  """Batches that a state counts.

  Args:
    state: from some source's `get_state`.
    order: checksum of the source that is to continue.
    reads: what that source reads, for the error.

  Raises:
    UserError: the state is of other data or of another order, in which other
      inputs would be left.
  """
  delivered = state.get('delivered')
  if state.get('order') != order or not is_whole(delivered, 0):
    raise UserError(
      'a resumed run must read the same inputs in the same order',
      got=reads,
      where='config.data',
      mend='use the data, seed and batch size that the run was started with',
    )
  return int(state['delivered'])
