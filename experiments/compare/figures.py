"""Computes what policies cost and save, beside the plain run of each seed.

All differences are paired by seed. Intervals are Student's t over the seeds at
95 %, and Fieller's for a share of the loss of random dropping.
"""

from collections.abc import Iterable, Sequence
import math
from typing import Any

import numpy as np

from experiments.common.estimates import (
  Estimate,
  mean,
  ratio,
  seconds_to,
  share,
)
from experiments.compare.results import Cell, CONTROL, PLAIN, Point, Run

Curves = dict[tuple[Any, ...], list[tuple[float, float]]]
"""Seconds and AUC of learning curves, by policy, target and seed."""


def figures_of(
  runs: Sequence[Run], curve: Sequence[Point]
) -> list[dict[str, Any]]:
  """Returns a row for each policy and target, in the order of the runs.

  A row has `policy`, `target` and `seeds`. Its other values are estimates over
  the seeds, or None if unknown. The plain run lacks those that compare a policy
  with it: `AUC lost` and `log loss added`; both over what random dropping loses
  with as many examples trained or in as many seconds; the share of seconds per
  example seen that is `saved`; and how many seeds have `reached` the plain
  run's last AUC, when, and how many `times as fast` as that run.

  Args:
    runs: each seed with its plain run. Seeds without one are ignored.
    curve: the points of their learning curves.
  """
  plain = {run.seed: run for run in runs if run.policy == PLAIN}
  random: dict[int, list[Run]] = {seed: [] for seed in plain}
  cells: dict[Cell, list[Run]] = {}
  for run in runs:
    if run.seed in plain:
      cells.setdefault(Cell(run.policy, run.target), []).append(run)
      if run.policy in (PLAIN, CONTROL):
        random[run.seed].append(run)
  curves: Curves = {}
  for point in curve:
    curves.setdefault(point[:3], []).append((point.seconds, point.auc))
  return [
    _common(cell, group)
    | (_differences(group, plain, random, curves) if cell.target else {})
    for cell, group in cells.items()
  ]


def _common(cell: Cell, group: list[Run]) -> dict[str, Any]:
  known = [run.calibration for run in group if run.calibration is not None]
  promised = [run.promised for run in group if run.promised is not None]
  choosing = [run.seconds_choosing / max(run.seconds, 1e-9) for run in group]
  return {
    **cell._asdict(),
    'seeds': len(group),
    'dropped': mean([run.dropped for run in group]),
    'AUC': _mean(run.auc for run in group),
    'log loss': _mean(run.log_loss for run in group),
    'calibration': _mean(known),
    'examples trained': mean([run.examples_trained for run in group]),
    'seconds': mean([run.seconds for run in group]),
    'choosing': mean(choosing),
    'loaded': mean([run.bytes_loaded for run in group]),
    'stored': mean([run.bytes_stored for run in group]),
    'promised': mean(promised) if promised else None,
  }


def _differences(
  group: list[Run],
  plain: dict[int, Run],
  random: dict[int, list[Run]],
  curves: Curves,
) -> dict[str, Any]:
  pairs = [(run, plain[run.seed]) for run in group]
  saved = [1 - _pace(run) / _pace(one) for run, one in pairs]
  drops = [(part, run) for part, (run, _) in zip(saved, pairs, strict=True)]
  equal = _beside_random(group, random, 'examples_trained', 'auc')
  in_time = _beside_random(group, random, 'seconds', 'auc')
  losses = _beside_random(group, random, 'examples_trained', 'log_loss')
  times = []  # of the plain run and the policy, if both are known
  for run, one in pairs:
    points = curves.get(one[:3], [])
    last = points[-1][1] if points else math.nan
    first = seconds_to(points, last)
    second = seconds_to(curves.get(run[:3], []), last)
    if first is not None and second is not None:
      times.append((first, second))
  return {
    'AUC lost': _mean(one.auc - run.auc for run, one in pairs),
    'log loss added': _mean(run.log_loss - one.log_loss for run, one in pairs),
    "over random's": _share(equal),
    "over random's in equal seconds": _share(in_time),
    "over random's in log loss": _share(losses),
    "AUC less random's": _mean(there - own for own, there in equal),
    'saved': _mean(saved),
    'saved over dropped': _mean(
      x / run.dropped for x, run in drops if run.dropped
    ),
    'reached': f'{len(times)} of {len(group)}',
    'seconds to reach': _mean(second for _, second in times),
    'times as fast': ratio(*zip(*times, strict=True)) if times else None,
  }


