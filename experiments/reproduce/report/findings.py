"""Tables of what the paper's figures show."""

import itertools

import numpy as np

from experiments.pages import words
from experiments.pages.blocks import Table
from experiments.pages.estimates import mean
from experiments.pages.words import middle, number
from experiments.reproduce.grid import OFF
from experiments.reproduce.report import paper
from experiments.reproduce.report.groups import (
  in_order,
  Key,
  name,
  Reproduction,
)
from experiments.reproduce.report.tables import SURE
from experiments.reproduce.results import PHASES, Point

_SHARES = (0.001, 0.01, 0.1)  # of the rows, the most popular
_SATURATED = 0.9  # of its largest change
_ONE_PROGRAM = ('pinned', 'plain', 'cached', 'fae_pinned', 'hotline')
"""Systems whose step is the same program, but for the rows of its block."""
_VARIANTS = {
  'none': 'all rows are trained',
  'hot': 'hot rows stand still',
  'cold': 'cold rows stand still',
}


def naive(results: Reproduction, model: str) -> Table:
  """What standing still costs: all hot rows, or all cold ones."""
  lines = [line for line in results.naive if line.model == model]
  base = {x.seed: x.accuracy for x in lines if x.variant == 'none'}
  frame = []
  for variant in dict.fromkeys([*_VARIANTS, *(x.variant for x in lines)]):
    mine = [line for line in lines if line.variant == variant]
    if not mine:
      continue
    lost = [
      before - line.accuracy
      for line in mine
      if line.accuracy is not None and (before := base.get(line.seed))
    ]
    loss = mean(lost) if variant != 'none' else None
    quality = [
      mean([x for x in values if x is not None])
      for values in zip(*(line[3:6] for line in mine), strict=True)
    ]
    frame.append(
      {
        'after the warm-up': _VARIANTS.get(variant, variant),
        'accuracy': middle(quality[2], words.share),
        'accuracy lost': middle(loss, '{:.2%}'.format),
        SURE: words.interval(loss, '{:.2%}'.format),
        'AUC': middle(quality[0], words.quality),
        'log loss': middle(quality[1], words.quality),
      }
    )
  low, high = paper.NAIVE_LOSS
  return Table(
    'Naive skipping',
    frame,
    f'The paper: either costs {low:.0%} to {high:.0%} of accuracy.',
  )


def thresholds(results: Reproduction, model: str) -> Table:
  """Drop target, threshold, drop rate and quality."""
  lines = [line for line in results.thresholds if line.model == model]
  frame = []
  for target in sorted({line.drop_target for line in lines}):
    mine = [line for line in lines if line.drop_target == target]
    edge, rate, auc, loss = (
      mean([x for x in values if x is not None])
      for values in zip(*(line[3:] for line in mine), strict=True)
    )
    frame.append(
      {
        'drop target': f'{target:.0%}',
        'threshold': middle(edge, '{:.3g}'.format),
        'drop rate': middle(rate, words.share),
        'AUC': middle(auc, words.quality),
        SURE: words.interval(auc, words.quality),
        'log loss': middle(loss, words.quality),
      }
    )
  return Table(
    'Threshold, drop rate and quality',
    frame,
    'Means over seeds. Drop rate: of the hot examples that came while '
    'skipping.',
  )


def phases(results: Reproduction, model: str) -> Table:
  """Milliseconds of each phase, by system."""
  keys, names, spent = phase_means(results, model)
  frame = [
    {'system': name(key)}
    | {phase: number(spent.get((key, phase)), '{:.3f}') for phase in names}
    for key in keys
  ]
  return Table(
    'Time by phase, ms per batch',
    frame,
    'Phases overlap: they add up to work, not to the time of a batch.'
    + _noise(spent),
  )


def _noise(spent: dict[tuple[Key, str], float]) -> str:
  """Says in a sentence how much the phases of one program differ."""
  steps = {
    key: spent[key, 'step']
    for key in ((system, OFF) for system in _ONE_PROGRAM)
    if (key, 'step') in spent
  }
  if len(steps) < 2:
    return ''
  ms = sorted(steps.values())
  return (
    ' Each system is timed once, one after another, so phases also differ by '
    'what the machine did meanwhile. An example: `step` is the same program '
    f'for {words.joined([name(key) for key in steps])}, but took '
    f'{ms[0]:.1f} to {ms[-1]:.1f} ms.'
  )


