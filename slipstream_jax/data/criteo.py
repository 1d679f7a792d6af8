"""Criteo's raw click logs: label, 13 integers, 26 hex ids, tab separated.

There is no header, and any field but the label may be empty (missing). The
format is that of the Kaggle Display Advertising Challenge of 2014.
"""

from collections.abc import Iterator
import functools
import os
import pathlib
import re
from typing import NamedTuple, no_type_check

from jaxtyping import Bool, Float, Int, UInt32
import numba
import numpy as np

from slipstream_jax.data import text, vocabulary
from slipstream_jax.data.batches import ColumnBatches, Columns, Dataset
from slipstream_jax.errors import UserError
from slipstream_jax.tables import global_rows, Table

INTEGERS = tuple(f'I{i}' for i in range(1, 14))
TABLES = tuple(f'C{i}' for i in range(1, 27))
COLUMNS = ('label', *INTEGERS, *TABLES)


class Fields(NamedTuple):
  """Fields of n lines as they stand in the file."""

  labels: Float[np.ndarray, ' n']
  """0.0 or 1.0, f32."""
  integers: Int[np.ndarray, 'n 13']
  """I1 to I13, i64; 0 where missing."""
  ids: UInt32[np.ndarray, 'n 26']
  """C1 to C26, u32; 0 where missing."""
  missing: Bool[np.ndarray, 'n 39']
  """True where a field of I1 to C26 is empty."""


def parse(block: text.Block) -> Fields:
  """Fields of a block's lines.

  Raises:
    UserError: a line that breaks the format; names the first one, with its
      column and value.
  """
  lines = block.num_lines
  fields = Fields(
    np.zeros(lines, np.float32),
    np.zeros((lines, len(INTEGERS)), np.int64),
    np.zeros((lines, len(TABLES)), np.uint32),
    np.zeros((lines, len(COLUMNS) - 1), np.bool_),
  )
  bad = _parse_lines(np.frombuffer(block.text, np.uint8), *fields)
  if bad < lines:
    raise _line_error(block.text.split(b'\n')[bad], block.where(bad))
  return fields


def dense_features(
  fields: Fields, missing_flags: bool = False
) -> Float[np.ndarray, 'n I']:
  """`log1p(max(x, 0))` of the integers, f32[n, 13]; 0 where missing.

  With `missing_flags`, 13 more columns are 1 where an integer is missing.
  """
  values = np.log1p(np.maximum(fields.integers, 0)).astype(np.float32)
  if not missing_flags:
    return values
  flags = fields.missing[:, : len(INTEGERS)].astype(np.float32)
  return np.concatenate([values, flags], axis=1)


def criteo_text(
  path: str | os.PathLike[str],
  *,
  test_share: float = 0.2,
  min_count: int = 1,
  hash_rows: int | None = None,
  missing_flags: bool = False,
  shuffle_seed: int | None = None,
  test_max: int | None = None,
) -> Dataset:
  """A data set of Criteo's raw text, held in memory; tables C1 to C26.

  Args:
    path: the file, plain or gzip.
    test_share: share of the lines to hold out, from the end of the file.
    min_count: uses in the training part that earn an id a row of its own.
    hash_rows: R of every table, for hashed ids; None counts ids instead.
    missing_flags: adds 13 dense features that flag missing integers.
    shuffle_seed: seed of the order of training inputs; None is file order.
    test_max: most lines to test on, from the first one held out.

  Raises:
    UserError: a bad argument, a file that cannot be read, or a bad line.
  """
  fit = vocabulary.fit_by(len(TABLES), min_count=min_count, hash_rows=hash_rows)
  _check_share(test_share)
  inputs = _read_inputs(path, missing_flags)
  lines = len(inputs.labels)
  split = lines - round(lines * test_share)
  end = lines if test_max is None else min(lines, split + test_max)
  if not 0 < split < end:
    raise UserError(
      'there must be lines to train on and lines to test on',
      got=f'{lines} lines, test_share {test_share}, test_max {test_max}',
      where=str(path),
      mend='give more lines or another test_share or test_max',
    )
  train, test = inputs.part(0, split), inputs.part(split, end)
  words = fit(train.id_columns())
  return Dataset(
    name=f'{pathlib.Path(path).name}, lines 1-{split:,} to train,'
    f' {split + 1:,}-{end:,} to test',
    tables=tuple(map(Table, TABLES, words.rows)),
    dense_features=train.dense.shape[1],
    train=functools.partial(
      ColumnBatches, train.columns(words), shuffle_seed=shuffle_seed
    ),
    test=functools.partial(
      ColumnBatches, test.columns(words), epochs=1, pad_remainder=True
    ),
    train_inputs=split,
    base_rate=float(train.labels.mean(dtype=np.float64)),
  )


class _Inputs(NamedTuple):
  """Inputs whose ids have no rows yet; 5 bytes per id while a file is read."""

  labels: Float[np.ndarray, ' n']
  dense: Float[np.ndarray, 'n I']
  ids: UInt32[np.ndarray, 'n 26']
  missing_ids: Bool[np.ndarray, 'n 26']

  def part(self, start: int, stop: int) -> '_Inputs':
    return _Inputs(*(array[start:stop] for array in self))

  def id_columns(self) -> Iterator[vocabulary.Ids]:
    for table in range(len(TABLES)):
      ids = self.ids[:, table].astype(np.int64)
      ids[self.missing_ids[:, table]] = vocabulary.MISSING
      yield ids

  def columns(self, words: vocabulary.Vocabulary) -> Columns:
    lookups = global_rows(words.map(self.id_columns()), words.rows)
    return Columns(self.dense, lookups, self.labels)


