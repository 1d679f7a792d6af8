"""Predicts what a step moves under each placement, and recommends one.

A placement's plans are made as in training, so their counts are those of a run
over the same batches.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.placement import (
  bucket,
  cached,
  EVICTIONS,
  Placement,
  PLACEMENTS,
)
from slipstream_jax.placement.sizing import Curve, lru_curve, simulate
from slipstream_jax.selection.hot import hot_rows
from slipstream_jax.store.scratch import file_bytes
from slipstream_jax.store.tiered import MAP_BYTES, SLOT_BYTES
from slipstream_jax.types import HotRows, Unique

FOLLOWED = 2_000_000
"""Rows: curves follow a sample of more."""
SHARES = (0.001, 0.01, 0.015, 0.05)
"""Capacities of caches, as shares of all rows."""
_BETTER = 0.99  # tables are kept whole if so much is read, or less
_WORTH = 1.05  # simpler placements may move that much more
_KEPT = 256  # rows: with room for fewer, a store on a disk keeps none in memory


class Need(NamedTuple):
  """Memory that a model needs under any placement."""

  row: int
  """Bytes of a row and its row state."""
  dense: int
  """Bytes of the parameters and their state."""
  num_rows: int


class Sample(NamedTuple):
  """Batches on which placements are judged."""

  batches: list[Unique]
  popular: HotRows
  """All rows that another part of the sample looked up, most popular first."""
  look_ahead: int
  """Batches that a cache may look ahead."""
  first: int
  """Training batches that popularity was learned from."""

  @property
  def largest(self) -> int:
    """Unique rows of the largest batch."""
    return max(len(batch.rows) for batch in self.batches)


class Prediction(NamedTuple):
  """Means per step under a placement, and the memory that it takes."""

  placement: str
  policy: str
  rows: int
  """Rows that the device keeps."""
  hit_rate: float
  rows_loaded: float
  rows_stored: float
  bytes_moved: float
  """Both ways, once every slot was used, when each load stores a row."""
  device_bytes: float
  """Kept rows, two blocks of a batch's rows, parameters and their state."""
  host_bytes: float
  """Tables and the planner's maps."""


def predict(sample: Sample, need: Need, budget: int) -> Iterator[Prediction]:
  """Yields a prediction for every placement, eviction policy and capacity.

  The capacities are `SHARES` of all rows, and what fits `budget` bytes.
  """
  fixed = 2 * bucket(sample.largest) * need.row + need.dense

  def prediction(name: str, policy: str, rows: int) -> Prediction:
    if name == 'pinned':
      rows = min(rows, len(sample.popular.rows))
    way = _way(name, policy, rows, sample, need)
    moved = simulate(*way)
    on_host = 0 if name == 'resident' else need.row
    maps = {'cached': 12 + 4 * (policy != 'lru'), 'pinned': 4}.get(name, 0)
    return Prediction(
      *(name, policy, rows, *moved[:3]),
      bytes_moved=2 * moved.rows_loaded * need.row,
      device_bytes=rows * need.row + fixed,
      host_bytes=(on_host + maps) * need.num_rows,
    )

  yield prediction('resident', '', need.num_rows)
  # A capacity of 1 would mean a share: all rows.
  capacities = {max(2, round(share * need.num_rows)) for share in SHARES}
  fits = (budget - fixed) // need.row
  if 1 < fits < need.num_rows:
    capacities.add(fits)
  for rows in sorted(capacities):
    yield prediction('pinned', '', rows)
    for policy in EVICTIONS:
      yield prediction('cached', policy, rows)
  yield prediction('streamed', '', 0)


def _way(
  name: str, policy: str, rows: int, sample: Sample, need: Need
) -> tuple[Placement, list[Unique], int, HotRows]:
  """Returns the arguments of `simulate` for a placement."""
  hot, batches = sample.popular, sample.batches
  placement = PLACEMENTS.get(name) or cached(rows, policy, sample.look_ahead)
  if name == 'pinned':  # it keeps only its hot rows
    hot = hot_rows(hot.rows[:rows], need.num_rows)
    batches = [b._replace(hot=hot.places(b.rows)) for b in batches]
  return placement, batches, need.num_rows, hot


