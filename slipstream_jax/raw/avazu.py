"""Avazu's click logs: a CSV file with a header, in the order of time.

The format is that of Kaggle's Click-Through Rate Prediction of 2014: id,
click, hour (YYMMDDHH), and 21 categorical fields, of which those of sites,
apps and devices are hex and the others decimal. The table set is RM4's of
arXiv 2404.04270: one dense feature, the hour of the day, and a table for each
categorical field. There is no weekday: ten days hold too few of them.
"""

from collections.abc import Iterator
import os
import pathlib
from typing import NamedTuple, no_type_check

from jaxtyping import Bool, Float, Int
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.hashing import kernel
from slipstream_jax.raw import avazu_errors as errors
from slipstream_jax.raw import text
from slipstream_jax.raw.bad_lines import BadLines
from slipstream_jax.raw.base import Chunk, MISSING, Part, RawData
from slipstream_jax.raw.digits import number

COLUMNS = errors.COLUMNS
TABLES = COLUMNS[3:]
"""The categorical fields, each with a table of its name; F = 21."""
ONE_DAY_TEST_SHARE = 0.2
"""Share of the inputs to test on where all are of one day."""


_Good = Bool[np.ndarray, ' n']


class Fields(NamedTuple):
  """Fields of n lines as they stand in the file, but for their id."""

  labels: Float[np.ndarray, ' n']
  """0.0 or 1.0, f32."""
  hours: Int[np.ndarray, ' n']
  """YYMMDDHH, i32."""
  ids: Int[np.ndarray, 'n 21']
  """The categorical fields, i64: `MISSING` where empty. A negative v stands
  as v - 2, for C20's -1 is an id, and `MISSING` and `END` are none."""


class _Pass:
  """What one pass over a file has seen so far."""

  def __init__(self, bad_lines: int):
    self.bad = BadLines(bad_lines)
    self.days: dict[int, int] = {}  # YYMMDD to inputs, in file order


