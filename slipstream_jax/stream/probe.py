"""How the planner's thread learns what the step's thread saw of the rows."""

from collections.abc import Callable, Sequence
import threading
from typing import Any

from jaxtyping import Bool
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.stream.buffers import to_host
from slipstream_jax.types import RowChange

_WAIT_S = 0.05  # how often a wait looks for an interrupt


class _Waiting:
  """A wait of the planner's thread for a step; the other may end it."""

  def __init__(self, here: threading.Condition) -> None:
    self._here, self._interrupted = here, False
    self._there: Callable[[], bool] | None = None

  def _wait(self, there: Callable[[], bool], of: str, got: str) -> None:
    """Waits, with the lock held, until it is `there`.

    Raises:
      UserError: `interrupt` was called first.
    """
    self._there = there
    try:
      while not there():
        if self._interrupted:
          raise UserError(
            f'a decision needs what rows did {of}',
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
    """Whether somebody waits for what no step has left here yet."""
    with self._here:
      return self._there is not None and not self._there()

  def interrupt(self, interrupted: bool = True) -> None:
    """Makes waits fail, or allows them again."""
    with self._here:
      self._interrupted = interrupted
      self._here.notify_all()


class StepProbe(_Waiting):
  """A mailbox for the last window's row changes, known by its number.

  The step's thread puts arrays of the device into it, as soon as they are
  dispatched; the schedule, in the planner's thread, waits for those of the
  window that it wants and copies them.
  """

  def __init__(self) -> None:
    """Empty."""
    super().__init__(threading.Condition())
    self._window, self._change = 0, None
    self._losses: dict[int, Any] = {}

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
      self._wait(
        lambda: self._window == window,
        f'in window {window}',
        'no step that ended it',
      )
      change = self._change
    # Outside the lock, as it waits for the device: the step's thread may `put`.
    return RowChange(*to_host(change))

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

  def put_loss(self, number: int, loss: Any) -> None:
    """Leaves the loss f32[] of the held-out examples, on a device."""
    with self._here:
      self._losses[number] = loss
      self._here.notify_all()

  def loss(self, number: int) -> float:
    """The loss left under that number; waits for it.

    Raises:
      UserError: `interrupt` was called first.
    """
    with self._here:
      self._wait(
        lambda: number in self._losses,
        f'to the loss of held-out examples, number {number}',
        'no step after which they were scored',
      )
      loss = self._losses[number]
    return float(to_host(loss))

  def resume_losses(self, number: int) -> None:
    """Forgets losses above that number: those batches are yet to come."""
    with self._here:
      self._losses = {n: x for n, x in self._losses.items() if n <= number}

  @property
  def losses(self) -> dict[int, float]:
    """All that were left, by number; a schedule may ask for them again."""
    with self._here:
      losses = dict(self._losses)
    return {number: float(to_host(loss)) for number, loss in losses.items()}


class Judgements:
  """A mailbox for the masks of the rows that stand still, as last judged.

  One for all iterators of a trainer: what they wait with is their own.
  """

  def __init__(self) -> None:
    """Empty."""
    self.here = threading.Condition()
    self.turn, self.stale = -1, ()

  def put(self, turn: int, stale: Any) -> None:
    """Leaves per group a mask bool[H], on a device, or None.

    Args:
      turn: `Engine.turn` of the step before which rows were judged.
      stale: of the hot rows.
    """
    with self.here:
      self.turn, self.stale = turn, stale
      self.here.notify_all()


class JudgementProbe(_Waiting):
  """How one iterator waits for the judgements of a trainer."""

  def __init__(self, judgements: Judgements) -> None:
    """Waits for what is put there."""
    super().__init__(judgements.here)
    self._judgements = judgements

  def stale(self, turn: int) -> Sequence[Bool[np.ndarray, ' _H'] | None]:
    """Per group the mask as judged before the step of that turn, or later.

    Raises:
      UserError: `interrupt` was called first.
    """
    judgements = self._judgements
    with self._here:
      self._wait(
        lambda: judgements.turn >= turn,
        'in the last window of skip_stale',
        'no step after it',
      )
      stale = judgements.stale
    return tuple(to_host(stale))
