"""Vocabularies as files: which row of its table stands for which raw id.

In an export an id is an i64, as `slip.pack` numbers ids: an integer is its own
id, but a negative v stands as v - 2, as -1 is a missing id and -2 the end of a
list. Texts of a `slip.Vocabulary` are known by its own hash of them.
"""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any, NamedTuple

from jaxtyping import Int, Integer
import numpy as np

from slip_serve import layout
from slip_serve.vocabulary import text_ids
from slipstream_jax.columns.ids import packed_ids
from slipstream_jax.errors import UserError
from slipstream_jax.tables import Table, TableSet
from slipstream_jax.vocabulary.counted import Vocabulary
from slipstream_jax.vocabulary.hashed import Hashed, Ranked

_WHERE = 'export, vocabulary of table'


class TableIds(NamedTuple):
  """The vocabulary of one table as an export holds it."""

  kind: str = 'none'
  """A member of `slip_serve.layout.VOCABULARIES`."""
  entries: int = 0
  """Number of entries, as in `slip_serve.layout.Vocabulary`."""
  known: Int[np.ndarray, ' n'] | None = None
  """The known ids, i64, ascending."""
  rows: Integer[np.ndarray, ' _'] | None = None
  """Rows of the known ids, or of the buckets."""
  hash_rows: int = 0
  """Rows from 1 on that unknown ids share."""


def write_ids(
  ids: TableIds, folder: pathlib.Path, number: int
) -> layout.Vocabulary:
  """Writes the file of a table's vocabulary, if it needs one.

  Args:
    ids: the vocabulary.
    folder: where to write.
    number: the table's number.
  """
  name = '' if ids.rows is None else f'ids_{number}.bin'
  if ids.rows is not None:
    with open(folder / name, 'wb') as file:
      if ids.known is not None:
        file.write(np.ascontiguousarray(ids.known, '<i8').data)
      file.write(np.ascontiguousarray(ids.rows, '<i4').data)
  return layout.Vocabulary(ids.kind, ids.entries, name, ids.hash_rows)


def ids_of_dataset(words: Sequence[Any] | None, tables: int) -> list[TableIds]:
  """Returns the vocabulary of each table of a data set.

  Args:
    words: vocabularies by table, of `slipstream_jax.vocabulary`. None: ids are
      rows.
    tables: number of tables.

  Raises:
    UserError: a vocabulary is of another kind.
  """
  if words is None:
    return [TableIds()] * tables
  ids: list[TableIds] = []
  for own in words:
    match own:
      case Hashed():
        ids.append(TableIds('hashed', own.size))
      case Ranked():
        ranks = np.asarray(own.ranks)
        ids.append(TableIds('ranked', len(ranks), None, ranks))
      case Vocabulary():
        ids.append(_known('counted', own.known, 1))
      case _:
        raise UserError(
          'a vocabulary must be one that can be exported',
          got=type(own).__name__,
          where='Dataset.vocabulary',
          hint='make it by counting or by hashing',
        )
  return ids


def ids_of_features(
  words: Mapping[str, Any], tables: TableSet
) -> list[TableIds]:
  """Returns the vocabulary of each table, from those of its features.

  Args:
    words: vocabularies by feature. Ids of other features are rows.
    tables: all tables.

  Raises:
    UserError: a vocabulary that is not a `Vocabulary`, or two of one table.
  """
  ids: list[TableIds] = []
  for name, table in tables.tables.items():
    own = [
      words.get(feature)
      for feature, one in tables.features.items()
      if one.table == name
    ]
    if any(other is not own[0] for other in own):
      raise UserError(
        'features that share a table must share its vocabulary to be exported',
        got='two vocabularies',
        where=f'{_WHERE} {name!r}',
        hint='give one vocabulary by the name of the table',
      )
    ids.append(_ids_of_table(own[0], table, name))
  return ids


def _ids_of_table(words: Any, table: Table, name: str) -> TableIds:
  if words is None and table.unknown == 'row':
    return TableIds('bounded', table.vocabulary_size)
  if words is None:
    return TableIds()
  if not isinstance(words, Vocabulary):
    raise UserError(
      'only a Vocabulary or a GrowingVocabulary can be exported',
      got=type(words).__name__,
      where=f'{_WHERE} {name!r}',
      hint='fit a Vocabulary, or train on rows',
    )
  hash_rows, size = words.get_state()['hash_rows'], table.vocabulary_size
  least = words.size if table.unknown == 'error' else 1 + hash_rows
  if size < least:
    raise UserError(
      'a table must have a row for each of its vocabulary to be exported',
      got=f'{size} rows for {least}',
      where=f'{_WHERE} {name!r}',
      hint='give both the same size',
    )
  known = words.known
  if known.dtype == object:
    ids = _known('text', text_ids(known.tolist()), 1 + hash_rows)
  else:
    numbers = packed_ids(known, _WHERE)
    ids = _known('counted', numbers, 1 + hash_rows)
  assert ids.rows is not None
  # Rows beyond the table stand for its row of unknown ids, the last.
  rows = np.minimum(ids.rows, size)
  return ids._replace(rows=rows, hash_rows=hash_rows)


def _known(kind: str, ids: Int[np.ndarray, ' n'], first: int) -> TableIds:
  """Returns the vocabulary of ids with the rows from `first` on, in order."""
  order = np.argsort(ids)
  return TableIds(kind, len(ids), ids[order], order + first)
