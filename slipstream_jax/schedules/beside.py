"""Lays the model's losses beside those of the scorer, for drop='auto'.

A step tells its loss some batches later. By then the scorer's losses on the
same examples are known. So examples that wait to be trained keep the scorer's
losses here, in the order in which they are cut into batches.
"""

from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat

from jaxtyping import Float
import numpy as np

from slipstream_jax.schedules.base import State
from slipstream_jax.schedules.rebatch import Index
from slipstream_jax.selection.gain import GROWN, logits_of, Segment
from slipstream_jax.types import Batch


class Beside:
  """Compares each step's loss with the scorer's loss on its examples.

  Attributes:
    segments: that are complete.
    number: of the last step.
    told: number of the last step whose loss was asked for.
    heard: losses asked for since the last whole state.
  """

  def __init__(self, late: int, first: int) -> None:
    """Starts without an example.

    Args:
      late: batches to train from a step to the question for its loss.
      first: examples of the first segment.
    """
    self._late, self._first = late, first
    self.segments: tuple[Segment, ...] = ()
    self._segment = Segment()
    self.heard: list[float] = []
    # Weight and weighted loss of examples that wait to be trained, and per
    # step, once cut, their sums.
    self._waiting: Float[np.ndarray, '_n 2'] = np.zeros((0, 2))
    self._cut: list[list[float]] = []
    self.number = self.told = 0
    self._known: dict[int, float] = {}

  def put(
    self, batch: Batch, index: Index, scores: Float[np.ndarray, ' B'] | None
  ) -> None:
    """Adds the examples that were kept of a batch of the source.

    Args:
      batch: with weights and offsets that correct.
      index: of those kept. None: all.
      scores: of its examples. None, like NaN: unknown.
    """
    which = slice(None) if index is None else index
    labels, weights = batch.labels[which], batch.weights[which]
    if scores is None:
      scores = np.full(len(batch.labels), np.nan, np.float32)
    logits = logits_of(scores[which])
    if batch.offset is not None:
      logits = logits + batch.offset[which]
    with np.errstate(invalid='ignore'):  # of unknown scores
      losses = np.logaddexp(0, logits) - labels * logits
    new = np.stack([weights, weights * losses], axis=1).astype(np.float64)
    self._waiting = np.concatenate([self._waiting, new])

  def cut(self, examples: int) -> int:
    """Returns the number of the next step, which has the next examples."""
    here, self._waiting = self._waiting[:examples], self._waiting[examples:]
    self._cut.append(here.sum(axis=0).tolist())
    self.number += 1
    return self.number

  def ask(self, loss: Callable[[int], SupportsFloat]) -> None:
    """Asks for the losses of steps that are late enough.

    Args:
      loss: waits for the mean loss of a step, by its weights.
    """
    while self.number - self.told > self._late:
      self.told += 1
      weight, losses = self._cut.pop(0)
      of_model = self._known.pop(self.told, None)
      if of_model is None:
        of_model = float(loss(self.told))
      self.heard.append(of_model)
      apart = of_model - losses / weight if weight else np.nan
      if np.isfinite(apart):
        self._add(weight, apart)

  def _add(self, weight: float, apart: float) -> None:
    now = self._segment
    self._segment = now = Segment(
      now.before,
      now.weight + weight,
      now.apart + weight * apart,
      now.squares + weight * apart**2,
      now.batches + 1,
    )
    if now.weight >= max((GROWN - 1) * now.before, self._first):
      self.segments += (now,)
      self._segment = Segment(now.before + now.weight)

  def get_state(self) -> State:
    """Returns what is known and what waits: a whole state."""
    self.heard = []
    return {
      'waiting': self._waiting,
      'cut': [list(one) for one in self._cut],
      'number': self.number,
      'told': self.told,
      'segments': [list(one) for one in (*self.segments, self._segment)],
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Restores a state from `get_state`. Does not modify it."""
    self._waiting = state['waiting']
    self._cut = [list(one) for one in state['cut']]
    self.number, self.told = state['number'], state['told']
    *ended, self._segment = (Segment(*one) for one in state['segments'])
    self.segments, self.heard = tuple(ended), []

  def resume(
    self,
    steps: int,
    heard: Float[np.ndarray, ' n'],
    losses: Mapping[int, SupportsFloat],
  ) -> None:
    """Knows the losses of the steps that follow a whole state.

    Those that nobody knows any more are NaN, as the steps are in the past.

    Args:
      steps: taken since then.
      heard: the first of their losses.
      losses: by number, of the others.
    """
    self._known = dict(enumerate(heard.tolist(), self.told + 1))
    for number in range(self.told + 1 + len(heard), self.number + steps + 1):
      self._known[number] = float(losses.get(number, np.nan))
