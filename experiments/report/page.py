"""Runs as one HTML page that needs nothing beside itself."""

from collections.abc import Iterator, Sequence
import itertools
import statistics

import numpy as np

from experiments.pages import html, svg
from experiments.pages.blocks import Picture, Section, Table, Words
from experiments.report.runs import differences, figures, overview, Recorded

_CURVES = (
  ('train', 'loss', 'training loss', 'log loss'),
  ('eval', 'auc', 'held-out AUC', 'AUC'),
  ('eval', 'log_loss', 'held-out log loss', 'log loss'),
  ('train', 'examples_per_s', 'speed', 'examples/s'),
  ('train', 'mb_loaded_per_step', 'loaded', 'MB per step'),
  ('train', 'mb_stored_per_step', 'stored', 'MB per step'),
)


def page(runs: Sequence[Recorded]) -> str:
  """The page of these runs."""
  listed = list(runs)
  data = dict.fromkeys(
    str(run.summary['data']) for run in listed if run.summary
  )
  return html.document(
    listed[0].name if len(listed) == 1 else f'{len(listed)} runs',
    [
      Section('Runs', [Table('', overview(listed))]),
      Section('Curves', _curves(listed)),
      Section('Settings that differ', [Table('', differences(listed))]),
      Section('Figures', [Table('', figures(listed))]),
    ],
    [Words(name) for name in data],
  )


def _curves(runs: list[Recorded]) -> list[Picture]:
  drawings = [
    Picture(f'{kind}-{key}', title, _curve(runs, kind, key, unit))
    for kind, key, title, unit in _CURVES
  ]
  return [drawing for drawing in drawings if drawing.svg]


def _curve(runs: list[Recorded], kind: str, key: str, unit: str) -> str:
  """What was recorded of one thing along the way; nothing, if nothing was."""
  curves = [list(_points(run, kind, key)) for run in runs]
  if not any(curves):
    return ''

  def paint(axes: np.ndarray) -> None:
    axis = axes[0]
    for number, (run, points) in enumerate(zip(runs, curves, strict=True)):
      look = {'marker': 'o', 'markersize': 3} if kind == 'eval' else {}
      xs, ys = zip(*points, strict=True) if points else ([], [])
      color = svg.series(number)
      axis.plot(xs, ys, color=color, linewidth=1.3, label=run.name, **look)
    axis.set(xlabel='million examples trained', ylabel=unit)
    if key not in ('loss', 'auc', 'log_loss'):
      axis.set_ylim(bottom=0)
    axis.figure.legend(loc='outside upper left', ncols=2)

  return svg.draw(f'{kind}-{key}', paint, (5.2, 3.2))


def _points(
  run: Recorded, kind: str, key: str
) -> Iterator[tuple[float, float]]:
  """Examples in millions, and values, of the lines that have one.

  Left out are lines of training that sum up much fewer steps than others, as
  the last one does: a mean over a step or two would stand out as a spike.
  """
  lines = [x for x in run.lines if x['kind'] == kind]
  steps = [0, *(line['step'] for line in lines)]
  taken = [b - a for a, b in itertools.pairwise(steps)]
  usual = statistics.median(taken) if taken else 0
  for line, count in zip(lines, taken, strict=True):
    short = kind == 'train' and count < usual / 2
    if line.get(key) is not None and not short:
      yield line['examples_trained'] / 1e6, line[key]
