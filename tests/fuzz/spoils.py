"""What users get wrong: one thing of a case, and what must come of it."""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import numpy as np
import optax

import slipstream_jax as slip
from tests.fuzz.worlds import Column, Pair, recipe


class Spoil(NamedTuple):
  """Changes one value on its way into the library."""

  at: str
  """Which: see `running.Run`."""
  change: Callable[[Any, Any], Any]
  """Of the value, and of the Run."""
  says: str | None = None
  """A pattern of the one UserError that must come; None: it may come, or the
  case trains to the numbers of the values as they are meant."""


def _put(value, dtype=None):
  """Sets the last element of the first example that there is."""

  def change(array, run):
    array = array.astype(dtype or array.dtype)
    if array.size:
      array[(0, *(-1,) * (array.ndim - 1))] = value
    return array

  return change


def _cast(dtype):
  return lambda array, run: array.astype(dtype)


def _always(value):
  return lambda _, run: value


def _other_table(lookups, run):
  """A row of the last table as the first feature's."""
  lookups = lookups.copy()
  lookups.reshape(len(lookups), -1)[0, 0] = run.tables.num_rows - 1
  if len(run.tables.tables) == 1:
    lookups[0] = run.tables.num_rows
  return lookups


def _wider(dense, run):
  return np.pad(dense, [(0, 0), (0, 1)])


def _tables(**changes):
  def change(tables, run):
    first = tables.tables['t0']._replace(**changes)
    return slip.TableSet({**tables.tables, 't0': first}, tables.features)

  return change


def _features(**changes):
  def change(tables, run):
    first = tables.features['t0']._replace(**changes)
    return slip.TableSet(tables.tables, {**tables.features, 't0': first})

  return change


def _settings(**changes):
  return lambda settings, run: settings._replace(**changes)


def _phases(**changes):
  return lambda settings, run: settings._replace(
    phases=settings.phases._replace(**changes)
  )


def _mean_loss(logits, labels):
  return optax.sigmoid_binary_cross_entropy(logits, labels).mean()


def _column_loss(logits, labels):
  return optax.sigmoid_binary_cross_entropy(logits, labels)[:, None]


def _recipe(**changes):
  return lambda made, run: made._replace(**changes)


def _empty(batch, run):
  return batch.map(lambda column: column[:0])


