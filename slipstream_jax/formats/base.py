"""Interface of raw data sets: fields of the examples, before ids have rows.

Each format is a function that returns a `RawData`. Packing and reading into
memory are the same for all of them.
"""

from collections.abc import Callable, Iterator, Mapping
import types
from typing import Any, Literal, NamedTuple

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.columns.ids import Ids
from slipstream_jax.columns.ids import MISSING as MISSING
from slipstream_jax.errors import check_whole, UserError
from slipstream_jax.tables import Feature


class Chunk(NamedTuple):
  """Fields of n consecutive examples."""

  labels: Float[np.ndarray, ' n'] | Float[np.ndarray, 'n T']
  """1.0 for a click, 0.0 for none, or a probability; f32. [n, T] for T heads,
  [n, 0] if examples have no labels."""
  dense: Float[np.ndarray, 'n I']
  """Dense features as the model gets them, f32."""
  ids: Int[np.ndarray, 'n K']
  """Raw ids of the features, i64, side by side, `max_length` of each. `MISSING`
  for a missing id, `END` after the end of a list."""
  lookup_weights: Float[np.ndarray, 'n K'] | None = None
  """Weight of each lookup, f32, finite. None if no feature is weighted."""


END = -2
"""Pads a list of ids after its end. It makes no lookup."""


class Part(NamedTuple):
  """Consecutive chunks that can be read separately: a file, or a day."""

  name: str
  """Unique name, shown in progress and errors."""
  size: int
  """Size of its files in bytes, for progress; 0 if unknown."""
  chunks: Callable[[], Iterator[tuple[Chunk, int]]]
  """Reads the part from its start. Yields the same chunks in the same order
  each time, each with the bytes of the files read so far. Raises UserError if
  the data cannot be read."""


Splits = dict[str, tuple[int, int]]
"""Range [first, end) of each split's examples: 'train', 'test' and, in some
formats, 'validation'."""
Split = Callable[[int, tuple[int, ...]], Splits]
"""Maps the number of examples in total and in each part to the splits."""


class BadLines:
  """A budget of bad lines that may be skipped, 0 by default."""

  def __init__(self, allowed: int = 0, where: str = 'BadLines'):
    """Creates a budget of `allowed` lines, from 0 on, or raises a `UserError`.

    `where` names the function whose argument `bad_lines` this is.
    """
    check_whole(allowed, 0, f'{where}, bad_lines', 'set it to 0 to skip none')
    self._allowed, self._before = allowed, 0
    # Per file, because a file may be read twice and then counts only once.
    self._of: dict[str, int] = {}

  @property
  def count(self) -> int:
    """Lines skipped so far. A file that is read again counts once."""
    return self._before + sum(self._of.values())

  def restore(self, count: int) -> None:
    """Sets the number of lines skipped in files that are not read again."""
    self._before, self._of = count, {}

  def start(self, path: str) -> None:
    """Resets the count of a file, which is read from its start."""
    self._of[path] = 0

  def add(self, path: str, error: UserError) -> None:
    """Counts a bad line of a file. Raises `error` if none may be skipped."""
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


class RawData(NamedTuple):
  """A raw data set in a public format."""

  name: str
  """Shown in every summary."""
  features: Mapping[str, Feature]
  """Features by name, in the order of the columns of ids. Several may share a
  table."""
  dense_features: int
  """I."""
  parts: tuple[Part, ...]
  """In the order of their examples."""
  split: Split
  labels: int = 0
  """T for labels [n, T]; 0 for labels [n]."""
  label_dtype: Literal['uint8', 'float32'] = 'uint8'
  """Dtype of packed labels: u8 if all are 0 or 1, f32 for others."""
  bad: BadLines | None = None
  """Counts the bad lines that were skipped. None if none may be."""
  settings: Mapping[str, Any] = types.MappingProxyType({})
  """All other settings that affect the examples, as JSON. A preparation cannot
  be resumed with other settings."""
  format: str = ''
  """Name of a format of the library."""
  counted: Callable[[], tuple[Ids, ...]] | None = None
  """Returns a column of ids for each table, none missing. In memory, rows are
  numbered by their frequency. None counts the ids of the training examples,
  which is wrong if sequences repeat an event in many examples."""
  repeatable: bool = True
  """Whether parts can be read again, as a resumed preparation must."""
  labelled: bool = True
  """Whether examples have labels. Examples without labels can only be
  scored."""

  @property
  def tables(self) -> tuple[str, ...]:
    """Names of the tables, in the order in which features first use them."""
    return tuple(dict.fromkeys(f.table for f in self.features.values()))

  @property
  def columns(self) -> dict[str, slice]:
    """Columns of each feature in the ids [n, K], by name."""
    ends = np.cumsum([f.max_length for f in self.features.values()]).tolist()
    spans = map(slice, [0, *ends[:-1]], ends)
    return dict(zip(self.features, spans, strict=True))

  def of_table(self, table: str) -> list[str]:
    """Returns the names of the features that use a table."""
    return [n for n, f in self.features.items() if f.table == table]