def _pace(run: Run) -> float:
  """Seconds per example seen."""
  return run.seconds / max(run.examples_seen, 1)


def _mean(values: Iterable[float]) -> Estimate | None:
  """Returns the mean of values that are all defined, or None."""
  listed = list(values)
  return None if any(map(math.isnan, listed)) else mean(listed)


def _share(pairs: list[tuple[float, float]]) -> Estimate | None:
  if not pairs or np.isnan(pairs).any():
    return None
  return share(*zip(*pairs, strict=True))


def _beside_random(
  group: list[Run], random: dict[int, list[Run]], spent: str, quality: str
) -> list[tuple[float, float]]:
  """Returns what runs lose, and what random dropping loses at equal expense.

  Between targets, random's quality is interpolated. The plain run is its target
  0. A run that spends less than random at its highest target is compared with
  that target, so its true share of random's loss is at most the one returned.
  Returns nothing if a run spends as much as the plain run, or without random.

  Args:
    group: the runs of a policy at a target.
    random: plain and random runs by seed.
    spent: the field of a run that is to be equal.
    quality: the field that is compared.
  """
  sign = -1 if quality == 'log_loss' else 1
  pairs = []
  for run in group:
    others = random[run.seed]
    plain = next(other for other in others if other.policy == PLAIN)
    line = sorted((getattr(x, spent), getattr(x, quality)) for x in others)
    spends, values = zip(*line, strict=True)
    if len(others) < 2 or getattr(run, spent) >= spends[-1]:
      return []
    best = getattr(plain, quality)
    there = float(np.interp(getattr(run, spent), spends, values))
    pairs.append((sign * (best - getattr(run, quality)), sign * (best - there)))
  return pairs


def are_known(runs: Sequence[Run], half: float) -> bool:
  """Whether each policy's AUC less random's is known within `half`."""
  gains = [row.get("AUC less random's") for row in figures_of(runs, [])]
  return all(
    gain.high is not None and gain.high - gain.mean <= half
    for gain in gains
    if gain is not None
  )


def last_rises(curve: Sequence[Point]) -> list[float]:
  """Returns by how much AUC rises in the last fifth of each plain run."""
  aucs = {(p.seed, p.number): p.auc for p in curve if p.policy == PLAIN}
  last = max((number for _, number in aucs), default=0)
  pairs = (
    (auc, aucs.get((seed, last * 4 // 5)))
    for (seed, number), auc in aucs.items()
    if number == last
  )
  return [end - before for end, before in pairs if before is not None]


def mean_curve(
  runs: Sequence[Run], curve: Sequence[Point], cell: Cell, spent: str
) -> list[tuple[float, float]]:
  """Returns a mean learning curve: expense, and AUC less the plain run's last.

  Args:
    runs: the finished runs.
    curve: the points of their learning curves.
    cell: the policy and target of the curve.
    spent: the field of a point that is the expense.
  """
  seeds = {run.seed for run in runs if run.policy == PLAIN}
  ends = {p.seed: p.auc for p in curve if p.policy == PLAIN}  # each seed's last
  by_number: dict[int, list[tuple[float, float]]] = {}
  for point in curve:
    if point[:2] == cell and point.seed in seeds & ends.keys():
      pair = getattr(point, spent), point.auc - ends[point.seed]
      by_number.setdefault(point.number, []).append(pair)
  means = (np.mean(by_number[n], axis=0).tolist() for n in sorted(by_number))
  return [(expense, difference) for expense, difference in means]
