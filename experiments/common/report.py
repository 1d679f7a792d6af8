"""What a person sees on the screen: tables, facts and progress."""

from collections.abc import Mapping, Sequence
import itertools
import pathlib
from typing import Any, Literal

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from slipstream_jax.data.base import Dataset

Frame = Sequence[Mapping[str, Any]]
"""A tidy frame: for each row a mapping of column to value. A column's name says
its unit, and thereby how it is shown: see `text`."""

_MIB, _LARGE = 1 << 20, 1000


def console() -> Console:
  """Where programs write; wide enough for a table when it is no terminal."""
  terminal = Console()
  return terminal if terminal.is_terminal else Console(width=120)


def text(name: str, value: Any) -> str:
  """A value for people to read, in the unit that its name tells."""
  if value is None:
    return '-'
  if isinstance(value, str | bool):
    return str(value)
  if 'share' in name or name.endswith(('rate', 'accuracy')):
    return f'{value:.1%}'
  if name.startswith(('ratio', 'of ')):
    return f'{value:.2f}'
  if 'bytes' in name:
    return f'{value / _MIB:,.2f} MiB'
  if 'seconds' in name:
    return f'{value:,.2f} s'
  whole = isinstance(value, int) or abs(value) >= _LARGE
  return f'{value:,.0f}' if whole else f'{value:.4g}'


def table(title: str, frame: Frame, styles: Sequence[str | None] = ()) -> Table:
  """A frame for the screen; `styles` are those of its rows."""
  grid = Table(title=title, title_justify='left')
  for name, value in frame[0].items():
    justify: Literal['left', 'right'] = 'right'
    if isinstance(value, str):
      justify = 'left'
    grid.add_column(name.replace('_', ' '), justify=justify)
  for row, style in itertools.zip_longest(frame, styles):
    grid.add_row(*itertools.starmap(text, row.items()), style=style)
  return grid


def markdown(frame: Frame) -> str:
  """A frame for a page; its first column holds words."""
  names = [name.replace('_', ' ') for name in frame[0]]
  rule = ['---'] + ['---:'] * (len(names) - 1)
  rows = [list(itertools.starmap(text, row.items())) for row in frame]
  return ''.join(f'| {" | ".join(line)} |\n' for line in [names, rule, *rows])


def facts(values: Mapping[str, Any]) -> Table:
  """Names and values, one below the other; what is None is left out."""
  grid = Table(show_header=False, min_width=60)
  grid.add_column(style='bold')
  grid.add_column(justify='right')
  for name, value in values.items():
    if value is not None:
      grid.add_row(name.replace('_', ' '), text(name, value))
  return grid


def introduce(screen: Console, data: Dataset, workdir: pathlib.Path) -> None:
  """Says what the run trains on, loudly if it is made up."""
  if data.bayes_auc is not None:
    screen.print(
      Panel(
        f'[bold]SYNTHETIC DATA.[/] {data.name}.\nIts figures say nothing about '
        f'real clicks. Bayes AUC {data.bayes_auc:.4f}: no model can do better. '
        'For real data: --config.data.path=FILE',
        border_style='red',
      )
    )
  else:
    screen.print(f'[bold]{data.name}[/]', highlight=False)
  screen.print(f'workdir {workdir}', highlight=False)


def progress_bar(screen: Console) -> Progress:
  """A bar with the rates of the last steps in its description."""
  return Progress(
    TextColumn('[bold]step {task.completed:.0f}/{task.total:.0f}'),
    BarColumn(bar_width=24),
    TimeRemainingColumn(),
    TextColumn('{task.description}'),
    console=screen,
    disable=not screen.is_terminal,
  )


def rates(line: Mapping[str, Any]) -> str:
  """One line of text for a 'train' line of the metrics."""
  return (
    '{examples_per_s:,.0f} examples/s  loss {loss:.4f}  '
    'load {rows_loaded_per_step:,.0f} rows {mb_loaded_per_step:.2f} MB  '
    'store {rows_stored_per_step:,.0f} rows {mb_stored_per_step:.2f} MB '
    'per step'
  ).format(**line)
