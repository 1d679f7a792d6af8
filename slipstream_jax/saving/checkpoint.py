"""Checkpoints of everything: dense state, tables, row state, data position.

orbax writes each one into a folder that it renames when it is complete, so
that a run killed while saving keeps its last whole checkpoint. Tables are
saved in pieces: a whole one would be buffered whole.
"""

from collections.abc import Callable
import functools
import os
import pathlib
import re
from typing import Any, NamedTuple, TypeVar

import numpy as np
import orbax.checkpoint as ocp

from slipstream_jax.data.interrupts import held
from slipstream_jax.errors import check_path, UserError
from slipstream_jax.saving import file_sums
from slipstream_jax.saving.orbax_calls import call_orbax
from slipstream_jax.saving.packing import (
  arrays_of,
  check_finite,
  Checksums,
  checksums,
  fill,
  json_checksum,
  pack,
  shapes_of,
  state_of,
  tables_of,
  unpack,
)
from slipstream_jax.schedules.base import State
from slipstream_jax.stream import on_host
from slipstream_jax.stream.buffers import to_host
from slipstream_jax.stream.counters import Counters
from slipstream_jax.training import watch
from slipstream_jax.training.parts import TrainerParts

_T = TypeVar('_T')
_VERSION = 5
"""Of what a checkpoint holds; raised when a name or meaning changes."""
_URL = re.compile(r'[A-Za-z][\w+.-]+:/')  # not a drive's letter
_ROOM = 'look whether its disk is full or read-only; what was there still is'
_LOST = 'its disk lost or changed data: start anew, or use a copy of it'


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

  def __init__(self, folder: str | os.PathLike[str]) -> None:
    """Opens `folder`, which need not exist, and is made by the first `save`.

    Raises:
      UserError: it is a URL, not a folder.
    """
    check_path(folder, 'Checkpoints, folder')
    if _URL.match(os.fspath(folder)):
      raise UserError(
        'checkpoints are kept in a folder, not under a URL',
        got=os.fspath(folder),
        where='Checkpoints, folder',
        hint='name a folder of this machine',
      )
    self._folder = pathlib.Path(folder).absolute()

  @functools.cached_property
  def _manager(self) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(
      self._folder,
      # Not in the background: the next steps would change the rows meanwhile.
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

  def save(self, trainer: TrainerParts, schedule_state: State) -> int:
    """Saves everything; returns when it is complete on disk.

    Saving again what was just saved does nothing.

    Args:
      trainer: whose state, rows and counters to save.
      schedule_state: `get_state()` of the batches it trains.

    Returns:
      The steps taken, by which the checkpoint is known.

    Raises:
      UserError: the trainer is torn, a parameter or row is not finite, the
        folder holds another checkpoint of this step or a later one, or it
        cannot be written; what was saved before is then still there.
    """
    trainer.check_whole()
    step = int(to_host(trainer.state.step))
    packed, schedule = pack({'of': schedule_state, 'grown': trainer.grown})
    arrays = arrays_of(trainer, schedule)
    # Before anything is written: a bad checkpoint would replace the good one.
    check_finite(trainer, arrays, step)
    position = {
      'version': _VERSION,
      'schedule_state': packed['of'],
      'grown': packed['grown'],
      'schedule_bytes': len(schedule),
      'window': trainer.probe.window,
      'losses': list(trainer.probe.losses.items()),
      'hot_here': on_host.hot_here(trainer.engine),
      'counters': trainer.counters_of_steps._asdict(),
      'shapes': shapes_of(arrays),
      'tables': tables_of(trainer),
      'seed': trainer.engine.untrained.seed,
      'checksums': checksums(arrays),
    }
    newest = self.newest()
    if newest is not None and newest >= step:
      self._check_saved(newest, step, position)
      return step
    # Of all that stands above, so it comes last; the arrays' own are among it.
    position['checksum'] = json_checksum(position)
    args = ocp.args.Composite(
      arrays=ocp.args.PyTreeSave(arrays),
      position=ocp.args.JsonSave(position),
    )

    def write() -> None:
      self._manager.save(step, args=args)
      file_sums.write(self._folder, step)

    with held():  # orbax's threads would go on writing into its folder
      self._call('a checkpoint must be written whole', _ROOM, write)
    return step

  def restore(self, trainer: TrainerParts) -> Position:
    """Puts the newest checkpoint into the trainer.

    Returns:
      Where training stood; its `schedule_state` is for `set_state` of the
      batches.

    Raises:
      UserError: there is no checkpoint, it is of another model or tables, or
        it is not what was saved; the trainer is then as it was.
    """
    step = self.step_to_restore()
    # The small part first: a wrong model is told before gigabytes are read.
    position = self._position(step)
    self._check_same(position['tables'], tables_of(trainer))
    schedule = np.empty(position['schedule_bytes'], np.uint8)
    like = arrays_of(trainer, schedule, read=False)
    self._check_same(position['shapes'], shapes_of(like))
    args = ocp.checkpoint_utils.construct_restore_args(like)
    restore = ocp.args.PyTreeRestore(like, restore_args=args)
    arrays = self._load(step, 'arrays', restore)
    # All is looked at before the trainer changes; from here on it can be torn.
    self._check_sums(step, position['checksums'], checksums(arrays))
    counters = Counters(**position['counters'])
    schedule = np.asarray(arrays['schedule'])
    state = unpack(position['schedule_state'], schedule)
    grown = unpack(position.get('grown', {}), schedule)
    with held(), trainer.changing('a restore'):
      trainer.state = state_of(trainer, arrays['state'])
      fill(trainer, arrays['tables'])
      on_host.swap(trainer.engine, position.get('hot_here', False))
      for loss in position.get('losses', ()):
        trainer.probe.put_loss(*loss)
      trainer.engine.counters = counters
      # Rows that get another id start as they did in the run.
      trainer.engine.renew_as(position['seed'])
      trainer.grown = grown
      trainer.rest = Counters()
      if trainer.state.watch is not None:
        # The schedule may yet ask for it, when the watch is long donated.
        moved = watch.moved(trainer.state.watch)
        trainer.probe.put(position['window'], moved)
    return Position(step, state, trainer.engine.counters)

  def newest(self) -> int | None:
    """The step of the newest checkpoint, also of one that others saved.

    Raises:
      UserError: the folder cannot be read.
    """
    if not self._folder.is_dir():
      return None

    def newest() -> int | None:
      self._manager.reload()  # others may have saved, too
      return max(self._manager.all_steps(), default=None)

    return self._call('a folder of checkpoints must be readable', _LOST, newest)

  def step_to_restore(self) -> int:
    """The same, where there must be one.

    Raises:
      UserError: there is none, or the folder cannot be read.
    """
    step = self.newest()
    if step is None:
      raise UserError(
        'resuming needs a checkpoint',
        got='none',
        where=str(self._folder),
        hint='start anew, or give the folder that the run saved to',
      )
    return step

  def _load(self, step: int, item: str, args: Any) -> Any:
    def load() -> Any:
      file_sums.check(self._folder, step, item)
      composite = ocp.args.Composite(**{item: args})
      return self._manager.restore(step, args=composite)[item]

    return self._call('a checkpoint must be whole to be restored', _LOST, load)

  def _position(self, step: int) -> dict[str, Any]:
    """What was saved beside the arrays, once it is known to be that."""
    args = ocp.args.JsonRestore()
    saved: dict[str, Any] = self._load(step, 'position', args)
    checksum = saved.pop('checksum', None)  # the first version had none
    if checksum is not None:
      self._check_sums(
        step, {'position': checksum}, {'position': json_checksum(saved)}
      )
    version = saved.get('version', 1)
    if checksum is None or version != _VERSION:
      raise UserError(
        f'a checkpoint must be of version {_VERSION}',
        got=version,
        where=str(self._folder / str(step)),
        hint='restore it with the version of the library that saved it',
      )
    return saved

  def _check_saved(
    self, newest: int, step: int, position: dict[str, Any]
  ) -> None:
    """Looks whether the newest checkpoint is the very one to be saved."""
    if newest == step:
      saved, same = self._position(step), ('checksums', 'schedule_state')
      if all(saved[key] == position[key] for key in same):
        return
    raise UserError(
      f'a checkpoint must be of a later step than {newest}, which is here',
      got=f'step {step}',
      where=str(self._folder),
      hint='save the checkpoints of each run in a folder of their own',
    )

  def _check_same(self, saved: dict[str, Any], own: dict[str, Any]) -> None:
    for name in sorted(saved.keys() | own.keys()):
      if saved.get(name) != own.get(name):
        raise UserError(
          'a checkpoint restores only into the model and tables it is of: '
          f'its {name} is {saved.get(name)}',
          got=own.get(name),
          where=str(self._folder),
          hint='make the trainer as that of the run was made',
        )

  def _check_sums(self, step: int, saved: Checksums, now: Checksums) -> None:
    for name, crc in now.items():
      if saved.get(name) != crc:
        raise UserError(
          f'{name} of a checkpoint must have the checksum {saved.get(name)}',
          got=crc,
          where=str(self._folder / str(step)),
          hint=_LOST,
        )

  def _call(self, rule: str, hint: str, call: Callable[[], _T]) -> _T:
    return call_orbax(call, rule, str(self._folder), hint)

  def close(self) -> None:
    """Gives back the manager's threads; may be called again."""
    if '_manager' in vars(self):
      self._manager.close()
