"""Samples a source to find which of its rows are popular.

In a log sorted by time, popular rows change from its beginning to its end. So a
sample is taken in blocks that are spread over a whole pass, if it can be.
"""

from collections.abc import Iterable, Iterator
import contextlib
import itertools
from typing import no_type_check

from jaxtyping import Int
import numba
import numpy as np

from slipstream_jax.data.numbered import NumberedBatches
from slipstream_jax.data.prefetch import OrderedResults
from slipstream_jax.data.source import BatchSource
from slipstream_jax.errors import UserError
from slipstream_jax.types import Batch, Lookups

BLOCKS = 32
"""Number of blocks in a sample, each of equally many successive batches."""


def spread(
  source: BatchSource, examples: int, batches: int | None = None
) -> Iterator[Batch]:
  """Yields batches of about `examples` examples, at most those of one pass.

  Args:
    source: its position changes. It is read in order if it cannot be set to a
      batch, or if its vocabularies grow.
    examples: number to read, padding included. At least a batch is read.
    batches: number of batches in one pass. None: the source's.
  """
  if batches is None:
    batches = source.batches_per_epoch
  first = next(source, None)
  if first is None:
    return
  yield first
  wanted = max(1, -(-examples // len(first.weights)))
  position = source.get_state()
  jumps = isinstance(source, NumberedBatches) and 'vocabularies' not in position
  if batches is None or batches <= wanted or not jumps:
    most = wanted if batches is None else min(batches, wanted)
    yield from itertools.islice(source, most - 1)
    return
  # The first block begins where the source was, with the batch just read.
  blocks, begun = min(BLOCKS, wanted), position['delivered'] - 1
  for block in range(blocks):
    before, end = (i * wanted // blocks for i in (block, block + 1))
    left_out = block * (batches - wanted) // blocks
    read = block == 0  # its first batch
    start = begun + before + left_out + read
    source.set_state({**position, 'delivered': start})
    yield from itertools.islice(source, end - before - read)


def row_uses(
  profile: Iterable[Lookups], num_rows: int
) -> Int[np.ndarray, ' N']:
  """Returns how often each row is looked up, i32[N].

  Another thread makes the examples meanwhile, and has ended on return.

  Args:
    profile: global rows that sampled examples look up, in parts of any shape.
      -1 is padding.
    num_rows: N, rows of all tables.

  Raises:
    UserError: a lookup of a row that no table has.
  """
  counts = np.zeros(num_rows, np.int32)
  parts = OrderedResults(iter(profile), np.ascontiguousarray, 2)
  with contextlib.closing(parts):
    for lookups in parts:
      flat = lookups.reshape(-1)
      bad = _count(flat, counts)
      if bad >= 0:
        raise UserError(
          f'a profile must look up global rows in [0, {num_rows}) or -1',
          got=int(flat[bad]),
          where='row_uses, profile',
          hint='make them with TableSet.lookups(ids)',
        )
  return counts


@numba.njit(cache=True, nogil=True, boundscheck=False)
@no_type_check
def _count(lookups: np.ndarray, counts: np.ndarray) -> int:
  """Adds the uses of each row to the counts i32[N].

  Returns -1, or the position of the first lookup of a row that no table has.
  """
  for i in range(len(lookups)):
    row = lookups[i]
    if row >= len(counts):
      return i
    if row >= 0:
      counts[row] += 1
  return -1
