"""Delimited text with a header, CSV or TSV, as frames of text.

polars splits blocks of lines into fields. All fields stay text, because a type
inferred from the first lines may not fit the rest. A quoted field may hold
delimiters, doubled quotes and line ends.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import difflib
import functools
from typing import NamedTuple, no_type_check

from jaxtyping import Int
import numpy as np
import polars as pl

from slipstream_jax.data.prefetch import ahead
from slipstream_jax.errors import UserError
from slipstream_jax.formats import lines, text
from slipstream_jax.hashing import kernel

_LONGEST_RECORD = 1 << 26  # bytes; a quote that does not end is an error


class Piece(NamedTuple):
  """Consecutive rows of a source."""

  frame: pl.DataFrame
  where: Callable[[int], str]
  """Returns the place of row i of the frame, for errors."""
  read: int = 0
  """Bytes of the source read up to here; 0 if unknown."""


class _Records(NamedTuple):
  """Whole records of a file."""

  text: bytes
  fields: Int[np.ndarray, ' n']
  """Number of fields of each record."""
  lines: Int[np.ndarray, ' n']
  """Line of the file in which each record begins, from 1."""
  read: int
  """Bytes of the file, compressed as it is, read so far."""


def text_pieces(
  path: str, columns: Sequence[str], delimiter: str
) -> Iterator[Piece]:
  """Reads columns of a file as frames of text. Empty fields are null.

  The file is plain or gzip, in UTF-8, and begins with a header. The delimiter
  is one character.

  Raises:
    UserError: the file cannot be read, its header lacks a column, a record has
      more or fewer fields than the header, or a quoted field does not end.
  """
  names: list[str] = []
  for records in _read(path, delimiter):
    if not names:
      names, records = _header(records, path, delimiter)
      check_columns(names, columns, path)
    bad = np.flatnonzero(records.fields != len(names))
    if len(bad):
      raise UserError(
        f'a line must have {len(names)} fields, as the header has',
        got=int(records.fields[bad[0]]),
        where=f'{path}, line {records.lines[bad[0]]}',
        hint='write one field per column, or quote those with the delimiter',
      )
    if len(records.lines):
      frame = _frame(records, names, path, delimiter).select(columns)
      at = functools.partial(_place, path, records.lines)
      yield Piece(frame, at, records.read)


def _place(path: str, first_lines: np.ndarray, row: int) -> str:
  return f'{path}, line {first_lines[row]}'


def check_columns(
  names: Sequence[str], wanted: Sequence[str], where: str
) -> None:
  """Raises a `UserError` if a source lacks one of the wanted columns."""
  for name in wanted:
    if name not in names:
      near = difflib.get_close_matches(name, names, 1)
      raise UserError(
        f'a source must have the column {name!r}',
        got=', '.join(names) or 'no columns',
        where=where,
        hint=f'did you mean {near[0]!r}' if near else 'name one of those',
      )


def first_line(error: Exception) -> str:
  """Returns the first line of an error, without the advice after it."""
  lines = str(error).splitlines() or [type(error).__name__]
  return f'"{lines[0]}"'


def _read(path: str, delimiter: str) -> Iterator[_Records]:
  rest, first = b'', 1
  # Ends the thread that reads ahead if the caller stops early.
  with contextlib.closing(ahead(text.read_blocks(path))) as blocks:
    for block in blocks:
      whole = rest + block.text
      fields = np.empty(rest.count(b'\n') + block.num_lines, np.int32)
      starts = np.empty_like(fields)
      count, end = _scan_records(
        np.frombuffer(whole, np.uint8), ord(delimiter), fields, starts
      )
      yield _Records(
        whole[:end], fields[:count], first + starts[:count], block.read
      )
      rest = whole[end:]
      first += len(fields) - rest.count(b'\n')
      if len(rest) > _LONGEST_RECORD:
        break
  if rest:
    raise UserError(
      'a quoted field must end with a quote',
      got=f'none in {text.quoted(rest)}',
      where=f'{path}, line {first}',
      hint='double the quotes within a quoted field',
    )


def _header(
  records: _Records, path: str, delimiter: str
) -> tuple[list[str], _Records]:
  """Returns the names of the columns, and the records after the header."""
  line, _, rest = records.text.partition(b'\n')
  line = line.removeprefix(lines.BOM)
  first = records._replace(text=line + b'\n', fields=records.fields[:1])
  names = [str(name) for name in _frame(first, [], path, delimiter).row(0)]
  if len(set(names)) < len(names):
    raise UserError(
      'the columns of a header must have unique names',
      got=', '.join(names),
      where=f'{path}, line 1',
      hint='name each of them once',
    )
  return names, records._replace(
    text=rest, fields=records.fields[1:], lines=records.lines[1:]
  )


def _frame(
  records: _Records, names: Sequence[str], path: str, delimiter: str
) -> pl.DataFrame:
  """Returns the records as text. Without `names`, columns get default names."""
  try:
    frame = pl.read_csv(
      records.text,
      has_header=False,
      new_columns=list(names) or None,
      infer_schema=False,
      separator=delimiter,
    )
  except pl.exceptions.PolarsError as error:
    raise UserError(
      'a text file must hold delimited fields in UTF-8',
      got=first_line(error),
      where=f'{path}, in the lines from {records.lines[0]} on',
      hint='write UTF-8, and quote fields that hold quotes, with these doubled',
    ) from error
  if frame.height != len(records.fields):
    raise UserError(
      f'{len(records.fields)} lines must hold as many records',
      got=frame.height,
      where=f'{path}, in the lines from {records.lines[0]} on',
      hint='quote fields that hold quotes, with these doubled',
    )
  return frame


_NEWLINE, _QUOTE = b'\n"'


@kernel
@no_type_check
def _scan_records(
  characters: np.ndarray,
  delimiter: int,
  fields: np.ndarray,
  lines: np.ndarray,
) -> tuple[int, int]:
  """Counts the fields of each record. Quoted fields may hold line ends.

  Args:
    characters: u8, whole lines.
    delimiter: between two fields.
    fields: out, i32, one per line: fields of each record.
    lines: out, i32: the line, from 0, in which each record begins.

  Returns:
    The number of complete records, and the position after the last of them.
  """
  records, end, line, count = 0, 0, 0, 1
  quoted, fresh = False, True  # within quotes; at the start of a field
  lines[0] = 0
  for at in range(len(characters)):
    character = characters[at]
    if character == _NEWLINE:
      line += 1
    if quoted:
      # A doubled quote ends the quoted part and starts it again.
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
