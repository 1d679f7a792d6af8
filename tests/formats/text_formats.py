"""Public formats of text: lines to write, and a slow reader that knows all."""

from collections.abc import Callable
import gzip
import io
import pathlib
import random
import re
from typing import Any, NamedTuple
import zlib

from slipstream_jax.formats import avazu, criteo, movielens, taobao
from slipstream_jax.formats.base import MISSING, RawData
from slipstream_jax.formats.lines import BOM, Schema
from slipstream_jax.formats.text import quoted

SHARED = pathlib.Path(__file__).resolve().parents[3] / 'shared' / 'data'
"""Samples of the real files, where they are."""


class Bad(Exception):
  """A file, line or field that the format does not allow."""

  def __init__(self, place: str = '', got: str = ''):
    """Takes what an error must say of the place in the line, and show."""
    super().__init__(place, got)
    self.place, self.got = place, got


class Field(NamedTuple):
  """The texts of a column: which are valid, their values, and random ones."""

  pattern: str
  value: Callable[[str], int]
  draw: Callable[[random.Random], str]


def _decimal(text: str) -> int:
  if not text:
    return MISSING
  return int(text) if int(text) >= 0 else int(text) - 2


def _between(first: int, end: int) -> Callable[[str], int]:
  def value(text: str) -> int:
    if not first <= int(text) < end:
      raise Bad
    return int(text)

  return value


def _hour(text: str) -> int:
  month, day, hour = int(text[2:4]), int(text[4:6]), int(text[6:])
  if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24):
    raise Bad
  return int(text)


def _word(text: str) -> int:
  return int.from_bytes(text.encode('latin-1'))


def _quoted(text: str) -> str:
  return quoted(text.encode('latin-1'))


def _last(fields: list[str]) -> str:
  return f'the last being {_quoted(fields[-1])}'


def _seldom(rng: random.Random, share: float, rare: str, usual: Any) -> str:
  return rare if rng.random() < share else f'{usual}'


def _draw_decimal(rng: random.Random) -> str:
  large = rng.randrange(-(10**18) + 1, 10**18)
  usual = _seldom(rng, 0.05, f'{large}', rng.randrange(-2, 1000))
  return _seldom(rng, 0.2, '', usual)


def _draw_hex(rng: random.Random) -> str:
  large = f'{rng.getrandbits(32):X}'
  usual = f'{int(rng.paretovariate(0.7)) % 500:08x}'
  return _seldom(rng, 0.1, '', _seldom(rng, 0.05, large, usual))


def _draw_id(rng: random.Random) -> str:
  large = f'{rng.getrandbits(32)}'
  return _seldom(rng, 0.05, large, 1 + int(rng.paretovariate(0.8)) % 50)


def _draw_between(first: int, end: int) -> Callable[[random.Random], str]:
  return lambda rng: f'{rng.randrange(first, end)}'


def _any_of(*words: str) -> Field:
  patterns = '|'.join(map(re.escape, words))
  return Field(patterns, _word, lambda rng: rng.choice(words))


BIT = Field('[01]', int, lambda rng: rng.choice('01'))
DECIMAL = Field('(-?[0-9]{1,18})?', _decimal, _draw_decimal)
HEX = Field('[0-9a-fA-F]{0,8}', lambda t: int(t or '-1', 16), _draw_hex)
ID = Field('[0-9]{1,10}', _between(0, 1 << 32), _draw_id)
ANY = Field('.+', lambda text: 0, _draw_id)
"""A column without use, whose values are not compared."""
HOUR = Field('[0-9]{8}', _hour, _draw_between(14102100, 14102124))
BEHAVIOUR = _any_of('pv', 'cart', 'fav', 'buy')
STARS = _any_of(
  *(f'{n / 2:g}' for n in range(1, 11)), *(f'{n}.0' for n in range(1, 6))
)


def _time(pattern: str, first: int, end: int) -> Field:
  drawn = _draw_between(978_300_760, 978_300_799)
  if first > 978_300_760:
    drawn = _draw_between(1_511_658_000, 1_511_658_099)
  return Field(pattern, _between(first, end), drawn)


