"""Runs of a comparison as a frame by policy, as a page and as a picture."""

from collections.abc import Sequence
import pathlib
from typing import Any, NamedTuple

from matplotlib import pyplot as plt
import numpy as np

from experiments.common import report
from experiments.common.plots import ACCENT, INK, picture

PLAIN, CONTROL = 'plain', 'random'


class Run(NamedTuple):
  """One line of compare.csv."""

  policy: str
  drop_target: float
  seed: int
  examples_trained: int
  seconds: float
  auc: float
  log_loss: float
  calibration: float | None
  bytes_loaded: int
  bytes_stored: int
  examples_dropped: int
  examples_hot: float | None


LINE = (
  'seed {seed}  {policy} {drop_target:g}: '
  '{examples_trained:,} examples in {seconds:.1f} s, AUC {auc:.4f}'
)
"""One run in one line."""


def by_policy(runs: Sequence[Run]) -> list[dict[str, Any]]:
  """A row for each policy at each drop target: means over the seeds.

  Errors are those of the mean. `auc_lost` is the AUC of the seed's plain run
  less the run's; `of_random` is its mean over that of random dropping with as
  many examples trained, and `of_random_in_time` with as many seconds spent.
  """
  plain = {run.seed: run for run in runs if run.policy == PLAIN}
  groups: dict[tuple[str, float], list[Run]] = {}
  for run in runs:
    groups.setdefault((run.policy, run.drop_target), []).append(run)
  return [
    {
      'policy': policy,
      'drop_target': target,
      **{
        name: _mean([getattr(run, name) for run in group])
        for name in Run._fields[3:-2]
      },
      'auc_error': _error([run.auc for run in group]),
      **_lost(policy, [plain[run.seed].auc - run.auc for run in group]),
      'of_random': _of_random(runs, group, 'examples_trained'),
      'of_random_in_time': _of_random(runs, group, 'seconds'),
    }
    for (policy, target), group in groups.items()
  ]


def _mean(values: Sequence[float | None]) -> float | None:
  known = [value for value in values if value is not None]
  return float(np.mean(known)) if known else None


def _error(values: Sequence[float]) -> float:
  if len(values) < 2:
    return 0.0
  return float(np.std(values, ddof=1) / len(values) ** 0.5)


def _lost(policy: str, losses: list[float]) -> dict[str, float | None]:
  if policy == PLAIN:
    return {'auc_lost': None, 'auc_lost_error': None}
  return {'auc_lost': _mean(losses), 'auc_lost_error': _error(losses)}


def _of_random(
  runs: Sequence[Run], group: list[Run], spent: str
) -> float | None:
  """The group's AUC loss over random's, where as much of `spent` was spent.

  Between drop targets random's AUC is interpolated; the plain run is its
  target 0. Below its highest target its AUC there is taken, which is more than
  random would reach: the figure is then a bound. None for what spends as much
  as the plain run.
  """
  losses = []
  for run in group:
    others = [other for other in runs if other.seed == run.seed]
    best = next(other.auc for other in others if other.policy == PLAIN)
    line = sorted(
      (getattr(other, spent), other.auc)
      for other in others
      if other.policy in (PLAIN, CONTROL)
    )
    spends, aucs = zip(*line, strict=True)
    if getattr(run, spent) >= spends[-1]:
      return None
    losses.append(
      (best - run.auc, best - np.interp(getattr(run, spent), spends, aucs))
    )
  own, random = np.mean(losses, axis=0)
  return float(own / random) if random > 0 else None


