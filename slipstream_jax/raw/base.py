"""What a raw data set is: fields of its examples, before ids have rows.

Each public format is one file that makes a `RawData`; what turns it into a
packed data set (`packed`) is the same for all of them.
"""

from collections.abc import Callable, Iterator, Mapping
import math
import types
from typing import Any, Literal, NamedTuple

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.data.vocabulary import Ids, MISSING
from slipstream_jax.errors import is_whole, UserError
from slipstream_jax.tables import Feature

__all__ = [
  'END',
  'MISSING',
  'BadLines',
  'Chunk',
  'Part',
  'RawData',
  'Split',
  'Splits',
  'check_chunk',
  'check_labelled',
  'check_share',
  'split_by',
  'train_and_test',
]


class Chunk(NamedTuple):
  """Fields of n consecutive examples."""

  labels: Float[np.ndarray, ' n'] | Float[np.ndarray, 'n T']
  """1.0 for a click, else 0.0, or its chance; f32. [n, T] of T heads; [n, 0]
  where examples are not labelled."""
  dense: Float[np.ndarray, 'n I']
  """Dense features as a model gets them, f32."""
  ids: Int[np.ndarray, 'n F'] | Int[np.ndarray, 'n F L']
  """Raw ids of the features, i64, side by side, `max_length` of each: [n, K],
  or [n, F, L] where all are as long. `MISSING` where there is none, `END` where
  a list has ended."""
  lookup_weights: Float[np.ndarray, 'n K'] | None = None
  """Weight of each lookup, f32, finite; None where no feature is weighted."""

  @property
  def flat_ids(self) -> Int[np.ndarray, 'n K']:
    """The ids side by side."""
    # Not -1, which no one can find where there are no examples.
    examples, *sizes = self.ids.shape
    return self.ids.reshape(examples, math.prod(sizes))


END = -2
"""Fills up a list that has ended; stands for no lookup."""


class Part(NamedTuple):
  """Consecutive chunks that can be read by themselves: a file, or a day."""

  name: str
  """Said in progress and errors; unique."""
  size: int
  """Of its files in bytes, for progress; 0 where unknown."""
  chunks: Callable[[], Iterator[tuple[Chunk, int]]]
  """Reads it anew: chunks in order, the same each time, each with the bytes
  of the files read so far. Raises UserError for what cannot be read."""


Splits = dict[str, tuple[int, int]]
"""The range [first, last + 1) of each split's examples: 'train', 'test' and,
where it is usual, 'validation'."""
Split = Callable[[int, tuple[int, ...]], Splits]
"""Examples in all and those of each part, to the splits."""

# Read-only, as all raw data that have none share it.
_NO_SETTINGS: Mapping[str, Any] = types.MappingProxyType({})


class RawData(NamedTuple):
  """A raw data set in a public format."""

  name: str
  """Said in every summary."""
  features: Mapping[str, Feature]
  """By name, in the order of the columns of ids; several may share a table."""
  dense_features: int
  """I."""
  parts: tuple[Part, ...]
  """In the order of their examples."""
  split: Split
  labels: int = 0
  """T of labels [n, T]; 0 where they are [n]."""
  label_dtype: Literal['uint8', 'float32'] = 'uint8'
  """How labels are packed: u8 if all are 0 or 1, f32 if they may lie between
  the two."""
  skipped: Callable[[], int] = lambda: 0
  """Bad lines skipped so far, of those that the user allowed."""
  restore: Callable[[int], None] = lambda skipped: None
  """Continues that count: so many were skipped before, in parts that are not
  read again."""
  settings: Mapping[str, Any] = _NO_SETTINGS
  """What else decides which examples there are and how they look, JSON: a
  preparation is not continued with other ones."""
  format: str = ''
  """Name of the format; '' for one that the library does not know."""
  counted: Callable[[], tuple[Ids, ...]] | None = None
  """A column of ids per table, none missing, by which rows are numbered in
  memory. None counts those of the examples to train on, which is not wanted
  where sequences repeat an event in many examples."""
  repeatable: bool = True
  """Whether parts can be read again, as a continued preparation must."""
  labelled: bool = True
  """Whether examples have labels. Those without can be scored alone."""

  @property
  def tables(self) -> tuple[str, ...]:
    """Names of the tables, in the order of the features that first use them."""
    return tuple(dict.fromkeys(f.table for f in self.features.values()))

  @property
  def columns(self) -> dict[str, slice]:
    """Columns of the ids [n, K] of each feature, by name."""
    ends = np.cumsum([f.max_length for f in self.features.values()]).tolist()
    spans = map(slice, [0, *ends[:-1]], ends)
    return dict(zip(self.features, spans, strict=True))

  def of_table(self, table: str) -> list[str]:
    """Names of the features of that table."""
    return [n for n, f in self.features.items() if f.table == table]


