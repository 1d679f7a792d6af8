"""The format of an export: a folder of plain files and a manifest of them.

    export.json      this layout, with a checksum of every file and of itself
    rows_0.bin ...   for each group of tables one record per row, end to end
    dense.bin        the model's parameters, end to end
    score_1024.jax   the forward pass for 1024 examples, from `jax.export`
    ids_0.bin ...    the vocabulary of each table
    popular_0.bin ...  the most popular rows of each group, if they are known

A record is a row in float32 or float16. In int8 it is a scale and an offset,
f32 each, and then D codes: code c means offset + scale * c. All numbers
are little-endian. No file holds Python code.

The manifest is written last. It is checked whole before it is used.
"""

from collections.abc import Mapping
import json
import math
import os
import pathlib
from types import NoneType
from typing import Any, get_args, get_origin, NamedTuple
import zlib

from slip_serve.errors import ServeError
from slipstream_jax.files import checksum, Path

VERSION = 1
MANIFEST = 'export.json'
DENSE = 'dense.bin'
CODECS = ('float32', 'float16', 'int8')
VOCABULARIES = ('none', 'bounded', 'hashed', 'ranked', 'counted', 'text')
TEXTS = ('any', 'hex')
TRANSFORMS = ('none', 'log1p', 'log1p_float32', 'hour', 'missing')
ALIGNMENT = 4096
"""Files of rows have a multiple of this many bytes, so that their last record
can also be read past the page cache."""
# Limits of what a manifest may claim, so that a damaged one takes no memory.
_MOST_BYTES = 1 << 28
_MOST = 1 << 56
_WIDEST = 1 << 20  # columns, or elements of a row
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
  combiner: str = ''
  """Combiner of the rows of a list, as in `slip.Feature`. Empty in exports of
  older versions, where it is not known."""


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
  """File of the rows that are looked up most, i64, most popular first. A cache
  begins with them. Empty if they are not known."""


class Program(NamedTuple):
  """The forward pass for one batch size."""

  examples: int
  file: str


class Leaf(NamedTuple):
  """A parameter of the model."""

  dtype: str
  shape: tuple[int, ...]


class Vocabulary(NamedTuple):
  """Maps raw ids to rows of a table."""

  kind: str
  """A member of `VOCABULARIES`. 'none': ids are rows. 'bounded': ids below
  `entries` are rows, and all others have the row `entries`. 'hashed': a row is
  a hash. 'ranked': the file has the row of each hash. 'counted': the file has
  the known ids, ascending, and then their rows. 'text': the same for hashes of
  texts."""
  entries: int
  """Number of rows ('hashed'), buckets ('ranked') or known ids."""
  file: str
  """Empty if there is none."""
  hash_rows: int = 0
  """Of 'counted' and 'text': unknown ids share the rows 1 to `hash_rows` by a
  hash. If 0, they have row 0."""
  texts: str = 'any'
  """A member of `TEXTS`, which says what number a text is. 'any': as
  `slip.pack` numbers texts. 'hex': up to 8 hexadecimal digits."""


