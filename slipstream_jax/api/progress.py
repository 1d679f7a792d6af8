"""A bar that shows how far a training is, and a table when it ends.

Both go to stderr if that is a terminal, or below the cell of a notebook. Needs
rich, so it is imported when a bar is drawn.
"""

import collections
from collections.abc import Callable
import time
from types import TracebackType
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.table import Column, Table
from rich.text import Text

from slipstream_jax.api.history import History, numbers_of, Validation
from slipstream_jax.training.loop import StepRecord

_GAP = '  '
_REDRAW_S = 0.1
_RATE_S = 10.0  # seconds over which examples/s is a mean
_LOSSES = 100  # steps over which the loss is a mean
_ROWS = 8  # validations in the table


class Bar:
  """The progress of a block of code. It stays on the screen when that ends."""

  def __init__(
    self,
    screen: Console,
    total: int | None,
    unit: str,
    phase: str = '',
    done: int = 0,
  ) -> None:
    """Prepares a bar. Writes nothing before the block begins.

    Args:
      screen: where to write, if it is a terminal or a notebook.
      total: how many units there are, or None if it is not known.
      unit: what is counted, such as 'batch'. '%' shows a share of the total.
      phase: what is done first.
      done: units that were done before.
    """
    self._screen = screen
    self._cell: Any = None  # of a notebook, with the bar in it
    self._progress = Progress(
      _Head(self._head, Column(no_wrap=True)),
      BarColumn(None, table_column=Column(max_width=24)),
      _Facts(),
      console=screen,
      refresh_per_second=4,
      speed_estimate_period=60.0,
      get_time=time.monotonic,
      disable=not screen.is_terminal,
    )
    self._task = self._progress.add_task(
      phase, total=total, completed=done, unit=unit, facts=''
    )

  def doing(self) -> str:
    """Returns what else is being done, such as 'compiling'."""
    return ''

  def __enter__(self) -> 'Bar':
    if self._screen.is_jupyter:
      # rich itself would need ipywidgets, which notebooks may lack.
      from IPython.display import display

      self._cell = display(self._progress, display_id=True)
    self._progress.start()
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
  ) -> None:
    self._progress.stop()

  def begin(self, phase: str, total: int | None = None, unit: str = '') -> None:
    """Begins another phase, with a count of its own."""
    task = self._progress.tasks[0]
    unit = unit or task.fields['unit']
    self._progress.reset(self._task, description=phase, facts='', unit=unit)
    task.total = total  # `reset` would take None as no change

  def show(
    self,
    done: float | int,
    *facts: str,
    phase: str | None = None,
    total: int | None = None,
  ) -> None:
    """Shows how many units are done, and facts, the most important first.

    `total` replaces the number of units, if it is not None.
    """
    task = self._progress.tasks[0]
    most = task.total if total is None else total
    self._progress.update(
      self._task,
      completed=min(round(done), most or round(done)),
      total=most,
      description=phase,
      facts=_GAP.join(facts),
    )
    if self._cell is not None:
      self._cell.update(self._progress)

  @property
  def line(self) -> str:
    """Text of the bar, one line."""
    task = self._progress.tasks[0]
    return _GAP.join(filter(None, (self._head(task), task.fields['facts'])))

  def _head(self, task: Task) -> str:
    """Returns what is done, how much of it, and the time left."""
    done, total, unit = int(task.completed), task.total, task.fields['unit']
    count = f'{unit} {done:,}' + (f'/{total:,.0f}' if total else '')
    if not (unit or total or done):  # nothing is counted
      count = ''
    if unit == '%':
      count = f'{done / total:.0%}' if total else ''
    left = []
    if total and not task.finished and task.time_remaining is not None:
      left = [f'{clock(task.time_remaining)} left']
    parts = task.description, self.doing(), count, *left
    return _GAP.join(filter(None, parts))


