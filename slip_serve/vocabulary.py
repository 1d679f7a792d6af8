"""Raw ids to rows, as they were mapped in training."""

import hashlib
import os
import pathlib
from typing import NamedTuple

import numpy as np

from slip_serve.errors import ServeError
from slip_serve.layout import Layout, Table, Vocabulary

MISSING = -1
"""Stands for a missing id."""
END = -2
"""Fills up a list of ids that has ended."""


class Words(NamedTuple):
  """The vocabulary of one table."""

  kind: str
  number: int
  """Of the table."""
  rows: int
  """Of the table."""
  entries: int
  """As of `Vocabulary`."""
  known: np.ndarray
  """Of 'counted', the ids i64[n], rising."""
  ranks: np.ndarray
  """Of 'counted' their rows, of 'ranked' those of buckets; i32."""


def open_words(folder: str | os.PathLike[str], layout: Layout) -> list[Words]:
  """The vocabularies of all tables, mapped into memory.

  Raises:
    ServeError: a file is not as long as its vocabulary.
  """
  pairs = zip(layout.vocabulary, layout.tables, strict=True)
  return [
    _open(pathlib.Path(folder), number, *pair)
    for number, pair in enumerate(pairs)
  ]


def _open(
  folder: pathlib.Path, number: int, of: Vocabulary, table: Table
) -> Words:
  known, ranks = np.empty(0, np.int64), np.empty(0, np.int32)
  sizes = {'counted': 12, 'ranked': 4}
  if of.kind in sizes:
    path = folder / of.file
    wanted = sizes[of.kind] * of.entries
    if not of.file or path.stat().st_size != wanted:
      raise ServeError(
        f'the vocabulary of {of.entries} ids must have {wanted} bytes',
        got=path.stat().st_size,
        where=str(path),
        hint='export the run again',
      )
    if wanted:
      whole = np.memmap(path, np.uint8, 'r')
      split = wanted - 4 * of.entries
      known, ranks = whole[:split].view('<i8'), whole[split:].view('<i4')
  return Words(of.kind, number, table.rows, of.entries, known, ranks)


def rows_of(words: Words, ids: np.ndarray) -> np.ndarray:
  """Rows i64[n] of raw ids i64[n] of one table.

  Ids that training did not know have the row that it gave to such ids, 0.

  Raises:
    ServeError: ids are rows, and one is none.
  """
  if words.kind == 'hashed':
    return _buckets(words.number, ids, words.entries)
  if words.kind == 'ranked':
    if not words.entries:
      return np.zeros(len(ids), np.int64)
    buckets = _buckets(words.number, ids, words.entries)
    return words.ranks[buckets].astype(np.int64)
  if words.kind == 'counted':
    if not words.entries:
      return np.zeros(len(ids), np.int64)
    at = np.minimum(np.searchsorted(words.known, ids), words.entries - 1)
    return np.where(words.known[at] == ids, words.ranks[at], 0).astype(np.int64)
  bad = (ids < 0) | (ids >= words.rows)
  if bad.any():
    raise ServeError(
      f'ids of table {words.number} must be in [0, {words.rows})',
      got=int(ids[bad][0]),
      where='ids',
      hint='map unknown ids to a row of the table first',
    )
  return ids.astype(np.int64)


def raw_id(value: int | str | None) -> int:
  """The raw id of what a table of one's own has, as `slip.pack` numbers it.

  A whole number is its own id, but a negative one v stands as v - 2; text that
  is written as such a number has the same id, any other one a hash. None and ''
  are missing.
  """
  text = '' if value is None else str(value)
  if not text:
    return MISSING
  try:
    number = int(text)
    least = np.iinfo(np.int64).min + 2
    if str(number) == text and least <= number <= np.iinfo(np.int64).max:
      return number if number >= 0 else number - 2
  except ValueError:
    pass
  digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
  return int.from_bytes(digest, 'little') >> 1


def _buckets(table: int, ids: np.ndarray, count: int) -> np.ndarray:
  salt = _mix(np.array([table + 1], np.uint64))
  hashed = _mix(ids.astype(np.uint64) ^ salt) % np.uint64(count)
  return hashed.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
  """Finaliser of splitmix64 (Steele et al., 2014), u64."""
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))
