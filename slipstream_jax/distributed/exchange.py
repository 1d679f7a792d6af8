"""What devices exchange in a step: which rows, and where they come from.

Each device has a lane of rows and computes the examples of a slice, which
consists of equal parts. Rows go from the lanes to the slices, and gradients
come back. Where there are several replicas of all lanes, rows go to the slices
of their own replica alone, and replicas add the gradients that came back. That
is 2D parallelism, as in TorchRec.

All of it follows from the batch's unique rows alone, so every process finds the
same. Sizes are maxima over all lanes, slices or parts, so that shapes are equal
on all devices.

All places are such that a device reads a row, never writes one: a place past
the last row reads 0. So each sum has a fixed order.
"""

from typing import NamedTuple, no_type_check

from jaxtyping import Int
import numpy as np

from slipstream_jax.distributed.lanes import bounds_of
from slipstream_jax.hashing import kernel
from slipstream_jax.placement import bucket
from slipstream_jax.tables import Group
from slipstream_jax.types import RowIds, Unique

EXCHANGES = {'float32': 4, 'bfloat16': 2}
"""Bytes of an element of a gradient that devices exchange, by its dtype. Rows
in f32 go in the same dtype, those in half precision as they are."""
SMALLEST = 64
"""Least rows that a pair of devices exchanges, with padding."""


