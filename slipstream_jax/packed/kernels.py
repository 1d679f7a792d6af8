"""Host loops: counting raw ids, finding their rows, and reading these.

A table of ids is open addressing with linear probing in i64[capacity, 2]: an
id and a number, 0 where the place is free. Both lie in one cache line, which
is most of what a lookup costs.
"""

from typing import no_type_check

import numpy as np

from slipstream_jax.data.vocabulary import bucket
from slipstream_jax.formats.base import END, MISSING
from slipstream_jax.hashing import kernel, mix


@kernel
@no_type_check
def _place(table: np.ndarray, wanted: int) -> int:
  """Where an id is, or would be."""
  # It ends, as no table is ever full: 5/8 while counting, 2/3 afterwards.
  mask = np.uint64(len(table) - 1)
  at = np.int64(mix(np.uint64(wanted)) & mask)
  while table[at, 1] != 0 and table[at, 0] != wanted:
    at = (at + 1) & np.int64(mask)
  return at


@kernel
@no_type_check
def count_ids(
  ids: np.ndarray, first: int, table: np.ndarray, totals: np.ndarray
) -> int:
  """Adds i64 ids, from place `first` on, to their counts in the table.

  Args:
    ids: i64[n].
    first: place to start at.
    table: i64[capacity, 2], of ids and counts; capacity a power of two.
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
      at = _place(table, ids[i])
      if table[at, 1] == 0:
        if totals[0] == most:  # nothing is counted of it yet: it comes again
          return i
        table[at, 0] = ids[i]
        totals[0] += 1
      table[at, 1] += 1
    totals[2] += 1
  return len(ids)


@kernel
@no_type_check
def grow(table: np.ndarray, larger: np.ndarray) -> None:
  """Moves what a table holds into a larger one, which is all zeros."""
  for i in range(len(table)):
    if table[i, 1] != 0:
      at = _place(larger, table[i, 0])
      larger[at, 0], larger[at, 1] = table[i, 0], table[i, 1]


@kernel
@no_type_check
def number_ids(ids: np.ndarray, table: np.ndarray) -> None:
  """Fills a table of zeros with i64 ids, numbered from 1."""
  # The most frequent first: they lie where their search begins, and what they
  # push on are rare ones.
  for i in range(len(ids)):
    if ids[i] != MISSING:
      at = _place(table, ids[i])
      table[at, 0], table[at, 1] = ids[i], i + 1


@kernel
@no_type_check
def find_rows(
  ids: np.ndarray, table: np.ndarray, missing: int, end: int, rows: np.ndarray
) -> int:
  """Rows of i64[n] ids; 0 for those not in the table.

  Args:
    ids: i64[n].
    table: i64[capacity, 2], of ids and rows.
    missing: row of `MISSING`.
    end: what stands for `END`.
    rows: out, u32[n].

  Returns:
    How many rows are 0.
  """
  unknown = 0
  for i in range(len(ids)):
    if ids[i] == END:
      rows[i] = end
      continue
    row = missing if ids[i] == MISSING else table[_place(table, ids[i]), 1]
    rows[i] = row
    unknown += row == 0
  return unknown


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
