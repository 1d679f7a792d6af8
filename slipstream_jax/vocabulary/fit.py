"""A vocabulary of the ids that a part of the data has: rows by popularity."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxtyping import Int
import numpy as np
import polars as pl

from slipstream_jax.data.vocabulary import bucket, ranked, salt
from slipstream_jax.errors import check_whole
from slipstream_jax.files import Path
from slipstream_jax.row_space import row_dtype
from slipstream_jax.vocabulary import place_kernels, saved, text_kernels
from slipstream_jax.vocabulary.known import (
  arrays_of,
  EMPTY,
  find,
  ids_at,
  of_arrays,
  slots_for,
  values_of,
)
from slipstream_jax.vocabulary.raw_ids import as_kind, Kind, raw_ids, RawIds

_AT_ONCE = 1 << 20  # ids of chunks that are counted together


class Vocabulary:
  """A row for every id that was seen often enough, the most frequent first.

  Row 0 stands for missing ids, and for all that have no row of their own; with
  `hash_rows`, the latter share as many rows from 1 on, by a hash. Ids of equal
  frequency are in the order of their values; text in that of its bytes.

  An id is what it says: 5 is the same in an i32 and a u64, and text is the same
  as `str` and as bytes. Text is compared, not only its hashes.

  Attributes:
    size: R, rows in all: the size of the table.

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
    """A vocabulary of ids in the order of their rows; `fit` finds that.

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
      text_kernels.fill_texts(known.bits.view(np.uint64), self._slots, rows)
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
    """The vocabulary of the ids of one table; use the training part alone.

    Args:
      ids: integers or strings in an array of numpy or arrow, a series of polars
        or pandas, or lists; of any shape. Or an iterator, or a list, of such
        chunks: memory grows with the unique ids, not with the lookups.
      min_count: lookups that earn an id a row of its own.
      hash_rows: rows over which all other ids are spread.
      max_size: most rows in all; the rarest ids go without.

    Raises:
      UserError: an argument out of range, ids that are neither integers nor
        text, or both.
    """
    where = 'Vocabulary.fit, '
    check_whole(min_count, 1, where + 'min_count', 'set it to 1 or more')
    check_whole(hash_rows, 0, where + 'hash_rows', 'give 0 for none')
    if max_size is not None:
      hint = 'leave room for row 0 and the hash_rows'
      check_whole(max_size, 1 + hash_rows, where + 'max_size', hint)
    unique, counts = _counted(_chunks(ids), where + 'ids')
    # By value, so that their places can stand for them.
    kept, _ = ranked(np.arange(len(counts)), counts, min_count)
    if max_size is not None:
      kept = kept[: max_size - 1 - hash_rows]
    known = raw_ids(unique.gather(kept), where + 'ids') if len(kept) else EMPTY
    return cls(known, hash_rows)

  def rows(self, ids: Any) -> Int[np.ndarray, '...']:
    """Rows of ids, i32 of their shape; ragged lists are given by their values.

    Args:
      ids: as `fit` takes them, but no chunks.

    Raises:
      UserError: they are of another type than those that were fitted.
    """
    where = 'Vocabulary.rows, ids'
    raw = as_kind(raw_ids(ids, where), self._known.kind, where)
    if raw.text is not None and self._known.text is not None:
      rows = np.empty(len(raw.bits), np.int32)
      text_kernels.find_texts(
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
      # Their places count from 1, and the rows before are no ids' own.
      rows[rows > 0] += self._hash_rows
    if self._hash_rows and len(missed):
      unknown = raw.bits[missed].view(np.uint64)
      places = bucket(unknown, salt(0), np.uint64(self._hash_rows))
      rows[missed] = 1 + places.astype(np.int32)
    return raw.spread(rows.astype(row_dtype(self.size), copy=False))

  def ids(self, rows: Any) -> np.ndarray:
    """Ids of rows, as objects of their shape; None for those of many ids.

    Raises:
      UserError: a row is none of the table's.
    """
    where = 'Vocabulary.ids, rows'
    return ids_at(rows, self.known, self._first, self.size, where)

  @property
  def known(self) -> np.ndarray:
    """All ids that have a row, in the order of their rows.

    i64[n] or u64[n], or objects for text; the last of them has the last row.
    """
    return values_of(self._known)

  def get_state(self) -> dict[str, Any]:
    """Numbers, words and arrays that a file or a checkpoint can hold."""
    return {
      'what': 'Vocabulary',
      'hash_rows': self._hash_rows,
      'size': self.size,
      **arrays_of(self._known),
    }

  @classmethod
  def from_state(cls, state: Mapping[str, Any]) -> 'Vocabulary':
    """The vocabulary that `get_state` told of.

    Raises:
      UserError: it is no such state.
    """
    names = ('data', 'ends') if state.get('kind') == 'text' else ('ids',)
    saved.check(state, {'what': 'Vocabulary'}, names)
    return cls(of_arrays(state), state['hash_rows'], state['size'])

  def save(self, path: Path) -> None:
    """Writes it to a file.

    Raises:
      UserError: it cannot be written.
    """
    saved.write(path, self.get_state())

  @classmethod
  def load(cls, path: Path) -> 'Vocabulary':
    """Reads what `save` wrote.

    Raises:
      UserError: there is no such file, or it is another or damaged.
    """
    return cls.from_state(saved.read(path))


def _chunks(ids: Any) -> Iterator[Any]:
  """The chunks of ids that a user gave, or the only one."""
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
  """Unique ids by value, and their lookups, i64."""
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
  """Counts of ids beside those before, the longest first."""
  lookups = pl.len().cast(pl.Int64).alias('lookups')
  frame = pl.concat(ids).to_frame().group_by('id').agg(lookups)
  # Merged once they are as long: an id is copied a few times, not every time.
  while counted and len(counted[-1]) <= 2 * len(frame):
    frame = _merged([counted[-1], frame])
    counted = counted[:-1]
  return [*counted, frame]


def _merged(frames: list[pl.DataFrame]) -> pl.DataFrame:
  return pl.concat(frames).group_by('id').agg(pl.col('lookups').sum())
