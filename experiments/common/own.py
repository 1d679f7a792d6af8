"""Calls functions that a config names, and makes data sets of arrays."""

from collections.abc import Mapping
import importlib
import inspect
from typing import Any

import numpy as np

from slipstream_jax.data.numbered import ColumnBatches, Columns
from slipstream_jax.data.source import Dataset
from slipstream_jax.errors import UserError
from slipstream_jax.tables import tables_of
from slipstream_jax.vocabulary.counted import Vocabulary


def is_own(name: str | None) -> bool:
  """Whether a name is 'module:function'."""
  return name is not None and ':' in name


def called(name: str, argument: Any, where: str) -> Any:
  """Calls a function with one argument. Its own errors are raised unchanged.

  Args:
    name: 'my_package.my_module:function'.
    argument: its only argument.
    where: config key of the name.

  Raises:
    UserError: there is no such function, or it takes other arguments.
  """
  module_name, _, attribute = name.partition(':')
  try:
    module = importlib.import_module(module_name)
  except (ImportError, SyntaxError, ValueError, TypeError) as error:
    raise UserError(
      f'{where} must name a module that can be imported',
      got=f'{name!r}: {error}',
      where=where,
      hint='write my_package.my_module:function; modules are looked for in the '
      'current folder, beside the config file and on PYTHONPATH',
    ) from error
  function = getattr(module, attribute, None)
  if not callable(function):
    own = [
      n
      for n, value in vars(module).items()
      if callable(value) and getattr(value, '__module__', '') == module_name
    ]
    raise UserError(
      f'{where} must name a function of {module_name}',
      got=repr(attribute),
      where=where,
      hint=f'it has {", ".join(own) or "none"}',
    )
  try:
    inspect.signature(function).bind(argument)
  except TypeError as error:
    raise UserError(
      f'the function that {where} names must take one argument',
      got=f'{name!r}: {error}',
      where=where,
      hint='a model takes config.model, a data set the config',
    ) from error
  except ValueError:  # a builtin has no signature
    pass
  return function(argument)


def dataset(
  name: str,
  ids: Mapping[str, Any],
  labels: Any,
  dense: Any = None,
  *,
  test_share: float = 0.2,
  min_count: int = 1,
  shuffle_seed: int | None = None,
) -> Dataset:
  """Returns a data set of examples in the order of time, the last to test on.

  Args:
    name: of the data set, for reports.
    ids: maps a feature to raw ids [n], integers or text. Each gets a table.
    labels: [n], in [0, 1].
    dense: [n, I] or [n]. None is one feature that is always 0.
    test_share: share of the examples to test on, from the end.
    min_count: ids with fewer training examples share row 0.
    shuffle_seed: seed of the training order, which differs by epoch. None keeps
      the given order.

  Raises:
    UserError: columns differ in length, ids are invalid, or no examples are
      left to train or to test on.
  """
  labels = np.asarray(labels, np.float32)
  count = len(labels)
  trained = count - round(test_share * count)
  if not 0 < trained < count:
    raise UserError(
      'a data set needs examples to train and to test on',
      got=f'{trained} and {count - trained}',
      where='dataset, test_share',
      hint='give a share between 0 and 1, and more examples',
    )
  if dense is None:
    dense = np.zeros(count)
  lengths = {'dense': len(dense)} | {key: len(ids[key]) for key in ids}
  for key, length in lengths.items():
    if length != count:
      raise UserError(
        f'there must be as many entries of {key!r} as labels, {count}',
        got=length,
        where='dataset, ids' if key in ids else 'dataset, dense',
        hint='give one entry of each per example',
      )
  dense = np.asarray(dense, np.float32).reshape(count, -1)
  rows, sizes = {}, {}
  for feature, column in ids.items():
    words = Vocabulary.fit(column[:trained], min_count=min_count)
    rows[feature], sizes[feature] = words.rows(column), words.size
  tables = tables_of(sizes, dim=1)  # the config says how wide they are
  columns = Columns(
    dense, tables.lookups(np.stack(list(rows.values()), axis=1)), labels
  )
  train = columns.take(slice(0, trained))
  test = columns.take(slice(trained, None))
  return Dataset(
    name,
    sizes,
    tables.features,
    dense.shape[1],
    lambda size: ColumnBatches(train, size, shuffle_seed=shuffle_seed),
    lambda size: ColumnBatches(test, size, epochs=1, pad_remainder=True),
    train_examples=trained,
    counts=lambda: np.bincount(
      train.lookups.ravel(), minlength=tables.num_rows
    ),
  )
