"""Draws the pictures of a run."""

from collections.abc import Sequence
import pathlib
from typing import Any

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
    right.annotate(
      words,
      (0.98, bayes),
      xycoords=('axes fraction', 'data'),
      xytext=(0, -4),
      textcoords='offset points',
      **{'ha': 'right', 'va': 'top', 'fontsize': 8},
    )
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


def _points(
  lines: Sequence[dict[str, Any]], kind: str, key: str
) -> tuple[list[float], list[float]]:
  kept = [x for x in lines if x['kind'] == kind and x.get(key) is not None]
  return [x['examples_trained'] / 1e6 for x in kept], [x[key] for x in kept]
