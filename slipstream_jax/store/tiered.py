"""Keeps rows on a disk, perhaps with a cache of them in memory within a budget.

`prefetch` has threads read rows into the cache before the step gathers them.
Written rows that leave the cache wait in a queue for the disk, and can be read
from the queue. One lock guards which row is where. It is held for copies within
memory and never during disk I/O.

No read returns an old row. A row's bytes reach the file only through the queue,
and reach the queue only from the cache or from a `scatter` that finds no slot.
A fetch of a row begins only if the row is neither cached nor queued. It counts
only if its slot still waits for this very fetch when it arrives: a `scatter` of
the row, or another row in the slot, cancels it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
import functools
import os
import threading
import time
from typing import Any, NamedTuple

from jaxtyping import Bool
import numpy as np

from slipstream_jax.errors import check_whole, UserError
from slipstream_jax.placement.base import NO_ROWS
from slipstream_jax.placement.cached import cached
from slipstream_jax.placement.evictions import EVICTIONS, last
from slipstream_jax.store.base import (
  BeforeWrite,
  FirstRows,
  ignore_writes,
  pieces_of,
  set_rows,
  Storage,
  TierCounts,
)
from slipstream_jax.store.memory import MEMORY
from slipstream_jax.store.records import layout_of, Places, put_whole, Records
from slipstream_jax.store.scratch import ScratchFile
from slipstream_jax.store.space import PLACE_BYTES
from slipstream_jax.store.threads import ALONE, Helpers
from slipstream_jax.types import Positions, RowBlock, RowIds, Slots, Unique

_QUEUE_BYTES = 1 << 26  # capacity of the write queue
_UNKNOWN = -1  # in `_awaits`: the slot has no values, as after a failed fetch
SLOT_BYTES = 35
"""Bytes of the planner per slot, in addition to the row in it."""
MAP_BYTES = 8 + PLACE_BYTES
"""Bytes of the index per row of the tables."""


class _Write(NamedTuple):
  rows: RowIds
  """Ascending."""
  records: Records


class _WriteQueue:
  """Records on their way to a file, readable while they wait.

  A thread of its own writes them, those of one row in order. All methods but
  `close` must be called with `changed` held.

  Attributes:
    waited_s: seconds that callers waited for room.
    rows_written: rows that reached the file so far.
  """

  def __init__(
    self, file: ScratchFile, most_bytes: int, changed: threading.Condition
  ) -> None:
    """Makes an empty queue for a file that has no other writer.

    Its condition `changed` is notified when room is made.
    """
    self.waited_s, self.rows_written = 0.0, 0
    self._file, self._most, self._changed = file, most_bytes, changed
    self._writes = deque[_Write]()
    self._bytes, self._busy = 0, False
    self._error: Exception | None = None
    self._pool = futures.ThreadPoolExecutor(1, 'slipstream-writer')

  def put(self, rows: RowIds, records: Records) -> None:
    """Takes over the records of unique rows. Does not wait."""
    order = np.argsort(rows)
    self._writes.append(_Write(rows[order], records[order]))
    self._bytes += records.nbytes
    self._start_writing()

  def copy(
    self, rows: RowIds, records: Records, at: Places
  ) -> Bool[np.ndarray, ' n']:
    """Copies the queued records of rows to places of `records`.

    Returns:
      Which rows are queued.
    """
    out = np.zeros(len(rows), bool)
    for write in reversed(self._writes):  # the newest first
      places = np.searchsorted(write.rows, rows)
      places = np.minimum(places, len(write.rows) - 1)
      here = np.flatnonzero(~out & (write.rows[places] == rows))
      if len(here):
        put_whole(records, at[here], write.records[places[here]])
        out[here] = True
    return out

  def make_room(self) -> None:
    """Waits until there is room for more.

    Raises:
      OSError: a write failed. Its records stay queued for the next call.
    """
    self._wait(lambda: self._bytes <= self._most)

  def empty(self) -> None:
    """Waits until all records are written, or raises as `make_room`."""
    self._wait(lambda: not self._writes)

  def _wait(self, done: Callable[[], bool]) -> None:
    started = time.perf_counter()
    while self._error is None and not done():
      self._start_writing()
      self._changed.wait()
    self.waited_s += time.perf_counter() - started
    if self._error is not None:
      error, self._error = self._error, None
      raise error

  def forget(self) -> None:
    """Drops all queued records, after waiting for a write under way."""
    self._writes.clear()
    while self._busy:
      self._changed.wait()
    self._writes.clear()  # records put during the wait
    self._bytes, self._error = 0, None

  def _start_writing(self) -> None:
    if self._writes and not self._busy and self._error is None:
      self._busy = True
      self._pool.submit(self._write_all)

  def _write_all(self) -> None:
    """Writes until the queue is empty. Runs in the queue's thread."""
    error: Exception | None = None
    while True:
      with self._changed:
        writes = [*self._writes]
        if error is not None or not writes:
          self._error, self._busy = error, False
          self._changed.notify_all()
          return
      # All at once, so that rows of one block reach it together. Reversed, as
      # `unique` returns the first occurrence and the last write counts.
      try:
        rows = np.concatenate([write.rows for write in writes[::-1]])
        rows, first = np.unique(rows, return_index=True)
        records = np.concatenate([write.records for write in writes[::-1]])
        self._file.write(rows, records[first])
      except Exception as failed:  # raised by the next caller
        error = failed
        continue
      with self._changed:
        self.rows_written += len(rows)
        for write in writes:
          # not dropped by `forget`
          if self._writes and self._writes[0] is write:
            self._bytes -= self._writes.popleft().records.nbytes
        self._changed.notify_all()

  def close(self) -> None:
    """Ends the thread after it has written the queued records."""
    self._pool.shutdown()


