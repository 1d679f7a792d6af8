"""Reads stored columns into batches of examples.

Columns of tables have local rows in the smallest type. Batches have global
rows, example by example. Files are read and not mapped: a process then needs
memory only for its buffer, and a file that is cut off is an error and no crash.
"""

from collections.abc import Iterable, Mapping
import contextlib
import io
import pathlib
from typing import NamedTuple, no_type_check

from jaxtyping import Int
import numpy as np

from slipstream_jax.data.numbered import Columns
from slipstream_jax.errors import UserError
from slipstream_jax.hashing import kernel
from slipstream_jax.packed.columns import (
  AGAIN,
  Blocks,
  Column,
  DamagedError,
  PackedData,
  reporting_damage,
)
from slipstream_jax.packed.layout import Given, layout_from, TableColumns
from slipstream_jax.tables import row_dtype, tables_of, TableSet

_ALIGNED = 64  # bytes; a multiple of every type's size
_TILE = 64  # examples whose rows stay in the L1 cache while columns are read
_LABELS, _FIRST_FEATURE = 0, 2  # places in `Form.columns`


class Form(NamedTuple):
  """Form of a packed data set's examples; see `form_of`."""

  folder: pathlib.Path
  tables: TableSet
  """Sizes and features."""
  columns: tuple[Column, ...]
  """`labels`, `dense` and one per feature, in that order."""
  lookup_weights: dict[str, Column]
  of_tables: tuple[TableColumns, ...]
  blocks: Blocks | None
  """Checksums to compare each block with. None compares nothing."""
  vocabularies: Mapping[str, Given] | None = None
  """By table, if they were given."""

  @property
  def examples(self) -> int:
    """Examples of all splits."""
    return self.columns[0].shape[0]

  @property
  def example_bytes(self) -> int:
    """Bytes of one example in memory, with its place in the buffer."""
    one = [c.nbytes for c in self.empty(1) if c is not None]
    return sum(one) + np.dtype(np.int32).itemsize

  def empty(self, examples: int) -> Columns:
    """Allocates room for examples."""
    labels, dense, *_ = self.columns
    shape = (examples, *self.tables.example_shape)
    return Columns(
      np.empty((examples, dense.shape[1]), np.float32),
      np.empty(shape, row_dtype(self.tables.num_rows)),
      np.empty((examples, *labels.shape[1:]), np.float32),
      np.ones(shape, np.float32) if self.lookup_weights else None,
    )


def form_of(packed: PackedData) -> Form:
  """Returns the form of a data set's examples.

  Raises:
    UserError: the manifest lacks a fact, or a column is missing or has
      another form.
  """
  facts = packed.manifest
  rule = (
    'the manifest must have tables, features, dense_features, labels and'
    ' examples'
  )
  with reporting_damage(rule, packed.folder):
    sizes = {table['name']: int(table['rows']) for table in facts['tables']}
    examples = int(facts['examples'])
    layout = layout_from(facts)
    names = [*layout.features]
    if not names or not all(isinstance(name, str) for name in names):
      raise DamagedError(rule, f'the features {names!r:.100}', packed.folder)
    tables = tables_of(sizes, layout.features)
    lookups = [
      layout.lookups(name, sizes[feature.table], examples)
      for name, feature in layout.features.items()
    ]
    of_tables = tuple(layout.of_table(*item) for item in sizes.items())
  columns = (*layout.example_columns(examples), *lookups)
  weights = layout.lookup_weights(examples)
  for column in (*columns, *weights.values()):
    packed.column(column)
  return Form(
    packed.folder,
    tables,
    columns,
    weights,
    of_tables,
    packed.blocks,
    layout.vocabularies,
  )


def read(
  form: Form,
  runs: Iterable[tuple[int, int]],
  longest: int,
  places: Int[np.ndarray, ' n'],
  out: Columns,
) -> None:
  """Reads n examples into `out`, the i-th of them to place `places[i]`.

  Args:
    form: form of the data set.
    runs: ranges [first, end) of stored examples, n examples together.
    longest: number of examples of the longest run.
    places: i32[n].
    out: room for the examples; see `Form.empty`.

  Raises:
    UserError: a file cannot be read, a block of it has changed, a row is
      outside of its table, or a label is not finite, or not 0 or 1 if it is
      stored as uint8.
  """
  scratch = _Scratch(form, longest)
  lookups = out.lookups.reshape(len(out.lookups), -1)
  labels = out.labels.reshape(len(out.labels), -1)
  if out.lookup_weights is not None:
    weights = out.lookup_weights.reshape(len(lookups), -1)
  at = 0
  with contextlib.ExitStack() as stack:
    files = {
      column: stack.enter_context(_open(form, column))
      for column in (*form.columns, *form.lookup_weights.values())
    }
    for first, end in runs:
      for column, room in zip(form.columns, scratch.rooms, strict=True):
        _fill(files[column], form, column, first, room[: end - first])
      here = places[at : at + end - first]
      bad = _scatter(
        *scratch.typed, *scratch.layout, here, labels, out.dense, lookups
      )
      if bad >= 0:
        _refuse(form, bad, scratch.rooms[bad][: end - first], first)
      for name, column in form.lookup_weights.items():
        room = np.empty((end - first, *column.shape[1:]), column.stored)
        _fill(files[column], form, column, first, room)
        weights[here, form.tables.columns[name]] = room.reshape(len(room), -1)
      at += end - first
  if out.lookup_weights is not None:
    # Lookups of other features weigh 1, and padding 0.
    for name, span in form.tables.columns.items():
      if name not in form.lookup_weights:
        weights[places, span] = lookups[places, span] >= 0


