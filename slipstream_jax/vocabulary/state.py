"""States of vocabularies as arrays and files, and conversions of their ids.

A state holds numbers, words and arrays. It is a file by itself, or part of a
position in a checkpoint.
"""

from collections.abc import Collection, Mapping
import pathlib
from typing import Any
import zipfile

from jaxtyping import Int
import numpy as np
import polars as pl

from slipstream_jax.columns.ids import Kind, raw_ids, RawIds, text_of
from slipstream_jax.errors import check_path, UserError
from slipstream_jax.files import Path, written
from slipstream_jax.tables import as_array

NO_IDS = RawIds('', np.empty(0, np.int64), None, (0,))
_UNREADABLE = OSError, EOFError, ValueError, TypeError, zipfile.BadZipFile


def integers(ids: Int[np.ndarray, ' n']) -> RawIds:
  """Returns i64 ids as raw ids, none of them missing."""
  return RawIds('int64', ids, None, ids.shape)


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
    return RawIds(kind, ids, None, ids.shape)
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
    first: see above.
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


def write(path: Path, state: Mapping[str, Any]) -> None:
  """Writes a state to a file atomically, or raises a `UserError`."""
  check_path(path, 'Vocabulary.save, path')
  try:
    with written(path) as file:
      np.savez(file, **state)
  except OSError as error:
    raise UserError(
      'a vocabulary must be written whole',
      got=error.strerror,
      where=str(path),
      hint='give a file in a folder that is there and has room',
    ) from error


def read(path: Path) -> dict[str, Any]:
  """Reads a state written by `write`.

  Raises:
    UserError: the file does not exist, holds something else, or is damaged.
  """
  try:
    # Opened here, because numpy would not close a damaged zip file.
    with (
      pathlib.Path(path).open('rb') as file,
      np.load(file, allow_pickle=False) as arrays,
    ):
      state = {name: arrays[name] for name in arrays.files}
  # For a single array numpy returns no context manager: a TypeError.
  except _UNREADABLE as error:
    raise UserError(
      'a vocabulary must be read from the file it was saved to',
      got=f'{type(error).__name__}: {error}',
      where=str(path),
      hint='give the path that save was given',
    ) from error
  return {k: v if v.ndim else v.item() for k, v in state.items()}


def check(
  state: Mapping[str, Any], own: Mapping[str, Any], arrays: Collection[str]
) -> None:
  """Checks that a state has the required entries.

  Args:
    state: what a user gave.
    own: required values. The first is the type of the state.
    arrays: names of the required arrays, [n] each.

  Raises:
    UserError: an array is missing, or a setting differs.
  """
  missing = [
    name
    for name in arrays
    if not isinstance(state.get(name), np.ndarray) or state[name].ndim != 1
  ]
  other = [f'{k} {state.get(k)}' for k, v in own.items() if state.get(k) != v]
  if missing or other:
    raise UserError(
      'a state must be of '
      + ', '.join(f'{name} {value}' for name, value in own.items()),
      got=', '.join(other + [f'no array {name}' for name in missing]),
      where='set_state, state',
      hint='make the vocabulary with the settings it was saved with',
    )
