"""Formats what programs show on the screen: tables, figures and warnings."""

from collections.abc import Callable, Mapping, Sequence
import functools
import itertools
import math
import pathlib
import types
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from slipstream_jax.data.source import Dataset

Frame = Sequence[Mapping[str, Any]]
"""Rows of a table. Each maps a column's name to a value. The name says the
unit, and so how the value is shown; see `text`."""

_LARGE = 1000
_NONE: Mapping[str, str] = types.MappingProxyType({})
_PREFIXES = ('', 'k', 'M', 'G')


def console() -> Console:
  """Returns the screen, with room for a table if it is no terminal."""
  terminal = Console()
  return terminal if terminal.is_terminal else Console(width=120)


def teller(screen: Console) -> Callable[[str], None]:
  """Returns a function that prints a sentence with any characters."""
  return functools.partial(
    screen.print, highlight=False, markup=False, soft_wrap=True
  )


def warn(screen: Console, words: str) -> None:
  """Prints a warning."""
  screen.print(words, style='bold red', highlight=False, markup=False)


def text(name: str, value: Any) -> str:
  """Formats a value in the unit that its name says."""
  if value is None:
    return '-'
  if isinstance(value, str | bool):
    return str(value)
  if 'share' in name or name.endswith(('rate', 'accuracy')):
    return f'{value:z.1%}'
  if name.startswith(('ratio', 'of ')):
    return f'{value:.2f}'
  if 'bytes' in name:
    return size(value)
  if 'seconds' in name:
    return f'{value:,.2f} s'
  whole = isinstance(value, int) or abs(value) >= _LARGE
  return f'{value:,.0f}' if whole else f'{value:.4g}'


def size(nbytes: float) -> str:
  """Formats bytes in a readable unit, such as '3.15 MB'."""
  scale = 0
  while abs(nbytes) >= 999.5 and scale < len(_PREFIXES) - 1:
    nbytes, scale = nbytes / 1000, scale + 1
  if not scale:
    return f'{nbytes:.0f} B'
  digits = f'{nbytes:,.3g}' if abs(nbytes) < 1000 else f'{nbytes:,.0f}'
  return f'{digits} {_PREFIXES[scale]}B'


def table(
  title: str,
  frame: Frame,
  styles: Sequence[str | None] = (),
  headings: Mapping[str, str] = _NONE,
) -> Table:
  """Returns a table for the screen, narrow enough for 80 columns.

  Args:
    title: stands above, and may explain short headings.
    frame: rows to show.
    styles: style of each row.
    headings: shorter headings of columns, by name.
  """
  grid = Table(
    title=title,
    title_justify='left',
    box=box.SIMPLE_HEAD,
    padding=0,
    show_edge=False,
  )
  for name, value in frame[0].items():
    justify: Literal['left', 'right'] = 'right'
    if isinstance(value, str):
      justify = 'left'
    heading = headings.get(name, name.replace('_', ' '))
    grid.add_column(heading, justify=justify)
  for row, style in itertools.zip_longest(frame, styles):
    grid.add_row(*itertools.starmap(text, row.items()), style=style)
  return grid


def auc(value: float | None) -> str:
  """Formats an AUC. It is undefined if all labels are equal."""
  if value is None or math.isnan(value):
    return 'undefined: one class'
  return f'{value:.4f}'


def facts(values: Mapping[str, Any]) -> Table:
  """Returns a table of names and values. Leaves out None, but for an AUC."""
  grid = Table(show_header=False, min_width=60)
  grid.add_column(style='bold')
  grid.add_column(justify='right')
  for name, value in values.items():
    if name == 'auc' and value is None:
      grid.add_row(name, auc(value))
    elif value is not None:
      grid.add_row(name.replace('_', ' '), text(name, value))
  return grid


def introduce(screen: Console, data: Dataset, workdir: pathlib.Path) -> None:
  """Prints what a program trains on, with a warning if the data are made up."""
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


def rates(line: Mapping[str, Any]) -> tuple[str, ...]:
  """Formats a 'train' line of the metrics, the most important figures first."""
  loss = '-' if line['loss'] is None else f'{line["loss"]:.4f}'
  return (
    f'loss {loss}',
    f'{line["examples_per_s"]:,.0f} examples/s',
    f'load {size(1e6 * line["mb_loaded_per_step"])}/step',
    f'store {size(1e6 * line["mb_stored_per_step"])}/step',
  )
