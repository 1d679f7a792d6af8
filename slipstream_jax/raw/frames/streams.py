"""One item of a stream as a frame: a frame, or a dict of arrays."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from slipstream_jax.errors import UserError
from slipstream_jax.raw.frames.pieces import first_line
from slipstream_jax.row_space import as_array


def stream_frame(item: Any, columns: Sequence[str], where: str) -> pl.DataFrame:
  """A frame of an item of a stream.

  Args:
    item: a frame of polars or pandas, or arrays by name: [n], of ids [n, L]
      too, lists, or ragged as (values, row_splits).
    columns: those wanted; others of a dict are left out.
    where: the item, as errors name it.

  Raises:
    UserError: it is none of these, or arrays are of unlike lengths.
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
  """Lists of unlike lengths from all values and where each list begins."""
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
  # Objects are texts, as a rule, which polars finds out from a list alone.
  flat = values.tolist() if values.dtype == object else values
  lists = (
    pl.DataFrame({'row': rows, 'values': flat})
    .group_by('row', maintain_order=True)
    .agg('values')
  )
  # Those of empty lists are absent.
  every = pl.DataFrame({'row': np.arange(len(lengths))})
  joined = every.join(lists, on='row', how='left', maintain_order='left')
  return joined['values'].alias(name)
