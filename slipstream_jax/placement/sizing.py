"""Sizes a cache: what each capacity or placement would move, without a device.

`simulate` runs a placement's own plans. They are pure, so its counts equal
those of a run over the same batches.

Miss-ratio curves give the hit rate of every capacity from one pass over ids.
`lru_curve` is exact for an LRU cache (Mattson et al., Evaluation techniques for
storage hierarchies, 1970). For long streams it follows only a sample of the
rows (SHARDS, Waldspurger et al., FAST 2015). `static_curve` is for rows pinned
by popularity. Like all placements, both treat a batch as a whole: a row that a
batch uses twice is moved once.
"""

from collections.abc import Callable, Iterable, Sequence
import time
from typing import NamedTuple, no_type_check

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.hashing import kernel, mix
from slipstream_jax.placement.base import Placement
from slipstream_jax.types import HotRows, RowIds, Unique


class SimulatedMoves(NamedTuple):
  """Means over the steps of a simulation."""

  hit_rate: float
  """Share of the lookups whose row was on the device before the step."""
  rows_loaded: float
  rows_stored: float
  plan_ms: float
  """Median milliseconds per plan, without finding the unique rows."""


def simulate(
  placement: Placement,
  batches: Sequence[Unique],
  num_rows: int,
  hot: HotRows | None,
) -> SimulatedMoves:
  """Plans all batches from the placement's start and averages what they move.

  Args:
    placement: any placement.
    batches: at least one, made with `hot`.
    num_rows: N, rows of all tables.
    hot: the hot rows, if any were chosen.
  """
  state = placement.start(num_rows, hot, None)
  counts, seconds = [], []
  for step in range(len(batches)):
    upcoming = batches[step : step + 1 + placement.look_ahead]
    started = time.perf_counter()
    state, plan = placement.plan(state, upcoming)
    seconds.append(time.perf_counter() - started)
    stored = len(plan.store) + len(plan.evict)
    counts.append((plan.lookups, plan.hits, len(plan.load), stored))
  lookups, hits, loaded, stored = np.sum(counts, axis=0)
  return SimulatedMoves(
    float(hits / max(lookups, 1)),
    float(loaded / len(batches)),
    float(stored / len(batches)),
    1e3 * float(np.median(seconds)),
  )


Capacities = Int[np.ndarray, ' K']
"""Numbers of rows that the device keeps, ascending, i64."""


class Curve(NamedTuple):
  """Hits and loads at each capacity. A sampled curve is an estimate."""

  capacities: Capacities
  lookups: Float[np.ndarray, ' T']
  """Lookups of each table without padding, f64."""
  hits: Float[np.ndarray, 'T K']
  """Lookups of each table whose row was on the device, f64."""
  loads: Float[np.ndarray, ' K']
  """Rows moved host -> device per batch, f64."""
  rows_used: float
  """Mean unique rows of a batch: what is loaded per batch without a cache."""

  @property
  def hit_rate(self) -> Float[np.ndarray, ' K']:
    """Share of all lookups whose row was on the device."""
    return self.hits.sum(0) / max(self.lookups.sum(), 1)


def capacity_grid(num_rows: int, smallest: int = 256) -> Capacities:
  """Returns capacities from `smallest` to N rows, 8 per power of two."""
  powers = np.arange(8 * np.log2(max(num_rows / smallest, 1)) + 1) / 8
  grid = np.unique(np.round(smallest * 2**powers).astype(np.int64))
  return np.append(grid[grid < num_rows], num_rows)


def lru_curve(
  batches: Iterable[Unique],
  starts: Int[np.ndarray, ' T_and_1'],
  capacities: Capacities,
  *,
  first: RowIds | None = None,
  sample_rate: float = 1.0,
) -> Curve:
  """Returns the curve of a cache that evicts the least recently used row.

  It is exact for capacities that hold every batch, up to the order of rows
  within a batch. Takes O(log(unique rows)) per unique row of a batch.

  Args:
    batches: the stream, a batch at a time.
    starts: first global row of each table, and N last: `TableSet.offsets`.
    capacities: capacities of the curve.
    first: rows that the cache starts with, most popular first. None: it starts
      empty, and every row's first use is a miss.
    sample_rate: share of the rows to follow, chosen by hash.

  Raises:
    UserError: the sample rate is not in (0, 1].
  """
  if not 0 < sample_rate <= 1:
    raise UserError(
      'the share of rows to follow must be in (0, 1]',
      got=sample_rate,
      where='lru_curve, sample_rate',
      hint='set it to 1 for an exact curve',
    )
  stack = _Stack(int(starts[-1]))
  if first is not None:
    # Reversed, so that the most popular row counts as the most recent.
    stack.use(_sampled(first, sample_rate)[0][::-1])
  # The rows between two uses were sampled at the same rate.
  return _curve(
    batches,
    starts,
    capacities,
    lambda rows: stack.use(rows) / sample_rate,
    sample_rate,
  )


def static_curve(
  batches: Iterable[Unique],
  starts: Int[np.ndarray, ' T_and_1'],
  capacities: Capacities,
  popular: HotRows,
) -> Curve:
  """Returns the curve of a cache that pins the most popular rows.

  Use other batches than those that popularity was counted on. On its own sample
  every choice looks too good.

  `popular` has all rows of known popularity, the most popular one first. The
  other arguments are those of `lru_curve`.
  """
  known = len(popular.rows)

  def least(rows: RowIds) -> np.ndarray:
    place = popular.places(rows)
    # The n-th most popular row needs a capacity of n.
    return np.where(place < known, place + 1.0, 0)

  return _curve(batches, starts, capacities, least)


