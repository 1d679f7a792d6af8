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

In two levels, a row goes once to each host that looks it up, to the device
there with its lane's number, and from there to the slices. Gradients are added
within a host before they leave it.

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
  """Hosts with towers. A slice's rows go to the device of the lane's host that
  has its number."""
  of_hosts: Int[np.ndarray, 'M RH'] | None = None
  """In two levels, rows of each lane that each host of each replica looks up.
  """

  def between_hosts(self, group: Group, element: int) -> int:
    """Returns the bytes of rows and gradients that go from host to host.

    They are 0 in one level, which knows of no hosts. `sent` has the arguments.
    """
    if self.of_hosts is None:
      return 0
    row = min(element, np.dtype(group.dtype).itemsize)
    rows = int(self._from_host_to_host().sum())
    return rows * group.dim * (row + element)

  def _from_host_to_host(self) -> Int[np.ndarray, 'R H L H']:
    """Returns the rows of each lane that go to each other host."""
    assert self.of_hosts is not None
    lanes, slices = self.counts.shape
    replicas = slices // lanes
    hosts = self.of_hosts.shape[1] // replicas
    rows = self.of_hosts.reshape(hosts, -1, replicas, hosts)
    others = ~np.eye(hosts, dtype=bool)[:, None, None]
    return (rows * others).transpose(2, 0, 1, 3)

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
    """Returns the rows that go from a device to another of its replica."""
    lanes, own = len(self.counts), len(self.counts) // self.hosts
    if self.of_hosts is not None:
      across = self._from_host_to_host()
      replicas, hosts, own, _ = across.shape
      # A row comes to the device of its lane's number, from any host.
      counts = self.counts.reshape(hosts, own, replicas, hosts, own).sum(0)
      pairs = np.zeros((replicas, hosts, own, hosts, own), np.int64)
      for i in range(own):
        pairs[:, :, i, :, i] = across[:, :, i]
      for host in range(hosts):
        pairs[:, host, :, host] += counts[:, :, host].swapaxes(0, 1)
      return pairs.reshape(replicas, lanes, lanes)
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

  In two levels, hosts have L = M / H devices, and a device gets F rows from
  each of the H that have its number. These, P = H * F, are its lane to the
  slices of its host, which are then all that the following arrays speak of.
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
  to_hosts: Int[np.ndarray, 'W H F'] | None = None
  """In two levels, for each device and host, the places in the lane of the rows
  that the host's slices look up. The lane's size: padding."""
  from_hosts: Int[np.ndarray, 'W H _P'] | None = None
  """For each device and host, the place among these of each of the lane's rows.
  F: the host does not look it up."""

  @property
  def size(self) -> int:
    """Rows of a lane with padding."""
    of_lanes = self.summed if self.from_hosts is None else self.from_hosts
    return of_lanes.shape[2]

  def held(
    self, unique: RowIds, lanes: Int[np.ndarray, ' W_and_1']
  ) -> Int[np.ndarray, 'W HF']:
    """Returns the rows that each device gets for its host, i64, as `rows`."""
    assert self.to_hosts is not None
    devices, hosts, most = self.to_hosts.shape
    own = (len(lanes) - 1) // hosts
    at = self.to_hosts.reshape(-1, len(lanes) - 1, hosts, most)
    known = np.append(unique, 0)
    sent = known[np.minimum(at + lanes[:-1, None, None], len(unique))]
    # From the device of a number on each host to that of the same number.
    sent = sent.reshape(-1, hosts, own, hosts, most)
    return sent.transpose(0, 3, 2, 1, 4).reshape(devices, -1)

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
    if self.to_hosts is not None:
      held = np.pad(self.held(unique, lanes), [(0, 0), (0, 1)])
      sent = np.take_along_axis(held[:, None], self.wanted, axis=2)
      sent = sent.reshape(-1, count, count, most).swapaxes(1, 2)
      return sent.reshape(devices, -1)
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
  hosts: int = 1,
) -> Exchange:
  """Returns what devices exchange for unique rows that are ordered by lane.

  Args:
    unique: from `in_lanes`.
    lanes: of their group. Their number, M, divides W.
    slices: W, which divides G.
    parts: G, which divides the batch.
    columns: of the lookups, for each host those of its tables' features.
      None: there is one host.
    hosts: H of a replica, to each of which a row goes once. Without `columns`.
      1: rows go to slices.
  """
  inverse, listed, used, at = _of_parts(unique, lanes, slices, parts, columns)
  bounds, lines = lanes.bounds(unique.rows), (listed, used)
  if columns is not None:
    in_order = at.T.reshape(-1)
    lines = listed[in_order], used[in_order]
  crossing = _traffic(*lines, bounds, lanes, slices, 1 if columns else hosts)
  size, some = bucket(int(crossing.used.max())), bucket(int(used.max()))
  own, held, counts = lanes.total, size, crossing.counts
  to_hosts = from_hosts = None
  if crossing.of_hosts is not None:
    own //= hosts
    of_host = bucket(int(crossing.of_hosts.max()), SMALLEST)
    to_hosts = np.full((slices, hosts, of_host), size, np.int32)
    from_hosts = np.full((slices, hosts, size), of_host, np.int32)
    held, counts = hosts * of_host, counts.reshape(hosts, own, -1).sum(0)
  most = bucket(int(counts.max()), SMALLEST)
  wanted = np.full((slices, own, most), held, np.int32)
  summed = np.full((slices, own, held), most, np.int32)
  received = own // lanes.hosts * most
  picked = np.full((len(used), some), received, np.int32)
  returned = np.full((len(used), received), some, np.int32)
  of_lane = np.arange(bounds[-1]) - np.repeat(bounds[:-1], np.diff(bounds))
  known = listed, used, at, _lane_of(bounds)
  places = of_lane[None]
  if to_hosts is not None and from_hosts is not None:
    places = np.empty((slices // own, len(of_lane)), np.int64)
    _find_hosts(*known, of_lane, own, to_hosts, from_hosts, places)
  _find_places(*known, places, wanted, summed, picked, returned)
  return Exchange(
    wanted, picked, inverse, returned, summed, crossing, to_hosts, from_hosts
  )


def _of_parts(
  unique: Unique,
  lanes: Lanes,
  slices: int,
  parts: int,
  columns: Sequence[Sequence[int]] | None,
) -> tuple[np.ndarray, ...]:
  """Returns what each part looks up. `exchange` has the arguments.

  Returns:
    `Exchange.inverse`, the rows of each part, the number of them, and where the
    parts of each host's tower are in the order of the devices.
  """
  examples, lookups = unique.inverse.shape
  share = examples // parts  # a step refuses what is beyond
  inverse = unique.inverse[: share * parts].reshape(parts, share, lookups)
  order = parts_of_devices(slices, lanes.hosts, parts).reshape(-1)
  tower = np.repeat(np.arange(lanes.hosts), parts)
  if columns is not None:
    inverse = of_towers(inverse, columns, -1)[tower, order]
  own_inverse, listed = np.empty((2, *inverse.shape), np.int32)
  used = np.empty(len(inverse), np.int64)
  _find_parts(inverse, len(unique.rows), own_inverse, listed, used)
  at = np.empty((lanes.hosts, parts), np.int64)
  at[tower, order] = np.arange(len(order))
  return own_inverse, listed.reshape(len(listed), -1), used, at


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


def traffic(
  unique: Unique, lanes: Lanes, slices: int, hosts: int = 1
) -> Traffic:
  """Returns what devices exchange, as `exchange` does, without places.

  It takes so little time and memory that thousands of devices can be counted.
  """
  share = len(unique.inverse) // slices
  inverse = unique.inverse[: share * slices]
  used = np.full(len(inverse), inverse.shape[1])
  bounds = lanes.bounds(unique.rows)
  return _traffic(inverse, used, bounds, lanes, slices, hosts)


def _traffic(
  listed: Int[np.ndarray, 'n k'],
  used: Int[np.ndarray, ' n'],
  bounds: Int[np.ndarray, ' W_and_1'],
  lanes: Lanes,
  slices: int,
  hosts: int,
) -> Traffic:
  """Returns what devices exchange, given the rows of parts of each slice."""
  lane_of = _lane_of(bounds)

  def counted(among: int) -> np.ndarray:
    counts = np.zeros((lanes.total, among), np.int64)
    _count(listed, used, lane_of, counts)
    return counts

  of_hosts = None
  if lanes.hosts == 1 < hosts:
    of_hosts = counted(slices * hosts // lanes.total)
  return Traffic(counted(slices), np.diff(bounds), lanes.hosts, of_hosts)


@kernel
@no_type_check
def _lane_of(bounds: np.ndarray) -> np.ndarray:
  """Returns the lane of each row, which are ordered by lane, i32[U]."""
  lanes = np.empty(bounds[-1], np.int32)
  for lane in range(len(bounds) - 1):
    lanes[bounds[lane] : bounds[lane + 1]] = lane
  return lanes


@kernel
@no_type_check
def _count(
  listed: np.ndarray, used: np.ndarray, lane_of: np.ndarray, counts: np.ndarray
) -> None:
  """Counts the rows of each lane among those of each slice's parts."""
  share = len(listed) // counts.shape[1]
  last = np.full(len(lane_of), -1, np.int32)  # slice that looked it up
  for line in range(len(listed)):
    number = line // share
    for u in range(used[line]):
      row = listed[line, u]
      if row >= 0 and last[row] != number:
        last[row] = number
        counts[lane_of[row], number] += 1


@kernel
@no_type_check
def _find_parts(
  inverse: np.ndarray,
  rows: int,
  out: np.ndarray,
  listed: np.ndarray,
  used: np.ndarray,
) -> None:
  """Lists the rows of each part in the order of their first use there.

  Each lookup gets the number of its row among them.
  """
  last, number = np.full(rows, -1, np.int32), np.empty(rows, np.int32)
  for part in range(len(inverse)):
    count, own = 0, listed[part].reshape(-1)
    for example in range(inverse.shape[1]):
      for column in range(inverse.shape[2]):
        row = inverse[part, example, column]
        if row >= 0 and last[row] != part:
          last[row], number[row], own[count] = part, count, row
          count += 1
        out[part, example, column] = number[row] if row >= 0 else -1
    used[part] = count


@kernel
@no_type_check
def _find_hosts(
  listed: np.ndarray,
  used: np.ndarray,
  at: np.ndarray,
  lane_of: np.ndarray,
  of_lane: np.ndarray,
  peers: int,
  to_hosts: np.ndarray,
  from_hosts: np.ndarray,
  places: np.ndarray,
) -> None:
  """Sends each row to the hosts that look it up, and finds its place there."""
  hosts, most = to_hosts.shape[1:]
  lanes, units = hosts * peers, len(places)
  of_unit = at.shape[1] // units
  last, count = np.full(len(lane_of), -1, np.int32), np.empty(lanes, np.int32)
  for unit in range(units):
    replica, host = unit // hosts, unit % hosts
    count[:] = 0
    for part in range(unit * of_unit, (unit + 1) * of_unit):
      for u in range(used[part]):
        row = listed[part, u]
        if last[row] == unit:
          continue
        last[row], lane = unit, lane_of[row]
        device, place = replica * lanes + lane, count[lane]
        to_hosts[device, host, place] = of_lane[row]
        from_hosts[device, host, of_lane[row]] = place
        places[unit, row] = lane // peers * most + place
        count[lane] += 1


@kernel
@no_type_check
def _find_places(
  listed: np.ndarray,
  used: np.ndarray,
  at: np.ndarray,
  lane_of: np.ndarray,
  places: np.ndarray,
  wanted: np.ndarray,
  summed: np.ndarray,
  picked: np.ndarray,
  returned: np.ndarray,
) -> None:
  """Sends each row to the slices that look it up, and from there to parts."""
  slices, peers, most = wanted.shape
  of_slice, of_host = at.shape[1] // slices, peers // len(at)
  rows = len(lane_of)
  last, received = np.full(rows, -1, np.int32), np.empty(rows, np.int32)
  count = np.empty(peers, np.int32)
  for number in range(slices):
    # The slice's replica, or host in two levels, and its number there.
    unit, own_slice = number // peers, number % peers
    held = places[unit % len(places)]
    count[:] = 0
    for part in range(number * of_slice, (number + 1) * of_slice):
      for there in at[:, part]:
        for u in range(used[there]):
          row = listed[there, u]
          peer = lane_of[row] % peers
          if last[row] != number:
            last[row], place = number, count[peer]
            wanted[unit * peers + peer, own_slice, place] = held[row]
            summed[unit * peers + peer, own_slice, held[row]] = place
            received[row] = peer % of_host * most + place
            count[peer] += 1
          picked[there, u] = received[row]
          returned[there, received[row]] = u
