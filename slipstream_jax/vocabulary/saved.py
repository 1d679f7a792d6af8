"""Vocabularies as files: a state of numbers, words and arrays, as npz.

The same states can be part of a position in a checkpoint.
"""

from collections.abc import Collection, Mapping
import pathlib
from typing import Any
import zipfile

import numpy as np

from slipstream_jax.errors import check_path, UserError
from slipstream_jax.files import Path, written

_UNREADABLE = OSError, EOFError, ValueError, TypeError, zipfile.BadZipFile


def write(path: Path, state: Mapping[str, Any]) -> None:
  """Writes a state to a file atomically.

  Raises:
    UserError: it cannot be written.
  """
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
    own: entries with their required values. The first is the type of the state.
    arrays: names of the required arrays.

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
