"""Bytes changed as disks, programs and people change them."""

import copy
import random
import re

_SENTENCE = re.compile(r'[^\n]+, got [^\n]+ \([^\n]+\); [^\n]+\.')
_WORDS = (b'\x00', b'\xff', b'\n', b'\r\n', b'\t', b',', b'"', b'-', b'.', b'')
_NUMBERS = (b'0', b'-1', b'1e999', b'nan', b'9' * 30, b'18446744073709551616')


def mutated(content, rng):
  """The content with one to four changes.

  Args:
    content: bytes.
    rng: of `random`, which all of it is drawn from.
  """
  data = bytearray(content)
  for _ in range(rng.choice((1, 1, 1, 2, 4))):
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice((1, 1, 2, 8, 64, 1 << 12)))
    match rng.randrange(8):
      case 0 if at < len(data):
        data[at] ^= 1 << rng.randrange(8)
      case 1 if at < len(data):
        data[at] = rng.randrange(256)
      case 2:
        del data[at:end]
      case 3:
        data[at:at] = data[at:end]
      case 4:
        del data[at:]
      case 5:
        data[at:at] = rng.choice(_WORDS) * rng.choice((1, 1, 3, 200))
      case 6:
        data[at : at + 1] = rng.choice(_NUMBERS)
      case _:
        data[at:end] = rng.randbytes(end - at)
  return bytes(data)


def overwrite(path, data):
  """Puts bytes in the place of a file.

  As a new one: what is cut to no byte and written again, some file systems
  write to the disk at once, which takes ten times as long as to read it.
  """
  path.unlink(missing_ok=True)
  path.write_bytes(data)


def check_sentence(error, *parts):
  """Looks whether an error is one sentence, not too long, with these parts."""
  text = str(error)
  assert _SENTENCE.fullmatch(text), text
  assert len(text) < 1200
  for part in parts:
    assert part in text


def flip(path, rng=random):
  """Changes one bit of a file. Returns the byte's place."""
  data = bytearray(path.read_bytes())
  at = rng.randrange(len(data))
  data[at] ^= 1 << rng.randrange(8)
  path.write_bytes(data)
  return at


def places_of(tree, path=()):
  """Every place in JSON but the whole."""
  parts = tree.items() if isinstance(tree, dict) else ()
  parts = enumerate(tree) if isinstance(tree, list) else parts
  for key, value in parts:
    yield (*path, key)
    yield from places_of(value, (*path, key))


def with_another_value(tree, wrong, each, rng):
  """Yields copies of JSON, with one of the wrong values in each place.

  Now and then a place is gone instead. Each place is tried `each` times.
  """
  for place in places_of(tree):
    for value in rng.sample(wrong, each):
      changed = parent = copy.deepcopy(tree)
      for key in place[:-1]:
        parent = parent[key]
      if rng.random() < 0.2 and isinstance(parent, dict):
        del parent[place[-1]]
      else:
        parent[place[-1]] = value
      yield changed