IDS = 'id|lookup'
SPOILS = {
  'an id too large': Spoil('ids', _put(10**4, 'int64'), IDS),
  'an id far too large': Spoil('ids', _put(2**63 + 5, 'uint64'), IDS),
  'an id below -1': Spoil('ids', _put(-2, 'int64'), IDS),
  'an id that is NaN': Spoil('ids', _put(np.nan, 'float64'), IDS),
  'ids of whole floats': Spoil('ids', _cast('float64')),
  'ids of bools': Spoil('ids', lambda ids, run: (ids > 0) & (ids < 0)),
  'ids of text': Spoil('ids', _cast('str'), IDS),
  'ids in a list': Spoil('ids', lambda ids, run: ids.tolist()),
  'ids of one axis': Spoil('ids', lambda ids, run: ids.ravel(), IDS),
  'ids of a table too few': Spoil('ids', lambda ids, run: ids[:, 1:], IDS),
  'a lookup too large': Spoil('lookups', _put(10**4, 'int64'), IDS),
  'a lookup below -1': Spoil('lookups', _put(-2), IDS),
  "a lookup of another table's": Spoil('lookups', _other_table, IDS),
  'lookups of int64': Spoil('lookups', _cast('int64')),
  'lookups in a list': Spoil('lookups', lambda x, run: x.tolist()),
  'lookups of a table too few': Spoil('lookups', lambda x, run: x[:, 1:], IDS),
  'a label of 2': Spoil('labels', _put(2), 'label'),
  'a label that is NaN': Spoil('labels', _put(np.nan), 'label'),
  'labels that are shares': Spoil('labels', _put(0.5)),
  'labels of bools': Spoil('labels', _cast('bool')),
  'labels [n, 1]': Spoil('labels', lambda x, run: x[:, None]),
  'labels too few': Spoil('labels', lambda x, run: x[:-1], 'label|same number'),
  'a weight that is NaN': Spoil('weights', _put(np.nan), 'weight'),
  'a negative weight': Spoil('weights', _put(-1), 'weight'),
  'weights [n, 1]': Spoil('weights', lambda x, run: x[:, None], 'weight'),
  'dense of NaN': Spoil('dense', _put(np.nan), 'dense'),
  'dense of float64': Spoil('dense', _cast('float64')),
  'dense of one axis': Spoil('dense', lambda x, run: x.sum(1), 'dense'),
  'dense too wide': Spoil('dense', _wider, 'dense'),
  'a batch of 0 examples': Spoil('batch', _empty, 'batch|example|example'),
  'a batch size of 0': Spoil('batch_size', _always(0), 'batch'),
  'a batch size too large': Spoil('batch_size', _always(10**6), 'batch'),
  'a seed of -1': Spoil('seed', _always(-1), 'seed'),
  'a seed of 2^40': Spoil('seed', _always(2**40)),
  'negative dense features': Spoil('dense_features', _always(-1), 'dense'),
  'dense features too many': Spoil('dense_features', _always(5), 'dense'),
  'a rate below 0': Spoil(
    'recipe',
    lambda made, run: made._replace(
      row_optimizer=slip.ROW_OPTIMIZERS['sgd'](-0.1)
    ),
    'rate',
  ),
  'a rate of NaN': Spoil(
    'recipe',
    lambda made, run: made._replace(row_optimizer=slip.adagrad(math.nan)),
    'rate',
  ),
  'rows in MultiSteps': Spoil(
    'recipe',
    lambda made, run: made._replace(
      row_optimizer=optax.MultiSteps(slip.ROW_OPTIMIZERS['sgd'](0.1), 2)
    ),
    'row',
  ),
  'a model of [B, 1]': Spoil(
    'recipe', lambda made, run: recipe(run.case.world, Column)
  ),
  'a model that gives a tuple': Spoil(
    'recipe', lambda made, run: recipe(run.case.world, Pair), 'logit'
  ),
  'a loss of one number': Spoil('recipe', _recipe(loss=_mean_loss), 'loss'),
  'a loss of [B, 1]': Spoil('recipe', _recipe(loss=_column_loss), 'loss'),
  'a combiner that is none': Spoil(
    'tables', _features(combiner='max'), 'combiner'
  ),
  'a bag of length 0': Spoil('tables', _features(max_length=0), 'max_length'),
  'a feature of no table': Spoil('tables', _features(table='x'), 'table'),
  'a table of 0 rows': Spoil(
    'tables', _tables(vocabulary_size=0), 'vocabulary_size'
  ),
  'no table': Spoil('tables', lambda x, run: slip.TableSet({}), 'table'),
  'a dim of 0': Spoil('tables', _tables(embedding_dim=0), 'embedding_dim'),
  'rows of int8': Spoil('tables', _tables(dtype='int8'), 'dtype'),
  'a placement by name': Spoil('placement', _always('streamed')),
  'a placement that is none': Spoil('placement', _always('moon'), 'placement'),
  'a cache of 0 rows': Spoil(
    'placement', lambda _, run: slip.cached(0), 'capacity'
  ),
  'an eviction that is none': Spoil(
    'placement', lambda _, run: slip.cached(3, 'fifo'), 'eviction'
  ),
  'a negative look-ahead': Spoil(
    'placement', lambda _, run: slip.cached(3, look_ahead=-1), 'look_ahead'
  ),
  'pinned without hot rows': Spoil(
    'placement', lambda _, run: run.without_hot('pinned'), 'hot'
  ),
  'hot rows twice': Spoil('hot', lambda x, run: np.append(x, x[0]), 'hot'),
  'hot rows outside': Spoil('hot', lambda x, run: x + 10**4, 'hot'),
  'no hot rows': Spoil('hot', lambda x, run: x[:0], 'hot'),
  'hot rows of floats': Spoil('hot', lambda x, run: x + 0.5, 'hot'),
  'a depth of -1': Spoil('depth', _always(-1), 'depth'),
  'steps of -1': Spoil('steps', _always(-1)),
  'a mode that is none': Spoil('settings', _settings(mode='cols'), 'mode'),
  'a policy by name': Spoil('settings', _settings(policy='stale')),
  'a policy that is none': Spoil(
    'settings', _settings(policy='luck', mode='examples'), 'policy'
  ),
  'a drop target of 2': Spoil('settings', _settings(drop=2), 'drop'),
  'an alpha of 0': Spoil(
    'settings', _settings(alpha=0, threshold=0.1), 'alpha'
  ),
  'an alpha too large': Spoil(
    'settings', _settings(alpha=1000, threshold=0.1), 'alpha'
  ),
  'alphas in a list': Spoil('settings', _settings(alpha=[1])),
  'a threshold of -1': Spoil('settings', _settings(threshold=-1.0), 'thresh'),
  'a threshold of NaN': Spoil(
    'settings', _settings(threshold=math.nan), 'thresh'
  ),
  'a warm-up of 1.5': Spoil('settings', _phases(warm_up=1.5), 'warm_up'),
  'a settle of 0': Spoil('settings', _phases(settle=0), 'settle'),
  'a negative window': Spoil('settings', _phases(window=-1), 'window'),
  'a period too short': Spoil('settings', _phases(period=1), 'period'),
  'a skipping seed of -1': Spoil('settings', _settings(seed=-1), 'seed'),
  'an endless evaluation': Spoil('held_out', _always('endless'), 'end'),
  'an evaluation of nothing': Spoil('held_out', _always('nothing'), 'scored'),
}
