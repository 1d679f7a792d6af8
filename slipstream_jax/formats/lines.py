"""Lines of delimited fields: one parser and one set of errors for all formats.

A field is digits of some base, or a word. All fields are returned as i64.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import os
from typing import NamedTuple, no_type_check

from jaxtyping import Bool, Int
import numpy as np

from slipstream_jax.data.prefetch import ahead
from slipstream_jax.errors import UserError
from slipstream_jax.formats import text
from slipstream_jax.formats.base import BadLines, MISSING
from slipstream_jax.hashing import kernel

WORD = 256
"""Base of a word: its bytes are the digits."""
BOM = b'\xef\xbb\xbf'
"""Bytes that spreadsheets put at a file's start."""


class Column(NamedTuple):
  """Rules for the fields of a column."""

  name: str
  rule: str
  """What must hold, for the error of a field that breaks it."""
  hint: str
  """How to fix such a field."""
  base: int
  """Base of its digits: 2, 10, 16, or `WORD` for any text."""
  digits: tuple[int, int]
  """Fewest and most digits. If 0 digits are allowed, an empty field is
  `MISSING`. Values that do not fit i64 can be checked, but not used."""
  sign: bool = False
  """Whether a minus may come first. A negative v is returned as v - 2, because
  `MISSING` and `END` are not values."""
  fits: Callable[[Int[np.ndarray, ' n']], Bool[np.ndarray, ' n']] | None = None
  """Which values are valid. None: all."""


HEX = Column(
  '',
  'the field must be empty or hold up to 8 hex digits',
  'write a 32-bit hex number, or nothing where it is missing',
  16,
  (0, 8),
)
"""A hex id, or nothing."""
DECIMAL = Column(
  '',
  'the field must be empty or hold up to 18 decimal digits',
  'write a whole number, or nothing where it is missing',
  10,
  (0, 18),  # some integers of 19 digits do not fit i64
  sign=True,
)
"""A whole number, or nothing."""
ID = Column(
  '',
  'an id must be a number below 2**32',
  'write it as in the published file',
  10,
  (1, 10),
  fits=lambda ids: ids < 1 << 32,
)
"""An id that is never missing."""


def click(name: str) -> Column:
  """Returns a column of labels, 0 or 1."""
  rule = f'a {name} must be 0 or 1'
  return Column(name, rule, 'write 1 for a click, else 0', 2, (1, 1))


class Schema(NamedTuple):
  """A format of text files."""

  columns: tuple[Column, ...]
  delimiter: bytes
  """One character, or the same character repeated."""
  header: bytes | None = None
  """First line of every file. None if files have no header."""
  header_hint: str = ''
  """How to fix a file with another first line."""
  whole: int | None = 0
  """Length of the last field, in bytes, from which a last line without a line
  end counts as complete. 0: always. None: never."""


class Fields(NamedTuple):
  """Fields of n good lines, in file order."""

  values: Int[np.ndarray, 'columns n']
  """Values, i64. Each column is contiguous."""
  lines: Int[np.ndarray, ' n']
  """Number of each line in its file, from 1."""


def read(
  path: str | os.PathLike[str], schema: Schema, bad: BadLines
) -> Iterator[tuple[text.Block, Fields]]:
  """Reads a file in blocks of 16 MiB, each with the fields of its good lines.

  Raises:
    UserError: the file cannot be read, its header is wrong, or it has too many
      bad lines.
  """
  bad.start(str(path))
  # Ends the thread that reads ahead if the caller stops early.
  with contextlib.closing(ahead(text.read_blocks(path))) as blocks:
    for block in blocks:
      cut_off = _cut_off_error(block, schema)
      if cut_off is None:
        yield block, parse(block, schema, bad)
      else:
        bad.add(str(path), cut_off)