def recommend(predictions: list[Prediction], budget: int) -> Prediction:
  """Returns the placement that moves least of those that fit `budget` bytes.

  An earlier one wins if it moves at most 5 % more. Simpler placements and
  smaller caches come first in the list.

  Raises:
    UserError: none fits.
  """
  fitting = [p for p in predictions if p.device_bytes <= budget]
  if not fitting:
    raise UserError(
      'at least the rows of a batch must fit the device',
      got=f'{budget} bytes, needed {min(p.device_bytes for p in predictions)}',
      where='--device_bytes',
      hint='set a smaller batch size',
    )
  least = min(p.bytes_moved for p in fitting)
  return next(p for p in fitting if p.bytes_moved <= _WORTH * least)


class Tiers(NamedTuple):
  """Sizes of the memory and the disk below the device, and their use."""

  store: str
  """The key of `STORES` to use."""
  dram_bytes: int
  """Host memory for rows."""
  dram_rows: int
  disk_bytes: int
  """Size of the file once every row was written. 0 without a disk."""
  rows_read: float
  """Mean rows read from the disk per step."""
  read_by_lru: float
  """The same if no table were kept whole."""
  whole: tuple[str, ...]
  """Tables that memory has room for, each row of which would be used again
  sooner than what it takes the place of."""
  shares: dict[str, list[float]]
  """By tier, the share of each table's lookups that it answers."""
  uses: list[float]
  """Rows of each table that a step uses, a mean."""
  by_table: tuple[str, ...]
  """Tables that the device would hold if it held whole ones."""
  loads_by_table: float
  """Rows of the others that a step would use."""


