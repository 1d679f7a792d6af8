"""Finds the rows of ids whose vectors a user gives.

An id is as the source has it: a raw id where the table has a vocabulary, else
the number of a row. Only an id with a row of its own can be given a vector.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Int
import numpy as np

from slipstream_jax.columns.ids import packed_ids, raw_ids
from slipstream_jax.data.source import BatchSource
from slipstream_jax.errors import UserError
from slipstream_jax.initializers import VectorsById, write_rounded
from slipstream_jax.inputs.arrays import PackedExamples, UnboundExamples
from slipstream_jax.tables import as_array, TableSet
from slipstream_jax.training.evaluate import frozen_vocabularies
from slipstream_jax.training.trainer_parts import GivenVectors
from slipstream_jax.types import RowIds
from slipstream_jax.vocabulary.counted import Vocabulary
from slipstream_jax.vocabulary.growing import GrowingVocabulary, Position

Unbound = UnboundExamples | BatchSource
Grown = Mapping[str, Position]
"""By table, its growing vocabulary as trained."""


def given_vectors(
  tables: TableSet, source: Unbound | None
) -> dict[str, GivenVectors]:
  """Returns the initial rows of the tables with a mapping from ids.

  Ids without a row are left out. Those of a growing vocabulary get their vector
  with their row.

  Args:
    tables: all tables.
    source: says which id has which row. None: no row gets its vector, as a
      checkpoint has them all.

  Raises:
    UserError: an id cannot have a row, none has one, or the table's vocabulary
      is of another kind than `slip.Vocabulary`.
  """
  given: dict[str, GivenVectors] = {}
  for name, table in tables.tables.items():
    how = table.initializer
    if not isinstance(how, VectorsById) or source is None:
      continue
    words = _words_of(source, tables, name, how.where, None)
    grows = isinstance(words, GrowingVocabulary)
    words = words.frozen() if grows else words
    rows = _rows_of(how.ids, words, source, table.rows, how.where)
    at = np.flatnonzero(rows >= 0)
    if len(rows) and not len(at) and not grows:
      raise UserError(
        'an id of the mapping must be one of the vocabulary',
        got=f'none of {len(rows)}, such as {how.ids[0]!r}',
        where=how.where,
        hint='give ids as the source has them',
      )
    _check_unique(rows[at], how.where)
    values = np.empty((len(at), table.embedding_dim), table.dtype)
    write_rounded(how.vectors[at], values, how.where)
    given[name] = rows[at], values
  return given


def vectors_for(
  tables: TableSet,
  table: str,
  ids: Any,
  values: Any,
  source: Unbound,
  grown: Grown,
) -> GivenVectors:
  """Returns the rows that a user sets, and their values.

  Arguments are those of `Trainer.set_rows`. `grown` has the vocabularies as
  trained.

  Raises:
    UserError: an id has no row of its own, ids repeat, or the values do not
      fit.
  """
  of, where = tables.tables[table], 'Trainer.set_rows, ids'
  words = _words_of(source, tables, table, where, grown)
  rows = _rows_of(ids, words, source, of.rows, where)
  if len(missing := np.flatnonzero(rows < 0)):
    raise UserError(
      'each id must have a row of its own to be set',
      got=f'{_at(ids, int(missing[0]))!r}',
      where=where,
      hint='give ids that the vocabulary of the table knows',
    )
  _check_unique(rows, where)
  where = 'Trainer.set_rows, values'
  given, shape = as_array(values, where), (len(rows), of.embedding_dim)
  if given.shape != shape or given.dtype.kind not in 'fiuV':
    raise UserError(
      f'the values of rows must be {list(shape)}, of real numbers',
      got=f'{given.dtype}{list(given.shape)}',
      where=where,
      hint='give one vector per id',
    )
  out = np.empty(shape, of.dtype)
  write_rounded(given, out, where)
  return rows, out


def _words_of(
  source: Unbound, tables: TableSet, table: str, where: str, grown: Grown | None
) -> Any:
  """Returns the vocabulary of a table, or None if ids are numbers of rows.

  A growing one is as trained, if `grown` is given.
  """
  if isinstance(source, PackedExamples):
    words = source.dataset.vocabulary
    return words()[[*tables.tables].index(table)] if words else None
  if not isinstance(source, UnboundExamples):
    return None
  replace = None if grown is None else frozen_vocabularies(grown)
  return source.vocabulary_of(table, tables, where, replace)


def _rows_of(
  ids: Any, words: Any, source: Unbound, size: int, where: str
) -> Int[np.ndarray, ' n']:
  """Returns the row of each id, i64, or -1 if it has none of its own."""
  if words is None:
    return _numbers(ids, size, where)
  if not isinstance(words, Vocabulary):
    raise UserError(
      'an id has a row of its own only in a Vocabulary or GrowingVocabulary',
      got=type(words).__name__,
      where=where,
      hint='count ids instead of hashing them, or give an array [R, D] with the'
      ' vectors at rows(ids)',
    )
  if isinstance(source, PackedExamples):
    ids = packed_ids(ids, where)
  raw = raw_ids(ids, where)
  rows = np.asarray(words.rows(raw)).reshape(-1).astype(np.int64)
  own = (rows >= words.first_row) & (rows < size)
  return np.where(own, rows, -1)


def _numbers(ids: Any, size: int, where: str) -> RowIds:
  """Checks that ids are rows of a table without a vocabulary."""
  raw = raw_ids(ids, where)
  bad = raw.bits[(raw.bits < 0) | (raw.bits >= size)]
  if raw.kind == 'text' or raw.present is not None or len(bad):
    got = f'{bad[0]}' if len(bad) and raw.kind != 'text' else repr(_at(ids, 0))
    raise UserError(
      f'ids of a table without a vocabulary must be integers in [0, {size})',
      got=got,
      where=where,
      hint='give batches the vocabulary of raw ids, or enlarge the table',
    )
  return raw.bits


def _check_unique(rows: RowIds, where: str) -> None:
  unique, counts = np.unique(rows, return_counts=True)
  if len(unique) < len(rows):
    raise UserError(
      'each id must be given once',
      got=f'row {unique[np.argmax(counts)]} {counts.max()} times',
      where=where,
      hint='leave the others out',
    )


def _at(ids: Any, index: int) -> Any:
  """Returns the id at an index, of any container, for a sentence."""
  flat: Sequence[Any] = ids if isinstance(ids, list | tuple) else list(ids)
  return flat[index] if index < len(flat) else None
