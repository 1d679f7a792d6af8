"""Examples that tell what a source is like: which of its rows are popular.

The first ones would do if examples came in any order. A log comes by time, and
what is popular changes: so where a source can be set to any of its batches,
those that are read lie in blocks all over a pass.
"""

from collections.abc import Iterable, Iterator
import contextlib
import itertools

from jaxtyping import Int
import numpy as np

from slipstream_jax.data import profile_kernels as kernels
from slipstream_jax.data.in_order import InOrder
from slipstream_jax.data.numbered import Numbered
from slipstream_jax.data.source import BatchSource
from slipstream_jax.errors import UserError
from slipstream_jax.types import Batch, Lookups

BLOCKS = 32
"""Places of a pass that are read, of as many batches in a row each."""


def spread(
  source: BatchSource, examples: int, batches: int | None = None
) -> Iterator[Batch]:
  """Batches of about so many examples; all of one pass, if it has no more.

  Args:
    source: moves on, but in its own order where it cannot be set to a batch.
    examples: to read, padding included, but at least a batch.
    batches: of one pass; None: as many as the source says, if it does.
  """
  if batches is None:
    batches = source.batches_per_epoch
  first = next(source, None)
  if first is None:
    return
  yield first
  wanted = max(1, -(-examples // len(first.weights)))
  position = source.get_state()
  # A vocabulary grows in the order of the batches.
  jumps = isinstance(source, Numbered) and 'vocabularies' not in position
  if batches is None or batches <= wanted or not jumps:
    most = wanted if batches is None else min(batches, wanted)
    yield from itertools.islice(source, most - 1)
    return
  # The first block is where the source was, after the batch that was read.
  many = min(BLOCKS, wanted)
  begun = position['delivered'] - 1
  for block in range(many):
    before, end = (i * wanted // many for i in (block, block + 1))
    left_out = block * (batches - wanted) // many
    read = block == 0  # its first batch
    start = begun + before + left_out + read
    source.set_state({**position, 'delivered': start})
    yield from itertools.islice(source, end - before - read)


def row_uses(
  profile: Iterable[Lookups], num_rows: int
) -> Int[np.ndarray, ' N']:
  """`access_counts`, in a tenth of its time: i32[N].

  Examples are made in another thread meanwhile; it has ended on return.

  Args:
    profile: global rows that sampled examples look up, in parts of any shape;
      -1 is padding.
    num_rows: N, rows of all tables.

  Raises:
    UserError: a lookup of a row that no table has.
  """
  counts = np.zeros(num_rows, np.int32)
  parts = InOrder(iter(profile), np.ascontiguousarray, 2)
  with contextlib.closing(parts):
    for lookups in parts:
      flat = lookups.reshape(-1)
      bad = kernels.count(flat, counts)
      if bad >= 0:
        raise UserError(
          f'a profile must look up global rows in [0, {num_rows}) or -1',
          got=int(flat[bad]),
          where='row_uses, profile',
          hint='make them with TableSet.lookups(ids)',
        )
  return counts
