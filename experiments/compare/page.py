"""Writes what a comparison found: a page, and a picture."""

from collections.abc import Mapping, Sequence
import math
import pathlib
from typing import Any

import ml_collections
import numpy as np

from experiments.common import page, report
from experiments.common.estimates import (
  change,
  Estimate,
  Form,
  middle,
  NONE,
  percent,
  quality,
  sure,
  times,
)
from experiments.common.usage import keys_of
from experiments.compare.figures import figures_of, last_rises, mean_curve
from experiments.compare.results import (
  AUTO,
  Cell,
  CONTROL,
  OURS,
  PLAIN,
  Point,
  Run,
)

HTML, PICTURE = 'compare.html', 'compare.png'
_QUALITY = ('dropped', 'AUC', 'AUC lost', 'log loss added', 'calibration')
_TABLES = {
  'Quality': (*_QUALITY, 'seeds'),
  'Beside random dropping': (
    *("over random's", "over random's in equal seconds"),
    *("over random's in log loss", "AUC less random's"),
  ),
  'Time and bytes': (
    *('examples trained', 'seconds', 'choosing', 'saved', 'saved over dropped'),
    *('reached', 'seconds to reach', 'times as fast', 'loaded', 'stored'),
  ),
}
_PLAIN = (
  *('examples trained', 'AUC', 'log loss', 'calibration', 'seconds'),
  *('loaded', 'stored', 'seeds'),
)
_FORMS: dict[str, Form] = {
  **dict.fromkeys(('AUC', 'log loss'), quality),
  **dict.fromkeys(('AUC lost', 'log loss added', "AUC less random's"), change),
  **dict.fromkeys(('dropped', 'choosing', 'saved'), percent),
  **dict.fromkeys(('seconds', 'seconds to reach'), '{:,.2f}'.format),
  **dict.fromkeys(('loaded', 'stored'), report.size),
  **{'examples trained': '{:,.0f}'.format, 'calibration': '{:.3f}'.format},
}
"""Functions that write figures. Figures without one are ratios."""
_SURE = {'AUC lost', 'log loss added', "over random's", "AUC less random's"}
_SURE |= {'saved', 'saved over dropped', 'times as fast'}  # with intervals
_NOTES = [
  'All runs of a seed have the same data, model and hot rows. Differences are '
  'paired by seed. Intervals in brackets are at 95 %: Student t, or Fieller '
  'for a share of the loss of random dropping. A dash means unknown.',
  '"Asked" is the target of skip.drop. "Dropped" is the share of the examples '
  'seen that were really dropped.',
  '"Over random\'s" is the AUC that a policy loses, divided by what random '
  'dropping loses with as many examples trained. 1 is no better than chance. '
  '0 loses nothing. The loss of random is interpolated between its targets. A '
  'policy that trains less than random at its highest target is compared with '
  'that target, so that its share is at most the one shown.',
  'Seconds are of training alone, without compiling and scoring. "Choosing" is '
  'the CPU time of policies as a share of them. "Saved" is a share of what the '
  'plain run takes for as many examples seen.',
  '"Reached" counts the seeds whose learning curve has the AUC with which the '
  'plain run ends. The seconds to reach it, and how many times as fast that '
  'is, are of these seeds.',
  'All figures are computed from compare.csv and curve.csv beside this page.',
]
_COLORS = {
  **{PLAIN: 'ink', CONTROL: 'c7', 'surprise': 'c0', OURS: 'c1'},
  **{'negatives': 'c2', 'local_case_control': 'c3', 'infobatch_once': 'c4'},
  'stale': 'c6',
}
_RISE = 0.0005  # of AUC, in each seed. More is no noise
_OTHERS = ('c5', 'c8', 'c9', 'c11', 'c10')
_EARLY = 'plain run, stopped after as many examples'


def write(
  folder: pathlib.Path,
  data: str,
  synthetic: bool,
  runs: Sequence[Run],
  curve: Sequence[Point],
  about: str,
  config: ml_collections.ConfigDict,
) -> None:
  """Writes the page, and its first picture as a file.

  Args:
    folder: where to write.
    data: the name of the data set.
    synthetic: whether it is made up.
    runs: the finished runs.
    curve: the points of their learning curves.
    about: what was run, where and when.
    config: the config that all runs share.
  """
  rows = figures_of(runs, curve)
  groups: dict[float, list[dict[str, Any]]] = {}
  for row in rows:
    groups.setdefault(row['target'], []).append(row)
  plain = [_cells(row, _PLAIN) for row in groups.pop(0.0, [])]
  pictures = _pictures(rows, runs, curve)
  if pictures:  # the file alone must say what data it is of
    figure = pictures[0].figure
    text = figure.supxlabel(data, fontsize=8, color=page.color('muted'))
    figure.savefig(folder / PICTURE, dpi=180)
    text.remove()
  settings = [
    {'key': f'config.{key}', 'value': str(value)}
    for key, value in keys_of(config)
    if value is not None
  ]
  page.write(
    folder / HTML,
    f'What dropping costs: {data}',
    [
      page.Section(
        'In short',
        [
          *pictures,
          page.Table('The plain run', plain),
          *([words] if (words := warnings(runs, curve)) else []),
        ],
      ),
      *(
        page.Section(f'{target:.0%} asked', _tables(group))
        for target, group in groups.items()
      ),
      page.Section('How to read this', [_NOTES]),
      page.Section('Settings', [page.Table('', settings)]),
    ],
    'SYNTHETIC DATA: its figures say nothing about real clicks.'
    if synthetic
    else '',
    about,
  )


