"""Stored columns to rows of examples: the fast part of packed batches.

A table's column holds local rows in the smallest type; a model takes global
rows, example by example. Files are read, not mapped: a process then holds no
more than its buffer, and a file cut off is an error rather than a crash.
"""

from collections.abc import Iterable
import contextlib
import io
import pathlib
from typing import NamedTuple, no_type_check

from jaxtyping import Int
import numpy as np

from slipstream_jax.data.base import Columns
from slipstream_jax.errors import UserError
from slipstream_jax.hashing import kernel
from slipstream_jax.packed.columns import (
  AGAIN,
  Column,
  example_columns,
  Packed,
  table_columns,
  TableColumns,
)
from slipstream_jax.row_space import offsets, row_dtype

_TILE = 64  # examples whose rows stay in the first cache while columns go by
_ALIGNED = 64  # bytes; more than any type needs
_LABELS, _FIRST_TABLE = 0, 2  # places in `Form.columns`


class Form(NamedTuple):
  """What a packed data set's examples look like; made by `form_of`."""

  folder: pathlib.Path
  sizes: dict[str, int]
  """Rows of each table, by its name."""
  columns: tuple[Column, ...]
  """`labels`, `dense` and one per table, in that order."""
  of_tables: tuple[TableColumns, ...]
  """All columns of each table."""
  sequence_length: int | None
  """L of multi-hot lookups [n, F, L]; None for [n, F]."""

  @property
  def examples(self) -> int:
    """Examples of all splits."""
    return self.columns[0].shape[0]

  @property
  def example_bytes(self) -> int:
    """Of one example in memory, with its place in the buffer."""
    one = self.empty(1)[:3]
    return sum(c.nbytes for c in one) + np.dtype(np.int32).itemsize

  def empty(self, examples: int) -> Columns:
    """Room for examples."""
    rows = sum(self.sizes.values())
    steps = () if self.sequence_length is None else (self.sequence_length,)
    return Columns(
      np.empty((examples, self.columns[1].shape[1]), np.float32),
      np.empty((examples, len(self.sizes), *steps), row_dtype(rows)),
      np.empty(examples, np.float32),
    )


def form_of(packed: Packed) -> Form:
  """The form of a data set's examples.

  Raises:
    UserError: the manifest lacks a fact, or a column is missing or has
      another form.
  """
  facts = packed.manifest
  try:
    sizes = {table['name']: int(table['rows']) for table in facts['tables']}
    sequence_length = facts['sequence_length']
    dense = int(facts['dense_features'])
    examples = int(facts['examples'])
  except (KeyError, TypeError, ValueError) as error:
    raise UserError(
      'the manifest must have tables, sequence_length, dense_features and'
      ' examples',
      got=repr(error),
      where=str(packed.folder),
      hint=AGAIN,
    ) from error
  of_tables = tuple(
    table_columns(name, rows, examples, sequence_length, facts.get('hash_rows'))
    for name, rows in sizes.items()
  )
  lookups = [columns.lookups for columns in of_tables]
  columns = (*example_columns(examples, dense), *lookups)
  for column in columns:
    packed.column(column)
  return Form(packed.folder, sizes, columns, of_tables, sequence_length)


def read(
  form: Form,
  runs: Iterable[tuple[int, int]],
  longest: int,
  places: Int[np.ndarray, ' n'],
  out: Columns,
) -> None:
  """Reads n examples into `out`, the i-th of them to place `places[i]`.

  Args:
    form: of the data set.
    runs: ranges [first, end) of stored examples; n examples together.
    longest: examples of the longest run.
    places: i32[n], each below the room of `out`.
    out: room for the examples; see `Form.empty`.

  Raises:
    UserError: a file cannot be read, or holds a row that its table lacks or
      a label that is neither 0 nor 1.
  """
  scratch = _Scratch(form, longest)
  lookups = out.lookups.reshape(*out.lookups.shape[:2], -1)
  at = 0
  with contextlib.ExitStack() as stack:
    files = [stack.enter_context(_open(form, c)) for c in form.columns]
    for first, end in runs:
      for file, column, room in zip(
        files, form.columns, scratch.rooms, strict=True
      ):
        _fill(file, form, column, first, room[: end - first])
      here = places[at : at + end - first]
      bad = _scatter(
        *scratch.typed, *scratch.layout, here, out.labels, out.dense, lookups
      )
      if bad >= 0:
        _refuse(form, bad, scratch.rooms[bad][: end - first], first)
      at += end - first


