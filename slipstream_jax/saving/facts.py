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

from slipstream_jax.errors import is_whole, UserError
from slipstream_jax.files import replace, written

_VERSION = 1


class _Damaged(Exception):
  """Not what was written; the message says what."""


_DAMAGE = (
  _Damaged,
  OSError,
  ValueError,
  KeyError,
  TypeError,
  AttributeError,
  EOFError,
  MemoryError,
)
"""What reading a file may raise that holds something else."""


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


def keep_facts(
  folder: str | os.PathLike[str],
  step: int,
  facts: Facts,
  *,
  alone: bool = False,
) -> None:
  """Writes the facts into a folder of checkpoints; whole, or as before.

  Args:
    folder: made if it is not there.
    step: of the checkpoint that they are of.
    facts: to write.
    alone: removes those of all other checkpoints.

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
    replace(path / _name(step), json.dumps(values, indent=2))
    if alone:
      kept = {_name(step), values['hot']}
      for pattern in 'trainer_*.json', 'hot_rows_*.npy':
        for other in path.glob(pattern):
          if other.name not in kept:
            other.unlink()
  except OSError as error:
    raise UserError(
      'a checkpoint needs a folder that can be written',
      got=str(error),
      where=str(path),
      hint='look whether its disk is full or read-only',
    ) from error


def read_facts(folder: str | os.PathLike[str], step: int) -> Facts:
  """The facts that `keep_facts` wrote for the checkpoint of that step.

  Raises:
    UserError: there are none, or not those that were written.
  """
  path = pathlib.Path(folder)
  try:
    values = json.loads((path / _name(step)).read_text())
    version = values.pop('version')
    if version != _VERSION:
      raise _Damaged(f'version {version}, not {_VERSION}')
    if values['hot'] is not None:
      values['hot'] = _load(path / values['hot'])
    return _checked(Facts(**values))
  except _DAMAGE as error:
    raise UserError(
      'a trainer is restored from a folder that Trainer.save wrote',
      got=f'{type(error).__name__}: {error}',
      where=str(path / _name(step)),
      hint='give that folder; other checkpoints are opened by what saved them',
    ) from error


def _name(step: int) -> str:
  return f'trainer_{step}.json'


def _checked(facts: Facts) -> Facts:
  """The facts, if they are of the types that were written."""
  dense, columns, _, watched = facts
  names = columns is None or (
    isinstance(columns, dict)
    and all(width is None or is_whole(width, 1) for width in columns.values())
  )
  if not (is_whole(dense, 0) and names and isinstance(watched, bool)):
    raise _Damaged(f'{facts}')
  return facts


def _load(path: pathlib.Path) -> np.ndarray:
  rows = np.load(path)
  if f'{zlib.crc32(rows.tobytes()):08x}' not in path.name:
    raise _Damaged(f'{path.name} is damaged')
  return rows


def _save(path: pathlib.Path, rows: np.ndarray) -> None:
  # Also where it is there: what was damaged is mended by saving anew.
  with written(path) as file:
    np.save(file, rows)
