"""Pictures of a comparison: what is lost, and how fast one learns."""

from collections.abc import Callable, Sequence
import pathlib
from typing import Any

from matplotlib import ticker
import numpy as np

from experiments.common.plots import picture
from experiments.compare.figures import Figures, less_plain
from experiments.compare.grid import Cell, OURS
from experiments.compare.lines import CONTROL, PLAIN, Point, Run
from experiments.pages import svg
from experiments.pages.blocks import Picture
from experiments.pages.estimates import Estimate

WIDTH = 5.2
Color = Callable[[str], str]


def drawn(
  figures: Sequence[Figures], runs: Sequence[Run], curve: Sequence[Point]
) -> list[Picture]:
  """Those of a page, as far as there is something to draw."""
  dropping = [figure for figure in figures if not figure.is_plain]
  if not dropping:
    return []
  looks = looks_of(figures)
  target = middle_target(figures)

  def lost(axes: np.ndarray) -> None:
    _by_share(axes[0], dropping, looks, lambda f: f.auc_lost, 'AUC lost')

  def learning(axes: np.ndarray) -> None:
    _learning(axes[0], runs, curve, target, looks, svg.color, 'seconds')
    axes[0].figure.legend(loc='outside upper left', ncols=3)

  def seconds(axes: np.ndarray) -> None:
    axis = axes[0]
    _beside_plain(axis, dropping, runs, curve, looks, svg.color, 'seconds')
    axis.figure.legend(loc='outside upper left', ncols=3)

  def shares(axes: np.ndarray) -> None:
    axis, label = axes[0], "of random's loss"
    _by_share(axis, dropping, looks, lambda f: f.of_random, label)
    low, high = axis.get_ylim()  # an interval may be very wide
    axis.set_ylim(max(low, -1), min(high, 3))

  pictures = [
    Picture(
      'lost',
      'What dropping costs',
      svg.draw('lost', lost, (WIDTH, 4.2)),
      'AUC of the plain run less that of the policy, against the share really '
      'dropped; means over seeds with 95 % intervals.',
    )
  ]
  if any(figure.of_random for figure in dropping):
    pictures.append(
      Picture(
        'shares',
        "Share of random's loss",
        svg.draw('shares', shares, (WIDTH, 4.2)),
        'AUC lost over what random dropping loses with as many examples '
        'trained: 1 is no better than chance, 0 loses nothing.',
      )
    )
  if curve:
    pictures.append(
      Picture(
        'seconds',
        'What seconds buy',
        svg.draw('seconds', seconds, (WIDTH, 4.2)),
        'Ends of all runs, means over seeds, beside what the plain run has '
        'learned after as many seconds: one could also just stop early.',
      )
    )
    pictures.append(
      Picture(
        'learning',
        f'Learning curves, {target:.0%} asked',
        svg.draw('learning', learning, (WIDTH, 4.2)),
        'Held-out AUC less the one with which the plain run of the seed ends, '
        'means over seeds; the first third is left out.',
      )
    )
  return pictures


def file(
  path: pathlib.Path,
  title: str,
  figures: Sequence[Figures],
  runs: Sequence[Run],
  curve: Sequence[Point],
) -> None:
  """Draws one picture as a file: the ends of all runs beside the plain curve.

  The line to beat is the plain run's own learning curve: with as many examples
  one could also just have stopped early. Examples are the same on a busy
  machine; seconds, which are not, stand on the page.
  """
  looks = looks_of(figures)
  with picture(path, title, (7.6, 4.6), columns=1) as (axis,):
    _beside_plain(
      axis, figures, runs, curve, looks, svg.light, 'examples_trained'
    )
    least = min((f.trained for f in figures if not f.is_plain), default=0.0)
    axis.set_xlim(left=0.85 * least / 1e6)
    best = {line.get_label(): max(line.get_ydata()) for line in axis.lines}
    handles, labels = axis.get_legend_handles_labels()
    of_label = dict(zip(labels, handles, strict=True))
    labels.sort(key=lambda label: best[label], reverse=True)
    axis.figure.legend(
      [of_label[label] for label in labels],
      labels,
      loc='outside right center',
      frameon=False,
    )


def _beside_plain(
  axis: Any,
  figures: Sequence[Figures],
  runs: Sequence[Run],
  curve: Sequence[Point],
  looks: dict[str, Any],
  color: Color,
  spent: str,
) -> None:
  """The ends of all runs, and what the plain run had learned by then."""
  plain = {name: looks[name] for name in looks if name == PLAIN}
  _ends(axis, figures, looks, color, spent)
  _learning(axis, runs, curve, None, plain, color, spent)
  lost = [-f.auc_lost.mean for f in figures if f.auc_lost is not None]
  low, high = min([0, *lost]), max([0, *lost])
  margin = 0.15 * (high - low) + 1e-4
  axis.set(ylabel="AUC less the plain run's")
  axis.set_ylim(low - margin, high + margin)


