"""Reads runs from their folders, and shows them side by side."""

from collections.abc import Callable, Iterator, Sequence
import datetime
import itertools
import pathlib
import statistics
from typing import Any, NamedTuple

import ml_collections
import numpy as np
from rich import box
from rich.table import Table

from experiments.common import page, report
from experiments.common.record import (
  CONFIG,
  METRICS,
  read_json,
  read_lines,
  SUMMARY,
)
from experiments.common.usage import keys_of
from experiments.common.workdir import output_file
from slipstream_jax.errors import UserError
from slipstream_jax.training.retrieval import NDCG, RECALL

_MOVED = ('mb_loaded_per_step', 'mb_stored_per_step')
_CURVES = (
  ('Training loss', 'train', ('loss',), 'loss'),
  ('Held-out AUC', 'eval', ('auc',), 'AUC'),
  ('Held-out log loss', 'eval', ('log_loss',), 'log loss'),
  ('Held-out recall', 'eval', (RECALL,), 'recall at 10'),
  ('Held-out NDCG', 'eval', (NDCG,), 'NDCG at 10'),
  ('Speed', 'train', ('examples_per_s',), 'thousand examples per second'),
  ('Loaded and stored', 'train', _MOVED, 'MB per step'),
)
"""Title of a picture, kind and keys of lines of the metrics, and its axis."""


class Recorded(NamedTuple):
  """A run as its folder has it."""

  name: str
  date: datetime.datetime
  """Time at which a file of the folder was last written."""
  config: dict[str, Any]
  """Settings by dotted key."""
  lines: list[dict[str, Any]]
  """Lines of the run's metrics."""
  summary: dict[str, Any]
  """Empty while the run is not finished."""

  def last(self, key: str) -> Any:
    """Returns a figure of the summary, else of the newest line that has it."""
    lines = [self.summary] if self.summary else reversed(self.lines)
    values = (line[key] for line in lines if line.get(key) is not None)
    return next(values, None)


def report_on(*names: str, output: str) -> None:
  """Lists the runs of a folder, or writes a page of several runs.

  Raises:
    UserError: a folder without runs, a damaged run, or a page that cannot be
      written.
  """
  folders = [pathlib.Path(name) for name in dict.fromkeys(names or ['runs'])]
  if len(folders) == 1 and not is_run(folders[0]):
    show(runs_in(folders[0]), f'no runs in {folders[0]}')
  else:
    runs = read_all(folders)
    show(runs)
    write(pathlib.Path(output), runs)


def is_run(folder: pathlib.Path) -> bool:
  """Whether a folder is that of a run."""
  return (folder / CONFIG).is_file() and (folder / METRICS).is_file()


def runs_in(folder: pathlib.Path) -> list[Recorded]:
  """Returns the runs of a folder, the newest last.

  Raises:
    UserError: the folder does not exist, or a run is damaged.
  """
  if not folder.is_dir():
    raise UserError(
      'the folder of the runs to list must exist',
      got=folder,
      where='command line',
      hint='name the folder of your runs, or a run',
    )
  runs = [read(path) for path in folder.iterdir() if is_run(path)]
  return sorted(runs, key=lambda run: (run.date, run.name))


def read(folder: pathlib.Path) -> Recorded:
  """Returns the run of a folder.

  Raises:
    UserError: the folder is not that of a run, or the run is damaged.
  """
  if not is_run(folder):
    raise UserError(
      f'a run has {CONFIG} and {METRICS} in its folder',
      got=folder,
      where='command line',
      hint='name folders of runs; without a name, those in runs/ are listed',
    )
  config = ml_collections.ConfigDict(read_json(folder / CONFIG))
  lines, summary = read_lines(folder / METRICS), read_json(folder / SUMMARY)
  newest = max(path.stat().st_mtime for path in folder.iterdir())
  date = datetime.datetime.fromtimestamp(newest)
  return Recorded(folder.name, date, dict(keys_of(config)), lines, summary)


def read_all(folders: Sequence[pathlib.Path]) -> list[Recorded]:
  """Returns the runs of folders. Runs of one name are named by their paths."""
  runs = [read(folder) for folder in folders]
  if len({run.name for run in runs}) == len(runs):
    return runs
  pairs = zip(runs, folders, strict=True)
  return [run._replace(name=str(folder)) for run, folder in pairs]


