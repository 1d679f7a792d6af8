"""Slow parsers that know of a whole file whether it is one, field by field."""

import functools
import gzip
import re
import zlib

from slipstream_jax.formats import avazu, criteo, taobao
from tests.support.texts import taobao as taobao_text


class Bad(Exception):
  """It is none."""


def _lines(data):
  """Lines of text, plain or gzip, without their ends."""
  if data[:2] == b'\x1f\x8b':
    try:
      data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
      raise Bad from error
  lines = data.replace(b'\r\n', b'\n').split(b'\n')
  return lines[:-1] if lines[-1] == b'' else lines


def _number(field, base, digits, sign=False):
  pattern = rb'-?[0-9]{1,%d}' if sign else rb'[0-9]{1,%d}'
  if base == 16:
    pattern = rb'[0-9a-fA-F]{1,%d}'
  if not field:
    return -1
  if not re.fullmatch(pattern % digits, field):
    raise Bad(field)
  number = int(field, base)
  return number if number >= 0 else number - 2


def criteo_rows(data):
  """Label, integers and ids of every line."""
  return [list(_criteo_row(line)) for line in _lines(data)]


# Files that were changed somewhere have most of their lines in common.
@functools.lru_cache(1 << 12)
def _criteo_row(line):
  fields = line.split(b'\t')
  if len(fields) != 40 or fields[0] not in (b'0', b'1'):
    raise Bad(line)
  integers = [_number(field, 10, 18, True) for field in fields[1:14]]
  ids = [_number(field, 16, 8) for field in fields[14:]]
  return int(fields[0]), *integers, *ids


def avazu_rows(data):
  """Click, hour and ids of every line."""
  header, *lines = _lines(data)
  if header.removeprefix(b'\xef\xbb\xbf') != avazu.SCHEMA.header:
    raise Bad(header)
  return [list(_avazu_row(line)) for line in lines]


@functools.lru_cache(1 << 12)
def _avazu_row(line):
  fields = line.split(b',')
  if len(fields) != 24 or not fields[0] or fields[1] not in (b'0', b'1'):
    raise Bad(line)
  hour = fields[2]
  if not re.fullmatch(rb'\d{8}', hour):
    raise Bad(hour)
  month, day, of_day = int(hour[2:4]), int(hour[4:6]), int(hour[6:])
  if not (1 <= month <= 12 and 1 <= day <= 31 and of_day < 24):
    raise Bad(hour)
  pairs = zip(avazu.TABLES, fields[3:], strict=True)
  ids = [
    _number(field, 16, 8) if name in avazu.HEX else _number(field, 10, 18, True)
    for name, field in pairs
  ]
  return int(fields[1]), int(hour), *ids


def taobao_rows(data):
  """User, item, category and time of every line."""
  whole = b'\n'.join(_lines(data))
  rows = taobao_text.slow_parse(whole + b'\n')
  if not rows or None in rows:
    raise Bad
  return [[*row[:3], row[4]] for row in rows]


SCHEMAS = {
  'criteo': (criteo.SCHEMA, criteo_rows, slice(None)),
  'avazu': (avazu.SCHEMA, avazu_rows, slice(1, None)),
  'taobao': (taobao.SCHEMA, taobao_rows, [0, 1, 2, 4]),
}
"""By format: what lines look like, its oracle, and the columns that it has."""