class Traffic(NamedTuple):
  """Rows that W devices exchange, of which R replicas have M lanes each.

  Device r * M + m has lane m of replica r. Nothing is padded.
  """

  counts: Int[np.ndarray, 'M W']
  """Rows of each lane that each slice looks up."""
  used: Int[np.ndarray, ' M']
  """Rows of each lane that any slice looks up."""

  def sent(
    self, group: Group, element: int, within: int | None = None
  ) -> tuple[Int[np.ndarray, ' W'], Int[np.ndarray, ' W']]:
    """Returns the bytes that each device sends: rows and gradients of rows.

    The first are to devices of its own host, the second to those of others.

    Args:
      group: whose rows they are.
      element: bytes of an element of a gradient, from `EXCHANGES`.
      within: devices of a host, a power of two. None: all are on one host.
    """
    row, lanes = min(element, np.dtype(group.dtype).itemsize), len(self.counts)
    pairs = self.counts.reshape(lanes, -1, lanes).swapaxes(0, 1)  # [R, M, M]
    near = lanes if within is None else min(within, lanes)
    host = np.arange(lanes) // near
    here = host[:, None] == host
    of_hosts = []
    for others in (pairs * (here & ~np.eye(lanes, dtype=bool)), pairs * ~here):
      # A lane sends its rows, and a slice the gradients of what it got.
      of_hosts.append((others.sum(2) * row + others.sum(1) * element).ravel())
    # Replicas add their sums in pairs, then pairs of pairs, and so on.
    sums = np.tile(self.used, len(pairs)) * element
    times = (len(pairs) - 1).bit_length()
    inside = times if within is None else (within // lanes).bit_length() - 1
    inside = min(max(inside, 0), times)
    of_hosts[0] += inside * sums
    of_hosts[1] += (times - inside) * sums
    return group.dim * of_hosts[0], group.dim * of_hosts[1]


class Exchange(NamedTuple):
  """Places that W devices exchange for a batch of G parts and one group.

  A lane has P rows with padding, a pair of devices exchanges Q, and a part
  looks up S.
  """

  wanted: Int[np.ndarray, 'W M Q']
  """For each device and slice of its replica, the places in the lane of the
  rows that the slice looks up. P: padding."""
  picked: Int[np.ndarray, 'G S']
  """For each part, the places of its rows among the M * Q that its slice
  receives. M * Q: padding."""
  inverse: Int[np.ndarray, 'G b K']
  """Place of each lookup of the part's examples among its rows, or -1."""
  returned: Int[np.ndarray, 'G MQ']
  """For each part, the place among its rows of each row that its slice has
  received. S: the part does not look it up."""
  summed: Int[np.ndarray, 'W M P']
  """For each device and slice of its replica, the place among the rows
  exchanged of each of the lane's rows. Q: the slice does not look it up."""
  traffic: Traffic
  """The rows, without padding."""

  @property
  def size(self) -> int:
    """P, rows of a lane with padding."""
    return self.summed.shape[2]

  def rows(
    self, unique: RowIds, lanes: Int[np.ndarray, ' W_and_1']
  ) -> Int[np.ndarray, 'W MQ']:
    """Returns the rows that each slice receives, i64. Padding has any.

    Args:
      unique: the batch's rows, ordered by lane.
      lanes: where each lane begins in them.
    """
    shape = self.wanted.shape
    of_replicas = self.wanted.reshape(-1, shape[1], *shape[1:])
    at = of_replicas + lanes[:-1, None, None]
    known = np.append(unique, 0)
    received = known[np.minimum(at, len(unique))].swapaxes(1, 2)
    return received.reshape(len(self.wanted), -1)


def exchange(unique: Unique, lanes: int, slices: int, parts: int) -> Exchange:
  """Returns what devices exchange for unique rows that are ordered by lane.

  Args:
    unique: from `in_lanes`.
    lanes: M, which divides W.
    slices: W, which divides G.
    parts: G, which divides the batch.
  """
  bounds = bounds_of(unique.rows, lanes)
  size = bucket(int(np.diff(bounds).max()))
  rows = len(unique.rows)
  examples, lookups = unique.inverse.shape
  share = examples // parts  # a step refuses what is beyond
  inverse = unique.inverse[: share * parts].reshape(parts, share, lookups)
  of_part = np.full((parts, rows), -1, np.int32)
  own_inverse = np.empty(inverse.shape, np.int32)
  used = np.empty(parts, np.int64)
  _find_parts(inverse, of_part, own_inverse, used)
  some = bucket(int(used.max()))
  # Whether each slice looks up each row.
  by_slice = np.empty((slices, rows), bool)
  counts = np.empty((lanes, slices), np.int64)
  _count(of_part, bounds, by_slice, counts)
  most = bucket(int(counts.max()), SMALLEST)
  wanted = np.full((slices, lanes, most), size, np.int32)
  summed = np.full((slices, lanes, size), most, np.int32)
  picked = np.full((parts, some), lanes * most, np.int32)
  returned = np.full((parts, lanes * most), some, np.int32)
  _find_places(
    by_slice, of_part, bounds, wanted, summed, picked, returned, most
  )
  traffic = Traffic(counts, np.diff(bounds))
  return Exchange(wanted, picked, own_inverse, returned, summed, traffic)


def traffic(unique: Unique, lanes: int, slices: int) -> Traffic:
  """Returns what devices exchange, as `exchange` does, without places.

  It takes so little time and memory that thousands of devices can be counted.
  """
  bounds = bounds_of(unique.rows, lanes)
  counts = np.zeros((lanes, slices), np.int64)
  share = len(unique.inverse) // slices
  _count_lookups(unique.inverse[: share * slices], bounds, counts)
  return Traffic(counts, np.diff(bounds))


@kernel
@no_type_check
def _count_lookups(
  inverse: np.ndarray, bounds: np.ndarray, counts: np.ndarray
) -> None:
  lanes, slices = counts.shape
  share = len(inverse) // slices
  lane_of = np.empty(bounds[-1], np.int32)
  for lane in range(lanes):
    lane_of[bounds[lane] : bounds[lane + 1]] = lane
  last = np.full(bounds[-1], -1, np.int32)  # the last slice that looked it up
  for example in range(len(inverse)):
    number = example // share
    for column in range(inverse.shape[1]):
      row = inverse[example, column]
      if row >= 0 and last[row] != number:
        last[row] = number
        counts[lane_of[row], number] += 1


@kernel
@no_type_check
def _find_parts(
  inverse: np.ndarray, of_part: np.ndarray, out: np.ndarray, used: np.ndarray
) -> None:
  """Numbers the rows of each part in the order of their first use there."""
  for part in range(len(inverse)):
    count, own = 0, of_part[part]
    for example in range(inverse.shape[1]):
      for column in range(inverse.shape[2]):
        row = inverse[part, example, column]
        if row >= 0 and own[row] < 0:
          own[row] = count
          count += 1
        out[part, example, column] = own[row] if row >= 0 else -1
    used[part] = count


@kernel
@no_type_check
def _count(
  of_part: np.ndarray,
  bounds: np.ndarray,
  by_slice: np.ndarray,
  counts: np.ndarray,
) -> None:
  lanes, slices = counts.shape
  of_slice = len(of_part) // slices
  for number in range(slices):
    for lane in range(lanes):
      count = 0
      for row in range(bounds[lane], bounds[lane + 1]):
        some = False
        for part in range(number * of_slice, (number + 1) * of_slice):
          some |= of_part[part, row] >= 0
        by_slice[number, row] = some
        count += some
      counts[lane, number] = count


@kernel
@no_type_check
def _find_places(
  by_slice: np.ndarray,
  of_part: np.ndarray,
  bounds: np.ndarray,
  wanted: np.ndarray,
  summed: np.ndarray,
  picked: np.ndarray,
  returned: np.ndarray,
  most: int,
) -> None:
  slices, lanes = wanted.shape[:2]
  of_slice = len(of_part) // slices
  for number in range(slices):
    for lane in range(lanes):
      # The device of the slice's replica that has the lane, and the slice's
      # number in its replica.
      device, own_slice = number - number % lanes + lane, number % lanes
      count = 0
      for row in range(bounds[lane], bounds[lane + 1]):
        if not by_slice[number, row]:
          continue
        wanted[device, own_slice, count] = row - bounds[lane]
        summed[device, own_slice, row - bounds[lane]] = count
        place = lane * most + count
        for part in range(number * of_slice, (number + 1) * of_slice):
          own = of_part[part, row]
          if own >= 0:
            picked[part, own] = place
            returned[part, place] = own
        count += 1
