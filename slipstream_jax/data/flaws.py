"""The sentences of what a batch may not hold."""

import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.tables import TableSet
from slipstream_jax.types import Batch

_NONE = np.empty(0, np.float32)


def refuse(given: Batch, own: Batch, tables: TableSet) -> None:
  """Says which value of a batch is bad: the first, in this order.

  Args:
    given: the batch as it came.
    own: the same in the types of a step.
    tables: its lookups are of.

  Raises:
    UserError: with feature or column, example, value and bound.
  """
  # All is looked at again, slowly: after an error there is no next batch.
  first, end = (
    bound.reshape(tables.example_shape) for bound in tables.column_rows
  )
  rows = own.lookups.astype(np.int64)
  outside = (rows < first) | (rows >= end)
  weights = _NONE if own.lookup_weights is None else own.lookup_weights
  labels = _NONE if own.labels is None else own.labels
  offset = _NONE if own.offset is None else own.offset
  for name, bad in (
    ('lookups', (rows != -1) & outside),
    ('dense', ~np.isfinite(own.dense)),
    ('labels', ~((labels >= 0) & (labels <= 1))),
    ('weights', ~((own.weights >= 0) & np.isfinite(own.weights))),
    ('lookup_weights', ~np.isfinite(weights)),
    ('offset', ~np.isfinite(offset)),
  ):
    if bad.any():
      at = tuple(int(i) for i in np.argwhere(bad)[0])
      rule, hint = _law(name, at, tables)
      raise UserError(
        rule,
        got=getattr(given, name)[at],
        where=f'example {at[0]}, Batch.{name}{list(at)}',
        hint=hint,
      )


def _law(name: str, at: tuple[int, ...], tables: TableSet) -> tuple[str, str]:
  """What an array must hold, and what to do about it."""
  match name:
    case 'lookups':
      number, name, first, end = _feature_at(tables, at[1:])
      return (
        f'lookups of feature {number} ({name}) must be in'
        f' [{first}, {end}), or -1 for padding',
        'make them with TableSet.lookups(ids)',
      )
    case 'dense':
      return (
        f'dense features must be finite, column {at[1]} too',
        'fill what is missing before training, e.g. with 0',
      )
    case 'labels':
      return (
        'labels must be in [0, 1]',
        'give 1 for a click and 0 for none, or the chance of one',
      )
    case 'offset':
      return (
        'offsets of logits must be finite',
        'give 0 to an example of which nothing is known',
      )
    case 'lookup_weights':
      _, name, *_ = _feature_at(tables, at[1:])
      return (
        f'weights of the lookups of feature {name} must be finite',
        'give 1 to a lookup that counts once, also to padding',
      )
    case _:
      return (
        'weights must be finite and at least 0',
        'give 1 to an example that counts once, and 0 to padding',
      )


def _feature_at(
  tables: TableSet, at: tuple[int, ...]
) -> tuple[int, str, int, int]:
  """Number and name of a lookup's feature; first and last row, excluded."""
  column = int(np.ravel_multi_index(at, tables.example_shape))
  first, end = (int(bound[column]) for bound in tables.column_rows)
  spans = enumerate(tables.columns.items())
  number, name = next((n, f) for n, (f, span) in spans if column < span.stop)
  return number, name, first, end
