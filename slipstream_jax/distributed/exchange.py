"""What devices exchange in a step: which rows, and where they come from.

Each device has a lane of rows and computes the examples of a slice, which
consists of equal parts. Rows go from the lanes to the slices, and gradients
come back. Where there are several replicas of all lanes, rows go to the slices
of their own replica alone, and replicas add the gradients that came back. That
is 2D parallelism, as in TorchRec.

Where each host has a tower of features (DMT), a device looks up its tower's
features for the slices of all devices that have its number on their hosts. So
rows stay within a host: they go from the lanes of a host to the slices of all,
each by way of the device there that has the slice's number.

All of it follows from the batch's unique rows alone, so every process finds the
same. Sizes are maxima over all lanes, slices or parts, so that shapes are equal
on all devices.

All places are such that a device reads a row, never writes one: a place past
the last row reads 0. So each sum has a fixed order.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, no_type_check

from jaxtyping import Int
import numpy as np

from slipstream_jax.distributed.lanes import Lanes
from slipstream_jax.hashing import kernel
from slipstream_jax.placement import bucket
from slipstream_jax.tables import Group
from slipstream_jax.types import Array, RowIds, Unique

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
  hosts: int = 1
  """H. A slice's rows go to the device of the lane's host that has its number.
  """

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
    pairs = self._pairs()
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

  def _pairs(self) -> Int[np.ndarray, 'R M M']:
    """Returns the rows of each lane that go to each device of its replica."""
    lanes, own = len(self.counts), len(self.counts) // self.hosts
    if self.hosts == 1:
      return self.counts.reshape(lanes, -1, lanes).swapaxes(0, 1)
    pairs = np.zeros((1, lanes, lanes), np.int64)
    of_hosts = self.counts.reshape(self.hosts, own, self.hosts, own).sum(2)
    for host, rows in enumerate(of_hosts):
      here = slice(host * own, (host + 1) * own)
      pairs[0, here, here] = rows
    return pairs


class Exchange(NamedTuple):
  """Places that W devices exchange for a batch of G parts and one group.

  A lane has P rows with padding, a pair of devices exchanges Q, and a part
  looks up S. With several hosts, each of H towers has a part of its own for
  each part of the batch, so that there are H * G in the order of the devices
  that look them up. A slice receives rows from L = M / H lanes.
  """

  wanted: Int[np.ndarray, 'W M Q']
  """For each device and slice of its replica, the places in the lane of the
  rows that the slice looks up. P: padding."""
  picked: Int[np.ndarray, 'HG S']
  """For each part, the places of its rows among the L * Q that its slice
  receives. L * Q: padding."""
  inverse: Int[np.ndarray, 'HG b K']
  """Place of each lookup of the part's examples among its rows, or -1."""
  returned: Int[np.ndarray, 'HG LQ']
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
    self, unique: RowIds, lanes: Int[np.ndarray, ' W_and_1'], hosts: int = 1
  ) -> Int[np.ndarray, 'W HLQ']:
    """Returns the rows that each device receives, i64. Padding has any.

    Args:
      unique: the batch's rows, ordered by lane.
      lanes: where each lane begins in them.
      hosts: H.
    """
    devices, count, most = self.wanted.shape
    at = self.wanted.reshape(-1, count, count, most) + lanes[:-1, None, None]
    known = np.append(unique, 0)
    received = known[np.minimum(at, len(unique))]
    # From the device of a host to that of the same host for a slice.
    shape = -1, hosts, count // hosts, hosts, count // hosts, most
    return (
      received.reshape(shape).transpose(0, 1, 4, 3, 2, 5).reshape(devices, -1)
    )


