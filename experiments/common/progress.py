"""Shows how far a program is: a bar on a terminal, else a line every 10 s."""

import contextlib
import threading
from types import TracebackType

from rich.console import Console

from experiments.common.meter import is_compiling
from slipstream_jax.api import progress
from slipstream_jax.api.progress import clock as clock

QUIET_S = 10.0
"""Seconds between lines where there is no terminal."""


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
    self._bar = progress.Bar(
      screen,
      total,
      unit,
      phase,
      done,
      doing=lambda: 'compiling' if is_compiling() else '',
    )
    self.begin, self.show = self._bar.begin, self._bar.show
    self._ended = threading.Event()
    self._writer = threading.Thread(
      target=self._write_lines, name='slipstream-progress', daemon=True
    )

  def __enter__(self) -> 'Bar':
    if self._screen.is_terminal:
      self._bar.__enter__()
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
      self._bar.__exit__(kind, error, trace)
    else:
      self._ended.set()
      self._writer.join()

  def _write_lines(self) -> None:
    with contextlib.suppress(OSError):  # the reader has closed the pipe
      while not self._ended.wait(QUIET_S):
        self._screen.print(self._bar.line, highlight=False, markup=False)