def phase_means(
  results: Reproduction, model: str
) -> tuple[list[Key], list[str], dict[tuple[Key, str], float]]:
  """Systems, phases, and the mean ms per batch over the seeds."""
  spent: dict[tuple[Key, str], list[float]] = {}
  for line in results.phases:
    if line.model == model and line.ms_per_batch is not None:
      key = ((line.system, line.skip), line.phase)
      spent.setdefault(key, []).append(line.ms_per_batch)
  there = {key for key, _ in spent}
  keys = in_order(there, results, model)
  known = {phase for _, phase in spent}
  names = [phase for phase in PHASES if phase in known]
  names += sorted(known - set(names))
  return keys, names, {k: float(np.mean(v)) for k, v in spent.items()}


def skew(results: Reproduction, model: str) -> Table:
  """How much of the lookups the most popular rows have."""
  curve = [line for line in results.skew if line.model == model]
  if not curve:
    return Table('', [])
  ours = results.setting_of(model)
  rows = ours.get('rows') or max(line.rank for line in curve)
  counts = {f'{100 * share:g}% of the rows': share * rows for share in _SHARES}
  if ours.get('hot_rows'):
    counts['hot rows'] = ours['hot_rows']
  ranks, shares = zip(
    *sorted((line.rank, line.cumulative_share) for line in curve), strict=True
  )
  frame = [
    {
      'the most popular': title,
      'rows': f'{count:,.0f}',
      'of all lookups': words.share(float(np.interp(count, ranks, shares))),
    }
    for title, count in counts.items()
    if count >= ranks[0]
  ]
  return Table('Access skew', frame)


def saturation(results: Reproduction, model: str) -> float | None:
  """Share of the batches after which rows have gone most of their way.

  The median over the rows of the first batch after which a row is at least 0.9
  of its largest change away from its start. Rows that never move say nothing;
  None if none does.
  """
  lines = sorted(line for line in results.changes if line.model == model)
  if not lines:
    return None
  batches = max(line.batch for line in lines)
  firsts = []
  for _, group in itertools.groupby(lines, key=lambda line: line.row):
    row = list(group)
    enough = _SATURATED * max(line.change for line in row)
    if enough > 0:
      firsts.append(min(x.batch for x in row if x.change >= enough))
  return float(np.median(firsts)) / batches if firsts else None


def to_quality(results: Reproduction, model: str) -> Table:
  """Seconds to an AUC that all reach."""
  curves = curves_of(results, model)
  if not curves:
    return Table('', [])
  goal = min(max(auc for _, auc in curve) for curve in curves.values())
  frame = []
  for key, curve in curves.items():
    seconds, aucs = (np.array(x) for x in zip(*curve, strict=True))
    first = int(np.argmax(aucs >= goal))
    before = max(first - 1, 0)
    pair = slice(before, first + 1)
    at = float(np.interp(goal, aucs[pair], seconds[pair]))
    frame.append(
      {
        'system': name(key),
        f'seconds to AUC {goal:.4f}': f'{at:.2f}',
        'seconds in all': f'{seconds[-1]:.2f}',
        'AUC at the end': words.quality(aucs[-1]),
      }
    )
  return Table(
    'Time to quality',
    frame,
    'The AUC is the lowest of the best of all systems; between points of a '
    'curve, a straight line. One seed.',
  )


def curves_of(
  results: Reproduction, model: str
) -> dict[Key, list[tuple[float, float]]]:
  """Seconds and AUC along the way: of each system its first seed."""
  curves: dict[Key, dict[int, list[Point]]] = {}
  for line in results.points:
    known = line.seconds is not None and line.auc is not None
    if line.model == model and known:
      key = (line.system, line.skip)
      curves.setdefault(key, {}).setdefault(line.seed, []).append(line)
  return {
    key: sorted(
      (line.seconds or 0.0, line.auc or 0.0)
      for line in curves[key][min(curves[key])]
    )
    for key in in_order(curves, results, model)
  }
