"""Ends a test that hangs, whatever it waits for, and no test that is slow.

Wall time alone tells nothing on a busy machine. So a stretch of it ends a test
only if the process did nothing in it, or did far more than it ever should.
"""

import contextlib
import faulthandler
import signal
import sys
import time

TICK_S = 10.0
IDLE_S = 0.3  # of CPU time in a tick: threads that poll need a tenth of it
BUSY_S = 30.0  # of CPU time in all: more than any case with all it compiles
DEAF_S = 300  # no Python ran in the main thread: the process itself is ended


class Hang(BaseException):
  """What runs hangs; no `except Exception` keeps it from the test."""


@contextlib.contextmanager
def watchdog(on_hang=lambda: None, tick_s=TICK_S, busy_s=BUSY_S):
  """Raises Hang in the main thread where the block hangs.

  Args:
    on_hang: called first, again at every further tick that finds it hanging.
    tick_s: seconds of wall time from one look to the next.
    busy_s: seconds of CPU time after which a block is taken to be endless.
  """
  started = last = time.process_time()

  def look(*_):
    nonlocal last
    faulthandler.dump_traceback_later(DEAF_S, exit=True, file=sys.__stderr__)
    now = time.process_time()
    idle, last = now - last < IDLE_S * tick_s / TICK_S, now
    if not idle and now - started < busy_s:
      return
    on_hang()
    faulthandler.dump_traceback(file=sys.__stderr__)
    kind = 'waits for nothing' if idle else 'never ends'
    raise Hang(f'{kind}: {now - started:.1f} s of CPU time')

  before = signal.signal(signal.SIGALRM, look)
  signal.setitimer(signal.ITIMER_REAL, tick_s, tick_s)
  faulthandler.dump_traceback_later(DEAF_S, exit=True, file=sys.__stderr__)
  try:
    yield
  finally:
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
