"""What a person sees of a run: progress, the summary table, the plots."""

import pathlib
from typing import Any

import matplotlib

matplotlib.use('Agg')  # files only; a run has no screen

from matplotlib import pyplot as plt
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from slipstream_jax.data.base import Dataset

MIB = 1 << 20
INK, ACCENT, MUTED = '#1b4965', '#e76f51', '#8d99ae'


def console() -> Console:
  """Where programs write; wide enough for a table when it is no terminal."""
  shown = Console()
  return shown if shown.is_terminal else Console(width=120)


def introduce(shown: Console, data: Dataset, workdir: pathlib.Path) -> None:
  """Says what the run trains on, loudly if it is made up."""
  if data.bayes_auc is not None:
    shown.print(
      Panel(
        f'[bold]SYNTHETIC DATA.[/] {data.name}.\nIts figures say nothing about '
        f'real clicks. Bayes AUC {data.bayes_auc:.4f}: no model can do better. '
        'For real data: --config.data.path=FILE',
        border_style='red',
      )
    )
  else:
    shown.print(f'[bold]{data.name}[/]', highlight=False)
  shown.print(f'workdir {workdir}', highlight=False)


def progress_bar(shown: Console) -> Progress:
  """A bar with the rates of the last steps in its description."""
  return Progress(
    TextColumn('[bold]step {task.completed:.0f}/{task.total:.0f}'),
    BarColumn(bar_width=24),
    TimeRemainingColumn(),
    TextColumn('{task.description}'),
    console=shown,
    disable=not shown.is_terminal,
  )


def rates(line: dict[str, Any]) -> str:
  """One line of text for a 'train' line of the metrics."""
  return (
    f'{line["samples_per_s"]:,.0f} samples/s  loss {line["loss"]:.4f}  '
    f'load {line["rows_loaded_per_step"]:,.0f} rows '
    f'{line["mb_loaded_per_step"]:.2f} MB  '
    f'store {line["rows_stored_per_step"]:,.0f} rows '
    f'{line["mb_stored_per_step"]:.2f} MB per step'
  )


def summary_table(summary: dict[str, Any]) -> Table:
  """The summary as a table a person reads."""
  table = Table(show_header=False, min_width=60)
  table.add_column(style='bold')
  table.add_column(justify='right')
  for name, text in _summary_rows(summary):
    table.add_row(name, text)
  return table


def _summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
  def number(key: str, form: str, unit: str = '') -> str:
    value = summary[key]
    return '-' if value is None else format(value, form) + unit

  moved = [
    (
      f'rows {verb}',
      f'{summary[f"rows_{verb}"]:,}  '
      f'({summary[f"bytes_{verb}"] / MIB:,.1f} MiB)',
    )
    for verb in ('loaded', 'stored')
  ]
  rows = [
    ('AUC', number('auc', '.4f')),
    ('log loss', number('log_loss', '.4f')),
    ('normalized entropy', number('normalized_entropy', '.4f')),
    ('accuracy', number('accuracy', '.2%')),
    ('calibration', number('calibration', '.3f')),
    ('inputs trained', number('inputs_trained', ',')),
    *_skip_rows(summary),
    ('lookups', number('lookups', ',')),
    ('... found on the device', number('hits', ',')),
    *moved,
    ('steps', number('steps', ',')),
    ('training time', number('seconds', ',.1f', ' s')),
    ('samples/s', number('samples_per_s', ',.0f')),
    (
      'compilations, not in that',
      f'{summary["compilations"]}  ({summary["seconds_compiling"]:.1f} s)',
    ),
    ('peak memory', f'{summary["peak_rss_bytes"] / (1 << 30):.2f} GiB'),
  ]
  if summary['bayes_auc'] is not None:
    share = (summary['auc'] - 0.5) / (summary['bayes_auc'] - 0.5)
    rows.insert(1, ('Bayes AUC of the stream', number('bayes_auc', '.4f')))
    rows.insert(2, ('... of the way from 0.5', f'{share:.1%}'))
  return rows


