"""Measures what the host spends on a batch, and finds when skipping pays.

The model of `batch_ms`: batches pass through threads that work at once, so a
batch takes as long as the busiest of

* the device, which takes a step per trained batch,
* the source, from which one worker at a time reads and chooses,
* the workers, which do that, score examples, copy those that are kept, and find
  the unique rows of trained batches,
* the planner's thread, which does their work, too, if there is one worker,
* the thread that trains,
* all cores, which share everything but the device's steps.

A share d that is left out saves d of the trained batches, and choosing is paid
for each batch of the source. A batch of chosen examples may take the host
longer, as they look up rarer rows, so batches are also measured before any
example is left out. Assumptions: batches are prepared ahead, work grows with
the examples of a batch, threads wait for each other in no other way, and a
device has a processor of its own. What other threads spend, such as JAX's, a
source's own and those that help to copy rows, is what the whole process spends
beyond these.

If the device is the host's processor, that is left out, as most of it is the
device's. What is left also takes longer than beside an accelerator, because
steps empty the caches. So it tells whether skipping pays here, and nothing
about another device.

Figures are of the processor's time, so they hold while other programs run. No
choice depends on them.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
import contextlib
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from slipstream_jax.schedules.base import ScheduledBatch

_RECENT = 1000  # steps that figures are of
_ALONE = 50  # steps from one that the device takes alone to the next
_SAMPLES = 20  # such steps, as each lets the device wait
_WHOLE = 20  # batches that tell what one takes from which nothing is left out
_RARE = 0.02  # share of the slowest choices, in which programs are compiled


class HostMs(NamedTuple):
  """Milliseconds of the processor, by what the host does."""

  read: float = 0.0
  """Reading a batch of the source."""
  choose: float = 0.0
  """Choosing its examples, as far as that goes in the order of the source."""
  find: float = 0.0
  """Finding the unique rows of a trained batch."""
  plan: float = 0.0
  """Planning which of them move."""
  step: float = 0.0
  """Everything that the thread that trains does for a step."""
  score: float = 0.0
  """Scoring its examples, and copying those that are kept."""
  rest: float = 0.0
  """Time that other threads take for a trained batch, in ms."""


class Threads(NamedTuple):
  """Threads that share the host's work."""

  workers: int
  """Those that read, choose and find unique rows."""
  cores: int
  """Most threads that run at once."""


class Payoff(NamedTuple):
  """Whether a run that leaves examples out saves time by it."""

  left_out: float
  """Share of the examples that is left out."""
  step_ms: float
  """What a step of a full batch takes the device."""
  step_ms_to_pay: float | None
  """Where steps are shorter, skipping takes as long as no skipping, or longer.
  0 if skipping saves time however short they are. None if the device is the
  host's processor."""
  pays: bool


def batch_ms(
  host: HostMs, threads: Threads, left_out: float, step_ms: float
) -> float:
  """Returns the ms per batch of the source, when all threads are busy.

  Args:
    host: as measured. `choose` and `score` are 0 where nothing is chosen.
    threads: that do it.
    left_out: share of the examples, in [0, 1).
    step_ms: what a step takes the device.
  """
  kept, source = 1 - left_out, host.read + host.choose
  workers, planner = source + host.score + kept * host.find, kept * host.plan
  ahead = max(source, workers / threads.workers, planner)
  if threads.workers == 1:
    ahead = workers + planner
  trainer = kept * host.step
  in_all = workers + planner + trainer + kept * host.rest
  cores = in_all / threads.cores
  return max(kept * step_ms, ahead, trainer, cores)


def step_ms_to_pay(
  host: HostMs, whole: HostMs, threads: Threads, left_out: float
) -> float:
  """Returns the device's step below which choosing does not pay, in ms.

  Args:
    host: as for `batch_ms`, like the last two.
    whole: the same where nothing is chosen or left out.
    threads: that do it.
    left_out: share of the examples.
  """
  # With a step of T ms, skipping takes max((1 - d) T, some), and no skipping
  # max(T, none). If some < none, that is always less, else only if T > some.
  some = batch_ms(host, threads, left_out, 0.0)
  none = batch_ms(whole, threads, 0.0, 0.0)
  return some if some >= none else 0.0


def payoff(
  host: HostMs,
  whole: HostMs,
  threads: Threads,
  left_out: float,
  step_ms: float,
  on_host: bool,
) -> Payoff:
  """Returns whether skipping pays.

  Args:
    host: as for `step_ms_to_pay`, like the next three.
    whole: where nothing is left out.
    threads: that do it.
    left_out: share of the examples.
    step_ms: what a step takes the device.
    on_host: whether the device is the host's own processor. Then a step also
      takes the time of its thread and of the cores.
  """
  if not on_host:
    least = step_ms_to_pay(host, whole, threads, left_out)
    return Payoff(left_out, step_ms, least, step_ms > least)
  host = host._replace(step=host.step + step_ms, rest=0.0)
  whole = whole._replace(step=whole.step + step_ms, rest=0.0)
  none = batch_ms(whole, threads, 0.0, 0.0)
  pays = batch_ms(host, threads, left_out, 0.0) < none
  return Payoff(left_out, step_ms, None, pays)


