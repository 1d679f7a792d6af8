"""A fixed vocabulary of the ids in a part of the data: rows by frequency."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxtyping import Int
import numpy as np
import polars as pl

from slipstream_jax.columns.ids import (
  as_kind,
  Kind,
  raw_ids,
  RawIds,
)
from slipstream_jax.data.vocabulary import ranked
from slipstream_jax.errors import check_whole
from slipstream_jax.files import Path
from slipstream_jax.hashing import bucket, salt
from slipstream_jax.tables import row_dtype
from slipstream_jax.vocabulary import place_kernels, saved
from slipstream_jax.vocabulary.known import (
  EMPTY,
  find,
  from_arrays,
  ids_at,
  slots_for,
  to_arrays,
  values_of,
)
from slipstream_jax.vocabulary.text_kernels import fill_texts, find_texts

_AT_ONCE = 1 << 20  # ids of chunks that are counted together


class Vocabulary:
  """A row for each id that was seen often enough, the most frequent first.

  Row 0 is for missing ids and for ids without their own row. With `hash_rows`,
  ids without their own row share the rows 1 to `hash_rows`, by a hash. Ids of
  equal frequency are ordered by value, text by its bytes.

  Ids are compared by value: 5 is the same in i32 and u64, and text is the same
  as `str` and as bytes. Texts are compared themselves, not only by hash.

  Attributes:
    size: R, rows in total: the size of the table.

  Example:
    >>> words = Vocabulary.fit(['b', 'a', 'b', 'c', 'b', 'c'], min_count=2)
    >>> words.size
    3
    >>> words.rows(['b', 'c', 'a', 'never seen', None])
    array([1, 2, 0, 0, 0], dtype=int32)
    >>> words.ids([0, 1, 2]).tolist()
    [None, 'b', 'c']
  """

  def __init__(
    self, known: RawIds, hash_rows: int = 0, size: int | None = None
  ) -> None:
    """Creates a vocabulary of ids in the order of their rows, as from `fit`.

    Args:
      known: unique ids.
      hash_rows: rows for ids that are not among them.
      size: R, if there are more rows than ids.
    """
    self._known, self._hash_rows = known, hash_rows
    self._first = 1 + hash_rows
    self.size = size or self._first + len(known.bits)
    self._slots = slots_for(len(known.bits))
    rows = np.arange(self._first, self._first + len(known.bits))
    if known.text is not None:
      fill_texts(known.bits.view(np.uint64), self._slots, rows)
    else:
      last = np.zeros(len(rows), np.int32)
      place_kernels.fill(self._slots, known.bits, last)

  @classmethod
  def fit(
    cls,
    ids: Any,
    *,
    min_count: int = 1,
    hash_rows: int = 0,
    max_size: int | None = None,
  ) -> 'Vocabulary':
    """Fits a vocabulary to the ids of one table. Use only the training part.

    Args:
      ids: integers or strings in a numpy or arrow array, a polars or pandas
        series, or lists; of any shape. Or an iterator, or a list, of such
        chunks: memory grows with the unique ids, not with the lookups.
      min_count: lookups that an id needs to get its own row.
      hash_rows: rows that all other ids share.
      max_size: most rows in total. The rarest ids get no row.

    Raises:
      UserError: an argument out of range, ids that are neither integers nor
        text, or a mix of both.
    """
    where = 'Vocabulary.fit, '
    check_whole(min_count, 1, where + 'min_count', 'set it to 1 or more')
    check_whole(hash_rows, 0, where + 'hash_rows', 'give 0 for none')
    if max_size is not None:
      hint = 'leave room for row 0 and the hash_rows'
      check_whole(max_size, 1 + hash_rows, where + 'max_size', hint)
    unique, counts = _counted(_chunks(ids), where + 'ids')
    # Sorted by value, so indices break ties as values would.
    kept, _ = ranked(np.arange(len(counts)), counts, min_count)
    if max_size is not None:
      kept = kept[: max_size - 1 - hash_rows]
    known = raw_ids(unique.gather(kept), where + 'ids') if len(kept) else EMPTY
    return cls(known, hash_rows)

  def rows(self, ids: Any) -> Int[np.ndarray, '...']:
    """Returns the rows of ids, i32 of their shape. Ragged lists must be flat.

    Args:
      ids: as in `fit`, but not in chunks.

    Raises:
      UserError: the ids have another type than the fitted ids.
    """
    where = 'Vocabulary.rows, ids'
    raw = as_kind(raw_ids(ids, where), self._known.kind, where)
    if raw.text is not None and self._known.text is not None:
      rows = np.empty(len(raw.bits), np.int32)
      find_texts(
        *raw.text,
        raw.bits.view(np.uint64),
        self._slots,
        self._first,
        *self._known.text,
        rows,
      )
      missed = np.flatnonzero(rows == 0)
    else:
      rows, missed = find(self._slots, raw.bits)
      # Places count from 1, and the hash rows come before the known ids.
      rows[rows > 0] += self._hash_rows
    if self._hash_rows and len(missed):
      unknown = raw.bits[missed].view(np.uint64)
      places = bucket(unknown, salt(0), np.uint64(self._hash_rows))
      rows[missed] = 1 + places.astype(np.int32)
    return raw.spread(rows.astype(row_dtype(self.size), copy=False))

  def ids(self, rows: Any) -> np.ndarray:
    """Returns the ids of rows, as objects of their shape.

    Row 0, shared rows and unused rows give None.

    Raises:
      UserError: a row is not in the table.
    """
    where = 'Vocabulary.ids, rows'
    return ids_at(rows, self.known, self._first, self.size, where)

  @property
  def known(self) -> np.ndarray:
    """All ids that have a row, in the order of their rows.

    i64[n] or u64[n], or objects for text. The last id has the last row.
    """
    return values_of(self._known)

  def get_state(self) -> dict[str, Any]:
    """Returns numbers, words and arrays for a file or a checkpoint."""
    return {
      'what': 'Vocabulary',
      'hash_rows': self._hash_rows,
      'size': self.size,
      **to_arrays(self._known),
    }

  @classmethod
  def from_state(cls, state: Mapping[str, Any]) -> 'Vocabulary':
    """Creates a vocabulary from the result of `get_state`.

    Raises:
      UserError: it is not such a state.
    """
    names = ('data', 'ends') if state.get('kind') == 'text' else ('ids',)
    saved.check(state, {'what': 'Vocabulary'}, names)
    return cls(from_arrays(state), state['hash_rows'], state['size'])

  def save(self, path: Path) -> None:
    """Writes the vocabulary to a file.

    Raises:
      UserError: it cannot be written.
    """
    saved.write(path, self.get_state())

  @classmethod
  def load(cls, path: Path) -> 'Vocabulary':
    """Reads a file written by `save`.

    Raises:
      UserError: the file does not exist, holds something else, or is damaged.
    """
    return cls.from_state(saved.read(path))


def _chunks(ids: Any) -> Iterator[Any]:
  """Yields the chunks of ids that a user gave, or the only one."""
  many = isinstance(ids, Iterable) and not hasattr(ids, '__len__')
  if isinstance(ids, list | tuple) and len(ids):
    kinds = list | tuple | np.ndarray | pl.Series
    many = isinstance(ids[0], kinds) or hasattr(ids[0], '__arrow_c_array__')
  if many:
    yield from ids
  else:
    yield ids


def _counted(
  chunks: Iterable[Any], where: str
) -> tuple[pl.Series, Int[np.ndarray, ' n']]:
  """Returns the unique ids by value, and their lookups, i64."""
  kind: Kind = ''
  counted: list[pl.DataFrame] = []
  waiting: list[pl.Series] = []
  count = 0
  for chunk in chunks:
    raw = as_kind(raw_ids(chunk, where), kind, where)
    if not len(raw.bits):
      continue
    kind = raw.kind
    ids = pl.Series(values_of(raw)) if raw.words is None else raw.words
    waiting.append(ids.alias('id'))
    count += len(ids)
    if count >= _AT_ONCE:
      counted, waiting, count = _added(counted, waiting), [], 0
  if waiting:
    counted = _added(counted, waiting)
  if not counted:
    return pl.Series('id', [], pl.Int64), np.zeros(0, np.int64)
  whole = _merged(counted).sort('id')
  return whole['id'], whole['lookups'].to_numpy()


def _added(
  counted: list[pl.DataFrame], ids: list[pl.Series]
) -> list[pl.DataFrame]:
  """Adds the counts of ids to those before, the longest first."""
  lookups = pl.len().cast(pl.Int64).alias('lookups')
  frame = pl.concat(ids).to_frame().group_by('id').agg(lookups)
  # Merges frames of similar length only, so that an id is copied few times.
  while counted and len(counted[-1]) <= 2 * len(frame):
    frame = _merged([counted[-1], frame])
    counted = counted[:-1]
  return [*counted, frame]


def _merged(frames: list[pl.DataFrame]) -> pl.DataFrame:
  return pl.concat(frames).group_by('id').agg(pl.col('lookups').sum())
