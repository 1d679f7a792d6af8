"""Opens users' tables as parts that are read in frames of bounded size."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import functools
import glob
import io
import os
import pathlib
from typing import Any, NamedTuple
import zlib

import polars as pl

from slipstream_jax.errors import UserError
from slipstream_jax.formats import text
from slipstream_jax.formats.frames import pieces
from slipstream_jax.formats.frames.pieces import (
  cut,
  cuts,
  first_line,
  FramePart,
  Piece,
  recut,
)
from slipstream_jax.formats.frames.streams import stream_frame
from slipstream_jax.formats.frames.text_pieces import check_columns, text_pieces

_DELIMITERS = {'.csv': ',', '.tsv': '\t'}
_SCANS: dict[str, Callable[[str], pl.LazyFrame]] = {
  '.parquet': pl.scan_parquet,
  '.pq': pl.scan_parquet,
  '.arrow': pl.scan_ipc,
  '.feather': pl.scan_ipc,
}
_SLICE = 1 << 18  # rows of a columnar file, about the size of a row group

Source = (
  str
  | os.PathLike[str]
  | Sequence[str | os.PathLike[str]]
  | pl.DataFrame
  | pl.LazyFrame
  | Mapping[str, Any]
  | Iterable[Any]
  | Callable[[], Iterable[Any]]
)
"""Files by path, pattern (`clicks-*.csv`), folder or list of paths: CSV or TSV
with a header, plain or gzip, Parquet or Arrow. Or a polars frame, lazy or not,
or a pandas frame. Or a dict of arrays. Or a stream of frames or of such dicts:
an iterable, or a function that returns one."""


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
  """Opens some columns of a source.

  Args:
    source: a source of any kind.
    columns: the wanted columns, each once.
    delimiter: delimiter of text files. None: ',' in .csv and a tab in .tsv.

  Raises:
    UserError: no such source, or files of an unknown kind. Reading raises it
      for unreadable data and for missing columns.
  """
  if isinstance(source, str | os.PathLike) or _are_paths(source):
    paths = _paths(source)
    parts = tuple(_file(path, columns, delimiter) for path in paths)
    more = f' and {len(paths) - 1} more' if len(paths) > 1 else ''
    return FrameSource(f'{pathlib.Path(paths[0]).name}{more}', parts, None)
  if isinstance(source, pl.LazyFrame):
    read = functools.partial(_lazy, source, columns)
    return _single('lazy frame', read, source.explain(optimized=False))
  if _is_pandas(source):
    height = len(source)  # type: ignore[arg-type]
    read = functools.partial(_pandas, source, columns)
    return _single('pandas frame', read, [height, _checksum(read)])
  if isinstance(source, pl.DataFrame):
    read = functools.partial(_frame, source, columns)
    return _single('frame', read, [source.height, _checksum(read)])
  if isinstance(source, Mapping):
    read = functools.partial(_stream, [source], columns)
    return _single('dict of arrays', read, _checksum(read))
  if callable(source) or isinstance(source, Iterable):
    read = functools.partial(_stream, source, columns)
    return _single('stream of frames', read, None)
  raise UserError(
    'a source must be files, a frame, or an iterable of frames or of dicts of'
    ' arrays',
    got=repr(source),
    where='frame_raw, source',
    hint='give the path of a .csv or .parquet file, for one',
  )


def _single(
  name: str, read: Callable[[], Iterator[Piece]], contents: object
) -> FrameSource:
  return FrameSource(name, (FramePart(name, 0, read),), contents)


def _are_paths(source: object) -> bool:
  return (
    isinstance(source, list | tuple)
    and len(source) > 0
    and all(isinstance(path, str | os.PathLike) for path in source)
  )


def _paths(source: Any) -> list[str]:
  """Returns the files of a path, a pattern, a folder or a list, in order."""
  if isinstance(source, list | tuple):
    return [os.fspath(path) for path in source]
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
  read: Callable[[], Iterator[Piece]]
  if scan is not None:
    read = functools.partial(_columnar, scan, path, columns)
  elif delimiter is not None:
    read = functools.partial(text_pieces, path, columns, delimiter)
  else:
    raise UserError(
      f'a file must be of a known kind, {", ".join(_DELIMITERS)} or'
      f' {", ".join(_SCANS)}',
      got=repr(suffixes),
      where=path,
      hint='give its delimiter if it is text, or frames that you read yourself',
    )
  return FramePart(path, text.size(path), read)


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
      for piece in cuts(frame, first, path):
        done = min(first + _SLICE, height)
        yield piece._replace(read=size * done // height)
  except pl.exceptions.PolarsError as error:
    raise _unreadable(path, error) from error


def _frame(frame: pl.DataFrame, columns: Sequence[str]) -> Iterator[Piece]:
  check_columns(frame.columns, columns, 'frame')
  yield from cuts(frame.select(columns), 0, 'frame')


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
      chunk_size=pieces.ROWS, maintain_order=True, lazy=True
    )
    yield from recut(iter(batches), name)
  except pl.exceptions.PolarsError as error:
    raise _unreadable(name, error) from error


def _is_pandas(source: object) -> bool:
  # By name, so that pandas need not be imported.
  kind = type(source)
  return kind.__name__ == 'DataFrame' and kind.__module__.startswith('pandas')


def _pandas(frame: Any, columns: Sequence[str]) -> Iterator[Piece]:
  name = 'pandas frame'
  check_columns([str(column) for column in frame.columns], columns, name)
  for first in range(0, len(frame), pieces.ROWS):
    rows = frame[list(columns)].iloc[first : first + pieces.ROWS]
    try:
      yield cut(pl.from_pandas(rows), first, name)
    except (ImportError, TypeError, ValueError) as error:
      raise _unreadable(name, error) from error


def _stream(source: Any, columns: Sequence[str]) -> Iterator[Piece]:
  name = 'stream of frames'
  items = source() if callable(source) else source

  def frames() -> Iterator[pl.DataFrame]:
    for number, item in enumerate(items):
      where = f'{name}, frame {number}'
      frame = stream_frame(item, columns, where)
      check_columns(frame.columns, columns, where)
      yield frame.select(columns)

  yield from recut(frames(), name)


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