def _read_inputs(path: str | os.PathLike[str], missing_flags: bool) -> _Inputs:
  parts = []
  for block in text.read_blocks(path):
    fields = parse(block)
    dense = dense_features(fields, missing_flags)
    missing = fields.missing[:, len(INTEGERS) :]
    parts.append(_Inputs(fields.labels, dense, fields.ids, missing))
  return _Inputs(*map(np.concatenate, zip(*parts, strict=True)))


def _check_share(test_share: float) -> None:
  if not 0 < test_share < 1:
    raise UserError(
      'test_share must be between 0 and 1, both excluded',
      got=test_share,
      where='config.data.test_share',
      mend='hold out a part of the lines',
    )


_DIGITS = np.full(256, 99)
for _value, _digit in enumerate('0123456789abcdef'):
  _DIGITS[[ord(_digit), ord(_digit.upper())]] = _value
# Marked no_type_check because numba cannot compile what jaxtyping's hook wraps.
_compiled = numba.njit(nogil=True, cache=True)
_TAB, _NEWLINE, _MINUS = b'\t\n-'
_MAX_DIGITS, _MAX_ID_DIGITS = 18, 8  # fit i64 and u32


@_compiled
@no_type_check
def _number(characters: np.ndarray, at: int, base: int) -> tuple[int, int]:
  """Value of the digits from `at` on, and the place where they end."""
  value = 0
  while _DIGITS[characters[at]] < base:
    value = value * base + _DIGITS[characters[at]]
    at += 1
  return value, at


@_compiled
@no_type_check
def _parse_integers(
  characters: np.ndarray, at: int, values: np.ndarray, missing: np.ndarray
) -> int:
  """Fills i64[13] and bool[13]; returns the place after them, or -1."""
  for column in range(len(values)):
    negative = characters[at] == _MINUS
    value, end = _number(characters, at + negative, 10)
    digits = end - at - negative
    # A sign needs a digit after it; without one, the field may be empty.
    if characters[end] != _TAB or not negative <= digits <= _MAX_DIGITS:
      return -1
    values[column] = -value if negative else value
    missing[column] = digits == 0
    at = end + 1
  return at


@_compiled
@no_type_check
def _parse_ids(
  characters: np.ndarray, at: int, values: np.ndarray, missing: np.ndarray
) -> int:
  """Fills u32[26] and bool[26]; returns the place after them, or -1."""
  for column in range(len(values)):
    value, end = _number(characters, at, 16)
    delimiter = _TAB if column + 1 < len(values) else _NEWLINE
    if characters[end] != delimiter or end - at > _MAX_ID_DIGITS:
      return -1
    values[column], missing[column] = value, end == at
    at = end + 1
  return at


@_compiled
@no_type_check
def _parse_lines(
  characters: np.ndarray,
  labels: np.ndarray,
  integers: np.ndarray,
  ids: np.ndarray,
  missing: np.ndarray,
) -> int:
  """Fills the arrays of `Fields`; returns the first bad line, or n."""
  # A bad field ends early, at a character that is no delimiter, and a line
  # of too few or too many fields has the wrong one somewhere: the test after
  # each field finds them all.
  at = 0
  for line in range(len(labels)):
    labels[line], end = _number(characters, at, 2)
    if end != at + 1 or characters[end] != _TAB:
      return line
    flags = missing[line]
    at = _parse_integers(characters, end + 1, integers[line], flags[:13])
    if at >= 0:
      at = _parse_ids(characters, at, ids[line], flags[13:])
    if at < 0:
      return line
  return len(labels)


class _Rule(NamedTuple):
  """What a kind of field must be; the grammar that `_parse_lines` reads."""

  pattern: re.Pattern[bytes]
  rule: str
  mend: str


_LABEL = _Rule(
  re.compile(rb'[01]'), 'a label must be 0 or 1', 'write 1 for a click, else 0'
)
_INTEGER = _Rule(
  re.compile(rb'(-?[0-9]{1,18})?'),
  'an integer field must be empty or hold up to 18 decimal digits',
  'write a whole number, or nothing where it is missing',
)
_ID = _Rule(
  re.compile(rb'[0-9a-fA-F]{0,8}'),
  'an id field must be empty or hold up to 8 hex digits',
  'write a 32-bit hex number, or nothing where it is missing',
)
_RULES = (_LABEL, *[_INTEGER] * len(INTEGERS), *[_ID] * len(TABLES))


def _line_error(line: bytes, where: str) -> UserError:
  """The error of a line that `_parse_lines` found bad."""
  values = line.split(b'\t')
  if len(values) != len(COLUMNS):
    last = COLUMNS[min(len(values), len(COLUMNS)) - 1]
    return UserError(
      f'a line must have {len(COLUMNS)} fields between tabs',
      got=f'{len(values)}, the last being {text.shown(values[-1])}',
      where=f'{where}, after column {last}',
      mend='write the label, 13 integers and 26 ids, empty where missing',
    )
  fields = zip(COLUMNS, values, _RULES, strict=True)
  column, value, rule = next(
    (c, v, r) for c, v, r in fields if not r.pattern.fullmatch(v)
  )
  return UserError(
    rule.rule,
    got=text.shown(value),
    where=f'{where}, column {column}',
    mend=rule.mend,
  )
