"""What an export is: a folder of plain files, and a manifest of them.

    export.json      this layout, with a checksum of every file and of itself
    rows_0.bin ...   of each group of tables, one record per row, end to end
    dense.bin        the model's parameters, end to end
    score_1024.jax   the forward pass for 1024 examples, from `jax.export`
    ids_0.bin ...    of each table its vocabulary
    popular_0.bin ...  of each group its most popular rows, where they are known

A record is a row in float32 or float16, or in int8: its scale and its offset,
f32 each, and then D codes, of which code c stands for offset + scale * c. All
numbers are little-endian. Nothing in it is a program of Python's.
"""

from typing import NamedTuple

VERSION = 1
MANIFEST = 'export.json'
CODECS = ('float32', 'float16', 'int8')
VOCABULARIES = ('none', 'hashed', 'ranked', 'counted')
ALIGNMENT = 4096
"""Bytes of which the size of a file of rows is a multiple: so that its last
record can be read past the page cache, as all others."""


class File(NamedTuple):
  """A file of the folder."""

  name: str
  bytes: int
  crc32: str
  """Of all its bytes, 8 hex digits."""


class Feature(NamedTuple):
  """Columns of the lookups that look one table up."""

  name: str
  table: int
  """Number of its table."""
  first: int
  """Its first column of the K."""
  length: int
  """L, columns that it has; -1 fills up what is shorter."""


class Table(NamedTuple):
  """One table, a stretch of its group's rows."""

  name: str
  rows: int
  group: int
  first: int
  """Row of the group that its row 0 is."""


class Group(NamedTuple):
  """Tables of one dim, whose rows are one file."""

  rows: int
  dim: int
  file: str
  columns: tuple[int, ...]
  """Columns of the lookups that are theirs, rising."""
  popular: str = ''
  """File of rows that are looked up most, i64, most popular first, for a cache
  to begin with; '' where nobody counted."""


class Program(NamedTuple):
  """The forward pass of one batch size."""

  examples: int
  file: str


class Leaf(NamedTuple):
  """An array of the model."""

  dtype: str
  shape: tuple[int, ...]


class Vocabulary(NamedTuple):
  """Which row of a table stands for a raw id."""

  kind: str
  """Of `VOCABULARIES`: 'none': ids are rows; 'hashed': a row is a hash;
  'ranked': the file says which row a hash has; 'counted': it has the known ids,
  rising, and then their rows."""
  entries: int
  """Rows of 'hashed', buckets of 'ranked', ids of 'counted'."""
  file: str
  """'' where there is none."""


class Layout(NamedTuple):
  """An export."""

  name: str
  """What the model was trained on."""
  step: int
  codec: str
  """Of all rows, one of `CODECS`."""
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
  """Of each table."""
  files: tuple[File, ...]

  @property
  def columns(self) -> int:
    """K, lookups of one example."""
    return sum(feature.length for feature in self.features)

  def record(self, group: Group) -> int:
    """Bytes of a row of the group in its file."""
    return record_bytes(self.codec, group.dim)


def record_bytes(codec: str, dim: int) -> int:
  """Bytes of a row of `dim` elements."""
  return {'float32': 4 * dim, 'float16': 2 * dim, 'int8': 8 + dim}[codec]


def padded(nbytes: int) -> int:
  """The same as a multiple of `ALIGNMENT`."""
  return -(-nbytes // ALIGNMENT) * ALIGNMENT