def overview(
  runs: Sequence[Run], curve: Sequence[Point]
) -> list[dict[str, str]]:
  """Returns the most important figures as text that fits 80 columns."""

  def half(estimate: Estimate | None) -> str:
    text = middle(estimate, change)
    if estimate is None or estimate.high is None:
      return text
    return f'{text} ±{estimate.high - estimate.mean:.4f}'

  return [
    {
      'policy': row['policy'],
      'asked': AUTO if row['policy'] == AUTO else f'{row["target"]:.0%}',
      'dropped': middle(row['dropped'], percent),
      'AUC': middle(row['AUC'], quality),
      'AUC lost': half(row.get('AUC lost')),
      'log loss added': half(row.get('log loss added')),
      '/ random': middle(row.get("over random's"), times),
    }
    for row in figures_of(runs, curve)
  ]


def warnings(runs: Sequence[Run], curve: Sequence[Point]) -> list[str]:
  """Returns what to know before the figures are used.

  Whether plain training has not come to its end, which policies lose as much as
  random dropping, and what `AUTO` has promised.
  """
  words, rises = [], last_rises(curve)
  if rises and all(rise > _RISE for rise in rises):
    words.append(
      'the plain run is still learning at its end: in its last fifth its AUC'
      f' rises by {np.mean(rises):.4f}, so see what dropping costs at higher'
      ' rates (config.optimizer), or with more --epochs'
    )
  for row in figures_of(runs, curve):
    if row['policy'] == AUTO and row['promised'] is not None:
      words.append(
        f'auto promised to add at most {row["promised"].mean:.4f} to the log'
        f' loss, and added {sure(row["log loss added"], change)}'
      )
    gain: Estimate | None = row.get("AUC less random's")
    if gain is None or gain.mean > 0 or row['policy'].startswith(CONTROL):
      continue
    known = gain.high is not None and gain.high < 0
    words.append(
      f'{row["policy"]} at {row["target"]:.0%} is'
      f' {"" if known else "perhaps "}worse than random dropping on these data:'
      f" its AUC less random's is {sure(gain, change)}, so drop at random, or"
      ' less'
    )
  return words


def _tables(group: Sequence[dict[str, Any]]) -> list[page.Table]:
  ours = [n for n, row in enumerate(group) if row['policy'] == OURS]
  return [
    page.Table(title, [_cells(row, names) for row in group], strong=ours)
    for title, names in _TABLES.items()
  ]


def _cells(row: dict[str, Any], names: Sequence[str]) -> dict[str, str]:
  return {'policy': row['policy'], **{name: _cell(row, name) for name in names}}


def _cell(row: dict[str, Any], name: str) -> str:
  """Writes a figure, with its interval if that is known and of interest."""
  value, form = row.get(name), _FORMS.get(name, times)
  if not isinstance(value, Estimate):
    return NONE if value is None else str(value)
  return (sure if name in _SURE else middle)(value, form)


