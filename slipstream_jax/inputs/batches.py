"""`slip.batches`: examples in any form that people have them, by name."""

from collections.abc import Iterable, Mapping, Sequence
import os
from typing import Any, cast

from slipstream_jax.columns.lists import ListRules, TooLong
from slipstream_jax.columns.numbers import fills_of
from slipstream_jax.columns.read import kept, names_of
from slipstream_jax.data.numbered import batches_of, check_batch_size
from slipstream_jax.errors import check_by_name, check_seed, UserError
from slipstream_jax.inputs.arrays import (
  ArrayExamples,
  BatchSettings,
  PackedExamples,
  WHERE,
)
from slipstream_jax.inputs.bind import IdRules
from slipstream_jax.inputs.fields import (
  check_known,
  Fields,
  NamedColumns,
)
from slipstream_jax.inputs.stream import StreamExamples


def batches(
  data: Any = None,
  features: Any = None,
  label: Any = None,
  *,
  batch_size: int | None = None,
  seed: int | None = None,
  epochs: int | None = None,
  dense: Any = None,
  weights: Any = None,
  lookup_weights: Mapping[str, Any] | None = None,
  vocabularies: Mapping[str, Any] | None = None,
  fill: float | Mapping[str, float] = 0.0,
  separator: str = '|',
  too_long: str = 'error',
  split: str = 'train',
) -> ArrayExamples | StreamExamples | PackedExamples:
  """Returns examples by name, for a trainer: `trainer.train(batches(...))`.

  There are four forms, which differ in the first argument:

    batches(dense, {'user': users, 'item': items}, clicks, batch_size=1000)
    batches(frame, ['user', 'item'], 'click', dense=['age'], batch_size=1000)
    batches(iterator, ['user', 'item'], 'click', dense='dense')
    batches('folder', batch_size=1000)

  Arrays, frames of polars, pandas or arrow, and dicts of columns are in memory.
  This call copies the columns that it uses, so that a later change of an array
  changes no batch. It copies all columns of a frame if no features are named.
  Arrays that are read-only, and no views of others, are not copied. Ids are
  checked once, when a trainer first gets them. Batches of an iterator
  (a grain or TFDS pipeline, a generator, a list, or a function that makes one)
  are dicts of columns, or frames. Each is read when it comes.

  A folder was written by `slip.pack`. It is read as needed.

  A trainer learns the names of dense features and of heads from its first
  source. It finds them by name in all later ones, in any order, and refuses
  other names. See docs/own_data.md.

  Ids are local to their feature's table: integers from 0 to its size - 1. A
  feature's column is an array [n] or [n, L], where -1 pads lists that end
  earlier, `(values, row_splits)` or `(values, row_splits, weights)`, a list
  column of polars or arrow, or a list of lists. A missing list is empty. An id
  that the table has no row for is an error, or its last row with
  `Table(..., unknown='row')`.

  Args:
    data: dense features [n, I] or [n], by name (then [n] or [n, w] of any
      number), or None, if `features` hold the ids. Or a frame, a dict of
      columns, or an iterator of such.
    features: ids by feature, in a dict. Or the names of the columns of features
      (None: those of the trainer's).
    label: 1 for a click, 0 for none, its chance, or any number that the loss
      takes: [n], or [n, T] of T heads, or a dict of heads by name. Or the name
      of the column (None: 'label', if there is one), or a list of them. Without
      labels, examples can only be predicted.
    batch_size: B. An iterator has its own: batches of B examples, or fewer,
      which are padded.
    seed: seed of the order of each epoch, at least 0. None keeps the order.
    epochs: passes over the examples. None: without end. With a seed and without
      end, each epoch drops the examples that do not fill a batch, others each
      time. Otherwise that batch is padded with examples of weight 0.
    dense: dense features where they do not come first: as `data`, or the
      column (None: 'dense', if there is one), or a list of columns.
    weights: weight of each example in the loss, at least 0: [n], or a column.
    lookup_weights: weights of the lookups of features that are `weighted`, by
      feature, shaped as its ids. Or their columns.
    vocabularies: vocabularies of raw ids, by feature or by table, or objects
      with a method `rows`. A `GrowingVocabulary` learns as batches are read.
    fill: replaces missing values (null, NaN, '') of the columns that `dense`
      names, for all or by name. Other dense features must have no missing ones.
    separator: separates the ids of a list in a text, for features with a
      `max_length` above 1.
    too_long: what happens to a list longer than the feature's `max_length`:
      'error' refuses it, 'first' and 'last' use its first or last ids.
    split: which examples of a folder: 'train', 'test', or 'validation' if it
      has them.

  Returns:
    A source for a trainer. Its `bind(tables)` returns batches in global rows.

  Raises:
    UserError: columns have unequal lengths, there are no examples, a value is
      invalid, or an argument is out of range or does not fit the form. Ids are
      checked when the tables are known.
  """
  lists = ListRules(separator, cast(TooLong, too_long))
  lists.check(WHERE)
  words = {} if vocabularies is None else vocabularies
  bags = {} if lookup_weights is None else lookup_weights
  check_by_name(words, f'{WHERE}, vocabularies', 'give them by feature')
  check_by_name(bags, f'{WHERE}, lookup_weights', 'give them by feature')
  rules = IdRules(dict(words), lists)
  if isinstance(features, Mapping):
    given = _by_arrays(data, features, label, dense, weights, bags)
    return ArrayExamples(given, rules, _cut(batch_size, seed, epochs))
  if isinstance(data, str | os.PathLike):
    others = features, label, dense, weights, lookup_weights, vocabularies
    if any(argument is not None for argument in others):
      raise UserError(
        'a packed folder knows which of its columns is what',
        got='names or arrays beside it',
        where=WHERE,
        hint='give the folder alone, with batch_size, seed, epochs, split; read'
        ' a file with polars or pandas first',
      )
    return PackedExamples(data, split, _cut(batch_size, seed, epochs))
  fields = Fields(
    _names(features, 'features'),
    dense if isinstance(dense, str) else _names(dense, 'dense'),
    label if isinstance(label, str) else _names(label, 'label'),
    _column(weights, 'weights'),
    dict(bags),
    fills_of(_names(dense, 'dense') or (), fill, WHERE),
  )
  columns = names_of(data)
  if columns is not None:
    cut = _cut(batch_size, seed, epochs)
    if fields.features is None:  # any column may turn out to be one
      data = {name: kept(data[name]) for name in columns}
    return ArrayExamples(fields.sort(data, WHERE), rules, cut)
  _check_streamed(data, seed, epochs)
  return StreamExamples(data, fields, rules, batch_size)


