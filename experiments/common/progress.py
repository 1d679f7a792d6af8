"""Shows how far a program is: a bar on a terminal, else a line every 10 s."""

import contextlib
import threading
from types import TracebackType

from experiments.common.meter import is_compiling
from slipstream_jax.api import progress
from slipstream_jax.api.progress import clock as clock

QUIET_S = 10.0
"""Seconds between lines where there is no terminal."""


class Bar(progress.Bar):
  """The package's bar, which says when programs are compiled.

  Without a terminal it writes a line now and then.
  """

  def doing(self) -> str:
    """Returns whether programs are compiled, in a word."""
    return 'compiling' if is_compiling() else ''

  def __enter__(self) -> 'Bar':
    self._ended = threading.Event()
    if self._screen.is_terminal:
      progress.Bar.__enter__(self)
    else:
      self._writer = threading.Thread(
        target=self._write_lines, name='slipstream-progress', daemon=True
      )
      self._writer.start()
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
  ) -> None:
    if self._screen.is_terminal:
      progress.Bar.__exit__(self, kind, error, trace)
    else:
      self._ended.set()
      self._writer.join()

  def _write_lines(self) -> None:
    with contextlib.suppress(OSError):  # the reader has closed the pipe
      while not self._ended.wait(QUIET_S):
        self._screen.print(self.line, highlight=False, markup=False)