def tiers_of(
  picked: Prediction,
  need: Need,
  curve: Curve,
  host_bytes: int,
  sample: Sample,
  sizes: Mapping[str, int],
  pinned: Curve,
) -> Tiers:
  """Returns the tiers that fit in `host_bytes` below a placement.

  Args:
    picked: the placement.
    need: what any placement needs.
    curve: that of LRU for all lookups, which estimates what the store's memory
      finds.
    host_bytes: memory of the host.
    sample: batches, of which the store gets what the device misses.
    sizes: rows of each table by name.
    pinned: the curve of the most popular rows, for what the device finds if the
      placement pins rows.
  """
  of_device = pinned if picked.placement == 'pinned' else curve
  on_device, _ = _hits(of_device, picked.rows)
  in_memory, whole = np.ones_like(on_device), tuple[str, ...]()
  if picked.host_bytes <= host_bytes:
    rows = 0 if picked.placement == 'resident' else need.num_rows
    kind, slot, on_disk = 'memory', need.row, 0
    read = by_lru = 0.0
  else:
    maps = picked.host_bytes + (MAP_BYTES - need.row) * need.num_rows
    slot = need.row + SLOT_BYTES
    rows = max(0, int((host_bytes - maps) // slot))
    kind = 'tiered' if rows >= _KEPT else 'file'
    rows = rows if kind == 'tiered' else 0
    hits, _ = _hits(curve, rows)
    in_memory = np.maximum(hits, on_device)
    on_disk = file_bytes(need.num_rows, need.row)
    whole, read, by_lru = whole_tables(picked, need, rows, sample, sizes)
  shares = {
    'device': on_device.tolist(),
    'memory': (in_memory - on_device).tolist(),
    'disk': (1 - in_memory).tolist(),
  }
  dram = rows * slot
  return Tiers(
    *(kind, dram, rows, on_disk, read, by_lru, whole, shares),
    *_whole_on_device(picked.rows, sample, sizes),
  )


def _whole_on_device(
  rows: int, sample: Sample, sizes: Mapping[str, int]
) -> tuple[list[float], tuple[str, ...], float]:
  """Fills that many rows with whole tables, by their uses per row.

  Returns:
    The rows of each table that a step uses, the tables, and the rows of the
    others that a step uses.
  """
  names, size = [*sizes], np.array([*sizes.values()])
  ends = np.cumsum(size)
  uses = np.zeros(len(size))
  for batch in sample.batches:
    of = np.searchsorted(ends, batch.rows, side='right')
    uses += np.bincount(of, minlength=len(size)) / len(sample.batches)
  kept = np.zeros(len(size), bool)
  for t in np.argsort(-uses / size, kind='stable'):
    if size[t] <= rows and uses[t]:
      kept[t], rows = True, rows - int(size[t])
  tables = tuple(names[t] for t in np.flatnonzero(kept))
  return uses.tolist(), tables, float(uses[~kept].sum())


def whole_tables(
  picked: Prediction,
  need: Need,
  rows: int,
  sample: Sample,
  sizes: Mapping[str, int],
) -> tuple[tuple[str, ...], float, float]:
  """Chooses tables that stay in the store's memory, by bandwidth and size.

  As in MTrainS, tables come in the order of their reads per row. Those that
  take up to 1, 1/2, ... 1/64 of the memory are tried, beside an LRU cache of
  the others. Rows that were never used before are not read, as their first
  values are computed.

  Args:
    picked: the placement, whose misses are looked up.
    need: what any placement needs.
    rows: what the memory has room for.
    sample: batches.
    sizes: rows of each table by name.

  Returns:
    The tables, the rows read per step, and those without such tables.
  """
  starts = np.cumsum([0, *sizes.values()])
  rate = min(1.0, FOLLOWED / max(len(sample.popular.rows), 1))
  reads = [*_missed(picked, sample, need)]
  of_tables = [np.searchsorted(starts, x, side='right') - 1 for x in reads]
  uses = sum(np.bincount(x, minlength=len(sizes)) for x in of_tables)
  order = np.argsort(-uses / np.diff(starts), kind='stable')
  taken = np.cumsum(np.diff(starts)[order])

  def read(count: int) -> float:
    kept = np.zeros(len(sizes), bool)
    kept[order[:count]] = True
    left = rows - (taken[count - 1] if count else 0)
    first = sample.popular.rows
    first = first[~kept[np.searchsorted(starts, first, side='right') - 1]]
    others = [
      _once(x[~kept[of]]) for x, of in zip(reads, of_tables, strict=True)
    ]
    capacities = np.array([left, max(left + 1, need.num_rows)])
    curve = lru_curve(others, starts, capacities, first=first, sample_rate=rate)
    return float(curve.loads[0] - curve.loads[1])

  by_lru, best, chosen = read(0), np.inf, 0
  counts = {
    int(np.searchsorted(taken, rows >> n, side='right')) for n in range(7)
  }
  for count in sorted(counts - {0, len(sizes)}):
    if (now := read(count)) < best:
      best, chosen = now, count
  if best >= _BETTER * by_lru:
    return (), by_lru, by_lru
  names = [*sizes]
  return tuple(names[t] for t in sorted(order[:chosen])), best, by_lru


def _missed(
  picked: Prediction, sample: Sample, need: Need
) -> Iterator[np.ndarray]:
  """Yields the rows that the device asks the store for, batch by batch."""
  placement, batches, num_rows, hot = _way(
    picked.placement, picked.policy, picked.rows, sample, need
  )
  state = placement.start(num_rows, hot, None)
  for step in range(len(batches)):
    upcoming = batches[step : step + 1 + placement.look_ahead]
    state, plan = placement.plan(state, upcoming)
    yield plan.rows[plan.load]


def _once(rows: np.ndarray) -> Unique:
  inverse = np.arange(len(rows), dtype=np.int32)
  return Unique(rows, inverse, np.ones_like(inverse))


def _hits(curve: Curve, rows: int) -> tuple[np.ndarray, float]:
  """Returns the share of each table's lookups that hit `rows` rows, and loads.

  The shares are float64[T], and the loads are a mean per batch.
  """
  at = int(np.searchsorted(curve.capacities, rows, side='right')) - 1
  if at < 0:
    return np.zeros(len(curve.lookups)), curve.rows_used
  shares = curve.hits[:, at] / np.maximum(curve.lookups, 1)
  return shares, float(curve.loads[at])
