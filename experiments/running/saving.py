"""A run's checkpoints: as its config has them, and what they come to."""

from collections.abc import Callable
import pathlib
import sys

import ml_collections
from rich.console import Console

from experiments.common import build, report, workdir
from slipstream_jax.checkpoint.checkpoint import Checkpoints, Position, Saving
from slipstream_jax.errors import UserError
from slipstream_jax.training.trainer_parts import TrainerParts


def opened(
  config: ml_collections.ConfigDict, where: pathlib.Path, screen: Console
) -> Checkpoints:
  """The checkpoints of a run, by its section `checkpoint`.

  Raises:
    UserError: settings that cannot be.
  """
  section = config.checkpoint
  tell: Callable[[UserError], None] | None = None
  if section.on_error == 'warn':
    tell = lambda error: _warn(screen, f'no checkpoint: {error}')  # noqa: E731
  saving = Saving(
    section.policy,
    section.keep,
    section.memory_bytes,
    section.consolidate,
    section.codec,
    tell,
  )
  return Checkpoints(workdir.checkpoints_at(where, config), saving)


def announce(
  config: ml_collections.ConfigDict,
  trainer: TrainerParts,
  where: pathlib.Path,
  screen: Console,
) -> None:
  """Says what checkpoints may take, before there is one."""
  nbytes = build.checkpoint_bytes(trainer)
  kept = 'kept' if config.train.keep_checkpoint else 'removed at the end'
  screen.print(
    f'a checkpoint takes up to {report.size(nbytes)}, {kept} '
    '(config.train.keep_checkpoint)',
    highlight=False,
  )
  at = workdir.checkpoints_at(where, config)
  if '://' in at:
    return
  free = workdir.free_bytes(pathlib.Path(at))
  # The one before is there until the next one is whole.
  if free < nbytes * (2 if config.train.checkpoint_steps else 1):
    _warn(screen, f'its disk has {report.size(free)} left')


def restored(
  trainer: TrainerParts, checkpoints: Checkpoints, screen: Console
) -> Position:
  """Puts the newest whole checkpoint into the trainer; says what is not whole.

  Raises:
    UserError: as `Checkpoints.restore`.
  """
  position = checkpoints.restore(trainer, or_older=True)
  for why in position.skipped:
    _warn(screen, f'a checkpoint cannot be restored: {why}')
  return position


def is_saved(checkpoints: Checkpoints, step: int) -> bool:
  """Whether the run's last checkpoint is of this step.

  Since then nothing happened but that batches were left out, if anything: who
  goes on from there leaves them out again.

  Raises:
    UserError: it could not be written.
  """
  checkpoints.wait()
  return checkpoints.step == step


def close(checkpoints: Checkpoints, screen: Console) -> None:
  """Ends what is being written.

  Raises:
    UserError: it could not be written, and nothing else went wrong before.
  """
  before = sys.exception()
  try:
    checkpoints.close()
  except UserError as error:
    if before is None:
      raise
    _warn(screen, f'no checkpoint: {error}')


def tell_totals(checkpoints: Checkpoints, screen: Console) -> None:
  """Says what saving has cost, if there was any."""
  totals, maintenance = checkpoints.totals, checkpoints.maintenance
  if totals.saved:
    made_one = ''
    if maintenance.bases:
      nbytes = report.size(maintenance.nbytes)
      made_one = f'; {maintenance.bases} times a chain became a base, {nbytes}'
    screen.print(
      f'checkpoints written: {totals.saved}, bases: {totals.bases}; '
      f'{report.size(totals.row_bytes)} of rows, '
      f'{report.size(totals.other_bytes)} of all else{made_one}; '
      f'training waited {totals.seconds_waiting:.1f} s',
      highlight=False,
    )
  if (error := maintenance.error) is not None:
    _warn(screen, f'increments could not be made a base: {error}')


def _warn(screen: Console, text: str) -> None:
  screen.print(text, style='bold red', highlight=False, markup=False)
