"""The global row space: all tables' rows end to end, and ids in it."""

from collections.abc import Sequence

import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.types import Array, Lookups


def offsets(rows: Sequence[int]) -> np.ndarray:
  """First global row of each table of `rows[t]` rows; N last: i64[F + 1]."""
  return np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])


def row_dtype(num_rows: int) -> type[np.integer]:
  """Smallest of i32 and i64 that numbers `num_rows` rows."""
  return np.int32 if num_rows <= np.iinfo(np.int32).max else np.int64


def global_rows(
  ids: Array,
  rows: Sequence[int],
  first: Sequence[int] | None = None,
  num_rows: int | None = None,
) -> Lookups:
  """Local ids [B, F] or [B, F, L] to global rows; -1 (padding) stays.

  Args:
    ids: of features of tables of `rows[f]` rows.
    rows: per feature.
    first: first global row of each feature's table; None: of tables that lie
      end to end in the order of the features.
    num_rows: N; None: as many as those.

  Raises:
    UserError: an id outside its table or that is no whole number, or another
      number of features.
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
  # By all rows and not by the largest id: batches of one type, or a step would
  # be compiled for each.
  dtype = row_dtype(int(ends[-1]) if num_rows is None else num_rows)
  starts = np.asarray(ends[:-1] if first is None else first, dtype)
  return np.where(ids < 0, dtype(-1), ids.astype(dtype) + starts.reshape(shape))


def as_array(values: Array, where: str) -> np.ndarray:
  """Any array, or lists nested evenly, as numpy's.

  Raises:
    UserError: lists that are not even, or values that are masked.
  """
  # `np.asarray` would drop the mask, and train on what lies beneath it.
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
  """Looks at the type of lookups: there is no row 0.5, nor NaN or True.

  Raises:
    UserError: it is of another type.
  """
  if lookups.dtype.kind not in 'iu':
    raise UserError(
      'lookups must be of an integer type',
      got=lookups.dtype,
      where=where,
      hint='number the rows of each table from 0 on',
    )