def _by_arrays(
  data: Any,
  features: Mapping[str, Any],
  label: Any,
  dense: Any,
  weights: Any,
  bags: Mapping[str, Any],
) -> NamedColumns:
  if data is not None and dense is not None:
    raise UserError(
      'dense features must be given once',
      got='some before the features, and dense',
      where=f'{WHERE}, dense',
      hint='leave one of them out',
    )
  if not features:
    raise UserError(
      'there must be a feature',
      got='none',
      where=f'{WHERE}, features',
      hint="give ids by name, such as {'user': users}",
    )
  if any(isinstance(x, str) for x in (data, label, dense, weights)):
    raise UserError(
      'names of columns go with a frame, arrays with arrays',
      got='ids by feature, and a name in place of an array',
      where=WHERE,
      hint="give arrays, or batches(frame, ['user', ...], 'click', ...)",
    )
  check_known([*bags], [*features], f'{WHERE}, lookup_weights')
  first = dense if data is None else data
  named, ids = isinstance(first, Mapping), dict(features)
  return NamedColumns(first, named, ids, True, label, weights, dict(bags))


def _cut(
  batch_size: int | None, seed: int | None, epochs: int | None
) -> BatchSettings:
  check_batch_size(batch_size, f'{WHERE}, batch_size')
  if seed is not None:
    check_seed(seed, f'{WHERE}, seed')
  batches_of(epochs, 1, WHERE)  # checks them
  # Without a seed the same examples would be left out in every epoch.
  pad = epochs is not None or seed is None
  return BatchSettings(cast(int, batch_size), seed, epochs, pad)


def _check_streamed(data: Any, seed: int | None, epochs: int | None) -> None:
  iterates = callable(data) or isinstance(data, Iterable)
  if hasattr(data, '__array__') or not iterates:
    raise UserError(
      'ids must come by feature',
      got=f'a {type(data).__name__}, and no dict of ids',
      where=f'{WHERE}, features',
      hint="give them by name, such as {'user': users, 'item': items}",
    )
  for name, value in ('seed', seed), ('epochs', epochs):
    if value is not None:
      raise UserError(
        'the batches of an iterator come in its own order, until it ends',
        got=f'{name}={value!r}',
        where=f'{WHERE}, {name}',
        hint='shuffle and repeat where the batches are made',
      )


def _names(names: Any, what: str) -> tuple[str, ...] | None:
  if names is None:
    return None
  names = (names,) if isinstance(names, str) else names
  if isinstance(names, Sequence) and all(isinstance(n, str) for n in names):
    return tuple(names)
  raise UserError(
    f'{what} of a frame or an iterator must be names of its columns',
    got=type(names).__name__,
    where=f'{WHERE}, {what}',
    hint="give names; arrays go as batches(dense or None, {'user': users},"
    ' clicks)',
  )


def _column(name: Any, what: str) -> str | None:
  if name is not None and not isinstance(name, str):
    raise UserError(
      f'{what} of a frame or an iterator must be the name of one column',
      got=type(name).__name__,
      where=f'{WHERE}, {what}',
      hint='give one name',
    )
  return name