class TieredStore:
  """A store with all rows in a file and C of them in memory. See `RowStore`.

  Attributes:
    file: the rows that were written and have left the memory.
  """

  def __init__(
    self,
    first: FirstRows,
    folder: str | os.PathLike[str],
    capacity: int,
    queue_bytes: int = _QUEUE_BYTES,
    whole: Sequence[str] = (),
  ) -> None:
    """Opens an unnamed file in a folder.

    Args:
      first: first values of the rows.
      folder: of the file.
      capacity: C. 0: no row is kept in memory.
      queue_bytes: capacity of the write queue.
      whole: tables whose rows leave the memory last.

    Raises:
      UserError: no file can be made there.
    """
    self.before_write: BeforeWrite = ignore_writes
    self._layout = layout_of(first.rows(np.empty(0, np.int64)))
    self.num_rows, self.row_bytes = first.num_rows, self._layout.width
    self._capacity = min(capacity, self.num_rows)
    eviction, of = EVICTIONS['lru'], first.table_of
    kept = [i for i, name in enumerate(first.tables) if name in whole]
    if kept and of is not None:
      eviction = last(eviction, lambda rows: np.isin(of(rows), kept))
    self._placement = cached(max(self._capacity, 1), eviction)
    self.file = ScratchFile(folder, self.num_rows, self.row_bytes)
    self._changed = threading.Condition()
    self._queue = _WriteQueue(self.file, queue_bytes, self._changed)
    self._pool = futures.ThreadPoolExecutor(4, 'slipstream-fetch')
    self._fetches, self._counts = 0, TierCounts()
    self._begin(first, 0)

  def _begin(self, first: FirstRows, capacity: int) -> None:
    """Clears the file and makes an empty cache of C rows. 0: no cache."""
    self.before_write(None)
    with self._changed:
      self._queue.forget()
      self.file.clear()
      self._first = first
      self._cached: Any = None  # frees memory before allocating more
      if capacity:
        self._cached = self._placement.start(self.num_rows, None, None)
      self._records = np.empty((capacity, self.row_bytes), np.uint8)
      # The number of the fetch that a slot waits for. 0: its row is there.
      self._awaits = np.zeros(capacity, np.int64)

  @property
  def counts(self) -> TierCounts:
    """The disk counters."""
    return self._counts._replace(
      written=self._queue.rows_written,
      waited_s=self._counts.waited_s + self._queue.waited_s,
      bytes_read=self.file.bytes_read,
      bytes_written=self.file.bytes_written,
    )

  def _count(self, **more: int | float) -> None:
    old = self._counts
    new = {name: getattr(old, name) + value for name, value in more.items()}
    self._counts = old._replace(**new)

  def gather(
    self, rows: RowIds, size: int, helpers: Helpers = ALONE
  ) -> RowBlock:
    """Returns copies of rows, padded with zeros to `size` rows."""
    out = self._layout.empty(size)
    for leaf in (out.rows, *out.state):
      leaf[len(rows) :] = 0
    with self._changed:
      slots = self._wait_for_fetches(rows)
      self._layout.take(self._records, slots, out, helpers)
      missing = np.flatnonzero(slots < 0)
      records = np.empty((len(missing), self.row_bytes), np.uint8)
      places, some = np.arange(len(missing)), rows[missing]
      queued = self._queue.copy(some, records, places)
      written = self.file.has(some) & ~queued
      asked, new = np.flatnonzero(written), missing[~written & ~queued]
      self._count(
        gathered=len(rows),
        hits=len(rows) - len(asked) - len(new),
        missed=len(asked),
        first=len(new),
      )
    # No other thread writes these rows, so no lock is needed from here on.
    if len(asked):
      self.file.read(some[asked], records, asked)
    if len(missing) > len(new):
      at = np.full(len(rows), -1)
      at[missing] = places
      at[new] = -1
      self._layout.take(records, at, out, helpers)
    if len(new):
      set_rows(out, new, self._first.rows(rows[new]))
    return out

  def _wait_for_fetches(self, rows: RowIds) -> Slots:
    """Waits for the fetches of rows. Returns each row's slot, or -1."""
    started = time.perf_counter()
    while True:  # during the wait other rows may take the slots
      slots = self._slots_of(rows)
      there = np.flatnonzero(slots >= 0)
      awaits = self._awaits[slots[there]]
      if not (awaits > 0).any():
        break
      self._changed.wait()
    self._count(waited_s=time.perf_counter() - started)
    slots[there[awaits == _UNKNOWN]] = -1
    return slots

  def _slots_of(self, rows: RowIds) -> Slots:
    """Returns the slot of each row, i64[U]. -1 if it has none."""
    if self._cached is None:
      return np.full(len(rows), -1)
    return self._cached.cache.place_of.take(rows).astype(np.int64) - 1

  def scatter(
    self, rows: RowIds, block: RowBlock, helpers: Helpers = ALONE
  ) -> None:
    """Writes the first U rows of a block to memory, or to the queue."""
    self.before_write(rows)
    with self._changed:
      self._queue.make_room()
      slots = self._slots_of(rows)
      if (slots < 0).any():
        slots, _ = self._take(rows)
      self._layout.put(self._records, slots, block, helpers)
      there = slots[slots >= 0]
      if len(there):
        self._cached.cache.dirty[there] = True
        self._awaits[there] = 0
      left = np.flatnonzero(slots < 0)
      if len(left):
        records = np.empty((len(left), self.row_bytes), np.uint8)
        at = np.full(len(rows), -1)
        at[left] = np.arange(len(left))
        self._layout.put(records, at, block, helpers)
        self._queue.put(rows[left], records)

  def _take(self, rows: RowIds) -> tuple[Slots, Positions]:
    """Assigns slots to rows and queues the written rows that are evicted.

    None of these rows is evicted for another. The rest has no slot.

    Returns:
      The slot of each row, or -1, and the positions of those that are new.
    """
    before = self._slots_of(rows)
    if self._cached is None:
      return before, NO_ROWS
    dirty, there = self._cached.cache.dirty, before[before >= 0]
    # The planner marks all rows as written. Only rows that were are queued.
    marks = dirty[there]
    inverse = np.arange(len(rows), dtype=np.int32)
    batch = Unique(rows, inverse, np.ones_like(inverse))
    self._cached, plan = self._placement.plan(self._cached, [batch])
    if len(plan.evict):
      self._queue.put(plan.evict, self._records[plan.evict_slots])
    new = np.flatnonzero((before < 0) & (plan.slots >= 0))
    dirty[there], dirty[plan.slots[new]] = marks, False
    self._awaits[plan.slots[new]] = _UNKNOWN
    return plan.slots, new

  def prefetch(self, rows: RowIds) -> None:
    """Assigns slots to rows and begins to fetch those that had none."""
    with self._changed:
      self._queue.make_room()
      slots, new = self._take(rows)
      rows, slots = rows[new], slots[new]
      queued = self._queue.copy(rows, self._records, slots)
      self._awaits[slots[queued]] = 0
      rows, slots = rows[~queued], slots[~queued]
      self._fetches += 1
      number = self._fetches
      self._awaits[slots] = number
      written = self.file.has(rows)
      self._count(fetched=int(written.sum()), first=int((~written).sum()))
    # in parallel: one waits for the disk, one computes
    for some, on_disk in ((written, True), (~written, False)):
      if some.any():
        self._pool.submit(self._fetch, number, rows[some], slots[some], on_disk)

  def _fetch(
    self, number: int, rows: RowIds, slots: Slots, on_disk: bool
  ) -> None:
    """Brings rows to their slots. Runs in a thread of the pool."""
    records: Records | None = None
    try:
      new = np.empty((len(rows), self.row_bytes), np.uint8)
      if on_disk:
        self.file.read(rows, new)
      else:
        self._layout.put(new, np.arange(len(rows)), self._first.rows(rows))
      records = new
    finally:  # after a failure, `gather` reads again and raises the error
      with self._changed:
        due = np.flatnonzero(self._awaits[slots] == number)
        if records is None:
          self._awaits[slots[due]] = _UNKNOWN
        else:
          put_whole(self._records, slots[due], records[due])
          self._awaits[slots[due]] = 0
        self._changed.notify_all()

  def flush(self) -> None:
    """Waits until the queue is written to the disk."""
    with self._changed:
      self._queue.empty()

  def reset(self, first: FirstRows) -> None:
    """Sets all rows to their first values."""
    self._begin(first, self._capacity)

  def table(self) -> RowBlock:
    """Returns all rows in new arrays."""
    table = self._layout.empty(self.num_rows)
    for rows in pieces_of(self.num_rows, self.row_bytes):
      set_rows(table, rows, self.gather(rows, len(rows)))
    return table

  def drop(self) -> None:
    """Frees the memory and disk of the rows."""
    self._begin(self._first, 0)

  def close(self) -> None:
    """Ends the threads, and frees the file."""
    self.before_write(None)
    self._pool.shutdown()
    self._queue.close()
    self.file.close()


