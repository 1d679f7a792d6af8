"""The manifest of an export, written last, and looked at before it is used."""

from collections.abc import Mapping
import json
import math
import os
import pathlib
from typing import Any
import zlib

from slip_serve.errors import ServeError
from slip_serve.layout import (
  CODECS,
  Feature,
  File,
  Group,
  Layout,
  Leaf,
  MANIFEST,
  padded,
  Program,
  Table,
  VERSION,
  VOCABULARIES,
  Vocabulary,
)

# Of what a manifest says, so that a damaged one asks for no memory.
_MOST_BYTES = 1 << 28
_MOST = 1 << 56
_AGAIN = 'export the run again, or take another copy of the folder'


class _Damaged(Exception):
  """The manifest is none; the message says why."""


def text_of(layout: Layout) -> str:
  """The manifest of a layout; the last that is written of an export."""
  values = _plain(layout)
  values = {'version': VERSION, **values, 'checksum': _checksum(values)}
  return json.dumps(values, indent=1, allow_nan=False) + '\n'


def read_layout(folder: str | os.PathLike[str]) -> Layout:
  """The layout of a folder, once every file is known to be of its size.

  Raises:
    ServeError: there is no finished export, it is of another version, or the
      manifest is not as it was written.
  """
  path = pathlib.Path(folder) / MANIFEST
  try:
    layout = _parsed(_read(path))
    for file in layout.files:
      size = (pathlib.Path(folder) / file.name).stat().st_size
      _check(size == file.bytes, f'{file.name} of {size} bytes')
  except FileNotFoundError as error:
    raise ServeError(
      f'an export is a folder with a {MANIFEST} and the files that it names',
      got=f'none called {pathlib.Path(str(error.filename)).name}',
      where=str(folder),
      hint='make it with python -m experiments.export',
    ) from error
  except (_Damaged, OSError, RecursionError) as error:
    raise ServeError(
      'an export must be as it was written',
      got=str(error)[:200],
      where=str(path),
      hint=_AGAIN,
    ) from error
  return layout


def check_file(folder: str | os.PathLike[str], file: File) -> None:
  """Compares a file with its checksum.

  Raises:
    ServeError: it has another one, or cannot be read.
  """
  path = pathlib.Path(folder) / file.name
  try:
    crc = checksum_of(path)
  except OSError as error:
    crc = str(error)
  if crc != file.crc32:
    raise ServeError(
      f'a file of an export must have the checksum {file.crc32}',
      got=crc,
      where=str(path),
      hint=f'its disk lost or changed data: {_AGAIN}',
    )


def checksum_of(path: str | os.PathLike[str]) -> str:
  """CRC-32 of a file, 8 hex digits."""
  crc = 0
  with open(path, 'rb') as file:
    while piece := file.read(1 << 22):
      crc = zlib.crc32(piece, crc)
  return f'{crc:08x}'


def _plain(value: Any) -> Any:
  """NamedTuples as dicts, for JSON."""
  if hasattr(value, '_asdict'):
    return {name: _plain(one) for name, one in value._asdict().items()}
  if isinstance(value, tuple):
    return [_plain(one) for one in value]
  return value


def _checksum(values: Mapping[str, Any]) -> str:
  text = json.dumps(values, sort_keys=True, allow_nan=False)
  return f'{zlib.crc32(text.encode()):08x}'


def _read(path: pathlib.Path) -> dict[str, Any]:
  if path.stat().st_size > _MOST_BYTES:
    raise _Damaged(f'{path.stat().st_size} bytes')
  try:
    values = json.loads(path.read_bytes())
  except ValueError as error:
    raise _Damaged(f'no JSON: {error}') from error
  _check(isinstance(values, dict), f'a {type(values).__name__}')
  version = values.pop('version', None)
  _check(version == VERSION, f'version {version!r:.40}, not {VERSION}')
  checksum = values.pop('checksum', None)
  try:
    known = _checksum(values)
  except ValueError as error:  # a number that JSON has not
    raise _Damaged(str(error)) from error
  _check(checksum == known, f'the checksum {checksum!r:.40}')
  return values