class _Step(NamedTuple):
  """Measurements of one step."""

  host: HostMs
  """Of all batches that were read for the step."""
  read: float
  """Batches of the source that were read for it."""
  left_out: float
  """Batches' worth of examples that were left out of them."""
  trained: float
  """Share of a full batch that was trained."""
  process: float
  """Milliseconds of all threads since the step before."""


class HostClock:
  """Collects measurements of the latest steps of a training loop.

  Once a step comes after examples that were left out, only such steps count.

  Attributes:
    threads: that do the work.
    whole: what batches took before examples were left out, without choosing.
      None if there were too few.
  """

  def __init__(self, threads: Threads) -> None:
    """Starts without measurements."""
    self.threads = threads
    self.whole: HostMs | None = None
    self._steps = collections.deque[_Step](maxlen=_RECENT)
    self._device_ms: list[float] = []
    self._taken, self._skips = 0, False
    # Whether some steps also predict other batches, or are of smaller ones.
    self._predicts = self._smaller = False
    # After the last step: the processor's time of this thread, and of all.
    self._stepped, self._process = time.thread_time(), time.process_time()

  @contextlib.contextmanager
  def timed(
    self, prepared: HostMs, item: ScheduledBatch, wait: Callable[[], object]
  ) -> Iterator[None]:
    """Measures the block, which takes a step. It counts if it succeeds.

    Args:
      prepared: what was spent on the batch before its step.
      item: the batch.
      wait: waits for the device. While examples are left out, it is called
        before and after some steps, which the device then takes alone.
    """
    due = self._taken % _ALONE == _ALONE - 1
    alone = self._skips and due and len(self._device_ms) < _SAMPLES
    if alone:
      wait()
    started, cpu = time.perf_counter(), time.thread_time()
    yield
    now = time.thread_time()
    cpu, spent, self._stepped = now - cpu, now - self._stepped, now
    in_all = time.process_time()
    process, self._process = in_all - self._process, in_all
    size = item.batch_size or len(item.batch.labels)
    trained = np.count_nonzero(item.batch.weights) / size
    if alone and trained:
      wait()
      seconds = time.perf_counter() - started - cpu
      self._device_ms.append(1e3 * seconds / trained)
    self._taken += 1
    self._predicts = self._predicts or item.edge.predicts is not None
    self._smaller = self._smaller or len(item.batch.labels) < size
    if self._skips and not item.dropped:
      return
    if item.dropped and not self._skips:
      self._skips = True
      if len(self._steps) >= _WHOLE:
        self.whole = self.host_ms()._replace(choose=0.0, score=0.0)
      self._steps.clear()
    host = prepared._replace(step=1e3 * spent)
    parts = item.seen / size, item.dropped / size, trained, 1e3 * process
    self._steps.append(_Step(host, *parts))

  @property
  def left_out(self) -> float:
    """Share of the examples that was left out, in the steps that count."""
    read = sum(step.read for step in self._steps)
    return sum(step.left_out for step in self._steps) / max(read, 1.0)

  def host_ms(self) -> HostMs:
    """Returns medians, and the mean time to choose, of the latest steps."""
    of_read = [
      np.array([step.host.read, step.host.choose, step.host.score]) / step.read
      for step in self._steps
      if step.read
    ]
    of_trained = [
      np.array([step.host.find, step.host.plan, step.host.step]) / step.trained
      for step in self._steps
      if step.trained
    ]
    read = float(np.median(of_read, axis=0)[0])
    _, choose, score = _usual(of_read)
    find, plan, step = np.median(of_trained, axis=0).tolist()
    # Threads work ahead, so this step's time is not that of its own batch.
    process = float(np.median([step.process for step in self._steps]))
    known, trained = _usual([(sum(s.host), s.trained) for s in self._steps])
    rest = max(process - known, 0.0) / max(trained, 1e-9)
    return HostMs(read, choose, find, plan, step, score, rest)

  def payoff(self) -> Payoff | None:
    """Returns whether skipping pays.

    None if too few steps were measured, if steps also predict other batches, or
    if a device of its own takes smaller batches, perhaps in the time of a full
    one.
    """
    on_host = jax.default_backend() == 'cpu'
    unknown = self._predicts or (self._smaller and not on_host)
    if unknown or len(self._steps) < _ALONE or not self._device_ms:
      return None
    host, step_ms = self.host_ms(), float(np.median(self._device_ms))
    whole = self.whole or host._replace(choose=0.0, score=0.0)
    return payoff(host, whole, self.threads, self.left_out, step_ms, on_host)


def _usual(columns: Sequence[Any]) -> list[float]:
  """Returns the means of columns [n, k] without their largest values.

  Every tenth batch may take longer, so a median would leave that out.
  """
  ranked = np.sort(columns, axis=0)
  return ranked[: len(ranked) - int(_RARE * len(ranked))].mean(axis=0).tolist()