class TextFormat(NamedTuple):
  """A format of lines of text."""

  schema: Schema
  raw: Callable[..., RawData]
  fields: tuple[Field, ...]
  sample: str = ''
  """A real file of it, below `SHARED`."""

  @property
  def columns(self) -> list[str]:
    return [column.name for column in self.schema.columns]

  @property
  def compared(self) -> list[int]:
    """Numbers of the columns whose values are used."""
    return [n for n, field in enumerate(self.fields) if field is not ANY]

  def lines(self, count: int, seed: int = 0) -> list[str]:
    """Random lines."""
    rng = random.Random(seed)
    between = self.schema.delimiter.decode()
    return [
      between.join(field.draw(rng) for field in self.fields)
      for _ in range(count)
    ]

  def with_field(self, column: str, text: str, line: str = '') -> str:
    """A line, by default a random one, but for one field."""
    between = self.schema.delimiter.decode()
    fields = (line or self.lines(1)[0]).split(between)
    fields[self.columns.index(column)] = text
    return between.join(fields)

  def text(self, lines: list[str], end: str = '\n') -> bytes:
    """A file of these lines."""
    first = [self.schema.header.decode()] if self.schema.header else []
    return ''.join(line + end for line in (*first, *lines)).encode()

  def write(self, path: pathlib.Path, lines: list[str]) -> pathlib.Path:
    """Writes a file of these lines; returns its path."""
    path.write_bytes(self.text(lines))
    return path

  def fields_of(self, line: str) -> list[int]:
    """Values of a line; raises `Bad`."""
    texts = line.split(self.schema.delimiter.decode())
    if len(texts) != len(self.fields):
      last = self.columns[min(len(texts), len(self.fields)) - 1]
      raise Bad(f', after column {last}', f'{len(texts)}, {_last(texts)}')
    values = []
    for name, field, text in zip(self.columns, self.fields, texts, strict=True):
      try:
        if not re.fullmatch(field.pattern, text):
          raise Bad
        values.append(field.value(text))
      except Bad:
        raise Bad(f', column {name}', _quoted(text)) from None
    return values

  def slow_rows(self, data: bytes, torn: bool = True) -> dict[int, Any]:
    """Values of every line by its number, or the `Bad` of it.

    Args:
      data: the file, plain or gzip. Raises `Bad` if it is none.
      torn: whether a last line without an end may have been cut off.
    """
    lines = unpacked(data).replace(b'\r\n', b'\n').split(b'\n')
    ended = lines[-1] == b''
    lines = lines[: len(lines) - ended]
    if not lines:
      raise Bad
    header = self.schema.header is not None
    if header and lines[0].removeprefix(BOM) != self.schema.header:
      raise Bad
    rows: dict[int, Any] = {}
    for number, line in enumerate(lines[header:], start=1 + header):
      try:
        if torn and not ended and number == len(lines):
          self._check_end(line.decode('latin-1'))
        rows[number] = self.fields_of(line.decode('latin-1'))
      except Bad as bad:
        rows[number] = bad
    return rows

  def _check_end(self, line: str) -> None:
    """Raises `Bad` if a last line without an end may have been cut off."""
    fields, whole = (
      line.split(self.schema.delimiter.decode()),
      self.schema.whole,
    )
    enough = len(fields) >= len(self.fields) and len(fields[-1]) >= (whole or 0)
    if whole is None or (whole and not enough):
      raise Bad('', f'{len(fields)} fields, {_last(fields)}')


def unpacked(data: bytes) -> bytes:
  """The text of a plain or gzip file; raises `Bad` if there is none."""
  if data[:2] == b'\x1f\x8b':
    try:
      data = gzip.GzipFile(fileobj=io.BytesIO(data)).read()
    except (OSError, EOFError, zlib.error) as error:
      raise Bad from error
  if not data or any(
    byte < 32 and byte not in b'\t\n\f\r' for byte in data[:512]
  ):
    raise Bad
  return data


_MOVIELENS = (ID, ID, STARS, _time('[0-9]{9,10}', 788_918_400, 1 << 32))
FORMATS = {
  'criteo': TextFormat(
    *(criteo.SCHEMA, criteo.criteo_raw, (BIT, *[DECIMAL] * 13, *[HEX] * 26)),
    'criteo/train.txt',
  ),
  'avazu': TextFormat(
    avazu.SCHEMA,
    avazu.avazu_raw,
    (
      *(ANY, BIT, HOUR),
      *(HEX if name in avazu.HEX else DECIMAL for name in avazu.TABLES),
    ),
    'avazu/train.csv',
  ),
  'taobao': TextFormat(
    taobao.SCHEMA,
    lambda path, **how: taobao.taobao_raw(
      path, **{'steps': 3, 'min_history': 2} | how
    ),
    (ID, ID, ID, BEHAVIOUR, _time('[0-9]{10}', 10**9, 1 << 31)),
    'taobao/UserBehavior.csv.gz',
  ),
  'ml csv': TextFormat(movielens.CSV, movielens.movielens_raw, _MOVIELENS),
  'ml dat': TextFormat(movielens.DAT, movielens.movielens_raw, _MOVIELENS),
  'ml data': TextFormat(movielens.DATA, movielens.movielens_raw, _MOVIELENS),
}
