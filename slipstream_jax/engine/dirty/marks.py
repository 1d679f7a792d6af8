"""Marks of the rows of a group that changed, a bit per row and token.

Rows are marked as a step's rows are stored: the rows of its plan except frozen
ones, and the reassigned rows. Marks do not depend on the placement. A token is
what changes are counted from: the last checkpoint, the base of its chain, or
None, the untrained rows. Each token has its own bits, so a failed checkpoint
can be forgotten without affecting others.
"""

from collections.abc import Collection, Hashable

import numpy as np

from slipstream_jax.engine.dirty import mark_kernels as kernels
from slipstream_jax.placement import Plan, StaleRows
from slipstream_jax.types import FreshRows, RowIds

Token = Hashable
"""What changes are counted from. None: the untrained rows."""


class DirtyRows:
  """Marks of the changed rows of a group."""

  def __init__(self, num_rows: int) -> None:
    """Marks none of N rows."""
    self.num_rows = num_rows
    self._now = self._none()  # marks not yet added to the tokens
    self._since: dict[Token, np.ndarray] = {None: self._none()}

  def _none(self) -> np.ndarray:
    return np.zeros(-(-self.num_rows // 8), np.uint8)

  def mark(
    self, plan: Plan, frozen: StaleRows | None, fresh: FreshRows
  ) -> None:
    """Marks the rows that a step changes.

    Args:
      plan: of the step.
      frozen: which hot rows are frozen. None: none is.
      fresh: rows that are reassigned with the step.
    """
    if frozen is None or plan.hot is None:
      kernels.mark(self._now, plan.rows)
    else:
      kernels.mark_moving(self._now, plan.rows, plan.hot, frozen)
    if len(fresh):
      kernels.mark(self._now, fresh)

  def mark_all(self) -> None:
    """Marks every row, as it is unknown which changed."""
    self._now[:] = 255
    if self.num_rows % 8:
      self._now[-1] = (1 << self.num_rows % 8) - 1

  def clear(self) -> None:
    """Forgets all tokens. All rows are untrained."""
    self._now = self._none()
    self._since = {None: self._none()}

  def add(self, changed: RowIds) -> None:
    """Marks rows whose untrained values were replaced."""
    kernels.mark(self._now, changed)

  def begin(self, token: Token) -> None:
    """Starts counting changes from this token, too."""
    self._fold()
    self._since[token] = self._none()

  def knows(self, token: Token) -> bool:
    """Whether changes are counted from this token."""
    return token in self._since

  def keep(self, tokens: Collection[Token]) -> None:
    """Forgets all other tokens except None."""
    kept = {None, *tokens}
    self._since = {t: bits for t, bits in self._since.items() if t in kept}

  def count(self, token: Token) -> int:
    """Returns how many rows changed since the token."""
    self._fold()
    return int(kernels.count(self._since[token]))

  def bits(self, token: Token) -> np.ndarray:
    """Returns a copy of the token's marks, as in `mark_kernels`."""
    self._fold()
    return self._since[token].copy()

  def rows(self, token: Token) -> RowIds:
    """Returns the rows that changed since the token, ascending, i64."""
    out = np.empty(self.count(token), np.int64)
    kernels.rows_of(self._since[token], out)
    return out

  def _fold(self) -> None:
    if not self._now.any():
      return
    for bits in self._since.values():
      bits |= self._now
    self._now[:] = 0
