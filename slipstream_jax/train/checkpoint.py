"""Checkpoints of everything: dense state, tables, row state, data position.

orbax writes each one into a folder that it renames when it is complete, so
that a run killed while saving keeps its last whole checkpoint. Tables are
saved in pieces: a whole one would be buffered whole.
"""

from collections.abc import Iterator
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from slipstream_jax.data.scheduled import State
from slipstream_jax.errors import UserError
from slipstream_jax.stream.buffers import to_host
from slipstream_jax.stream.counters import Counters
from slipstream_jax.train import watch
from slipstream_jax.train.packing import pack, unpack
from slipstream_jax.train.trainer import Trainer
from slipstream_jax.types import RowBlock

_PIECE_ROWS = 1 << 21


class Position(NamedTuple):
  """Where training stood when the checkpoint was saved."""

  step: int
  """Steps taken."""
  schedule_state: State
  """Position of the planned batches, after the last one trained."""
  counters: Counters
  """Totals up to then."""


class Checkpoints:
  """The checkpoints of one run; the newest is kept."""

  def __init__(self, folder: pathlib.Path) -> None:
    """Opens `folder`, which need not exist."""
    self._folder = folder
    self._manager = ocp.CheckpointManager(
      folder.absolute(),
      options=ocp.CheckpointManagerOptions(
        max_to_keep=1, enable_async_checkpointing=False
      ),
      item_handlers={
        # Trained f32 rows hardly compress; what zstd saves is not worth it.
        'arrays': ocp.PyTreeCheckpointHandler(
          save_concurrent_gb=1, restore_concurrent_gb=1, use_compression=False
        ),
        'position': ocp.JsonCheckpointHandler(),
      },
    )

  def save(self, trainer: Trainer, schedule_state: State) -> None:
    """Saves everything; returns when it is complete on disk.

    Args:
      trainer: whose state, rows and counters to save.
      schedule_state: `get_state()` of the batches it trains.
    """
    step = int(to_host(trainer.state.step))
    packed, schedule = pack(schedule_state)
    arrays = _arrays(trainer, schedule)
    position = {
      'schedule_state': packed,
      'schedule_bytes': len(schedule),
      'window': trainer.probe.window,
      'counters': trainer.engine.counters._asdict(),
      'shapes': _shapes(arrays),
    }
    self._manager.save(
      step,
      args=ocp.args.Composite(
        arrays=ocp.args.PyTreeSave(arrays),
        position=ocp.args.JsonSave(position),
      ),
    )

  def restore(self, trainer: Trainer) -> Position:
    """Puts the newest checkpoint into the trainer.

    Returns:
      Where training stood; its `schedule_state` is for `set_state` of the
      batches.

    Raises:
      UserError: there is no checkpoint, or it is of another model or tables.
    """
    step = self._manager.latest_step()
    if step is None:
      raise UserError(
        'resuming needs a checkpoint',
        got='none',
        where=str(self._folder),
        mend="start without --config.resume, or give the run's --workdir",
      )
    json = self._manager.restore(
      step, args=ocp.args.Composite(position=ocp.args.JsonRestore())
    ).position
    like = _arrays(trainer, np.empty(json['schedule_bytes'], np.uint8))
    self._check_shapes(json['shapes'], _shapes(like))
    arrays = self._manager.restore(
      step,
      args=ocp.args.Composite(
        arrays=ocp.args.PyTreeRestore(
          like, restore_args=ocp.checkpoint_utils.construct_restore_args(like)
        )
      ),
    ).arrays
    trainer.state = arrays['state']
    _fill(trainer, arrays['table'])
    trainer.engine.counters = Counters(**json['counters'])
    if trainer.state.watch is not None:
      moved = watch.copy_of(trainer.state.watch.moved)
      trainer.probe.put(json['window'], moved)
    state = unpack(json['schedule_state'], np.asarray(arrays['schedule']))
    return Position(step, state, trainer.engine.counters)

  def _check_shapes(self, saved: dict[str, str], own: dict[str, str]) -> None:
    for name in sorted(saved.keys() | own.keys()):
      if saved.get(name) != own.get(name):
        raise UserError(
          'a checkpoint restores only into the model and tables it is of: '
          f'its {name} is {saved.get(name)}',
          got=own.get(name),
          where=str(self._folder),
          mend='use the config that the run was started with',
        )

  def close(self) -> None:
    """Gives back the manager's threads."""
    self._manager.close()


def _arrays(trainer: Trainer, schedule: np.ndarray) -> dict[str, Any]:
  table = trainer.engine.read_back()
  leaves = (table.rows, *table.state)
  return {
    'schedule': schedule,
    'state': trainer.state,
    'table': {
      f'leaf_{i}': {f'{at.start:012d}': leaf[at] for at in _pieces(len(leaf))}
      for i, leaf in enumerate(leaves)
    },
  }


def _shapes(arrays: dict[str, Any]) -> dict[str, str]:
  leaves, _ = jax.tree_util.tree_flatten_with_path(arrays)
  return {
    jax.tree_util.keystr(path): f'{leaf.dtype}{list(leaf.shape)}'
    for path, leaf in leaves
  }


def _pieces(rows: int) -> Iterator[slice]:
  for start in range(0, rows, _PIECE_ROWS):
    yield slice(start, min(start + _PIECE_ROWS, rows))


def _fill(trainer: Trainer, saved: dict[str, dict[str, np.ndarray]]) -> None:
  """Replaces the trainer's rows, letting go of each piece once it is used."""
  table = trainer.engine.read_back()
  leaves = []
  for i, like in enumerate((table.rows, *table.state)):
    leaf = like if like.flags.writeable else np.empty_like(like)
    for at in _pieces(len(leaf)):
      leaf[at] = saved[f'leaf_{i}'].pop(f'{at.start:012d}')
    leaves.append(leaf)
  trainer.engine.restore(RowBlock(leaves[0], tuple(leaves[1:])))
