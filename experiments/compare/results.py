"""Keeps the finished runs of a comparison, so that a stopped one can continue.

`compare.csv` has a line for every finished run. `curve.csv` has the points of
the runs' learning curves. The points of a run are written before its line, so
a comparison that is killed anywhere leaves no half of a run.
"""

from collections.abc import Sequence
import math
import pathlib
from typing import Any, NamedTuple, TypeVar

import ml_collections

from experiments.common import results
from slipstream_jax.data.interrupts import held

RUNS, CURVE = 'compare.csv', 'curve.csv'
PLAIN, CONTROL, OURS = 'plain', 'random', 'surprise_offset'
AUTO = 'auto'
"""The config's own policy, with config.skip.drop=auto in place of a target."""
_UNKNOWN = {
  **dict.fromkeys(('auc', 'log_loss'), math.nan),
  **dict.fromkeys(('examples_hot', 'calibration')),
}
"""The values of empty fields."""


class Cell(NamedTuple):
  """A policy at a target, which is trained once for every seed."""

  policy: str
  """`PLAIN`, `AUTO` or a policy's name, which may end with `_small`."""
  target: float
  """Share of the examples to drop, `config.skip.drop`. 0 for the plain run. Of
  `AUTO`, the first one that others have."""


class Run(NamedTuple):
  """A finished run: one line of compare.csv."""

  policy: str
  target: float
  seed: int
  batches: int
  """Batches of the source that it was to read."""
  steps: int
  examples_seen: int
  """Examples of the source, trained or dropped."""
  examples_trained: int
  examples_dropped: int
  examples_hot: float | None
  """Share of the examples with hot rows only, at the last decision."""
  seconds: float
  """Seconds of training alone, without compiling."""
  seconds_choosing: float
  """CPU seconds of choosing, part of `seconds`."""
  auc: float
  log_loss: float
  calibration: float | None
  test_examples: int
  bytes_loaded: int
  bytes_stored: int
  promised: float | None = None
  """The most that dropping costs by the run's own estimates, in log loss. None
  where it makes none: only `AUTO` does."""

  @property
  def dropped(self) -> float:
    """Share of the examples seen."""
    return self.examples_dropped / max(self.examples_seen, 1)


class Point(NamedTuple):
  """A point of a learning curve, scored on some test examples."""

  policy: str
  target: float
  seed: int
  number: int
  """From 1 on. Points of one number have read equally much of the source."""
  examples_seen: int
  examples_trained: int
  seconds: float
  auc: float
  log_loss: float


Line = TypeVar('Line', Run, Point)


class Results:
  """Reads and extends the folder of a comparison.

  Attributes:
    runs: the finished runs, in the order in which they finished.
    curve: the points of their learning curves.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    config: ml_collections.ConfigDict,
    **given: Any,
  ) -> None:
    """Opens an empty folder, or that of a comparison to continue.

    Args:
      workdir: an existing folder.
      config: the comparison's config.
      given: flags that must not change either.

    Raises:
      UserError: the folder holds a comparison with other settings, something
        else, or damaged files.
    """
    self._folder = workdir
    results.keep_config(workdir, config, **given)
    self.runs = _read(workdir / RUNS, Run)
    finished = {run[:3] for run in self.runs}
    # A killed run may have left points without its line.
    points = _read(workdir / CURVE, Point)
    self.curve = [point for point in points if point[:3] in finished]
    self._save()

  def has(self, seed: int, cell: Cell) -> bool:
    """Whether that run is finished."""
    return any(run[:3] == (*cell, seed) for run in self.runs)

  def add(self, run: Run, points: Sequence[Point]) -> None:
    """Keeps a finished run and its learning curve."""
    with held():
      self.curve += points
      self.runs.append(run)
      self._save()

  def _save(self) -> None:
    curve = (point._asdict() for point in self.curve)
    results.write(self._folder / CURVE, Point._fields, curve)
    runs = (run._asdict() for run in self.runs)
    results.write(self._folder / RUNS, Run._fields, runs)


def _read(path: pathlib.Path, kind: type[Line]) -> list[Line]:
  unknown = {name: x for name, x in _UNKNOWN.items() if name in kind._fields}
  rows = results.read(path, kind._fields, ['policy'])
  try:
    return [kind(**{**unknown, **row}) for row in rows]
  except TypeError as error:
    rule = f'a line must hold {", ".join(kind._fields)}'
    raise results.damaged(path, rule, [error]) from error
