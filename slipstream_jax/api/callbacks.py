"""Callbacks of `Trainer.train`, among them logs for TensorBoard and as CSV.

A callback is any object with at least one of these methods:

  on_step(record): a `StepRecord`, in the order of the steps. The next step may
    be running.
  on_validation(record): a `Validation`. No step is running.
  on_end(history): the `History`, also after an early stop, but not after an
    error.

Of several processes, each calls its callbacks, but only the first one writes
logs.
"""

from collections.abc import Callable, Iterable, Mapping
import csv
import os
import pathlib
import time
from typing import Any, TextIO

import jax

from slipstream_jax.api.history import History, numbers_of, Validation
from slipstream_jax.errors import check_path, UserError
from slipstream_jax.training.loop import StepRecord

_FLUSH_S = 30.0
_NAMES = 'on_step', 'on_validation', 'on_end'


class Callbacks:
  """Calls the methods that callbacks have, in their order."""

  def __init__(
    self,
    callbacks: Iterable[object],
    on_step: Callable[[StepRecord], Any] | None,
  ) -> None:
    """Takes callbacks, and a function that is called as an `on_step` is.

    Raises:
      UserError: a callback has none of the methods, or they are in no list.
    """
    listed = isinstance(callbacks, Iterable)
    known = [*callbacks] if listed else []
    for one in known if listed else [callbacks]:
      hears = any(hasattr(one, name) for name in _NAMES)
      if not (listed and hears) or isinstance(one, type):
        raise UserError(
          'callbacks must be a list of objects with on_step, on_validation or'
          ' on_end',
          got=repr(one),
          where='Trainer.train, callbacks',
          hint='give a single function as on_step=',
        )
    self._calls: dict[str, list[Callable[[Any], Any]]]
    self._calls = {name: [] for name in _NAMES}
    is_first = jax.process_index() == 0
    for one in known:
      if is_first or not isinstance(one, CSVLog | TensorBoard):
        self.add(one)
    if on_step is not None:
      self._calls['on_step'].append(on_step)

  def add(self, callback: object) -> None:
    """Adds one more callback."""
    for name, calls in self._calls.items():
      if hasattr(callback, name):
        calls.append(getattr(callback, name))

  def tell(self, name: str, what: StepRecord | Validation | History) -> None:
    """Calls the method of that name of each callback that has it."""
    for call in self._calls[name]:
      call(what)


class CSVLog:
  """A callback that writes two files of comma-separated values.

  `log.csv` has a line per step: step, loss, and examples trained so far.
  `log_validation.csv` has one per validation: step, seconds, and the metrics.
  An object writes the files anew, and calls of `train` with the same object
  append to them.
  """

  def __init__(self, path: str | os.PathLike[str]) -> None:
    """Opens nothing before the first record.

    Args:
      path: of the file of steps, in a folder that exists.

    Raises:
      UserError: it is no path, or the file cannot be written.
    """
    check_path(path, 'CSVLog, path')
    self._path = pathlib.Path(path)
    try:
      self._path.open('a').close()
    except OSError as error:
      raise UserError(
        'the file of a log must be writable',
        got=error,
        where='CSVLog, path',
        hint='name another one, in a folder that exists',
      ) from error
    self._files: dict[str, TextIO] = {}
    self._columns: dict[str, list[str]] = {}
    self._flushed = 0.0

  def on_step(self, record: StepRecord) -> None:
    """Writes a line of the step."""
    examples = record.counters.examples_trained
    numbers = {'loss': record.loss, 'examples': examples}
    self._write('', {'step': record.step, **numbers})
    if time.monotonic() - self._flushed > _FLUSH_S:
      self._flush()

  def on_validation(self, record: Validation) -> None:
    """Writes a line of the metrics. Both files are then on disk."""
    first = {'step': record.step, 'seconds': round(record.seconds, 3)}
    self._write('_validation', first | numbers_of(record.metrics))
    self._flush()

  def on_end(self, history: History) -> None:
    """Closes the files."""
    for file in self._files.values():
      file.close()
    self._files = {}

  def _write(self, which: str, values: Mapping[str, float | int]) -> None:
    """Writes a line. The first one of a file says what its columns are."""
    begins, known = which not in self._columns, which in self._files
    columns = self._columns.setdefault(which, [*values])
    if not known:
      path = self._path.with_stem(self._path.stem + which)
      self._files[which] = path.open('w' if begins else 'a', newline='')
    lines = csv.writer(self._files[which], lineterminator='\n')
    if begins:
      lines.writerow(columns)
    lines.writerow([values.get(name, '') for name in columns])

  def _flush(self) -> None:
    for file in self._files.values():
      file.flush()
    self._flushed = time.monotonic()


