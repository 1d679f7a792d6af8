"""The folder of a reproduction: what it holds, and what is left to run."""

import pathlib
from typing import Any

from experiments.reproduce import results
from experiments.reproduce.grid import (
  CELL,
  Job,
  NAIVE,
  PHASES,
  ROWS,
  SKEW,
  THRESHOLD,
)
from experiments.reproduce.results import (
  Cell,
  Naive,
  Phase,
  Point,
  RowChange,
  Skew,
  Threshold,
)
from slipstream_jax.data.interrupts import held
from slipstream_jax.errors import UserError

_SAME = ('scale', 'data', 'drop')
"""What a reproduction goes on with; models and seeds may be added."""
_KINDS: dict[str, tuple[type[Any], int]] = {
  CELL: (Cell, 4),
  PHASES: (Phase, 4),
  SKEW: (Skew, 1),
  ROWS: (RowChange, 1),
  NAIVE: (Naive, 3),
  THRESHOLD: (Threshold, 3),
}
"""Lines that a job leaves, and how many of their fields say which it was."""


class Kept:
  """What is finished, in a folder.

  Attributes:
    folder: where it lies.
    before: its setting, as the program that wrote it last left it.
  """

  def __init__(self, folder: pathlib.Path, setting: dict[str, Any]) -> None:
    """Opens a folder: a new one, or that of a reproduction to go on with.

    Args:
      folder: which is there.
      setting: of this reproduction.

    Raises:
      UserError: it holds one of other settings, or else what is none.
    """
    self.folder = folder
    self.before = results.read_setting(folder)
    if self.before:
      _check_same(self.before, setting)
    elif any(folder.iterdir()):
      raise UserError(
        'a reproduction needs a new or empty folder, or one to go on with',
        got=folder,
        where='--workdir',
        hint='name another one',
      )
    results.mend(folder)
    lines = {kind: results.read(folder, kind) for kind, _ in _KINDS.values()}
    self._finished = {
      kind: {line[:fields] for line in lines[of]}
      for kind, (of, fields) in _KINDS.items()
    }
    self._forget_cut_off()

  def _forget_cut_off(self) -> None:
    """Drops points of runs that were ended before their cell was written."""
    points = results.read(self.folder, Point)
    whole = [p for p in points if p[:4] in self._finished[CELL]]
    if len(whole) < len(points):
      (self.folder / results.FILES[Point]).unlink()
      results.append(self.folder, whole)

  def has(self, job: Job) -> bool:
    """Whether it is finished, or failed."""
    return _key(job) in self._finished[job.kind]

  def add(self, job: Job, lines: list[Any]) -> None:
    """Keeps what a job left; its last lines say that it is finished."""
    with held():
      results.append(self.folder, lines)
      self._finished[job.kind].add(_key(job))

  @property
  def cells(self) -> list[Cell]:
    """Those finished or failed."""
    return results.read(self.folder, Cell)

  def phases_of(self, model: str, system: str, seed: int) -> list[Phase]:
    """Those of a system that skips nothing; none if they are not known."""
    key = model, system, 'off', seed
    return [x for x in results.read(self.folder, Phase) if x[:4] == key]


def _key(job: Job) -> tuple[Any, ...]:
  """The fields of the job's lines that say which job it was."""
  match job.kind:
    case 'cell' | 'phases':
      return job.model, job.system, job.skip, job.seed
    case 'naive':
      return job.model, job.variant, job.seed
    case 'threshold':
      return job.model, job.seed, job.drop_target
  return (job.model,)


def _check_same(old: dict[str, Any], new: dict[str, Any]) -> None:
  for name in _SAME:
    if old.get(name) != new.get(name):
      raise UserError(
        f'a reproduction goes on with its --{name}, {old.get(name)}',
        got=new.get(name),
        where=f'--{name}',
        hint='use the settings it was started with, or another --workdir',
      )