def read_columns(
  path: str | os.PathLike[str],
  schema: Schema,
  bad: BadLines,
  dtypes: Sequence[str],
  pick: Callable[[Int[np.ndarray, 'columns n']], Sequence[np.ndarray]],
) -> list[np.ndarray]:
  """Reads columns of a whole file into memory.

  `pick` maps the fields of some lines to these columns. The others are as in
  `read`.
  """
  columns = [np.empty(0, dtype) for dtype in dtypes]
  for _, fields in read(path, schema, bad):
    for column, values in zip(columns, pick(fields.values), strict=True):
      # Grown in place, because joining parts at the end needs twice the memory.
      # No other reference is used, but numpy would count the loop's names.
      column.resize(len(column) + len(values), refcheck=False)
      column[len(column) - len(values) :] = values
  return columns


def parse(
  block: text.Block, schema: Schema, bad: BadLines | None = None
) -> Fields:
  """Parses a block's lines. Malformed lines are left out and counted in `bad`.

  Raises:
    UserError: a malformed line that may not be skipped, with its first bad
      column and the value there, or a wrong header.
  """
  bad = bad or BadLines()
  if schema.header and block.first_line == 1:
    header, _, rest = block.text.partition(b'\n')
    if header.removeprefix(BOM) != schema.header:
      raise UserError(
        f'the first line must be the header {text.quoted(schema.header)}',
        got=text.quoted(header),
        where=block.where(0),
        hint=schema.header_hint,
      )
    block = block._replace(first_line=2, text=rest)
  columns, count = schema.columns, block.num_lines
  wrong = np.empty(count, np.int16)  # first bad column, or -1
  # A kernel takes a matrix, but not columns that hold text and functions. A
  # longer delimiter has empty fields between its characters.
  times = len(schema.delimiter)
  rules = np.zeros((times * len(columns) - times + 1, 4), np.int64)
  rules[::times] = [(c.base, c.sign, *c.digits) for c in columns]
  values = np.empty((len(rules), count), np.int64)
  characters = np.frombuffer(block.text, np.uint8)
  _parse_lines(characters, schema.delimiter[0], rules, values, wrong)
  values, wrong = values[::times], wrong // times
  # From its bad column on, a line's values are arbitrary. So only an earlier
  # column may replace it as the first bad one.
  for at, column in enumerate(columns):
    if column.fits:
      wrong[~column.fits(values[at]) & ((wrong < 0) | (wrong > at))] = at
  good = wrong < 0
  lines = block.first_line + np.flatnonzero(good)
  if len(lines) == len(good):
    return Fields(values, lines)
  all_lines = block.text.split(b'\n')
  for line in np.flatnonzero(~good):
    error = _line_error(
      all_lines[line], schema, int(wrong[line]), block.where(int(line))
    )
    bad.add(str(block.path), error)
  return Fields(values[:, good], lines)


def _line_error(
  line: bytes, schema: Schema, wrong: int, where: str
) -> UserError:
  """Returns the error of a line whose first bad column is number `wrong`."""
  fields, columns = line.split(schema.delimiter), schema.columns
  # Checked first, because the kernel only knows where a delimiter is missing.
  if len(fields) != len(columns):
    last = columns[min(len(fields), len(columns)) - 1]
    between = _BETWEEN[schema.delimiter]
    return UserError(
      f'a line must have {len(columns)} fields between {between}',
      got=f'{len(fields)}, the last being {text.quoted(fields[-1])}',
      where=f'{where}, after column {last.name}',
      hint=f'write all of {columns[0].name} to {columns[-1].name} there',
    )
  column = columns[wrong]
  return UserError(
    column.rule,
    got=text.quoted(fields[wrong]),
    where=f'{where}, column {column.name}',
    hint=column.hint,
  )


def _cut_off_error(block: text.Block, schema: Schema) -> UserError | None:
  """Returns the error of a last line that may be cut off, else None."""
  # A header that is cut off fails its own check.
  header = schema.header and block.first_line == 1
  if block.ended or header or schema.whole == 0:
    return None
  fields, whole = block.text[:-1].split(schema.delimiter), schema.whole
  if whole and len(fields) >= len(schema.columns) and len(fields[-1]) >= whole:
    return None
  return UserError(
    "a file's last line must be whole, with a line end after it",
    got=f'{len(fields)} fields, the last being {text.quoted(fields[-1])}',
    where=block.where(0),
    hint='fetch the file again, or remove the line',
  )


