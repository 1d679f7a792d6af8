"""The format of an export: a folder of plain files and a manifest of them.

    export.json      this layout, with a checksum of every file and of itself
    rows_0.bin ...   for each group of tables one record per row, end to end
    dense.bin        the model's parameters, end to end
    score_1024.jax   the forward pass for 1024 examples, from `jax.export`
    ids_0.bin ...    the vocabulary of each table
    popular_0.bin ...  the most popular rows of each group, if they are known

A record is a row in float32 or float16. In int8 it is a scale and an offset,
f32 each, and then D codes: code c stands for offset + scale * c. All numbers
are little-endian. No file holds Python code.

The manifest is written last. It is checked whole before it is used.
"""

from collections.abc import Mapping
import json
import math
import os
import pathlib
from typing import Any, NamedTuple
import zlib

from slip_serve.errors import ServeError
from slipstream_jax.files import checksum, Path

VERSION = 1
MANIFEST = 'export.json'
DENSE = 'dense.bin'
CODECS = ('float32', 'float16', 'int8')
VOCABULARIES = ('none', 'bounded', 'hashed', 'ranked', 'counted', 'text')
TRANSFORMS = ('none', 'log1p')
ALIGNMENT = 4096
"""Files of rows have a multiple of this many bytes, so that their last record
can also be read past the page cache."""
# Limits of what a manifest may claim, so that a damaged one takes no memory.
_MOST_BYTES = 1 << 28
_MOST = 1 << 56
_AGAIN = 'export the model again, or take another copy of the folder'


class File(NamedTuple):
  """A file of the folder."""

  name: str
  bytes: int
  crc32: str
  """CRC-32 of the file, 8 hex digits."""


class Feature(NamedTuple):
  """A feature: columns of the lookups of one table."""

  name: str
  table: int
  """Number of the table."""
  first: int
  """The first of its columns among all K."""
  length: int
  """L, the number of columns. Shorter lists are filled up with -1."""


class Table(NamedTuple):
  """A table: a range of its group's rows."""

  name: str
  rows: int
  group: int
  first: int
  """The table's row 0 in the group."""


class Group(NamedTuple):
  """Tables of one dim, whose rows are in one file."""

  rows: int
  dim: int
  file: str
  columns: tuple[int, ...]
  """Columns of the lookups of these tables, ascending."""
  popular: str = ''
  """File of the rows that are looked up most, i64, most popular first; the
  first contents of a cache. Empty if nobody counted."""


class Program(NamedTuple):
  """The forward pass for one batch size."""

  examples: int
  file: str


class Leaf(NamedTuple):
  """A parameter of the model."""

  dtype: str
  shape: tuple[int, ...]


class Vocabulary(NamedTuple):
  """Says which row of a table stands for a raw id."""

  kind: str = 'none'
  """A member of `VOCABULARIES`. 'none': ids are rows. 'bounded': ids below
  `entries` are rows, and all others have the row `entries`. 'hashed': a row is
  a hash. 'ranked': the file has the row of each hash. 'counted': the file has
  the known ids, ascending, and then their rows. 'text': the same for hashes of
  texts."""
  entries: int = 0
  """Number of rows ('hashed'), buckets ('ranked') or known ids."""
  file: str = ''
  """Empty if there is none."""
  hash_rows: int = 0
  """Of 'counted' and 'text': unknown ids share the rows 1 to `hash_rows` by a
  hash. If 0, they have row 0."""


class Dense(NamedTuple):
  """A dense feature, and how its columns are made of raw values."""

  name: str
  columns: int = 1
  fill: float | None = None
  """Stands for missing values. None: there must be none."""
  transform: str = 'none'
  """A member of `TRANSFORMS`. 'log1p': log(1 + max(x, 0))."""


class Layout(NamedTuple):
  """An export."""

  name: str
  """Name of the data that the model was trained on."""
  step: int
  codec: str
  """Codec of all rows, a member of `CODECS`."""
  dense_features: int
  """I."""
  weighted: bool
  """Whether lookups have weights."""
  features: tuple[Feature, ...]
  tables: tuple[Table, ...]
  groups: tuple[Group, ...]
  programs: tuple[Program, ...]
  leaves: tuple[Leaf, ...]
  vocabulary: tuple[Vocabulary, ...]
  """One for each table."""
  files: tuple[File, ...]
  dense: tuple[Dense, ...] = ()
  """The dense features by name, in order. Empty if they have no names."""

  @property
  def columns(self) -> int:
    """K, lookups of one example."""
    return sum(feature.length for feature in self.features)

  def record(self, group: Group) -> int:
    """Returns the bytes of one of the group's rows in its file."""
    return record_bytes(self.codec, group.dim)


def record_bytes(codec: str, dim: int) -> int:
  """Returns the bytes of a row of `dim` elements."""
  return {'float32': 4 * dim, 'float16': 2 * dim, 'int8': 8 + dim}[codec]


