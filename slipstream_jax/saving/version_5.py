"""Converts checkpoints of versions up to 5, which saved all rows by orbax."""

from collections.abc import Iterator
import contextlib
import functools
import json
import os
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from slipstream_jax.errors import UserError
from slipstream_jax.saving.checkpoint import Checkpoints
from slipstream_jax.saving.orbax_calls import call_orbax
from slipstream_jax.saving.packing import (
  arrays_of,
  checksums,
  json_checksum,
  tables_of,
)
from slipstream_jax.saving.restoring import check_same, check_sums, put
from slipstream_jax.training.parts import TrainerParts
from slipstream_jax.types import RowBlock

_PIECE_BYTES = 1 << 27
_LOST = 'its disk lost or changed data: use a copy of it'
_RULE = 'a checkpoint must be whole to be converted'


class _Damaged(ValueError):
  """Not what was written; the message says what."""


def convert(
  folder: str | os.PathLike[str],
  into: str | os.PathLike[str],
  trainer: TrainerParts,
) -> int:
  """Saves the newest old checkpoint of a folder as one of today.

  It is a base of all rows, as nobody knows which of them took a step.

  Args:
    folder: of a run; it stays as it is.
    into: another folder, or a URL.
    trainer: made as that of the run was; has its state afterwards.

  Returns:
    The steps taken.

  Raises:
    UserError: there is none of version 5, it is of another model or tables, or
      it is not what was saved.
  """
  where = os.fspath(folder)
  path = _newest(pathlib.Path(folder), where)
  position = call_orbax(lambda: _position(path), _RULE, where, _LOST)
  # What today's checkpoints know besides of tables, an old one cannot tell.
  own = tables_of(trainer)
  old = {key: own[key] for key in own if not key.startswith('untrained')}
  check_same(position['tables'], old, where)
  like = _like(trainer, position['schedule_bytes'])
  check_same(position['shapes'], _shapes(like), where)
  args = ocp.checkpoint_utils.construct_restore_args(like)
  restore = ocp.args.PyTreeRestore(like, restore_args=args)

  def read() -> Any:
    with contextlib.closing(
      ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))
    ) as checkpointer:
      return checkpointer.restore(path / 'arrays', args=restore)

  arrays = call_orbax(read, _RULE, where, _LOST)
  check_sums(position['checksums'], checksums(arrays), where)
  fill = functools.partial(_fill, trainer, arrays['tables'])
  schedule = np.asarray(arrays['schedule']).tobytes()
  state = put(trainer, position, arrays, schedule, fill)
  with contextlib.closing(Checkpoints(into)) as checkpoints:
    return checkpoints.save(trainer, state)


def _newest(folder: pathlib.Path, where: str) -> pathlib.Path:
  steps = folder.iterdir() if folder.is_dir() else ()
  paths = [path for path in steps if path.name.isdigit() and path.is_dir()]
  if not paths:
    raise UserError(
      'what is converted must be a checkpoint of version 5',
      got='none',
      where=where,
      hint='give the folder that an earlier version of the library saved to',
    )
  return max(paths, key=lambda path: int(path.name))


def _position(path: pathlib.Path) -> dict[str, Any]:
  saved: dict[str, Any] = json.loads(
    (path / 'position' / 'metadata').read_text()
  )
  checksum = saved.pop('checksum', None)
  if checksum != json_checksum(saved):
    raise _Damaged('its position has another checksum than was written')
  if saved.get('version') != 5:
    raise _Damaged(f'it is of version {saved.get("version")}, not 5')
  return saved


def _like(trainer: TrainerParts, schedule_bytes: int) -> dict[str, Any]:
  """A tree of the shapes that an old checkpoint of such a trainer has."""
  schedule = np.empty(schedule_bytes, np.uint8)
  tables = {
    name: {
      part: {f'{at.start:012d}': leaf[at] for at in _pieces(leaf)}
      for part, leaf in parts.items()
    }
    for name, parts in _by_table(trainer, _blocks(trainer)).items()
  }
  return arrays_of(trainer) | {'schedule': schedule, 'tables': tables}


def _blocks(trainer: TrainerParts) -> list[RowBlock]:
  return [group.rows.like() for group in trainer.engine.groups]


def _by_table(
  trainer: TrainerParts, blocks: list[RowBlock]
) -> dict[str, dict[str, np.ndarray]]:
  """Of each table its rows [R, D] and, by leaf, their state [R, ...]: views."""
  tables = trainer.recipe.tables
  numbers = {name: i for i, name in enumerate(tables.tables)}
  parts = {}
  for group, block in zip(tables.groups, blocks, strict=True):
    start = 0
    for name in group.tables:
      end = start + tables.tables[name].rows
      states = {f'state_{i}': x[start:end] for i, x in enumerate(block.state)}
      own = {'rows': block.rows[start:end], **states}
      parts[f'table_{numbers[name]}'] = own
      start = end
  return parts


def _pieces(leaf: np.ndarray) -> Iterator[slice]:
  step = max(1, _PIECE_BYTES // leaf[0].nbytes)
  for start in range(0, len(leaf), step):
    yield slice(start, min(start + step, len(leaf)))


def _fill(trainer: TrainerParts, saved: dict[str, Any]) -> None:
  blocks = _blocks(trainer)
  for name, parts in _by_table(trainer, blocks).items():
    for part, leaf in parts.items():
      for at in _pieces(leaf):
        leaf[at] = saved[name][part].pop(f'{at.start:012d}')
  trainer.engine.restore(blocks)


def _shapes(arrays: dict[str, Any]) -> dict[str, str]:
  leaves, _ = jax.tree_util.tree_flatten_with_path(arrays)
  return {
    jax.tree_util.keystr(path): f'{leaf.dtype}{list(leaf.shape)}'
    for path, leaf in leaves
  }
