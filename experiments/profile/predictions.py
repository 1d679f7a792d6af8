"""Predicts what a step moves under each placement, and recommends one.

A placement's plans are made as in training, so their counts are those of a run
over the same batches.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.placement import bucket, cached, EVICTIONS, PLACEMENTS
from slipstream_jax.placement.sizing import Curve, simulate
from slipstream_jax.selection.hot import hot_rows
from slipstream_jax.store.scratch import file_bytes
from slipstream_jax.store.tiered import MAP_BYTES, SLOT_BYTES
from slipstream_jax.types import HotRows, Unique

SHARES = (0.001, 0.01, 0.015, 0.05)
"""Capacities of caches, as shares of all rows."""
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
    hot, batches = sample.popular, sample.batches
    placement = PLACEMENTS.get(name) or cached(rows, policy, sample.look_ahead)
    if name == 'pinned':  # it keeps only its hot rows
      rows = min(rows, len(hot.rows))
      hot = hot_rows(hot.rows[:rows], need.num_rows)
      batches = [b._replace(hot=hot.places(b.rows)) for b in batches]
    moved = simulate(placement, batches, need.num_rows, hot)
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
  shares: dict[str, list[float]]
  """By tier, the share of each table's lookups that it answers."""


def tiers_of(
  picked: Prediction, need: Need, curve: Curve, host_bytes: int
) -> Tiers:
  """Returns the tiers that fit in `host_bytes` below a placement.

  Only what the device misses reaches the store. `curve`, that of LRU for all
  lookups, estimates what the store's memory finds.
  """
  on_device, _ = _hits(curve, picked.rows)
  in_memory = np.ones_like(on_device)
  if picked.host_bytes <= host_bytes:
    rows = 0 if picked.placement == 'resident' else need.num_rows
    kind, slot, on_disk, read = 'memory', need.row, 0, 0.0
  else:
    maps = picked.host_bytes + (MAP_BYTES - need.row) * need.num_rows
    slot = need.row + SLOT_BYTES
    rows = max(0, int((host_bytes - maps) // slot))
    kind = 'tiered' if rows >= _KEPT else 'file'
    rows = rows if kind == 'tiered' else 0
    hits, loads = _hits(curve, rows)
    in_memory = np.maximum(hits, on_device)
    on_disk = file_bytes(need.num_rows, need.row)
    read = min(picked.rows_loaded, loads)
  shares = {
    'device': on_device.tolist(),
    'memory': (in_memory - on_device).tolist(),
    'disk': (1 - in_memory).tolist(),
  }
  return Tiers(kind, rows * slot, rows, on_disk, read, shares)


def _hits(curve: Curve, rows: int) -> tuple[np.ndarray, float]:
  """Returns the share of each table's lookups that hit `rows` rows, and loads.

  The shares are float64[T], and the loads are a mean per batch.
  """
  at = int(np.searchsorted(curve.capacities, rows, side='right')) - 1
  if at < 0:
    return np.zeros(len(curve.lookups)), curve.rows_used
  shares = curve.hits[:, at] / np.maximum(curve.lookups, 1)
  return shares, float(curve.loads[at])
