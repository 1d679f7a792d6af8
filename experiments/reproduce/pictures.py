"""Redraws the paper's figures from our own runs."""

import itertools

import numpy as np

from experiments.common import page
from experiments.common.page import Picture
from experiments.reproduce import paper
from experiments.reproduce.groups import (
  ALL,
  BASELINES,
  curves_of,
  Key,
  Model,
  name,
  phases_of,
)

_LINES: dict[Key, tuple[str, str]] = {
  ('pinned', 'ours'): ('c1', '-'),
  ('pinned', 'published'): ('c1', '--'),
  ALL: ('c7', '-'),
  ('xdl', 'off'): ('c0', '-'),
  ('dlrm_hybrid', 'off'): ('c3', '-'),
  ('fae', 'off'): ('c2', '-'),
  ('hotline', 'off'): ('c4', '-'),
}
"""Color and line of the systems whose learning curves are drawn."""
_PHASES = {
  **{'data': 'c0', 'unique': 'c5', 'plan': 'c10', 'gather': 'c4', 'put': 'c11'},
  **{'step': 'c2', 'get': 'c1', 'scatter': 'c6', 'host_update': 'c8'},
  **{'choose': 'c3', 'snapshot': 'c9', 'sync': 'c7'},
}
_SPEEDS = ('speed, default policy', 'speed, as published')
_WENT = 0.9  # of its way, after which a row counts as saturated


def speed(model: Model) -> Picture | None:
  """Draws the speed-up over each baseline, beside the paper's claim."""
  against = [
    model.groups[key] for key in (*BASELINES, ALL) if key in model.groups
  ]
  if not any(group.figures.get(kind) for group in against for kind in _SPEEDS):
    return None
  figure, (axis,) = page.figure(1.3 + 0.42 * len(against))
  color, ink = page.color('c1'), page.color('ink')
  kinds = (
    (_SPEEDS[0], 'default policy', 'o', color, color, -0.15),
    (_SPEEDS[1], 'as published', 'o', color, 'none', 0.15),
    ('claim', "paper's claim", 'D', ink, 'none', 0),
    ('ideal, default policy', 'without overhead', '|', ink, 'none', 0),
  )
  for key, label, mark, edge, fill, shift in kinds:
    points = [
      (row + shift, estimate)
      for row, group in enumerate(against)
      if (estimate := group.figures.get(key))
    ]
    axis.plot(
      [estimate.mean for _, estimate in points],
      [row for row, _ in points],
      mark,
      color=edge,
      markerfacecolor=fill,
      markersize=14 if mark == '|' else 6,
      label=label if points else None,
    )
    for row, (_, low, high, _) in points:
      if low is not None and high is not None:
        ends = [max(low, 0.1), min(high, 10)]
        axis.plot(ends, [row] * 2, color=edge, linewidth=1.2)
  axis.axvline(1, color=page.color('muted'), linewidth=1)
  axis.set(xlabel='times as fast', ylim=(len(against) - 0.5, -0.5))
  axis.set_yticks(range(len(against)), [group.name for group in against])
  page.log_axis(axis.xaxis, (1, 2, 3, 5))
  page.legend(figure, 2)
  return Picture(
    'Slipstream against each system',
    figure,
    'Seconds of the system over those of Slipstream: left of 1, Slipstream is '
    'slower. Bars: 95 % intervals over seeds, drawn from 0.1 to 10 at most.',
  )


def learning(model: Model) -> Picture | None:
  """Draws AUC against seconds."""
  curves = curves_of(model)
  listed = [key for key in _LINES if key in curves]
  if not listed:
    return None
  figure, (axis,) = page.figure(3.9)
  for key in listed:
    color, style = _LINES[key]
    look = {'color': page.color(color), 'linewidth': 1.4, 'label': name(key)}
    axis.plot(*zip(*curves[key], strict=True), style, marker='.', **look)
  axis.set(xlabel='seconds of training', ylabel='AUC')
  axis.set_xlim(left=0)
  page.legend(figure, 2)
  return Picture(
    'AUC against time',
    figure,
    'On held-out examples, one seed. The seconds are those of training.',
  )


