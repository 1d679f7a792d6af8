"""Stored columns to rows of examples: the fast part of packed batches.

A table's column holds local rows in the smallest type; a model takes global
rows, example by example. Files are read, not mapped: a process then holds no
more than its buffer, and a file cut off is an error rather than a crash.
"""

from collections.abc import Iterable
import contextlib
import io
import pathlib
from typing import NamedTuple

from jaxtyping import Int
import numpy as np

from slipstream_jax.data.base import Columns
from slipstream_jax.errors import UserError
from slipstream_jax.packed.columns import AGAIN, Blocks, Column, Packed
from slipstream_jax.packed.kernels import FIRST_FEATURE, LABELS, scatter
from slipstream_jax.packed.layout import layout_from, TableColumns
from slipstream_jax.row_space import row_dtype
from slipstream_jax.table_set import tables_of, TableSet

_ALIGNED = 64  # bytes; more than any type needs


class Form(NamedTuple):
  """What a packed data set's examples look like; made by `form_of`."""

  folder: pathlib.Path
  tables: TableSet
  """Sizes and features; a folder knows of no dim."""
  columns: tuple[Column, ...]
  """`labels`, `dense` and one per feature, in that order."""
  lookup_weights: dict[str, Column]
  """Of each weighted feature."""
  of_tables: tuple[TableColumns, ...]
  """The tables' own columns, in their order."""
  blocks: Blocks | None
  """With what each block is compared when it is first read; None: nothing."""

  @property
  def examples(self) -> int:
    """Examples of all splits."""
    return self.columns[0].shape[0]

  @property
  def example_bytes(self) -> int:
    """Of one example in memory, with its place in the buffer."""
    one = [c.nbytes for c in self.empty(1) if c is not None]
    return sum(one) + np.dtype(np.int32).itemsize

  def empty(self, examples: int) -> Columns:
    """Room for examples."""
    labels, dense, *_ = self.columns
    shape = (examples, *self.tables.example_shape)
    return Columns(
      np.empty((examples, dense.shape[1]), np.float32),
      np.empty(shape, row_dtype(self.tables.num_rows)),
      np.empty((examples, *labels.shape[1:]), np.float32),
      np.ones(shape, np.float32) if self.lookup_weights else None,
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
    examples = int(facts['examples'])
    layout = layout_from(facts)
    tables = tables_of(sizes, layout.features)
    lookups = [
      layout.lookups(name, sizes[feature.table], examples)
      for name, feature in layout.features.items()
    ]
  except (
    *(KeyError, TypeError, ValueError, AttributeError, OverflowError),
  ) as error:
    raise UserError(
      'the manifest must have tables, features, dense_features, labels and'
      ' examples',
      got=repr(error)[:200],
      where=str(packed.folder),
      hint=AGAIN,
    ) from error
  columns = (*layout.example_columns(examples), *lookups)
  weights = layout.lookup_weights(examples)
  for column in (*columns, *weights.values()):
    packed.column(column)
  of_tables = tuple(layout.of_table(*item) for item in sizes.items())
  return Form(packed.folder, tables, columns, weights, of_tables, packed.blocks)


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
    UserError: a file cannot be read, a block of it is not as it was written,
      or it holds a row that its table lacks or a label that is not in [0, 1].
  """
  scratch = _Scratch(form, longest)
  lookups = out.lookups.reshape(len(out.lookups), -1)
  labels = out.labels.reshape(len(out.labels), -1)
  runs, at = list(runs), 0
  with contextlib.ExitStack() as stack:
    files = [stack.enter_context(_open(form, c)) for c in form.columns]
    for first, end in runs:
      for file, column, room in zip(
        files, form.columns, scratch.rooms, strict=True
      ):
        _fill(file, form, column, first, room[: end - first])
      here = places[at : at + end - first]
      bad = scatter(
        *scratch.typed, *scratch.layout, here, labels, out.dense, lookups
      )
      if bad >= 0:
        _refuse(form, bad, scratch.rooms[bad][: end - first], first)
      at += end - first
  _read_weights(form, runs, places, out)


def _read_weights(
  form: Form,
  runs: list[tuple[int, int]],
  places: Int[np.ndarray, ' n'],
  out: Columns,
) -> None:
  """As `read`, of the weights of lookups alone."""
  if out.lookup_weights is None:
    return
  weights = out.lookup_weights.reshape(len(out.lookups), -1)
  for name, column in form.lookup_weights.items():
    span, at = form.tables.columns[name], 0
    with _open(form, column) as file:
      for first, end in runs:
        room = np.empty((end - first, *column.shape[1:]), column.stored)
        _fill(file, form, column, first, room)
        here = places[at : at + end - first]
        weights[here, span] = room.reshape(end - first, -1)
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
    tables, ids = form.tables, self.rooms[FIRST_FEATURE:]
    of = [(f.table, tables.columns[n]) for n, f in tables.features.items()]
    widths = np.array([room.itemsize for room in ids])
    self.layout = (
      widths,
      begins[FIRST_FEATURE:-1] // widths,
      np.array([tables.tables[table].rows for table, _ in of]),
      np.array([tables.first_rows[table] for table, _ in of]),
      np.array([[span.start, span.stop] for _, span in of]),
    )
    views = [whole.view(f'u{width}') for width in (1, 2, 4, 8)]
    labels = self.rooms[LABELS].reshape(longest, -1)
    self.typed = *views, labels, self.rooms[1]


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
  begin = first * (room.nbytes // len(room))
  if form.blocks is not None:
    form.blocks.check(column, file.fileno(), begin, begin + room.nbytes)
  file.seek(begin)
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
  if column == LABELS:
    bad, rule = ~((values >= 0) & (values <= 1)), 'packed labels must be'
    rule += ' 0 or 1' if values.dtype == np.uint8 else ' in [0, 1]'
  else:
    feature = [*form.tables.features.values()][column - FIRST_FEATURE]
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
