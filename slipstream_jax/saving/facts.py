"""What a trainer is made of beside its arguments: known from its first source.

It lies beside the checkpoints, so that a trainer can be made again without the
source: to predict, or to look at rows.
"""

import json
import os
import pathlib
from typing import NamedTuple
import zlib

from jaxtyping import Int
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.files import replace, sync

_NAME = 'trainer.json'
_VERSION = 1


class _Unfit(ValueError):
  """What a file holds is not what was written."""


class Facts(NamedTuple):
  """What the first source told."""

  dense_features: int
  """I, columns of `Batch.dense`."""
  dense_columns: dict[str, int | None] | None
  """As in `Recipe`."""
  hot: Int[np.ndarray, ' H'] | None
  """Global rows of the hot rows, i64, if some were chosen."""
  watched: bool
  """Whether rows were being compared."""


def keep_facts(folder: str | os.PathLike[str], facts: Facts) -> None:
  """Writes the facts into a folder of checkpoints; whole, or as before.

  Raises:
    UserError: it cannot be written.
  """
  path = pathlib.Path(folder)
  values = facts._asdict() | {'version': _VERSION, 'hot': None}
  try:
    path.mkdir(parents=True, exist_ok=True)
    if facts.hot is not None:
      # Under a name of its own, so that one file never speaks of another.
      values['hot'] = f'hot_rows_{zlib.crc32(facts.hot.tobytes()):08x}.npy'
      _save(path / values['hot'], facts.hot)
    replace(path / _NAME, json.dumps(values, indent=2))
  except OSError as error:
    raise UserError(
      'a checkpoint needs a folder that can be written',
      got=str(error),
      where=str(path),
      hint='look whether its disk is full or read-only',
    ) from error


def read_facts(folder: str | os.PathLike[str]) -> Facts:
  """The facts that `keep_facts` wrote.

  Raises:
    UserError: there are none, or not those that were written.
  """
  path = pathlib.Path(folder)
  try:
    values = json.loads((path / _NAME).read_text())
    version = values.pop('version')
    if version != _VERSION:
      raise _Unfit(f'version {version}, not {_VERSION}')
    if values['hot'] is not None:
      rows = np.load(path / values['hot'])
      if f'{zlib.crc32(rows.tobytes()):08x}' not in values['hot']:
        raise _Unfit(f'{values["hot"]} is damaged')
      values['hot'] = rows
    return Facts(**values)
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise UserError(
      'a trainer is restored from a folder that Trainer.save wrote',
      got=f'{type(error).__name__}: {error}',
      where=str(path / _NAME),
      hint='give that folder; other checkpoints are opened by what saved them',
    ) from error


def _save(path: pathlib.Path, rows: np.ndarray) -> None:
  if path.exists():
    return
  partial = path.with_name(f'{path.name}.tmp')
  with open(partial, 'wb') as file:
    np.save(file, rows)
  sync(partial)
  partial.replace(path)
