"""The global row space: all tables' rows end to end, and ids in it."""

from collections.abc import Sequence

import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.types import Array, Lookups


def offsets(rows: Sequence[int]) -> np.ndarray:
  """Returns the first global row of each table, then N: i64[F + 1]."""
  return np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])


def row_dtype(num_rows: int) -> type[np.integer]:
  """Returns the smaller of i32 and i64 that can number `num_rows` rows."""
  return np.int32 if num_rows <= np.iinfo(np.int32).max else np.int64


def global_rows(
  ids: Array,
  rows: Sequence[int],
  first: Sequence[int] | None = None,
  num_rows: int | None = None,
) -> Lookups:
  """Converts local ids [B, F] or [B, F, L] to global rows. -1 (padding) stays.

  Args:
    ids: local ids of each feature.
    rows: rows of each feature's table.
    first: first global row of each feature's table. None: the tables lie end to
      end in the order of the features.
    num_rows: N. None: the sum of `rows`.

  Raises:
    UserError: an id is outside its table or not an integer, or the number of
      features is wrong.
  """
  ids = as_array(ids, 'lookups')
  if ids.ndim not in (2, 3) or ids.shape[1] != len(rows):
    raise UserError(
      f'ids must be [B, {len(rows)}] or [B, {len(rows)}, L]',
      got=ids.shape,
      where='lookups',
      hint='give one column of ids per feature',
    )
  check_integers(ids, 'lookups')
  shape = (1, len(rows)) + (1,) * (ids.ndim - 2)
  bad = (ids < -1) | (ids >= np.reshape(rows, shape))
  if bad.any():
    at = tuple(int(i) for i in np.argwhere(bad)[0])
    raise UserError(
      f'ids of feature {at[1]} must be in [0, {rows[at[1]]}) or -1',
      got=int(ids[at]),
      where=f'lookups{list(at)}',
      hint='map unknown ids to a row of the table first',
    )
  ends = offsets(rows)
  # From the number of rows, not from the largest id: all batches then have one
  # dtype, and the step is compiled once.
  dtype = row_dtype(int(ends[-1]) if num_rows is None else num_rows)
  starts = np.asarray(ends[:-1] if first is None else first, dtype)
  return np.where(ids < 0, dtype(-1), ids.astype(dtype) + starts.reshape(shape))


def as_array(values: Array, where: str) -> np.ndarray:
  """Returns any array, or evenly nested lists, as a numpy array.

  Raises:
    UserError: the lists are uneven, or values are masked.
  """
  # `np.asarray` would drop the mask and expose the masked values.
  if isinstance(values, np.ma.MaskedArray):
    raise UserError(
      'values must not be masked',
      got='a masked array',
      where=where,
      hint='fill what is missing, e.g. values.filled(0)',
    )
  try:
    return np.asarray(values)
  except (TypeError, ValueError) as error:
    raise UserError(
      'values must be an array, or lists that make one',
      got=str(error),
      where=where,
      hint='give rows of equal length',
    ) from error


def check_integers(lookups: np.ndarray, where: str) -> None:
  """Checks that lookups have an integer type.

  Raises:
    UserError: they have another type.
  """
  if lookups.dtype.kind not in 'iu':
    raise UserError(
      'lookups must be of an integer type',
      got=lookups.dtype,
      where=where,
      hint='number the rows of each table from 0 on',
    )
