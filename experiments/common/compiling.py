"""Counts the compilations of this process, and the time they take."""

import threading
import time
from typing import NamedTuple

import jax.monitoring

_COMPILE = '/jax/core/compile/backend_compile_duration'
_PARTS = (
  _COMPILE,
  '/jax/core/compile/jaxpr_trace_duration',
  '/jax/core/compile/jaxpr_to_mlir_module_duration',
)


class Compiled(NamedTuple):
  """Compilations of this process since `compiled` was first called."""

  programs: int
  """XLA compilations."""
  seconds: float
  """Time in which any thread traced, lowered or compiled for XLA, or compiled
  or loaded numba code. Overlapping times count once."""


class _Spans:
  """The union of time spans, in seconds of `time.perf_counter`."""

  def __init__(self) -> None:
    self._apart: list[tuple[float, float]] = []  # disjoint, in order
    self._before = 0.0  # total length of spans that were removed

  def add(self, start: float, end: float) -> None:
    """Adds a span that ends after all others."""
    while self._apart and self._apart[-1][1] >= start:
      start = min(start, self._apart.pop()[0])
    self._apart.append((start, end))
    if len(self._apart) > 1000:  # no compilation starts that long ago
      first, last = self._apart.pop(0)
      self._before += last - first

  def seconds(self, since: float | None, now: float) -> float:
    """Returns the union's length, including an open span since `since`."""
    spans = self._apart
    total = self._before + sum(end - start for start, end in spans)
    if since is not None:
      inside = sum(
        end - max(start, since) for start, end in spans if end > since
      )
      total += now - since - inside
    return total


class _Compiling:
  """State of the process, because its compilers are process-wide."""

  lock = threading.RLock()  # numba may compile while garbage is collected
  listens = False
  programs = 0
  spans = _Spans()
  depth = 0  # nested acquisitions of numba's lock by its one holder
  since: float | None = None  # when the lock was acquired


def compiled() -> Compiled:
  """Returns the compilations of this process since the first call."""
  with _Compiling.lock:
    # A second listener would count every compilation twice.
    if not _Compiling.listens:
      _Compiling.listens = True
      jax.monitoring.register_event_duration_secs_listener(_listen)
      _listen_to_numba()
    now = time.perf_counter()
    seconds = _Compiling.spans.seconds(_Compiling.since, now)
    return Compiled(_Compiling.programs, seconds)


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
  if event in _PARTS:
    with _Compiling.lock:
      now = time.perf_counter()
      _Compiling.programs += event == _COMPILE
      _Compiling.spans.add(now - duration_secs, now)


def _listen_to_numba() -> None:
  from numba.core import event  # slow, so imported only when needed

  class Listener(event.Listener):
    def on_start(self, _: event.Event) -> None:
      with _Compiling.lock:
        if not _Compiling.depth:
          _Compiling.since = time.perf_counter()
        _Compiling.depth += 1

    def on_end(self, _: event.Event) -> None:
      with _Compiling.lock:
        _Compiling.depth -= 1
        if not _Compiling.depth and _Compiling.since is not None:
          _Compiling.spans.add(_Compiling.since, time.perf_counter())
          _Compiling.since = None

  event.register('numba:compiler_lock', Listener())