class Dense(NamedTuple):
  """A dense feature, and how its columns are made of raw values."""

  name: str
  columns: int = 1
  fill: float | None = None
  """Replaces missing values before the transform. None: none may be missing."""
  transform: str = 'none'
  """A member of `TRANSFORMS`. 'log1p': log(1 + max(x, 0)) in float64.
  'log1p_float32': log(1 + x) in float32. 'hour': the hour of YYMMDDHH, divided
  by 24. 'missing': 1 where a value is missing, else 0."""


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
  """The dense features by name, in order. Empty if they have no names. A name
  may be there twice: all are made of the same raw values."""
  numbers: tuple[int, ...] = ()
  """Heads that predict their labels, such as ratings. The others predict log
  odds of a click. A model without heads has head 0."""

  @property
  def columns(self) -> int:
    """K, lookups of one example."""
    return sum(feature.length for feature in self.features)

  def features_in(self, group: int) -> tuple[Feature, ...]:
    """Returns the features of a group's columns, in order."""
    return tuple(
      one for one in self.features if self.tables[one.table].group == group
    )

  def record(self, group: Group) -> int:
    """Returns the bytes of one of the group's rows in its file."""
    dim = group.dim
    return {'float32': 4 * dim, 'float16': 2 * dim, 'int8': 8 + dim}[self.codec]


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
    layout: Layout = _parsed(Layout, _read(path))
    _check_layout(layout)
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
  # KeyError: a file that is not listed. ValueError: a name that cannot be.
  except (OSError, RecursionError, KeyError, ValueError) as error:
    what = 'no file ' if isinstance(error, KeyError) else ''
    raise ServeError(
      'an export must be as it was written',
      got=f'{what}{error}'[:200],
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


class _DamagedError(ValueError):
  """The manifest is invalid for the reason in the message."""


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
    raise _DamagedError(f'{path.stat().st_size} bytes')
  values = json.loads(path.read_bytes())
  _check(isinstance(values, dict), f'a {type(values).__name__}')
  version = values.pop('version', None)
  _check(version == VERSION, f'version {version!r:.40}, not {VERSION}')
  stated = values.pop('checksum', None)
  _check(stated == _checksum(values), f'the checksum {stated!r:.40}')
  return values


def _parsed(kind: Any, value: Any) -> Any:
  """Converts a value of JSON to a type of this file, and checks its type."""
  if kind in (int, str, bool, NoneType):
    _check(type(value) is kind, f'{value!r:.40} as {kind.__name__}')
    _check(kind is not int or 0 <= value <= _MOST, f'{value!r:.40} as a count')
    return value
  if kind == float | None:
    _check(type(value) in (float, NoneType), f'{value!r:.40} as a number')
    return value
  if get_origin(kind) is tuple:
    _check(type(value) is list, f'{value!r:.40} as a list')
    return tuple(_parsed(get_args(kind)[0], one) for one in value)
  _check(type(value) is dict, f'{value!r:.40} as {kind.__name__}')
  types = kind.__annotations__
  _check(value.keys() <= types.keys(), f'{kind.__name__} of {[*value]!r:.80}')
  missing = types.keys() - value.keys() - kind._field_defaults.keys()
  _check(not missing, f'{kind.__name__} without {sorted(missing)}')
  return kind(**{name: _parsed(types[name], value[name]) for name in value})


def _check(good: bool, got: str) -> None:
  if not good:
    raise _DamagedError(got)


def _check_layout(layout: Layout) -> None:
  """Checks that all parts agree, so that readers may rely on them."""
  _check(layout.codec in CODECS, f'codec {layout.codec!r}')
  _check(layout.dense_features <= _WIDEST, 'dense features without bounds')
  sizes = {file.name: file.bytes for file in layout.files}
  for name in sizes:
    plain = name == os.path.basename(name) and name not in ('', '.', '..')
    _check(plain, f'file {name!r}')
  for program in layout.programs:
    _check(1 <= program.examples <= 1 << 24, f'program {program}')
    _check(program.file in sizes, f'no {program.file!r}')
  _check(bool(layout.features and layout.programs), 'no feature or program')
  for leaf in layout.leaves:
    _check(math.prod(leaf.shape) <= _MOST, 'a leaf without bounds')
  column = 0
  for feature in layout.features:
    _check(feature.table < len(layout.tables), f'feature {feature}')
    _check(1 <= feature.length <= _WIDEST, f'feature {feature}')
    _check(feature.first == column, f'feature {feature.name} elsewhere')
    column += feature.length
  for dense in layout.dense:
    _check(1 <= dense.columns <= _WIDEST, f'dense feature {dense}')
    _check(dense.transform in TRANSFORMS, f'transform {dense.transform!r}')
  total = sum(dense.columns for dense in layout.dense)
  _check(not layout.dense or total == layout.dense_features, 'other widths')
  widths = {(dense.name, dense.columns) for dense in layout.dense}
  names = {dense.name for dense in layout.dense}
  _check(len(widths) == len(names), 'a dense feature of two widths')
  _check_rows(layout, sizes)


def _check_rows(layout: Layout, sizes: Mapping[str, int]) -> None:
  for group in layout.groups:
    _check(group.rows >= 1 and 1 <= group.dim <= _WIDEST, f'group {group}')
    wanted = padded(group.rows * layout.record(group))
    _check(sizes[group.file] == wanted, f'{group.file} of another size')
    whole = group.popular == '' or sizes[group.popular] % 8 == 0
    _check(whole, f'{group.popular} of another size')
  covered = sorted(c for group in layout.groups for c in group.columns)
  _check(covered == [*range(layout.columns)], 'lookups of no group, or of two')
  _check(len(layout.vocabulary) == len(layout.tables), 'another vocabulary')
  for words, table in zip(layout.vocabulary, layout.tables, strict=True):
    _check(table.group < len(layout.groups), f'table {table}')
    rows = layout.groups[table.group].rows
    _check(1 <= table.rows <= rows - table.first, f'table {table}')
    _check(words.kind in VOCABULARIES, f'vocabulary {words.kind!r}')
    _check(words.hash_rows < table.rows, f'vocabulary {words}')
    _check(words.texts in TEXTS, f'vocabulary {words}')
    _check(words.file in sizes or words.file == '', f'no {words.file!r}')
