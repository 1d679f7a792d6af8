"""Shows how far a program is: a bar on a terminal, else a line every 10 s."""

import contextlib
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.table import Column
from rich.text import Text

from experiments.common.meter import is_compiling

QUIET_S = 10.0
"""Seconds between lines where there is no terminal."""
_GAP = '  '


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
      screen: where to write.
      total: how many units there are, or None if it is not known.
      unit: what is counted, such as 'batch'. '%' shows a share of the total.
      phase: what is done first.
      done: units that were done before.
    """
    self._screen = screen
    self._progress = Progress(
      _Head(Column(no_wrap=True)),
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
    self._ended = threading.Event()
    self._writer = threading.Thread(
      target=self._write_lines, name='slipstream-progress', daemon=True
    )

  def __enter__(self) -> 'Bar':
    if self._screen.is_terminal:
      self._progress.start()
    else:
      self._writer.start()
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
  ) -> None:
    if self._screen.is_terminal:
      self._progress.stop()
    else:
      self._ended.set()
      self._writer.join()

  def begin(self, phase: str, total: int | None = None, unit: str = '') -> None:
    """Begins another phase, with a count of its own."""
    task = self._progress.tasks[0]
    unit = unit or task.fields['unit']
    self._progress.reset(self._task, description=phase, facts='', unit=unit)
    task.total = total  # `reset` would take None as no change

  def show(self, done: float, *facts: str, phase: str | None = None) -> None:
    """Shows how many units are done, and facts, the most important first."""
    task = self._progress.tasks[0]
    done = min(round(done), task.total or round(done))
    self._progress.update(
      self._task, completed=done, description=phase, facts=_GAP.join(facts)
    )

  def _write_lines(self) -> None:
    with contextlib.suppress(OSError):  # the reader has closed the pipe
      while not self._ended.wait(QUIET_S):
        task = self._progress.tasks[0]
        parts = _head(task), task.fields['facts']
        line = _GAP.join(filter(None, parts))
        self._screen.print(line, highlight=False, markup=False)


def _head(task: Task) -> str:
  """Returns what is done, how much of it, and the time left."""
  done, total, unit = int(task.completed), task.total, task.fields['unit']
  count = f'{unit} {done:,}' + (f'/{total:,.0f}' if total else '')
  if not (unit or total or done):  # nothing is counted
    count = ''
  if unit == '%':
    count = f'{done / total:.0%}' if total else ''
  doing = [task.description, 'compiling' if is_compiling() else '']
  left = []
  if total and not task.finished and task.time_remaining is not None:
    left = [f'{clock(task.time_remaining)} left']
  return _GAP.join(filter(None, [*doing, count, *left]))


class _Head(ProgressColumn):
  def render(self, task: Task) -> Text:
    return Text(_head(task))


class _Facts(ProgressColumn):
  """The column that is cut off where a terminal is narrow."""

  def render(self, task: Task) -> Text:
    return Text(task.fields['facts'], no_wrap=True, overflow='ellipsis')


def clock(seconds: float) -> str:
  """Returns a time as on a clock: 0:41, 12:05 or 1:02:03."""
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f'{hours}:{minutes:02}:{rest:02}'
  return f'{minutes}:{rest:02}'