def phases(model: Model) -> Picture | None:
  """Draws the milliseconds of each phase, stacked."""
  spent = phases_of(model)
  if not spent:
    return None
  figure, (axis,) = page.figure(1.6 + 0.3 * len(spent))
  left = np.zeros(len(spent))
  for phase, color in _PHASES.items():
    width = np.array([ms.get(phase, 0.0) for ms in spent.values()])
    if any(phase in ms for ms in spent.values()):
      axis.barh(
        range(len(spent)),
        width,
        left=left,
        color=page.color(color),
        height=0.7,
        label=phase.replace('_', ' '),
        edgecolor=page.color('paper'),
        linewidth=0.6,
      )
    left += width
  axis.set_yticks(range(len(spent)), map(name, spent))
  axis.set(xlabel='ms per batch', ylim=(len(spent) - 0.5, -0.5))
  page.legend(figure, 4)
  return Picture(
    'Time by phase and system',
    figure,
    'Work in ms per batch. Phases of threads and device overlap, so a bar is '
    'not the time of a batch.',
  )


def skew(model: Model) -> Picture | None:
  """Draws the lookups of each row by its rank, and of all rows up to it."""
  points = sorted(model.rows['skew'], key=lambda row: row['rank'])
  if not points:
    return None
  figure, axes = page.figure(4.2, rows=2, sharex=True)
  ranks = [row['rank'] for row in points]
  hot = model.facts.get('hot_rows')
  columns = ('cumulative_share', 'up to the row, %'), ('share', 'of the row, %')
  for axis, (column, label) in zip(axes, columns, strict=True):
    shares = [100 * row[column] for row in points]
    axis.plot(ranks, shares, color=page.color('c0'), linewidth=1.6)
    axis.set(ylabel=label)
    if hot:
      axis.axvline(hot, color=page.color('c1'), linewidth=1, linestyle='--')
  axes[0].set_ylim(0, 103)
  page.log_axis(axes[1].yaxis)
  page.log_axis(axes[1].xaxis)
  axes[1].set(xlabel='rank of the row')
  return Picture(
    'Access skew',
    figure,
    'Shares of all lookups, rows of all tables by popularity. Dashed: the '
    'number of hot rows.',
  )


def changes(model: Model) -> Picture | None:
  """Draws how far some hot rows are from their start."""
  rows = model.rows['row']
  points = sorted((row['row'], row['batch'], row['change']) for row in rows)
  if not points:
    return None
  last = max(1, *(batch for _, batch, _ in points))
  figure, (axis,) = page.figure(3.1)
  saturated = []
  by_row = itertools.groupby(points, key=lambda point: point[0])
  for number, (_, group) in enumerate(by_row):
    batches, moved = np.array([point[1:] for point in group]).T
    axis.plot(batches, moved, color=page.color(number), linewidth=1.2)
    if moved.max() > 0:  # a row that never moves says nothing
      saturated.append(batches[np.argmax(moved >= _WENT * moved.max())])
  line = paper.SATURATED * last
  axis.axvline(line, color=page.color('muted'), linestyle='--', linewidth=1)
  axis.set(xlabel='batch', ylabel='distance from the start')
  axis.set(ylim=(0, None), xlim=(0, last))
  here = 'Here no row has moved.'
  if saturated:
    share = float(np.median(saturated)) / last
    here = (
      f'Here the median row has gone {_WENT:.0%} of its way at {share:.0%}.'
    )
  return Picture(
    'Row change over time',
    figure,
    'Hot rows drawn at random, by their lookups. Dashed: '
    f'{paper.SATURATED:.0%} of the batches, before which hot rows saturate in '
    f'the paper. {here}',
  )


def thresholds(model: Model) -> Picture | None:
  """Draws drop rate and AUC against the threshold."""
  points = [row for row in model.rows['threshold'] if row.get('threshold')]
  if not points:
    return None
  figure, axes = page.figure(4.2, rows=2, sharex=True)
  columns = ('drop_rate', 100, 'dropped of hot, %'), ('auc', 1, 'AUC')
  for axis, (column, factor, label) in zip(axes, columns, strict=True):
    for number, seed in enumerate(sorted({row['seed'] for row in points})):
      known = sorted(
        (row['threshold'], factor * row[column])
        for row in points
        if row['seed'] == seed and column in row
      )
      if known:
        look = {'color': page.color(number), 'linewidth': 1.3, 'markersize': 4}
        axis.plot(*zip(*known, strict=True), 'o-', **look)
    axis.set(ylabel=label)
  axes[1].set(xlabel='threshold')
  page.log_axis(axes[1].xaxis, (1, 2, 5))
  return Picture(
    'Threshold, drop rate and AUC',
    figure,
    'With the published policy, where a row is stale if it moved by less than '
    'the threshold. A line for each seed.',
  )