class _Head(ProgressColumn):
  def __init__(self, text: Callable[[Task], str], column: Column) -> None:
    self._text = text
    ProgressColumn.__init__(self, column)

  def render(self, task: Task) -> Text:
    return Text(self._text(task))


class _Facts(ProgressColumn):
  """The column that is cut off where a terminal is narrow."""

  def render(self, task: Task) -> Text:
    return Text(task.fields['facts'], no_wrap=True, overflow='ellipsis')


def clock(seconds: float | int) -> str:
  """Returns a time as on a clock: 0:41, 12:05 or 1:02:03."""
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f'{hours}:{minutes:02}:{rest:02}'
  return f'{minutes}:{rest:02}'


class TrainingBar:
  """A callback that draws the bar of a training, and a table when it ends."""

  def __init__(
    self, screen: Console, reach: Callable[[int], tuple[int, int | None]]
  ) -> None:
    """Draws nothing before the block begins.

    Args:
      screen: a terminal or a notebook.
      reach: maps the steps taken to units done and their number, None if that
        is not known.
    """
    self._screen, self._reach = screen, reach
    self._bar = Bar(screen, None, 'batch', 'training')
    self._losses = collections.deque[float](maxlen=_LOSSES)
    self._rates = collections.deque[tuple[float, int]]()
    self._steps, self._drawn = 0, 0.0
    self._validated = ''

  def __enter__(self) -> 'TrainingBar':
    self._started = time.monotonic()
    self._bar.__enter__()
    return self

  def __exit__(self, *error: object) -> None:
    self._draw()
    self._bar.__exit__(None, None, None)

  def on_step(self, record: StepRecord) -> None:
    """Shows the loss and the speed, at most ten times a second."""
    self._steps += 1
    self._losses.append(record.loss)
    now = time.monotonic()
    if now - self._drawn >= _REDRAW_S:
      self._drawn = now
      self._rates.append((now, record.counters.examples_trained))
      while now - self._rates[0][0] > _RATE_S and len(self._rates) > 2:
        self._rates.popleft()
      self._draw()

  def on_validation(self, record: Validation) -> None:
    """Shows the metrics."""
    numbers = numbers_of(record.metrics)
    some = [f'{name} {numbers[name]:.4f}' for name in [*numbers][:2]]
    self._validated = _GAP.join(['validation', *some])
    self._draw()

  def _draw(self) -> None:
    done, total = self._reach(self._steps)
    facts = [f'loss {np.mean(self._losses):.4f}'] if self._losses else []
    if len(self._rates) > 1:
      (start, before), (end, after) = self._rates[0], self._rates[-1]
      facts.append(f'{(after - before) / (end - start):,.0f} examples/s')
    self._bar.show(done, *facts, self._validated, total=total)

  def on_end(self, history: History) -> None:
    """Prints a line, and a table of the validations."""
    seconds = clock(time.monotonic() - self._started)
    loss = f', loss {np.mean(self._losses):.4f}' if self._losses else ''
    self._screen.print(
      f'{self._steps:,} steps in {seconds}{loss}', highlight=False
    )
    for words in history.skipping_in_words():
      self._screen.print(words, highlight=False)
    if history.validations:
      self._screen.print(table_of(history))


def table_of(history: History) -> Table:
  """Returns the last validations, and the best one, as a table."""
  rows = list(history.validations)
  best = history.best
  last = rows[-_ROWS:]
  if best is not None and best not in last:
    last = [best, *last[1:]]
  names = list(dict.fromkeys(n for v in rows for n in numbers_of(v.metrics)))
  table = Table(box=None, header_style='bold', pad_edge=False)
  for name in 'step', *names:
    table.add_column(name.replace('_', ' '), justify='right')
  table.add_column()
  for one in last:
    numbers = numbers_of(one.metrics)
    cells = [f'{numbers[n]:.4f}' if n in numbers else '-' for n in names]
    mark = 'best' if one is best else ''
    table.add_row(f'{one.step:,}', *cells, mark)
  return table
