"""Functions shared by stores on a disk: records of any rows, whole tables."""

import numpy as np

from slipstream_jax.store.base import FirstRows, pieces_of, RowStore
from slipstream_jax.store.records import Layout, Records
from slipstream_jax.store.scratch import ScratchFile
from slipstream_jax.types import RowBlock, RowIds


def records_of(
  file: ScratchFile, layout: Layout, first: FirstRows, rows: RowIds
) -> Records:
  """Returns records of rows in any order, from the file or of first values.

  Raises:
    OSError: the disk failed.
  """
  written = file.has(rows)
  records = np.empty((len(rows), layout.width), np.uint8)
  at = np.flatnonzero(written)
  if len(at):
    file.read(rows[at], records, at)
  fresh = np.flatnonzero(~written)
  if len(fresh):
    layout.put(records, fresh, first.rows(rows[fresh]))
  return records


def table_of(store: RowStore, layout: Layout) -> RowBlock:
  """Returns all rows of a store in new arrays [N, ...]."""
  table = layout.empty(store.num_rows)
  for rows in pieces_of(store.num_rows, store.row_bytes):
    block = store.gather(rows, len(rows))
    for leaf, values in zip(
      (table.rows, *table.state), (block.rows, *block.state), strict=True
    ):
      leaf[rows[0] : rows[-1] + 1] = values
  return table


def fill(store: RowStore, table: RowBlock) -> None:
  """Writes a whole host table [N, ...] to a store."""
  for rows in pieces_of(store.num_rows, store.row_bytes):
    at = slice(rows[0], rows[-1] + 1)
    state = tuple(leaf[at] for leaf in table.state)
    store.scatter(np.asarray(rows), RowBlock(table.rows[at], state))