def _skip_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
  """What skipping did and saved; nothing for a plain run."""
  if summary['skip_mode'] == 'off':
    return []
  dropped, seen = summary['inputs_dropped'], summary['inputs_seen']
  overhead = summary['seconds_choosing'] + summary['seconds_watching']
  how = f'{summary["skip_mode"]}, {summary["skip_policy"]}'
  rows = [
    ('skipping', f'{how}, target {summary["drop_target"]:g}'),
    ('inputs dropped', f'{dropped:,}  ({dropped / max(seen, 1):.1%})'),
    ('... saving about', f'{summary["saved_seconds"]:,.1f} s'),
    ('... costing', f'{overhead:,.2f} s'),
    (
      'rows neither loaded nor stored',
      f'{summary["saved_rows"]:,}  '
      f'({summary["saved_bytes"] / MIB:,.1f} MiB both ways)',
    ),
  ]
  if summary['inputs_hot_share'] is not None:
    rows.insert(1, ('hot inputs', f'{summary["inputs_hot_share"]:.1%}'))
  if summary['rows_stale'] is not None:
    rows.append(('rows stale at the end', f'{summary["rows_stale"]:,}'))
  return rows


def plot_learning_curve(
  path: pathlib.Path, lines: list[dict[str, Any]], summary: dict[str, Any]
) -> None:
  """Training loss and held-out AUC against inputs trained."""
  figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
  train = [line for line in lines if line['kind'] == 'train']
  curve = [line for line in lines if line['kind'] == 'eval']
  left.plot(*_points(train, 'loss'), color=INK, linewidth=1.2)
  left.set(title='training loss', ylabel='log loss')
  right.plot(*_points(curve, 'auc'), color=INK, marker='o', markersize=4)
  if summary['bayes_auc'] is not None:
    right.axhline(summary['bayes_auc'], color=ACCENT, linestyle='--')
    right.annotate(
      f'Bayes AUC {summary["bayes_auc"]:.4f}',
      (0.98, summary['bayes_auc']),
      xycoords=('axes fraction', 'data'),
      xytext=(0, -4),
      textcoords='offset points',
      ha='right',
      va='top',
      color=ACCENT,
    )
  right.set(title=f'held-out AUC, {summary["auc"]:.4f} at the end')
  _finish(figure, path, summary)


def plot_transfers(
  path: pathlib.Path, lines: list[dict[str, Any]], summary: dict[str, Any]
) -> None:
  """Rows and bytes moved per step against inputs trained."""
  figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
  train = [line for line in lines if line['kind'] == 'train']
  for axis, key, unit in ((left, 'rows', 'rows'), (right, 'mb', 'MB')):
    for verb, color, style in (('loaded', INK, '-'), ('stored', ACCENT, '--')):
      points = _points(train, f'{key}_{verb}_per_step')
      axis.plot(*points, color=color, linestyle=style, label=verb)
    axis.set(title=f'{unit} per step')
    axis.set_ylim(0, 1.2 * axis.get_ylim()[1])
    axis.legend(frameon=False)
  _finish(figure, path, summary)


def _points(
  lines: list[dict[str, Any]], key: str
) -> tuple[list[float], list[float]]:
  kept = [line for line in lines if line.get(key) is not None]
  return [x['inputs_trained'] / 1e6 for x in kept], [x[key] for x in kept]


def _finish(figure: Any, path: pathlib.Path, summary: dict[str, Any]) -> None:
  for axis in figure.axes:
    axis.set_xlabel('million inputs trained')
    axis.grid(alpha=0.25)
    axis.spines[['top', 'right']].set_visible(False)
  figure.suptitle(summary['data'], fontsize=9, color=MUTED)
  figure.tight_layout()
  figure.savefig(path, dpi=130)
  plt.close(figure)