def page(data: str, runs: Sequence[Run]) -> str:
  """The comparison in markdown."""
  frame = [
    {
      'policy': row['policy'],
      'drop target': row['drop_target'],
      'examples trained': row['examples_trained'],
      'seconds': row['seconds'],
      'AUC': _with_error(row, 'auc'),
      'AUC lost': _with_error(row, 'auc_lost'),
      "of random's, equal examples": row['of_random'],
      "of random's, equal time": row['of_random_in_time'],
      'log loss': row['log_loss'],
      'calibration': row['calibration'],
      'bytes loaded': row['bytes_loaded'],
      'bytes stored': row['bytes_stored'],
    }
    for row in by_policy(runs)
  ]
  seeds = len({run.seed for run in runs})
  head = f'{data}; {seeds} seeds; mean ± standard error.\n\n'
  hot = _mean([run.examples_hot for run in runs])
  if hot is None:
    return head + report.markdown(frame)
  return (
    f'{head}{report.markdown(frame)}\nHot examples: h = {hot:.1%} of all; '
    'dropping a share D of them can save at most D * h.\n'
  )


def overview(runs: Sequence[Run]) -> list[dict[str, Any]]:
  """What fits a terminal of 80 columns; the page has the rest."""
  return [
    {
      'policy': row['policy'],
      'drop': row['drop_target'],
      'trained': row['examples_trained'],
      'seconds': row['seconds'],
      'AUC': row['auc'],
      'AUC lost': _with_error(row, 'auc_lost'),
      "of random's": row['of_random'],
    }
    for row in by_policy(runs)
  ]


def _with_error(row: dict[str, Any], name: str) -> str:
  if row[name] is None:
    return '-'
  error = row[f'{name}_error']  # 0 of a single seed
  return f'{row[name]:.4f}' + (f' ± {error:.4f}' if error else '')


def plot(
  path: pathlib.Path,
  data: str,
  runs: Sequence[Run],
  curves: Sequence[Sequence[Run]],
) -> None:
  """AUC against examples trained and against seconds.

  The line to beat is the plain run's own learning curve: with as many examples,
  or seconds, one could also just have stopped early.
  """
  rows = [row for row in by_policy(runs) if row['policy'] != PLAIN]
  learning = by_point(curves)
  names = list(dict.fromkeys(row['policy'] for row in rows))
  colors = plt.get_cmap('tab10')(np.linspace(0, 1, 10))
  with picture(path, data, (12, 5.4), sharey=True) as axes:
    for axis, spent, scale in zip(
      axes, ('examples_trained', 'seconds'), (1e6, 1), strict=True
    ):
      _line(axis, learning, spent, scale, 'plain, as it learns', INK, width=2)
      for i, name in enumerate(names):
        points = [row for row in rows if row['policy'] == name]
        points.sort(key=lambda row: row['drop_target'])
        look = {'marker': 'o', 'markersize': 4, 'color': colors[i % 10]}
        if name == CONTROL:
          name = 'random (control)'
          look |= {'color': ACCENT, 'linestyle': '--'}
        _line(axis, points, spent, scale, name, **look)
    axes[0].set(xlabel='million examples trained', ylabel='held-out AUC')
    axes[1].set(xlabel='seconds of training')
    handles, labels = axes[0].get_legend_handles_labels()
    axes[0].figure.legend(handles, labels, loc='outside lower center', ncols=5)
    lowest, highest = min(r.auc for r in runs), max(r.auc for r in runs)
    margin = 0.15 * (highest - lowest) + 1e-4
    axes[0].set_ylim(lowest - margin, highest + margin)


def by_point(curves: Sequence[Sequence[Run]]) -> list[dict[str, float]]:
  """The mean over seeds of each point of the plain runs' learning curves."""
  return [
    {
      'examples_trained': float(
        np.mean([run.examples_trained for run in point])
      ),
      'seconds': float(np.mean([run.seconds for run in point])),
      'auc': float(np.mean([run.auc for run in point])),
      'auc_error': _error([run.auc for run in point]),
    }
    for point in zip(*curves, strict=True)
  ]


def _line(
  axis: Any,
  frame: Sequence[dict[str, Any]],
  spent: str,
  scale: float,
  label: str,
  color: Any,
  width: float = 1.2,
  **look: Any,
) -> None:
  """AUC with its error against what was spent."""
  axis.errorbar(
    [row[spent] / scale for row in frame],
    [row['auc'] for row in frame],
    [row['auc_error'] for row in frame],
    color=color,
    linewidth=width,
    label=label,
    **look,
  )
