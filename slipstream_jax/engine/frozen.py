"""Schedule of frozen rows for chains that judge stale rows themselves.

The device judges and freezes rows at once. The host gets the mask some steps
later, at a step that depends on step numbers alone. From then on frozen rows
are neither loaded nor stored. The step freezes them either way.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtyping import Bool, Int
import numpy as np

from slipstream_jax.types import HotRows, ReassignedRows

SETTLE = 4
"""Steps from a judgement to the first plan that uses it. They hide the copy to
the host and the planning ahead."""

Mask = Bool[np.ndarray, ' _H'] | None
"""Which hot rows of a group are frozen. None: none is."""


class Windows(NamedTuple):
  """When `skip_stale` judges the rows of a group, in steps."""

  every: int
  """Steps from window to window."""
  window: int
  """Steps of a window, in [1, every]."""

  def closed(self, step: int) -> int | None:
    """Returns the first step after the last judgement. None if none holds."""
    since = step % self.every
    judged = step >= self.every and since < self.every - self.window
    return step - since if judged else None

  def opens(self, step: int) -> bool:
    """Whether frozen rows thaw before this step."""
    longest = self.every - self.window
    return 0 < longest == step % self.every and step > self.every


class Judgement(NamedTuple):
  """Changes to the frozen hot rows before a step, in this order."""

  frozen: Mapping[int, Mask] = {}
  """Masks of the rows that the host treats as frozen from here on, by group
  number. Other groups keep theirs."""
  closes: tuple[int, ...] = ()
  """Groups whose window has closed, so that the device judges their rows."""
  opens: tuple[int, ...] = ()
  """Groups whose rows thaw."""

  @property
  def event(self) -> dict[str, Any] | None:
    """What the host learned, for the metrics, or None."""
    masks = [mask for mask in self.frozen.values() if mask is not None]
    if not masks:
      return None
    stale = sum(int(np.count_nonzero(mask)) for mask in masks)
    return {'kind': 'judgement', 'rows_stale': stale}


class FrozenRows:
  """The planner's record of frozen rows, step after step."""

  def __init__(
    self,
    windows: Sequence[Windows | None],
    hot: Sequence[HotRows | None],
    step: int,
    frozen: Sequence[Mask],
    stale: Sequence[Mask],
    judged: Callable[[int], Sequence[Mask]],
  ) -> None:
    """Starts before a step.

    Args:
      windows: per group, or None where nothing judges.
      hot: per group, its hot rows.
      step: number of the next step.
      frozen: per group, the rows that the engine treats as frozen.
      stale: per group, the rows that the device freezes.
      judged: returns the masks judged n steps after this one, or later ones,
        given n. Waits for them.
    """
    self._windows, self._hot, self._judged = windows, hot, judged
    self._step = self._first = step
    self._frozen: list[Any] = list(frozen)
    self._stale = stale
    # Hot rows that were reassigned since the last judgement.
    self._reassigned: list[Int[np.ndarray, ' _n']] = [
      np.empty(0, np.int32) for _ in windows
    ]

  def next(self, reassigned: Sequence[ReassignedRows] | None) -> Judgement:
    """Returns the changes to frozen rows before the next step.

    Args:
      reassigned: per group, rows that are reassigned with that step.

    Raises:
      UserError: a step was not taken whose judgement it needs.
    """
    step, self._step = self._step, self._step + 1
    frozen, closes, opens = {}, [], []
    for group, windows in enumerate(self._windows):
      if windows is None:
        continue
      closed = windows.closed(step)
      if closed == step:
        closes.append(group)
        self._reassigned[group] = self._reassigned[group][:0]
      if windows.opens(step):
        opens.append(group)
      hot = self._hot[group]
      if reassigned is not None and hot is not None:
        places = hot.places(reassigned[group])
        places = places[places < len(hot.rows)]
        self._reassigned[group] = np.append(self._reassigned[group], places)
      settled = closed is not None and step - closed >= SETTLE
      mask: Any = self._mask(group, closed or 0) if settled else None
      if not np.array_equal(mask, self._frozen[group]):
        self._frozen[group] = frozen[group] = mask
    return Judgement(frozen, tuple(closes), tuple(opens))

  def _mask(self, group: int, closed: int) -> Mask:
    """Returns the rows judged stale before step `closed` and not reassigned."""
    mask = self._frozen[group]
    if mask is None:
      known = closed < self._first
      of_groups = self._stale if known else self._judged(closed - self._first)
      mask = of_groups[group]
    assert mask is not None
    if mask[self._reassigned[group]].any():
      mask = mask.copy()
      mask[self._reassigned[group]] = False
    return mask
