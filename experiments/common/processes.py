"""Several processes that train one run together. The first writes and speaks.

`experiments.launch` starts them and says in the environment which one each is.
Under Slurm and Kubernetes, JAX finds that out by itself.
"""

from collections.abc import Iterator
import contextlib
import os
import sys
import threading
import types

import jax
import ml_collections

from experiments.common import interrupts, meter
from slipstream_jax.engine import buffers
from slipstream_jax.engine.mesh import devices_of
from slipstream_jax.errors import check_whole, UserError

NUMBER = 'JAX_PROCESS_ID'
"""Variable with the number of a process that `experiments.launch` started. JAX
itself reads JAX_COORDINATOR_ADDRESS."""
_HEARTBEAT_S, _SHUTDOWN_S = 10, 30
_TICK_S = 0.5
_IN_JAX = 1.4  # times as long
_OWN = 'experiments', 'slipstream_jax'


def join(config: ml_collections.ConfigDict) -> None:
  """Waits for the other processes of a run, if it has several.

  Call it before JAX looks for devices.

  Raises:
    UserError: an invalid combination of settings, or the others do not come.
  """
  count = config.processes
  check_whole(count, 1, 'config.processes', 'use 1, or experiments.launch')
  if count == 1:
    return
  _check(config)
  jax.config.update('jax_num_cpu_devices', config.devices // count)
  # It would hear SIGTERM in place of this program.
  jax.config.update('jax_enable_preemption_service', False)
  own = os.environ.get(NUMBER)
  given = (
    {} if own is None else {'num_processes': count, 'process_id': int(own)}
  )
  try:
    jax.distributed.initialize(
      **given,
      heartbeat_timeout_seconds=_HEARTBEAT_S,
      shutdown_timeout_seconds=_SHUTDOWN_S,
    )
  except (ValueError, RuntimeError) as error:
    raise UserError(
      f'the {count} processes of a run must find each other',
      got=' '.join(str(error).split())[:200],
      where='config.processes',
      hint='start them by experiments.launch, Slurm or Kubernetes',
    ) from error
  if jax.process_count() != count:
    raise UserError(
      f'a run of {count} processes must be started {count} times',
      got=jax.process_count(),
      where='config.processes',
      hint='set it to the number of processes that are started',
    )


def _check(config: ml_collections.ConfigDict) -> None:
  if config.devices % config.processes:
    raise UserError(
      f'the {config.processes} processes must divide the devices',
      got=config.devices,
      where='config.devices',
      hint='give the devices of all processes together',
    )
  if config.train.on_bad_loss == 'rollback':
    raise UserError(
      'several processes cannot go back to a checkpoint in the middle of a run',
      got='rollback',
      where='config.train.on_bad_loss',
      hint="use 'stop', and resume",
    )


def are_several() -> bool:
  """Whether this process has joined others."""
  return bool(jax.distributed.is_initialized())


def is_first() -> bool:
  """Whether this process writes and speaks."""
  return not are_several() or jax.process_index() == 0


def from_first(value: bool) -> bool:
  """Returns what the first process gives. All processes must call it."""
  if not are_several():
    return value
  return bool(devices_of(jax.device_count()).from_first(lambda: value))


class Watch:
  """Ends this process if its training thread hangs, or waits for one that does.

  JAX notices a process that is gone or frozen, and no other.
  """

  def __init__(self, seconds: float) -> None:
    """Ends it after so many seconds without a step. 0: never.

    It waits 1.4 times as long while the thread is in JAX, where it may wait for
    another process. So one that hangs is the first to say where. In the first
    step of a block it waits there without a limit, as the first process may
    still write a checkpoint.
    """
    self._most = seconds if are_several() else 0
    self._idle, self._taken, self._before = 0.0, 0, 0
    self._thread = threading.get_ident()

  @contextlib.contextmanager
  def on(self) -> Iterator[None]:
    """Watches a block in which nothing but steps and compilations takes long.

    The first step of all is not watched, as it may look for its place in the
    data.
    """
    ended = threading.Event()
    watcher = threading.Thread(
      target=self._watch, args=(ended,), name='slipstream-watch', daemon=True
    )
    self._idle, self._before = 0.0, self._taken
    if self._most:
      watcher.start()
    try:
      yield
    finally:
      ended.set()
      if self._most:
        watcher.join()

  def step(self) -> None:
    """Notes that a step was taken."""
    self._idle, self._taken = 0.0, self._taken + 1

  def _watch(self, ended: threading.Event) -> None:
    # A process that was stopped for a while has not been idle.
    while not ended.wait(_TICK_S):
      if not self._taken or meter.is_compiling():
        self._idle = 0.0
      self._idle += _TICK_S
      if self._idle > self._most:
        self._end_unless_in_jax()

  def _end_unless_in_jax(self) -> None:
    """Says where the training thread is, and aborts, as JAX does."""
    frame = sys._current_frames()[self._thread]
    # Copies to the host wait in our own code, as numpy calls JAX.
    module = frame.f_globals.get('__name__')
    in_jax = _package(frame) == 'jax' or module == buffers.__name__
    first = self._taken == self._before
    if in_jax and (first or self._idle <= _IN_JAX * self._most):
      return
    while frame.f_back and _package(frame) not in _OWN:
      frame = frame.f_back
    interrupts.last_words(
      f'process {jax.process_index()} has taken no step for {self._idle:g} s'
      f' (config.hang_seconds): it {"waits" if in_jax else "hangs"} in'
      f' {frame.f_globals.get("__name__")}, line {frame.f_lineno}'
    )
    os.abort()


def _package(frame: types.FrameType) -> str:
  """Returns the package of the code that a frame runs."""
  name: str = frame.f_globals.get('__name__', '')  # code by `exec` has none
  return name.partition('.')[0]
