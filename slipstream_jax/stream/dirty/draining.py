"""Rows on their way into a checkpoint, while training goes on.

At the boundary between two steps it is settled which rows go, and with which
values: those of that moment. What the device keeps is copied then. All others
stay where they are, and another thread takes them piece by piece. Whoever
writes a row that was not taken yet saves its old value first. What is saved so
has a budget: once that is spent, the step waits for the other thread, and the
wait is counted.
"""

from collections.abc import Callable, Iterator
import operator
import threading
from typing import NamedTuple

import jax
import numpy as np

from slipstream_jax.stream.buffers import to_host
from slipstream_jax.stream.dirty import mark_kernels as kernels
from slipstream_jax.stream.dirty.budget import Budget
from slipstream_jax.types import RowBlock, RowIds

Gather = Callable[[RowIds], RowBlock]
"""Rows of the host, as they are now: arrays of their own."""


class _Saved(NamedTuple):
  """Rows whose values at the boundary are held here."""

  rows: RowIds
  """Ascending."""
  block: RowBlock
  """Of either side; it may be padded."""
  nbytes: int


class _GivenUp(Exception):
  """Training has failed before all rows were copied."""


class Drain:
  """The rows of a group that a checkpoint takes.

  One thread, which trains, calls `save`, `ready` and `before_write`; another
  one iterates over `pieces`. Either may call `close`.

  Attributes:
    bits: which rows go, as in `mark_kernels`; not to be written.
  """

  def __init__(
    self,
    bits: np.ndarray,
    num_rows: int,
    row_bytes: int,
    gather: Gather,
    budget: Budget,
    piece_rows: int = 1 << 13,
  ) -> None:
    """Before any of them is taken.

    Args:
      bits: which rows go, as in `mark_kernels`; nobody writes it any more.
      num_rows: N, rows of the group.
      row_bytes: of a row and its state.
      gather: reads rows of the host; called by either thread.
      budget: of what is saved.
      piece_rows: the most rows of a piece.
    """
    self.bits, self._num_rows, self._row_bytes = bits, num_rows, row_bytes
    self._gather, self._budget, self._piece_rows = gather, budget, piece_rows
    self._saved_bits = np.zeros_like(bits)
    self._saved: list[_Saved] = []
    # All rows below `_taken` are taken; up to `_claimed` they are being read;
    # below `_ready` those of the device are saved.
    self._taken = self._claimed = self._ready = 0
    self._changed = threading.Condition()
    self._closed = False

  @property
  def done(self) -> bool:
    """Whether nothing is left that a write could spoil."""
    return self._closed or self._taken >= self._num_rows

  def wanted(self, rows: RowIds) -> np.ndarray:
    """Which of the rows go, and are not saved yet: bool[U]."""
    goes, saved = (np.empty(len(rows), bool) for _ in range(2))
    kernels.marked(self.bits, rows, goes)
    kernels.marked(self._saved_bits, rows, saved)
    return goes & ~saved & (rows >= self._taken)

  def save(self, rows: RowIds, take: Callable[[RowIds], RowBlock]) -> None:
    """Saves rows of the device, in the order of their numbers.

    Args:
      rows: ascending; above all that were `ready`.
      take: copies some of them, padded perhaps.
    """
    rows = rows[self.wanted(rows)]
    for start in range(0, len(rows), self._piece_rows):
      piece = rows[start : start + self._piece_rows]
      nbytes = len(piece) * self._row_bytes
      self._budget.take(nbytes)
      if self._closed:  # the other thread has given up
        self._budget.give(nbytes)
        return
      self._add(_Saved(piece, take(piece), nbytes))
      self.ready(int(piece[-1]) + 1)

  def ready(self, end: int | None = None) -> None:
    """Rows below `end` can be taken; None: all."""
    with self._changed:
      self._ready = self._num_rows if end is None else end
      self._changed.notify_all()

  def before_write(self, rows: RowIds) -> None:
    """Rows of the host are about to be written: saves those still to go."""
    if self.done:
      return
    rows = np.sort(rows[self.wanted(rows)])
    if not len(rows):
      return
    with self._changed:  # those that are being read right now
      self._changed.wait_for(lambda: self._closed or not self._reads(rows))
      # Not later: what is claimed from here on is being read as well.
      rows = rows[rows >= self._claimed]
    nbytes = len(rows) * self._row_bytes
    self._budget.take(nbytes)
    with self._changed:
      self._changed.wait_for(lambda: self._closed or not self._reads(rows))
      # While it waited for room, some were taken.
      rows = rows[rows >= self._claimed]
      if self._closed or not len(rows):
        self._budget.give(nbytes)
        return
      self._budget.give(nbytes - len(rows) * self._row_bytes)
      nbytes = len(rows) * self._row_bytes
      self._add(_Saved(rows, self._gather(rows), nbytes))

  def _reads(self, rows: RowIds) -> bool:
    low, high = np.searchsorted(rows, (self._taken, self._claimed))
    return bool(low < high)

  def _add(self, saved: _Saved) -> None:
    with self._changed:
      self._saved.append(saved)
      kernels.mark(self._saved_bits, saved.rows)

  def pieces(self) -> Iterator[tuple[RowIds, RowBlock]]:
    """The rows with their values at the boundary, ascending, i64[n].

    Raises:
      _GivenUp: it was closed before its last row was taken.
    """
    room = np.empty(self._piece_rows, np.int64)
    while self._taken < self._num_rows:
      with self._changed:
        self._changed.wait_for(
          lambda: self._closed or self._ready > self._taken
        )
        if self._closed:
          raise _GivenUp(f'rows were taken up to {self._taken} alone')
        start = self._taken
        count, end = kernels.next_rows(self.bits, start, self._ready, room)
        rows = room[:count].copy()
        on_host = np.empty(count, bool)
        kernels.marked(self._saved_bits, rows, on_host)
        np.logical_not(on_host, out=on_host)
        self._claimed = end
        saved = [one for one in self._saved if one.rows[0] < end]
      block = self._read(rows, on_host, saved, start, end)
      with self._changed:
        self._taken = end
        self._forget()
        self._changed.notify_all()
      if count:
        yield rows, block

  def _read(
    self,
    rows: RowIds,
    on_host: np.ndarray,
    saved: list[_Saved],
    start: int,
    end: int,
  ) -> RowBlock:
    """The values of rows in [start, end)."""
    some = rows[on_host]
    if len(some) == len(rows):
      return self._gather(rows)
    block: RowBlock | None = None
    if len(some):
      block = _put(
        block, len(rows), np.flatnonzero(on_host), self._gather(some)
      )
    for one in saved:
      low, high = np.searchsorted(one.rows, (start, end))
      if low < high:
        at = np.searchsorted(rows, one.rows[low:high])
        part = slice(low, high)
        values = jax.tree.map(operator.itemgetter(part), to_host(one.block))
        block = _put(block, len(rows), at, values)
    assert block is not None
    return block

  def _forget(self) -> None:
    """Lets go of what was saved of rows that are taken by now."""
    saved, self._saved = self._saved, []
    for one in saved:
      if one.rows[-1] < self._taken:
        self._budget.give(one.nbytes)
      else:
        self._saved.append(one)

  def wait(self) -> None:
    """Returns once all rows are taken, or nobody will take them."""
    with self._changed:
      self._changed.wait_for(lambda: self.done)

  def close(self) -> None:
    """Gives up, or is through: nobody waits, and nothing is saved any more."""
    with self._changed:
      self._closed = True
      for one in self._saved:
        self._budget.give(one.nbytes)
      self._saved.clear()
      self._changed.notify_all()


def _put(
  block: RowBlock | None, size: int, at: np.ndarray, values: RowBlock
) -> RowBlock:
  """The block, of `size` rows, with these values at some places."""
  if block is None:
    block = jax.tree.map(
      lambda x: np.empty((size, *x.shape[1:]), x.dtype), values
    )
  for leaf, some in zip(
    (block.rows, *block.state), (values.rows, *values.state), strict=True
  ):
    leaf[at] = some
  return block
