"""Host loops: counting raw ids, finding rows of buckets, and reading rows."""

from typing import no_type_check

import numpy as np

from slipstream_jax.formats.base import END, MISSING
from slipstream_jax.hashing import bucket, kernel, slot_of

_TILE = 64  # examples whose rows stay in the first cache while columns go by
LABELS, FIRST_FEATURE = 0, 2
"""Places in `Form.columns`."""


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


@kernel
@no_type_check
def scatter(
  u8: np.ndarray,
  u16: np.ndarray,
  u32: np.ndarray,
  u64: np.ndarray,
  labels: np.ndarray,
  dense: np.ndarray,
  widths: np.ndarray,
  begins: np.ndarray,
  rows: np.ndarray,
  firsts: np.ndarray,
  spans: np.ndarray,
  places: np.ndarray,
  out_labels: np.ndarray,
  out_dense: np.ndarray,
  out_lookups: np.ndarray,
) -> int:
  """Puts a run's examples to their places; gives a column that is bad, or -1.

  Places are random. A column at a time would fetch their cache lines anew for
  each column; a few examples at a time, they stay in the first cache.
  """
  for begin in range(0, len(places), _TILE):
    end = min(begin + _TILE, len(places))
    good = True  # of all, so that one test is enough for a tile
    for i in range(begin, end):
      for k in range(labels.shape[1]):
        good &= (labels[i, k] >= 0) & (labels[i, k] <= 1)
        out_labels[places[i], k] = labels[i, k]
      for k in range(dense.shape[1]):
        out_dense[places[i], k] = dense[i, k]
    if not good:
      return LABELS
    for f in range(len(widths)):
      part = (begins[f], begin, end, rows[f], firsts[f], places, spans[f])
      if widths[f] == 1:
        largest = _lookups(u8, part, out_lookups)
      elif widths[f] == 2:
        largest = _lookups(u16, part, out_lookups)
      elif widths[f] == 4:
        largest = _lookups(u32, part, out_lookups)
      else:
        largest = _lookups(u64, part, out_lookups)
      if largest > np.uint64(rows[f]):  # R itself is padding
        return FIRST_FEATURE + f
  return -1


@kernel
@no_type_check
def _lookups(values: np.ndarray, part: tuple, out: np.ndarray) -> np.uint64:
  """Local to global rows of one feature; -1 for padding. Gives the largest."""
  start, begin, end, rows, first, places, span = part
  column, length, largest = span[0], span[1] - span[0], np.uint64(0)
  if length == 1:  # a loop of one would take half as long again
    for i in range(begin, end):
      row = np.int64(values[start + i])
      # Unsigned again: what is too large for i64 must not look small.
      largest = max(largest, np.uint64(row))
      out[places[i], column] = -1 if row == rows else first + row
    return largest
  for i in range(begin, end):
    for k in range(length):
      row = np.int64(values[start + i * length + k])
      largest = max(largest, np.uint64(row))
      out[places[i], column + k] = -1 if row == rows else first + row
  return largest
