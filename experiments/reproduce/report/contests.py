"""Pictures of systems side by side: times, AUC against time, phases."""

from typing import Any

import numpy as np

from experiments.pages import svg
from experiments.pages.blocks import Picture
from experiments.reproduce.report import findings, paper
from experiments.reproduce.report.groups import (
  BASELINES,
  CONTENDERS,
  groups,
  Key,
  name,
  OURS,
  pace,
  PINNED,
  PUBLISHED,
  Reproduction,
  times,
  without_overhead,
)

WIDTH = 5.2
_LINES: dict[Key, tuple[str, str]] = {
  OURS: ('c1', '-'),
  PUBLISHED: ('c1', '--'),
  PINNED: ('c7', '-'),
  ('xdl', 'off'): ('c0', '-'),
  ('dlrm_hybrid', 'off'): ('c3', '-'),
  ('fae', 'off'): ('c2', '-'),
  ('hotline', 'off'): ('c4', '-'),
}
"""Which curves are drawn, and how; 14 would be too many to tell apart."""
_PHASES = {
  **{'data': 'c0', 'unique': 'c5', 'plan': 'c10'},
  **{'gather': 'c4', 'put': 'c11', 'step': 'c2', 'get': 'c1', 'scatter': 'c6'},
  **{'host_update': 'c8', 'choose': 'c3', 'snapshot': 'c9', 'sync': 'c7'},
}


def speed(results: Reproduction, model: str) -> Picture | None:
  """Compares Slipstream's speed with each baseline's, beside the claim."""
  all_groups = groups(results, model)
  against = [
    all_groups[key]
    for key in [*((system, 'off') for system in BASELINES), PINNED]
    if key in all_groups
  ]
  dots = [
    (row, contender, times(group, all_groups.get(contender), pace))
    for row, group in enumerate(against)
    for contender in CONTENDERS
  ]
  known = [(row, key, dot) for row, key, dot in dots if dot is not None]
  if not known:
    return None

  def paint(axes: np.ndarray) -> None:
    axis = axes[0]
    labels = set()
    for row, contender, dot in known:
      y = row - 0.15 if contender == OURS else row + 0.15
      color, label = svg.color('c1'), CONTENDERS[contender]
      fill = color if contender == OURS else 'none'
      if dot.low is not None and dot.high is not None:
        ends = [max(dot.low, 0.1), min(dot.high, 10)]
        axis.plot(ends, [y, y], color=color, linewidth=1.2)
      axis.plot(
        dot.mean,
        y,
        'o',
        color=color,
        markerfacecolor=fill,
        markersize=6,
        label=None if label in labels else label,
      )
      labels.add(label)
    for row, group in enumerate(against):
      _mark(
        axis,
        row,
        paper.CLAIMS.get(group.key[0]),
        'D',
        "paper's claim",
        labels if model in paper.MODELS else None,
      )
      ideal = without_overhead(all_groups, group, OURS)
      _mark(axis, row, ideal and ideal.mean, '|', 'without overhead', labels)
    axis.axvline(1, color=svg.color('muted'), linewidth=1)
    axis.set(xlabel='times as fast', ylim=(len(against) - 0.5, -0.5))
    axis.set_yticks(range(len(against)), [group.name for group in against])
    svg.plain_log(axis.xaxis, axis.set_xscale, (1, 2, 3, 5))
    axis.figure.legend(loc='outside upper left', ncols=4)

  height = 1.3 + 0.42 * len(against)
  return Picture(
    f'{model}-speed',
    'Slipstream against each system',
    svg.draw(f'{model}-speed', paint, (WIDTH, height)),
    'Seconds of the system over those of Slipstream; left of 1, Slipstream is '
    'slower. Bars: 95 % intervals over seeds, drawn from 0.1 to 10 at most.',
  )


def _mark(
  axis: Any,
  row: int,
  at: float | None,
  marker: str,
  label: str,
  labels: set[str] | None,
) -> None:
  if at is None or labels is None:
    return
  look = {'markersize': 14 if marker == '|' else 6, 'color': svg.color('ink')}
  axis.plot(
    at,
    row,
    marker,
    markerfacecolor='none',
    label=None if label in labels else label,
    **look,
  )
  labels.add(label)


def curve(results: Reproduction, model: str) -> Picture | None:
  """AUC against seconds."""
  curves = findings.curves_of(results, model)
  listed = [key for key in _LINES if key in curves]
  if not listed:
    return None

  def paint(axes: np.ndarray) -> None:
    for key in listed:
      color, style = _LINES[key]
      axes[0].plot(
        *zip(*curves[key], strict=True),
        style,
        label=name(key),
        marker='.',
        color=svg.color(color),
        linewidth=1.4,
        markersize=5,
      )
    axes[0].set(xlabel='seconds of training', ylabel='AUC')
    axes[0].set_xlim(left=0)
    axes[0].figure.legend(loc='outside upper left', ncols=2)

  return Picture(
    f'{model}-auc',
    'AUC against time',
    svg.draw(f'{model}-auc', paint, (WIDTH, 3.9)),
    'On held-out examples, one seed; the seconds are of training alone.',
  )


def phases(results: Reproduction, model: str) -> Picture | None:
  """Milliseconds of each phase, stacked."""
  keys, names, spent = findings.phase_means(results, model)
  if not keys:
    return None

  def paint(axes: np.ndarray) -> None:
    left = np.zeros(len(keys))
    for phase in names:
      width = np.array([spent.get((key, phase), 0.0) for key in keys])
      color = svg.color(_PHASES.get(phase, 'muted'))
      axes[0].barh(
        range(len(keys)),
        width,
        left=left,
        color=color,
        height=0.7,
        label=phase.replace('_', ' '),
        edgecolor=svg.color('paper'),
        linewidth=0.6,
      )
      left += width
    axes[0].set_yticks(range(len(keys)), [name(key) for key in keys])
    axes[0].set(xlabel='ms per batch', ylim=(len(keys) - 0.5, -0.5))
    axes[0].figure.legend(loc='outside upper left', ncols=5)

  return Picture(
    f'{model}-phases',
    'Time by phase and system',
    svg.draw(f'{model}-phases', paint, (WIDTH, 1.6 + 0.3 * len(keys))),
    'Work in ms per batch. Phases of threads and device overlap, so a bar is '
    'not the time of a batch.',
  )
