"""Host loops: counting raw ids, finding rows of buckets, and reading rows."""

from typing import no_type_check

import numpy as np

from slipstream_jax.formats.base import END, MISSING
from slipstream_jax.hashing import bucket, kernel, slot_of


@kernel
@no_type_check
def count_ids(
  ids: np.ndarray, first: int, table: np.ndarray, totals: np.ndarray
) -> int:
  """Adds i64 ids, from place `first` on, to their counts in the table.

  Args:
    ids: i64[n].
    first: place to start at.
    table: i64[slots, 2], pairs of ids and counts.
    totals: i64[3], in and out: unique ids in the table, ids that were
      `MISSING`, ids counted in all; `END` is none.

  Returns:
    n, or the place of the first id for which the table has grown too full.
  """
  most = len(table) * 5 // 8
  for i in range(first, len(ids)):
    if ids[i] == END:
      continue
    if ids[i] == MISSING:  # often the most frequent of all: no search for it
      totals[1] += 1
    else:
      slot = slot_of(table, ids[i])
      if table[slot, 1] == 0:
        if totals[0] == most:  # nothing is counted of it yet: it comes again
          return i
        table[slot, 0] = ids[i]
        totals[0] += 1
      table[slot, 1] += 1
    totals[2] += 1
  return len(ids)


@kernel
@no_type_check
def count_buckets(ids: np.ndarray, salt: np.uint64, counts: np.ndarray) -> None:
  """Adds i64 ids to u32 counts of their buckets; `END` is no id."""
  buckets = np.uint64(len(counts))
  for i in range(len(ids)):
    if ids[i] != END:
      counts[bucket(np.uint64(ids[i]), salt, buckets)] += 1


@kernel
@no_type_check
def find_bucket_rows(
  ids: np.ndarray,
  salt: np.uint64,
  ranks: np.ndarray,
  end: int,
  rows: np.ndarray,
) -> int:
  """Rows of i64[n] ids by their buckets' rows, u32; returns how many are 0."""
  buckets, unknown = np.uint64(len(ranks)), 0
  for i in range(len(ids)):
    if ids[i] == END:
      rows[i] = end
      continue
    rows[i] = ranks[bucket(np.uint64(ids[i]), salt, buckets)]
    unknown += rows[i] == 0
  return unknown
