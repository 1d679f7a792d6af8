"""Facts of an export about its data: vocabularies, names and counts.

In an export an id is an i64, as `slip.pack` numbers ids. An integer is its own
id, but a negative v becomes v - 2, because -1 is a missing id and -2 the end of
a list. Texts of a `slip.Vocabulary` are known by its own hash of them.
"""

from collections.abc import Callable, Mapping
import pathlib
from typing import Any, NamedTuple

from jaxtyping import Int, Integer
import numpy as np

from slip_serve import layout
from slip_serve.layout import Dense
from slip_serve.vocabulary import text_ids
from slipstream_jax.columns.ids import packed_ids
from slipstream_jax.data.source import BatchSource, Dataset
from slipstream_jax.errors import UserError
from slipstream_jax.formats.avazu import HEX
from slipstream_jax.formats.criteo import INTEGERS, TABLES
from slipstream_jax.inputs.arrays import PackedExamples, UnboundExamples
from slipstream_jax.tables import Table
from slipstream_jax.training.evaluate import frozen_vocabularies
from slipstream_jax.training.trainer_parts import TrainerParts
from slipstream_jax.vocabulary.counted import Vocabulary
from slipstream_jax.vocabulary.hashed import (
  HashVocabulary,
  RankedHashVocabulary,
)

_WHERE = 'export, vocabulary of table'


class TableIds(NamedTuple):
  """The vocabulary of one table."""

  vocabulary: layout.Vocabulary = layout.Vocabulary('none', 0, '')
  """As in the manifest, but without its file."""
  contents: tuple[np.ndarray, ...] = ()
  """Arrays of its file: the known ids i64[n], ascending, unless there are
  buckets, and the rows i32[n] of the ids or buckets."""


class SourceFacts(NamedTuple):
  """What is known of the data."""

  ids: tuple[TableIds, ...]
  """The vocabulary of each table."""
  name: str = ''
  dense: tuple[Dense, ...] = ()
  """The dense features in order, if they have names."""
  counts: Callable[[], Integer[np.ndarray, ' N']] | None = None
  """Returns the uses of each global row, if they were counted."""


def write_ids(
  ids: TableIds, folder: pathlib.Path, number: int
) -> layout.Vocabulary:
  """Writes the file of table `number`'s vocabulary, if it needs one."""
  if not ids.contents:
    return ids.vocabulary
  name = f'ids_{number}.bin'
  with open(folder / name, 'wb') as file:
    for array in ids.contents:
      file.write(np.ascontiguousarray(array).data)
  return ids.vocabulary._replace(file=name)


def facts_of_dataset(data: Dataset) -> SourceFacts:
  """Returns the facts of a data set.

  Raises:
    UserError: one of its vocabularies has another kind.
  """
  ids = (TableIds(),) * len(data.sizes)
  if data.vocabulary:
    hexes = HEX_TABLES.get(data.format, ())
    ids = tuple(
      _of_hex(ids_of_vocabulary(words), name in hexes)
      for name, words in zip(data.sizes, data.vocabulary(), strict=True)
    )
  dense = _dense(dict.fromkeys(data.names[0]), data)
  return SourceFacts(ids, data.name, dense, data.counts)


def _of_hex(ids: TableIds, is_hex: bool) -> TableIds:
  vocabulary = ids.vocabulary
  return ids._replace(
    vocabulary=vocabulary._replace(texts='hex' if is_hex else 'any')
  )


def ids_of_vocabulary(words: Any) -> TableIds:
  """Returns a table's vocabulary, from that of a data set.

  Raises:
    UserError: it has another kind.
  """
  match words:
    case HashVocabulary():
      return TableIds(layout.Vocabulary('hashed', words.size, ''))
    case RankedHashVocabulary():
      ranks = np.asarray(words.ranks, '<i4')
      return TableIds(layout.Vocabulary('ranked', len(ranks), ''), (ranks,))
    case Vocabulary():
      return _known('counted', words.known, words, words.size)
  raise UserError(
    'a vocabulary must be one that can be exported',
    got=type(words).__name__,
    where='Dataset.vocabulary',
    hint='make it by counting or by hashing',
  )


