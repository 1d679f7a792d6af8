"""Which rows stand still, where a chain judges them itself.

The device judges: it knows at once. The host is told some steps later, from
when on what stands still is neither loaded nor stored; when that is depends on
the number of the step alone. No number depends on it: to the step a row stands
still either way.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtyping import Bool, Int
import numpy as np

from slipstream_jax.types import FreshRows, HotRows

SETTLE = 4
"""Steps from a judgement to the first that the host plans with it. They hide
the way from device to host, and what is planned ahead."""

Mask = Bool[np.ndarray, ' _H'] | None
"""Of a group's hot rows, those that stand still; None: none does."""


class Windows(NamedTuple):
  """When `skip_stale` judges the rows of a group, in steps."""

  every: int
  """From window to window."""
  window: int
  """Of a window, in [1, every]."""

  def closed(self, step: int) -> int | None:
    """The step before which stale rows were judged; None where none stands."""
    since = step % self.every
    standing = step >= self.every and since < self.every - self.window
    return step - since if standing else None

  def opens(self, step: int) -> bool:
    """Whether rows that stood still thaw before this step."""
    longest = self.every - self.window
    return 0 < longest == step % self.every and step > self.every


class Judgement(NamedTuple):
  """What becomes of the hot rows before a step, in this order."""

  frozen: Mapping[int, Mask] = {}
  """By number of the group, rows that the host knows to stand still from here
  on; of groups that are not in it, it stays as it is."""
  closes: tuple[int, ...] = ()
  """Groups whose window has closed: the device judges their rows."""
  opens: tuple[int, ...] = ()
  """Groups whose rows thaw."""

  @property
  def event(self) -> dict[str, Any] | None:
    """What the host was told, for the metrics; None if nothing."""
    masks = [mask for mask in self.frozen.values() if mask is not None]
    if not masks:
      return None
    stale = sum(int(np.count_nonzero(mask)) for mask in masks)
    return {'kind': 'judgement', 'rows_stale': stale}


class Standing:
  """What the planner knows of rows that stand still, step after step."""

  def __init__(
    self,
    windows: Sequence[Windows | None],
    hot: Sequence[HotRows | None],
    step: int,
    frozen: Sequence[Mask],
    stale: Sequence[Mask],
    judged: Callable[[int], Sequence[Mask]],
  ) -> None:
    """Before a step.

    Args:
      windows: per group; None where nothing judges.
      hot: per group, its hot rows.
      step: number of the step that comes next.
      frozen: per group, what the engine holds for standing still.
      stale: per group, what the device does.
      judged: the masks as they were judged some steps after this one, told by
        how many, or later; waits for them.
    """
    self._windows, self._hot, self._judged = windows, hot, judged
    self._step = self._first = step
    self._frozen, self._stale = list(frozen), stale
    # Hot rows that got another id since the last judgement.
    self._renewed: list[Int[np.ndarray, ' _n']] = [
      np.empty(0, np.int32) for _ in windows
    ]

  def next(self, fresh: Sequence[FreshRows] | None) -> Judgement:
    """What becomes of rows before the next step.

    Args:
      fresh: per group, rows that get another id with it.

    Raises:
      UserError: no step was taken that it needs to know of.
    """
    step, self._step = self._step, self._step + 1
    frozen, closes, opens = {}, [], []
    for group, windows in enumerate(self._windows):
      if windows is None:
        continue
      closed = windows.closed(step)
      if closed == step:
        closes.append(group)
        self._renewed[group] = self._renewed[group][:0]
      if windows.opens(step):
        opens.append(group)
      self._renew(group, fresh)
      settled = closed is not None and step - closed >= SETTLE
      mask = self._mask(group, closed) if settled else None
      if not _same(mask, self._frozen[group]):
        self._frozen[group] = frozen[group] = mask
    return Judgement(frozen, tuple(closes), tuple(opens))

  def _renew(self, group: int, fresh: Sequence[FreshRows] | None) -> None:
    hot = self._hot[group]
    if fresh is not None and hot is not None:
      places = hot.places(fresh[group])
      places = places[places < len(hot.rows)]
      self._renewed[group] = np.append(self._renewed[group], places)

  def _mask(self, group: int, closed: int | None) -> Mask:
    """What was judged before the step `closed`, and is still so."""
    assert closed is not None
    mask = self._frozen[group]
    if mask is None:
      known = closed < self._first
      of_groups = self._stale if known else self._judged(closed - self._first)
      mask = of_groups[group]
    assert mask is not None
    if mask[self._renewed[group]].any():
      mask = mask.copy()
      mask[self._renewed[group]] = False
    return mask


def _same(one: Mask, other: Mask) -> bool:
  return one is other or (
    one is not None and other is not None and np.array_equal(one, other)
  )
