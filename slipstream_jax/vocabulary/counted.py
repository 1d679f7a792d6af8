"""Vocabularies of the ids in a part of the data: rows by frequency.

Make them from the training part only, so that the held-out part meets ids they
have never seen, as a served model does.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import functools
from typing import Any

from jaxtyping import Int, Integer
import numpy as np
import polars as pl

from slipstream_jax.columns.ids import (
  as_kind,
  Ids,
  Kind,
  MISSING,
  raw_ids,
  RawIds,
)
from slipstream_jax.errors import check_whole, is_whole, UserError
from slipstream_jax.files import Path
from slipstream_jax.hashing import bucket, find, insert, new_pairs, salt
from slipstream_jax.tables import row_dtype
from slipstream_jax.vocabulary import state as states
from slipstream_jax.vocabulary.hashed import HashVocabulary
from slipstream_jax.vocabulary.state import ids_at, integers, NO_IDS, values_of

_AT_ONCE = 1 << 20  # ids of chunks that are counted together
_NONE = np.empty(0, np.int32)


class Vocabulary:
  """A row for each id that was seen often enough, the most frequent first.

  Row 0 is for missing ids and for ids without their own row. With `hash_rows`,
  ids without their own row share the rows 1 to `hash_rows`, by a hash. Ids of
  equal frequency are ordered by value, text by its bytes.

  Ids are compared by value: 5 is the same in i32 and u64, and text is the same
  as `str` and as bytes. Texts themselves are compared, not only their hashes.

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
    self,
    known: RawIds,
    hash_rows: int = 0,
    size: int | None = None,
    shared: Int[np.ndarray, ' c'] = _NONE,
  ) -> None:
    """Creates a vocabulary of ids in the order of their rows, as from `fit`.

    Args:
      known: unique ids.
      hash_rows: rows for ids that are not among them.
      size: R, if there are more rows than ids.
      shared: rows of the last c known ids, in [1, hash_rows], as from
        `learned_hash`. The others have rows of their own.
    """
    self._known, self._hash_rows, self._shared = known, hash_rows, shared
    self._first = 1 + hash_rows
    self._end = self._first + len(known.bits) - len(shared)
    self.size = size or self._end

  @functools.cached_property
  def _index(self) -> tuple[Int[np.ndarray, 'slots 2'], dict[str, int]]:
    """The hash table of known ids, and rows of texts that have no slot.

    Only the first of several texts with equal hashes has a slot.
    """
    count = len(self._known.bits)
    pairs, rows = new_pairs(count), np.arange(self._first, self._first + count)
    # Writable, because kernels would be compiled again for read-only arrays.
    bits = np.require(self._known.bits, requirements='W')
    if insert(pairs, bits, rows) or self._known.words is None:
      return pairs, {}
    _, first = np.unique(bits, return_index=True)
    pairs = new_pairs(count)
    insert(pairs, bits[first], rows[first])
    others = np.setdiff1d(np.arange(count), first)
    words = self._known.words.gather(others).to_list()
    return pairs, dict(zip(words, rows[others].tolist(), strict=True))

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
    known = raw_ids(unique.gather(kept), where + 'ids') if len(kept) else NO_IDS
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
    rows = np.empty(len(raw.bits), row_dtype(self.size + len(self._shared)))
    pairs, others = self._index
    find(pairs, raw.bits, rows)
    if raw.words is not None and self._known.words is not None:
      # Texts may differ although their hashes are equal.
      known = self._known.words.gather(np.maximum(rows - self._first, 0))
      differ = (raw.words != known).to_numpy() & (rows > 0)
      for i in np.flatnonzero(differ).tolist():
        rows[i] = others.get(raw.words[i], 0)
    if self._hash_rows:
      missed = np.flatnonzero(rows == 0)
      unknown = raw.bits[missed].view(np.uint64)
      rows[missed] = 1 + bucket(unknown, salt(0), np.uint64(self._hash_rows))
    if len(self._shared):
      late = np.flatnonzero(rows >= self._end)
      rows[late] = self._shared[rows[late] - self._end]
    return raw.spread(rows.astype(row_dtype(self.size), copy=False))

  @property
  def known_rows(self) -> Int[np.ndarray, ' n']:
    """The row of each of the `known` ids, i64."""
    own = np.arange(self._first, self._end)
    return np.concatenate([own, self._shared.astype(np.int64)])

  def ids(self, rows: Any) -> np.ndarray:
    """Returns the ids of rows, as objects of their shape.

    Row 0, shared rows and unused rows give None.

    Raises:
      UserError: a row is not in the table.
    """
    where = 'Vocabulary.ids, rows'
    return ids_at(rows, self.known, self._first, self.size, where)

  @property
  def shared(self) -> Int[np.ndarray, ' c']:
    """The rows of the last c `known` ids, which share them: i32."""
    return self._shared

  @property
  def first_row(self) -> int:
    """The first row that belongs to a single id."""
    return self._first

  @property
  def known(self) -> np.ndarray:
    """All ids that have a row, in the order of their rows.

    i64[n] or u64[n], or objects for text. Ids that share rows with others, as
    in a learned hash, come last.
    """
    return values_of(self._known)

  def get_state(self) -> dict[str, Any]:
    """Returns numbers, words and arrays for a file or a checkpoint."""
    return {
      'what': 'Vocabulary',
      'hash_rows': self._hash_rows,
      'size': self.size,
      'shared': self._shared,
      **states.to_arrays(self._known),
    }

  @classmethod
  def from_state(cls, state: Mapping[str, Any]) -> 'Vocabulary':
    """Creates a vocabulary from the result of `get_state`.

    Raises:
      UserError: it is not such a state.
    """
    names = ('data', 'ends') if state.get('kind') == 'text' else ('ids',)
    states.check(state, {'what': 'Vocabulary'}, names)
    # States of older vocabularies share no rows.
    shared = np.asarray(state.get('shared', _NONE), np.int32)
    known = states.from_arrays(state)
    return cls(known, state['hash_rows'], state['size'], shared)

  def save(self, path: Path) -> None:
    """Writes the vocabulary to a file.

    Raises:
      UserError: it cannot be written.
    """
    states.write(path, self.get_state())

  @classmethod
  def load(cls, path: Path) -> 'Vocabulary':
    """Reads a file written by `save`.

    Raises:
      UserError: the file does not exist, holds something else, or is damaged.
    """
    return cls.from_state(states.read(path))


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
  counted: pl.DataFrame | None = None
  waiting: list[pl.Series] = []
  count = 0

  def merged() -> pl.DataFrame:
    lookups = pl.len().cast(pl.Int64).alias('lookups')
    frames = [pl.concat(waiting).to_frame().group_by('id').agg(lookups)]
    if counted is not None:
      frames.append(counted)
    return pl.concat(frames).group_by('id').agg(pl.col('lookups').sum())

  for chunk in chunks:
    raw = as_kind(raw_ids(chunk, where), kind, where)
    if not len(raw.bits):
      continue
    kind = raw.kind
    ids = pl.Series(values_of(raw)) if raw.words is None else raw.words
    waiting.append(ids.alias('id'))
    count += len(ids)
    # As many as are counted, so that each is copied a few times only.
    if count >= max(_AT_ONCE, 0 if counted is None else len(counted)):
      counted, waiting, count = merged(), [], 0
  if waiting:
    counted = merged()
  if counted is None:
    return pl.Series('id', [], pl.Int64), np.zeros(0, np.int64)
  whole = counted.sort('id')
  return whole['id'], whole['lookups'].to_numpy()


