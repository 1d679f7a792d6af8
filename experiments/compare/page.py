"""What a comparison says: as HTML, as markdown, and on the screen."""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any, NamedTuple

import ml_collections

from experiments.common.usage import keys_of
from experiments.compare import pictures
from experiments.compare.figures import Figures, figures_of
from experiments.compare.grid import OURS
from experiments.compare.lines import CONTROL, Point, Run
from experiments.pages import html, machine, markdown, words
from experiments.pages.blocks import (
  Block,
  Items,
  Picture,
  Section,
  Table,
  Words,
)
from experiments.pages.estimates import Estimate
from experiments.pages.words import middle, NONE
from slipstream_jax.files import replace

HTML, MARKDOWN, PICTURE = 'compare.html', 'compare.md', 'compare.png'
SURE = '95 %'
_NOTES = (
  'Every run of a seed sees the same data, model and hot rows. Differences are '
  "paired by seed; intervals are of Student's t at 95 %, those of shares of "
  "random's loss Fieller's; a dash: not known, or one seed only.",
  'Asked: what skip.drop said; dropped: what really was, of the examples seen.',
  "Of random's: what the policy loses to the plain run, over what blind "
  'dropping loses that trained as many examples, or spent as many seconds; '
  "between targets random's is interpolated. Where fewer were trained than by "
  "random's highest target, the share is at least so large.",
  'Seconds are of training alone, without compiling and scoring. Saved: of '
  'the seconds that the plain run takes for as many examples seen.',
  "Reaches plain's AUC: where the learning curve first has the AUC with which "
  "the plain run of the seed ends, on the curve's test examples; times as fast "
  'is of the seeds that reach it.',
)


class Comparison(NamedTuple):
  """All that a page is made of."""

  data: str
  """Its name."""
  synthetic: bool
  runs: Sequence[Run]
  curve: Sequence[Point]
  setting: Mapping[str, Any]
  """Of `machine.here`."""
  config: ml_collections.ConfigDict


def write(folder: pathlib.Path, results: Comparison) -> None:
  """Writes the page as HTML and as markdown, and a picture."""
  figures = figures_of(results.runs, results.curve)
  head, sections = content(results, figures)
  title = f'What dropping costs: {results.data}'
  replace(folder / HTML, html.document(title, sections, head))
  bare = [
    section._replace(
      blocks=[x for x in section.blocks if not isinstance(x, Picture)]
    )
    for section in sections
    if section.anchor != 'settings'
  ]
  replace(folder / MARKDOWN, markdown.document(title, bare, head))
  file = folder / PICTURE
  pictures.file(file, results.data, figures, results.runs, results.curve)


def content(
  results: Comparison, figures: Sequence[Figures]
) -> tuple[list[Block], list[Section]]:
  """What stands before all sections, and these."""
  head: list[Block] = []
  if results.synthetic:
    loud = 'SYNTHETIC DATA: its figures say nothing about real clicks.'
    head.append(Words(loud, loud=True))
  seeds = len({run.seed for run in results.runs})
  facts = [f'{len(results.runs)} runs, {seeds} seed{"s" * (seeds > 1)}']
  head.append(Words('; '.join(machine.in_words(results.setting) + facts)))
  targets = dict.fromkeys(f.cell.target for f in figures if not f.is_plain)
  return head, [
    Section(
      'In short',
      [
        Items('', [_best(figures, target) for target in targets]),
        _plain(figures),
        _matrix(figures, list(targets)),
        *pictures.drawn(figures, results.runs, results.curve),
      ],
      'short',
    ),
    *(_target(figures, target) for target in targets),
    Section('How to read this', [Items('', _NOTES)], 'notes'),
    Section('Settings', _settings(results), 'settings'),
  ]


_ALIKE = 0.03
"""Shares dropped that differ by no more are compared."""


def _of_target(figures: Sequence[Figures], target: float) -> list[Figures]:
  return [f for f in figures if not f.is_plain and f.cell.target == target]


def _best(figures: Sequence[Figures], target: float) -> str:
  """A sentence on the policy that loses least, and on random."""
  known = [f for f in _of_target(figures, target) if f.auc_lost is not None]
  if not known:
    return f'{target:.0%} asked: no AUC is known.'

  def lost(figure: Figures) -> float:
    return figure.auc_lost.mean if figure.auc_lost else 0.0

  # Who drops less than the others can always lose less.
  most = max(f.dropped.mean for f in known)
  best = min((f for f in known if f.dropped.mean >= most - _ALIKE), key=lost)
  text = (
    f'{target:.0%} asked: of those that drop as much, {best.cell.policy} loses '
    f'least, '
    f'{_with_interval(best.auc_lost)} of AUC with '
    f'{best.dropped.mean:.1%} dropped, n = {best.seeds}'
  )
  control = [f for f in known if f.cell.policy == CONTROL]
  if control and best is not control[0]:
    rest = control[0]
    text += (
      f'; random dropping {_with_interval(rest.auc_lost)} with '
      f'{rest.dropped.mean:.1%}'
    )
  return text + '.'


def _with_interval(estimate: Estimate | None) -> str:
  text = middle(estimate, words.quality)
  bounds = words.interval(estimate, words.quality)
  return text if bounds == NONE else f'{text} ({bounds})'