def padded(nbytes: int) -> int:
  """Rounds up to a multiple of `ALIGNMENT`."""
  return -(-nbytes // ALIGNMENT) * ALIGNMENT


def text_of(layout: Layout) -> str:
  """Returns the manifest of a layout, as JSON."""
  values = _plain(layout)
  values = {'version': VERSION, **values, 'checksum': _checksum(values)}
  return json.dumps(values, indent=1, allow_nan=False) + '\n'


def read_layout(folder: Path) -> Layout:
  """Reads the layout of a folder, and checks the size of every file.

  Raises:
    ServeError: the export is not finished, has another version, or its
      manifest is damaged.
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
      hint='make it with trainer.export or python -m experiments.export',
    ) from error
  except (_Damaged, OSError, RecursionError) as error:
    raise ServeError(
      'an export must be as it was written',
      got=str(error)[:200],
      where=str(path),
      hint=_AGAIN,
    ) from error
  return layout


def check_file(folder: Path, file: File) -> None:
  """Compares a file with its checksum.

  Raises:
    ServeError: they differ, or the file cannot be read.
  """
  path = pathlib.Path(folder) / file.name
  try:
    crc = f'{checksum(path):08x}'
  except OSError as error:
    crc = str(error)
  if crc != file.crc32:
    raise ServeError(
      f'a file of an export must have the checksum {file.crc32}',
      got=crc,
      where=str(path),
      hint=f'its disk lost or changed data: {_AGAIN}',
    )


class _Damaged(Exception):
  """The manifest is invalid; the message says why."""


def _plain(value: Any) -> Any:
  """Converts NamedTuples to dicts, for JSON."""
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
  stated = values.pop('checksum', None)
  try:
    known = _checksum(values)
  except ValueError as error:  # NaN, which is not JSON
    raise _Damaged(str(error)) from error
  _check(stated == known, f'the checksum {stated!r:.40}')
  return values


_PARTS: dict[str, Any] = {
  'features': Feature,
  'tables': Table,
  'groups': Group,
  'programs': Program,
  'leaves': Leaf,
  'vocabulary': Vocabulary,
  'files': File,
  'dense': Dense,
}


def _parsed(values: dict[str, Any]) -> Layout:
  """Converts the values of a manifest to a layout, and checks it."""
  try:
    for name, kind in _PARTS.items():
      if name in values or name not in Layout._field_defaults:
        values[name] = _all(kind, values[name])
    layout = Layout(**values)
    _check_layout(layout)
  except (KeyError, TypeError, ValueError, AttributeError) as error:
    raise _Damaged(f'{type(error).__name__}: {error}') from error
  return layout


def _all(kind: Any, values: Any) -> tuple[Any, ...]:
  _check(isinstance(values, list), f'no list of {kind.__name__}')
  parts = []
  for one in values:
    fields = {k: tuple(v) if type(v) is list else v for k, v in one.items()}
    parts.append(kind(**fields))
  return tuple(parts)


def _check(good: bool, got: str) -> None:
  if not good:
    raise _Damaged(got)


def _whole(value: Any, least: int = 0, most: int = _MOST) -> None:
  """Checks that a value is a whole number from `least` to `most`."""
  good = isinstance(value, int) and not isinstance(value, bool)
  _check(good and least <= value <= most, f'{value!r:.40} as a count')


def _check_layout(layout: Layout) -> None:
  """Checks that all parts agree, so that readers may rely on them."""
  _check(layout.codec in CODECS, f'codec {layout.codec!r}')
  _whole(layout.step)
  _whole(layout.dense_features, 0, 1 << 20)
  _check(isinstance(layout.weighted, bool), f'weighted {layout.weighted!r}')
  sizes: dict[str, int] = {}
  for file in layout.files:
    _whole(file.bytes)
    plain = isinstance(file.name, str) and file.name == os.path.basename(
      file.name
    )
    _check(plain and file.name not in ('', '.', '..'), f'file {file.name!r}')
    sizes[file.name] = file.bytes
  _check_features(layout)
  _check_rows(layout, sizes)
  for program in layout.programs:
    _whole(program.examples, 1, 1 << 24)
    _check(program.file in sizes, f'no {program.file!r}')
  for leaf in layout.leaves:
    _check(isinstance(leaf.dtype, str), f'dtype {leaf.dtype!r}')
    for size in leaf.shape:
      _whole(size)
    _check(math.prod(leaf.shape) <= _MOST, 'a leaf without bounds')
  _check(len(layout.vocabulary) == len(layout.tables), 'another vocabulary')
  for words, table in zip(layout.vocabulary, layout.tables, strict=True):
    _check(words.kind in VOCABULARIES, f'vocabulary {words.kind!r}')
    _whole(words.entries)
    _whole(words.hash_rows, 0, table.rows - 1)
    _check(words.file in sizes or words.file == '', f'no {words.file!r}')


def _check_features(layout: Layout) -> None:
  column = 0
  for feature in layout.features:
    _whole(feature.table, 0, len(layout.tables) - 1)
    _whole(feature.length, 1, 1 << 20)
    _check(feature.first == column, f'feature {feature.name} elsewhere')
    column += feature.length
  _check(bool(layout.features and layout.programs), 'no feature or program')
  for dense in layout.dense:
    _check(isinstance(dense.name, str), f'dense feature {dense.name!r}')
    _whole(dense.columns, 1, 1 << 20)
    _check(type(dense.fill) in (type(None), float), f'fill {dense.fill!r}')
    _check(dense.transform in TRANSFORMS, f'transform {dense.transform!r}')
  total = sum(dense.columns for dense in layout.dense)
  _check(not layout.dense or total == layout.dense_features, 'other widths')


def _check_rows(layout: Layout, sizes: Mapping[str, int]) -> None:
  columns = layout.columns
  for group in layout.groups:
    _whole(group.rows, 1)
    _whole(group.dim, 1, 1 << 20)
    for one in group.columns:
      _whole(one, 0, columns - 1)
    wanted = padded(group.rows * layout.record(group))
    _check(sizes[group.file] == wanted, f'{group.file} of another size')
    whole = group.popular == '' or sizes[group.popular] % 8 == 0
    _check(whole, f'{group.popular} of another size')
  covered = sorted(c for group in layout.groups for c in group.columns)
  _check(covered == [*range(columns)], 'lookups of no group, or of two')
  for table in layout.tables:
    _whole(table.group, 0, len(layout.groups) - 1)
    _whole(table.rows, 1)
    rows = layout.groups[table.group].rows
    _whole(table.first, 0, rows - table.rows)