Fit = Callable[[Iterable[Ids]], tuple[Vocabulary | HashVocabulary, ...]]
"""Makes vocabularies of columns of ids of the training part, one per table."""


def fit_by(
  tables: int,
  *,
  min_count: int = 1,
  hash_rows: int | None = None,
  missing: bool = True,
) -> Fit:
  """Returns the function that makes the vocabularies of a data set.

  Args:
    tables: number of tables.
    min_count: uses in the training part that an id needs to get its own row.
    hash_rows: R of every table, for hashed ids. None counts ids instead.
    missing: ids may be missing, so every table has a row for that.

  Raises:
    UserError: a number below 1, or both given.
  """
  check_whole(min_count, 1, 'vocabulary, min_count', 'set it to 1 or more')
  if hash_rows is None:
    return functools.partial(count, min_count=min_count, missing=missing)
  if not is_whole(hash_rows, 1, 1 << 31):
    raise UserError(
      'hash_rows must be a whole number, at least 1 and below 2**31',
      got=repr(hash_rows),
      where='vocabulary, hash_rows',
      hint='set it within that range, or leave it out to count ids',
    )
  if min_count > 1:
    raise UserError(
      'hashed ids are not counted, so only one of min_count and hash_rows'
      ' may be set',
      got=f'min_count {min_count} and hash_rows {hash_rows}',
      where='vocabulary, hash_rows',
      hint='leave one of them out',
    )
  hashed = tuple(HashVocabulary(hash_rows, table) for table in range(tables))
  return lambda columns: hashed


def count(
  columns: Iterable[Ids], min_count: int = 1, *, missing: bool = True
) -> tuple[Vocabulary, ...]:
  """Returns vocabularies of the ids seen at least `min_count` times.

  Args:
    columns: ids of the training part, one column per table.
    min_count: as in `fit_by`.
    missing: as in `fit_by`. `MISSING` gets a row, however rare it is.
  """
  words = []
  for column in columns:
    seen, counts = np.unique(column, return_counts=True)
    if missing and MISSING not in seen:
      seen, counts = np.append(seen, MISSING), np.append(counts, 0)
    words.append(Vocabulary(integers(ranked(seen, counts, min_count)[0])))
  return tuple(words)


def ranked(
  ids: Ids, counts: Int[np.ndarray, ' _'], min_count: int = 1
) -> tuple[Ids, Int[np.ndarray, ' _']]:
  """Returns the ids that get a row and their counts, in the order of rows.

  The most frequent id comes first. Ids of equal counts are ordered by value.
  `MISSING`, if it is among the ids, is kept, however rare it is. All
  vocabularies follow this rule, in packed folders too.

  Args:
    ids: unique, in any order.
    counts: uses of each in the training part.
    min_count: as in `fit_by`.
  """
  kept = (counts >= min_count) | (ids == MISSING)
  ids, counts = ids[kept], counts[kept]
  # By value first, because `by_count` keeps that order among equal counts.
  order = np.argsort(ids)
  order = order[by_count(counts[order])]
  return ids[order], counts[order]


def by_count(counts: Integer[np.ndarray, ' _']) -> Int[np.ndarray, ' _']:
  """Returns the stable order that puts the largest counts first.

  Counts from 2**32 on are equal.
  """
  # With all bits flipped, the largest count is the smallest key.
  keys = ~np.minimum(counts, np.iinfo(np.uint32).max).astype(np.uint32)
  # Numpy sorts 16 bits in linear time if the sort is stable. The lower half
  # comes first, and its order remains where the upper half is equal.
  order = np.argsort(keys.astype(np.uint16), kind='stable')
  high = (keys >> np.uint32(16)).astype(np.uint16)[order]
  if len(high) and high.min() < high.max():
    order = order[np.argsort(high, kind='stable')]
  return order