def _plain(figures: Sequence[Figures]) -> Table:
  frame = [
    {
      'plain run': f'{f.seeds} seeds' if f.seeds > 1 else '1 seed',
      'examples trained': f'{f.trained:,.0f}',
      'AUC': middle(f.auc, words.quality),
      SURE: words.interval(f.auc, words.quality),
      'log loss': middle(f.log_loss, words.quality),
      'calibration': middle(f.calibration, '{:.3f}'.format),
      'seconds': f'{f.seconds:,.2f}',
      'MB loaded': f'{f.bytes_loaded / 1e6:,.0f}',
      'MB stored': f'{f.bytes_stored / 1e6:,.0f}',
    }
    for f in figures
    if f.is_plain
  ]
  return Table('', frame)


def _matrix(figures: Sequence[Figures], targets: list[float]) -> Table:
  """AUC lost of each policy at each target."""
  by_cell = {f.cell: f for f in figures}
  names = dict.fromkeys(f.cell.policy for f in figures if not f.is_plain)
  frame = []
  for name in names:
    row = {'policy': name}
    for target in targets:
      figure = by_cell.get((name, target))  # type: ignore[call-overload]
      row |= {
        f'lost at {target:.0%}': middle(
          figure and figure.auc_lost, words.change
        ),
        f"of random's at {target:.0%}": middle(
          figure and figure.of_random, words.times
        ),
      }
    frame.append(row)
  return Table(
    'AUC lost',
    frame,
    "The plain run's less the policy's, and the share of that which random "
    'dropping loses with as many examples trained.',
    strong=_ours(list(names)),
  )


def _target(figures: Sequence[Figures], target: float) -> Section:
  group = _of_target(figures, target)
  strong = _ours([f.cell.policy for f in group])
  title = f'{target:.0%} asked'
  return Section(
    title,
    [
      Table('Quality', list(map(_quality, group)), strong=strong),
      Table('Beside random dropping', list(map(_random, group)), strong=strong),
      Table('Time and bytes', list(map(_time, group)), strong=strong),
    ],
    f'asked-{target:g}'.replace('.', '-'),
  )


def _ours(names: list[str]) -> list[int]:
  return [number for number, name in enumerate(names) if name == OURS]


def _quality(f: Figures) -> dict[str, str]:
  return {
    'policy': f.cell.policy,
    'dropped': f'{f.dropped.mean:.1%}',
    'AUC': middle(f.auc, words.quality),
    'AUC lost': middle(f.auc_lost, words.change),
    SURE: words.interval(f.auc_lost, words.change),
    'log loss gained': middle(f.loss_gained, words.change),
    f'{SURE} ': words.interval(f.loss_gained, words.change),
    'calibration': middle(f.calibration, '{:.3f}'.format),
    'n': str(f.seeds),
  }


def _random(f: Figures) -> dict[str, str]:
  return {
    'policy': f.cell.policy,
    "of random's, equal examples": middle(f.of_random, words.times),
    SURE: words.interval(f.of_random, words.times),
    "of random's, equal seconds": middle(f.of_random_in_time, words.times),
    "log loss, of random's": middle(f.of_random_log_loss, words.times),
    "AUC less random's, equal examples": middle(f.against_random, words.change),
    f'{SURE} ': words.interval(f.against_random, words.change),
  }


def _time(f: Figures) -> dict[str, str]:
  reached = f'{f.reached} of {f.seeds}'
  seconds = NONE if f.seconds_to is None else f'{f.seconds_to:,.2f}'
  return {
    'policy': f.cell.policy,
    'examples trained': f'{f.trained:,.0f}',
    'seconds': f'{f.seconds:,.2f}',
    'choosing, CPU': f'{f.choosing:.1%}',
    'wall time saved': middle(f.saved, words.share),
    SURE: words.interval(f.saved, words.share),
    'saved over dropped': middle(f.saved_of_dropped, words.times),
    f'{SURE} ': words.interval(f.saved_of_dropped, words.times),
    "reaches plain's AUC": reached,
    'in seconds': seconds,
    'times as fast': middle(f.times_as_fast, words.times),
    f'{SURE}  ': words.interval(f.times_as_fast, words.times),
    'MB loaded': f'{f.bytes_loaded / 1e6:,.0f}',
    'MB stored': f'{f.bytes_stored / 1e6:,.0f}',
  }


def _settings(results: Comparison) -> list[Block]:
  command = results.setting.get('command')
  frame = [
    {'key': f'config.{key}', 'value': str(value)}
    for key, value in keys_of(results.config)
    if value is not None
  ]
  return [
    Words(f'Command: {command}'),
    Words('Every number is of compare.csv and curve.csv beside this page.'),
    Table('', frame, 'What the runs share, but for the seed.'),
  ]


def overview(
  runs: Sequence[Run], curve: Sequence[Point]
) -> list[dict[str, Any]]:
  """What fits a terminal of 80 columns; the page has the rest."""
  return [
    {
      'policy': f.cell.policy,
      'asked': f'{f.cell.target:.0%}',
      'dropped': f'{f.dropped.mean:.1%}',
      'AUC': middle(f.auc, words.quality),
      'AUC lost': _short(f.auc_lost),
      'loss gained': _short(f.loss_gained),
      "random's": middle(f.of_random, words.times),
    }
    for f in figures_of(runs, curve)
  ]


def _short(estimate: Estimate | None) -> str:
  if estimate is None or estimate.high is None:
    return middle(estimate, words.change)
  return f'{estimate.mean:+.4f} ±{estimate.high - estimate.mean:.4f}'