class TensorBoard:
  """A callback that writes the curves that TensorBoard shows.

  These are `train/loss`, and each metric as `validation/log_loss` and so on.
  Needs tensorboardX. Show them with `tensorboard --logdir FOLDER`.
  """

  def __init__(self, folder: str | os.PathLike[str]) -> None:
    """Makes the folder, and no file before the first record.

    Args:
      folder: a folder of this run. Those of several runs, in one folder, are
        shown together.

    Raises:
      UserError: it cannot be made, or tensorboardX is not installed.
    """
    check_path(folder, 'TensorBoard, folder')
    self._folder = pathlib.Path(folder)
    check_events('TensorBoard')
    try:
      self._folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
      raise UserError(
        'the folder of a log must be one that can be made',
        got=error,
        where='TensorBoard, folder',
        hint='name another one',
      ) from error
    self._events: EventFile | None = None
    self._last = 0

  def on_step(self, record: StepRecord) -> None:
    """Writes the loss."""
    events = self._opened(record.step - 1)
    if record.step <= self._last:  # steps were taken back
      events.go_back(record.step - 1)
    self._last = record.step
    events.write(record.step, {'train/loss': record.loss})

  def on_validation(self, record: Validation) -> None:
    """Writes the metrics."""
    metrics = numbers_of(record.metrics).items()
    self._opened(record.step).write(
      record.step, {f'validation/{name}': value for name, value in metrics}
    )

  def on_end(self, history: History) -> None:
    """Closes the file."""
    if self._events is not None:
      self._events.close()
    self._events = None

  def _opened(self, step: int) -> 'EventFile':
    if self._events is None:
      self._events = EventFile(self._folder, step)
    return self._events


def check_events(where: str) -> None:
  """Checks that tensorboardX is there.

  Raises:
    UserError: it is not installed.
  """
  try:
    import tensorboardX  # noqa: F401
  except ImportError as error:
    raise UserError(
      'events for TensorBoard need tensorboardX',
      got=error,
      where=where,
      hint="install it with pip install 'slipstream_jax[fit]'",
    ) from error


class EventFile:
  """A file of TensorBoard events, written as they come.

  tensorboardX's own writer passes them to a thread through a bounded queue. If
  the disk is full, that thread ends, and the program never does.
  """

  def __init__(self, folder: pathlib.Path, step: int) -> None:
    """Makes a file for the steps after `step`."""
    from tensorboardX.event_file_writer import EventsWriter

    folder.mkdir(exist_ok=True)
    # Without the step, two files of one second would have the same name.
    self._writer = EventsWriter(str(folder / 'events'), f'.{step}')
    self._flushed = time.time()
    if step:  # an earlier process may have written later steps
      self.go_back(step)

  def go_back(self, step: int) -> None:
    """Drops what was written of later steps."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    log = SessionLog(status=SessionLog.START)
    self._writer.write_event(Event(step=step + 1, session_log=log))

  def write(self, step: int, values: Mapping[str, float | int | None]) -> None:
    """Writes numbers of a step, and leaves out those that are None."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.summary import scalar

    now = time.time()
    for name, value in values.items():
      if value is not None:
        summary = scalar(name, value)
        event = Event(step=step, wall_time=now, summary=summary)
        self._writer.write_event(event)
    if now - self._flushed > _FLUSH_S:  # flushing waits for the disk
      self._writer.flush()
      self._flushed = now

  def close(self) -> None:
    """Closes the file."""
    self._writer.close()