def _open(
  dram_bytes: int,
  path: str | os.PathLike[str],
  whole: Sequence[str],
  groups: Sequence[FirstRows],
) -> tuple[TieredStore, ...]:
  names = [name for first in groups for name in first.tables]
  unknown = [name for name in whole if name not in names]
  if unknown:
    raise UserError(
      f'tables kept in memory must be some of {", ".join(names):.200}',
      got=repr(unknown[0]),
      where='tiered, whole',
      hint=f'give a list of names, such as {names[:1]}',
    )
  widths = [
    layout_of(first.rows(np.empty(0, np.int64))).width + SLOT_BYTES
    for first in groups
  ]
  kept = [
    sum(rows for name, rows in first.tables.items() if name in whole)
    for first in groups
  ]
  pairs = [*zip(groups, widths, kept, strict=True)]
  left = dram_bytes - sum(rows * width for _, width, rows in pairs)
  if left < 0:
    raise UserError(
      f'tables kept in memory must fit its {dram_bytes:,} bytes',
      got=f'{dram_bytes - left:,} bytes of {", ".join(whole):.200}',
      where='tiered, whole',
      hint='keep fewer tables, or give more memory',
    )
  size = sum((first.num_rows - rows) * width for first, width, rows in pairs)
  share, least = left / max(size, 1), 1 if dram_bytes else 0
  return tuple(
    TieredStore(
      first,
      path,
      max(least, rows + int(share * (first.num_rows - rows))),
      whole=whole,
    )
    for first, _, rows in pairs
  )


