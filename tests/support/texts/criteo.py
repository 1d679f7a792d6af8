"""Lines of Criteo's logs for the tests of programs."""

import gzip
import random


def line(rng):
  """A line with skewed ids and missing fields."""
  integers = [
    '' if rng.random() < 0.2 else str(rng.randrange(-2, 1000))
    for _ in range(13)
  ]
  ids = [
    '' if rng.random() < 0.1 else f'{int(rng.paretovariate(0.7)) % 500:08x}'
    for _ in range(26)
  ]
  return '\t'.join([str(rng.randrange(2)), *integers, *ids])


def lines(count, seed=0):
  """So many lines."""
  rng = random.Random(seed)
  return [line(rng) for _ in range(count)]


def write(path, some, packed_=False):
  """Writes lines as text, plain or gzip; returns the path."""
  data = ('\n'.join(some) + '\n').encode()
  path.write_bytes(gzip.compress(data, 1) if packed_ else data)
  return path