def _curve(
  batches: Iterable[Unique],
  starts: Int[np.ndarray, ' T_and_1'],
  capacities: Capacities,
  least: Callable[[RowIds], np.ndarray],
  rate: float = 1.0,
) -> Curve:
  """Returns the curve of a cache, of a share of the rows.

  `least` is called once per batch, and returns the least capacity that holds
  each row, or 0 for none. The other arguments are those of `lru_curve`.
  """
  tables, sizes = len(starts) - 1, len(capacities)
  lookups = np.zeros(tables)
  # The last column counts uses that no capacity of the curve holds.
  uses, rows = np.zeros((tables, sizes + 1)), np.zeros(sizes + 1)
  unique = count = 0
  for batch in batches:
    count += 1
    times = batch.counts
    table = np.searchsorted(starts, batch.rows, side='right') - 1
    lookups += np.bincount(table, times, tables)
    unique += len(batch.rows)
    some, kept = _sampled(batch.rows, rate)
    distances = least(some)
    fits = np.searchsorted(capacities, distances)
    fits[distances == 0] = sizes
    places = table[kept] * uses.shape[1] + fits
    uses += np.bincount(places, times[kept], uses.size).reshape(uses.shape)
    rows += np.bincount(fits, minlength=len(rows))
  uses, rows = uses / rate, rows / rate
  # A sample has too many or too few lookups of the hottest rows. SHARDS_adj
  # adds the difference at the smallest distance, where those rows are.
  uses[:, 0] += lookups - uses.sum(1)
  rows[0] += unique - rows.sum()
  return Curve(
    capacities,
    lookups,
    np.clip(np.cumsum(uses, 1)[:, :-1], 0, lookups[:, None]),
    np.maximum(unique - np.cumsum(rows)[:-1], 0) / max(count, 1),
    unique / max(count, 1),
  )


_HASH_BITS = 24  # resolves sample rates down to 1 in 16 M


def _sampled(
  rows: RowIds, rate: float
) -> tuple[Int[np.ndarray, ' kept'], Int[np.ndarray, ' kept']]:
  """Returns the rows whose hash is below the rate, and their positions."""
  chosen = mix(rows.astype(np.uint64)) >> np.uint64(64 - _HASH_BITS) < rate * (
    1 << _HASH_BITS
  )
  kept = np.flatnonzero(chosen)
  return rows[kept], kept


class _Stack:
  """Rows by the time of their last use. Times are renumbered when used up.

  The distance of a use is the number of rows used since the row's last use,
  itself included. It is the size of the smallest LRU cache that still holds the
  row. A Fenwick tree over the times counts the rows last used after a given
  time in O(log T).
  """

  def __init__(self, num_rows: int) -> None:
    self._last = np.zeros(num_rows, np.int32)
    self._tree = np.zeros(1 << 16, np.int32)
    self._clock = self._used = 0

  def use(self, rows: RowIds) -> Int[np.ndarray, ' U']:
    """Returns each row's distance, 0 if never used, and marks it as used."""
    if self._clock + len(rows) >= len(self._tree):
      used = np.flatnonzero(self._last)
      used = used[np.argsort(self._last[used])]
      # At least half of the times are free, so this is rare.
      size = 2 * (len(used) + len(rows)) + 1
      if size > len(self._tree):
        self._tree = np.zeros(size, np.int32)
      _renumber(self._tree, self._last, used)
      self._clock = len(used)
    distances = np.empty(len(rows), np.int64)
    self._used = _use(
      self._tree, self._last, rows, self._clock, self._used, distances
    )
    self._clock += len(rows)
    return distances


@kernel
@no_type_check
def _add(tree: np.ndarray, at: int, change: int) -> None:
  # Entry `at` sums up `at & -at` times, its lowest set bit.
  while at < len(tree):
    tree[at] += change
    at += at & -at


@kernel
@no_type_check
def _sum_to(tree: np.ndarray, at: int) -> int:
  total = 0
  while at > 0:
    total += tree[at]
    at -= at & -at
  return total


@kernel
@no_type_check
def _use(
  tree: np.ndarray,
  last: np.ndarray,
  rows: np.ndarray,
  clock: int,
  used: int,
  distances: np.ndarray,
) -> int:
  """Computes the distances of a batch's rows, then marks them as used.

  The tree, i32[T + 1], has a one at the time of every row's last use, `last`,
  i32[N]. The first row counts as used first, at time `clock` + 1. Distances,
  i64[U], are 0 where a row was never used. Returns how many rows are used now.
  """
  # All distances come first, as a batch is moved as a whole and its rows must
  # not affect each other's distances.
  for i in range(len(rows)):
    before = last[rows[i]]
    # Times start at 1, so 0 means never.
    distances[i] = used - _sum_to(tree, before) + 1 if before else 0
  for i in range(len(rows)):
    before = last[rows[i]]
    if before:
      _add(tree, before, -1)
    else:
      used += 1
    clock += 1
    last[rows[i]] = clock
    _add(tree, clock, 1)
  return used


@kernel
@no_type_check
def _renumber(tree: np.ndarray, last: np.ndarray, rows: np.ndarray) -> None:
  """Clears the tree and sets last uses of `rows`, oldest first, to 1, 2, ..."""
  tree[:] = 0
  for i in range(len(rows)):
    last[rows[i]] = i + 1
    tree[i + 1] = 1
  # Linear construction: each entry is added to the next one that spans it.
  for at in range(1, len(tree)):
    above = at + (at & -at)
    if above < len(tree):
      tree[above] += tree[at]
