"""Where the records of delimited text end, quotes taken into account."""

from typing import no_type_check

import numpy as np

from slipstream_jax.hashing import kernel

_NEWLINE, _QUOTE = b'\n"'


@kernel
@no_type_check
def scan_records(
  characters: np.ndarray,
  delimiter: int,
  fields: np.ndarray,
  lines: np.ndarray,
) -> tuple[int, int]:
  """Counts the fields of each record; a quoted one may hold line ends.

  Args:
    characters: u8, whole lines.
    delimiter: between two fields.
    fields: out, i32, one per line: fields of each record.
    lines: out, i32: the line, from 0, in which each record begins.

  Returns:
    Records that have ended, and the place after the last of them.
  """
  records, end, line, count = 0, 0, 0, 1
  quoted, fresh = False, True  # within quotes; at the first of a field
  lines[0] = 0
  for at in range(len(characters)):
    character = characters[at]
    if character == _NEWLINE:
      line += 1
    if quoted:
      # A doubled quote ends the field and begins it anew: the same to us.
      quoted = character != _QUOTE
      fresh = not quoted
      continue
    if character == _NEWLINE:
      fields[records] = count
      records, end, count, fresh = records + 1, at + 1, 1, True
      if records < len(lines):
        lines[records] = line
    elif character == delimiter:
      count, fresh = count + 1, True
    elif character == _QUOTE and fresh:
      quoted = True
    else:
      fresh = False
  return records, end
