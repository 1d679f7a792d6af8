"""Which rows of a group changed, and since when: a bit per row.

Marked as a step's rows are stored: those of its plan, less the ones that stand
still, and those that got another id. None of that depends on the placement, so
neither do the marks. What is counted from is a token: of the checkpoint before,
of the base of its chain, or None, of the untrained rows. Each has bits of its
own, so that a checkpoint that fails is forgotten, and nothing besides.
"""

from collections.abc import Collection, Hashable

import numpy as np

from slipstream_jax.placement import Plan, StaleRows
from slipstream_jax.stream.dirty import mark_kernels as kernels
from slipstream_jax.types import FreshRows, RowIds

Token = Hashable
"""What changes are counted from; None: from the untrained rows."""


class DirtyRows:
  """The rows of a group that are not as they were."""

  def __init__(self, num_rows: int) -> None:
    """All of N rows are as they were."""
    self.num_rows = num_rows
    self._now = self._none()  # of no token yet
    self._since: dict[Token, np.ndarray] = {None: self._none()}

  def _none(self) -> np.ndarray:
    return np.zeros(-(-self.num_rows // 8), np.uint8)

  def mark(
    self, plan: Plan, frozen: StaleRows | None, fresh: FreshRows
  ) -> None:
    """Marks what a step changes.

    Args:
      plan: of the step.
      frozen: which of the hot rows stand still; None: none does.
      fresh: rows that get another id with it.
    """
    if frozen is None or plan.hot is None:
      kernels.mark(self._now, plan.rows)
    else:
      kernels.mark_moving(self._now, plan.rows, plan.hot, frozen)
    if len(fresh):
      kernels.mark(self._now, fresh)

  def mark_all(self) -> None:
    """Marks every row: nobody knows which of them changed."""
    self._now[:] = 255
    if self.num_rows % 8:
      self._now[-1] = (1 << self.num_rows % 8) - 1

  def clear(self) -> None:
    """Forgets all tokens; all rows are untrained ones."""
    self._now = self._none()
    self._since = {None: self._none()}

  def add(self, changed: RowIds) -> None:
    """Marks rows that were given in place of untrained ones."""
    kernels.mark(self._now, changed)

  def begin(self, token: Token) -> None:
    """From here on changes are counted from this token, too."""
    self._fold()
    self._since[token] = self._none()

  def knows(self, token: Token) -> bool:
    """Whether changes are counted from it."""
    return token in self._since

  def keep(self, tokens: Collection[Token]) -> None:
    """Forgets all other tokens, but for None."""
    kept = {None, *tokens}
    self._since = {t: bits for t, bits in self._since.items() if t in kept}

  def count(self, token: Token) -> int:
    """How many rows changed since the token."""
    self._fold()
    return int(kernels.count(self._since[token]))

  def bits(self, token: Token) -> np.ndarray:
    """The rows that changed since the token, as in `mark_kernels`; a copy."""
    self._fold()
    return self._since[token].copy()

  def rows(self, token: Token) -> RowIds:
    """The rows that changed since the token, ascending, i64."""
    out = np.empty(self.count(token), np.int64)
    kernels.rows_of(self._since[token], out)
    return out

  def _fold(self) -> None:
    if not self._now.any():
      return
    for bits in self._since.values():
      bits |= self._now
    self._now[:] = 0
