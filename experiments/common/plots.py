"""Draws the pictures of a run."""

from collections.abc import Iterator, Sequence
import contextlib
import pathlib
from typing import Any

import numpy as np

from experiments.common import page, report

_TRAINED = 'million examples trained'


def learning_curve(
  path: pathlib.Path, lines: Sequence[dict[str, Any]], summary: dict[str, Any]
) -> None:
  """Draws training loss and held-out AUC against examples trained."""
  figure, (left, right) = page.figure(3.8, width=10, ncols=2)
  color = page.color(0)
  left.plot(*_points(lines, 'train', 'loss'), color=color)
  left.set(title='training loss', xlabel=_TRAINED, ylabel='log loss')
  curve = _points(lines, 'eval', 'auc')
  right.plot(*curve, color=color, marker='o', markersize=4)
  bayes = summary['bayes_auc']
  if bayes is not None:
    right.axhline(bayes, color=page.color(1), linestyle='--')
    words = f'Bayes AUC {bayes:.4f}'
    note(right, words, (0.98, bayes), xycoords=('axes fraction', 'data'))
  title = f'held-out AUC, {report.auc(summary["auc"])} at the end'
  right.set(title=title, xlabel=_TRAINED, ylabel='AUC')
  figure.suptitle(summary['data'], fontsize=9, color=page.color('muted'))
  figure.savefig(path, dpi=130)


def transfers(
  path: pathlib.Path, lines: Sequence[dict[str, Any]], summary: dict[str, Any]
) -> None:
  """Draws bytes moved per step against examples trained."""
  figure, (axis,) = page.figure(3.8, width=7)
  for verb, style, color in (('loaded', '-', 'c0'), ('stored', '--', 'c1')):
    points = _points(lines, 'train', f'mb_{verb}_per_step')
    axis.plot(*points, style, color=page.color(color), label=verb)
  axis.set(xlabel=_TRAINED, ylabel='MB per step')
  axis.set_ylim(bottom=0)
  axis.set_title(summary['data'], fontsize=9, color=page.color('muted'))
  page.legend(figure)
  figure.savefig(path, dpi=130)


def note(axis: Any, words: str, at: tuple[Any, ...], **options: Any) -> None:
  """Writes small words to the left of, and below, a point of the axes."""
  place = {'xytext': (-4, -4), 'textcoords': 'offset points'}
  look = {'ha': 'right', 'va': 'top', 'fontsize': 8}
  color = page.color('muted')
  axis.annotate(words, at, color=color, **place, **look, **options)


def _points(
  lines: Sequence[dict[str, Any]], kind: str, key: str
) -> tuple[list[float], list[float]]:
  kept = [x for x in lines if x['kind'] == kind and x.get(key) is not None]
  return [x['examples_trained'] / 1e6 for x in kept], [x[key] for x in kept]


INK, ACCENT, MUTED = '#1b4965', '#e76f51', '#8d99ae'


@contextlib.contextmanager
def picture(
  path: pathlib.Path,
  title: str,
  size: tuple[float, float],
  rows: int = 1,
  columns: int = 2,
  **options: Any,
) -> Iterator[np.ndarray]:
  """Axes to draw on, a flat array; the picture is written at the end.

  Args:
    path: of the PNG.
    title: above all axes.
    size: width and height in inches.
    rows: of axes.
    columns: of axes.
    options: of `plt.subplots`.
  """
  # Here, as programs would take a second longer to start.
  import matplotlib

  matplotlib.use('Agg')  # files only; a run has no screen
  from matplotlib import pyplot as plt

  figure, axes = plt.subplots(
    rows, columns, figsize=size, layout='constrained', squeeze=False, **options
  )
  try:
    yield axes.flatten()
    for axis in figure.axes:
      axis.grid(alpha=0.25)
      axis.spines[['top', 'right']].set_visible(False)
    figure.suptitle(title, fontsize=9, color=MUTED)
    figure.savefig(path, dpi=130)
  finally:
    plt.close(figure)
