"""What runs add up to: policies beside the plain run, seed by seed.

All differences are paired: of a run and the others of its seed. Intervals are
Student's t over the seeds, at 95 %, and Fieller's for a share of random's loss.
"""

from collections.abc import Callable, Iterable, Sequence
import itertools
import math
from typing import NamedTuple

import numpy as np

from experiments.compare.grid import Cell
from experiments.compare.lines import CONTROL, PLAIN, Point, Run
from experiments.pages.estimates import Estimate, mean, ratio, share


class Figures(NamedTuple):
  """A policy at a target, over its seeds; None is not known."""

  cell: Cell
  seeds: int
  trained: float
  """Examples, on average."""
  dropped: Estimate
  """Share of the examples seen."""
  auc: Estimate | None
  log_loss: Estimate | None
  calibration: Estimate | None
  auc_lost: Estimate | None
  """AUC of the plain run less this one's; None of the plain run itself."""
  loss_gained: Estimate | None
  """Log loss less that of the plain run."""
  against_random: Estimate | None
  """AUC less that of random dropping which trained as many examples."""
  of_random: Estimate | None
  """AUC lost, over what random loses that trained as many examples."""
  of_random_in_time: Estimate | None
  """The same of random that spent as many seconds."""
  of_random_log_loss: Estimate | None
  """Log loss gained, over what random gains with as many examples."""
  seconds: float
  choosing: float
  """Share of them, as CPU time."""
  saved: Estimate | None
  """Share of the seconds that a plain run takes for as many examples seen."""
  saved_of_dropped: Estimate | None
  """That over the share dropped."""
  reached: int
  """Seeds whose learning curve reaches the plain run's last AUC."""
  seconds_to: float | None
  """On average, of those seeds."""
  times_as_fast: Estimate | None
  """Seconds in which the plain run first has that AUC, over those: of those."""
  bytes_loaded: float
  bytes_stored: float

  @property
  def is_plain(self) -> bool:
    """Whether nothing is dropped."""
    return self.cell.policy == PLAIN


def figures_of(runs: Sequence[Run], curve: Sequence[Point]) -> list[Figures]:
  """Those of each policy at each target, in the order of the runs.

  Args:
    runs: each seed with its plain run; runs of other seeds are left out.
    curve: points of their learning curves.
  """
  plain = {run.seed: run for run in runs if run.policy == PLAIN}
  control = {
    seed: [
      run for run in runs if run.seed == seed and run.policy in (PLAIN, CONTROL)
    ]
    for seed in plain
  }
  to_plain = {
    run[:3]: seconds_to(_curve(curve, run), _last(curve, plain[run.seed]))
    for run in runs
    if run.seed in plain
  }
  cells: dict[Cell, list[Run]] = {}
  for run in runs:
    if run.seed in plain:
      cells.setdefault(Cell(run.policy, run.target), []).append(run)
  return [
    _figures(cell, group, plain, control, to_plain)
    for cell, group in cells.items()
  ]


def _figures(
  cell: Cell,
  group: list[Run],
  plain: dict[int, Run],
  control: dict[int, list[Run]],
  to_plain: dict[tuple[str, float, int], float | None],
) -> Figures:
  drops = cell.policy != PLAIN
  pairs = [(run, plain[run.seed]) for run in group]
  lost = [one.auc - run.auc for run, one in pairs]
  gained = [run.log_loss - one.log_loss for run, one in pairs]
  saved = [1 - run.pace / one.pace for run, one in pairs]
  beside = [(run, control[run.seed]) for run in group]
  equal = _of_control(beside, 'examples_trained', 'auc')
  times = [(to_plain[PLAIN, 0.0, run.seed], to_plain[run[:3]]) for run in group]
  known = [(a, b) for a, b in times if a is not None and b is not None]
  dropped = mean([run.dropped for run in group])
  assert dropped is not None  # there is a run
  ratios = [
    part / run.dropped
    for part, run in zip(saved, group, strict=True)
    if run.dropped
  ]
  return Figures(
    cell,
    len(group),
    _average(run.examples_trained for run in group),
    dropped,
    _mean([run.auc for run in group]),
    _mean([run.log_loss for run in group]),
    _mean([run.calibration for run in group if run.calibration is not None]),
    _mean(lost) if drops else None,
    _mean(gained) if drops else None,
    _mean([there - own for own, there in equal]) if drops and equal else None,
    _share(equal) if drops else None,
    _share(_of_control(beside, 'seconds', 'auc')) if drops else None,
    _share(_of_control(beside, 'examples_trained', 'log_loss'))
    if drops
    else None,
    _average(run.seconds for run in group),
    _average(run.seconds_choosing / max(run.seconds, 1e-9) for run in group),
    _mean(saved) if drops else None,
    _mean(ratios) if drops else None,
    len(known),
    _average(b for _, b in known) if known else None,
    ratio(*zip(*known, strict=True)) if drops and known else None,
    _average(run.bytes_loaded for run in group),
    _average(run.bytes_stored for run in group),
  )