def check_chunk(raw: RawData, chunk: Chunk, part: str) -> None:
  """Looks at the form of a chunk, which a format of one's own may have wrong.

  Raises:
    UserError: a field has another shape or type than the raw data say, or a
      label cannot be packed without a loss.
  """
  examples = len(chunk.labels)
  heads = [raw.labels] if raw.labels else []
  columns = sum(feature.max_length for feature in raw.features.values())
  weighted = any(feature.weighted for feature in raw.features.values())
  wanted = {
    'labels': (np.float32, (examples, *(heads if raw.labelled else [0]))),
    'dense': (np.float32, (examples, raw.dense_features)),
    'ids': (np.int64, (examples, columns)),
    'lookup_weights': (np.float32, (examples, columns)),
  }
  for name, (dtype, shape) in wanted.items():
    field = chunk.flat_ids if name == 'ids' else getattr(chunk, name)
    if name == 'lookup_weights' and field is None and not weighted:
      continue
    got = 'none' if field is None else f'{field.dtype} {list(field.shape)}'
    if field is None or field.dtype != dtype or field.shape != shape:
      raise UserError(
        f'{name} of a chunk of {examples} labels must be'
        f' {np.dtype(dtype)} {list(shape)}',
        got=got,
        where=f'{part}, Chunk.{name}',
        hint='see what RawData says of features, labels and dense features',
      )
  labels = chunk.labels
  good = (labels == 0) | (labels == 1)
  if raw.label_dtype == 'float32':
    good = (labels >= 0) & (labels <= 1)
  if not good.all():
    raise UserError(
      f'labels packed as {raw.label_dtype} must be'
      f' {"in [0, 1]" if raw.label_dtype == "float32" else "0 or 1"}',
      got=labels[~good][0],
      where=f'{part}, Chunk.labels',
      hint="set label_dtype='float32' for labels between 0 and 1",
    )


def check_labelled(raw: RawData) -> None:
  """Looks whether raw data can be trained on.

  Raises:
    UserError: they have no labels.
  """
  if not raw.labelled:
    raise UserError(
      'a data set to train on must have labels',
      got='none',
      where=raw.name,
      hint='name the column that holds them',
    )


class BadLines:
  """A budget of bad lines: none is skipped unless the user allows it."""

  def __init__(self, allowed: int = 0, where: str = 'BadLines'):
    """No line skipped yet.

    Args:
      allowed: lines that may be skipped; 0 makes every bad line an error.
      where: function that `allowed` was given to as `bad_lines`.

    Raises:
      UserError: a negative number.
    """
    if not is_whole(allowed, 0):
      raise UserError(
        'bad_lines must be at least 0',
        got=allowed,
        where=f'{where}, bad_lines',
        hint='allow none or some',
      )
    self._allowed, self._before = allowed, 0
    # By file, as one may be read twice: its lines then count anew.
    self._of: dict[str, int] = {}

  @property
  def count(self) -> int:
    """Lines skipped so far; of a file that is read again, of the last time."""
    return self._before + sum(self._of.values())

  def restore(self, count: int) -> None:
    """Continues a count: so many were skipped in files not read again."""
    self._before, self._of = count, {}

  def start(self, path: str) -> None:
    """A file is read from its start."""
    self._of[path] = 0

  def add(self, path: str, error: UserError) -> None:
    """One more line of a file is bad, for the reason that `error` gives.

    Raises:
      UserError: `error`, where no more lines may be skipped.
    """
    before = self.count
    if before < self._allowed:
      self._of[path] = self._of.get(path, 0) + 1
      return
    after = f', after {before} bad lines' if before else ''
    raise UserError(
      error.rule,
      got=error.got,
      where=f'{error.where}{after}',
      hint=f'{error.hint}, or raise bad_lines to skip some',
    ) from error


def split_by(test_share: float | None, published: Split, where: str) -> Split:
  """How a format splits its examples.

  Args:
    test_share: share of the examples to test on, from the end; None is as
      published.
    published: the usual split.
    where: function that `test_share` was given to.

  Raises:
    UserError: a share that is not between 0 and 1.
  """
  if test_share is None:
    return published
  check_share(test_share, where)

  def split(examples: int, parts: tuple[int, ...]) -> Splits:
    del parts  # a share is of all examples, whichever file they are in
    return train_and_test(examples, round(examples * test_share))

  return split


def train_and_test(examples: int, held_out: int) -> Splits:
  """Splits that test on the last `held_out` examples, and train before."""
  first = examples - held_out
  return {'train': (0, first), 'test': (first, examples)}


def check_share(test_share: float, where: str) -> None:
  """Looks at a share of the examples.

  Raises:
    UserError: it is not between 0 and 1.
  """
  if not 0 < test_share < 1:
    raise UserError(
      'test_share must be between 0 and 1, both excluded',
      got=test_share,
      where=f'{where}, test_share',
      hint='give the share of the examples to hold out',
    )