def looks_of(figures: Sequence[Figures]) -> dict[str, dict[str, Any]]:
  """Color, line and width of each policy."""
  names = list(dict.fromkeys(figure.cell.policy for figure in figures))
  colors = [f'c{n}' for n in range(svg.SERIES) if n not in (1, 7, 10, 11)]
  others = [n for n in names if n not in (PLAIN, CONTROL, OURS)]
  looks: dict[str, dict[str, Any]] = {
    name: {'color': colors[n % len(colors)], 'linewidth': 1.2}
    for n, name in enumerate(others)
  }
  looks[PLAIN] = {'color': 'ink', 'linewidth': 1.8}
  looks[CONTROL] = {'color': 'c7', 'linewidth': 1.6, 'linestyle': '--'}
  looks[OURS] = {'color': 'c1', 'linewidth': 2.0}
  return {name: looks[name] for name in names}


def middle_target(figures: Sequence[Figures]) -> float:
  """The target whose learning curves are drawn."""
  targets = sorted({f.cell.target for f in figures if not f.is_plain})
  return targets[len(targets) // 2]


def _look(look: dict[str, Any], color: Color) -> dict[str, Any]:
  return {**look, 'color': color(look['color'])}


def _by_share(
  axis: Any,
  figures: Sequence[Figures],
  looks: dict[str, Any],
  value: Callable[[Figures], Estimate | None],
  label: str,
) -> None:
  """Something of each policy, against the share that it really dropped."""
  for name, look in looks.items():
    known = [
      (figure.dropped.mean, value(figure))
      for figure in figures
      if figure.cell.policy == name
    ]
    points = [(x, estimate) for x, estimate in known if estimate is not None]
    _line(axis, name, _look(look, svg.color), points)
  axis.axhline(0, color=svg.color('muted'), linewidth=1)
  axis.set(xlabel='share of examples dropped', ylabel=label)
  axis.xaxis.set_major_formatter(ticker.PercentFormatter(1, 0))
  axis.figure.legend(loc='outside upper left', ncols=3)


def _line(
  axis: Any,
  name: str,
  look: dict[str, Any],
  points: Sequence[tuple[float, Estimate]],
) -> None:
  """Means with their intervals, as far as these are known."""
  if not points:
    return
  points = sorted(points, key=lambda point: point[0])
  xs, estimates = zip(*points, strict=True)
  ys = [estimate.mean for estimate in estimates]
  axis.plot(xs, ys, marker='o', markersize=4, label=name, **look)
  for x, estimate in points:
    if estimate.low is not None and estimate.high is not None:
      ends = [estimate.low, estimate.high]
      axis.plot([x, x], ends, color=look['color'], linewidth=0.9, alpha=0.6)


def _ends(
  axis: Any,
  figures: Sequence[Figures],
  looks: dict[str, Any],
  color: Color,
  spent: str,
) -> None:
  for name, look in looks.items():
    points = sorted(
      (
        f.trained / 1e6 if spent == 'examples_trained' else f.seconds,
        -f.auc_lost.mean,
      )
      for f in figures
      if f.cell.policy == name and f.auc_lost is not None
    )
    if points:
      label = f'{name} (control)' if name == CONTROL else name
      xs, ys = zip(*points, strict=True)
      style = _look(look, color)
      axis.plot(xs, ys, marker='o', markersize=4, label=label, **style)


def _learning(
  axis: Any,
  runs: Sequence[Run],
  curve: Sequence[Point],
  target: float | None,
  looks: dict[str, Any],
  color: Color,
  spent: str,
) -> None:
  """Learning curves of some policies; None: of a target, of the plain run."""
  scale = 1e6 if spent == 'examples_trained' else 1.0

  def price(point: Point) -> float:
    return float(getattr(point, spent)) / scale

  last = 0.0
  for name, look in looks.items():
    cell = Cell(name, 0.0 if name == PLAIN else target or 0.0)
    points = less_plain(runs, curve, cell, price)
    if not points:
      continue
    last = max(last, points[-1][0])
    label = 'plain, as it learns' if name == PLAIN else name
    axis.plot(*zip(*points, strict=True), label=label, **_look(look, color))
  axis.axhline(0, color=color('muted'), linewidth=1)
  names = {
    'examples_trained': 'million examples trained',
    'seconds': 'seconds of training',
  }
  axis.set(xlabel=names[spent])
  if target is not None and last:
    _crop(axis)
    axis.set(ylabel="AUC less the plain run's last")


def _crop(axis: Any) -> None:
  """Leaves out where curves still rise fast: ends are what matters."""
  lines = [line for line in axis.lines if len(line.get_xdata()) > 2]
  ys = [
    y
    for line in lines
    for y in np.asarray(line.get_ydata())[len(line.get_ydata()) // 3 :]
  ]
  if ys:
    low, high = min(ys), max([*ys, 0.0])
    margin = 0.06 * (high - low) + 1e-5
    axis.set_ylim(low - margin, high + margin)
