"""Lines of Criteo's click logs: label, 13 integers, 26 hex ids.

Tab separated, without a header; any field but the label may be empty
(missing). Ids are 32-bit numbers, in upper or lower case.
"""

import re
from typing import NamedTuple, no_type_check

from jaxtyping import Bool, Float, Int, UInt32
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.hashing import kernel
from slipstream_jax.raw import text
from slipstream_jax.raw.bad_lines import BadLines
from slipstream_jax.raw.base import MISSING
from slipstream_jax.raw.digits import number

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


def parse(block: text.Block, bad: BadLines | None = None) -> Fields:
  """Fields of a block's lines, in file order.

  Args:
    block: the lines.
    bad: takes those that break the format, which are then left out; None
      allows none.

  Raises:
    UserError: a line that breaks the format and may not be skipped; names it,
      its first bad column and the value there.
  """
  lines = block.num_lines
  fields = Fields(
    np.zeros(lines, np.float32),
    np.zeros((lines, len(INTEGERS)), np.int64),
    np.zeros((lines, len(TABLES)), np.uint32),
    np.zeros((lines, len(COLUMNS) - 1), np.bool_),
  )
  bad = bad or BadLines()
  characters = np.frombuffer(block.text, np.uint8)
  good = line = at = 0
  while line < lines:
    room = slice(good, good + lines - line)
    parsed, at = _parse_lines(characters, at, *(a[room] for a in fields))
    good, line = good + parsed, line + parsed
    if line < lines:
      end = block.text.index(b'\n', at)
      bad.add(_line_error(block.text[at:end], block.where(line)))
      line, at = line + 1, end + 1
  return fields if good == lines else Fields(*(a[:good] for a in fields))


def check_ended(block: text.Block) -> UserError | None:
  """The error of a last line that may be cut off; None for whole blocks.

  Ids have 8 digits in the published files. A last line without a line end is
  taken as whole only if its last id has them all.
  """
  last = block.text[block.text.rfind(b'\t') + 1 : -1]
  fields = block.text.count(b'\t') + 1
  if block.ended or (fields >= len(COLUMNS) and len(last) >= _MAX_ID_DIGITS):
    return None
  return UserError(
    "a file's last line must be whole, with a line end after it",
    got=f'{fields} fields, the last being {text.shown(last)}',
    where=block.where(0),
    mend='fetch the file again, or remove the line',
  )


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


def raw_ids(fields: Fields) -> Int[np.ndarray, 'n 26']:
  """Ids of C1 to C26, i64; `MISSING` where there is none.

  Each column is contiguous in memory, as they are used one by one.
  """
  turned = np.empty((len(TABLES), len(fields.labels)), np.int64)
  _turn(fields.ids, fields.missing, turned)
  return turned.T


_TAB, _NEWLINE, _MINUS = b'\t\n-'
_MAX_DIGITS, _MAX_ID_DIGITS = 18, 8  # fit i64 and u32


@kernel
@no_type_check
def _parse_integers(
  characters: np.ndarray, at: int, values: np.ndarray, missing: np.ndarray
) -> int:
  """Fills i64[13] and bool[13]; returns the place after them, or -1."""
  for column in range(len(values)):
    negative = characters[at] == _MINUS
    value, end = number(characters, at + negative, 10)
    digits = end - at - negative
    # A sign needs a digit after it; without one, the field may be empty.
    if characters[end] != _TAB or not negative <= digits <= _MAX_DIGITS:
      return -1
    values[column] = -value if negative else value
    missing[column] = digits == 0
    at = end + 1
  return at


@kernel
@no_type_check
def _parse_ids(
  characters: np.ndarray, at: int, values: np.ndarray, missing: np.ndarray
) -> int:
  """Fills u32[26] and bool[26]; returns the place after them, or -1."""
  for column in range(len(values)):
    value, end = number(characters, at, 16)
    delimiter = _TAB if column + 1 < len(values) else _NEWLINE
    if characters[end] != delimiter or end - at > _MAX_ID_DIGITS:
      return -1
    values[column], missing[column] = value, end == at
    at = end + 1
  return at


@kernel
@no_type_check
def _parse_lines(
  characters: np.ndarray,
  at: int,
  labels: np.ndarray,
  integers: np.ndarray,
  ids: np.ndarray,
  missing: np.ndarray,
) -> tuple[int, int]:
  """Fills the arrays of `Fields` from the line that starts at `at` on.

  Returns the number of lines before the first bad one, and its start.
  """
  # A bad field ends early, at a character that is no delimiter, and a line
  # of too few or too many fields has the wrong one somewhere: the test after
  # each field finds them all.
  for line in range(len(labels)):
    start = at
    labels[line], end = number(characters, at, 2)
    if end != at + 1 or characters[end] != _TAB:
      return line, start
    flags = missing[line]
    at = _parse_integers(characters, end + 1, integers[line], flags[:13])
    if at >= 0:
      at = _parse_ids(characters, at, ids[line], flags[13:])
    if at < 0:
      return line, start
  return len(labels), at


_LINES = 256  # turned at a time, so that they stay in the nearest cache


@kernel
@no_type_check
def _turn(ids: np.ndarray, missing: np.ndarray, turned: np.ndarray) -> None:
  """Fills i64[F, n] from u32[n, F] and bool[n, 13 + F]."""
  for first in range(0, len(ids), _LINES):
    for table in range(len(turned)):
      for line in range(first, min(first + _LINES, len(ids))):
        gone = missing[line, 13 + table]
        turned[table, line] = MISSING if gone else np.int64(ids[line, table])


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
