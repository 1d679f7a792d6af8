"""What a step would move under each placement, and which one to use."""

from collections.abc import Iterator
from typing import NamedTuple

from slipstream_jax.errors import UserError
from slipstream_jax.placement import (
  bucket,
  cached,
  EVICTIONS,
  Placement,
  PLACEMENTS,
)
from slipstream_jax.placement.sizing import simulate, SimulatedMoves
from slipstream_jax.selection.hot import hot_rows
from slipstream_jax.types import HotRows, Unique

SHARES = (0.001, 0.01, 0.015, 0.05)
"""Capacities of caches, as shares of all rows."""
POLICIES = tuple(EVICTIONS)
_WORTH = 1.05  # simpler placements may move that much more


class Sample(NamedTuple):
  """What placements are judged on."""

  batches: list[Unique]
  """The batches judged."""
  popular: HotRows
  """All rows that the other half looked up, most popular first."""
  largest: int
  """U of the largest batch."""
  look_ahead: int
  """Batches that a cache may know."""
  first: int
  """Batches of the data to train on that popularity was learned from."""


class Prediction(NamedTuple):
  """What a step would move under a placement, in the mean."""

  placement: str
  policy: str
  rows: int
  """That the device keeps."""
  hit_rate: float
  rows_loaded: float
  rows_stored: float
  bytes_moved: float
  """Both ways, once every slot has been used: then each load stores a row."""
  device_bytes: float
  """Kept rows, two blocks of a batch's rows, parameters and their state."""
  host_bytes: float
  """Tables and the planner's maps."""


class Need(NamedTuple):
  """Bytes that do not depend on the placement."""

  row: int
  """Of a row and its row state."""
  dense: int
  """Of parameters and their state."""
  num_rows: int


def predict(sample: Sample, need: Need, budget: int) -> Iterator[Prediction]:
  """Every placement, and every policy at every capacity, what fits included."""
  yield _prediction('resident', '', need.num_rows, sample, need)
  # One row would read as a share: all of them.
  capacities = {max(2, round(share * need.num_rows)) for share in SHARES}
  fits = (budget - _fixed_bytes(sample, need)) // need.row
  if 1 < fits < need.num_rows:
    capacities.add(fits)
  for rows in sorted(capacities):
    yield _prediction('pinned', '', rows, sample, need)
    for policy in POLICIES:
      yield _prediction('cached', policy, rows, sample, need)
  yield _prediction('streamed', '', 0, sample, need)


def _prediction(
  name: str, policy: str, rows: int, sample: Sample, need: Need
) -> Prediction:
  if name == 'pinned':
    rows = min(rows, len(sample.popular.rows))
  moved = _simulated(name, policy, rows, sample, need.num_rows)
  kept_on_host = 0 if name == 'resident' else need.num_rows
  maps = {'cached': 8 + 4 * (policy != 'lru') + 4, 'pinned': 4}.get(name, 0)
  return Prediction(
    name,
    policy,
    rows,
    moved.hit_rate,
    moved.rows_loaded,
    moved.rows_stored,
    2 * moved.rows_loaded * need.row,
    rows * need.row + _fixed_bytes(sample, need),
    kept_on_host * need.row + maps * need.num_rows,
  )


def _fixed_bytes(sample: Sample, need: Need) -> int:
  """On the device whatever the placement: blocks of a batch, parameters."""
  return 2 * bucket(sample.largest) * need.row + need.dense


def _simulated(
  name: str, policy: str, rows: int, sample: Sample, num_rows: int
) -> SimulatedMoves:
  hot, batches = sample.popular, sample.batches
  if name == 'pinned':  # its hot rows are all that it keeps
    hot = hot_rows(hot.rows[:rows], num_rows)
    batches = [b._replace(hot=hot.places(b.rows)) for b in batches]
  placement = _placement(name, policy, rows, sample.look_ahead)
  return simulate(placement, batches, num_rows, hot)


def _placement(name: str, policy: str, rows: int, ahead: int) -> Placement:
  return cached(rows, policy, ahead) if name == 'cached' else PLACEMENTS[name]


def recommend(predictions: list[Prediction], budget: int) -> Prediction:
  """The one to use: of those that fit, the least bytes moved per step.

  Simpler ones come first in the list, and win if they move little more; among
  caches that move alike, so does the smaller.
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
