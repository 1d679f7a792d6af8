"""Bytes changed as disks, programs and people change them."""

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