def overview(runs: Sequence[Recorded]) -> list[dict[str, str]]:
  """Returns a row of text for each run. Steps end in '...' if unfinished."""

  def text(run: Recorded, key: str, form: Callable[[Any], str]) -> str:
    value = run.last(key)
    return '-' if value is None else form(value)

  rows = []
  ranking = {run.name for run in runs if run.last(RECALL) is not None}
  for run in runs:
    row = {
      'run': run.name,
      'date': run.date.strftime('%m-%d %H:%M'),
      'steps': f'{run.last("step") or 0:,}...',
      'AUC': text(run, 'auc', report.auc),
      'log loss': text(run, 'log_loss', '{:.4f}'.format),
      **{
        name: text(run, key, '{:.4f}'.format)
        for name, key in (('recall at 10', RECALL), ('NDCG at 10', NDCG))
        if ranking
      },
      'examples/s': text(run, 'examples_per_s', '{:,.0f}'.format),
      'dropped': text(run, 'examples_dropped_share', '{:.1%}'.format),
      'saved': text(run, 'saved_bytes', lambda x: report.size(max(x, 0))),
    }
    if run.summary:
      row['steps'] = text(run, 'steps', '{:,}'.format)
    if 'auc' in run.summary:  # None is undefined: the test set has one class
      row['AUC'] = report.auc(run.summary['auc'])
    if run.name in ranking:  # scores that rank items are no log odds
      row['AUC'] = row['log loss'] = '-'
    if extra := run.last('extra_bytes'):
      row['saved'] = f'costs {report.size(extra)}'
    rows.append(row)
  return rows


def show(runs: Sequence[Recorded], none: str = '') -> None:
  """Prints the runs. On a narrow screen their names are folded, not figures."""
  screen = report.console()
  if not runs:
    screen.print(none, highlight=False)
    return
  rows = overview(runs)
  grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
  grid.add_column('run', overflow='fold', min_width=8)
  for name in [*rows[0]][1:]:
    widest = max(len(name), *(len(row[name]) for row in rows))
    grid.add_column(name, justify='right', no_wrap=True, min_width=widest)
  for row in rows:
    grid.add_row(*row.values())
  screen.print(grid, crop=False)


def write(path: pathlib.Path, runs: Sequence[Recorded]) -> None:
  """Writes the page of these runs.

  Raises:
    UserError: the file cannot be written.
  """
  finished = {run.name: run.summary for run in runs if run.summary}
  settings = {run.name: run.config for run in runs}
  data = dict.fromkeys(str(x.get('data')) for x in finished.values())
  text = page.html(
    runs[0].name if len(runs) == 1 else f'{len(runs)} runs',
    [
      page.Section('Runs', [page.Table('', overview(runs))]),
      page.Section('Curves', _pictures(runs)),
      page.Section(
        'Settings that differ', [page.Table('', differences(settings))]
      ),
      page.Section('Figures', [page.Table('', _side_by_side(finished))]),
    ],
    about='; '.join(data),
  )
  with output_file(path) as file:
    file.write(text.encode())
  report.console().print(f'written to {path}', highlight=False)


def differences(settings: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
  """Returns a row for each setting that is not the same in all runs."""
  rows = []
  for key in dict.fromkeys(itertools.chain(*settings.values())):
    values = {name: str(own.get(key, '-')) for name, own in settings.items()}
    if len({*values.values()}) > 1:
      rows.append({'setting': key} | values)
  return rows


def _side_by_side(summaries: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
  """Returns a row for each figure that any run has."""
  return [
    {'figure': key.replace('_', ' ')}
    | {name: report.text(key, own.get(key)) for name, own in summaries.items()}
    for key in dict.fromkeys(itertools.chain(*summaries.values()))
    if any(own.get(key) is not None for own in summaries.values())
    and key != 'data'
  ]


def _pictures(runs: Sequence[Recorded]) -> list[page.Picture]:
  """Returns the curves of which any run has a point."""
  pictures = []
  for title, kind, keys, unit in _CURVES:
    curves = {run.name: [*_points(run, kind, keys)] for run in runs}
    if not any(curves.values()):
      continue
    figure, (axis,) = page.figure(3.2)
    for number, (name, points) in enumerate(curves.items()):
      xs, ys = zip(*points, strict=True) if points else ((), ())
      mark, color = '-o' if kind == 'eval' else '-', page.color(number)
      scale = 1000 if title == 'Speed' else 1
      axis.plot(
        xs, np.divide(ys, scale), mark, color=color, markersize=3, label=name
      )
    axis.set(xlabel='million examples trained', ylabel=unit)
    if title in ('Speed', 'Loaded and stored'):
      axis.set_ylim(bottom=0)
    page.legend(figure, columns=2)
    pictures.append(page.Picture(title, figure))
  return pictures


def _points(
  run: Recorded, kind: str, keys: Sequence[str]
) -> Iterator[tuple[float, float]]:
  """Yields million examples trained, and the sum of the keys of a line.

  Leaves out training lines that average far fewer steps than others, as the
  last one may. They would look like spikes. Also leaves out the log loss of
  scores that rank items, which are no log odds.
  """
  lines = [x for x in run.lines if x['kind'] == kind]
  steps = [0, *(line['step'] for line in lines)]
  taken = [b - a for a, b in itertools.pairwise(steps)]
  usual = statistics.median(taken) if taken else 0
  for line, count in zip(lines, taken, strict=True):
    values = [line.get(key) for key in keys]
    if 'log_loss' in keys and line.get(RECALL) is not None:
      continue
    if None not in values and (kind == 'eval' or count > usual / 2):
      yield line['examples_trained'] / 1e6, sum(x or 0.0 for x in values)