def check_chunk(raw: RawData, chunk: Chunk, part: str) -> None:
  """Checks the form of a chunk, which a user's own format may get wrong.

  Raises:
    UserError: a field has another shape or dtype than the raw data specify, or
      a label cannot be packed without loss.
  """
  examples = len(chunk.labels)
  heads = [raw.labels] if raw.labels else []
  columns = sum(feature.max_length for feature in raw.features.values())
  wanted = {
    'labels': f'float32 {[examples, *(heads if raw.labelled else [0])]}',
    'dense': f'float32 {[examples, raw.dense_features]}',
    'ids': f'int64 {[examples, columns]}',
  }
  weighted = any(feature.weighted for feature in raw.features.values())
  if weighted or chunk.lookup_weights is not None:
    wanted['lookup_weights'] = f'float32 {[examples, columns]}'
  for name, form in wanted.items():
    field = getattr(chunk, name)
    got = 'none' if field is None else f'{field.dtype} {list(field.shape)}'
    if got != form:
      raise UserError(
        f'{name} of a chunk of {examples} labels must be {form}',
        got=got,
        where=f'{part}, Chunk.{name}',
        hint='see what RawData says of features, labels and dense features',
      )
  labels = chunk.labels
  good = (labels == 0) | (labels == 1)
  if raw.label_dtype == 'float32':
    good = np.isfinite(labels)
  if not good.all():
    raise UserError(
      f'labels packed as {raw.label_dtype} must be'
      f' {"finite" if raw.label_dtype == "float32" else "0 or 1"}',
      got=labels[~good][0],
      where=f'{part}, Chunk.labels',
      hint="set label_dtype='float32' for other numbers than 0 and 1",
    )


def check_labelled(raw: RawData) -> None:
  """Raises a `UserError` if raw data have no labels to train on."""
  if not raw.labelled:
    raise UserError(
      'a data set to train on must have labels',
      got='none',
      where=raw.name,
      hint='name the column that holds them',
    )


def split_at_end(test_share: float, where: str) -> Split:
  """Returns a split that tests on the last share of all examples."""
  check_share(test_share, where)
  return lambda examples, parts: train_and_test(
    examples, round(examples * test_share)
  )


def train_and_test(examples: int, held_out: int) -> Splits:
  """Returns splits that test on the last `held_out` examples."""
  first = examples - held_out
  return {'train': (0, first), 'test': (first, examples)}


def checked_splits(raw: RawData, parts: tuple[int, ...]) -> Splits:
  """Returns the splits of raw data, given the examples of each part.

  Raises:
    UserError: there are no examples to train on, or none to test on.
  """
  splits = raw.split(sum(parts), parts)
  sizes = {name: end - first for name, (first, end) in splits.items()}
  if min(sizes['train'], sizes['test']) < 1:
    raise UserError(
      'there must be examples to train on and examples to test on',
      got=', '.join(f'{size} to {name}' for name, size in sizes.items()),
      where=', '.join(part.name for part in raw.parts),
      hint='give more examples, or another split',
    )
  return splits


def check_share(test_share: float, where: str) -> None:
  """Raises a `UserError` unless a share is between 0 and 1, both excluded."""
  if not 0 < test_share < 1:
    raise UserError(
      'test_share must be between 0 and 1, both excluded',
      got=test_share,
      where=f'{where}, test_share',
      hint='give the share of the examples to hold out',
    )
