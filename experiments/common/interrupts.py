"""Ctrl-C and SIGTERM: the first ends a program well, the second at once.

Where nothing is lost the first one raises KeyboardInterrupt wherever it finds
the program; within `gently` it only sets a flag, which the program reads where
it can stop. No signal is lost: Python drops an exception that is raised in a
callback, and runs no handler while the main thread is in foreign code, so a
thread of its own hears every signal (`signal.set_wakeup_fd`), and ends a
process that did not end by itself.
"""

from collections.abc import Iterator
import contextlib
import os
import select
import signal
import sys
import threading
from types import FrameType
from typing import Any, NoReturn

from slipstream_jax.data.base import Forwarded
from slipstream_jax.types import Batch

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_GRACE_S = 5.0  # from KeyboardInterrupt to the end of the process


class _State:
  """Of the process, as handlers are: the first signal, and what it does."""

  number: int | None = None
  gentle = False


@contextlib.contextmanager
def installed(kept: str) -> Iterator[None]:
  """Handles the signals of this process; `kept` is what its end leaves.

  A signal that is ignored, as in a shell's background, stays so. Outside of
  the main thread nothing is handled.
  """
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  _State.number, _State.gentle = None, False
  reading, writing = os.pipe()
  os.set_blocking(writing, False)
  watcher = threading.Thread(
    target=_watch, args=(reading, kept), name='slipstream-signals', daemon=True
  )
  before = {
    number: signal.signal(number, _handle)
    for number in _SIGNALS
    if signal.getsignal(number) is not signal.SIG_IGN
  }
  woken = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
  watcher.start()
  hook = sys.unraisablehook

  def unless_interrupt(unraisable: Any) -> None:
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
      hook(unraisable)

  sys.unraisablehook = unless_interrupt  # the watcher has heard of it
  try:
    yield
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
    signal.set_wakeup_fd(woken)
    if sys.unraisablehook is unless_interrupt:
      sys.unraisablehook = hook
    os.close(writing)
    watcher.join()
    os.close(reading)


@contextlib.contextmanager
def gently() -> Iterator[None]:
  """Within it the first signal waits until the program asks for it."""
  before, _State.gentle = _State.gentle, True
  try:
    yield
  finally:
    _State.gentle = before


def asked() -> bool:
  """Whether a signal asked the program to end."""
  return _State.number is not None


def check() -> None:
  """Raises KeyboardInterrupt if a signal asked the program to end."""
  if asked():
    raise KeyboardInterrupt


def code() -> int:
  """The exit code of a program that was interrupted: 130, or 143."""
  return 128 + (_State.number or signal.SIGINT)


class Checked(Forwarded):
  """A batch source that raises KeyboardInterrupt once a signal came."""

  def __next__(self) -> Batch:
    check()
    return super().__next__()


def _handle(number: int, _: FrameType | None) -> None:
  if _State.number is None:
    _State.number = number
  if not _State.gentle:
    raise KeyboardInterrupt


def _watch(reading: int, kept: str) -> None:
  """Ends the process at the second signal, or where the first did nothing."""
  first: int | None = None
  while True:
    hurried = first is not None and not _State.gentle
    wait = _GRACE_S if hurried else None
    if not select.select([reading], [], [], wait)[0]:
      _end(first, kept)
    heard = os.read(reading, 64)
    if not heard:  # closed: the program is through
      return
    for number in heard:
      if number in _SIGNALS and first is not None:
        _end(number, kept)
      first = number if number in _SIGNALS else first


def _end(number: int | None, kept: str) -> NoReturn:
  """Ends the process whatever its threads do."""
  if _is_terminal(sys.stdout):
    os.write(1, b'\x1b[?25h\n')  # a progress bar hid the cursor
  os.write(2, f'error: interrupted at once; {kept}\n'.encode())
  os._exit(128 + (number or signal.SIGINT))


def _is_terminal(file: Any) -> bool:
  return file is not None and not file.closed and file.isatty()
