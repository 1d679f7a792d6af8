"""Reads batches of the source ahead, so that the model can score them.

Before each step the model predicts the batches that were read since the last
step. They get their turn at least `settle` steps later, when their scores are
known, and no step has to wait for them. How old scores are depends on numbers
of batches and steps alone.
"""

from collections import deque
from collections.abc import Callable
import math
from typing import Generic, TypeVar

from jaxtyping import Float
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.schedules.base import Predictions, State
from slipstream_jax.types import Batch

_SLACK = 1.25  # batches in a row may have fewer examples kept than most

T = TypeVar('T')


class Ahead(Generic[T]):
  """Items of the source that were read, and did not have their turn."""

  def __init__(self, settle: int, drop: float) -> None:
    """Starts without an item.

    Args:
      settle: steps from the one that predicts a batch to the batch's turn.
      drop: share of the examples that is left out, below 1.
    """
    self._settle = settle
    # As many batches as give the step that predicts, `settle` more, and part of
    # the next.
    self._length = 1 + math.ceil(_SLACK * (settle + 2) / max(1 - drop, 0.05))
    self._items = deque[tuple[int, Batch | None, T]]()
    self._steps, self._asked_to = 0, -1
    self._asked: dict[int, int] = {}  # steps before the one that predicts it

  def take(self, read: Callable[[], tuple[int, Batch | None, T]]) -> T:
    """Returns the next item, after reading those behind it.

    Args:
      read: reads a batch, and returns its number and an item. No batch stands
        for the end of the source.
    """
    ended = bool(self._items) and self._items[-1][1] is None
    while len(self._items) < self._length and not ended:
      self._items.append(read())
      ended = self._items[-1][1] is None
    return self._items.popleft()[2]

  def delivered(self, since: int) -> Predictions | None:
    """Counts a step. Returns what it predicts, or None if that is nothing.

    Args:
      since: number of the batch from which a position after the step reads.
    """
    new = [
      (number, batch)
      for number, batch, _ in self._items
      if batch is not None and number > self._asked_to
    ]
    # The first step would predict all of them, and many would be late.
    if not self._steps:
      new = []
    for number, _ in new:
      self._asked[number] = self._steps
    self._asked_to = max([self._asked_to, *(item[0] for item in self._items)])
    self._steps += 1
    return Predictions(tuple(new), since) if new else None

  def scores(
    self,
    number: int,
    size: int,
    predicted: Callable[[int], Float[np.ndarray, ' B']],
  ) -> Float[np.ndarray, ' B']:
    """Returns click probabilities of a batch, f32. NaN: not known in time.

    Args:
      number: of the batch that has its turn.
      size: B, its examples, with padding.
      predicted: waits for the logits of the batch of a number.
    """
    step = self._asked.get(number)
    if step is None or self._steps - step <= self._settle:
      return np.full(size, np.nan, np.float32)
    logits = predicted(number)
    return (0.5 + 0.5 * np.tanh(0.5 * logits)).astype(np.float32)

  def get_state(self, number: int) -> State:
    """Returns what was asked for of the batches from this number on."""
    asked = self._asked.items()
    self._asked = {one: step for one, step in asked if one >= number}
    return {
      'steps': self._steps,
      'asked_to': self._asked_to,
      'asked': [list(one) for one in self._asked.items()],
    }

  def set_state(self, state: State, knows: Callable[[int], bool]) -> None:
    """Restores a state from `get_state`. Batches are to be read again.

    Args:
      state: not modified.
      knows: whether the logits of the batch of a number are there.

    Raises:
      UserError: some that were asked for are not. The steps before which the
        model predicted them are in the past, so waiting would deadlock.
    """
    unknown = [number for number, _ in state['asked'] if not knows(number)]
    if unknown:
      raise UserError(
        'a schedule resumes where it is known what the model has predicted',
        got=f'nothing of batch {unknown[0]}',
        where='set_state, state',
        hint='restore the checkpoint that the state is of, after slipstream()',
      )
    self._items.clear()
    self._steps, self._asked_to = state['steps'], state['asked_to']
    self._asked = dict(state['asked'])

  @property
  def last(self) -> int:
    """Number of the last batch that a step was to predict, -1 for none."""
    return max(self._asked, default=-1)