def _average(values: Iterable[float]) -> float:
  return float(np.mean(list(values)))


def _mean(values: Sequence[float]) -> Estimate | None:
  """Of what is defined for all seeds, or not at all."""
  return None if any(map(math.isnan, values)) else mean(values)


def _share(pairs: list[tuple[float, float]]) -> Estimate | None:
  if not pairs or any(map(math.isnan, itertools.chain(*pairs))):
    return None
  own, others = zip(*pairs, strict=True)
  return share(own, others)


def _of_control(
  beside: list[tuple[Run, list[Run]]], spent: str, quality: str
) -> list[tuple[float, float]]:
  """What runs lose to the plain run, and what random would for the same price.

  Between targets random's quality is interpolated; the plain run is its target
  0. Below its highest target that one's quality is taken, which is more than
  random would reach: what is lost is then at least so large a share of it.
  Empty where a run spends as much as the plain run does, or there is no random.

  Args:
    beside: runs, each with plain run and random ones of its seed.
    spent: field of a run that is to be equal.
    quality: field that is compared.
  """
  sign = -1 if quality == 'log_loss' else 1
  pairs = []
  for run, others in beside:
    plain = next(other for other in others if other.policy == PLAIN)
    line = sorted((getattr(x, spent), getattr(x, quality)) for x in others)
    spends, values = zip(*line, strict=True)
    price = getattr(run, spent)
    if len(others) < 2 or price >= spends[-1]:
      return []
    best = getattr(plain, quality)
    there = float(np.interp(price, spends, values))
    pairs.append((sign * (best - getattr(run, quality)), sign * (best - there)))
  return pairs


def _curve(curve: Sequence[Point], run: Run) -> list[Point]:
  return [point for point in curve if point[:3] == run[:3]]


def _last(curve: Sequence[Point], run: Run) -> float:
  points = _curve(curve, run)
  return points[-1].auc if points else math.nan


def seconds_to(points: Sequence[Point], auc: float) -> float | None:
  """When a learning curve first has an AUC, on the line between two points.

  None where it never has, or the curve or the AUC is not known. A curve whose
  first point is there already says no more than that point's seconds.
  """
  before: Point | None = None
  for point in points:
    if point.auc >= auc:
      if before is None:
        return point.seconds
      part = (auc - before.auc) / (point.auc - before.auc)
      return before.seconds + part * (point.seconds - before.seconds)
    before = point
  return None


def less_plain(
  runs: Sequence[Run],
  curve: Sequence[Point],
  cell: Cell,
  spent: Callable[[Point], float],
) -> list[tuple[float, float]]:
  """A mean learning curve: what was spent, and AUC less the plain run's last.

  Args:
    runs: as in `figures_of`.
    curve: likewise.
    cell: whose curve.
    spent: of a point.
  """
  plain = {run.seed: _last(curve, run) for run in runs if run.policy == PLAIN}
  by_number: dict[int, list[Point]] = {}
  for point in curve:
    if point[:2] == cell and point.seed in plain:
      by_number.setdefault(point.number, []).append(point)
  return [
    (
      _average(map(spent, points)),
      _average(point.auc - plain[point.seed] for point in points),
    )
    for _, points in sorted(by_number.items())
  ]