class _Scratch:
  """One buffer for a run of every column, and its layout.

  Data sets differ in columns and types, and numba would compile the loop for
  each. So the kernel gets the whole buffer as numbers of each width, and the
  place in them where each feature's column begins.
  """

  def __init__(self, form: Form, longest: int) -> None:
    sizes = [c.nbytes // max(c.shape[0], 1) * longest for c in form.columns]
    # Aligned, so that each column begins at a multiple of its type's size.
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
    tables, ids = form.tables, self.rooms[_FIRST_FEATURE:]
    of = [(f.table, tables.columns[n]) for n, f in tables.features.items()]
    widths = np.array([room.itemsize for room in ids])
    self.layout = (
      widths,
      begins[_FIRST_FEATURE:-1] // widths,
      np.array([tables.tables[table].rows for table, _ in of]),
      np.array([tables.first_rows[table] for table, _ in of]),
      np.array([[span.start, span.stop] for _, span in of]),
    )
    views = [whole.view(f'u{width}') for width in (1, 2, 4, 8)]
    labels = self.rooms[_LABELS].reshape(longest, -1)
    self.typed = *views, labels, _most_label(labels.dtype), self.rooms[1]


def _most_label(dtype: np.dtype) -> np.float32:
  """Returns the largest label of a type. NaN compares as False."""
  return np.float32(1) if dtype == np.uint8 else np.finfo(np.float32).max


def _open(form: Form, column: Column) -> io.FileIO:
  path = form.folder / column.file
  try:
    return io.FileIO(path)
  except OSError as error:
    rule = 'the files of a packed data set must stay readable'
    raise DamagedError(rule, error.strerror, path) from error


def _fill(
  file: io.FileIO, form: Form, column: Column, first: int, room: np.ndarray
) -> None:
  if not room.nbytes:
    return
  begin = first * (room.nbytes // len(room))
  if form.blocks is not None:
    form.blocks.check(column, file.fileno(), begin, begin + room.nbytes)
  file.seek(begin)
  left = room.reshape(-1).view(np.uint8).data
  while left:
    count = file.readinto(left)  # Linux reads at most 2 GiB at a time
    if not count:  # the file was cut off after it was opened
      column.refuse_size(form.folder, f'{file.tell()} bytes')
    left = left[count:]


def _refuse(form: Form, column: int, values: np.ndarray, first: int) -> None:
  """Raises the error of a column's run that has a bad value."""
  if column == _LABELS:
    bad = ~(abs(values) <= _most_label(values.dtype))
    rule = 'packed labels must be'
    rule += ' 0 or 1' if values.dtype == np.uint8 else ' finite'
  else:
    feature = [*form.tables.features.values()][column - _FIRST_FEATURE]
    largest = form.tables.tables[feature.table].rows
    bad = values > largest
    rule = (
      f'rows of table {feature.table} must be in [0, {largest}],'
      f' {largest} being padding'
    )
  place = np.argwhere(bad)[0]
  file = form.folder / form.columns[column].file
  raise UserError(
    rule,
    got=values[tuple(place)],
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
  most_label: np.float32,
  dense: np.ndarray,
  widths: np.ndarray,
  begins: np.ndarray,
  rows: np.ndarray,
  firsts: np.ndarray,
  spans: np.ndarray,
  places: np.ndarray,
  out_labels: np.ndarray,
  out_dense: np.ndarray,
  out_lookups: np.ndarray,
) -> int:
  """Copies a run's examples to their places. Returns a bad column, or -1."""
  # Places are random. Copying column by column would load their cache lines
  # once per column. Copying a few examples at a time keeps them in L1.
  for begin in range(0, len(places), _TILE):
    end = min(begin + _TILE, len(places))
    good = True  # of the whole tile, so that one branch is enough
    for i in range(begin, end):
      for k in range(labels.shape[1]):
        good &= abs(labels[i, k]) <= most_label
        out_labels[places[i], k] = labels[i, k]
      for k in range(dense.shape[1]):
        out_dense[places[i], k] = dense[i, k]
    if not good:
      return _LABELS
    for f in range(len(widths)):
      part = (begins[f], begin, end, rows[f], firsts[f], places, spans[f])
      if widths[f] == 1:
        largest = _lookups(u8, part, out_lookups)
      elif widths[f] == 2:
        largest = _lookups(u16, part, out_lookups)
      elif widths[f] == 4:
        largest = _lookups(u32, part, out_lookups)
      else:
        largest = _lookups(u64, part, out_lookups)
      if largest > np.uint64(rows[f]):  # R itself is padding
        return _FIRST_FEATURE + f
  return -1


@kernel
@no_type_check
def _lookups(values: np.ndarray, part: tuple, out: np.ndarray) -> np.uint64:
  """Writes global rows of one feature, -1 for padding. Returns the largest."""
  start, begin, end, rows, first, places, span = part
  column, length, largest = span[0], span[1] - span[0], np.uint64(0)
  if length == 1:  # the inner loop would take half as long again
    for i in range(begin, end):
      row = np.int64(values[start + i])
      # As unsigned, a value too large for i64 stays large.
      largest = max(largest, np.uint64(row))
      out[places[i], column] = -1 if row == rows else first + row
    return largest
  for i in range(begin, end):
    for k in range(length):
      row = np.int64(values[start + i * length + k])
      largest = max(largest, np.uint64(row))
      out[places[i], column + k] = -1 if row == rows else first + row
  return largest
