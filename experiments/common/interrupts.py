"""Handles Ctrl-C and SIGTERM: the first ends a program well, the second now.

If nothing can be lost, the first signal raises KeyboardInterrupt wherever the
program is. Within `gently` it only sets a flag. The program reads the flag
where it can stop, within a grace period if it is given one.

Python drops an exception that is raised in a callback, and runs no handler
while the main thread is in foreign code. So a thread of its own hears every
signal (`signal.set_wakeup_fd`), and ends a process that did not end by itself.
"""

from collections.abc import Callable, Iterator
import contextlib
import os
import select
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, NoReturn

from slipstream_jax.data.source import SourceWrapper
from slipstream_jax.types import Batch

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_GRACE_S = 5.0  # from KeyboardInterrupt to the end of the process
_LONG_S = 3600.0  # `select` takes no longer wait
_SHARED = 16  # calls from one that asks other processes to the next
_GRACE_KEY = 'config.checkpoint.grace_seconds'


class _State:
  """State of the process, because signal handlers are process-wide."""

  number: int | None = None  # the first signal
  gentle = False
  grace_s: float | None = None
  agreed: Callable[[int], set[int]] | None = None  # see `share`
  asked, calls = False, 0


@contextlib.contextmanager
def installed(kept: str) -> Iterator[None]:
  """Handles the signals of this process.

  A signal that is ignored, as in a shell's background, stays ignored. Outside
  the main thread nothing is handled.

  Args:
    kept: what a process leaves if it ends at once, as a clause.
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

  sys.unraisablehook = unless_interrupt  # the watcher ends the process
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
def gently(grace_s: float | None = None) -> Iterator[None]:
  """Makes the first signal wait until the program asks for it.

  Args:
    grace_s: seconds after that signal, at which the process ends with code 1
      if it is still in the block. None waits without a limit.
  """
  before = _State.gentle, _State.grace_s
  _State.grace_s, _State.gentle = grace_s, True
  try:
    yield
  finally:
    _State.gentle, _State.grace_s = before


@contextlib.contextmanager
def shared(agreed: Callable[[int], set[int]] | None) -> Iterator[None]:
  """Lets several processes end at the same step.

  `asked` is then true in all of them at the same call, every 16th of which
  asks the others. `check` raises what `asked` has returned last.

  Args:
    agreed: returns the numbers that the processes give it. None: there are no
      others.
  """
  _State.agreed, _State.asked, _State.calls = agreed, False, 0
  try:
    yield
  finally:
    _State.agreed = None


def asked() -> bool:
  """Whether a signal asked the program to end."""
  here = _State.number is not None
  if _State.agreed is None:
    return here
  if not _State.asked and _State.calls % _SHARED == 0:
    _State.asked = 1 in _State.agreed(int(here))
  _State.calls += 1
  return _State.asked


def check() -> None:
  """Raises KeyboardInterrupt if a signal asked the program to end."""
  if asked() if _State.agreed is None else _State.asked:
    raise KeyboardInterrupt


def code() -> int:
  """Returns the exit code of an interrupted program: 130 or 143."""
  return _code_of(_State.number)


class Checked(SourceWrapper):
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
  """Ends the process at the second signal, or if the first had no effect."""
  first: int | None = None
  gentle, since = False, 0.0  # at the first signal
  while True:
    wait = None
    if first is not None and _State.gentle and _State.grace_s is not None:
      left = since + _State.grace_s - time.monotonic()
      if left <= 0:
        late = f'not ready {_State.grace_s:g} s after it was asked to end'
        _end(1, f'{late} ({_GRACE_KEY}); {kept}')
      wait = min(left, _LONG_S)
    elif first is not None and not gentle and not _State.gentle:
      wait = _GRACE_S
    if not select.select([reading], [], [], wait)[0]:
      if not gentle and not _State.gentle:
        _end(_code_of(first), f'interrupted at once; {kept}')
      continue
    heard = os.read(reading, 64)
    if not heard:  # closed at the end of `installed`
      return
    for number in heard:
      if number not in _SIGNALS:
        continue
      if first is not None:
        _end(_code_of(number), f'interrupted at once; {kept}')
      first, gentle, since = number, _State.gentle, time.monotonic()


def _code_of(number: int | None) -> int:
  return 128 + (number or signal.SIGINT)


def _end(code: int, sentence: str) -> NoReturn:
  """Ends the process, whatever its threads do."""
  last_words(sentence)
  os._exit(code)


def last_words(sentence: str) -> None:
  """Prints an error before the process ends, from any of its threads."""
  if sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty():
    os.write(1, b'\x1b[?25h\n')  # a progress bar hid the cursor
  os.write(2, f'error: {sentence}\n'.encode())
