"""The grammar of Avazu's lines, as the errors of those that break it tell it.

The fast parser only finds which line is bad; why, is asked here, of that line
alone.
"""

import re
from typing import NamedTuple

from slipstream_jax.errors import UserError
from slipstream_jax.raw import text

HEX = (
  'site_id',
  'site_domain',
  'site_category',
  'app_id',
  'app_domain',
  'app_category',
  'device_id',
  'device_ip',
  'device_model',
)
"""Fields of hex digits; all other categorical ones are decimal."""
COLUMNS = (
  *('id', 'click', 'hour', 'C1', 'banner_pos', *HEX),
  *('device_type', 'device_conn_type', *(f'C{i}' for i in range(14, 22))),
)
MAX_HEX, MAX_DECIMAL = 8, 18  # digits; they fit u32 and i64
_BOM = b'\xef\xbb\xbf'
_HEADER = ','.join(COLUMNS).encode()


def check_header(line: bytes, where: str) -> None:
  """Looks at a file's first line; spreadsheets put a byte order mark there.

  Raises:
    UserError: it is no header of Avazu's training file.
  """
  if line.removeprefix(_BOM) == _HEADER:
    return
  unlabelled = line.removeprefix(_BOM) == _HEADER.replace(b'click,', b'')
  raise UserError(
    f'the first line must be the header {text.shown(_HEADER)}, of'
    f' {len(COLUMNS)} columns',
    got='a header without click' if unlabelled else text.shown(line),
    where=where,
    mend='give the training file, the only one with clicks'
    if unlabelled
    else 'put the header of the training file there, columns in its order',
  )


def line_error(line: bytes, where: str) -> UserError:
  """The error of a line that the fast parser found bad."""
  values = line.split(b',')
  if line.removeprefix(_BOM) == _HEADER:
    return UserError(
      'a header must stand in the first line only',
      got='a second one',
      where=where,
      mend='remove it',
    )
  if len(values) != len(COLUMNS):
    last = COLUMNS[min(len(values), len(COLUMNS)) - 1]
    return UserError(
      f'a line must have {len(COLUMNS)} fields between commas',
      got=f'{len(values)}, the last being {text.shown(values[-1])}',
      where=f'{where}, after column {last}',
      mend='write one for each column of the header',
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


def torn_error(line: bytes, where: str) -> UserError:
  """The error of a last line that no line end follows.

  Its last field has no fixed length: nothing tells whether it is whole.
  """
  return UserError(
    "a file's last line must be whole, with a line end after it",
    got=f'a line that ends with {text.shown(line[line.rfind(b",") + 1 :])}',
    where=where,
    mend='fetch the file again, or remove the line',
  )


def order_error(hour: int, where: str) -> UserError:
  """The error of a line of a day before that of the line before."""
  return UserError(
    'days must be in order, for the last one is held out to test on',
    got=f'hour {hour} after a later day',
    where=f'{where}, column hour',
    mend='sort the lines below the header by that column',
  )


class _Rule(NamedTuple):
  """What a kind of field must be; the grammar that the parser reads."""

  pattern: re.Pattern[bytes]
  rule: str
  mend: str


_ID = _Rule(
  re.compile(rb'[^,]+'), 'an id must not be empty', 'write any text there'
)
_CLICK = _Rule(
  re.compile(rb'[01]'), 'a click must be 0 or 1', 'write 1 for a click, else 0'
)
_HOUR = _Rule(
  re.compile(
    rb'[0-9]{2}(0[1-9]|1[0-2])(0[1-9]|[12][0-9]|3[01])([01][0-9]|2[0-3])'
  ),
  'an hour must be YYMMDDHH',
  'write two digits each of year, month, day and hour',
)
_HEX = _Rule(
  re.compile(rb'[0-9a-fA-F]{0,%d}' % MAX_HEX),
  f'the field must be empty or hold up to {MAX_HEX} hex digits',
  'write a 32-bit hex number, or nothing where it is missing',
)
_DECIMAL = _Rule(
  re.compile(rb'(-?[0-9]{1,%d})?' % MAX_DECIMAL),
  f'the field must be empty or hold up to {MAX_DECIMAL} decimal digits',
  'write a whole number, or nothing where it is missing',
)
_RULES = (
  *(_ID, _CLICK, _HOUR),
  *(_HEX if column in HEX else _DECIMAL for column in COLUMNS[3:]),
)