def facts_of(
  source: UnboundExamples | BatchSource, parts: TrainerParts
) -> SourceFacts:
  """Returns the facts of a source.

  Args:
    source: examples with the ids that the model is for.
    parts: a trainer on such examples. Growing vocabularies are as trained.

  Raises:
    UserError: a vocabulary has another kind or does not fit its table.
  """
  tables, columns = parts.recipe.tables, parts.names.dense or {}
  if isinstance(source, PackedExamples):
    facts = facts_of_dataset(source.dataset)
    return facts._replace(dense=_dense(columns, source.dataset))
  if isinstance(source, UnboundExamples):
    frozen = frozen_vocabularies(parts.grown)
    ids = tuple(
      _ids_of_table(
        name,
        table,
        source.vocabulary_of(name, tables, f'{_WHERE} {name!r}', frozen),
      )
      for name, table in tables.tables.items()
    )
  else:  # batches of rows
    ids = (TableIds(),) * len(tables.tables)
  return SourceFacts(ids, 'slip.Trainer', _dense(columns, None))


def _dense(
  columns: Mapping[str, int | None], data: Dataset | None
) -> tuple[Dense, ...]:
  """Returns the dense features, from their widths by name and the data set."""
  settings = data.settings if data else {}
  if columns:
    given = settings.get('dense')
    fills = given if isinstance(given, dict) else {}
    return tuple(
      Dense(name, size or 1, float(fills[name]) if name in fills else None)
      for name, size in columns.items()
    )
  if data is None or data.format not in DENSE_OF_FORMATS:
    return ()
  dense = DENSE_OF_FORMATS[data.format](settings)
  # A TFDS feature may have several columns, and then all are without a name.
  return dense if len(dense) == data.dense_features else ()


def _dense_of_criteo(settings: Mapping[str, Any]) -> tuple[Dense, ...]:
  names = INTEGERS if settings.get('missing_flags') else ()
  return (
    *(Dense(name, 1, 0.0, 'log1p') for name in INTEGERS),
    *(Dense(name, 1, None, 'missing') for name in names),
  )


def _dense_of_tfds(settings: Mapping[str, Any]) -> tuple[Dense, ...]:
  transform = str(settings.get('transform'))
  names = settings.get('dense') if transform in ('none', 'log1p') else ()
  return tuple(Dense(name, 1, None, transform) for name in names or ())


DENSE_OF_FORMATS: dict[
  str, Callable[[Mapping[str, Any]], tuple[Dense, ...]]
] = {
  'criteo': _dense_of_criteo,
  'terabyte': _dense_of_criteo,
  'avazu': lambda _: (Dense('hour', 1, None, 'hour'),),
  'movielens': lambda _: (
    Dense('earlier_of_user', 1, None, 'log1p_float32'),
    Dense('earlier_of_item', 1, None, 'log1p_float32'),
  ),
  'tfds': _dense_of_tfds,
}
"""By format, how the raw values of a file become the model's inputs. Settings
of the format to its dense features."""
HEX_TABLES = {'criteo': TABLES, 'terabyte': TABLES, 'avazu': HEX}
"""By format, tables whose ids are hexadecimal digits."""


def _ids_of_table(name: str, table: Table, words: Any) -> TableIds:
  """Returns the vocabulary of a table, from that of the source."""
  if words is None:
    bounded = layout.Vocabulary('bounded', table.vocabulary_size, '')
    return TableIds(bounded) if table.unknown == 'row' else TableIds()
  if not isinstance(words, Vocabulary):
    raise UserError(
      'only a Vocabulary or a GrowingVocabulary can be exported',
      got=type(words).__name__,
      where=f'{_WHERE} {name!r}',
      hint='fit a Vocabulary, or train on rows',
    )
  return _ids_of_words(words, table, name)


def _ids_of_words(words: Vocabulary, table: Table, name: str) -> TableIds:
  size = table.vocabulary_size
  least = words.size if table.unknown == 'error' else words.first_row
  if size < least:
    raise UserError(
      'a table must have a row for each of its vocabulary to be exported',
      got=f'{size} rows for {least}',
      where=f'{_WHERE} {name!r}',
      hint='give both the same size',
    )
  if words.known.dtype == object:
    kind, known = 'text', text_ids(words.known.tolist())
  else:
    kind, known = 'counted', packed_ids(words.known, _WHERE)
  return _known(kind, known, words, size)


def _known(
  kind: str, ids: Int[np.ndarray, ' n'], words: Vocabulary, last: int
) -> TableIds:
  """Returns a vocabulary with its known ids as i64.

  Rows beyond `last` become `last`, the row of unknown ids.
  """
  order = np.argsort(ids)
  rows = np.minimum(words.known_rows[order], last).astype('<i4')
  vocabulary = layout.Vocabulary(kind, len(ids), '', words.first_row - 1)
  return TableIds(vocabulary, (ids[order].astype('<i8'), rows))
