"""Vocabularies as files: a state of numbers, words and arrays, in numpy's zip.

The same states fit into a checkpoint, where they are part of a position.
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
  """Writes a state; the file is there whole, or as it was before.

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
  """The state that `write` wrote.

  Raises:
    UserError: there is no such file, or it is another or damaged.
  """
  try:
    # Opened here: numpy leaves a file open that is no whole zip.
    with (
      pathlib.Path(path).open('rb') as file,
      np.load(file, allow_pickle=False) as arrays,
    ):
      state = {name: arrays[name] for name in arrays.files}
  # Numpy gives a single array, which cannot be left, for what is no zip.
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
  """Looks whether a state has what it needs.

  Args:
    state: what a user gave.
    own: entries that must be those; the first says what it is a state of.
    arrays: names of the arrays it must have.

  Raises:
    UserError: it lacks one, or was made with other settings.
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
