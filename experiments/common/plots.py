"""Pictures: one look for all of them, and those of a run."""

from collections.abc import Iterator, Sequence
import contextlib
import pathlib
from typing import Any

import numpy as np

from experiments.common import report

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


def note(axis: Any, words: str, at: tuple[Any, ...], **options: Any) -> None:
  """Small words left of, or below, a point of the axes."""
  place = {'xytext': (-4, 0), 'textcoords': 'offset points', 'ha': 'right'}
  look = {'va': 'top', 'fontsize': 8, 'color': MUTED}
  axis.annotate(words, at, **place | look | options)


def learning_curve(
  path: pathlib.Path, lines: Sequence[dict[str, Any]], summary: dict[str, Any]
) -> None:
  """Training loss and held-out AUC against examples trained."""
  with picture(path, summary['data'], (10, 3.8)) as (left, right):
    left.plot(*_points(lines, 'train', 'loss'), color=INK, linewidth=1.2)
    left.set(title='training loss', ylabel='log loss')
    curve = _points(lines, 'eval', 'auc')
    right.plot(*curve, color=INK, marker='o', markersize=4)
    bayes = summary['bayes_auc']
    if bayes is not None:
      right.axhline(bayes, color=ACCENT, linestyle='--')
      at, coords = (0.98, bayes), ('axes fraction', 'data')
      words = f'Bayes AUC {bayes:.4f}'
      note(right, words, at, xycoords=coords, xytext=(0, -4), color=ACCENT)
    end = report.auc(summary['auc'])
    right.set(title=f'held-out AUC, {end} at the end')
    for axis in (left, right):
      axis.set_xlabel('million examples trained')


def transfers(
  path: pathlib.Path, lines: Sequence[dict[str, Any]], summary: dict[str, Any]
) -> None:
  """Rows and bytes moved per step against examples trained."""
  looks = {'loaded': {'color': INK}, 'stored': {'color': ACCENT, 'ls': '--'}}
  with picture(path, summary['data'], (10, 3.8)) as axes:
    for axis, unit in zip(axes, ('rows', 'MB'), strict=True):
      for verb, look in looks.items():
        points = _points(lines, 'train', f'{unit.lower()}_{verb}_per_step')
        axis.plot(*points, label=verb, **look)
      axis.set(title=f'{unit} per step', xlabel='million examples trained')
      axis.set_ylim(0, 1.2 * axis.get_ylim()[1])
      axis.legend(frameon=False)


def _points(
  lines: Sequence[dict[str, Any]], kind: str, key: str
) -> tuple[list[float], list[float]]:
  kept = [x for x in lines if x['kind'] == kind and x.get(key) is not None]
  return [x['examples_trained'] / 1e6 for x in kept], [x[key] for x in kept]
