"""What a person sees on the screen: tables, facts and progress."""

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
"""A tidy frame: for each row a mapping of column to value. A column's name says
its unit, and thereby how it is shown: see `text`."""

_LARGE = 1000
_NONE: Mapping[str, str] = types.MappingProxyType({})
_PREFIXES = ('', 'k', 'M', 'G')  # of bytes, a thousand each


def console() -> Console:
  """Where programs write; wide enough for a table when it is no terminal."""
  terminal = Console()
  return terminal if terminal.is_terminal else Console(width=120)


def teller(screen: Console) -> Callable[[str], None]:
  """Returns a function that prints a sentence, whatever characters it has."""
  return functools.partial(
    screen.print, highlight=False, markup=False, soft_wrap=True
  )


def warn(screen: Console, text: str) -> None:
  """Prints a warning."""
  screen.print(text, style='bold red', highlight=False, markup=False)


def text(name: str, value: Any) -> str:
  """A value for people to read, in the unit that its name tells."""
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
  """Bytes for people to read, in the largest unit below them: '3.15 MB'."""
  scale = 0
  while abs(nbytes) >= 999.5 and scale < len(_PREFIXES) - 1:
    nbytes, scale = nbytes / 1000, scale + 1
  if not scale:
    return f'{nbytes:.0f} B'
  return (
    f'{nbytes:,.3g} {_PREFIXES[scale]}B'
    if abs(nbytes) < 1000
    else (f'{nbytes:,.0f} {_PREFIXES[scale]}B')
  )


def table(
  title: str,
  frame: Frame,
  styles: Sequence[str | None] = (),
  headings: Mapping[str, str] = _NONE,
) -> Table:
  """A frame for the screen, without lines between columns: 80 are few.

  Args:
    title: said above; of headings that are short it tells what they mean.
    frame: what to show.
    styles: of its rows.
    headings: of columns whose name is too long.
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


def markdown(frame: Frame) -> str:
  """A frame for a page; its first column holds words."""
  names = [name.replace('_', ' ') for name in frame[0]]
  rule = ['---'] + ['---:'] * (len(names) - 1)
  rows = [list(itertools.starmap(text, row.items())) for row in frame]
  return ''.join(f'| {" | ".join(line)} |\n' for line in [names, rule, *rows])


def auc(value: float | None) -> str:
  """An AUC for people to read; None or NaN: the labels do not define it."""
  if value is None or math.isnan(value):
    return 'undefined: one class'
  return f'{value:.4f}'


def facts(values: Mapping[str, Any]) -> Table:
  """Names and values, one below the other; what is None is left out.

  An AUC is not left out: it says that it is undefined.
  """
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


def rates(line: Mapping[str, Any]) -> tuple[str, ...]:
  """What a 'train' line of the metrics says, the most important first."""
  loss = '-' if line['loss'] is None else f'{line["loss"]:.4f}'
  return (
    f'loss {loss}',
    '{examples_per_s:,.0f} examples/s'.format(**line),
    *(
      f'{way} {size(1e6 * line[key])}/step'
      for way, key in (
        ('load', 'mb_loaded_per_step'),
        ('store', 'mb_stored_per_step'),
      )
    ),
  )