def exchange(
  unique: Unique,
  lanes: Lanes,
  slices: int,
  parts: int,
  columns: Sequence[Sequence[int]] | None = None,
) -> Exchange:
  """Returns what devices exchange for unique rows that are ordered by lane.

  Args:
    unique: from `in_lanes`.
    lanes: of their group. Their number, M, divides W.
    slices: W, which divides G.
    parts: G, which divides the batch.
    columns: of the lookups, for each host those of its tables' features.
      None: there is one host.
  """
  bounds = lanes.bounds(unique.rows)
  size = bucket(int(np.diff(bounds).max()))
  rows = len(unique.rows)
  examples, lookups = unique.inverse.shape
  share = examples // parts  # a step refuses what is beyond
  inverse = unique.inverse[: share * parts].reshape(parts, share, lookups)
  order = parts_of_devices(slices, lanes.hosts, parts).reshape(-1)
  if columns is not None:
    inverse = of_towers(inverse, columns, -1)
    of_tower = np.repeat(np.arange(lanes.hosts), parts)
    inverse = inverse[of_tower, order]
  of_part = np.full((parts, rows), -1, np.int32)
  own_inverse = np.empty(inverse.shape, np.int32)
  used = np.empty(len(inverse), np.int64)
  _find_parts(inverse, order, of_part, own_inverse, used)
  some = bucket(int(used.max()))
  # Whether each slice looks up each row.
  by_slice = np.empty((slices, rows), bool)
  counts = np.empty((lanes.total, slices), np.int64)
  _count(of_part, bounds, by_slice, counts)
  most = bucket(int(counts.max()), SMALLEST)
  own = lanes.total // lanes.hosts
  wanted = np.full((slices, lanes.total, most), size, np.int32)
  summed = np.full((slices, lanes.total, size), most, np.int32)
  picked = np.full((len(inverse), some), own * most, np.int32)
  returned = np.full((len(inverse), own * most), some, np.int32)
  # Where the parts of each host's tower are in the order of the devices.
  at = np.empty((lanes.hosts, parts), np.int64)
  at[np.repeat(np.arange(lanes.hosts), parts), order] = np.arange(len(order))
  _find_places(
    by_slice, of_part, bounds, at, wanted, summed, picked, returned, most
  )
  traffic = Traffic(counts, np.diff(bounds), lanes.hosts)
  return Exchange(wanted, picked, own_inverse, returned, summed, traffic)


def parts_of_devices(
  slices: int, hosts: int, parts: int
) -> Int[np.ndarray, 'W n']:
  """Returns the parts whose rows each device looks up: H * G / W of them."""
  of_slices = np.arange(parts).reshape(hosts, slices // hosts, -1)
  of_host = of_slices.swapaxes(0, 1).reshape(slices // hosts, -1)
  return np.tile(of_host, (hosts, 1))


def of_towers(
  values: Array, columns: Sequence[Sequence[int]], padding: Any
) -> Array:
  """Returns each tower's columns of an array [..., K], padded, [H, ..., k]."""
  most = max(1, *map(len, columns))
  of_all = np.full(
    (len(columns), *values.shape[:-1], most), padding, values.dtype
  )
  for tower, own in enumerate(columns):
    of_all[tower, ..., : len(own)] = values[..., [*own]]
  return of_all


def traffic(unique: Unique, lanes: Lanes, slices: int) -> Traffic:
  """Returns what devices exchange, as `exchange` does, without places.

  It takes so little time and memory that thousands of devices can be counted.
  """
  bounds = lanes.bounds(unique.rows)
  counts = np.zeros((lanes.total, slices), np.int64)
  share = len(unique.inverse) // slices
  _count_lookups(unique.inverse[: share * slices], bounds, counts)
  return Traffic(counts, np.diff(bounds), lanes.hosts)


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
  inverse: np.ndarray,
  order: np.ndarray,
  of_part: np.ndarray,
  out: np.ndarray,
  used: np.ndarray,
) -> None:
  """Numbers the rows of each part in the order of their first use there.

  A row is looked up by one tower alone.
  """
  for part in range(len(inverse)):
    count, own = 0, of_part[order[part]]
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
  at: np.ndarray,
  wanted: np.ndarray,
  summed: np.ndarray,
  picked: np.ndarray,
  returned: np.ndarray,
  most: int,
) -> None:
  slices, lanes = wanted.shape[:2]
  of_slice, of_host = len(of_part) // slices, lanes // len(at)
  for number in range(slices):
    for lane in range(lanes):
      # The device of the slice's replica that has the lane, and the slice's
      # number in its replica.
      device, own_slice = number - number % lanes + lane, number % lanes
      tower, first, count = lane // of_host, lane % of_host * most, 0
      for row in range(bounds[lane], bounds[lane + 1]):
        if not by_slice[number, row]:
          continue
        wanted[device, own_slice, count] = row - bounds[lane]
        summed[device, own_slice, row - bounds[lane]] = count
        place = first + count
        for part in range(number * of_slice, (number + 1) * of_slice):
          own = of_part[part, row]
          if own >= 0:
            there = at[tower, part]
            picked[there, own] = place
            returned[there, place] = own
        count += 1
