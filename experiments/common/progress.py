"""One line that says how far a program is, in any width of a terminal.

What matters comes first, and what does not fit is left out: nothing wraps.
Where there is no terminal, a line is written now and then.
"""

import collections
from collections.abc import Sequence
import time
from types import TracebackType
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

QUIET_S = 10.0
"""Between lines where there is no terminal."""
_QUIET_WIDTH = 80
_WINDOW_S = 30.0  # over which speed is measured
_LEAST, _MOST = 8, 24  # of the bar's width
_MAIN = 2  # facts that come before the bar itself
_GAP = '  '


class Progress(NamedTuple):
  """How far a program is."""

  phase: str
  """What it does now; '' says nothing."""
  unit: str
  """What is counted, e.g. 'batch'; '%' stands for shares of the total."""
  done: int
  total: int | None
  """None where nobody knows."""
  seconds_left: float | None
  facts: tuple[str, ...]
  """What else there is to say, the most important first."""


def line_of(at: Progress, width: int, draws: bool = True) -> str:
  """The line of at most `width` characters: as much as there is room for.

  In this order things are given room: the count, the time left, the first two
  facts, a bar (unless it `draws` none), the other facts; the bar then takes
  what is left.
  """
  head, *others = _parts(at)
  main = 1 + _MAIN if at.seconds_left is not None else _MAIN
  parts = _fitting([head, *others[:main]], width)
  has_bar = draws and at.total and len(_GAP.join(parts)) + 2 + _LEAST <= width
  room = width - (2 + _LEAST if has_bar else 0)
  if len(parts) == 1 + len(others[:main]):
    parts = _fitting([*parts, *others[main:]], room)
  if has_bar and at.total:
    left = width - len(_GAP.join(parts)) - len(_GAP)
    parts.insert(1, _bar(at.done / at.total, min(left, _MOST)))
  return _GAP.join(parts)[:width]


def _parts(at: Progress) -> list[str]:
  count = f'{at.done:,}' + (f'/{at.total:,}' if at.total else '')
  phase = f'{at.phase}{_GAP}' if at.phase else ''
  head = f'{at.unit} {count}'
  if at.unit == '%':
    head = f'{at.done / at.total:.0%}' if at.total else ''
  parts = [f'{phase}{head}'.rstrip()]
  if at.seconds_left is not None:
    parts.append(f'{clock(at.seconds_left)} left')
  return [*parts, *at.facts]


def _fitting(parts: Sequence[str], width: int) -> list[str]:
  """The first of the parts, as many as fit."""
  count = len(parts)
  while count > 1 and len(_GAP.join(parts[:count])) > width:
    count -= 1
  return list(parts[:count])


def _bar(share: float, width: int) -> str:
  full = round(min(max(share, 0.0), 1.0) * width)
  return '━' * full + '─' * (width - full)


def clock(seconds: float) -> str:
  """A time as on a clock: 0:41, 12:05 or 1:02:03."""
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f'{hours}:{minutes:02}:{rest:02}'
  return f'{minutes}:{rest:02}'


class Bar:
  """A line on the screen while a block runs; it stays when that ends."""

  def __init__(
    self,
    screen: Console,
    total: int | None,
    unit: str,
    phase: str = '',
    done: int = 0,
  ) -> None:
    """Nothing is written before the block begins.

    Args:
      screen: where to write.
      total: what there is to do, in units; None if nobody knows.
      unit: what is counted, e.g. 'batch'.
      phase: what is done first.
      done: what was done before.
    """
    self._screen = screen
    self._at = Progress(phase, unit, done, total, None, ())
    self._said = time.monotonic()
    self._restart()
    self._live = Live(
      self, console=screen, refresh_per_second=4, auto_refresh=True
    )

  def __enter__(self) -> 'Bar':
    if self._screen.is_terminal:
      self._live.start()
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
  ) -> None:
    if self._screen.is_terminal:
      self._live.stop()

  def __rich_console__(
    self, console: Console, options: ConsoleOptions
  ) -> RenderResult:
    line = line_of(self._at, options.max_width)
    yield Text(line, no_wrap=True, overflow='crop')

  def begin(self, phase: str, total: int | None = None, unit: str = '') -> None:
    """Another phase begins, with a count of its own."""
    unit = unit or self._at.unit
    self._at = Progress(phase, unit, 0, total, None, ())
    self._restart()
    self._tell()

  def show(self, done: float, *facts: str, phase: str | None = None) -> None:
    """So much is done; facts are given as in `Progress`."""
    now, at = time.monotonic(), self._at
    done = min(round(done), at.total or round(done))
    self._passed.append((now, done))
    while len(self._passed) > 2 and now - self._passed[0][0] > _WINDOW_S:
      self._passed.popleft()
    self._at = at._replace(
      phase=at.phase if phase is None else phase,
      done=done,
      facts=facts,
      seconds_left=self._seconds_left(done),
    )
    self._tell()

  def _restart(self) -> None:
    # From the first news on: until then, things are compiled.
    self._passed: collections.deque[tuple[float, int]] = collections.deque()

  def _seconds_left(self, done: int) -> float | None:
    (begun, before), (now, _) = self._passed[0], self._passed[-1]
    if self._at.total is None or done <= before or now <= begun:
      return None
    return (self._at.total - done) * (now - begun) / (done - before)

  def _tell(self) -> None:
    """Writes a line where there is no terminal, if it is time to."""
    now = time.monotonic()
    if not self._screen.is_terminal and now - self._said >= QUIET_S:
      self._said = now
      line = line_of(self._at, _QUIET_WIDTH, draws=False)
      self._screen.print(line, highlight=False)
