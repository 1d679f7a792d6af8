"""Opens users' tables as parts that are read in frames of bounded size."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import functools
import glob
import io
import os
import pathlib
from typing import Any, NamedTuple, Protocol, runtime_checkable
import zlib

import numpy as np
import polars as pl

from slipstream_jax.columns.read import (
  is_missing,
  library,
  names_of,
  place_in,
  read,
)
from slipstream_jax.errors import UserError
from slipstream_jax.formats import text
from slipstream_jax.formats.delimited import (
  check_columns,
  first_line,
  Piece,
  text_pieces,
)

_ROWS = 1 << 16  # of a piece, unless it is a block of a text file
_SLICE = 1 << 18  # rows of a columnar file, about the size of a row group
_DELIMITERS = {'.csv': ',', '.tsv': '\t'}
_SCANS: dict[str, Callable[[str], pl.LazyFrame]] = {
  '.parquet': pl.scan_parquet,
  '.pq': pl.scan_parquet,
  '.arrow': pl.scan_ipc,
  '.feather': pl.scan_ipc,
}


@runtime_checkable
class ArrowTable(Protocol):
  """A table of arrow, known by its attributes."""

  @property
  def column_names(self) -> list[str]:
    """Names of the columns."""
    ...


Source = (
  str
  | os.PathLike[str]
  | Sequence[str | os.PathLike[str]]
  | pl.DataFrame
  | pl.LazyFrame
  | ArrowTable
  | Mapping[str, Any]
  | Iterable[Any]
  | Callable[[], Iterable[Any]]
)
"""Files by path, pattern (`clicks-*.csv`), folder or list of paths: CSV or TSV
with a header, plain or gzip, Parquet or Arrow. Or a polars frame, lazy or not,
or a frame of pandas or arrow. Or a dict of columns. Or a stream of frames or of
such dicts: an iterable, or a function that returns one."""


class FramePart(NamedTuple):
  """A part of a source that can be read separately."""

  name: str
  """Shown in progress and errors. The path if the part is a file."""
  size: int
  """Size in bytes. 0 if unknown."""
  pieces: Callable[[], Iterator[Piece]]
  """Reads the part from its start, in the same pieces each time."""


class FrameSource(NamedTuple):
  """A source that can be read."""

  name: str
  parts: tuple[FramePart, ...]
  contents: object
  """Identifies the contents, as JSON, beside names, sizes and times of
  files."""


def open_source(
  source: Source, columns: Sequence[str], delimiter: str | None = None
) -> FrameSource:
  """Opens some columns of a source, each named once.

  Raises:
    UserError: no such source, or files of an unknown kind. Reading raises it
      for unreadable data and for missing columns.
  """
  paths = _paths(source)
  if paths is not None:
    parts = tuple(_file(path, columns, delimiter) for path in paths)
    more = f' and {len(paths) - 1} more' if len(paths) > 1 else ''
    return FrameSource(f'{pathlib.Path(paths[0]).name}{more}', parts, None)
  contents: object = None
  reads: Callable[[], Iterator[Piece]]
  if isinstance(source, pl.LazyFrame):
    name, reads = 'lazy frame', functools.partial(_lazy, source, columns)
    contents = source.explain(optimized=False)
  elif names_of(source) is not None:
    table: Any = source
    name = 'frame' if library(table) == 'polars' else f'{library(table)} frame'
    name = 'dict of arrays' if isinstance(table, Mapping) else name
    reads = functools.partial(_table, table, columns, name)
    crc = _checksum(reads)
    contents = crc if isinstance(table, Mapping) else [len(table), crc]
  elif callable(source) or isinstance(source, Iterable):
    name = 'stream of frames'
    reads = functools.partial(_stream, source, columns, name)
  else:
    raise UserError(
      'a source must be files, a frame, or an iterable of frames or of dicts of'
      ' arrays',
      got=repr(source),
      where='pack, source',
      hint='give the path of a .csv or .parquet file, for one',
    )
  return FrameSource(name, (FramePart(name, 0, reads),), contents)


def _paths(source: Any) -> list[str] | None:
  """Returns the files of a path, pattern, folder or list, None for others."""
  if isinstance(source, list | tuple):
    named = all(isinstance(path, str | os.PathLike) for path in source)
    return [os.fspath(path) for path in source] if named and source else None
  if not isinstance(source, str | os.PathLike):
    return None
  path = os.fspath(source)
  if os.path.isdir(path):
    found_in = [os.path.join(path, name) for name in sorted(os.listdir(path))]
    paths = [p for p in found_in if os.path.isfile(p)]
  elif glob.has_magic(path) and not os.path.exists(path):
    paths = sorted(glob.glob(path))
  else:
    return [path]
  if not paths:
    raise UserError(
      'a source must have at least one file',
      got='none',
      where=path,
      hint='look at the pattern, or name the files one by one',
    )
  return paths


def _file(
  path: str, columns: Sequence[str], delimiter: str | None
) -> FramePart:
  suffixes = pathlib.Path(path.lower().removesuffix('.gz')).suffix
  scan = _SCANS.get(suffixes)
  delimiter = delimiter or _DELIMITERS.get(suffixes)
  reads: Callable[[], Iterator[Piece]]
  if scan is not None:
    reads = functools.partial(_columnar, scan, path, columns)
  elif delimiter is not None:
    reads = functools.partial(text_pieces, path, columns, delimiter)
  else:
    raise UserError(
      f'a file must be of a known kind, {", ".join(_DELIMITERS)} or'
      f' {", ".join(_SCANS)}',
      got=repr(suffixes),
      where=path,
      hint='give its delimiter if it is text, or frames that you read yourself',
    )
  return FramePart(path, text.size(path), reads)


def _columnar(
  scan: Callable[[str], pl.LazyFrame], path: str, columns: Sequence[str]
) -> Iterator[Piece]:
  """Reads a columnar file slice by slice."""
  size = text.size(path)
  try:
    lazy = scan(path)
    check_columns(lazy.collect_schema().names(), columns, path)
    lazy = lazy.select(columns)
    height = lazy.select(pl.len()).collect().item()
    for first in range(0, height, _SLICE):
      frame = lazy.slice(first, _SLICE).collect()
      for piece in _cuts(frame, first, path):
        done = min(first + _SLICE, height)
        yield piece._replace(read=size * done // height)
  except pl.exceptions.PolarsError as error:
    raise _unreadable(path, error) from error


def _lazy(lazy: pl.LazyFrame, columns: Sequence[str]) -> Iterator[Piece]:
  name = 'lazy frame'
  if not hasattr(lazy, 'collect_batches'):
    raise UserError(
      'a lazy frame needs a polars that reads it in batches',
      got=f'polars {pl.__version__}',
      where=name,
      hint='update polars, or write the frame to Parquet first',
    )
  try:
    check_columns(lazy.collect_schema().names(), columns, name)
    batches = lazy.select(columns).collect_batches(
      chunk_size=_ROWS, maintain_order=True, lazy=True
    )
    yield from _recut(iter(batches), name)
  except pl.exceptions.PolarsError as error:
    raise _unreadable(name, error) from error


def _table(table: Any, columns: Sequence[str], name: str) -> Iterator[Piece]:
  """Reads a frame of any library, or a dict of columns."""
  frame = _to_frame(table, columns, name)
  # A slice is written with other bytes, and folders know the checksum of these.
  cut = isinstance(table, Mapping)
  yield from _recut(iter([frame]), name) if cut else _cuts(frame, 0, name)


def _stream(source: Any, columns: Sequence[str], name: str) -> Iterator[Piece]:
  frames = (
    _to_frame(item, columns, f'{name}, frame {number}')
    for number, item in enumerate(source() if callable(source) else source)
  )
  yield from _recut(frames, name)


def _to_frame(item: Any, columns: Sequence[str], where: str) -> pl.DataFrame:
  """Converts a frame of any library, or a dict of columns, to polars."""
  names, error = names_of(item), None
  if names is not None:
    check_columns(names, columns, where)
    if isinstance(item, pl.DataFrame):
      return item.select(columns)
    series = [_series(name, item[name], where) for name in columns]
    try:
      return pl.DataFrame(series)
    except pl.exceptions.PolarsError as caught:
      error = caught
  raise UserError(
    'a stream must give frames, or dicts of arrays of one length',
    got=f'a {type(item).__name__}' if error is None else first_line(error),
    where=where,
    hint="give dicts such as {'user': users, 'label': clicks}",
  ) from error


def _series(name: str, given: Any, where: str) -> pl.Series:
  """Reads a column as a series. An array of lists becomes `pl.Array`."""
  column, splits, _ = read(given, place_in(f'{where}, {name}'))
  if isinstance(column, np.ndarray) and column.dtype == object:
    flat = [None if is_missing(x) else x for x in column.reshape(-1).tolist()]
    try:
      series = pl.Series(name, flat)
    except (TypeError, OverflowError) as error:
      raise UserError(
        'a column must hold values of one type',
        got=first_line(error),
        where=f'{where}, {name}',
        hint='convert all values to one type',
      ) from error
    if column.ndim == 2:
      series = series.reshape(column.shape)
  elif splits is not None and not len(column):
    series = pl.Series(name, [], dtype=pl.Null)  # fits lists of any type
  else:
    series = pl.Series(name, column)
  if splits is None:
    return series
  rows = np.arange(len(splits) - 1)
  values = pl.DataFrame(
    {'row': np.repeat(rows, np.diff(splits)), 'list': series}
  )
  # In order, because the checksum of the contents depends on the layout.
  lists = values.group_by('row', maintain_order=True).agg('list')
  # Rows with empty lists are missing from `lists`. They become null.
  every = pl.DataFrame({'row': rows})
  every = every.join(lists, on='row', how='left', maintain_order='left')
  return every['list'].alias(name)


def _recut(frames: Iterator[pl.DataFrame], name: str) -> Iterator[Piece]:
  """Cuts frames of any sizes into pieces of `_ROWS` rows and a last rest.

  A resumed preparation counts pieces, and a stream's frames may have other
  sizes each time.
  """
  first, held = 0, None
  for frame in frames:
    held = frame if held is None else _joined(held, frame, name)
    while held.height >= _ROWS:
      yield _cut(held.head(_ROWS), first, name)
      held, first = held.slice(_ROWS), first + _ROWS
  if held is not None and held.height:
    yield _cut(held, first, name)


def _cuts(frame: pl.DataFrame, first: int, name: str) -> Iterator[Piece]:
  """Cuts a frame, whose first row has the number `first`, into pieces."""
  for at in range(0, frame.height, _ROWS):
    yield _cut(frame.slice(at, _ROWS), first + at, name)


def _cut(frame: pl.DataFrame, first: int, name: str) -> Piece:
  """Returns a piece whose first row has the number `first` in its source."""
  return Piece(frame, lambda row: f'{name}, row {first + row}')


def _joined(held: pl.DataFrame, frame: pl.DataFrame, name: str) -> pl.DataFrame:
  for column, dtype in held.schema.items():
    other = frame.schema[column]
    if not _agree(dtype, other):
      raise UserError(
        'all frames of a source must have the same columns of the same types',
        got=f'{other} after {dtype}',
        where=f'{name}, column {column}',
        hint='give each frame the types of the first one',
      )
    if isinstance(dtype, pl.Array) and isinstance(other, pl.Array):
      width = max(dtype.size, other.size)
      held, frame = (_widened(one, column, width) for one in (held, frame))
  return pl.concat([held, frame], how='vertical_relaxed', rechunk=True)


def _widened(frame: pl.DataFrame, column: str, width: int) -> pl.DataFrame:
  """Pads a column of arrays of lists [n, W] with -1 to `width` columns."""
  values = frame[column].to_numpy()
  if values.shape[1] == width:
    return frame
  pads = [(0, 0), (0, width - values.shape[1])]
  wide = np.pad(values, pads, constant_values=-1)
  return frame.with_columns(pl.Series(column, wide))


def _agree(dtype: Any, other: Any) -> bool:
  """Whether two types are compatible. A column of nulls fits any type."""
  if isinstance(dtype, pl.List) and isinstance(other, pl.List):
    return _agree(dtype.inner, other.inner)
  if isinstance(dtype, pl.Array) and isinstance(other, pl.Array):
    signed = dtype.inner.is_signed_integer() and other.inner == dtype.inner
    return signed or dtype == other
  return (
    dtype == other
    or pl.Null in (dtype, other)
    or (dtype.is_integer() and other.is_integer())
    or (dtype.is_float() and other.is_float())
  )


def _checksum(read: Callable[[], Iterator[Piece]]) -> int:
  """Returns a checksum of all contents of a frame, including types."""
  crc = 0
  for piece in read():
    buffer = io.BytesIO()
    piece.frame.rechunk().write_ipc(buffer, compression='uncompressed')
    crc = zlib.crc32(buffer.getbuffer(), crc)
  return crc


def _unreadable(name: str, error: Exception) -> UserError:
  return UserError(
    'a source must be readable to its end',
    got=first_line(error),
    where=name,
    hint='read it with polars, or pandas, by itself to see why',
  )
