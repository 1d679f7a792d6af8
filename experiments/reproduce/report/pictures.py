"""The paper's figures, redrawn from our own runs."""

from collections.abc import Callable, Sequence
import itertools

from matplotlib import ticker
import numpy as np

from experiments.pages import svg
from experiments.pages.blocks import Picture
from experiments.reproduce.report import contests, findings, paper
from experiments.reproduce.report.contests import WIDTH
from experiments.reproduce.report.groups import Reproduction


def of_systems(results: Reproduction, model: str) -> list[Picture]:
  """Systems side by side, as far as there is something to draw."""
  return _drawn(results, model, (contests.speed, contests.curve))


def of_rows(results: Reproduction, model: str) -> list[Picture]:
  """What rows do, and what work they make, as far as there is some to draw."""
  makers = (contests.phases, skew, changes, naive, thresholds)
  return _drawn(results, model, makers)


def _drawn(
  results: Reproduction,
  model: str,
  makers: Sequence[Callable[[Reproduction, str], Picture | None]],
) -> list[Picture]:
  drawn = [make(results, model) for make in makers]
  return [picture for picture in drawn if picture is not None]


def skew(results: Reproduction, model: str) -> Picture | None:
  """Lookups of each row by its rank, and of all rows up to it."""
  points = sorted(line for line in results.skew if line.model == model)
  if not points:
    return None
  hot = results.setting_of(model).get('hot_rows')

  def paint(axes: np.ndarray) -> None:
    ranks = [line.rank for line in points]
    looks = {'color': svg.color('c0'), 'linewidth': 1.6}
    axes[0].plot(ranks, [100 * x.cumulative_share for x in points], **looks)
    axes[0].set(ylabel='up to the row, %', ylim=(0, 103))
    axes[1].plot(ranks, [100 * line.share for line in points], **looks)
    axes[1].set(ylabel='of the row, %', xlabel='rank of the row')
    axes[1].set_yscale('log')
    axes[1].yaxis.set_major_formatter(ticker.FuncFormatter(svg.plain))
    for axis in axes:
      svg.plain_log(axis.xaxis, axis.set_xscale)
      if hot:
        axis.axvline(hot, color=svg.color('c1'), linewidth=1, linestyle='--')
    if hot:
      axes[0].text(
        hot, 4, 'hot rows ', color=svg.color('c1'), ha='right', fontsize=9
      )

  return Picture(
    f'{model}-skew',
    'Access skew',
    svg.draw(f'{model}-skew', paint, (WIDTH, 4.2), rows=2, sharex=True),
    'Shares of all lookups, rows of all tables by popularity.',
  )


def changes(results: Reproduction, model: str) -> Picture | None:
  """How far some hot rows are from where they were."""
  lines = sorted(line for line in results.changes if line.model == model)
  if not lines:
    return None
  last = max(line.batch for line in lines)

  def paint(axes: np.ndarray) -> None:
    rows = itertools.groupby(lines, key=lambda line: line.row)
    for number, (_, group) in enumerate(rows):
      xs, ys = zip(*((x.batch, x.change) for x in group), strict=True)
      axes[0].plot(xs, ys, color=svg.series(number), linewidth=1.2)
    at = paper.SATURATED * last
    axes[0].axvline(at, color=svg.color('muted'), linestyle='--', linewidth=1)
    axes[0].set(xlabel='batch', ylabel='distance from the start')
    axes[0].set(ylim=(0, None), xlim=(0, last))

  moved = findings.saturation(results, model)
  here = 'Here no row has moved.'
  if moved is not None:
    here = (
      f'Here the median row has gone nine tenths of its way after {moved:.0%}.'
    )
  return Picture(
    f'{model}-rows',
    'Row change over time',
    svg.draw(f'{model}-rows', paint, (WIDTH, 3.1)),
    'Hot rows drawn at random, by their lookups; dashed: '
    f'{paper.SATURATED:.0%} of the batches, before which the paper sees hot '
    f'rows saturate. {here}',
  )


def naive(results: Reproduction, model: str) -> Picture | None:
  """AUC where no rows, all hot or all cold ones stand still."""
  lines = [x for x in results.naive if x.model == model and x.auc is not None]
  if not lines:
    return None
  variants = list(dict.fromkeys(line.variant for line in lines))

  def paint(axes: np.ndarray) -> None:
    for axis, key, factor, label in (
      (axes[0], 'accuracy', 100, 'accuracy, %'),
      (axes[1], 'auc', 1, 'AUC'),
    ):
      for row, variant in enumerate(variants):
        mine = [getattr(x, key) for x in lines if x.variant == variant]
        known = [factor * x for x in mine if x is not None]
        color = svg.series(row)
        axis.plot(known, [row] * len(known), 'o', color=color, alpha=0.45)
        if known:
          axis.plot(np.mean(known), row, '|', color=color, markersize=18)
      axis.set_yticks(range(len(variants)), variants)
      axis.set(xlabel=label, ylim=(len(variants) - 0.5, -0.5))
      axis.xaxis.set_major_locator(ticker.MaxNLocator(5))

  return Picture(
    f'{model}-naive',
    'Naive skipping',
    svg.draw(f'{model}-naive', paint, (WIDTH, 3.3), rows=2),
    'Which rows stand still after the warm-up. Dots are seeds, bars means.',
  )


def thresholds(results: Reproduction, model: str) -> Picture | None:
  """Drop rate and AUC against the threshold."""
  lines = [
    line
    for line in results.thresholds
    if line.model == model and line.threshold
  ]
  if not lines:
    return None

  def paint(axes: np.ndarray) -> None:
    for axis, key, factor, label in (
      (axes[0], 'drop_rate', 100, 'dropped of hot, %'),
      (axes[1], 'auc', 1, 'AUC'),
    ):
      for number, seed in enumerate(sorted({line.seed for line in lines})):
        points = sorted(
          (line.threshold, factor * getattr(line, key))
          for line in lines
          if line.seed == seed and getattr(line, key) is not None
        )
        if points:
          axis.plot(
            *zip(*points, strict=True),
            'o-',
            color=svg.series(number),
            linewidth=1.3,
            markersize=4,
            label=f'seed {seed}',
          )
      axis.set(ylabel=label)
    axes[1].set(xlabel='threshold')
    svg.plain_log(axes[1].xaxis, axes[1].set_xscale, (1, 2, 5))
    if axes[0].lines:
      axes[0].legend()

  return Picture(
    f'{model}-thresholds',
    'Threshold, drop rate and AUC',
    svg.draw(f'{model}-thresholds', paint, (WIDTH, 4.2), rows=2, sharex=True),
    'As the paper skips: a row is stale that moved by less than the threshold.',
  )
