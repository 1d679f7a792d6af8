"""Raw ids to rows, as they were mapped in training."""

from collections.abc import Sequence
import pathlib
import re
from typing import Any, NamedTuple

import numpy as np

from slip_serve.errors import ServeError
from slip_serve.layout import Layout, Vocabulary
from slipstream_jax.files import Path
from slipstream_jax.hashing import bucket, hash_texts, salt, text_id

MISSING = -1
"""Marks a missing id."""
END = -2
"""Pads a list of ids."""
_HEX = re.compile('[0-9a-fA-F]{1,8}')
_ENTRY_BYTES = {'counted': 12, 'text': 12, 'ranked': 4}


class TableVocabulary(NamedTuple):
  """The vocabulary of one table."""

  number: int
  """Number of the table."""
  rows: int
  """Rows of the table."""
  kind: str
  """As in `Vocabulary`, like `entries` and `hash_rows`."""
  entries: int
  hash_rows: int = 0
  known: np.ndarray = np.empty(0, np.int64)
  """Of 'counted' and 'text' the known ids i64[n], ascending."""
  ranks: np.ndarray = np.empty(0, np.int32)
  """Rows i32 of the known ids, or of the buckets of 'ranked'."""
  texts: str = 'any'
  """Kind of the texts, as in `Vocabulary`."""


def open_words(folder: Path, layout: Layout) -> list[TableVocabulary]:
  """Maps the vocabularies of all tables into memory.

  Raises:
    ServeError: a file does not have the size of its vocabulary.
  """
  path = pathlib.Path(folder)
  pairs = zip(layout.vocabulary, layout.tables, strict=True)
  return [
    _open(path, number, of, table.rows)
    for number, (of, table) in enumerate(pairs)
  ]


def _open(
  folder: pathlib.Path, number: int, of: Vocabulary, rows: int
) -> TableVocabulary:
  words = TableVocabulary(
    number, rows, of.kind, of.entries, of.hash_rows, texts=of.texts
  )
  if of.kind not in _ENTRY_BYTES:
    return words
  path, wanted = folder / of.file, _ENTRY_BYTES[of.kind] * of.entries
  if not of.file or path.stat().st_size != wanted:
    raise ServeError(
      f'the vocabulary of {of.entries} ids must have {wanted} bytes',
      got=path.stat().st_size,
      where=str(path),
      hint='export the model again',
    )
  if not wanted:  # nothing can be mapped
    return words
  whole, split = np.memmap(path, np.uint8, 'r'), wanted - 4 * of.entries
  known, ranks = whole[:split].view('<i8'), whole[split:].view('<i4')
  return words._replace(known=known, ranks=ranks)


def rows_of(words: TableVocabulary, ids: np.ndarray) -> np.ndarray:
  """Returns the rows i64[n] of raw ids i64[n] of one table.

  Unknown ids have the row that training gave to such ids.

  Raises:
    ServeError: ids are rows, and one is not in the table.
  """
  if words.kind == 'none':
    bad = (ids < 0) | (ids >= words.rows)
    if bad.any():
      raise ServeError(
        f'ids of table {words.number} must be in [0, {words.rows})',
        got=int(ids[bad][0]),
        where='ids',
        hint='map unknown ids to a row of the table first',
      )
    return ids.astype(np.int64)
  if words.kind == 'bounded':
    inside = (ids >= 0) & (ids < words.entries)
    return np.where(inside, ids, words.entries)
  if words.kind == 'hashed':
    return _buckets(words.number, ids, words.entries)
  if words.kind == 'ranked':
    if not words.entries:
      return np.zeros(len(ids), np.int64)
    buckets = _buckets(words.number, ids, words.entries)
    return words.ranks[buckets].astype(np.int64)
  rows = np.zeros(len(ids), np.int64)
  unknown = np.ones(len(ids), bool)
  if words.entries:
    at = np.minimum(np.searchsorted(words.known, ids), words.entries - 1)
    unknown = words.known[at] != ids
    rows = np.where(unknown, 0, words.ranks[at]).astype(np.int64)
  if words.hash_rows:
    unknown &= ids != MISSING
    bits = ids[unknown]
    if words.kind == 'counted':  # the hash is of the integer itself
      bits = np.where(bits < 0, bits + 2, bits)
    rows[unknown] = 1 + _buckets(0, bits, words.hash_rows)
  return rows


def ids_of(words: TableVocabulary, values: Sequence[Any]) -> np.ndarray:
  """Returns the ids i64[n] of raw values of one table: integers, texts or None.

  Raises:
    ServeError: a value has another type, or an integer is given where ids are
      texts, or a text where ids are rows.
  """
  if words.kind == 'text':
    texts = [value for value in values if value is not None]
    wrong = [one for one in texts if not isinstance(one, str)]
    if wrong:
      raise _no_id(words, wrong[0], 'a text')
    ids = np.full(len(values), MISSING, np.int64)
    ids[[value is not None for value in values]] = text_ids(texts)
    return ids
  are_rows = words.kind in ('none', 'bounded')
  ids = np.empty(len(values), np.int64)
  for place, value in enumerate(values):
    whole = isinstance(value, int | np.integer)
    if are_rows and (not whole or not -(2**63) <= value < 2**63):
      raise _no_id(words, value, 'a whole number of 64 bits')
    if not (whole or isinstance(value, str | None)) or value is True:
      raise _no_id(words, value, 'a whole number, a text or None')
    try:
      ids[place] = value if are_rows else raw_id(value, words.texts)
    except ValueError as error:
      raise _no_id(words, value, 'up to 8 hex digits') from error
  return ids


def _no_id(words: TableVocabulary, value: object, wanted: str) -> ServeError:
  return ServeError(
    f'an id of table {words.number} must be {wanted}',
    got=f'{value!r:.40}',
    where='ids',
    hint='give ids as they were trained on',
  )


def text_ids(texts: Sequence[str]) -> np.ndarray:
  """Returns the ids i64[n] of texts in a vocabulary of the kind 'text'."""
  encoded = [text.encode() for text in texts]
  ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
  hashes = np.empty(len(texts), np.uint64)
  data = np.frombuffer(bytearray(b''.join(encoded)), np.uint8)
  hash_texts(data, ends, hashes)
  return hashes.view(np.int64)


def raw_id(value: int | str | None, texts: str = 'any') -> int:
  """Returns the id of a value, as `slip.pack` numbers it.

  An integer is its own id, but a negative v has v - 2. A text that is written
  as such an integer has the same id. All other texts are hashed. None and ''
  are missing ids.

  Args:
    value: the value.
    texts: 'hex' if a text is up to 8 hexadecimal digits, else 'any'.

  Raises:
    ValueError: a text has other digits.
  """
  text = '' if value is None else str(value)
  if not text:
    return MISSING
  if texts == 'hex' and isinstance(value, str):
    if not _HEX.fullmatch(text):
      raise ValueError(text)
    return int(text, 16)
  try:
    number = int(text)
    least = np.iinfo(np.int64).min + 2
    if str(number) == text and least <= number <= np.iinfo(np.int64).max:
      return number if number >= 0 else number - 2
  except ValueError:
    pass
  return text_id(text.encode())


def _buckets(table: int, ids: np.ndarray, count: int) -> np.ndarray:
  places = bucket(ids.astype(np.uint64), salt(table), np.uint64(count))
  return places.astype(np.int64)
