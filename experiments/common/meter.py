"""Turns step records into lines of metrics: means and rates over a stretch."""

from collections.abc import Iterator
import contextlib
import math
import time
from typing import Any

from experiments.common.compiling import compiled
from slipstream_jax.engine.counters import Counters
from slipstream_jax.training.loop import StepRecord


class Meter:
  """A stopwatch for training steps, stopped while anything else runs.

  Compiling, by XLA or numba, is left out: it is paid once, however long the
  run.

  Attributes:
    seconds: time spent in training steps so far, those before a resume too.
    step: the last one added; 0 before the first.
  """

  def __init__(
    self, counters: Counters, seconds: float = 0.0, examples: int = 0
  ) -> None:
    """Goes on from `counters`, after so many seconds for so many examples."""
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
    """Stops the clock, adding what passed since `start`."""
    stopped = now()
    self.seconds += stopped - self._started
    self._line_seconds += stopped - self._started
    self._started = stopped

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Leaves out what the block takes; the clock runs before and after it."""
    self.stop()
    yield
    self.start()

  def add(self, at: StepRecord) -> None:
    """Takes in one step."""
    self._losses.append(at.loss)
    self._last = at
    self._trained = at.counters.examples_trained
    self.step = at.step

  def go_back(self, step: int, counters: Counters) -> None:
    """What was added since that step is not so; its time was spent."""
    self.stop()
    self._losses, self.step = [], step
    self._since, self._trained = counters, counters.examples_trained

  @property
  def untold(self) -> int:
    """Steps added since the last line."""
    return len(self._losses)

  @property
  def examples(self) -> int:
    """Examples trained in those seconds."""
    return self._trained - self._untimed

  def line(self) -> dict[str, Any]:
    """Means and rates since the last line; at least one step was added."""
    self.stop()
    steps, at = len(self._losses), self._last
    # Of a step that was skipped for its loss there is none.
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


def now() -> float:
  """Seconds on a clock that stands still while something is compiled."""
  return time.perf_counter() - compiled().seconds