class _Scratch:
  """One buffer for a run of every column, and how it is laid out.

  Columns differ in number and type from one data set to the next, and numba
  would compile the loop for each. It is given the buffer as numbers of each
  width instead, and where every table's column begins in those of its own.
  """

  def __init__(self, form: Form, longest: int) -> None:
    sizes = [c.nbytes // max(c.shape[0], 1) * longest for c in form.columns]
    # So each column begins at a whole number of its type, whichever it is.
    padded = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
    begins = np.append(0, np.cumsum(padded))
    whole = np.empty(int(begins[-1]), np.uint8)
    self.rooms = [
      whole[begin : begin + size]
      .view(column.dtype)
      .reshape(longest, *column.shape[1:])
      for begin, size, column in zip(
        begins[:-1], sizes, form.columns, strict=True
      )
    ]
    ids = self.rooms[2:]
    widths = np.array([room.itemsize for room in ids])
    rows = [*form.sizes.values()]
    firsts = offsets(rows)[:-1]
    self.layout = widths, begins[2:-1] // widths, np.array(rows), firsts
    views = [whole.view(f'u{width}') for width in (1, 2, 4, 8)]
    self.typed = *views, self.rooms[0], self.rooms[1]


def _open(form: Form, column: Column) -> io.FileIO:
  path = form.folder / column.file
  try:
    return io.FileIO(path)
  except OSError as error:
    raise UserError(
      'the files of a packed data set must stay readable',
      got=error.strerror,
      where=str(path),
      hint=AGAIN,
    ) from error


def _fill(
  file: io.FileIO, form: Form, column: Column, first: int, room: np.ndarray
) -> None:
  if not room.nbytes:
    return
  file.seek(first * (room.nbytes // len(room)))
  left = room.reshape(-1).view(np.uint8).data
  while left:
    count = file.readinto(left)  # Linux reads at most 2 GiB at a time
    if not count:  # the file was cut off after it was opened
      error = column.size_error(
        form.folder / column.file, f'{file.tell()} bytes'
      )
      raise error
    left = left[count:]


def _refuse(form: Form, column: int, values: np.ndarray, first: int) -> None:
  """Says which value of a run of a column is bad: it was changed on disk."""
  if column == _LABELS:
    largest, rule = 1, 'packed labels must be 0 or 1'
  else:
    name, largest = [*form.sizes.items()][column - _FIRST_TABLE]
    rule = (
      f'rows of table {name} must be in [0, {largest}], {largest} being padding'
    )
  place = np.argwhere(values > largest)[0]
  file = form.folder / form.columns[column].file
  raise UserError(
    rule,
    got=int(values[tuple(place)]),
    where=f'{file}, example {first + int(place[0])}',
    hint=f'verify the data set, or {AGAIN}',
  )


@kernel
@no_type_check
def _scatter(
  u8: np.ndarray,
  u16: np.ndarray,
  u32: np.ndarray,
  u64: np.ndarray,
  labels: np.ndarray,
  dense: np.ndarray,
  widths: np.ndarray,
  begins: np.ndarray,
  rows: np.ndarray,
  firsts: np.ndarray,
  places: np.ndarray,
  out_labels: np.ndarray,
  out_dense: np.ndarray,
  out_lookups: np.ndarray,
) -> int:
  """Puts a run's examples to their places; gives a column that is bad, or -1.

  Places are random. A column at a time would fetch their cache lines anew for
  each column; a few examples at a time, they stay in the first cache.
  """
  for begin in range(0, len(places), _TILE):
    end = min(begin + _TILE, len(places))
    clicks = np.uint8(0)  # the largest, so that one test is enough for a tile
    for i in range(begin, end):
      clicks = max(clicks, labels[i])
      out_labels[places[i]] = labels[i]
      for k in range(dense.shape[1]):
        out_dense[places[i], k] = dense[i, k]
    if clicks > 1:
      return _LABELS
    for f in range(len(widths)):
      part = (begins[f], begin, end, rows[f], firsts[f], places, f)
      if widths[f] == 1:
        largest = _lookups(u8, part, out_lookups)
      elif widths[f] == 2:
        largest = _lookups(u16, part, out_lookups)
      elif widths[f] == 4:
        largest = _lookups(u32, part, out_lookups)
      else:
        largest = _lookups(u64, part, out_lookups)
      if largest > np.uint64(rows[f]):  # R itself is padding
        return _FIRST_TABLE + f
  return -1


@kernel
@no_type_check
def _lookups(values: np.ndarray, part: tuple, out: np.ndarray) -> np.uint64:
  """Local to global rows of one table; -1 for padding. Gives the largest."""
  start, begin, end, rows, first, places, f = part
  length, largest = out.shape[2], np.uint64(0)
  if length == 1:  # a loop of one would take half as long again
    for i in range(begin, end):
      row = np.int64(values[start + i])
      # Unsigned again: what is too large for i64 must not look small.
      largest = max(largest, np.uint64(row))
      out[places[i], f, 0] = -1 if row == rows else first + row
    return largest
  for i in range(begin, end):
    for k in range(length):
      row = np.int64(values[start + i * length + k])
      largest = max(largest, np.uint64(row))
      out[places[i], f, k] = -1 if row == rows else first + row
  return largest
