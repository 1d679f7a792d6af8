"""Measures training time: rates of steps, and the time spent in compilers."""

from collections.abc import Iterator
import contextlib
import math
import threading
import time
from typing import Any, ClassVar, NamedTuple

import jax.monitoring

from slipstream_jax.engine.counters import Counters
from slipstream_jax.training.loop import StepRecord

_TRACE = '/jax/core/compile/jaxpr_trace_duration'
_LOWER = '/jax/core/compile/jaxpr_to_mlir_module_duration'
_COMPILE = '/jax/core/compile/backend_compile_duration'


class Compiled(NamedTuple):
  """Compilations of this process since `compiled` was first called."""

  programs: int
  """Programs that XLA compiled, or that were read from JAX's cache."""
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
  lowered: ClassVar[set[int]] = set()  # threads whose program XLA compiles


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


def is_compiling() -> bool:
  """Whether XLA or numba is compiling, once `compiled` was called."""
  return bool(_Compiling.lowered or _Compiling.depth)


def now() -> float:
  """Returns seconds on a clock that stops during compilations."""
  return time.perf_counter() - compiled().seconds


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
  if event in (_TRACE, _LOWER, _COMPILE):
    with _Compiling.lock:
      now = time.perf_counter()
      _Compiling.spans.add(now - duration_secs, now)
      if event == _LOWER:
        _Compiling.lowered.add(threading.get_ident())
      elif event == _COMPILE:
        _Compiling.programs += 1
        _Compiling.lowered.discard(threading.get_ident())


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


class Meter:
  """A stopwatch for training steps, stopped while anything else runs.

  It leaves out compilations, which are paid once, however long the run.

  Attributes:
    seconds: training time so far, with that of the processes before.
    step: the last step added, or 0.
  """

  def __init__(
    self, counters: Counters, seconds: float = 0.0, examples: int = 0
  ) -> None:
    """Starts from the counters, after `seconds` for `examples` examples."""
    self.seconds = seconds
    self.step = 0
    self._since = counters
    self._trained = counters.examples_trained
    self._untimed = counters.examples_trained - examples
    self._losses: list[float] = []
    self._line_seconds = 0.0
    self.start()

  def start(self) -> None:
    """Starts the clock."""
    self._started = now()

  def stop(self) -> None:
    """Stops the clock, and adds the time since `start`."""
    stopped = now()
    self.seconds += stopped - self._started
    self._line_seconds += stopped - self._started
    self._started = stopped

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Leaves out the time of a block. The clock runs before and after it."""
    self.stop()
    yield
    self.start()

  def add(self, at: StepRecord) -> None:
    """Adds one step."""
    self._losses.append(at.loss)
    self._last = at
    self._trained = at.counters.examples_trained
    self.step = at.step

  def go_back(self, step: int, counters: Counters) -> None:
    """Drops the steps after `step`, and keeps the time they took."""
    self.stop()
    self._losses, self.step = [], step
    self._since, self._trained = counters, counters.examples_trained

  @property
  def steps(self) -> int:
    """Steps added since the last line."""
    return len(self._losses)

  @property
  def examples(self) -> int:
    """Examples trained in `seconds`."""
    return self._trained - self._untimed

  def line(self) -> dict[str, Any]:
    """Returns means and rates since the last line, of at least one step."""
    self.stop()
    steps, at = len(self._losses), self._last
    # A step that was skipped for its loss has none.
    losses = [loss for loss in self._losses if math.isfinite(loss)]
    moved = Counters(
      *(a - b for a, b in zip(at.counters, self._since, strict=True))
    )
    line = {
      'step': at.step,
      'kind': 'train',
      'loss': sum(losses) / len(losses) if losses else None,
      'examples_per_s': moved.examples_trained / max(self._line_seconds, 1e-9),
      'examples_trained': at.counters.examples_trained,
      'rows_loaded_per_step': moved.rows_loaded / steps,
      'rows_stored_per_step': moved.rows_stored / steps,
      'mb_loaded_per_step': moved.bytes_loaded / steps / 1e6,
      'mb_stored_per_step': moved.bytes_stored / steps / 1e6,
    }
    self._losses, self._line_seconds = [], 0.0
    self._since = at.counters
    return line