def avazu_raw(
  path: str | os.PathLike[str],
  *,
  test_share: float | None = None,
  bad_lines: int = 0,
) -> RawData:
  """Avazu's train.csv, plain or gzip, as a raw data set.

  To test on, it holds out the last day; where there is but one, the last
  fifth of its inputs. RM4's 32.3 M training inputs are a `test_share` of 0.2.

  Args:
    path: the file; it is not read yet.
    test_share: share of the inputs to hold out, from the end, instead.
    bad_lines: lines that may be skipped, of those that break the format.

  Raises:
    UserError: a bad argument. Reading raises it for a file that cannot be
      read, one bad line too many, and for days out of order.
  """
  path = pathlib.Path(path)
  _check(test_share)
  latest = [_Pass(bad_lines)]

  def chunks() -> Iterator[tuple[Chunk, int]]:
    latest[0] = _Pass(bad_lines)
    for block in text.read_blocks(path):
      yield _chunk(_parse(block, latest[0])), block.read

  def split(inputs: int, parts: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    del parts  # there is one
    if test_share is not None:
      return _split(inputs, round(inputs * test_share))
    if sum(latest[0].days.values()) != inputs:  # not read to its end here
      for _ in chunks():
        pass
    days = list(latest[0].days.values())
    if len(days) < 2:
      return _split(inputs, round(inputs * ONE_DAY_TEST_SHARE))
    return _split(inputs, days[-1])

  held_out = (
    f'last day to test (last {ONE_DAY_TEST_SHARE:.0%} of a single day)'
    if test_share is None
    else f'last {test_share:.3g} of its inputs to test'
  )
  return RawData(
    name=f'Avazu {path.name}, {held_out}',
    tables=TABLES,
    dense_features=1,
    parts=(Part(str(path), text.size(path), chunks),),
    split=split,
    skipped=lambda: latest[0].bad.count,
    settings={'test_share': test_share},
    format='avazu',
  )


def parse(block: text.Block) -> Fields:
  """Fields of a block's lines; the file's first line is its header.

  Raises:
    UserError: a line that breaks the format; names the first one, with its
      column and value. Or its day is before that of the line before.
  """
  return _parse(block, _Pass(0))


def _parse(block: text.Block, seen: _Pass) -> Fields:
  lines = block.num_lines
  fields = Fields(
    np.zeros(lines, np.float32),
    np.zeros(lines, np.int32),
    # Each column contiguous, as they are used one by one.
    np.zeros((len(TABLES), lines), np.int64).T,
  )
  good = _fill(fields, block, seen.bad)
  _count_days(fields.hours, good, block, seen)
  if good.all():
    return fields
  return Fields(
    fields.labels[good], fields.hours[good], fields.ids.T[:, good].T
  )


def _fill(fields: Fields, block: text.Block, bad: BadLines) -> _Good:
  """Parses the block into `fields`; tells which lines are inputs, bool[n]."""
  lines = block.num_lines
  good = np.ones(lines, np.bool_)
  line = at = 0
  if block.first_line == 1:
    at = block.text.index(b'\n') + 1
    errors.check_header(block.text[: at - 1], block.where(0))
    good[0], line = False, 1
  if not block.ended and line < lines:  # a block of that line alone
    bad.add(errors.torn_error(block.text[:-1], block.where(0)))
    good[0], line = False, 1
  characters = np.frombuffer(block.text, np.uint8)
  while True:
    line, at = _parse_lines(characters, at, line, *fields)
    if line == lines:
      return good
    end = block.text.index(b'\n', at)
    bad.add(errors.line_error(block.text[at:end], block.where(line)))
    good[line] = False
    line, at = line + 1, end + 1


def _count_days(
  hours: Int[np.ndarray, ' n'],
  good: _Good,
  block: text.Block,
  seen: _Pass,
) -> None:
  """Adds the block's days to those seen, which must be in order."""
  (lines,) = np.nonzero(good)
  days = hours[lines] // 100
  before = max(seen.days, default=0)
  falls = np.flatnonzero(np.diff(days, prepend=before) < 0)
  if len(falls):
    line = int(lines[falls[0]])
    error = errors.order_error(int(hours[line]), block.where(line))
    raise error
  for day, inputs in zip(*np.unique(days, return_counts=True), strict=True):
    seen.days[int(day)] = seen.days.get(int(day), 0) + int(inputs)


def _chunk(fields: Fields) -> Chunk:
  """Dense is the hour of the day, from 0.0 to 23/24."""
  dense = (fields.hours % 100).astype(np.float32) / np.float32(24)
  return Chunk(fields.labels, dense[:, None], fields.ids)


def _split(inputs: int, held_out: int) -> dict[str, tuple[int, int]]:
  first = inputs - held_out
  return {'train': (0, first), 'test': (first, inputs)}


def _check(test_share: float | None) -> None:
  if test_share is not None and not 0 < test_share < 1:
    raise UserError(
      'test_share must be between 0 and 1, both excluded, or None',
      got=test_share,
      where='config.data.test_share',
      mend='hold out a part of the inputs, or None for the last day',
    )


_COMMA, _NEWLINE, _MINUS = b',\n-'
_BASES = np.array([16 if c in errors.HEX else 10 for c in TABLES])
_MAX_DIGITS = np.where(_BASES == 16, errors.MAX_HEX, errors.MAX_DECIMAL)


@kernel
@no_type_check
def _parse_ids(characters: np.ndarray, at: int, ids: np.ndarray) -> int:
  """Fills i64[21]; returns the place after them, or -1."""
  for column in range(len(ids)):
    base = _BASES[column]
    negative = base == 10 and characters[at] == _MINUS
    value, end = number(characters, at + negative, base)
    digits = end - at - negative
    delimiter = _COMMA if column + 1 < len(ids) else _NEWLINE
    if characters[end] != delimiter or digits > _MAX_DIGITS[column]:
      return -1
    if negative:
      if digits == 0:
        return -1
      ids[column] = -value - 2
    else:
      ids[column] = value if digits else MISSING
    at = end + 1
  return at


@kernel
@no_type_check
def _is_hour(hour: int) -> bool:
  """Whether YYMMDDHH has a month, a day and an hour that can be."""
  month, day = hour // 10000 % 100, hour // 100 % 100
  return 1 <= month <= 12 and 1 <= day <= 31 and hour % 100 < 24


@kernel
@no_type_check
def _parse_lines(
  characters: np.ndarray,
  at: int,
  first: int,
  labels: np.ndarray,
  hours: np.ndarray,
  ids: np.ndarray,
) -> tuple[int, int]:
  """Fills the arrays of `Fields` from line `first` on, which is at `at`.

  Returns the first bad line and its place, or n and the block's length.
  """
  for line in range(first, len(labels)):
    start = at
    # The id is no feature, and some do not fit i64: any text will do.
    while characters[at] != _COMMA and characters[at] != _NEWLINE:
      at += 1
    if at == start or characters[at] != _COMMA:
      return line, start
    labels[line], end = number(characters, at + 1, 2)
    if end != at + 2 or characters[end] != _COMMA:
      return line, start
    at = end + 1
    hours[line], end = number(characters, at, 10)
    if end != at + 8 or characters[end] != _COMMA or not _is_hour(hours[line]):
      return line, start
    at = _parse_ids(characters, end + 1, ids[line])
    if at < 0:
      return line, start
  return len(labels), at