_BETWEEN = {b'\t': 'tabs', b',': 'commas', b'::': 'double colons'}
_NEWLINE, _MINUS = b'\n-'
_ONE = np.uint64(1)  # unsigned positions save a test of the sign per use
_LINES = 64  # transposed at a time, so that they stay in the L1 cache
_DIGITS = np.full(256, 99)  # 99 is no digit in any base, so it ends a number
for _value, _digit in enumerate('0123456789abcdef'):
  _DIGITS[[ord(_digit), ord(_digit.upper())]] = _value


@kernel
@no_type_check
def _number(
  characters: np.ndarray, at: np.uint64, base: int
) -> tuple[int, np.uint64]:
  """Parses the digits of u8[n] from `at` on. Returns value and end.

  The value wraps around if it does not fit i64.
  """
  # Needs no bound: a line end is not a digit, and every block ends with one.
  value, digit = 0, _DIGITS[characters[at]]
  while digit < base:
    value = value * base + digit
    at += _ONE
    digit = _DIGITS[characters[at]]
  return value, at


@kernel
@no_type_check
def _field(
  characters: np.ndarray, at: np.uint64, base: int, delimiter: int
) -> tuple[int, np.uint64]:
  """Parses a number or a word. Returns value and end."""
  # The two usual bases are constants, which is faster.
  if base == 16:
    return _number(characters, at, 16)
  if base == 10:
    return _number(characters, at, 10)
  if base < WORD:
    return _number(characters, at, base)
  value = 0
  while characters[at] != delimiter and characters[at] != _NEWLINE:
    value = value * WORD + characters[at]
    at += _ONE
  return value, at


@kernel
@no_type_check
def _parse_line(
  characters: np.ndarray,
  at: np.uint64,
  delimiter: int,
  rules: np.ndarray,
  values: np.ndarray,
) -> tuple[int, np.uint64]:
  """Fills i64[C]. Returns the first bad column, or -1, and the line's end."""
  # A bad field ends early, before a character that is not the delimiter. So
  # does a field of a line with too few or too many fields. The test after each
  # field therefore finds all errors.
  for column in range(len(rules)):
    base, sign = rules[column, 0], rules[column, 1]
    least, most = rules[column, 2], rules[column, 3]
    negative = sign != 0 and characters[at] == _MINUS
    if negative:
      at += _ONE
    value, end = _field(characters, at, base, delimiter)
    digits = np.int64(end - at)
    after = delimiter if column + 1 < len(rules) else _NEWLINE
    # A sign needs a digit after it. A field without a sign may be empty.
    if characters[end] != after or not max(least, negative) <= digits <= most:
      while characters[end] != _NEWLINE:
        end += _ONE
      return column, end
    if digits == 0:
      value = MISSING
    # -0 is 0. As -2 it would be `END`.
    values[column] = -value - 2 if negative and value > 0 else value
    at = end + _ONE
  return -1, at - _ONE


@kernel
@no_type_check
def _parse_lines(
  characters: np.ndarray,
  delimiter: int,
  rules: np.ndarray,
  values: np.ndarray,
  wrong: np.ndarray,
) -> None:
  """Parses n lines, u8.

  Args:
    characters: the lines.
    delimiter: between two fields.
    rules: i64[C, 4]: base, sign, fewest and most digits of each column.
    values: out, i64[C, n], set for good lines.
    wrong: out, i16[n], each line's first bad column, or -1.
  """
  # Lines come row by row, but values are stored by column. Storing each field
  # directly would touch a cache line per field.
  some = np.empty((_LINES, len(rules)), np.int64)
  at = np.uint64(0)
  for first in range(0, len(wrong), _LINES):
    end = min(first + _LINES, len(wrong))
    for line in range(first, end):
      wrong[line], at = _parse_line(
        characters, at, delimiter, rules, some[line - first]
      )
      at += _ONE
    for column in range(len(rules)):
      for line in range(first, end):
        values[column, line] = some[line - first, column]
