"""Lines of Taobao's UserBehavior log: user, item, category, behaviour, time.

Comma separated, no header. The set is Alibaba Tianchi's "User Behavior Data
from Taobao for Recommendation".
"""

import os
import re
from typing import NamedTuple, no_type_check

from jaxtyping import Bool, Int, UInt32
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.hashing import kernel
from slipstream_jax.raw import text

COLUMNS = ('user', 'item', 'category', 'behaviour', 'time')
BEHAVIOURS = ('pv', 'cart', 'fav', 'buy')


class Fields(NamedTuple):
  """Fields of n lines as they stand in the file; 0 where a line is bad."""

  users: UInt32[np.ndarray, ' n']
  items: UInt32[np.ndarray, ' n']
  categories: UInt32[np.ndarray, ' n']
  behaviours: Int[np.ndarray, ' n']
  """Place in `BEHAVIOURS`, i8."""
  times: Int[np.ndarray, ' n']
  """Seconds since 1970, i32."""
  good: Bool[np.ndarray, ' n']
  """False for a line that breaks the format."""


def parse(block: text.Block) -> Fields:
  """Fields of a block's lines, bad ones marked."""
  lines = block.num_lines
  fields = Fields(
    np.zeros(lines, np.uint32),
    np.zeros(lines, np.uint32),
    np.zeros(lines, np.uint32),
    np.zeros(lines, np.int8),
    np.zeros(lines, np.int32),
    np.zeros(lines, np.bool_),
  )
  _parse_lines(np.frombuffer(block.text, np.uint8), _CODES, *fields)
  return fields


def read_events(
  path: str | os.PathLike[str], bad_lines: int = 0
) -> tuple[list[np.ndarray], int]:
  """Columns of `Events`, in the file's order, and how many lines were skipped.

  Args:
    path: plain or gzip text.
    bad_lines: lines that break the format and may be skipped. A file that was
      cut off has one, its last: a time has 10 digits, or it is no time.

  Raises:
    UserError: the file cannot be read, or a line too many is bad; names it,
      with column and value.
  """
  if bad_lines < 0:
    raise UserError(
      'bad_lines must be at least 0',
      got=bad_lines,
      where='config.data.bad_lines',
      mend='give the number of lines that may be skipped',
    )
  kinds = np.uint32, np.uint32, np.uint32, np.int32
  joined = [np.empty(0, kind) for kind in kinds]
  skipped = 0
  for block in text.read_blocks(path):
    users, items, categories, _, times, good = parse(block)
    bad = np.flatnonzero(~good)
    if skipped + len(bad) > bad_lines:
      line = int(bad[bad_lines - skipped])
      raise _line_error(block.text.split(b'\n')[line], block.where(line))
    skipped += len(bad)
    columns = users, items, categories, times
    for whole, column in zip(joined, columns, strict=True):
      # Grown in place: parts joined at the end would be held twice.
      whole.resize(len(whole) + np.count_nonzero(good), refcheck=False)
      whole[len(whole) - np.count_nonzero(good) :] = column[good]
  return joined, skipped


_CODES = np.array([int.from_bytes(name.encode()) for name in BEHAVIOURS])
_COMMA, _NEWLINE, _ZERO = b',\n0'
_FIRST_TIME, _LAST_TIME = 10**9, 2**31 - 1


@kernel
@no_type_check
def _number(characters: np.ndarray, at: int) -> tuple[int, int]:
  """Value of up to 10 digits, or -1, and the place where they end."""
  value, first = 0, at
  while _ZERO <= characters[at] < _ZERO + 10:
    # Of more digits the value wraps around, and is not looked at.
    value = value * 10 + characters[at] - _ZERO
    at += 1
  return (value if 0 < at - first <= 10 else -1), at


@kernel
@no_type_check
def _word(
  characters: np.ndarray, at: int, codes: np.ndarray
) -> tuple[int, int]:
  """Place of the word among the codes, or -1, and where it ends."""
  value = 0
  while characters[at] != _COMMA and characters[at] != _NEWLINE:
    value = min(value * 256 + characters[at], 1 << 40)
    at += 1
  for code in range(len(codes)):
    if codes[code] == value:
      return code, at
  return -1, at


@kernel
@no_type_check
def _parse_lines(
  characters: np.ndarray,
  codes: np.ndarray,
  users: np.ndarray,
  items: np.ndarray,
  categories: np.ndarray,
  behaviours: np.ndarray,
  times: np.ndarray,
  good: np.ndarray,
) -> None:
  """Fills the arrays of `Fields`."""
  at = 0
  for line in range(len(good)):
    # No field reaches past its line: all end at the first other character.
    user, at = _number(characters, at)
    item, category, word, time = -1, -1, -1, -1
    if characters[at] == _COMMA:
      item, at = _number(characters, at + 1)
    if item >= 0 and characters[at] == _COMMA:
      category, at = _number(characters, at + 1)
    if category >= 0 and characters[at] == _COMMA:
      word, at = _word(characters, at + 1, codes)
    if word >= 0 and characters[at] == _COMMA:
      time, at = _number(characters, at + 1)
    fits = max(user, item, category) < 1 << 32 and user >= 0
    fits = fits and _FIRST_TIME <= time <= _LAST_TIME
    if fits and characters[at] == _NEWLINE:
      users[line], items[line], categories[line] = user, item, category
      behaviours[line], times[line], good[line] = word, time, True
    while characters[at] != _NEWLINE:
      at += 1
    at += 1


class _Rule(NamedTuple):
  """What a kind of field must be; the grammar that `_parse_lines` reads."""

  pattern: re.Pattern[bytes]
  most: int
  rule: str


_ID = _Rule(
  re.compile(rb'[0-9]{1,10}'), 2**32 - 1, 'an id must be a number below 2**32'
)
_WORD = _Rule(
  re.compile(b'|'.join(name.encode() for name in BEHAVIOURS)),
  0,
  f'a behaviour must be one of {", ".join(BEHAVIOURS)}',
)
_TIME = _Rule(
  re.compile(rb'[1-9][0-9]{9}'),
  _LAST_TIME,
  'a time must be in seconds, 10 digits up to 2**31 - 1',
)
_RULES = (_ID, _ID, _ID, _WORD, _TIME)


def _line_error(line: bytes, where: str) -> UserError:
  """The error of a line that `_parse_lines` found bad."""
  mend = 'mend the line, or allow for it with config.data.bad_lines'
  values = line.split(b',')
  if len(values) != len(COLUMNS):
    return UserError(
      f'a line must have {len(COLUMNS)} fields between commas',
      got=f'{len(values)}, the last being {text.shown(values[-1])}',
      where=where,
      mend=mend,
    )
  fields = zip(COLUMNS, values, _RULES, strict=True)
  column, value, rule = next(
    (c, v, r)
    for c, v, r in fields
    if not r.pattern.fullmatch(v) or (r.most and int(v) > r.most)
  )
  return UserError(
    rule.rule,
    got=text.shown(value),
    where=f'{where}, column {column}',
    mend=mend,
  )
