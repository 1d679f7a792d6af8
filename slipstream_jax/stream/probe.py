"""How the planner's thread learns what the step's thread saw of the rows."""

import threading
from typing import Any

from slipstream_jax.errors import UserError
from slipstream_jax.stream.buffers import to_host
from slipstream_jax.types import RowChange

_WAIT_S = 0.05  # how often a wait looks for an interrupt


class StepProbe:
  """A mailbox for the last window's row changes, known by its number.

  The step's thread puts arrays of the device into it, as soon as they are
  dispatched; the schedule, in the planner's thread, waits for those of the
  window that it wants and copies them.
  """

  def __init__(self) -> None:
    """Empty."""
    self._here = threading.Condition()
    self._window, self._change = 0, None
    self._wanted: int | None = None
    self._interrupted = False

  def put(self, window: int, change: Any) -> None:
    """Leaves a window's change and touches: f32[H] and i32[H], on a device."""
    # The last window is enough: a schedule asks before its next one closes, or
    # gives up. Number, not order, tells whether this is the one it wants.
    with self._here:
      self._window, self._change = window, change
      self._here.notify_all()

  def row_change(self, window: int) -> RowChange:
    """What rows did in that window; waits for it.

    Raises:
      UserError: `interrupt` was called first.
    """
    with self._here:
      self._wanted = window
      try:
        while self._window != window:
          if self._interrupted:
            raise UserError(
              f'a decision needs what rows did in window {window}',
              got='no step that ended it',
              where='slipstream, batches',
              hint='train each batch, in the thread that takes it, before '
              'asking for those after it',
            )
          self._here.wait(_WAIT_S)
      finally:
        self._wanted = None
      change = self._change
    # Outside the lock, as it waits for the device: the step's thread may `put`.
    return RowChange(*to_host(change))

  @property
  def starves(self) -> bool:
    """Whether somebody waits for a window that no step has ended yet."""
    with self._here:
      return self._wanted is not None and self._wanted != self._window

  def resume(self, window: int | None) -> None:
    """Keeps the change of that window alone, for a schedule that resumes.

    Raises:
      UserError: it is not here; the step that would put it was taken before
        the schedule's position, so to wait for it would be to wait for ever.
    """
    if window is None:
      # A window that is trained once more has the same number as before, and
      # must not be answered with what its rows did then.
      self.put(0, None)
    elif self._window != window:
      raise UserError(
        f'a schedule resumes where its window {window} has been compared',
        got=f'window {self._window}' if self._window else 'no window',
        where='set_state, state',
        hint='restore the checkpoint that the state is of, after slipstream()',
      )

  @property
  def window(self) -> int:
    """Number of the last window put; 0 before the first."""
    return self._window

  def interrupt(self, interrupted: bool = True) -> None:
    """Makes waits fail, or allows them again."""
    with self._here:
      self._interrupted = interrupted
      self._here.notify_all()
