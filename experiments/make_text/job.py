"""Formats examples of the synthetic stream as lines of Criteo's raw text."""

from collections.abc import Callable, Sequence
import pathlib
from typing import BinaryIO, no_type_check

import numpy as np

from experiments.common import report
from experiments.common.progress import Bar
from slipstream_jax.errors import UserError
from slipstream_jax.files import written
from slipstream_jax.hashing import hashed, kernel, unit
from slipstream_jax.synthetic.clicks import examples_at
from slipstream_jax.synthetic.spec import SyntheticSpec
from slipstream_jax.tables import offsets

_LINES = 1 << 16  # written at a time
_MOST_BYTES = 40 * 20  # per line
_HEX = np.frombuffer(b'0123456789abcdef', np.uint8)
_TAB, _NEWLINE, _ZERO = b'\t\n0'
# Share of lines without the field; it differs much from field to field.
_MISSING = np.resize([0.45, 0.0, 0.2, 0.2, 0.03, 0.2, 0.0], 13)
_MISSING_IDS = np.resize([0.0, 0.0, 0.03, 0.03, 0.0, 0.1, 0.0, 0.0, 0.4], 26)


def write_text(
  path: pathlib.Path,
  lines: int,
  seed: int = 0,
  tell: Callable[[int], object] = bool,
) -> None:
  """Writes a file of `lines` lines; it is there once it is whole.

  Args:
    path: of the file.
    lines: to write.
    seed: of the stream.
    tell: called with the lines written so far.

  Raises:
    UserError: no line, or a negative seed.
  """
  if lines < 1:
    raise UserError(
      'a file must have at least one line',
      got=lines,
      where='LINES',
      hint='ask for one or more',
    )
  spec = SyntheticSpec(seed=seed)
  with written(path) as file:
    _write(file, spec, lines, tell)


def _write(
  file: BinaryIO,
  spec: SyntheticSpec,
  lines: int,
  tell: Callable[[int], object],
) -> None:
  starts = offsets(spec.rows)
  buffer = np.empty(_LINES * _MOST_BYTES, np.uint8)
  for first in range(0, lines, _LINES):
    positions = np.arange(first, min(first + _LINES, lines))
    columns, _ = examples_at(spec, positions)
    used = _format(
      positions,
      columns.labels,
      np.rint(np.expm1(columns.dense)).astype(np.int64),
      columns.lookups - starts[:-1],
      buffer,
    )
    file.write(buffer[:used].data)
    tell(int(positions[-1]) + 1)


@kernel
@no_type_check
def _number(buffer: np.ndarray, at: int, value: int) -> int:
  """Writes a whole number; returns the place after it."""
  digits, rest = 1, value // 10
  while rest:
    digits, rest = digits + 1, rest // 10
  for place in range(at + digits - 1, at - 1, -1):
    buffer[place] = _ZERO + value % 10
    value //= 10
  return at + digits


@kernel
@no_type_check
def _id(buffer: np.ndarray, at: int, table: int, row: int) -> int:
  """Writes the 8 hex digits of a row's id; returns the place after them."""
  # An odd factor makes it one-to-one among 32 bits.
  bits = (np.uint64(row) * np.uint64(0x9E3779B1)) & np.uint64(0xFFFFFFFF)
  bits ^= np.uint64(table * 0x01000193)
  for digit in range(8):
    shift = np.uint64(28 - 4 * digit)
    buffer[at + digit] = _HEX[(bits >> shift) & np.uint64(15)]
  return at + 8


@kernel
@no_type_check
def _format(
  positions: np.ndarray,
  labels: np.ndarray,
  integers: np.ndarray,
  rows: np.ndarray,
  buffer: np.ndarray,
) -> int:
  """Writes n lines; returns how many bytes they take."""
  at = 0
  for i in range(len(positions)):
    key = hashed(np.uint64(0), positions[i])
    buffer[at] = _ZERO + np.uint8(labels[i])
    at += 1
    for field in range(39):
      buffer[at] = _TAB
      at += 1
      if field < 13:
        if unit(hashed(key, field)) >= _MISSING[field]:
          at = _number(buffer, at, integers[i, field])
      elif unit(hashed(key, field)) >= _MISSING_IDS[field - 13]:
        at = _id(buffer, at, field - 13, rows[i, field - 13])
    buffer[at] = _NEWLINE
    at += 1
  return at


def make(file: str, numbers: Sequence[str]) -> None:
  """Writes a file of so many lines, and the seed if there is another number.

  Raises:
    UserError: invalid numbers, or no room for the file.
  """
  path = pathlib.Path(file)
  try:
    lines, seed = [int(word) for word in [*numbers, '0'][:2]]
  except ValueError as error:
    raise UserError(
      'LINES and SEED must be whole numbers',
      got=' '.join(numbers),
      where='command line',
      hint='write FILE LINES [SEED]',
    ) from error
  screen = report.console()
  with Bar(screen, lines, 'line', f'writing {path}') as bar:
    try:
      write_text(path, lines, seed, bar.show)
    except OSError as error:
      raise UserError(
        'the text must find room in a file',
        got=error.strerror,
        where=file,
        hint='name a file of a folder that is there, on a disk with room',
      ) from error
  size = report.text('bytes', path.stat().st_size)
  screen.print(f'{path}: {lines:,} lines, {size}', highlight=False)
