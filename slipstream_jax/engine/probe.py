"""Mailboxes by which the planner's thread gets results of steps."""

from collections.abc import Callable, Sequence
import threading
from typing import Any

from jaxtyping import Bool
import numpy as np

from slipstream_jax.engine.buffers import to_host
from slipstream_jax.errors import UserError
from slipstream_jax.types import RowChange

_WAIT_S = 0.05  # seconds between checks for an interrupt


class _StepWaiter:
  """Lets the planner's thread wait for a step, until it is interrupted."""

  def __init__(self, here: threading.Condition) -> None:
    self._here, self._interrupted = here, False
    self._there: Callable[[], bool] | None = None

  def _wait(self, there: Callable[[], bool], needed: str, got: str) -> None:
    """Waits, with the lock held, until `there` is true.

    Raises:
      UserError: `interrupt` was called first.
    """
    self._there = there
    try:
      while not there():
        if self._interrupted:
          raise UserError(
            f'a decision needs {needed}',
            got=got,
            where='slipstream, batches',
            hint='train each batch, in the thread that takes it, before '
            'asking for those after it',
          )
        self._here.wait(_WAIT_S)
    finally:
      self._there = None

  @property
  def starves(self) -> bool:
    """Whether a thread waits for a result that no step has put yet."""
    with self._here:
      return self._there is not None and not self._there()

  def interrupt(self, interrupted: bool = True) -> None:
    """Makes waits fail, or allows them again."""
    with self._here:
      self._interrupted = interrupted
      self._here.notify_all()


class StepProbe(_StepWaiter):
  """Mailbox for the last window's row changes, keyed by window number.

  The step's thread puts device arrays into it as soon as they are dispatched.
  The schedule, in the planner's thread, waits for those of the window that it
  needs, and copies them.

  Attributes:
    window: number of the last window put, 0 before the first.
  """

  def __init__(self) -> None:
    """Makes an empty mailbox."""
    super().__init__(threading.Condition())
    self.window, self._change = 0, None
    self._losses: dict[int, Any] = {}

  def put(self, window: int, change: Any) -> None:
    """Puts a window's change and touches: f32[H] and i32[H], on a device."""
    # One window is enough: a schedule asks before its next window closes, or
    # not at all. The number tells whether it is the right one.
    with self._here:
      self.window, self._change = window, change
      self._here.notify_all()

  def row_change(self, window: int) -> RowChange:
    """Waits for the row changes of that window and copies them to the host.

    Raises:
      UserError: `interrupt` was called first.
    """
    with self._here:
      self._wait(
        lambda: self.window == window,
        f'the row changes of window {window}',
        'no step that ended it',
      )
      change = self._change
    # Outside the lock, as it waits for the device while a step may `put`.
    return RowChange(*to_host(change))

  def resume(self, window: int | None) -> None:
    """Keeps only the change of that window, for a schedule that resumes.

    Raises:
      UserError: it is not here. The step that puts it is in the past, so
        waiting for it would deadlock.
    """
    if window is None:
      # A repeated window has the same number, and must not get the old result.
      self.put(0, None)
    elif self.window != window:
      raise UserError(
        f'a schedule resumes where its window {window} has been compared',
        got=f'window {self.window}' if self.window else 'no window',
        where='set_state, state',
        hint='restore the checkpoint that the state is of, after slipstream()',
      )

  def put_loss(self, number: int, loss: Any) -> None:
    """Puts the loss f32[] of the held-out examples, on a device."""
    with self._here:
      self._losses[number] = loss
      self._here.notify_all()

  def loss(self, number: int) -> float:
    """Waits for the loss with that number and returns it.

    Raises:
      UserError: `interrupt` was called first.
    """
    with self._here:
      self._wait(
        lambda: number in self._losses,
        f'the loss of held-out examples, number {number}',
        'no step after which they were scored',
      )
      loss = self._losses[number]
    return float(to_host(loss))

  def resume_losses(self, number: int) -> None:
    """Drops losses above that number, as their batches will be repeated."""
    with self._here:
      self._losses = {n: x for n, x in self._losses.items() if n <= number}

  @property
  def losses(self) -> dict[int, float]:
    """All losses by number. A schedule may ask for them again."""
    with self._here:
      losses = dict(self._losses)
    return {number: float(to_host(loss)) for number, loss in losses.items()}


class Judgements:
  """Mailbox for the last judged masks of frozen rows.

  All iterators of a trainer share it. Each waits with its own probe.
  """

  def __init__(self) -> None:
    """Makes an empty mailbox."""
    self.here = threading.Condition()
    self.step, self.stale = -1, ()

  def put(self, step: int, stale: Any) -> None:
    """Puts per group a mask bool[H], on a device, or None.

    Args:
      step: `Engine.step` of the step before which rows were judged.
      stale: which hot rows are stale.
    """
    with self.here:
      self.step, self.stale = step, stale
      self.here.notify_all()


class JudgementProbe(_StepWaiter):
  """Lets one iterator wait for the judgements of a trainer."""

  def __init__(self, judgements: Judgements) -> None:
    """Waits for results in this mailbox."""
    super().__init__(judgements.here)
    self._judgements = judgements

  def stale(self, step: int) -> Sequence[Bool[np.ndarray, ' _H'] | None]:
    """Returns per group the mask judged before the given step, or later.

    Raises:
      UserError: `interrupt` was called first.
    """
    judgements = self._judgements
    with self._here:
      self._wait(
        lambda: judgements.step >= step,
        'the stale rows of the last window of skip_stale',
        'no step after it',
      )
      stale = judgements.stale
    return tuple(to_host(stale))