def file(path: str | os.PathLike[str]) -> Storage:
  """Keeps all rows on a disk, and reads each when it is needed.

  Host memory has 4 bytes for each row of the tables as an index, and a queue of
  64 MiB for each group.

  Args:
    path: a folder on that disk. Each group has an unnamed file there that ends
      with the process.
  """
  return Storage('file', functools.partial(_open, 0, path, ()))


def tiered(
  dram_bytes: int,
  path: str | os.PathLike[str],
  whole: Sequence[str] = (),
) -> Storage:
  """Keeps rows on a disk, with a cache of recently used rows in memory.

  Args:
    dram_bytes: host memory for the cached rows of all groups, split in
      proportion to the groups' bytes. In addition, the store takes 12 bytes for
      each row of the tables as an index, and a queue of 64 MiB for each group.
    path: a folder on the disk, as in `file`.
    whole: names of tables that have room for all of their rows, which leave the
      memory last. The others share the rest.

  Raises:
    UserError: `dram_bytes` is not a positive whole number. Once a trainer has
      tables: there is no such table, or they do not fit.
  """
  hint = 'give bytes of host memory, such as 1 << 30'
  check_whole(dram_bytes, 1, 'tiered, dram_bytes', hint)
  listed = isinstance(whole, list | tuple)
  if not listed or not all(isinstance(name, str) for name in whole):
    raise UserError(
      'tables kept in memory must be a list of names',
      got=repr(whole),
      where='tiered, whole',
      hint="give them as in ['item', 'user']",
    )
  return Storage('tiered', functools.partial(_open, dram_bytes, path, whole))


STORES: dict[str, Callable[..., Storage]] = {
  'memory': lambda dram_bytes, path, whole=(): MEMORY,
  'file': lambda dram_bytes, path, whole=(): file(path),
  'tiered': tiered,
}
"""Constructors by name, from bytes of host memory, a folder and the tables that
leave the memory last. The laws in tests/store and tests/laws hold for them."""
