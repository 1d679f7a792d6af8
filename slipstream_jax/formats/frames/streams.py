"""Converts an item of a stream, a frame or a dict of arrays, to a frame."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from slipstream_jax.errors import UserError
from slipstream_jax.formats.frames.pieces import first_line
from slipstream_jax.tables import as_array


def stream_frame(item: Any, columns: Sequence[str], where: str) -> pl.DataFrame:
  """Converts an item of a stream to a frame.

  Args:
    item: a frame of polars or pandas, or arrays by name: [n], ids also [n, L],
      as lists, or ragged as (values, row_splits).
    columns: the wanted columns. Others of a dict are left out.
    where: names the item in errors.

  Raises:
    UserError: the item is none of these, or its arrays differ in length.
  """
  if isinstance(item, pl.DataFrame):
    return item
  try:
    if isinstance(item, Mapping):
      wanted = [name for name in columns if name in item]
      return pl.DataFrame([_series(name, item[name], where) for name in wanted])
    return pl.from_pandas(item)
  except UserError:
    raise
  except (ImportError, TypeError, ValueError, pl.exceptions.PolarsError) as e:
    raise UserError(
      'a stream must give frames, or dicts of arrays of one length',
      got=first_line(e),
      where=where,
      hint="give dicts such as {'user': users, 'label': clicks}",
    ) from e


def _series(name: str, values: Any, where: str) -> pl.Series:
  if isinstance(values, pl.Series):
    return values.alias(name)
  if isinstance(values, tuple) and len(values) == 2:
    place = f'{where}, {name}'
    flat, splits = (as_array(part, place) for part in values)
    return _ragged(name, flat, splits, place)
  if isinstance(values, np.ndarray):
    values = as_array(values, f'{where}, {name}')
    if values.ndim == 2:
      rows, width = values.shape
      return _ragged(name, values.ravel(), np.arange(rows + 1) * width, where)
    if values.dtype == object:
      return pl.Series(name, values.tolist())
  return pl.Series(name, values)


def _ragged(
  name: str, values: np.ndarray, splits: np.ndarray, where: str
) -> pl.Series:
  """Makes lists of uneven lengths from all values and each list's start."""
  good = (
    splits.ndim == values.ndim == 1
    and splits.dtype.kind in 'iu'
    and len(splits) > 0
    and splits[0] == 0
    and splits[-1] == len(values)
    and bool((splits[1:] >= splits[:-1]).all())
  )
  if not good:
    raise UserError(
      'row_splits must rise from 0 to the number of values',
      got=f'{splits.tolist()[:8]} for {values.shape} values',
      where=where,
      hint='give (values, row_splits), as ragged tensors have them',
    )
  lengths: np.ndarray = np.diff(splits.astype(np.int64))
  rows = np.repeat(np.arange(len(lengths)), lengths)
  # Objects are usually texts. polars infers that from a list only.
  flat = values.tolist() if values.dtype == object else values
  lists = (
    pl.DataFrame({'row': rows, 'values': flat})
    .group_by('row', maintain_order=True)
    .agg('values')
  )
  # Rows with empty lists are missing from `lists`.
  every = pl.DataFrame({'row': np.arange(len(lengths))})
  joined = every.join(lists, on='row', how='left', maintain_order='left')
  return joined['values'].alias(name)
