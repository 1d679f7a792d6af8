"""Lines of Taobao's log for tests, and a slow parser as the oracle."""

import gzip
import pathlib
import random

WORDS = ('pv', 'cart', 'fav', 'buy')


def slow_parse(data: bytes) -> list[tuple | None]:
  """Fields of every line, None for a bad one; the fast parser's oracle."""

  def line_fields(line: str) -> tuple | None:
    fields = line.split(',')
    if len(fields) != 5 or fields[3] not in WORDS:
      return None
    numbers = fields[:3] + fields[4:]
    if not all(n.isascii() and n.isdigit() and len(n) <= 10 for n in numbers):
      return None
    user, item, category, time = map(int, numbers)
    if max(user, item, category) >= 2**32 or not 10**9 <= time < 2**31:
      return None
    return user, item, category, fields[3], time

  lines = data.decode('latin-1').replace('\r\n', '\n').split('\n')
  return [line_fields(x) for x in (lines[:-1] if lines[-1] == '' else lines)]


def log(count: int, users: int = 30, items: int = 60, seed: int = 0) -> str:
  """Lines in the order of time, some of one second; skewed users and items."""
  rng = random.Random(seed)
  lines, time = [], 1_511_658_000
  for _ in range(count):
    time += rng.randrange(3)
    user = int(rng.paretovariate(0.8)) % users + 4_000_000_000
    item = int(rng.paretovariate(0.5)) % items
    word = rng.choice(WORDS)
    lines.append(f'{user},{item},{item % 7 + 2_000_000},{word},{time}')
  return '\n'.join(lines) + '\n'


def write(path: pathlib.Path, data: str) -> pathlib.Path:
  path.write_bytes(gzip.compress(data.encode(), 1))
  return path
