"""Runs as one HTML page that needs nothing beside itself."""

from collections.abc import Iterator, Sequence
import html
import itertools
import pathlib
import statistics
import tempfile
from typing import Any

from matplotlib import pyplot as plt

from experiments.common.plots import picture
from experiments.report.runs import differences, figures, overview, Recorded

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2733; background: #fff;
  max-width: 1100px; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin-bottom: 0.2rem; }
h2 { font-size: 1.1rem; margin-top: 2.2rem; }
p { color: #5b6775; margin-top: 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.8rem; border-bottom: 1px solid #e3e8ee;
  text-align: right; white-space: nowrap; }
th { color: #5b6775; font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; }
"""
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
  names = ', '.join(run.name for run in listed)
  data = dict.fromkeys(
    str(run.summary['data']) for run in listed if run.summary
  )
  parts = [
    f'<h1>{_escaped(_title(listed))}</h1>',
    *(f'<p>{_escaped(name)}</p>' for name in data),
    _section('Runs', _table(overview(listed))),
    _section('Curves', _curves(listed)),
    _section('Skip that differ', _table(differences(listed))),
    _section('Figures', _table(figures(listed))),
  ]
  return (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width">\n'
    f'<title>{_escaped(names)}</title>\n<style>{_STYLE}</style></head>\n'
    f'<body>\n{"".join(parts)}</body></html>\n'
  )


def _title(runs: list[Recorded]) -> str:
  return runs[0].name if len(runs) == 1 else f'{len(runs)} runs'


def _escaped(value: object) -> str:
  return html.escape(str(value))


def _section(title: str, body: str) -> str:
  """Nothing where there is nothing to tell."""
  if not body:
    return ''
  return f'<h2>{title}</h2>\n<div class="wide">{body}</div>\n'


def _table(frame: list[dict[str, str]]) -> str:
  if not frame:
    return ''

  def row(cells: Any, tag: str) -> str:
    inner = ''.join(f'<{tag}>{_escaped(cell)}</{tag}>' for cell in cells)
    return f'<tr>{inner}</tr>\n'

  body = ''.join(row(line.values(), 'td') for line in frame)
  return f'<table>\n{row(frame[0], "th")}{body}</table>'


def _curves(runs: list[Recorded]) -> str:
  """Everything that was recorded along the way, as one drawing."""
  colors = plt.get_cmap('tab10')(range(10))
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / 'curves.svg'
    with picture(path, '', (12, 10), rows=3) as axes:
      for axis, (kind, key, title, unit) in zip(axes, _CURVES, strict=True):
        for number, run in enumerate(runs):
          points = list(_points(run, kind, key))
          if points:
            look = {'marker': 'o', 'markersize': 3} if kind == 'eval' else {}
            color = colors[number % 10]
            axis.plot(
              *zip(*points, strict=True), color=color, linewidth=1.3, **look
            )
        axis.set(title=title, ylabel=unit)
        if key not in ('loss', 'auc', 'log_loss'):
          axis.set_ylim(bottom=0)
      for axis in axes[-2:]:
        axis.set_xlabel('million examples trained')
      handles = [
        plt.Line2D([], [], color=colors[number % 10], label=run.name)
        for number, run in enumerate(runs)
      ]
      axes[0].figure.legend(
        handles=handles, loc='outside upper center', ncols=3, frameon=False
      )
    text = path.read_text()
  return text[text.index('<svg') :]  # less what makes it a file of its own


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
