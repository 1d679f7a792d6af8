"""Runs of a comparison as a table and as a plot."""

from collections.abc import Iterable
import pathlib
from typing import Any, NamedTuple

from matplotlib import pyplot as plt
import numpy as np

from experiments.common.report import ACCENT, INK, MUTED


class Run(NamedTuple):
  """One line of compare.csv."""

  policy: str
  drop_target: float
  seed: int
  inputs_trained: int
  seconds: float
  auc: float
  log_loss: float
  calibration: float | None
  bytes_loaded: int
  bytes_stored: int
  inputs_dropped: int
  inputs_hot: float | None


class Row(NamedTuple):
  """A policy at a drop target, over all seeds."""

  policy: str
  drop_target: float
  runs: list[Run]
  losses: list[float]
  """AUC of the seed's plain run less this run's."""
  of_random: float | None
  """Mean loss, over that of random dropping with as many inputs trained."""
  of_random_in_time: float | None
  """The same with as many seconds spent."""


def line(run: Run) -> str:
  """One run in one line."""
  return (
    f'seed {run.seed}  {run.policy} {run.drop_target:g}: '
    f'{run.inputs_trained:,} inputs in {run.seconds:.1f} s, AUC {run.auc:.4f}'
  )


def rows_of(runs: list[Run]) -> list[Row]:
  """The runs by policy and target, beside the plain runs of their seeds."""
  plain = {run.seed: run for run in runs if run.policy == 'plain'}
  groups: dict[tuple[str, float], list[Run]] = {}
  for run in runs:
    groups.setdefault((run.policy, run.drop_target), []).append(run)
  return [
    Row(
      policy,
      target,
      group,
      [plain[run.seed].auc - run.auc for run in group],
      _of_random(runs, group, 'inputs_trained'),
      _of_random(runs, group, 'seconds'),
    )
    for (policy, target), group in groups.items()
  ]


def _of_random(runs: list[Run], group: list[Run], spent: str) -> float | None:
  """The group's AUC loss over random's, where as much of `spent` was spent.

  Between drop targets random's AUC is interpolated; the plain run is its
  target 0. Below its highest target its AUC there is taken, which is more than
  random would reach: the figure is then a bound. None for what spends as much
  as the plain run.
  """
  found = []
  for run in group:
    line = sorted(
      (getattr(other, spent), other.auc)
      for other in runs
      if other.seed == run.seed and other.policy in ('plain', 'random')
    )
    best = next(
      r.auc for r in runs if (r.seed, r.policy) == (run.seed, 'plain')
    )
    spends, aucs = zip(*line, strict=True)
    if getattr(run, spent) >= spends[-1]:
      return None
    found.append(
      (best - run.auc, best - np.interp(getattr(run, spent), spends, aucs))
    )
  own, random = np.mean(found, axis=0)
  return float(own / random) if random > 0 else None


def table(data: str, runs: list[Run]) -> str:
  """The comparison in markdown."""
  lines = [
    f'{data}; {len({run.seed for run in runs})} seeds; mean ± standard error.',
    '',
    '| policy | drop target | inputs trained | seconds | AUC | AUC lost | '
    "of random's, equal inputs | equal seconds | log loss | calibration | "
    'MB loaded | MB stored |',
    '| --- |' + ' ---: |' * 11,
  ]
  for row in rows_of(runs):
    lines.append('| ' + ' | '.join(_cells(row)) + ' |')
  shares = [run.inputs_hot for run in runs if run.inputs_hot is not None]
  if shares:
    hot = float(np.mean(shares))
    lines += [
      '',
      f'Hot inputs: h = {hot:.1%} of all; dropping a share D of them can save '
      f'at most D * h.',
    ]
  return '\n'.join(lines) + '\n'


def _cells(row: Row) -> list[str]:
  def mean(name: str, form: str, scale: float = 1) -> str:
    return format(np.mean([getattr(r, name) for r in row.runs]) * scale, form)

  def ratio(value: float | None) -> str:
    return '-' if value is None else f'{value:.2f}'

  return [
    row.policy,
    f'{row.drop_target:g}',
    mean('inputs_trained', ',.0f'),
    mean('seconds', '.1f'),
    _with_error([run.auc for run in row.runs]),
    '-' if row.policy == 'plain' else _with_error(row.losses),
    ratio(row.of_random),
    ratio(row.of_random_in_time),
    mean('log_loss', '.4f'),
    mean('calibration', '.3f'),
    mean('bytes_loaded', ',.0f', 1e-6),
    mean('bytes_stored', ',.0f', 1e-6),
  ]


def _with_error(values: list[float]) -> str:
  if len(values) < 2:
    return f'{values[0]:.4f}'
  return f'{np.mean(values):.4f} ± {_error(values):.4f}'


def _error(values: Iterable[float]) -> float:
  values = list(values)
  if len(values) < 2:
    return 0.0
  return float(np.std(values, ddof=1) / len(values) ** 0.5)


def plot(
  path: pathlib.Path, data: str, runs: list[Run], curves: list[list[Run]]
) -> None:
  """AUC against inputs trained and against seconds.

  The line to beat is the plain run's own learning curve: with as many inputs,
  or seconds, one could also just have stopped early.
  """
  figure, axes = plt.subplots(
    1, 2, figsize=(12, 5.4), sharey=True, layout='constrained'
  )
  for axis, spent, scale in zip(
    axes, ('inputs_trained', 'seconds'), (1e6, 1), strict=True
  ):
    _plain_curve(axis, curves, spent, scale)
    _policies(
      axis, [r for r in rows_of(runs) if r.policy != 'plain'], spent, scale
    )
    axis.grid(alpha=0.25)
    axis.spines[['top', 'right']].set_visible(False)
  axes[0].set(xlabel='million inputs trained', ylabel='held-out AUC')
  axes[1].set(xlabel='seconds of training')
  handles, labels = axes[0].get_legend_handles_labels()
  figure.legend(handles, labels, loc='outside lower center', ncols=5)
  lowest = min(run.auc for run in runs)
  highest = max(run.auc for run in runs)
  margin = 0.15 * (highest - lowest) + 1e-4
  axes[0].set_ylim(lowest - margin, highest + margin)
  figure.suptitle(data, fontsize=9, color=MUTED)
  figure.savefig(path, dpi=130)
  plt.close(figure)


def _plain_curve(
  axis: Any, curves: list[list[Run]], spent: str, scale: float
) -> None:
  spends = np.mean([[getattr(r, spent) for r in c] for c in curves], axis=0)
  aucs = np.array([[run.auc for run in curve] for curve in curves])
  errors = [_error(column) for column in aucs.T]
  axis.errorbar(
    spends / scale,
    aucs.mean(axis=0),
    errors,
    color=INK,
    linewidth=2,
    label='plain, as it learns',
  )


def _policies(axis: Any, rows: list[Row], spent: str, scale: float) -> None:
  names = list(dict.fromkeys(row.policy for row in rows))
  others = plt.get_cmap('tab10')(np.linspace(0, 1, 10))
  for i, name in enumerate(names):
    mine = sorted(
      (row for row in rows if row.policy == name),
      key=lambda row: row.drop_target,
    )
    control = name == 'random'
    axis.errorbar(
      [np.mean([getattr(r, spent) for r in row.runs]) / scale for row in mine],
      [np.mean([r.auc for r in row.runs]) for row in mine],
      [_error(r.auc for r in row.runs) for row in mine],
      color=ACCENT if control else others[i % 10],
      linestyle='--' if control else '-',
      marker='o',
      markersize=4,
      linewidth=1.2,
      label='random (control)' if control else name,
    )
