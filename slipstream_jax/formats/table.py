"""Raw data from a user's own table: files, frames or a stream."""

from collections.abc import Iterator, Mapping, Sequence
import functools
from typing import cast, NamedTuple

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.columns.ids import packed_ids
from slipstream_jax.columns.lists import fitted, ListRules, padded, TooLong
from slipstream_jax.columns.numbers import as_floats, fills_of
from slipstream_jax.columns.read import Place, read, read_plain
from slipstream_jax.errors import UserError
from slipstream_jax.formats import text
from slipstream_jax.formats.base import (
  check_share,
  Chunk,
  END,
  Part,
  RawData,
  Splits,
  train_and_test,
)
from slipstream_jax.formats.delimited import Piece
from slipstream_jax.formats.frames import FramePart, open_source, Source
from slipstream_jax.tables import check_feature, Feature, Table

TEST_SHARE = 0.2
"""Default share of the examples to test on."""
SPLITS = ('train', 'validation', 'test')
"""Values that a column of splits may hold."""

_WHERE = 'pack'


class Roles(NamedTuple):
  """The roles of a table's columns."""

  features: Mapping[str, Feature]
  """Features, each with ids in the column of its name."""
  lookup_weights: Mapping[str, str]
  """Column of weights of each weighted feature."""
  dense: Mapping[str, float]
  """Columns, and the value that replaces missing values."""
  labels: tuple[str, ...]
  one_label: bool
  """Whether labels are [n] instead of [n, T]."""
  separator: str
  """Separates the ids of a list in a text column."""
  too_long: TooLong
  """What happens to lists longer than max_length."""


def frame_raw(
  source: Source,
  *,
  features: Mapping[str, Feature] | Sequence[str],
  dense: Sequence[str] = (),
  label: str | Sequence[str] | None = 'label',
  lookup_weights: Mapping[str, str] | None = None,
  fill: float | Mapping[str, float] = 0.0,
  split: str | None = None,
  test_share: float | None = None,
  separator: str = '|',
  too_long: str = 'error',
  delimiter: str | None = None,
) -> RawData:
  """Returns a user's table as a raw data set, read in pieces.

  Ids are integers of any width, or texts. If a feature's max_length is above 1,
  they are lists, or texts split at `separator`. 7 and '7' are the same id, so
  text files and frames give the same ids. A missing id is an id of its own, but
  a missing list is empty.

  The arguments are those of `slip.pack`. Without a `label`, examples can only
  be scored. A source with a `split` is read three times.

  Raises:
    UserError: a bad argument, or no such file. Reading raises it for missing
      columns and invalid values.
  """
  roles = _roles(
    features, dense, label, lookup_weights or {}, fill, separator, too_long
  )
  once = isinstance(source, Iterator)
  if split is not None:
    _check_split(split, test_share, once)
  share = TEST_SHARE if test_share is None else test_share
  check_share(share, _WHERE)
  columns = [*roles.features, *roles.lookup_weights.values(), *roles.dense]
  columns += [*roles.labels, *([] if split is None else [split])]
  opened = open_source(source, [*dict.fromkeys(columns)], delimiter)

  def splits(examples: int, sizes: tuple[int, ...]) -> Splits:
    if split is None:
      return train_and_test(examples, round(examples * share))
    return _split_by_parts(len(opened.parts), sizes)

  parts = tuple(
    Part(
      part.name if name is None else f'{part.name}, {name}',
      part.size,
      functools.partial(_chunks, part, roles, split, name),
    )
    for name in ((None,) if split is None else SPLITS)
    for part in opened.parts
  )
  return RawData(
    name=opened.name,
    features=roles.features,
    dense_features=len(roles.dense),
    parts=parts,
    split=splits,
    settings={
      **{k: v for k, v in roles._asdict().items() if k != 'features'},
      'split': split,
      'test_share': test_share,
      'delimiter': delimiter,
      'contents': opened.contents,
      # A preparation checks only parts that are files, and some are not.
      'changed': [text.changed(part.name) for part in opened.parts],
    },
    labels=0 if roles.one_label else len(roles.labels),
    label_dtype='float32',
    repeatable=not once,
    labelled=label is not None,
  )


def _chunks(
  part: FramePart, roles: Roles, split: str | None, name: str | None
) -> Iterator[tuple[Chunk, int]]:
  """Yields the examples of a part, or those of one split of it."""
  for piece in part.pieces():
    some = piece if split is None else _rows_of_split(split, name, piece)
    yield _chunk(roles, some), some.read


def _chunk(roles: Roles, piece: Piece) -> Chunk:
  """Converts a piece to examples. Errors name column, value and row."""
  ids, weights = zip(
    *(_lookups(roles, piece, name) for name in roles.features), strict=True
  )
  labels = np.empty((piece.frame.height, len(roles.labels)), np.float32)
  for at, name in enumerate(roles.labels):
    labels[:, at] = _numbers(piece, name, 'labels', None)
  dense = np.empty((piece.frame.height, len(roles.dense)), np.float32)
  for at, (name, fill) in enumerate(roles.dense.items()):
    dense[:, at] = _numbers(piece, name, 'dense features', fill)
  return Chunk(
    labels[:, 0] if roles.one_label else labels,
    dense,
    np.concatenate(ids, axis=1),
    np.concatenate(weights, axis=1) if roles.lookup_weights else None,
  )


