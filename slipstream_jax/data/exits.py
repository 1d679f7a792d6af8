"""Ends the threads of iterators that are still open as Python exits.

Python kills daemon threads as it finalizes. One that comes back from C++ to
take the lock of the interpreter is unwound through C++ then, which aborts the
process: "FATAL: exception not rethrown". So they are asked to end, and joined,
while Python still runs.
"""

import atexit
from collections.abc import Iterator
import threading
import time
from typing import Protocol, runtime_checkable
import weakref

_WAIT_S = 5.0
"""A thread may be in a source that never returns; the exit does not wait on."""


@runtime_checkable
class Threaded(Protocol):
  """An iterator that has threads."""

  def threads(self) -> Iterator[threading.Thread]:
    """Asks its threads to end, and yields them; does not wait."""
    ...


_open: weakref.WeakSet[Threaded] = weakref.WeakSet()
_lock = threading.Lock()


def ends_at_exit(iterator: Threaded) -> None:
  """Has the iterator's threads ended before Python finalizes."""
  with _lock:
    # Not on import: what is registered last is called first, and threads must
    # end before JAX drops its backends.
    if not _open:
      atexit.unregister(_end_all)
      atexit.register(_end_all)
    _open.add(iterator)


def _end_all() -> None:
  with _lock:
    iterators = list(_open)
  # All are asked before one is waited for, as some wait for others.
  threads = [thread for one in iterators for thread in one.threads()]
  until = time.monotonic() + _WAIT_S
  for thread in threads:
    thread.join(max(0.0, until - time.monotonic()))
