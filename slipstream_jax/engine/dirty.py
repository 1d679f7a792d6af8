"""Marks of the rows of a group that changed, a bit per row and token.

Marks do not depend on the placement. A token is what changes are counted from:
the last checkpoint, the base of its chain, or None, the untrained rows. Each
token has its own bits, so a failed checkpoint can be forgotten without
affecting others.
"""

from collections.abc import Collection, Hashable
from typing import no_type_check

import numpy as np

from slipstream_jax.hashing import kernel
from slipstream_jax.placement import Plan
from slipstream_jax.types import ReassignedRows, RowIds, StaleRows

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
    self, plan: Plan, frozen: StaleRows | None, reassigned: ReassignedRows
  ) -> None:
    """Marks the rows that a step changes or reassigns, except frozen ones."""
    if frozen is None or plan.hot is None:
      mark(self._now, plan.rows)
    else:
      _mark_moving(self._now, plan.rows, plan.hot, frozen)
    if len(reassigned):
      mark(self._now, reassigned)

  def add(self, changed: RowIds) -> None:
    """Marks rows whose untrained values were replaced."""
    mark(self._now, changed)

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
    return int(np.bitwise_count(self._since[token]).sum())

  def bits(self, token: Token) -> np.ndarray:
    """Returns a copy of the token's marks, u8[ceil(N / 8)].

    The mark of a row is bit `row % 8` of byte `row // 8`.
    """
    self._fold()
    return self._since[token].copy()

  def _fold(self) -> None:
    if not self._now.any():
      return
    for bits in self._since.values():
      bits |= self._now
    self._now[:] = 0


@kernel
@no_type_check
def mark(bits: np.ndarray, rows: np.ndarray) -> None:
  """Sets the bits of rows, i64[U], as in `DirtyRows.bits`."""
  for row in rows:
    bits[row >> 3] |= np.uint8(1 << (row & 7))


@kernel
@no_type_check
def _mark_moving(
  bits: np.ndarray, rows: np.ndarray, hot: np.ndarray, frozen: np.ndarray
) -> None:
  """Sets the bits of those rows, i64[U], that are not frozen.

  Their places among the hot rows are `hot`, H if cold, and frozen is bool[H].
  """
  for u in range(len(rows)):
    place = hot[u]
    if place >= len(frozen) or not frozen[place]:
      bits[rows[u] >> 3] |= np.uint8(1 << (rows[u] & 7))