def _lookups(
  roles: Roles, piece: Piece, name: str
) -> tuple[Int[np.ndarray, 'n L'], Float[np.ndarray, 'n L']]:
  """Returns the ids and the weights of a feature's lookups."""
  feature, place = roles.features[name], _place(piece, name)
  lists = read(piece.frame[name], place)
  column = roles.lookup_weights.get(name)
  if column is not None:
    of_column = read(piece.frame[column], _place(piece, column))
    lists = lists._replace(weights=of_column)
  rules = ListRules(roles.separator, roles.too_long)
  lists = fitted(lists, name, feature, rules, place)
  ids = packed_ids(lists.values, place(None))
  if lists.padding is not None:
    ids[lists.padding] = END
  length, last = feature.max_length, roles.too_long == 'last'
  ids = padded(lists._replace(values=ids), length, last, END)
  if lists.weights is None:
    return ids, (ids != END).astype(np.float32)
  return ids, padded(lists.weights, length, last, 0)


def _numbers(
  piece: Piece, name: str, what: str, fill: float | None
) -> Float[np.ndarray, ' n']:
  place = _place(piece, name)
  values = read_plain(piece.frame[name], place)
  if len(values.shape) != 1:
    raise UserError(
      f'{what} must be real numbers',
      got=f'lists, {piece.frame[name].dtype}',
      where=place(0),
      hint='give each number its own column',
    )
  return as_floats(values, what, place, fill=fill)


def _place(piece: Piece, name: str) -> Place:
  return lambda row: f'{piece.where(row or 0)}, column {name}'


def _rows_of_split(column: str, name: str | None, piece: Piece) -> Piece:
  """Selects the rows of one split."""
  values = piece.frame[column].cast(str).fill_null('')
  known = values.is_in(SPLITS).to_numpy()
  if not known.all():
    row = int(np.argmin(known))
    raise UserError(
      f'a split must be one of {", ".join(SPLITS)}',
      got=repr(values[row]),
      where=f'{piece.where(row)}, column {column}',
      hint='write one of them there',
    )
  rows = np.flatnonzero((values == name).to_numpy())
  return piece._replace(
    frame=piece.frame[rows], where=lambda row: piece.where(int(rows[row]))
  )


def _split_by_parts(files: int, parts: tuple[int, ...]) -> Splits:
  """Returns the splits of parts that hold each of `SPLITS` in turn."""
  sizes = [sum(parts[at * files : (at + 1) * files]) for at in range(3)]
  ends = np.cumsum(sizes).tolist()
  ranges = zip([0, *ends[:-1]], ends, strict=True)
  bounds = dict(zip(SPLITS, ranges, strict=True))
  return {name: at for name, at in bounds.items() if at[0] < at[1]} | {
    name: bounds[name] for name in ('train', 'test')
  }


def _roles(
  features: Mapping[str, Feature] | Sequence[str],
  dense: Sequence[str],
  label: str | Sequence[str] | None,
  lookup_weights: Mapping[str, str],
  fill: float | Mapping[str, float],
  separator: str,
  too_long: str,
) -> Roles:
  _check_names(
    [*features] if isinstance(features, Mapping) else features,
    'features must be columns of ids, at least one',
    f'{_WHERE}, features',
    "name some, such as ['user', 'item']",
  )
  if not isinstance(features, Mapping):
    features = {name: Feature(name) for name in features}
  for name, feature in features.items():
    where = f'{_WHERE}, features, {name}'
    check_feature(where, feature, {getattr(feature, 'table', ''): Table(1)})
  weighted = {name for name, f in features.items() if f.weighted}
  if weighted != set(lookup_weights):
    raise UserError(
      'each weighted feature, and no other, must have a column of weights',
      got=f'weighted {sorted(weighted)}, columns of {sorted(lookup_weights)}',
      where=f'{_WHERE}, lookup_weights',
      hint="give it, such as {'history': 'history_weight'}",
    )
  ListRules(separator, cast(TooLong, too_long)).check(_WHERE)
  dense = (dense,) if isinstance(dense, str) else dense
  hint = "name some, such as ['age'], or leave it out"
  rule = 'dense must be names of columns of numbers'
  _check_names(dense, rule, f'{_WHERE}, dense', hint, least=0)
  labels = (label,) if isinstance(label, str) else label
  if labels is not None:
    rule = 'there must be a column of labels, at least one'
    hint = "name it, such as label='click'"
    _check_names(labels, rule, f'{_WHERE}, label', hint)
  return Roles(
    dict(features),
    dict(lookup_weights),
    fills_of(dense, fill, _WHERE),
    tuple(labels or ()),
    isinstance(label, str),
    separator,
    cast(TooLong, too_long),
  )


def _check_names(
  names: object, rule: str, where: str, hint: str, least: int = 1
) -> None:
  """Raises a `UserError` unless names are `least` or more texts."""
  if (
    not isinstance(names, Sequence)
    or isinstance(names, str)
    or len(names) < least
    or not all(isinstance(name, str) for name in names)
  ):
    raise UserError(rule, got=repr(names), where=where, hint=hint)


def _check_split(split: str, test_share: float | None, once: bool) -> None:
  if test_share is not None:
    raise UserError(
      'only one of split and test_share may be set',
      got=f'split {split!r} and test_share {test_share}',
      where=f'{_WHERE}, split',
      hint='leave one of them out',
    )
  if once:
    raise UserError(
      'a source with a column of splits is read three times',
      got='an iterator, which can be read once',
      where=f'{_WHERE}, split',
      hint='give a function that makes it, or test_share',
    )
