"""Ids that have a row: conversions for users and for files."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Int
import numpy as np
import polars as pl

from slipstream_jax.columns.ids import Kind, raw_ids, RawIds, text_of
from slipstream_jax.errors import UserError
from slipstream_jax.tables import as_array
from slipstream_jax.vocabulary import place_kernels

EMPTY = RawIds('', np.empty(0, np.int64), None, (0,))
"""No ids."""


def slots_for(ids: int) -> Int[np.ndarray, 'capacity 2']:
  """Returns an empty hash table for `ids` ids, with over 3/2 as many slots."""
  return np.zeros((1 << (ids * 3 // 2).bit_length(), 2), np.int64)


def find(
  slots: Int[np.ndarray, 'capacity 2'], ids: Int[np.ndarray, ' n']
) -> tuple[Int[np.ndarray, ' n'], Int[np.ndarray, ' m']]:
  """Returns places of ids, i32[n], 0 if absent, and where absent, i64[m]."""
  places, missed = np.empty(len(ids), np.int32), np.empty(len(ids), np.int64)
  misses, _ = place_kernels.find(ids, slots, places, missed)
  return places, missed[:misses]


def values_of(ids: RawIds) -> np.ndarray:
  """Returns the ids as i64[n] or u64[n], or as objects for text."""
  if ids.words is not None:
    return np.array(ids.words.to_list(), object)
  return ids.bits.view(np.uint64) if ids.kind == 'uint64' else ids.bits


def to_arrays(ids: RawIds) -> dict[str, Any]:
  """Returns kind and ids as plain arrays."""
  if ids.kind != 'text':
    return {'kind': ids.kind, 'ids': ids.bits}
  words = pl.Series([], dtype=pl.String) if ids.words is None else ids.words
  return {'kind': ids.kind, **text_of(words)._asdict()}


def from_arrays(state: Mapping[str, Any]) -> RawIds:
  """Restores ids from the result of `to_arrays`."""
  kind: Kind = state['kind']
  if kind != 'text':
    ids = np.require(state['ids'], np.int64, ['C', 'W'])
    return EMPTY._replace(kind=kind, bits=ids, shape=ids.shape)
  ends, whole = state['ends'].tolist(), state['data'].tobytes()
  starts = [0, *ends][:-1]
  words = [whole[a:b].decode() for a, b in zip(starts, ends, strict=True)]
  raw = raw_ids(pl.Series(words, dtype=pl.String), 'state')
  return raw._replace(kind='text')


def ids_at(
  rows: Any, known: np.ndarray, first: int, size: int, where: str
) -> np.ndarray:
  """Returns ids of rows, as objects of their shape; None if without an id.

  Args:
    rows: integers in [0, size).
    known: the ids of the rows from `first` on.
    first: row of the first known id.
    size: rows in total.
    where: as in `UserError`.

  Raises:
    UserError: a row is not in the table.
  """
  at = as_array(rows, where)
  if at.dtype.kind not in 'iu' and at.size:
    raise UserError(
      'rows must be of an integer type',
      got=at.dtype,
      where=where,
      hint='give what rows(ids) returned',
    )
  bad = at[(at < 0) | (at >= size)]
  if bad.size:
    raise UserError(
      f'rows must be in [0, {size})',
      got=bad.flat[0],
      where=where,
      hint='leave out padding, -1',
    )
  at = at.astype(np.int64)
  ids = np.full(at.shape, None, object)
  own = (at >= first) & (at < first + len(known))
  ids[own] = known[at[own] - first]
  return ids