def _parsed(values: dict[str, Any]) -> Layout:
  """The layout that the values say, if it is one."""
  try:
    parts: dict[str, Any] = {
      'features': _all(Feature, values['features']),
      'tables': _all(Table, values['tables']),
      'groups': _all(Group, values['groups'], columns=tuple),
      'programs': _all(Program, values['programs']),
      'leaves': _all(Leaf, values['leaves'], shape=tuple),
      'vocabulary': _all(Vocabulary, values['vocabulary']),
      'files': _all(File, values['files']),
    }
    layout = Layout(**{**values, **parts})
    _check_layout(layout)
  except (KeyError, TypeError, ValueError, AttributeError) as error:
    raise _Damaged(f'{type(error).__name__}: {error}') from error
  return layout


def _all(of: Any, values: Any, **changes: Any) -> tuple[Any, ...]:
  _check(isinstance(values, list), f'{of.__name__}s that are no list')
  return tuple(
    of(**{**one, **{key: change(one[key]) for key, change in changes.items()}})
    for one in values
  )


def _check(good: bool, got: str) -> None:
  if not good:
    raise _Damaged(got)


def _whole(value: Any, least: int = 0, most: int = _MOST) -> None:
  """Also the bounds: what is above them no file could hold."""
  good = isinstance(value, int) and not isinstance(value, bool)
  _check(good and least <= value <= most, f'{value!r:.40} as a count')


def _check_layout(layout: Layout) -> None:
  """Looks whether all parts agree, so that whoever reads may rely on it."""
  _check(layout.codec in CODECS, f'codec {layout.codec!r}')
  _whole(layout.step)
  _whole(layout.dense_features, 0, 1 << 20)
  _check(isinstance(layout.weighted, bool), f'weighted {layout.weighted!r}')
  sizes = {}
  for file in layout.files:
    _whole(file.bytes)
    plain = isinstance(file.name, str) and file.name == os.path.basename(
      file.name
    )
    _check(plain and file.name not in ('', '.', '..'), f'file {file.name!r}')
    sizes[file.name] = file.bytes
  column = 0
  for feature in layout.features:
    _whole(feature.table, 0, len(layout.tables) - 1)
    _whole(feature.length, 1, 1 << 20)
    _check(feature.first == column, f'feature {feature.name} elsewhere')
    column += feature.length
  _check(bool(layout.features and layout.programs), 'no feature or program')
  for group in layout.groups:
    _whole(group.rows, 1)
    _whole(group.dim, 1, 1 << 20)
    for one in group.columns:
      _whole(one, 0, column - 1)
    wanted = padded(group.rows * layout.record(group))
    _check(sizes[group.file] == wanted, f'{group.file} of another size')
    whole = group.popular == '' or sizes[group.popular] % 8 == 0
    _check(whole, f'{group.popular} of another size')
  covered = sorted(c for group in layout.groups for c in group.columns)
  _check(covered == [*range(column)], 'lookups of no group, or of two')
  for table in layout.tables:
    _whole(table.group, 0, len(layout.groups) - 1)
    _whole(table.rows, 1)
    rows = layout.groups[table.group].rows
    _whole(table.first, 0, rows - table.rows)
  for program in layout.programs:
    _whole(program.examples, 1, 1 << 24)
    _check(program.file in sizes, f'no {program.file!r}')
  for leaf in layout.leaves:
    _check(isinstance(leaf.dtype, str), f'dtype {leaf.dtype!r}')
    for size in leaf.shape:
      _whole(size)
    _check(math.prod(leaf.shape) <= _MOST, 'a leaf without bounds')
  _check(len(layout.vocabulary) == len(layout.tables), 'another vocabulary')
  for words in layout.vocabulary:
    _check(words.kind in VOCABULARIES, f'vocabulary {words.kind!r}')
    _whole(words.entries)
    _check(words.file in sizes or words.file == '', f'no {words.file!r}')