def _pictures(
  rows: Sequence[dict[str, Any]], runs: Sequence[Run], curve: Sequence[Point]
) -> list[page.Picture]:
  """Returns what dropping costs, and how fast policies learn."""
  known = [row for row in rows if row.get('AUC lost') is not None]
  if not known:
    return []
  targets = sorted({row['target'] for row in known})
  plain = Cell(PLAIN, 0.0)
  early = mean_curve(runs, curve, plain, 'examples_trained')
  cost = _cost_at_targets if len(targets) > 1 else _cost_at_target
  pictures = [
    page.Picture(
      'What dropping costs',
      cost(known, early),
      "The plain run's AUC less the policy's: mean over seeds with 95 % "
      'intervals. The plain run could also be stopped early.',
    )
  ]
  if curve:
    target = targets[len(targets) // 2]
    cells = [Cell(r['policy'], target) for r in known if r['target'] == target]
    curves = {
      cell.policy: mean_curve(runs, curve, cell, 'seconds')
      for cell in (plain, *cells)
    }
    pictures.append(
      page.Picture(
        f'Learning curves, {target:.0%} asked',
        _learning(curves),
        'Held-out AUC less the AUC with which the plain run of the seed ends, '
        'mean over seeds. The first third is not shown.',
      )
    )
  return pictures


def _look(policy: str) -> dict[str, Any]:
  """Returns the color and line of a policy."""
  base = policy.removesuffix('_small')
  other = _OTHERS[sum(map(ord, base)) % len(_OTHERS)]
  style = ':' if base != policy else '--' if policy == CONTROL else '-'
  color = page.color(_COLORS.get(base, other))
  width = 2.0 if policy in (PLAIN, OURS) else 1.3
  return {'color': color, 'linestyle': style, 'linewidth': width}


def _limits(values: Sequence[float]) -> tuple[float, float]:
  """Returns the ends of an axis. Intervals and early points may exceed it."""
  known = [0.0, *(value for value in values if math.isfinite(value))]
  margin = 0.08 * (max(known) - min(known)) + 1e-4
  return min(known) - margin, max(known) + margin


def _cost_at_target(
  rows: Sequence[dict[str, Any]], early: Sequence[tuple[float, float]]
) -> Any:
  """Draws a bar for each policy, the one that loses least on top."""
  rows = sorted(rows, key=lambda row: float(row['AUC lost'].mean), reverse=True)
  figure, (axis,) = page.figure(1.1 + 0.32 * len(rows))
  ink, ends = page.color('ink'), []
  for place, row in enumerate(rows):
    lost, color = row['AUC lost'], _look(row['policy'])['color']
    axis.barh(place, lost.mean, 0.68, color=color)
    ends.append(lost.mean)
    if lost.high is not None:
      axis.plot([lost.low, lost.high], [place] * 2, color=ink, linewidth=1)
    if early:
      spent, differences = zip(*early, strict=True)
      ends.append(-np.interp(row['examples trained'].mean, spent, differences))
      edges = [place - 0.42, place + 0.42]
      label = None if place else _EARLY
      axis.plot(ends[-1:] * 2, edges, color=ink, linewidth=2.2, label=label)
  axis.axvline(0, color=page.color('muted'), linewidth=1)
  dropped = (percent(row['dropped'].mean) for row in rows)
  names = [
    f'{row["policy"]}, {share} dropped'
    for row, share in zip(rows, dropped, strict=True)
  ]
  axis.set_yticks(range(len(rows)), names)
  axis.set(xlabel='AUC lost', xlim=_limits(ends))
  axis.grid(visible=False, axis='y')
  if early:
    page.legend(figure)
  return figure


def _cost_at_targets(
  rows: Sequence[dict[str, Any]], early: Sequence[tuple[float, float]]
) -> Any:
  """Draws AUC lost against the share of examples that were dropped."""
  figure, (axis,) = page.figure(4.8)
  if early:
    spent, differences = np.transpose(early)
    shares = 100 * (1 - spent / spent[-1])
    axis.plot(shares, -differences, label=_EARLY, **_look(PLAIN))
  for name in dict.fromkeys(row['policy'] for row in rows):
    group = [row for row in rows if row['policy'] == name]
    group.sort(key=lambda row: float(row['dropped'].mean))
    xs, look = [100 * row['dropped'].mean for row in group], _look(name)
    ys = [row['AUC lost'].mean for row in group]
    axis.plot(xs, ys, marker='o', markersize=4, label=name, **look)
    for x, row in zip(xs, group, strict=True):
      if row['AUC lost'].high is not None:
        ends = row['AUC lost'][1:3]
        axis.plot([x] * 2, ends, color=look['color'], linewidth=0.9)
  axis.set(
    xlabel='examples dropped, %',
    ylabel='AUC lost',
    xlim=(0, 106 * max(row['dropped'].mean for row in rows)),
    ylim=_limits([row['AUC lost'].mean for row in rows]),
  )
  axis.axhline(0, color=page.color('muted'), linewidth=1)
  page.legend(figure, columns=2)
  return figure


def _learning(curves: Mapping[str, Sequence[tuple[float, float]]]) -> Any:
  """Draws learning curves by policy, against seconds of training."""
  figure, (axis,) = page.figure(4.4)
  heights: list[float] = []
  for name, points in curves.items():
    if points:
      seconds, differences = zip(*points, strict=True)
      axis.plot(seconds, differences, label=name, **_look(name))
      heights += differences[len(points) // 3 :]
  axis.set(
    xlabel='seconds of training',
    ylabel="AUC less the plain run's last",
    ylim=_limits(heights),
  )
  axis.axhline(0, color=page.color('muted'), linewidth=1)
  if heights:
    page.legend(figure)
  return figure
